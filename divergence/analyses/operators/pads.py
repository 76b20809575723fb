"""Rows of pads in a batch's results: what stands there is no result.

A pad's query sees no key, and what attention makes of none is any kernel's own choice: a fused one
gives zeros, products and a softmax the mean of all values. Behind it the pads' rows are as far
apart as two numbers can be, on two correct machines. So they are cleared before anything is
measured, where the axes tell which rows they are: (B, T, ...), (B, ..., T, ...), (B N, ..., T, ...)
and (B T, ...), with T the padded length. Of scores both axes are cleared.

Where the axes do not tell, a result is not judged once pads are apart (further than rounding takes
numbers), and no operator is blamed to which such a result leads. Decode steps have no pads: what
their keys and values hold of them comes from before attention.
"""

from __future__ import annotations

import torch

from divergence.comparison.calls.graph import Forward
from divergence.run.manifest import Manifest

__all__ = ["Pads"]

_APART = 16  # ulp of the coarser dtype, relative L2: rounding alone leaves pads nearer


class Pads:
    """Of one forward. ``rows``: (B T,) where the pads are, None where it has none; ``apart``: were
    pads seen that the sides do not share?"""

    def __init__(self, manifest: Manifest, forward: Forward) -> None:
        first, step = forward
        self.apart = False
        self._grid = None if step else manifest.tokens.pads(first)  # (B, T)

    @property
    def rows(self) -> torch.Tensor | None:
        return None if self._grid is None else self._grid.reshape(-1)

    def mask(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Where a result of this shape holds pads, to be broadcast over it; None where its axes do
        not tell."""
        assert self._grid is not None
        batch, length = self._grid.shape
        leading = shape[0] if shape else 0
        axes = [axis for axis in range(1, len(shape)) if shape[axis] == length]
        if leading == batch * length and not axes:
            return self._grid.reshape(-1, *[1] * (len(shape) - 1))
        if not leading or leading % batch or not axes or leading == batch * length:
            return None
        where = torch.zeros([1] * len(shape), dtype=torch.bool)
        rows = self._grid.repeat_interleave(leading // batch, 0)
        for axis in axes:
            where = where | rows.reshape(
                [leading, *(length if axis == other else 1 for other in range(1, len(shape)))]
            )
        return where

    def blank(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result with its pads set to 0, where its axes tell which they are."""
        where = None if self._grid is None else self.mask(tuple(tensor.shape))
        return tensor if where is None else tensor.masked_fill(where, 0)

    def cleared(
        self, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """The reference's, the candidate's and the right result of the ``shape`` with pads set to
        0; None where they cannot be judged, as pads may be among them."""
        if self._grid is None:
            return a, b, truth
        where = self.mask(shape)
        if where is None:
            return None if self.apart else (a, b, truth)
        where = where.expand(shape)
        self.apart = self.apart or _are_apart(where, a, b)
        return (
            _without(where, a), _without(where, b),
            None if truth is None else _without(where, truth),
        )  # fmt: skip


def _without(where: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(where.shape).masked_fill(where, 0).reshape(tensor.shape)


def _are_apart(where: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do the pads' values differ by more than rounding? Codes do not tell."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return False
    x, y = (t.reshape(where.shape)[where].double() for t in (a, b))
    both = x.isfinite() & y.isfinite()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return True
    x, y = x[both], y[both]
    norm, gap = max(float(x.norm()), float(y.norm())), float((x - y).norm())
    return gap > _APART * max(torch.finfo(t.dtype).eps for t in (a, b)) * norm

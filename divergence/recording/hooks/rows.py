"""Several decode steps in one forward: what each of them would have given alone.

Where a step alone gives one row, a forward of ``count`` steps gives ``count`` rows, (B, 1, D) and
(B, count, D); and where a step attends to the tokens up to its own, (B, H, 1, past + 1), all attend
to the last one's, (B, H, count, past + count), masked. Which axis is which is told by the shapes of
the first step, made alone. A causal mask that a step alone does not have is left out.

Nothing is taken on trust: the first and the last step are also made alone, and must agree in sites,
their order, shapes, dtypes and values. Float64 rounds at 2^-53 and float32, the finest dtype that a
truth is held against, at 2^-24; what differs by more than 2^-30 is another function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from divergence.recording.hooks.sink import Anchor
from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["HeldSink", "Rows", "agree"]

AGREEMENT = 2**-30
"""Relative L2 up to which two float64 results are the same."""


class HeldSink:
    """Keeps what one forward gave, by site and in order."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, item: CapturedTensor, *, site: str, **_: Any) -> None:
        assert item.tensor is not None  # a copy of every byte was kept
        self.tensors[site] = item.tensor

    @property
    def num_bytes(self) -> int:
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())


class Rows:
    """``count`` steps in one forward, of a batch that had ``past`` tokens before."""

    def __init__(self, count: int, *, batch: int, past: int) -> None:
        self._count, self._batch, self._past = count, batch, past
        self.anchored = True
        """Whether each input was recorded as one row in every step, or in none."""

    def of(self, anchor: Anchor) -> Anchor:
        """An Anchor for one forward of all steps."""

        def together(sample: int, step: int, site: str, own: torch.Tensor) -> torch.Tensor | None:
            rows = [anchor(sample, step + number, site, own) for number in range(self._count)]
            held = [row for row in rows if row is not None]
            if not held:
                return None
            shape = held[0].shape
            alike = len(held) == self._count and all(row.shape == shape for row in held)
            if not alike or len(shape) < 2 or shape[1] != 1:
                self.anchored = False
                return None
            return torch.cat(held, dim=1)

        return together

    def cut(
        self,
        whole: Mapping[str, torch.Tensor],
        first: Mapping[str, torch.Tensor],
        last: Mapping[str, torch.Tensor],
    ) -> list[dict[str, torch.Tensor]] | None:
        """What each step would have given alone, by site. None if ``first`` and ``last``, which
        were made alone, are not what is cut for them."""
        sites = list(first)
        if list(last) != sites or [site for site in whole if site in first] != sites:
            return None
        steps: list[dict[str, torch.Tensor]] = [{} for _ in range(self._count)]
        known: dict[tuple[int, torch.Size], list[torch.Tensor]] = {}
        for site, alone in first.items():
            key = id(whole[site]), alone.shape  # what passes unchanged is cut, and kept, once
            parts = known.get(key) or self._parts(whole[site], alone.shape)
            if not (parts and agree(parts[0], alone) and agree(parts[-1], last[site])):
                return None
            known[key] = parts
            for step, part in zip(steps, parts, strict=True):
                step[site] = part
        return steps

    def _parts(self, whole: torch.Tensor, alone: Sequence[int]) -> list[torch.Tensor]:
        """One a step; empty where the shapes do not tell how to cut."""
        count, past = self._count, self._past
        if whole.ndim != len(alone):
            return []
        parts = [whole] * count
        for axis, (size, single) in enumerate(zip(whole.shape, alone, strict=True)):
            if size == single:
                continue
            if (size, single) == (count, 1):
                parts = [part.narrow(axis, n, 1) for n, part in enumerate(parts)]
            elif (size, single) == (past + count, past + 1):
                parts = [part.narrow(axis, 0, past + 1 + n) for n, part in enumerate(parts)]
            elif (size, single) == (self._batch * count, self._batch):  # rows of the whole batch
                split = (self._batch, count)
                parts = [
                    part.unflatten(axis, split).select(axis + 1, n) for n, part in enumerate(parts)
                ]
            else:
                return []
        return parts


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, or float64 within rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if a.dtype not in (torch.float64, torch.complex128):
        return False
    distance, size = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b)
    return bool(distance <= AGREEMENT * size)

"""Shapes, dtypes and distributions, and how an operator's inputs are drawn from them.

Rows of ``decode`` (one token), ``odd`` (7 × 129: no multiple of any vector width) and
``prefill``; ``strided`` inputs are columns cut out of a wider tensor, as q, k and v are out of one
projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from divergence.ops.suite.definition import Arguments, Case
from divergence.ops.suite.values import FLOATS, Values, draw, integers, normal, to_tensor

__all__ = ["PLAN", "ROWS", "Plan", "Source", "cases_of"]

ROWS: dict[str, tuple[int, ...]] = {"decode": (1, 1024), "odd": (7, 129), "prefill": (64, 512)}

Plan = Sequence[tuple[str, Values]]
"""(shape, distribution) of each case; a shape may end in ``.strided``."""

PLAN: Plan = (
    ("decode", "normal"),
    ("decode", "outliers"),
    ("odd", "normal"),
    ("odd", "outliers"),
    ("odd", "subnormals"),
    ("odd", "cancelling"),
    ("odd", "equal"),
    ("odd.strided", "normal"),
    ("prefill", "normal"),
    ("prefill", "outliers"),
)

_QUICK_DTYPES = ("float32", "bfloat16")
_SLOW_SHAPES = ("prefill", "long", "large_k")


@dataclass(frozen=True, slots=True)
class Source:
    """Draws one case's tensors. A tensor's values depend on its name, its shape and the
    distribution alone, so operators share them (and a run stores them once)."""

    dtype: str
    values: Values
    strided: bool = False

    def main(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, axis: int = -1
    ) -> torch.Tensor:
        """The tensor that has the case's distribution. ``scale``: a power of two, or the tensor
        keeps more than 24 bits before it is rounded."""
        x = draw(name, shape, values=self.values, dtype=self.dtype, axis=axis)
        tensor = to_tensor(x * scale, self.dtype)
        return cut_out(tensor) if self.strided else tensor

    def plain(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        scale: float = 1.0,
        mean: float = 0.0,
        dtype: str | None = None,
    ) -> torch.Tensor:
        """A contiguous tensor of normal values: weights, tables, the other operand."""
        return to_tensor(normal(name, shape) * scale + mean, dtype or self.dtype)

    def paired(self, name: str, shape: tuple[int, ...], *, scale: float = 1.0) -> torch.Tensor:
        """Normal values; equal in pairs along the last axis where the other operand cancels."""
        x = normal(name, shape)
        if self.values == "cancelling":
            x = x.copy()
            pairs = shape[-1] // 2 * 2
            x[..., 1:pairs:2] = x[..., 0:pairs:2]
        return to_tensor(x * scale, self.dtype)

    def indices(self, name: str, shape: tuple[int, ...], high: int) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(integers(name, shape, 0, high)))


def cut_out(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as columns of a wider tensor: not contiguous."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def cases_of(
    build: Callable[[Source, tuple[int, ...]], Arguments],
    *,
    shapes: Mapping[str, tuple[int, ...]] = ROWS,
    plan: Plan = PLAN,
    dtypes: Sequence[str] = FLOATS,
    suffix: str = "",
) -> Callable[[], Iterator[Case]]:
    """Cases ``DTYPE.SHAPE.DISTRIBUTION[.SUFFIX]`` for every dtype and entry of ``plan``.

    ``build(source, shape)`` makes the arguments.
    """

    def cases() -> Iterator[Case]:
        for dtype in dtypes:
            for place, values in plan:
                shape, _, strided = place.partition(".")
                source = Source(dtype, values, bool(strided))
                yield Case(
                    name=f"{dtype}.{place}.{values}" + (f".{suffix}" if suffix else ""),
                    make=partial(build, source, shapes[shape]),
                    quick=dtype in _QUICK_DTYPES and shape not in _SLOW_SHAPES,
                )

    return cases

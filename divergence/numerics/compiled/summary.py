"""A tensor's summary in one compiled pass; definitions: divergence.numerics.summaries.summary.

Squares are float64, so those of 16- and 32-bit values cannot leave the range; whether those of
float64 values did is for the caller to see from the largest magnitude.
"""

from __future__ import annotations

import numpy as np

from divergence.numerics.compiled.numbers import (
    add_if,
    jit,
    larger,
    magnitude,
    number,
    sign_of_order,
)
from divergence.numerics.compiled.sums import stored
from divergence.numerics.pairs.blocks import Grid

__all__ = ["Totals", "totals_of"]

_RUN = 4096
_INF = 0x7FF0000000000000


@jit
def _totals(values: np.ndarray, sums: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> None:
    """``sums``: Σx, Σx². ``ends``: smallest and largest, as bits in their order. ``counts``:
    finite, nan, +inf, -inf, zero."""
    for start in range(0, len(values), _RUN):
        stop = min(start + _RUN, len(values))
        run = values[start:stop]
        total = squares = 0.0
        zeros = np.int64(0)
        low = high = sign_of_order(number(run[0]))
        most = np.int64(0)
        for j in range(stop - start):
            x = number(run[j])
            order, size = sign_of_order(x), magnitude(x)
            total += x
            squares += x * x
            high = larger(high, order)
            low = ~larger(~low, ~order)
            most = larger(most, size)
            zeros = add_if(zeros, size == 0)
        if most < _INF:
            sums[0] += total
            sums[1] += squares
            ends[0], ends[1] = min(ends[0], low), max(ends[1], high)
            counts[0] += stop - start
            counts[4] += zeros
            continue
        for j in range(stop - start):
            x = number(run[j])
            order, size = sign_of_order(x), magnitude(x)
            if size > _INF:
                counts[1] += 1
            elif size == _INF:
                counts[2 if order > 0 else 3] += 1
            else:
                sums[0] += x
                sums[1] += x * x
                ends[0], ends[1] = min(ends[0], order), max(ends[1], order)
                counts[0] += 1
                counts[4] += size == 0


@jit
def _row_totals(values: np.ndarray, sums: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> None:
    for i in range(values.shape[0]):
        _totals(values[i], sums[i], ends[i], counts[i])


class Totals:
    """Σx, Σx², smallest and largest of what is finite, and the counts."""

    __slots__ = (
        "count", "high", "low", "num_nan", "num_neginf", "num_posinf", "num_zero", "squares",
        "total",
    )  # fmt: skip

    def __init__(self, sums: list[float], ends: list[float], counts: list[int]) -> None:
        self.total, self.squares = sums
        self.low, self.high = ends
        self.count, self.num_nan, self.num_posinf, self.num_neginf, self.num_zero = counts


def totals_of(grid: Grid) -> list[Totals]:
    """Of each row; the grid must be readable (numerics.kernels)."""
    count = grid.num_rows
    sums, counts = np.zeros((count, 2)), np.zeros((count, 5), np.int64)
    ends = np.tile(np.array([2**63 - 1, -(2**63)]), (count, 1))
    _row_totals(stored(grid), sums, ends, counts)
    flipped = np.where(ends < 0, ends ^ np.int64(2**63 - 1), ends).view(np.float64) + 0.0
    rows = zip(sums.tolist(), flipped.tolist(), counts.tolist(), strict=True)
    return [Totals(*row) for row in rows]

"""A tensor's summary, device digest and sketch, each in one compiled pass; definitions:
divergence.numerics.summaries.

The summary's squares are float64, so those of 16- and 32-bit values cannot leave the range; whether
those of float64 values did is for the caller to see from the largest magnitude.

The sketch's signed features go through a buffer of one row: added up as they are widened, they
would wait for one another. A row that holds a nan or inf is read a second time, those counting as
0.
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

__all__ = ["Totals", "chunk_sums", "projections_of", "totals_of"]


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


@jit
def _add_products(words: np.ndarray, multipliers: np.ndarray, sums: np.ndarray) -> None:
    """Adds to ``sums`` (chunks, 2), modulo 2^64. ``words``: int32, the same for both sums."""
    size = multipliers.shape[1]
    for chunk in range(sums.shape[0]):
        start = chunk * size
        first, second = np.int64(0), np.int64(0)
        for i in range(min(size, len(words) - start)):
            word = np.int64(words[start + i])
            first += multipliers[0, i] * word
            second += multipliers[1, i] * word
        sums[chunk, 0] += first
        sums[chunk, 1] += second


def chunk_sums(words: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """Both sums of each chunk of ``words`` (int32), int64 (chunks, 2). ``multipliers``: int64
    (2, words in a chunk)."""
    sums = np.zeros((-(-len(words) // multipliers.shape[1]), 2), dtype=np.int64)
    _add_products(words, multipliers, sums)
    return sums


_INF = 0x7FF0000000000000


@jit
def _project_rows(
    values: np.ndarray,
    sigma: np.ndarray,
    tau: np.ndarray,
    turns: np.ndarray,
    sums: np.ndarray,
    squares: np.ndarray,
    pooled: np.ndarray,
) -> None:
    """Adds to ``sums`` (rows, k) and ``pooled`` (blocks, K or 0); sets ``squares`` (rows,)."""
    num_cols, k, num_pooled = values.shape[1], sums.shape[1], pooled.shape[1]
    each = values.shape[0] // max(1, pooled.shape[0])
    width = max(k, num_pooled)
    signed, wide = np.empty(num_cols), np.empty(width)
    for row in range(values.shape[0]):
        row_values = values[row]
        total, most = 0.0, np.int64(0)
        for j in range(num_cols):
            x = number(row_values[j])
            total += x * x
            most = larger(most, magnitude(x))
        for j in range(num_cols):  # a loop of its own: the compiler takes eight at a time in each
            signed[j] = sigma[j] * number(row_values[j])
        if most >= _INF:
            total = 0.0
            for j in range(num_cols):
                x = number(row_values[j])
                if magnitude(x) >= _INF:
                    x = 0.0
                signed[j] = sigma[j] * x
                total += x * x
        squares[row] = total
        wide[:] = 0.0
        at = 0
        for group in range(num_cols // k):
            sign, there = tau[row, group], wide[at : at + k]
            for place in range(k):
                there[place] += sign * signed[group * k + place]
            at = at + k if at + k < width else 0
        for j in range(num_cols // k * k, num_cols):
            wide[j % width] += tau[row, num_cols // k] * signed[j]
        for group in range(width // k):
            for place in range(k):
                sums[row, place] += wide[group * k + place]
        if num_pooled:  # views: an index that may be negative keeps loops from being vector code
            turn, total = turns[row], pooled[row // each]
            head, tail, over = total[turn:], total[:turn], wide[num_pooled - turn :]
            for place in range(len(head)):
                head[place] += wide[place]
            for place in range(len(tail)):
                tail[place] += over[place]


def projections_of(
    grid: Grid,
    sigma: np.ndarray,
    tau: np.ndarray,
    k: int,
    turns: np.ndarray | None = None,
    pooled: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(projections (rows, k), sums of squares (rows,)) in float64. ``sigma``: ±1 by feature,
    ``tau``: ±1 by row and group, both float64. ``pooled`` (blocks, K): a row's sums of K buckets
    are added to its block's, by its number in ``turns`` (int64, below K) farther on. The grid must
    be readable (numerics.kernels)."""
    sums, squares = np.zeros((grid.num_rows, k)), np.zeros(grid.num_rows)
    if turns is None or pooled is None:
        turns, pooled = _NO_TURNS, _NOT_POOLED
    _project_rows(stored(grid), sigma, tau, turns, sums, squares, pooled)
    return sums, squares


_NO_TURNS, _NOT_POOLED = np.zeros(0, np.int64), np.zeros((1, 0))

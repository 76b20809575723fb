"""The sketch of a tensor's rows in one compiled pass; definitions: numerics.summaries.sketch.

Signed features go through a buffer of one row: added up as they are widened, they would wait for
one another. A row that holds a nan or inf is read a second time, those counting as 0.
"""

from __future__ import annotations

import numpy as np

from divergence.numerics.compiled.numbers import jit, larger, magnitude, number
from divergence.numerics.compiled.sums import stored
from divergence.numerics.pairs.blocks import Grid

__all__ = ["projections_of"]

_INF = 0x7FF0000000000000


@jit
def _project_rows(
    values: np.ndarray, sigma: np.ndarray, tau: np.ndarray, sums: np.ndarray, squares: np.ndarray
) -> None:
    """Adds to ``sums`` (rows, k) and ``squares`` (rows,)."""
    num_cols, k = values.shape[1], sums.shape[1]
    signed = np.empty(num_cols)
    for row in range(values.shape[0]):
        one = values[row]
        total, most = 0.0, np.int64(0)
        for j in range(num_cols):
            x = number(one[j])
            total += x * x
            most = larger(most, magnitude(x))
        for j in range(num_cols):  # a loop of its own: the compiler takes eight at a time in each
            signed[j] = sigma[j] * number(one[j])
        if most >= _INF:
            total = 0.0
            for j in range(num_cols):
                x = number(one[j])
                if magnitude(x) >= _INF:
                    x = 0.0
                signed[j] = sigma[j] * x
                total += x * x
        squares[row] = total
        whole = num_cols // k
        for group in range(whole):
            sign = tau[row, group]
            for place in range(k):
                sums[row, place] += sign * signed[group * k + place]
        for j in range(whole * k, num_cols):
            sums[row, j - whole * k] += tau[row, whole] * signed[j]


def projections_of(
    grid: Grid, sigma: np.ndarray, tau: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """(projections (rows, k), sums of squares (rows,)) in float64. ``sigma``: ±1 by feature,
    ``tau``: ±1 by row and group, both float64. The grid must be readable (numerics.kernels)."""
    sums, squares = np.zeros((grid.num_rows, k)), np.zeros(grid.num_rows)
    _project_rows(stored(grid), sigma, tau, sums, squares)
    return sums, squares

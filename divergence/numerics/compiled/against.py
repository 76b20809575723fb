"""The sums of divergence.numerics.pairs.against in compiled loops, all in float64.

One pass gathers the rows' sums; a second, over the rows that count in the columns, the columns'.
A row with a nan or inf has a sum that is neither finite nor used.
"""

from __future__ import annotations

import numpy as np
import torch

from divergence.numerics.compiled.numbers import jit, number
from divergence.numerics.compiled.sums import stored
from divergence.numerics.pairs.blocks import Grid

__all__ = ["add_channels", "row_sums"]


@jit
def _rows(a: np.ndarray, b: np.ndarray, truth: np.ndarray, out: np.ndarray) -> None:
    for i in range(truth.shape[0]):
        x_row, y_row, r_row = a[i], b[i], truth[i]
        rr = aa = bb = ab = ar = br = r4 = 0.0
        for j in range(len(r_row)):
            r = number(r_row[j])
            da, db = number(x_row[j]) - r, number(y_row[j]) - r
            d = number(x_row[j]) - number(y_row[j])
            square = r * r
            rr += square
            aa += da * da
            bb += db * db
            ab += d * d
            ar += da * r
            br += db * r
            r4 += square * square
        out[0, i] = rr
        out[1, i] = aa
        out[2, i] = bb
        out[3, i] = ab
        out[4, i] = ar
        out[5, i] = br
        out[9, i] = r4


@jit
def _updates(
    a: np.ndarray, b: np.ndarray, truth: np.ndarray, base: np.ndarray, out: np.ndarray
) -> None:
    for i in range(truth.shape[0]):
        x_row, y_row, r_row, z_row = a[i], b[i], truth[i], base[i]
        uu = au = bu = u4 = 0.0
        for j in range(len(r_row)):
            r = number(r_row[j])
            u = r - number(z_row[j])
            square = u * u
            uu += square
            au += (number(x_row[j]) - r) * u
            bu += (number(y_row[j]) - r) * u
            u4 += square * square
        out[6, i] = uu
        out[7, i] = au
        out[8, i] = bu
        out[10, i] = u4


@jit
def _channels(
    a: np.ndarray, b: np.ndarray, truth: np.ndarray, rows: np.ndarray, out: np.ndarray
) -> None:
    of_a, of_b, of_ab, of_r, top_a, top_b = out[0], out[1], out[2], out[3], out[4], out[5]
    for i in rows:
        x_row, y_row, r_row = a[i], b[i], truth[i]
        for j in range(len(r_row)):
            x, y, r = number(x_row[j]), number(y_row[j]), number(r_row[j])
            square_a, square_b = (x - r) * (x - r), (y - r) * (y - r)
            of_a[j] += square_a
            of_b[j] += square_b
            top_a[j] = max(top_a[j], square_a)
            top_b[j] = max(top_b[j], square_b)
            of_ab[j] += (x - y) * (x - y)
            of_r[j] += r * r


def row_sums(
    a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor, base: torch.Tensor | None
) -> torch.Tensor:
    """Twelve sums per row, (12, T), numbered as divergence.numerics.pairs.against does."""
    x, y, r = (stored(Grid(tensor)) for tensor in (a, b, truth))
    out = np.full((12, len(r)), np.nan)
    _rows(x, y, r, out)
    if base is not None:
        _updates(x, y, r, stored(Grid(base)), out)
    return torch.from_numpy(out)


def add_channels(
    a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor, rows: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds ``rows`` to the columns ``out`` (6, D), see AgainstTruth."""
    x, y, r = (stored(Grid(tensor)) for tensor in (a, b, truth))
    _channels(x, y, r, rows.numpy(), out.numpy())

"""The sums of divergence.numerics.pairs.sums in one compiled pass, and those of pairs.against.

Everything is float64, so no finite 16- or 32-bit value leaves the range, and a row's sums are
exact to 1e-15. A tile of up to 32 rows and 2048 columns keeps its column sums in the first
cache and hands them over when all its elements were finite on both sides; a tile that holds a nan
or inf is left out and listed, for the way that leaves out single elements (Sums.careful).

Against a truth one pass gathers the rows' sums; a second, over the rows that count in the columns,
the columns'. A row with a nan or inf has a sum that is neither finite nor used.
"""

from __future__ import annotations

import numpy as np
import torch

from divergence.numerics.compiled.numbers import jit, larger, magnitude, number
from divergence.numerics.pairs.blocks import Grid
from divergence.numerics.pairs.sums import Sums

__all__ = ["add_channels", "gather_compiled", "largest_magnitude", "row_sums", "stored"]

_TALL, _WIDE = 32, 2048
_INF = 0x7FF0000000000000
_STORED = {"bfloat16": np.uint16, "float16": np.int16}


@jit
def _add_rows(
    a: np.ndarray,
    b: np.ndarray,
    base: np.ndarray,
    with_base: bool,
    rows: np.ndarray,
    row_a: np.ndarray,
    row_d: np.ndarray,
    row_update: np.ndarray,
    row_finite: np.ndarray,
    col_a: np.ndarray,
    col_d: np.ndarray,
    totals: np.ndarray,
    largest: np.ndarray,
) -> np.ndarray:
    """Adds to the arrays and to ``totals`` (P, Q); ``largest``: bits of max |d|, its row, its
    column. Returns the tiles left out, (first, last, start, stop) each."""
    num_rows, num_cols = len(rows), a.shape[1]
    left_out = np.empty((-(-num_rows // _TALL) * -(-num_cols // _WIDE), 4), np.int64)
    num_left_out = 0
    tile_a, tile_d = np.empty(_WIDE), np.empty(_WIDE)
    sums = np.empty((_TALL, 3))
    for first in range(0, num_rows, _TALL):
        last = min(first + _TALL, num_rows)
        for start in range(0, num_cols, _WIDE):
            stop = min(start + _WIDE, num_cols)
            count = stop - start
            tile_a[:count] = 0.0
            tile_d[:count] = 0.0
            product = squares = 0.0
            top, top_place = np.int64(0), -1
            for place in range(first, last):
                x_row, y_row = a[rows[place], start:stop], b[rows[place], start:stop]
                a2 = d2 = p = q = 0.0
                most = np.int64(0)
                for j in range(count):
                    x = number(x_row[j])
                    d = x - number(y_row[j])
                    xx, dd, xd = x * x, d * d, x * d
                    most = larger(most, magnitude(d))
                    a2 += xx
                    d2 += dd
                    p += xd
                    q += xd * xd
                    tile_a[j] += xx
                    tile_d[j] += dd
                sums[place - first, 0] = a2
                sums[place - first, 1] = d2
                product += p
                squares += q
                if most > top:
                    top, top_place = most, place
            if top >= _INF:
                left_out[num_left_out] = (first, last, start, stop)
                num_left_out += 1
                continue
            for place in range(first, last):
                row = rows[place]
                row_a[row] += sums[place - first, 0]
                row_d[row] += sums[place - first, 1]
                row_finite[row] = True
                if with_base:
                    row_update[row] += _update(a[row, start:stop], base[row, start:stop])
            for j in range(count):
                col_a[start + j] += tile_a[j]
                col_d[start + j] += tile_d[j]
            totals[0] += product
            totals[1] += squares
            # of equal ones the first in row-major order
            if top_place >= 0 and (
                top > largest[0] or (top == largest[0] and rows[top_place] < largest[1])
            ):
                row = rows[top_place]
                largest[0], largest[1] = top, row
                for j in range(start, stop):
                    if magnitude(number(a[row, j]) - number(b[row, j])) == top:
                        largest[2] = j
                        break
    return left_out[:num_left_out]


@jit
def _update(x_row: np.ndarray, z_row: np.ndarray) -> float:
    """Σ(a - base)² over what is finite."""
    total = 0.0
    for j in range(len(x_row)):
        u = number(x_row[j]) - number(z_row[j])
        total += u * u
    if magnitude(total) < _INF:  # reordering may make 0 of np.isfinite's x - x
        return total
    total = 0.0
    for j in range(len(x_row)):
        u = number(x_row[j]) - number(z_row[j])
        if magnitude(u) < _INF:
            total += u * u
    return total


@jit
def _largest(values: np.ndarray) -> np.int64:
    """Bits of the largest finite magnitude."""
    top = np.int64(0)
    for i in range(values.shape[0]):
        row = values[i]
        most = np.int64(0)
        for j in range(len(row)):
            most = larger(most, magnitude(number(row[j])))
        if most >= _INF:
            most = np.int64(0)
            for j in range(len(row)):
                size = magnitude(number(row[j]))
                if size < _INF:
                    most = larger(most, size)
        top = larger(top, most)
    return top


def largest_magnitude(grid: Grid) -> float:
    """The largest finite |x|; 0 where none is finite. The grid must be readable."""
    return float(np.array([_largest(stored(grid))]).view(np.float64)[0])


def stored(grid: Grid) -> np.ndarray:
    """A grid's numbers as compiled loops read them."""
    return grid.bits.view(_STORED.get(grid.format.name, grid.format.name))


def gather_compiled(sums: Sums, rows: np.ndarray | slice) -> Sums:
    """Run ``sums`` over ``rows``; the grids must be readable (numerics.kernels)."""
    if isinstance(rows, slice):
        rows = np.arange(rows.start, rows.stop)
    a, b = stored(sums.a), stored(sums.b)
    base = a if sums.base is None else stored(sums.base)
    totals, largest = np.zeros(2), np.array([0, -1, -1])
    left_out = _add_rows(
        a, b, base, sums.base is not None, rows, sums.row_a, sums.row_d, sums.row_update,
        sums.row_finite, sums.col_a, sums.col_d, totals, largest,
    )  # fmt: skip
    sums.product += float(totals[0])
    sums.product_squares += float(totals[1])
    sums.num_finite += len(rows) * sums.a.num_cols
    if largest[1] >= 0:
        sums.max_abs = float(largest[:1].view(np.float64)[0])
        sums.max_at = int(largest[1]) * sums.a.num_cols + int(largest[2])
    for first, last, start, stop in left_out.tolist():
        sums.num_finite -= (last - first) * (stop - start)
        with np.errstate(all="ignore"):
            sums.careful(rows[first:last], slice(start, stop))
    return sums


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

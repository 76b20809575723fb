"""The sums every pair metric is made of, gathered block by block.

With d = a - b only three whole sums are needed: A = Σa², E = Σd², P = Σ a·d. Then
‖b‖² = A - 2P + E and b·a = A - P, and nothing large is ever subtracted from
something nearly equal to it. Q = Σ(a·d)² gives the spread of P. A and E are kept
per row and per column as well.

Float32 inside a block: a and b are exact there and a - b is rounded once (2^-24),
so every product is right to 2e-7; sums of more than 1024 terms are float64. Range is
what float32 lacks. d is scaled by a power of two where its largest magnitude is
small or large. Where a row's sum of squares leaves [2^-70, 2^100] without being zero
throughout, or a value is not finite, the block is done again in float64 ("careful").

Of elements that are no finite number it counts how many there are, where the two sides do not
agree, and who is alone. Two elements agree where both are finite, both are nan (whatever their
payload), or both are the same infinity: place and sign count, not the number. -inf against a finite
value below -10,000 is counted apart (``mask_alike``): in an attention mask both say "never", since
exp(-10,000) is 0 in every format up to float64, and masks are written with -inf, with the lowest
finite number or with -10,000 (BERT, GPT-2). Whether a site is a mask is not known here.
"""

from __future__ import annotations

import math

import numpy as np

from divergence.numerics.pairs.blocks import BLOCK, Grid, Rows, column_dots, row_dots

__all__ = ["APART", "HIGH", "LOW", "NEVER", "NONFINITE", "TOP_HIGH", "TOP_LOW", "Sums",
           "channel_ratios", "gather", "ratio", "root_ratio", "root_ratios", "tiles"]  # fmt: skip


LOW, HIGH = 2.0**-70, 2.0**100
TOP_LOW, TOP_HIGH = 2.0**-10, 2.0**20


class Sums:
    """Accumulators for some rows of a pair. Row arrays are shared between workers, which own
    disjoint rows; everything else is this worker's and is merged with ``add``."""

    def __init__(
        self, a: Grid, b: Grid, base: Grid | None, *, dtype: type, rows: tuple[np.ndarray, ...]
    ) -> None:
        self.a, self.b, self.base = a, b, base
        self.row_a, self.row_d, self.row_update, self.row_finite, self.row_nonfinite = rows
        self.col_a, self.col_d = np.zeros((2, a.num_cols))
        self.product = self.product_squares = 0.0  # P, Q
        self.max_abs, self.max_at = 0.0, -1  # -1: no difference yet
        self.nonfinite = dict.fromkeys(NONFINITE, 0)
        self.num_finite = 0
        self._dtype = dtype
        self._buffers: np.ndarray = np.empty(
            (4, min(BLOCK, max(1, a.num_rows * a.num_cols))), dtype
        )

    def block(self, rows: Rows, cols: slice) -> None:
        """Take in one block."""
        buffer_a, buffer_b, buffer_d, scratch = self._buffers
        a = self.a.load(rows, cols, buffer_a)
        b = self.b.load(rows, cols, buffer_b)
        d = np.subtract(a, b, out=buffer_d[: a.size].reshape(a.shape))
        top = max(float(d.max()), -float(d.min()))
        row_a = row_dots(a, a)
        if not (math.isfinite(top) and self._in_range(row_a, a)):
            self.careful(rows, cols)
            return
        scale = 1.0
        if top and not TOP_LOW <= top <= TOP_HIGH:
            scale = 2.0 ** -math.frexp(top)[1]
            if self._dtype is np.float32 and not 2.0**-120 < scale < 2.0**120:
                self.careful(rows, cols)
                return
            np.multiply(d, self._dtype(scale), out=d)
        row_d = row_dots(d, d) if top else np.zeros(len(a))
        if top and not self._in_range(row_d, d):
            self.careful(rows, cols)
            return
        product = np.multiply(a, d, out=scratch[: a.size].reshape(a.shape)) if top else None
        if product is not None:
            squares = float(row_dots(product, product).sum())
            if self._dtype is np.float32 and not LOW < squares < HIGH:
                self.careful(rows, cols)
                return
            self.product_squares += squares / scale**2
        self.num_finite += a.size
        self._gather(rows, cols, a, d, row_a, row_d, top=top, scale=scale)
        if self.base is not None:
            base = self.base.load(rows, cols, buffer_b)
            update = np.subtract(a, base, out=scratch[: a.size].reshape(a.shape))
            self._add_update(rows, update, a, base)

    def _in_range(self, sums: np.ndarray, block: np.ndarray) -> bool:
        """Whether the rows' sums of squares lost nothing to float32's range."""
        if self._dtype is np.float64:
            return bool(np.isfinite(sums).all())
        if not sums.max() < HIGH:  # also where it is nan
            return False
        small = sums < LOW
        return not (small.any() and block[small].any())

    def careful(self, rows: Rows, cols: slice) -> None:
        """One block (at most BLOCK elements) in float64, with every element left out that is
        not finite on both sides."""
        a, b = (grid.load(rows, cols, np.empty(BLOCK)).copy() for grid in (self.a, self.b))
        keep = np.isfinite(a) & np.isfinite(b)
        if not keep.all():
            self.count_nonfinite(rows, a, b)
            a[~keep] = 0.0
            b[~keep] = 0.0
        self.num_finite += int(np.count_nonzero(keep))
        self.row_finite[rows] |= keep.any(axis=1)
        d = a - b
        top = float(np.abs(d).max())
        product = a * d
        self.product_squares += float(row_dots(product, product).sum())
        self._gather(rows, cols, a, d, row_dots(a, a), row_dots(d, d), top=top, finite=False)
        if self.base is not None:
            base = self.base.load(rows, cols, np.empty(BLOCK))
            usable = keep & np.isfinite(base)
            update = np.where(usable, a - base, 0.0)
            self.row_update[rows] += row_dots(update, update)

    def count_nonfinite(self, rows: Rows, a: np.ndarray, b: np.ndarray) -> None:
        """Take in what is not finite in one block, and which of its rows hold it."""
        counts, apart = _count_nonfinite(a, b, scale=self.a.scale)
        for name, count in counts.items():
            self.nonfinite[name] += count
        finite = (np.isfinite(a) & np.isfinite(b)).all(axis=1)
        seen = np.where(apart.any(axis=1), APART, np.where(finite, 0, ALIKE))
        self.row_nonfinite[rows] = np.maximum(self.row_nonfinite[rows], seen)

    def _gather(
        self,
        rows: Rows,
        cols: slice,
        a: np.ndarray,
        d: np.ndarray,
        row_a: np.ndarray,
        row_d: np.ndarray,
        *,
        top: float,
        scale: float = 1.0,
        finite: bool = True,
    ) -> None:
        self.row_a[rows] += row_a
        self.col_a[cols] += column_dots(a, a)
        if finite:
            self.row_finite[rows] = True
        if not top:
            return
        unscale = scale**-2
        self.row_d[rows] += row_d * unscale
        self.col_d[cols] += column_dots(d, d) * unscale
        self.product += float(row_dots(a, d).sum()) / scale
        if top >= self.max_abs:
            self._locate(rows, cols, d, top)

    def _locate(self, rows: Rows, cols: slice, d: np.ndarray, top: float) -> None:
        """Remember where the largest difference is; of equal ones the first in row-major order."""
        high, low = int(d.argmax()), int(d.argmin())
        rise, fall = float(d.flat[high]), -float(d.flat[low])
        at = high if rise > fall else low if fall > rise else min(high, low)
        row = int(_numbers(rows)[at // d.shape[1]])
        flat = row * self.a.num_cols + cols.start + at % d.shape[1]
        if top > self.max_abs or flat < self.max_at:
            self.max_abs, self.max_at = top, flat

    def _add_update(self, rows: Rows, update: np.ndarray, a: np.ndarray, base: np.ndarray) -> None:
        squares = row_dots(update, update)
        if not self._in_range(squares, update):
            wide = a.astype(np.float64) - base
            wide[~np.isfinite(wide)] = 0.0
            squares = row_dots(wide, wide)
        self.row_update[rows] += squares

    def add(self, other: Sums) -> None:
        """Merge a worker that took later rows."""
        self.col_a += other.col_a
        self.col_d += other.col_d
        self.product += other.product
        self.product_squares += other.product_squares
        self.num_finite += other.num_finite
        for name, count in other.nonfinite.items():
            self.nonfinite[name] += count
        if other.max_abs > self.max_abs:
            self.max_abs, self.max_at = other.max_abs, other.max_at


def tiles(rows: Rows, num_cols: int, *, block: int = BLOCK) -> list[tuple[Rows, slice]]:
    """Blocks of at most ``block`` elements that cover ``rows``, in order: whole rows where
    eight of them fit, else pieces of up to eight rows."""
    count = len(range(rows.start, rows.stop)) if isinstance(rows, slice) else len(rows)
    if count == 0 or num_cols == 0:
        return []
    tall = max(1, min(8, count, block))
    wide = min(num_cols, max(1, block // tall))
    tall = max(tall, block // num_cols)
    blocks: list[tuple[Rows, slice]] = []
    for first in range(0, count, tall):
        last = min(first + tall, count)
        if isinstance(rows, slice):
            part: Rows = slice(rows.start + first, rows.start + last)
        else:
            part = rows[first:last]
            if part[-1] - part[0] == len(part) - 1:
                part = slice(int(part[0]), int(part[-1]) + 1)  # no gap: a view, no copy
        for start in range(0, num_cols, wide):
            blocks.append((part, slice(start, min(start + wide, num_cols))))
    return blocks


def gather(sums: Sums, rows: Rows, *, block: int = BLOCK) -> Sums:
    """Run ``sums`` over ``rows``."""
    with np.errstate(all="ignore"):
        for part, cols in tiles(rows, sums.a.num_cols, block=block):
            sums.block(part, cols)
    return sums


def _numbers(rows: Rows) -> np.ndarray:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


NONFINITE = (
    "a_nan", "a_inf", "a_neginf", "b_nan", "b_inf", "b_neginf",
    "differ", "a_alone", "b_alone", "mask_alike",
)  # fmt: skip
"""What is counted. ``a_inf``: infinities of both signs, ``a_neginf`` those below; ``differ``:
places where the sides do not agree; ``a_alone``: of them, those where b is finite."""

NEVER = -10_000.0
ALIKE, APART = 1, 2
"""Of a row that holds nan or inf: the sides agree at each, or not (``mask_alike`` is agreement)."""


def _count_nonfinite(
    a: np.ndarray, b: np.ndarray, *, scale: float
) -> tuple[dict[str, int], np.ndarray]:
    """The counts of one block by the names of ``NONFINITE``, and the elements at which the sides
    do not agree; the block's values were multiplied by ``scale``."""
    counts: dict[str, int] = {}
    nan, low, high, finite = {}, {}, {}, {}
    for side, x in (("a", a), ("b", b)):
        nan[side], finite[side] = np.isnan(x), np.isfinite(x)
        low[side], high[side] = np.isneginf(x), np.isposinf(x)
        counts[f"{side}_nan"] = int(nan[side].sum())
        counts[f"{side}_neginf"] = int(low[side].sum())
        counts[f"{side}_inf"] = counts[f"{side}_neginf"] + int(high[side].sum())
    differ = (nan["a"] != nan["b"]) | (low["a"] != low["b"]) | (high["a"] != high["b"])
    counts["differ"] = int(differ.sum())
    counts["a_alone"] = int((~finite["a"] & finite["b"]).sum())
    counts["b_alone"] = int((~finite["b"] & finite["a"]).sum())
    most = NEVER * scale
    with np.errstate(invalid="ignore"):
        never = (low["a"] & finite["b"] & (b <= most)) | (low["b"] & finite["a"] & (a <= most))
    counts["mask_alike"] = int(never.sum())
    return counts, differ & ~never


def ratio(x: float, y: float) -> float:
    """x / y with 0/0 = 0 and x/0 = inf."""
    return x / y if y else (math.inf if x else 0.0)


def root_ratio(x2: float, y2: float) -> float:
    return ratio(math.sqrt(x2), math.sqrt(y2))


def root_ratios(x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    """√x2 / √y2 with 0/0 = 0 and x/0 = inf."""
    x, y = np.sqrt(x2), np.sqrt(y2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x == 0.0, 0.0, x / y)


def channel_ratios(x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    """x2 / y2 with 0/0 = 0 and x/0 = inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: np.ndarray = x2 / y2
    if not y2.all():
        ratios[x2 == 0.0] = 0.0
    return ratios

"""The difference of two tensors, of many small pairs, and of each from a third."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from divergence.numerics.arrays import as_array, wide
from divergence.numerics.formats import Format, is_float
from divergence.numerics.sums import (
    BLOCK,
    HIGH,
    LOW,
    OUTLIER,
    SINK_FACTOR,
    TOP_HIGH,
    TOP_LOW,
    Grid,
    Kernel,
    Rows,
    Sums,
    add_row_sums,
    channel_ratios,
    chosen,
    column_dots,
    columns_of_many,
    compute_dtype,
    gather,
    num_threads,
    ratio,
    root_ratio,
    root_ratios,
    row_dots,
    row_sinks,
    run_split,
    tiles,
    usual_rows,
)
from divergence.numerics.ulp import count_ulp, distance_array, key_array, smallest_key, stored

if TYPE_CHECKING:
    import torch

    from divergence.numerics.arrays import Tensor

# Every metric of a pair of tensors, in two streaming passes.
#
# a = reference, b = candidate, d = a - b. Rows are tokens (the product of the leading
# dimensions), columns are features (the last one). The first pass gathers the sums of
# divergence.numerics.sums; the second counts ulp distances, since its mask needs rms(a).
# Metrics run over the elements that are finite on both sides, in the rows of the mask.
# Division: 0/0 = 0, x/0 = inf. -0 equals +0 everywhere but in ``identical``.
#
# 1 - cos is never taken from cos. With g = P/A the part of d at right angles to a has
# the square S = Σ(d - g a)² = E - P²/A, sin² = S/‖b‖² and 1 - cos = sin² / (1 + cos):
# exact however small the angle. Where E - P²/A would cancel (d nearly parallel to a,
# b much shorter than a) a third pass sums S itself in float64. (Lagrange's identity;
# Kahan, "How Futile are Mindless Assessments of Roundoff", 2006, on angles.)
#
# No thresholds here but the definition of a sink token: judging is compare's.

ANGLE_SAFE = 0.5
"""Below this share of ‖d‖² at right angles to a, S = E - P²/A has lost a bit: sum it itself."""


class RowMetrics(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Per row t (leading dims flattened), float64, each of shape (rows,)."""

    rel_l2: np.ndarray
    """‖d_t‖/‖a_t‖; nan where the row is masked or has no element finite on both sides."""
    diff: np.ndarray
    """‖d_t‖, which is known where ‖a_t‖ is 0."""
    norm: np.ndarray
    """‖a_t‖."""
    update_norm: np.ndarray | None
    """‖a_t - base_t‖; None without base."""
    nonfinite: np.ndarray | None = None
    """0 where all of an unmasked row is finite, 1 where both sides agree at each nan and inf, 2
    where they do not; None where no row has any."""


class PairMetrics(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Metrics over the elements finite on both sides, in the unmasked rows. 0/0 = 0, x/0 = inf.

    compare's SiteResult says what each is of those that it takes over, which are those of the
    same name. Beyond that: cosine is 1 where both are zero, 0 where one is; one_minus_cosine: see
    above. max_abs_index: of equal ones the first, row-major. gain = -P/A; gain_se =
    sqrt((Q - P²/n) n/(n-1)) / A is that of a sum of n independent products a·d: it stays honest
    where the error is proportional to |a| (rounding) or one channel dominates; inf for n < 2.
    ulp_*: numerics.ulp.UlpCounts. token_rel_l2_p99: inverted cdf; worst_row: the first row with
    the max (in the leading dims, flattened; None without rows). channel_rel_l2_max: a channel
    weaker than one rounding of the typical channel cannot be measured against itself (the ulp
    mask's rule, per channel). update_norm = ‖a - base‖; None without base.
    reference_nan ... candidate_inf: counts in the unmasked rows. Of the infinities ``*_neginf``
    are those below; nonfinite_differ: places where the sides do not agree in kind or sign,
    ``*_alone`` those of them where the other side is finite, mask_alike those where -inf stands
    against a finite value that means the same in a mask (``NEVER``). identical: same
    dtype, shape and bytes, masked or not.
    numel: elements of the unmasked rows; num_finite: those of them that were measured.
    What is estimated from sketches (numerics.estimate) leaves None what needs elements.
    Complex tensors are measured as their components; max_abs is a component's, the values
    there too, and a channel is a complex one.
    """

    identical: bool
    numel: int
    num_finite: int
    num_rows: int
    num_masked: int = 0
    rel_l2: float | None = None
    cosine: float | None = None
    one_minus_cosine: float | None = None
    sqnr_db: float | None = None
    max_abs: float | None = None
    max_abs_index: tuple[int, ...] | None = None
    max_abs_reference: float | None = None
    max_abs_candidate: float | None = None
    reference_norm: float | None = None
    candidate_norm: float | None = None
    gain: float | None = None
    gain_se: float | None = None
    ulp_format: str | None = None
    ulp_share_over_1: float | None = None
    ulp_p99: float | None = None
    ulp_max: float | None = None
    token_rel_l2_median: float | None = None
    token_rel_l2_p99: float | None = None
    token_rel_l2_max: float | None = None
    worst_row: int | None = None
    channel_rel_l2_max: float | None = None
    worst_channel: int | None = None
    update_rel_l2: float | None = None
    update_norm: float | None = None
    num_sink_tokens: int = 0
    rel_l2_without_sinks: float | None = None
    pad_rel_l2: float | None = None
    reference_nan: int = 0
    reference_inf: int = 0
    candidate_nan: int = 0
    candidate_inf: int = 0
    reference_neginf: int = 0
    candidate_neginf: int = 0
    nonfinite_differ: int = 0
    reference_alone: int = 0
    candidate_alone: int = 0
    mask_alike: int = 0


EQUAL: dict[str, float] = {
    "rel_l2": 0.0,
    "cosine": 1.0,
    "one_minus_cosine": 0.0,
    "sqnr_db": math.inf,
    "max_abs": 0.0,
    "gain": 0.0,
    "gain_se": 0.0,
    "token_rel_l2_median": 0.0,
    "token_rel_l2_p99": 0.0,
    "token_rel_l2_max": 0.0,
    "channel_rel_l2_max": 0.0,
}
"""The metrics of two tensors with the same bits, which nothing measures."""
NO_ULP = dict.fromkeys(("ulp_share_over_1", "ulp_p99", "ulp_max"), 0.0)
"""Beside them, of floats."""


def measure_pair(
    a: Tensor,
    b: Tensor,
    *,
    row_mask: Tensor | None = None,
    base: Tensor | None = None,
    threads: int | None = None,
    block: int = BLOCK,
    kernel: Kernel = "numpy",
    device: torch.device | None = None,
) -> tuple[PairMetrics, RowMetrics]:
    """Metrics of b against a, whole and by row.

    ``row_mask``: bool, one per row (any shape of that many elements), True = measure.
    ``base``: same shape as a, the block's input. ``threads``: default is that of numerics.sums, 1
    for small tensors. ``block``: elements per block.
    ``kernel``: see numerics.sums; formats that compiled loops do not read go numpy's way.
    ``device``: add up there instead (numerics.on_device), where float64's range is not left.
    Formulas, units and care: PairMetrics. Raises ValueError where shapes do not match.
    """
    check_shapes(a, candidate=b, base=base)
    return _Pair(
        a, b, base, row_mask, threads=threads, block=min(block, BLOCK), kernel=kernel, device=device
    ).measure()


def check_shapes(a: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError where one of ``others`` has another shape than the reference ``a``."""
    for name, other in others.items():
        if other is not None and other.shape != a.shape:
            raise ValueError(
                f"the {name} has shape {tuple(other.shape)}, the reference {tuple(a.shape)}"
            )


def narrower(a: Format, b: Format) -> Format | None:
    """The format in which ulp are counted: the narrower of two floats', else None."""
    if not (is_float(a) and is_float(b)):
        return None
    return min(a, b, key=lambda form: (form.itemsize, form.mantissa_bits))


class _Pair:
    """One call of measure_pair: the grids, the rows, and what the passes leave behind."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        base: Tensor | None,
        row_mask: Tensor | None,
        *,
        threads: int | None,
        block: int,
        kernel: Kernel,
        device: torch.device | None,
    ) -> None:
        self.shape = tuple(a.shape)
        self.a, self.b = Grid(a), Grid(b)
        self.base = None if base is None else Grid(base)
        grids = [grid for grid in (self.a, self.b, self.base) if grid is not None]
        if len({grid.width for grid in grids}) > 1:
            raise ValueError("a complex tensor can only be compared with a complex one")
        self.dtype = compute_dtype(*(grid.format for grid in grids))
        self.kernel = chosen(kernel, *(grid.format for grid in grids))
        self.scale = common_scale(grids, kernel=self.kernel)
        self.there = None
        if self.scale != 1.0:
            self.kernel = "numpy"
        elif device is not None:
            from divergence.numerics.on_device import OnDevice

            self.there = OnDevice(self.a, self.b, self.base, device)
        # rows to measure, and those to leave out
        self.real: Rows = slice(0, self.a.num_rows)
        self.padded: Rows = slice(0, 0)
        if row_mask is not None:
            mask = as_array(row_mask).reshape(-1).astype(bool)
            if len(mask) != self.a.num_rows:
                raise ValueError(f"the row mask has {len(mask)} entries for {self.a.num_rows} rows")
            if not mask.all():
                self.real, self.padded = np.flatnonzero(mask), np.flatnonzero(~mask)
        self.threads = threads or (1 if self.a.array.size < 8 * BLOCK else num_threads())
        self.block = block
        self.row_a, self.row_d, self.row_update = np.zeros((3, self.a.num_rows))
        self.row_finite = np.zeros(self.a.num_rows, bool)
        self.row_nonfinite = np.zeros(self.a.num_rows, np.uint8)

    def _sums(self, rows: Rows) -> Sums:
        arrays = (self.row_a, self.row_d, self.row_update, self.row_finite, self.row_nonfinite)
        if self.there is not None:
            sums = Sums(self.a, self.b, self.base, dtype=self.dtype, rows=arrays)
            return self.there.gather(sums, rows)

        def work(part: Rows | range) -> Sums:
            rows = slice(part.start, part.stop) if isinstance(part, range) else part
            sums = Sums(self.a, self.b, self.base, dtype=self.dtype, rows=arrays)
            if self.kernel == "compiled":
                from divergence.numerics.compiled import gather_compiled

                return gather_compiled(sums, rows)
            return gather(sums, rows, block=self.block)

        shared = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
        first, *others = run_split(work, shared, threads=self.threads)
        for other in others:
            first.add(other)
        return first

    def measure(self) -> tuple[PairMetrics, RowMetrics]:
        sums = self._sums(self.real)
        pad_rel_l2 = None
        if len(self.row_a[self.padded]):
            self._sums(self.padded)
            self.row_nonfinite[self.padded] = 0
            pad_rel_l2 = root_ratio(self.row_d[self.padded].sum(), self.row_a[self.padded].sum())
        row_a, row_d = self.row_a[self.real], self.row_d[self.real]
        a2, d2 = float(row_a.sum()), float(row_d.sum())
        rel_l2 = root_ratio(d2, a2)
        a2, b2, product, one_minus_cosine = self._angle(sums, a2, d2)
        per_row = np.full(self.a.num_rows, np.nan)
        per_row[self.real] = root_ratios(row_d, row_a)
        per_row[~self.row_finite] = np.nan
        norms = np.sqrt(row_a)
        usual = float(median(np.sort(norms))) if len(norms) else 0.0
        sinks = norms > (SINK_FACTOR * usual if usual else math.inf)
        n = sums.num_finite
        spread = max(0.0, sums.product_squares - product**2 / max(n, 1)) * n / max(n - 1, 1)
        values = np.sort(per_row[~np.isnan(per_row)])
        values = values if len(values) else np.zeros(1)
        width = self.a.width
        col_a, col_d = (x.reshape(-1, width).sum(axis=1) for x in (sums.col_a, sums.col_d))
        unit = max(self.a.format.unit_roundoff, self.b.format.unit_roundoff)
        ratios = channel_ratios(col_d, np.maximum(col_a, unit**2 * a2 / max(len(col_a), 1)))
        worst = int(ratios.argmax()) if len(ratios) else 0
        numel = len(row_a) * self.a.num_cols
        update = None if self.base is None else math.sqrt(self.row_update[self.real].sum())
        metrics = PairMetrics(
            identical=sums.max_at < 0
            and self.a.format.name == self.b.format.name
            and all(
                np.array_equal(self.a.bits[part], self.b.bits[part])
                for part in tiles(slice(0, self.a.num_rows), self.a.num_cols)
            ),
            numel=numel // width,
            num_finite=n // width,
            num_rows=len(row_a),
            num_masked=self.a.num_rows - len(row_a),
            rel_l2=rel_l2,
            cosine=1.0 - one_minus_cosine,
            one_minus_cosine=one_minus_cosine,
            sqnr_db=-20.0 * math.log10(rel_l2) if rel_l2 else math.inf,
            reference_norm=math.sqrt(a2) / self.scale,
            candidate_norm=math.sqrt(b2) / self.scale,
            gain=0.0 - product / a2 if a2 else 0.0,
            gain_se=math.sqrt(spread) / a2 if a2 and n > 1 else math.inf,
            update_rel_l2=None if update is None else ratio(math.sqrt(d2), update),
            update_norm=None if update is None else update / self.scale,
            num_sink_tokens=int(np.count_nonzero(sinks)),
            rel_l2_without_sinks=(
                root_ratio(row_d[~sinks].sum(), row_a[~sinks].sum()) if sinks.any() else None
            ),
            pad_rel_l2=pad_rel_l2,
            reference_nan=sums.nonfinite["a_nan"],
            reference_inf=sums.nonfinite["a_inf"],
            reference_neginf=sums.nonfinite["a_neginf"],
            candidate_nan=sums.nonfinite["b_nan"],
            candidate_inf=sums.nonfinite["b_inf"],
            candidate_neginf=sums.nonfinite["b_neginf"],
            nonfinite_differ=sums.nonfinite["differ"],
            reference_alone=sums.nonfinite["a_alone"],
            candidate_alone=sums.nonfinite["b_alone"],
            mask_alike=sums.nonfinite["mask_alike"],
            **self._largest(sums),
            **self._ulp(sums, a2),
            token_rel_l2_median=float(median(values)),
            token_rel_l2_p99=float(
                values[max(0, math.ceil(0.99 * len(values) - 1))]
            ),  # inverted cdf
            token_rel_l2_max=float(values[-1]),
            worst_row=None if np.isnan(per_row).all() else int(np.nanargmax(per_row)),
            channel_rel_l2_max=math.sqrt(ratios[worst]) if len(ratios) else 0.0,
            worst_channel=worst if len(ratios) else None,
        )
        with np.errstate(over="ignore"):  # a float64 mask's norm is beyond float64: inf
            diff = np.where(np.isnan(per_row), math.nan, np.sqrt(self.row_d) / self.scale)
            rows = RowMetrics(
                rel_l2=per_row,
                diff=diff,
                norm=np.sqrt(self.row_a) / self.scale,
                update_norm=None if self.base is None else np.sqrt(self.row_update) / self.scale,
                nonfinite=self.row_nonfinite if self.row_nonfinite.any() else None,
            )
        return metrics, rows

    def _angle(self, sums: Sums, a2: float, d2: float) -> tuple[float, float, float, float]:
        """‖a‖², ‖b‖², P and 1 - cos; see the module docstring."""
        product = sums.product
        if d2 == 0.0:
            return a2, a2, product, 0.0
        if a2 == 0.0:
            return a2, d2, product, 1.0
        b2 = a2 - 2.0 * product + d2
        aside = d2 - product**2 / a2
        if aside < ANGLE_SAFE * d2 or b2 < ANGLE_SAFE * a2:
            a2, b2, product, aside = self._aside(1.0 - product / a2)
        if b2 == 0.0:
            return a2, b2, product, 1.0
        cosine = (a2 - product) / math.sqrt(a2 * b2)
        return a2, b2, product, (aside / b2 / (1.0 + cosine) if cosine > 0.0 else 1.0 - cosine)

    def _aside(self, factor: float) -> tuple[float, float, float, float]:
        """‖a‖², ‖b‖², P and S of a second look in float64, at r = factor · a - b: what is left
        of b beside a. ``factor`` need not be exact: what r still has along a is taken off."""

        def work(parts: list[tuple[Rows, slice]]) -> np.ndarray:
            totals = np.zeros(4)
            buffers = np.empty((3, BLOCK))
            with np.errstate(all="ignore"):
                for rows, cols in parts:
                    a = self.a.load(rows, cols, buffers[0])
                    b = self.b.load(rows, cols, buffers[1])
                    r = np.multiply(a, factor, out=buffers[2][: a.size].reshape(a.shape))
                    np.subtract(r, b, out=r)
                    if not math.isfinite(float(r.max()) - float(r.min())):
                        keep = np.isfinite(a) & np.isfinite(b)
                        a, b, r = (np.where(keep, x, 0.0) for x in (a, b, r))
                    totals += [row_dots(x, y).sum() for x, y in ((a, a), (b, b), (r, r), (a, r))]
            return totals

        parts = tiles(self.real, self.a.num_cols, block=self.block)
        a2, b2, r2, along = sum(run_split(work, parts, threads=self.threads), np.zeros(4))
        product = (1.0 - factor) * a2 + along  # a·(a - b), with a - b = (1 - factor) a + r
        return float(a2), float(b2), float(product), max(0.0, float(r2 - along**2 / a2))

    def _largest(self, sums: Sums) -> dict[str, Any]:
        if sums.max_at < 0:
            return {"max_abs": 0.0}
        a, b = self.a.at(sums.max_at), self.b.at(sums.max_at)
        at = np.unravel_index(sums.max_at // self.a.width, self.shape) if self.shape else ()
        return {
            "max_abs": abs(a - b),
            "max_abs_index": tuple(int(number) for number in at),
            "max_abs_reference": a,
            "max_abs_candidate": b,
        }

    def _ulp(self, sums: Sums, a2: float) -> dict[str, Any]:
        form = narrower(self.a.format, self.b.format)
        if form is None:
            return {}
        if sums.max_at < 0 or not sums.num_finite:
            return {**NO_ULP, "ulp_format": form.name}
        counts = count_ulp(
            self.a,
            self.b,
            form,
            rows=self.real,
            threads=self.threads,
            block=self.block,
            rms=math.sqrt(a2 / sums.num_finite) / self.scale,
            check_finite=any(sums.nonfinite.values()),
            kernel=self.kernel,
            there=None if self.there is None else self.there.distances,
        )
        return {
            "ulp_format": form.name,
            "ulp_share_over_1": counts.share_over_1,
            "ulp_p99": counts.p99,
            "ulp_max": counts.max,
        }


def common_scale(grids: list[Grid], *, kernel: Kernel = "numpy") -> float:
    """A power of two that brings float64 values whose squares would leave float64's range
    back into it, set on all grids; 1.0 otherwise."""
    if not any(
        grid.format.itemsize // grid.width == 8 and grid.format.kind != "int" for grid in grids
    ):
        return 1.0
    if kernel == "compiled":
        from divergence.numerics.compiled import largest_magnitude

        top = max(map(largest_magnitude, grids))
    else:
        top = max(map(_largest_magnitude, grids))
    if top == 0.0 or 2.0**-250 < top < 2.0**250:
        return 1.0
    scale = 2.0 ** -max(-1000, min(1000, math.frexp(top)[1]))
    for grid in grids:
        grid.scale = scale
    return scale


def _largest_magnitude(grid: Grid) -> float:
    """The largest finite |x|; 0 where none is finite."""
    top, buffer = 0.0, np.empty(BLOCK)
    for rows, cols in tiles(slice(0, grid.num_rows), grid.num_cols):
        values = grid.load(rows, cols, buffer)
        high, low = float(values.max()), float(values.min())
        if not math.isfinite(high - low):
            values = values[np.isfinite(values)]
            high, low = values.max(initial=0.0), values.min(initial=0.0)
        top = max(top, high, -low)
    return top


# Many small pairs of one shape at once: what measure_pair gives of each, from a few numpy calls.
#
# A decode step's tensor holds some hundred numbers, and calling numpy eighty times takes far longer
# than its arithmetic. So N pairs are laid side by side, (N, T, D), and every sum runs along the
# last axes. The arithmetic is measure_pair's, operation by operation and in the same precision, so
# the figures are the same.
#
# A pair that needs care (large, not finite, or beyond float32's range) is left to measure_pair.

MOST_NUMEL = BLOCK // 4
"""Elements of one pair's side from which on numpy's calls cost little beside its loops."""
NUMEL_AT_ONCE = BLOCK // 2
"""Elements of one side of all pairs of a call: what stays in a core's caches."""

_COUNTED_ULP = 4
"""Most roundings lie fewer ulp apart: counting is then sooner done than sorting."""
_EVERY = slice(None)


def measure_many(
    a: Tensor, b: Tensor, *, base: Tensor | None = None
) -> list[tuple[PairMetrics, RowMetrics] | None]:
    """Metrics of each b[n] against a[n], (N, …): measure_pair(a[n], b[n], base=base[n]) of each.

    None for a pair that measure_pair must take. Raises ValueError where shapes differ.
    """
    check_shapes(a, candidate=b, base=base)
    x, y = as_array(a), as_array(b)
    if x[:1].size > MOST_NUMEL or not x.size or "c" in (x.dtype.kind, y.dtype.kind):
        return [None] * len(x)
    with np.errstate(all="ignore"):
        return _Block(x, y, None if base is None else as_array(base)).measure()


class _Block:
    """One call of measure_many. Arrays are (N,), (N, T) or (N, D) unless said otherwise; ``good``:
    the pairs that are measured here."""

    def __init__(self, a: np.ndarray, b: np.ndarray, base: np.ndarray | None) -> None:
        self.shape = tuple(a.shape[1:])
        self.columns = a.shape[-1] if a.ndim > 1 else 1
        self.count, self.rows = len(a), math.prod(a.shape[1:-1])
        grids = [Grid(x.reshape(-1, self.columns)) for x in (a, b, base) if x is not None]
        self.grids = grids
        self.dtype = compute_dtype(*(grid.format for grid in grids))
        self.a, self.b, *rest = (self._wide(grid, self.dtype) for grid in grids)
        self.base = rest[0] if rest else None
        self.good = np.ones(self.count, bool)

    def _wide(self, grid: Grid, dtype: type) -> np.ndarray:
        buffer: np.ndarray = np.empty(grid.bits.size, dtype)
        values: np.ndarray = grid.load(slice(0, grid.num_rows), _EVERY, buffer)
        return values.reshape(self.count, self.rows, self.columns)

    def _dots(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Σ over the columns, (N, T)."""
        flat = (-1, self.columns)
        return row_dots(x.reshape(flat), y.reshape(flat)).reshape(x.shape[:2])

    def _in_range(self, sums: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Say whether a pair's sums of squares (N, T) lost nothing to the range of the dtype."""
        if self.dtype is np.float64:
            finite: np.ndarray = np.isfinite(sums).all(axis=1)
            return finite
        small = sums < LOW
        if small.any():
            small &= block.any(axis=2)
        fits: np.ndarray = (sums.max(axis=1) < HIGH) & ~small.any(axis=1)
        return fits

    def measure(self) -> list[tuple[PairMetrics, RowMetrics] | None]:
        a = self.a
        d = a - self.b
        flat = d.reshape(self.count, -1)
        high, low = flat.argmax(axis=1), flat.argmin(axis=1)
        every = np.arange(self.count)
        rise, fall = flat[every, high].astype(np.float64), -flat[every, low].astype(np.float64)
        top = np.maximum(rise, fall)
        row_a = self._dots(a, a)
        self.good &= np.isfinite(top) & self._in_range(row_a, a)
        if self.dtype is np.float64:  # squares of such values leave float64's range
            most = np.abs(np.stack([x for x in (a, self.b, self.base) if x is not None]))
            most = most.max(axis=(0, 2, 3))
            self.good &= (most == 0.0) | ((most > 2.0**-250) & (most < 2.0**250))
        differs = top != 0.0
        scale = np.ones(self.count)
        far = self.good & differs & ~((top >= TOP_LOW) & (top <= TOP_HIGH))
        if far.any():
            scale[far] = 2.0 ** -np.frexp(top[far])[1].astype(np.float64)
            if self.dtype is np.float32:
                self.good &= (scale > 2.0**-120) & (scale < 2.0**120)
            np.multiply(d, scale.astype(self.dtype)[:, None, None], out=d)
        row_d = self._dots(d, d)
        product = a * d
        squares = self._dots(product, product).sum(axis=1)
        fits = self._in_range(row_d, d)
        if self.dtype is np.float32:
            fits &= (squares > LOW) & (squares < HIGH)
        self.good &= fits | ~differs
        unscale = (scale**-2)[:, None]
        row_d = row_d * unscale
        columns_a, columns_d = columns_of_many(a, a), columns_of_many(d, d) * unscale
        along, squares = self._dots(a, d).sum(axis=1) / scale, squares / scale**2
        row_update = None
        if self.base is not None:
            update = a - self.base
            row_update = self._dots(update, update)
            self.good &= self._in_range(row_update, update)
        # the metrics of all pairs
        count, n = self.count, self.rows * self.columns
        a2, d2 = row_a.sum(axis=1), row_d.sum(axis=1)
        rel_l2 = root_ratios(d2, a2)
        a2, b2, along, apart = self._angle(a2, d2, along)
        spread = np.maximum(0.0, squares - along**2 / n) * n / max(n - 1, 1)
        gain = np.where(a2 > 0, 0.0 - along / a2, 0.0)
        per_row = root_ratios(row_d, row_a)
        ordered = np.sort(per_row, axis=1)
        norms = np.sqrt(row_a)
        usual = median(np.sort(norms, axis=1))
        sinks = norms > np.where(usual > 0, SINK_FACTOR * usual, math.inf)[:, None]
        grid_a, grid_b = self.grids[:2]
        form = narrower(grid_a.format, grid_b.format)
        same = grid_a.format.name == grid_b.format.name
        same = same and (grid_a.bits == grid_b.bits).reshape(count, -1).all(axis=1)
        at = np.where(rise > fall, high, np.where(fall > rise, low, np.minimum(high, low)))
        largest_a, largest_b = (
            x.reshape(count, -1)[every, at].astype(np.float64) for x in (a, self.b)
        )
        unit = max(grid_a.format.unit_roundoff, grid_b.format.unit_roundoff)
        least = (unit**2 * a2 / self.columns)[:, None]
        ratios = channel_ratios(columns_d, np.maximum(columns_a, least))
        worst = ratios.argmax(axis=1)
        columns: dict[str, Any] = {
            "identical": ~differs & same,
            "rel_l2": rel_l2,
            "cosine": 1.0 - apart,
            "one_minus_cosine": apart,
            "sqnr_db": np.where(rel_l2 > 0, -20.0 * np.log10(rel_l2), math.inf),
            "reference_norm": np.sqrt(a2),
            "candidate_norm": np.sqrt(b2),
            "gain": gain,
            "gain_se": np.where((a2 > 0) & (n > 1), np.sqrt(spread) / a2, math.inf),
            "max_abs": np.where(differs, np.abs(largest_a - largest_b), 0.0),
            "num_sink_tokens": sinks.sum(axis=1),
            "token_rel_l2_median": median(ordered),
            "token_rel_l2_p99": ordered[:, max(0, math.ceil(0.99 * self.rows - 1))],
            "token_rel_l2_max": ordered[:, -1],
            "worst_row": per_row.argmax(axis=1),
            "channel_rel_l2_max": np.sqrt(ratios[every, worst]),
            "worst_channel": worst,
            **self._ulp(form, differs, a2),
        }
        if row_update is not None:
            columns["update_rel_l2"] = root_ratios(d2, row_update.sum(axis=1))
            columns["update_norm"] = np.sqrt(row_update.sum(axis=1))
        # what only some pairs have: None for the others
        places = [()] * count
        if self.shape:
            axes = np.unravel_index(at, self.shape)
            places = list(zip(*(axis.tolist() for axis in axes), strict=True))
        for name, values in (
            ("max_abs_index", places),
            ("max_abs_reference", largest_a.tolist()),
            ("max_abs_candidate", largest_b.tolist()),
        ):
            columns[name] = [
                value if yes else None for yes, value in zip(differs.tolist(), values, strict=True)
            ]
        columns["rel_l2_without_sinks"] = [None] * count
        for place in np.flatnonzero(sinks.any(axis=1)):
            rest = ~sinks[place]
            sums = (x[place][rest].sum() for x in (row_d, row_a))
            columns["rel_l2_without_sinks"][place] = float(root_ratios(*map(np.asarray, sums)))
        always = {
            "numel": n,
            "num_finite": n,
            "num_rows": self.rows,
            "ulp_format": None if form is None else form.name,
        }
        lists = [x.tolist() if isinstance(x, np.ndarray) else x for x in columns.values()]
        names = tuple(columns)
        row_diffs = np.sqrt(row_d)
        row_updates = None if row_update is None else np.sqrt(row_update)
        results: list[tuple[PairMetrics, RowMetrics] | None] = []
        for number, (good, values) in enumerate(
            zip(self.good.tolist(), zip(*lists, strict=True), strict=True)
        ):
            if not good:
                results.append(None)
                continue
            metrics = PairMetrics(**always | dict(zip(names, values, strict=True)))
            rows = RowMetrics(
                rel_l2=per_row[number],
                diff=row_diffs[number],
                norm=norms[number],
                update_norm=None if row_updates is None else row_updates[number],
            )
            results.append((metrics, rows))
        return results

    def _angle(
        self, a2: np.ndarray, d2: np.ndarray, along: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """‖a‖², ‖b‖², P and 1 - cos, as measure_pair's docstring has it."""
        b2 = a2 - 2.0 * along + d2
        aside = d2 - along**2 / a2
        again = (d2 > 0) & (a2 > 0) & self.good
        again &= (aside < ANGLE_SAFE * d2) | (b2 < ANGLE_SAFE * a2)
        if again.any():
            a, b = (x[again].astype(np.float64) for x in (self.a, self.b))
            factor = (1.0 - along[again] / a2[again])[:, None, None]
            left = a * factor - b
            own, other, rest, beside = (
                self._dots(x, y).sum(axis=1) for x, y in ((a, a), (b, b), (left, left), (a, left))
            )
            a2, b2, along, aside = (x.copy() for x in (a2, b2, along, aside))
            a2[again], b2[again] = own, other
            along[again] = (1.0 - factor[:, 0, 0]) * own + beside
            aside[again] = np.maximum(0.0, rest - beside**2 / own)
        cosine = (a2 - along) / np.sqrt(a2 * b2)
        apart = np.where(cosine > 0.0, aside / b2 / (1.0 + cosine), 1.0 - cosine)
        nothing = (a2 == 0.0) | (b2 == 0.0)
        b2 = np.where(d2 == 0.0, a2, np.where(a2 == 0.0, d2, b2))
        return a2, b2, along, np.where(d2 == 0.0, 0.0, np.where(nothing, 1.0, apart))

    def _ulp(self, form: Format | None, differs: np.ndarray, a2: np.ndarray) -> dict[str, Any]:
        if form is None:
            return {}
        n = self.rows * self.columns
        keys_a, keys_b = (
            key_array(stored(grid, form, slice(0, grid.num_rows), _EVERY), form)
            for grid in self.grids[:2]
        )
        rms = np.sqrt(a2 / n).tolist()
        least = [
            smallest_key(form, form.unit_roundoff * value) if good and yes else 0
            for value, good, yes in zip(rms, self.good.tolist(), differs.tolist(), strict=True)
        ]
        flat = (self.count, -1)
        keep = np.abs(keys_a).reshape(flat) >= np.array(least, keys_a.dtype)[:, None]
        distance = distance_array(keys_a, keys_b).reshape(flat) * keep
        counted = keep.sum(axis=1)
        num_above = counted - np.ceil(0.99 * counted).astype(np.int64) + 1
        p99, largest = _tops(distance, num_above.clip(1, n))
        some = differs & (counted > 0)
        return {
            "ulp_share_over_1": np.where(
                some, (distance > 1).sum(axis=1) / np.maximum(counted, 1), 0.0
            ),
            "ulp_p99": np.where(some, p99.astype(np.float64), 0.0),
            "ulp_max": np.where(some, largest.astype(np.float64), 0.0),
        }


def _tops(distance: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, of each row of distances (N, n), the ``places``-th largest, and the largest."""
    largest = distance.max(axis=1)
    nth_largest = np.zeros_like(largest)
    open_ = np.ones(len(distance), bool)
    for value in range(_COUNTED_ULP):
        fewer = (distance > value).sum(axis=1) < places
        nth_largest[open_ & fewer] = value
        open_ &= ~fewer
        if not open_.any():
            return nth_largest, largest
    rest, places = distance[open_], places[open_]
    n, most = distance.shape[1], int(places.max())
    tops = np.sort(np.partition(rest, n - most, axis=1)[:, n - most :], axis=1)
    nth_largest[open_] = np.take_along_axis(tops, (most - places)[:, None], 1)[:, 0]
    return nth_largest, largest


def median(ordered: np.ndarray) -> np.ndarray:
    """Take the median along the last axis of values in order; np.median takes longer than all of a
    decode step's arithmetic."""
    count = ordered.shape[-1]
    low, high = ordered[..., (count - 1) // 2], ordered[..., count // 2]
    return np.where(low == high, low, (low + high) / 2)


# Two implementations against the truth: how far each is from what is right.
#
# a = reference, b = candidate, R = truth (float64). Rows are tokens, columns features.
# One pass in float64 gathers, per row, ‖a-R‖, ‖b-R‖, ‖a-b‖, ‖R‖ and ‖R - x‖ (x: the block's
# input) and, per column, Σ(a-R)², Σ(b-R)² and ΣR², so that a wrong head or channel is seen
# which a row's norm dilutes by √D, and the largest row of the first two: one element is no channel.
#
# The gain of a row is <d, R>/‖R‖² with d = a-R or b-R: a consistent scale error, far below
# the rounding of single elements, since that averages out over D columns. How many columns
# really take part is the participation ratio (ΣR²)²/ΣR⁴: with a few massive channels it is
# small, and their own rounding looks like a gain (PairMetrics.gain sees only a against b).
#
# Rows that are masked, or hold a nan or inf on any side, are left out. Sink rows (norm over
# 10 × the median, see numerics.sums) and rows whose error is over 8 × the median row's count in
# the rows, not in the columns: one bad token is no bad channel.

_CHUNK_NUMEL = 1 << 18
"""Elements per chunk: three operands of 2 MiB in float64 stay in cache."""


class AgainstTruth(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Per kept row (T,) and per column (D,), float64."""

    norm: np.ndarray
    """‖R‖."""
    update: np.ndarray | None
    """‖R - x‖; None without a base."""
    reference: np.ndarray
    """‖a-R‖."""
    candidate: np.ndarray
    """‖b-R‖."""
    between: np.ndarray
    """‖a-b‖."""
    gain_reference: np.ndarray
    """<a-R, R>/‖R‖²."""
    gain_candidate: np.ndarray
    update_gain_reference: np.ndarray | None
    """<a-R, R-x>/‖R-x‖²; None without a base."""
    update_gain_candidate: np.ndarray | None
    spread: np.ndarray
    """Participation ratio of R, of R - x where there is a base."""
    spread_reference: np.ndarray
    """Participation ratio of a-R: (Σe²)²/Σe⁴, of how many columns its error is made."""
    spread_candidate: np.ndarray
    sink: np.ndarray
    """bool."""
    channels: np.ndarray
    """(6, D): over rows but sinks, Σ of (a-R)², (b-R)², (a-b)² and R², and the largest (a-R)² and
    (b-R)²."""
    peaks: np.ndarray
    """(3,): of the first three rows of ``channels`` the largest channel."""
    row_index: np.ndarray
    """The kept rows' numbers in the whole tensor."""
    alike: np.ndarray
    """bool. Where one side's error follows from the other's and ``between``: are both of a size,
    for certain? True where both are measured."""
    in_units: AgainstTruth | None = None
    """The same rows in each channel's own unit (``measure_in_units``), where they were asked."""

    @property
    def num_rows(self) -> int:
        return len(self.norm)


def with_rounding(against: AgainstTruth, floor: np.ndarray) -> AgainstTruth:
    """The same with one more rounding on both sides: what is left of the difference between two
    dtypes is less than a fault then, also where one side is exact.

    ``floor`` (T,): that of the coarser dtype, of two implementations; one makes 1/√2 of it.
    """
    rounding = floor * against.norm / math.sqrt(2)
    channels = against.channels.copy()
    usual = np.square(rounding[~against.sink])
    channels[:2] += usual.sum() / max(1, channels.shape[1])
    return msgspec.structs.replace(
        against,
        reference=np.hypot(against.reference, rounding),
        candidate=np.hypot(against.candidate, rounding),
        in_units=None,
        channels=channels,
        peaks=channels[:3].max(axis=1, initial=0.0),
    )


def against_many(
    a: Tensor, b: Tensor, truth: Tensor, base: Tensor | None = None
) -> list[AgainstTruth | None]:
    """``measure_against`` of each of N tensors of one shape, (N, …); None for one that holds a nan
    or inf, or whose squares leave float64. ``b`` may be ``a`` itself: equal sides take half the
    work."""
    columns = a.shape[-1] if a.ndim > 1 else 1
    count, numel = len(a), math.prod(a.shape)
    if not numel:
        return [None] * count
    sums = np.zeros((13, numel // columns))
    with np.errstate(all="ignore"):
        x, r, *rest = (wide(t).reshape(-1, columns) for t in (a, truth, base) if t is not None)
        y = x if b is a else wide(b).reshape(-1, columns)
        terms = add_row_sums(x, y, r, rest[0] if rest else None, sums, row_dots)
        by_pair = sums.reshape(13, count, -1)
        sink, unusual = _apart(by_pair)
        channels = np.zeros((count, 6, columns))
        for number, term in terms.items():
            if len(term) == count:
                np.square(term, out=channels[:, number])
                if number < 2:
                    channels[:, 4 + number] = channels[:, number]
                continue
            term = term.reshape(count, -1, columns)
            if unusual.any():
                term = np.where(unusual[:, :, None], 0.0, term)
            np.einsum("ntd,ntd->nd", term, term, out=channels[:, number])
            if number < 2:
                largest = np.maximum(term.max(axis=1), -term.min(axis=1))
                np.square(largest, out=channels[:, 4 + number])
        if b is a:
            channels[:, [1, 5]] = channels[:, [0, 4]]
        derived = _derived(by_pair, with_base=bool(rest))
        good = np.asarray(np.isfinite(by_pair[[0, 1, 2, 3, 6]]).all(axis=(0, 2)))
        rows = np.arange(by_pair.shape[2])
    fields = derived | {
        "sink": sink,
        "channels": channels,
        "peaks": channels[:, :3].max(axis=2),
        "row_index": [rows] * count,
        "alike": [np.ones(len(rows), bool)] * count,
        "in_units": None,
    }
    each = [fields[name] for name in AgainstTruth.__struct_fields__]
    columns_of = [[None] * count if values is None else list(values) for values in each]
    return [
        AgainstTruth(*values) if fine else None
        for fine, *values in zip(good.tolist(), *columns_of, strict=True)
    ]


def _apart(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find, of N pairs' rows (13, N, T), the sinks, and what stays out of the columns, (N, T)."""
    norms = np.sqrt(sums[0])
    middle = (norms.shape[1] - 1) // 2
    limit = SINK_FACTOR * np.sort(norms, axis=1)[:, middle, None]
    sink = (norms > limit) & (limit > 0)
    size = np.sqrt(sums[1:3].max(axis=0) / np.maximum(sums[0], 1e-300))
    ordered = np.sort(np.where(sink, math.nan, size), axis=1)
    middles = np.maximum((~sink).sum(axis=1) - 1, 0) // 2
    limit = OUTLIER * np.take_along_axis(ordered, middles[:, None], 1)
    return sink, sink | ((size > limit) & (limit > 0))


def _derived(sums: np.ndarray, *, with_base: bool) -> dict[str, Any]:
    """The rows' fields of AgainstTruth, from their thirteen sums."""
    norm2, ref, cand, between, ref_r, cand_r, up2, ref_u, cand_u, r4, u4, ref4, cand4 = sums
    top, fourth = (up2, u4) if with_base else (norm2, r4)
    return {
        "norm": np.sqrt(norm2),
        "update": np.sqrt(up2) if with_base else None,
        "reference": np.sqrt(ref),
        "candidate": np.sqrt(cand),
        "between": np.sqrt(between),
        "gain_reference": _over(ref_r, norm2),
        "gain_candidate": _over(cand_r, norm2),
        "update_gain_reference": _over(ref_u, up2) if with_base else None,
        "update_gain_candidate": _over(cand_u, up2) if with_base else None,
        "spread": _over(np.square(top), fourth),
        "spread_reference": _over(np.square(ref), ref4),
        "spread_candidate": _over(np.square(cand), cand4),
    }


def measure_against(
    a: Tensor,
    b: Tensor,
    truth: Tensor,
    *,
    row_mask: Tensor | None = None,
    base: Tensor | None = None,
    kernel: Kernel = "numpy",
    device: torch.device | None = None,
) -> AgainstTruth:
    """Both sides against ``truth``; all of one shape, any float dtype.

    ``row_mask``: bool, one per row, True = measure. ``base``: the block's input x. ``kernel``: see
    numerics.sums; formats that compiled loops do not read go numpy's way. ``device``: add up
    there instead.
    Raises ValueError where shapes differ.
    """
    check_shapes(a, candidate=b, truth=truth, base=base)
    columns = a.shape[-1] if a.ndim else 1
    x, y, r, *rest = (as_array(t) for t in (a, b, truth, base) if t is not None)
    if device is None and row_mask is None and kernel == "numpy" and 0 < x.size <= _CHUNK_NUMEL:
        small = against_many(x[None], y[None], r[None], rest[0][None] if rest else None)
        if small[0] is not None:
            return small[0]
    x, y, r, *rest = (t.reshape(-1, columns) for t in (x, y, r, *rest))
    kept = np.ones(len(x), bool)
    if row_mask is not None:
        kept &= as_array(row_mask).reshape(-1).astype(bool)
    grids = [Grid(t) for t in (x, y, r, *rest)]
    with np.errstate(all="ignore"):
        if device is not None:
            from divergence.numerics.on_device import against_on_device

            sums, sink, channels = against_on_device(grids, kept, device)
        elif chosen(kernel, *(grid.format for grid in grids)) == "compiled":
            from divergence.numerics.compiled import add_channels, row_sums

            sums = row_sums(*grids)
            sink, channels = row_sinks(np.sqrt(sums[0]), kept), np.zeros((6, columns))
            usual = usual_rows(sums, kept, sink)
            add_channels(grids[0], grids[1], grids[2], np.flatnonzero(usual), channels)
        else:
            sums, sink, channels = _in_chunks(grids, kept)
        good = kept & np.isfinite(sums[:4]).all(axis=0)
        derived = _derived(sums[:, good], with_base=base is not None)
    return AgainstTruth(
        **derived,
        sink=sink[good],
        channels=channels,
        peaks=channels[:3].max(axis=1, initial=0.0),
        row_index=np.flatnonzero(good),
        alike=np.ones(int(good.sum()), bool),
    )


def measure_in_units(against: AgainstTruth, a: Tensor, b: Tensor, truth: Tensor) -> AgainstTruth:
    """The rows of ``against`` again, each column d in its own unit: every number is divided by

        u_d = √max(Σ_t R_td², 2⁻¹⁶ · mean over d of Σ_t R_td²)

    so that a row's error is made of what its channels are off by relative to their own size, and
    not of the few channels that hold the energy. Columns are not told apart again."""
    energy = against.channels[3]
    unit = np.sqrt(np.maximum(energy, 2.0**-16 * energy.mean()))
    grids = [Grid(as_array(t).reshape(-1, len(unit))) for t in (a, b, truth)]
    rows = max(1, _CHUNK_NUMEL // len(unit))
    buffers, sums = np.empty((3, rows * len(unit))), np.zeros((13, against.num_rows))
    for start in range(0, against.num_rows, rows):
        numbers = against.row_index[start : start + rows]
        x, y, r = (
            grid.load(numbers, slice(0, len(unit)), buffer) / unit
            for grid, buffer in zip(grids, buffers, strict=True)
        )
        add_row_sums(x, y, r, None, sums[:, start : start + rows], row_dots)
    fields = _derived(sums, with_base=False) | {"channels": np.zeros((6, 0)), "peaks": np.zeros(3)}
    return msgspec.structs.replace(against, **fields)


def _in_chunks(grids: list[Grid], kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows' sums (13, T), which rows are sinks (T,), the columns (6, D). ``grids``: both sides,
    the truth, and the block's input where there is one."""
    count, columns = grids[0].num_rows, grids[0].num_cols
    rows = max(1, _CHUNK_NUMEL // max(1, columns))
    buffers: np.ndarray = np.empty((4, rows * columns))
    sums, channels = np.full((13, count), np.nan), np.zeros((6, columns))

    def chunk(numbers: Rows) -> list[np.ndarray]:
        loads = zip(grids, buffers, strict=False)
        return [grid.load(numbers, slice(0, columns), buffer) for grid, buffer in loads]

    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        x, y, r, *rest = chunk(part)
        add_row_sums(x, y, r, rest[0] if rest else None, sums[:, part], row_dots)
    sink = row_sinks(np.sqrt(sums[0]), kept)
    usual = np.flatnonzero(usual_rows(sums, kept, sink))
    for start in range(0, len(usual), rows):
        numbers = usual[start : start + rows]
        gapless = int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1
        x, y, r, *_ = chunk(slice(int(numbers[0]), int(numbers[-1]) + 1) if gapless else numbers)
        for number, term in enumerate((x - r, y - r, x - y, r)):
            channels[number] += column_dots(term, term)
            if number < 2:
                largest = np.square(np.maximum(term.max(axis=0), -term.min(axis=0)))
                np.maximum(channels[4 + number], largest, out=channels[4 + number])
    return sums, sink, channels


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """The quotient; 0 where the denominator is 0."""
    return np.where(bottom > 0, top / np.maximum(bottom, 1e-300), 0.0)

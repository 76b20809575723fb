"""Every metric of a pair of tensors, in two streaming passes.

a = reference, b = candidate, d = a - b. Rows are tokens (the product of the leading
dimensions), columns are features (the last one). The first pass gathers the sums of
divergence.numerics.pairs.sums; the second counts ulp distances, since its mask needs rms(a).
Metrics run over the elements that are finite on both sides, in the rows of the mask.
Division: 0/0 = 0, x/0 = inf. -0 equals +0 everywhere but in ``identical``.

1 - cos is never taken from cos. With g = P/A the part of d at right angles to a has
the square S = Σ(d - g a)² = E - P²/A, sin² = S/‖b‖² and 1 - cos = sin² / (1 + cos):
exact however small the angle. Where E - P²/A would cancel (d nearly parallel to a,
b much shorter than a) a third pass sums S itself in float64. (Lagrange's identity;
Kahan, "How Futile are Mindless Assessments of Roundoff", 2006, on angles.)

No thresholds here but the definition of a sink token: judging is compare's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from divergence.numerics.formats import Format, format_named, is_float
from divergence.numerics.kernels import Kernel, chosen
from divergence.numerics.pairs.blocks import BLOCK, Grid, Rows, compute_dtype, row_dots, run_split
from divergence.numerics.pairs.metrics import PairMetrics, RowMetrics
from divergence.numerics.pairs.sums import (
    Sums,
    channel_ratios,
    gather,
    ratio,
    root_ratio,
    root_ratios,
    tiles,
)
from divergence.numerics.pairs.ulp_counts import count_ulp

__all__ = ["ANGLE_SAFE", "SINK_FACTOR", "PairMetrics", "RowMetrics", "measure_pair", "narrower"]

SINK_FACTOR = 10.0
"""A sink token's norm exceeds this many times the median row norm (massive activations:
Sun et al., arXiv 2402.17762; attention sinks: Xiao et al., arXiv 2309.17453)."""

ANGLE_SAFE = 0.5
"""Below this share of ‖d‖² at right angles to a, S = E - P²/A has lost a bit: sum it itself."""


def measure_pair(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    row_mask: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    ulp_format: str | Format | None = None,
    threads: int | None = None,
    block: int = BLOCK,
    kernel: Kernel = "numpy",
    device: torch.device | None = None,
) -> tuple[PairMetrics, RowMetrics]:
    """Metrics of b against a, whole and by row.

    ``row_mask``: bool, one per row (any shape of that many elements), True = measure.
    ``base``: same shape as a, the block's input. ``ulp_format``: name or Format; by default
    the narrower of the two storage formats, if both are floats. ``threads``: default is
    torch's own setting, 1 for small tensors. ``block``: elements per block.
    ``kernel``: see numerics.kernels; formats that compiled loops do not read go numpy's way.
    ``device``: add up there instead (numerics.on_device), where float64's range is not left.
    Formulas, units and care: PairMetrics. Raises ValueError where shapes do not match.
    """
    for name, other in (("candidate", b), ("base", base)):
        if other is not None and other.shape != a.shape:
            raise ValueError(
                f"the {name} has shape {tuple(other.shape)}, the reference {tuple(a.shape)}"
            )
    pair = _Pair(
        a, b, base, row_mask, threads=threads, block=min(block, BLOCK), kernel=kernel, device=device
    )
    form = format_named(ulp_format) if isinstance(ulp_format, str) else ulp_format
    return pair.measure(tuple(a.shape), form or narrower(pair.a.format, pair.b.format))


def narrower(a: Format, b: Format) -> Format | None:
    """The format in which ulp are counted: the narrower of two floats', else None."""
    if not (is_float(a) and is_float(b)):
        return None
    return min(a, b, key=lambda form: (form.itemsize, form.mantissa_bits))


class _Pair:
    """One call of measure_pair: the grids, the rows, and what the passes leave behind."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        base: torch.Tensor | None,
        row_mask: torch.Tensor | None,
        *,
        threads: int | None,
        block: int,
        kernel: Kernel,
        device: torch.device | None,
    ) -> None:
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
        self.real, self.padded = _split_rows(row_mask, self.a.num_rows)
        self.threads = threads or (1 if a.numel() < 8 * BLOCK else min(8, torch.get_num_threads()))
        self.block = block
        self.row_a, self.row_d, self.row_update = np.zeros((3, self.a.num_rows))
        self.row_finite = np.zeros(self.a.num_rows, bool)
        self.row_nonfinite = np.zeros(self.a.num_rows, np.uint8)

    def _sums(self, rows: Rows) -> Sums:
        arrays = (
            self.row_a, self.row_d, self.row_update, self.row_finite, self.row_nonfinite
        )  # fmt: skip
        if self.there is not None:
            sums = Sums(self.a, self.b, self.base, dtype=self.dtype, rows=arrays)
            return self.there.gather(sums, rows)

        def work(part: Rows | range) -> Sums:
            mine = slice(part.start, part.stop) if isinstance(part, range) else part
            sums = Sums(self.a, self.b, self.base, dtype=self.dtype, rows=arrays)
            if self.kernel == "compiled":
                from divergence.numerics.compiled.sums import gather_compiled

                return gather_compiled(sums, mine)
            return gather(sums, mine, block=self.block)

        shared = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
        first, *others = run_split(work, shared, threads=self.threads)
        for other in others:
            first.add(other)
        return first

    def measure(
        self, shape: tuple[int, ...], ulp_form: Format | None
    ) -> tuple[PairMetrics, RowMetrics]:
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
        sinks = _sinks(row_a)
        n = sums.num_finite
        spread = max(0.0, sums.product_squares - product**2 / max(n, 1)) * n / max(n - 1, 1)
        width = self.a.width
        numel = len(row_a) * self.a.num_cols
        update = None if self.base is None else math.sqrt(self.row_update[self.real].sum())
        metrics = PairMetrics(
            identical=sums.max_at < 0 and self._identical(),
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
            **self._largest(sums, shape),
            **self._ulp(sums, ulp_form, a2),
            **_token_metrics(per_row),
            **self._channel_metrics(sums, a2),
        )
        return metrics, self._rows(per_row)

    def _rows(self, rel_l2: np.ndarray) -> RowMetrics:
        with np.errstate(over="ignore"):  # a float64 mask's norm is beyond float64: inf
            norm = np.sqrt(self.row_a) / self.scale
            diff = np.sqrt(self.row_d) / self.scale
            update = None if self.base is None else np.sqrt(self.row_update) / self.scale
        return RowMetrics(
            rel_l2=rel_l2,
            diff=np.where(np.isnan(rel_l2), math.nan, diff),
            norm=norm,
            update_norm=update,
            nonfinite=self.row_nonfinite if self.row_nonfinite.any() else None,
        )

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

    def _largest(self, sums: Sums, shape: tuple[int, ...]) -> dict[str, Any]:
        if sums.max_at < 0:
            return dict.fromkeys(("max_abs_index", "max_abs_reference", "max_abs_candidate")) | {
                "max_abs": 0.0
            }
        a, b = self.a.at(sums.max_at), self.b.at(sums.max_at)
        at = np.unravel_index(sums.max_at // self.a.width, shape) if shape else ()
        return {
            "max_abs": abs(a - b),
            "max_abs_index": tuple(int(number) for number in at),
            "max_abs_reference": a,
            "max_abs_candidate": b,
        }

    def _ulp(self, sums: Sums, form: Format | None, a2: float) -> dict[str, Any]:
        names = ("ulp_share_over_1", "ulp_p99", "ulp_max")
        if form is None:
            return dict.fromkeys((*names, "ulp_format"))
        if sums.max_at < 0 or not sums.num_finite:
            return dict.fromkeys(names, 0.0) | {"ulp_format": form.name}
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
            there=self.there,
        )
        return {
            "ulp_format": form.name,
            "ulp_share_over_1": counts.share_over_1,
            "ulp_p99": counts.p99,
            "ulp_max": counts.max,
        }

    def _channel_metrics(self, sums: Sums, a2: float) -> dict[str, Any]:
        col_a = sums.col_a.reshape(-1, self.a.width).sum(axis=1)
        col_d = sums.col_d.reshape(-1, self.a.width).sum(axis=1)
        if not len(col_a):
            return {"channel_rel_l2_max": 0.0, "worst_channel": None}
        unit = max(self.a.format.unit_roundoff, self.b.format.unit_roundoff)
        ratios = channel_ratios(col_d, np.maximum(col_a, unit**2 * a2 / len(col_a)))
        worst = int(ratios.argmax())
        return {"channel_rel_l2_max": math.sqrt(ratios[worst]), "worst_channel": worst}

    def _identical(self) -> bool:
        if self.a.format.name != self.b.format.name:
            return False
        parts = tiles(slice(0, self.a.num_rows), self.a.num_cols)
        return all(np.array_equal(self.a.bits[part], self.b.bits[part]) for part in parts)


def _split_rows(row_mask: torch.Tensor | None, num_rows: int) -> tuple[Rows, Rows]:
    """Row numbers to measure, and those to leave out."""
    if row_mask is not None:
        mask = row_mask.detach().cpu().reshape(-1).to(torch.bool).numpy()
        if len(mask) != num_rows:
            raise ValueError(f"the row mask has {len(mask)} entries for {num_rows} rows")
        if not mask.all():
            return np.flatnonzero(mask), np.flatnonzero(~mask)
    return slice(0, num_rows), slice(0, 0)


def _token_metrics(per_row: np.ndarray) -> dict[str, Any]:
    known = np.sort(per_row[~np.isnan(per_row)])
    count = len(known)
    if not count:
        zeros = ("token_rel_l2_median", "token_rel_l2_p99", "token_rel_l2_max")
        return dict.fromkeys(zeros, 0.0) | {"worst_row": None}
    return {
        "token_rel_l2_median": _median(known),
        "token_rel_l2_p99": float(known[max(0, math.ceil(0.99 * count - 1))]),  # inverted cdf
        "token_rel_l2_max": float(known[-1]),
        "worst_row": int(np.nanargmax(per_row)),
    }


def _median(ordered: np.ndarray) -> float:
    """Of values in order; np.median takes longer than all of a decode step's arithmetic."""
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return float(low if low == high else (low + high) / 2)


def _sinks(row_a: np.ndarray) -> np.ndarray:
    """Rows whose norm exceeds SINK_FACTOR times the median; none where the median is 0."""
    if not len(row_a):
        return np.zeros(0, bool)
    norms = np.sqrt(row_a)
    median = _median(np.sort(norms))
    sinks: np.ndarray = norms > (SINK_FACTOR * median if median else math.inf)
    return sinks


def common_scale(grids: list[Grid], *, kernel: Kernel = "numpy") -> float:
    """A power of two that brings float64 values whose squares would leave float64's range
    back into it, set on all grids; 1.0 otherwise."""
    if not any(
        grid.format.itemsize // grid.width == 8 and grid.format.kind != "int" for grid in grids
    ):
        return 1.0
    if kernel == "compiled":
        from divergence.numerics.compiled.sums import largest_magnitude

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

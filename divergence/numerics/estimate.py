"""The metrics of a pair as far as two sketches tell them, and how well.

Of a row a, b the norms are known exactly, and with them the part of d = a - b that is a difference
of length: with beta = ‖b‖ / ‖a‖,

    ‖d‖² = (‖a‖ - ‖b‖)² + ‖b - beta a‖² / beta,

and only the second term, how far the directions are apart, is left to estimate, from the sketches
(numerics.sketches) by A_t = ‖s_b - beta s_a‖² / beta with a relative variance of 2/k. So a
scale error is told exactly. Rows' signs are independent, so for the sum A of a block's rows

    v1 = variance / square = (2/k) q,    q = Σ A_t² / A²,

one over the number of rows that make up the sum (Kish's effective number), from the estimates of
the rows themselves. Where the block's rows are pooled, ‖S_b - S_a‖² less the rows' differences of
length estimates the sum once more, well also where few rows differ; in units of A²

    v2 = (2/K) (A + Σ (‖a‖ - ‖b‖)²)² / A²,    covariance c = (2/K) q

(what both have of a row is the square of the same sums), and of the two comes what has the least
variance: E = w A_pooled + (1 - w) A, w = (v1 - c) / (v1 + v2 - 2c), with the variance v = (v1 v2 -
c²) / (v1 + v2 - 2c) relative to E². The difference E - A goes to the rows by their own variances,
in proportion to A_t². Pooled sums are left aside where rows of the block are (``row_mask``, rows
that float32 could not hold), and where A is so small that their rounding matters: below 8 times
their resolution.

The sum over blocks is then spread like chi-square over its degrees of freedom, 2 (Σ E)² / Σ v E²,
and the interval holds the true ‖d‖ in 95 of 100 cases: freedom · E / chi-square at 2.5% and 97.5%
(its quantiles by Wilson and Hilferty, "The distribution of chi-square", PNAS 17, 1931). Errors in
few features are mostly estimated better than that: the interval errs to the wide side.

1 - cos = (‖d‖² - (‖a‖ - ‖b‖)²) / (2 ‖a‖ ‖b‖), and gain = (‖b‖² - ‖a‖² - ‖d‖²) / (2 ‖a‖²), from
exact norms. Elementwise metrics (ulp, the largest difference, channels) cannot be known: None.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.arrays import as_array, wide
from divergence.numerics.pairs import PairMetrics, RowMetrics
from divergence.numerics.sketches import Projections, SumDtype, resolution
from divergence.numerics.sums import SINK_FACTOR, Estimate

if TYPE_CHECKING:
    from divergence.numerics.arrays import Tensor


_TWO_SIDED_95 = 1.959964
_ROUNDINGS = 8.0
"""From how many times the resolution on pooled sums count: their rounding is 1/64 of ‖d‖² then."""


def estimate_pair(
    a: Projections,
    b: Projections,
    *,
    num_features: int,
    sums: SumDtype = "float64",
    row_mask: Tensor | None = None,
    base: Projections | None = None,
) -> tuple[PairMetrics, RowMetrics, Estimate]:
    """Estimate a pair's metrics from sketches of equal rows and k; ``row_mask``: True = measure, by
    row. ``sums``: the coarser precision that either was added up in.

    ``base``: the sketch of the block's input. Rows that float32 could not hold are left out.
    """

    k = a.rows.shape[1] - 2
    sides = [_Side(sketch) for sketch in (a, b)]
    ref, cand = sides
    with np.errstate(all="ignore"):
        gaps, apart = np.square(ref.norm - cand.norm), _apart(ref, cand)
        d2 = gaps + apart
        update = None if base is None else np.square(ref.sums - _Side(base).sums).sum(1)
    usable = np.isfinite(d2) & np.isfinite(ref.norm) & np.isfinite(cand.norm)
    real = np.ones(len(d2), bool)
    if row_mask is not None:
        real = as_array(row_mask).reshape(-1).astype(bool)
    kept = usable & real
    apart, variance = _with_pooled(ref, cand, gaps, apart, kept, num_features, sums)
    d2 = gaps + apart
    a2, b2 = float(np.square(ref.norm[kept]).sum()), float(np.square(cand.norm[kept]).sum())
    total = float(d2[kept].sum())
    rel_l2 = _root(total, a2)
    estimate = _interval(
        apart[kept],
        float(gaps[kept].sum()),
        a2,
        k,
        variance,
        resolution(num_features, k, sums=sums),
    )
    # ‖a‖² - ‖b‖², as a difference of near numbers
    nearer = float(((ref.norm - cand.norm) * (ref.norm + cand.norm))[kept].sum())
    norms = math.sqrt(a2), math.sqrt(b2)
    gap = nearer / (norms[0] + norms[1]) if a2 + b2 else 0.0
    aside = max(0.0, total - gap * gap)
    one_minus_cosine = aside / (2 * norms[0] * norms[1]) if a2 and b2 else float(a2 != b2)
    per_row = np.full(len(d2), np.nan)
    per_row[kept] = _roots(d2[kept], np.square(ref.norm[kept]))
    pads = usable & ~real
    median = float(np.median(ref.norm[kept])) if kept.any() else 0.0
    sinks = kept & (ref.norm > (SINK_FACTOR * median if median else math.inf))
    usual = kept & ~sinks
    update_norm = None if update is None else math.sqrt(float(update[kept].sum()))
    numbers = per_row[~np.isnan(per_row)]
    metrics = PairMetrics(
        identical=False,
        numel=int(real.sum()) * num_features,
        num_finite=int(kept.sum()) * num_features,
        num_rows=int(real.sum()),
        num_masked=int((~real).sum()),
        rel_l2=rel_l2,
        cosine=1.0 - one_minus_cosine,
        one_minus_cosine=one_minus_cosine,
        sqnr_db=-20.0 * math.log10(rel_l2) if rel_l2 else math.inf,
        reference_norm=norms[0],
        candidate_norm=norms[1],
        gain=0.0 - (nearer + total) / (2 * a2) if a2 else 0.0,
        gain_se=math.sqrt(variance) / (2 * a2) if a2 else math.inf,
        token_rel_l2_median=float(np.median(numbers)) if len(numbers) else 0.0,
        token_rel_l2_p99=float(np.quantile(numbers, 0.99, method="inverted_cdf"))
        if len(numbers)
        else 0.0,
        token_rel_l2_max=float(numbers.max()) if len(numbers) else 0.0,
        worst_row=int(np.nanargmax(per_row)) if len(numbers) else None,
        update_rel_l2=None if update_norm is None else _root(total, update_norm**2),
        update_norm=update_norm,
        num_sink_tokens=int(sinks.sum()),
        rel_l2_without_sinks=_root(float(d2[usual].sum()), float(np.square(ref.norm[usual]).sum()))
        if sinks.any()
        else None,
        pad_rel_l2=_root(float(d2[pads].sum()), float(np.square(ref.norm[pads]).sum()))
        if pads.any()
        else None,
    )
    rows = RowMetrics(
        rel_l2=per_row,
        diff=np.where(kept, np.sqrt(d2), math.nan),
        norm=ref.norm,
        update_norm=None if update is None else np.sqrt(update),
    )
    return metrics, rows, estimate


class _Side:
    """One sketch in float64: its projections, its rows' norms and its pooled sums."""

    def __init__(self, sketch: Projections) -> None:
        values = wide(sketch.rows)
        self.sums, self.norm = values[:, :-2], values[:, -2] + values[:, -1]
        self.pooled = wide(sketch.pooled)


def _apart(a: _Side, b: _Side) -> np.ndarray:
    """Estimate ‖b - beta a‖² / beta by row; 0 where a side is zero: the norms say all."""
    some = (a.norm > 0) & (b.norm > 0)
    beta = np.where(some, b.norm / a.norm, 1.0)
    apart = np.square(b.sums - beta[:, None] * a.sums).sum(1) / beta
    return np.where(some | ~np.isfinite(a.norm) | ~np.isfinite(b.norm), apart, 0.0)


def _with_pooled(
    a: _Side,
    b: _Side,
    gaps: np.ndarray,
    apart: np.ndarray,
    kept: np.ndarray,
    num_features: int,
    sums: SumDtype,
) -> tuple[np.ndarray, float]:
    """Estimate each row's ‖d‖², and the variance of the sum over rows ``kept``."""
    k, (num_blocks, num_pooled) = a.sums.shape[1], a.pooled.shape
    if not a.pooled.size or b.pooled.shape != a.pooled.shape:
        return apart, 2.0 / k * float(np.square(apart[kept]).sum())
    blocks = (num_blocks, -1)
    rows = np.where(kept, apart, 0.0).reshape(blocks)
    gaps_kept = np.where(kept, gaps, 0.0).reshape(blocks).sum(1)
    sizes = np.square(np.where(kept, a.norm, 0.0)).reshape(blocks)
    finest = resolution(num_features * sizes.shape[1], num_pooled, sums=sums)
    total, squares = rows.sum(1), np.square(rows).sum(1)
    with np.errstate(all="ignore"):
        pooled = np.square(a.pooled - b.pooled).sum(1) - gaps_kept
        own, shared = 2.0 / k * squares, 2.0 / num_pooled * squares
        other = 2.0 / num_pooled * np.square(total + gaps_kept)
        sum_of_both = own + other - 2.0 * shared
        best = total + (own - shared) / sum_of_both * (pooled - total)
        variance = (own * other - shared**2) / sum_of_both * np.square(best / total)
    usable = kept.reshape(blocks).all(1) & (best > 0.0) & np.isfinite(best + variance)
    usable &= total + gaps_kept >= np.square(_ROUNDINGS * finest) * sizes.sum(1)
    shift = np.divide(best - total, squares, out=np.zeros(num_blocks), where=usable)
    moved = np.maximum(0.0, rows + shift[:, None] * np.square(rows)).reshape(-1)
    return np.where(kept, moved, apart), float(np.where(usable, variance, own).sum())


def _interval(
    apart: np.ndarray, gaps: float, a2: float, k: int, variance: float, finest: float
) -> Estimate:
    """``apart``: of each row, what is estimated of its ‖d‖²; ``gaps``: the sum of what is known;
    ``variance``: of the estimated sum; ``finest``: the resolution."""
    total = float(apart.sum())
    rel = _root(gaps + total, a2)
    low = high = rel
    if 0.0 < variance < math.inf and math.isfinite(rel):
        freedom = 2.0 * total**2 / variance
        low = _root(gaps + total / _chi_square_share(freedom, _TWO_SIDED_95), a2)
        high = _root(gaps + total / _chi_square_share(freedom, -_TWO_SIDED_95), a2)
    high = math.hypot(high, finest)
    return Estimate(
        relative_error=max(high - rel, rel - low) / rel if 0 < rel < math.inf else None,
        low=low,
        high=high,
        num_projections=k,
        num_values=len(apart) * k,
        resolution=finest,
    )


def _chi_square_share(freedom: float, deviate: float) -> float:
    """The quantile of chi-square over its ``freedom`` degrees, at a normal deviate."""
    part = 2.0 / (9.0 * freedom)
    return (1.0 - part + deviate * math.sqrt(part)) ** 3


def _root(x2: float, y2: float) -> float:
    """√(x2 / y2) with 0/0 = 0 and x/0 = inf."""
    if x2 == 0.0:
        return 0.0
    return math.sqrt(x2 / y2) if y2 else math.inf


def _roots(x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x2 == 0.0, 0.0, np.sqrt(x2 / y2))

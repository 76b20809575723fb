"""The metrics of a pair as far as two sketches tell them, and how well.

Of a row a, b the norms are known exactly, and with them the part of d = a - b that is a difference
of length: with beta = ‖b‖ / ‖a‖,

    ‖d‖² = (‖a‖ - ‖b‖)² + ‖b - beta a‖² / beta,

and only the second term, how far the directions are apart, is left to estimate, from the sketches
(numerics.summaries.sketch) by ‖s_b - beta s_a‖² / beta with a relative variance of 2/k. So a scale
error is told exactly. Rows' signs are independent, so for the sum E of the second terms E_t

    variance / square = (2/k) Σ E_t² / E² = 2 / freedom,    freedom = k · E² / Σ E_t²,

k times the number of rows that make up the sum (Kish's effective number), from the estimates of
the rows themselves. E is then spread like chi-square over its ``freedom`` degrees, and the
interval holds the true ‖d‖ in 95 of 100 cases: freedom · E / chi-square at 2.5% and 97.5% (its
quantiles by Wilson and Hilferty, "The distribution of chi-square", PNAS 17, 1931). Errors in few
features are estimated better than that: the interval errs to the wide side.

1 - cos = (‖d‖² - (‖a‖ - ‖b‖)²) / (2 ‖a‖ ‖b‖), and gain = (‖b‖² - ‖a‖² - ‖d‖²) / (2 ‖a‖²), from
exact norms. Elementwise metrics (ulp, the largest difference, channels) cannot be known: None.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.pairs.metrics import Estimate, PairMetrics, RowMetrics
from divergence.numerics.pairs.pair import SINK_FACTOR

if TYPE_CHECKING:
    import torch

__all__ = ["estimate_pair"]

_TWO_SIDED_95 = 1.959964


def estimate_pair(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    num_features: int,
    resolution: float,
    row_mask: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> tuple[PairMetrics, RowMetrics, Estimate]:
    """From sketches (rows, k + 2) of equal rows and k; ``row_mask``: True = measure, by row.

    ``base``: the sketch of the block's input. Rows that float32 could not hold are left out.
    """

    k = a.shape[1] - 2
    sides = [_Side(one) for one in (a, b)]
    one, two = sides
    with np.errstate(all="ignore"):
        gaps, apart = np.square(one.norm - two.norm), _apart(one, two)
        d2 = gaps + apart
        update = None if base is None else np.square(one.sums - _Side(base).sums).sum(1)
    usable = np.isfinite(d2) & np.isfinite(one.norm) & np.isfinite(two.norm)
    real = np.ones(len(d2), bool)
    if row_mask is not None:
        real = row_mask.detach().cpu().reshape(-1).numpy().astype(bool)
    kept = usable & real
    a2, b2 = float(np.square(one.norm[kept]).sum()), float(np.square(two.norm[kept]).sum())
    total = float(d2[kept].sum())
    rel_l2 = _root(total, a2)
    estimate = _interval(apart[kept], float(gaps[kept].sum()), a2, k, resolution)
    # ‖a‖² - ‖b‖², as a difference of near numbers
    nearer = float(((one.norm - two.norm) * (one.norm + two.norm))[kept].sum())
    norms = math.sqrt(a2), math.sqrt(b2)
    gap = nearer / (norms[0] + norms[1]) if a2 + b2 else 0.0
    aside = max(0.0, total - gap * gap)
    one_minus_cosine = aside / (2 * norms[0] * norms[1]) if a2 and b2 else float(a2 != b2)
    per_row = np.full(len(d2), np.nan)
    per_row[kept] = _roots(d2[kept], np.square(one.norm[kept]))
    pads = usable & ~real
    sinks = kept & (one.norm > _sink_limit(one.norm[kept]))
    usual = kept & ~sinks
    update_norm = None if update is None else math.sqrt(float(update[kept].sum()))
    known = per_row[~np.isnan(per_row)]
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
        max_abs=None,
        max_abs_index=None,
        max_abs_reference=None,
        max_abs_candidate=None,
        reference_norm=norms[0],
        candidate_norm=norms[1],
        gain=0.0 - (nearer + total) / (2 * a2) if a2 else 0.0,
        gain_se=_spread_of(apart[kept], k) / (2 * a2) if a2 else math.inf,
        ulp_format=None,
        ulp_share_over_1=None,
        ulp_p99=None,
        ulp_max=None,
        token_rel_l2_median=float(np.median(known)) if len(known) else 0.0,
        token_rel_l2_p99=float(np.quantile(known, 0.99, method="inverted_cdf"))
        if len(known)
        else 0.0,
        token_rel_l2_max=float(known.max()) if len(known) else 0.0,
        worst_row=int(np.nanargmax(per_row)) if len(known) else None,
        channel_rel_l2_max=None,
        worst_channel=None,
        update_rel_l2=None if update_norm is None else _root(total, update_norm**2),
        update_norm=update_norm,
        num_sink_tokens=int(sinks.sum()),
        rel_l2_without_sinks=_root(float(d2[usual].sum()), float(np.square(one.norm[usual]).sum()))
        if sinks.any()
        else None,
        pad_rel_l2=_root(float(d2[pads].sum()), float(np.square(one.norm[pads]).sum()))
        if pads.any()
        else None,
        reference_nan=0,
        reference_inf=0,
        candidate_nan=0,
        candidate_inf=0,
        first_nonfinite_row=None,
    )
    rows = RowMetrics(
        rel_l2=per_row,
        norm=one.norm,
        update_norm=None if update is None else np.sqrt(update),
    )
    return metrics, rows, estimate


class _Side:
    """One sketch in float64: its projections and its rows' norms."""

    def __init__(self, sketch: torch.Tensor) -> None:
        values = sketch.numpy().astype(np.float64)
        self.sums, self.norm = values[:, :-2], values[:, -2] + values[:, -1]


def _apart(one: _Side, two: _Side) -> np.ndarray:
    """By row, the estimate of ‖b - beta a‖² / beta; 0 where a side is zero: the norms say all."""
    some = (one.norm > 0) & (two.norm > 0)
    beta = np.where(some, two.norm / one.norm, 1.0)
    found = np.square(two.sums - beta[:, None] * one.sums).sum(1) / beta
    return np.where(some | ~np.isfinite(one.norm) | ~np.isfinite(two.norm), found, 0.0)


def _interval(apart: np.ndarray, gaps: float, a2: float, k: int, resolution: float) -> Estimate:
    """``apart``: of each row, what is estimated of its ‖d‖²; ``gaps``: the sum of what is known."""
    total = float(apart.sum())
    rel = _root(gaps + total, a2)
    squares = float(np.square(apart).sum())
    low = high = rel
    if 0.0 < squares < math.inf and math.isfinite(rel):
        freedom = k * total**2 / squares
        low = _root(gaps + total / _chi_square_share(freedom, _TWO_SIDED_95), a2)
        high = _root(gaps + total / _chi_square_share(freedom, -_TWO_SIDED_95), a2)
    high = math.hypot(high, resolution)
    return Estimate(
        relative_error=max(high - rel, rel - low) / rel if 0 < rel < math.inf else None,
        low=low,
        high=high,
        num_projections=k,
        num_values=len(apart) * k,
        resolution=resolution,
    )


def _chi_square_share(freedom: float, deviate: float) -> float:
    """The quantile of chi-square over its ``freedom`` degrees, at a normal deviate."""
    part = 2.0 / (9.0 * freedom)
    return (1.0 - part + deviate * math.sqrt(part)) ** 3


def _spread_of(apart: np.ndarray, k: int) -> float:
    """The standard deviation of the sum."""
    return math.sqrt(2.0 / k * float(np.square(apart).sum()))


def _sink_limit(norms: np.ndarray) -> float:
    median = float(np.median(norms)) if len(norms) else 0.0
    return SINK_FACTOR * median if median else math.inf


def _root(x2: float, y2: float) -> float:
    """√(x2 / y2) with 0/0 = 0 and x/0 = inf."""
    if x2 == 0.0:
        return 0.0
    return math.sqrt(x2 / y2) if y2 else math.inf


def _roots(x2: np.ndarray, y2: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x2 == 0.0, 0.0, np.sqrt(x2 / y2))

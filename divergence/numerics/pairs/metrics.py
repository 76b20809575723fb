"""What is known of a pair of tensors after measuring it: one frozen record, no methods.

The field names are those of compare's SiteResult. How each is computed:
divergence.numerics.pairs.pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Estimate", "PairMetrics", "RowMetrics"]


class RowMetrics(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Per row t (leading dims flattened), float64, shape (rows,).

    ``rel_l2``: ‖d_t‖/‖a_t‖, nan where the row is masked or has no element finite on both
    sides. ``diff``: ‖d_t‖, which is known where ‖a_t‖ is 0. ``norm``: ‖a_t‖. ``update_norm``:
    ‖a_t - base_t‖, None without base. ``nonfinite``: 0 where all of an unmasked row is finite, 1
    where both sides agree at each nan and inf, 2 where they do not; None where no row has any.
    """

    rel_l2: np.ndarray
    diff: np.ndarray
    norm: np.ndarray
    update_norm: np.ndarray | None
    nonfinite: np.ndarray | None = None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """How well a difference is known that was estimated from sketches.

    ``relative_error``: half the width of rel_l2's 95% interval, on its wider side, over rel_l2
    (null where that is 0); ``low``, ``high``: the interval's ends. ``num_projections`` of a row,
    ``num_values`` of all rows compared. ``resolution``: below this relative L2 an estimate says
    nothing.
    """

    relative_error: float | None
    low: float
    high: float
    num_projections: int
    num_values: int
    resolution: float


class PairMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics over the elements finite on both sides, in the unmasked rows. 0/0 = 0, x/0 = inf.

    rel_l2 = ‖d‖/‖a‖. cosine = a·b/(‖a‖‖b‖), 1 where both are zero, 0 where one is;
    one_minus_cosine: see numerics.pairs.pair. sqnr_db = -20 log10 rel_l2 in dB (inf at 0).
    max_abs = max|d| in the tensors' unit; its index (None where d = 0; row-major first) and
    both values there. gain = b·a/‖a‖² - 1 = -P/A; gain_se = sqrt((Q - P²/n) n/(n-1)) / A,
    the standard error of a sum of n independent products a·d: it stays honest where the
    error is proportional to |a| (rounding) or one channel dominates; inf for n < 2.
    ulp_*: numerics.pairs.ulp_counts, in ulp of ulp_format; None where neither is a float.
    token_rel_l2_*: median, 99th percentile (inverted cdf), max over rows of ‖d_t‖/‖a_t‖ and
    the first row with the max (in the leading dims, flattened; None without rows).
    channel_rel_l2_max = max over c of ‖d_c‖ / max(‖a_c‖, u·‖a‖/sqrt(C)), u the unit roundoff of
    the narrower format: a channel weaker than one rounding of the typical channel cannot be
    measured against itself (the ulp mask's rule, per channel).
    update_rel_l2 = ‖d‖/‖a - base‖, update_norm = ‖a - base‖; None without base.
    Sinks: rows with ‖a_t‖ > 10 · median; rel_l2_without_sinks is None where there are none.
    pad_rel_l2: rel_l2 of the masked rows alone, None where none is masked (num_masked: rows).
    reference_nan ... candidate_inf: counts in the unmasked rows. Of the infinities ``*_neginf``
    are those below; nonfinite_differ: places where the sides do not agree in kind or sign,
    ``*_alone`` those of them where the other side is finite, mask_alike those where -inf stands
    against a finite value that means the same in a mask (numerics.pairs.sums). identical: same
    dtype, shape and bytes, masked or not.
    numel: elements of the unmasked rows; num_finite: those of them that were measured.
    What is estimated from sketches (numerics.summaries.estimate) leaves None what needs elements.
    Complex tensors are measured as their components; max_abs is a component's, the values
    there too, and a channel is a complex one.
    """

    identical: bool
    numel: int
    num_finite: int
    num_rows: int
    num_masked: int
    rel_l2: float | None
    cosine: float | None
    one_minus_cosine: float | None
    sqnr_db: float | None
    max_abs: float | None
    max_abs_index: tuple[int, ...] | None
    max_abs_reference: float | None
    max_abs_candidate: float | None
    reference_norm: float | None
    candidate_norm: float | None
    gain: float | None
    gain_se: float | None
    ulp_format: str | None
    ulp_share_over_1: float | None
    ulp_p99: float | None
    ulp_max: float | None
    token_rel_l2_median: float | None
    token_rel_l2_p99: float | None
    token_rel_l2_max: float | None
    worst_row: int | None
    channel_rel_l2_max: float | None
    worst_channel: int | None
    update_rel_l2: float | None
    update_norm: float | None
    num_sink_tokens: int
    rel_l2_without_sinks: float | None
    pad_rel_l2: float | None
    reference_nan: int
    reference_inf: int
    candidate_nan: int
    candidate_inf: int
    reference_neginf: int = 0
    candidate_neginf: int = 0
    nonfinite_differ: int = 0
    reference_alone: int = 0
    candidate_alone: int = 0
    mask_alike: int = 0

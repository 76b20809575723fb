"""What is measured of one pair of tensors: a SiteResult and its parts, as typed data."""

from __future__ import annotations

import msgspec

from divergence.comparison.results.findings import Onset, SiteKey
from divergence.numerics.pairs.metrics import Estimate
from divergence.words import Side

__all__ = ["LogitsDiff", "NonfiniteCount", "PromptRatio", "SiteResult", "TruthDiff", "num_rows",
           "onset_at", "order_of"]  # fmt: skip


class NonfiniteCount(msgspec.Struct, frozen=True, kw_only=True):
    """Elements that are no finite number, per side.

    ``*_inf``: infinities of both signs, of which ``*_neginf`` are below. ``differ``: elements at
    which the sides do not agree (finite, nan, +inf or -inf alike); of them ``*_alone`` where the
    other side is finite, and ``mask_alike`` where -inf stands against a number below -10,000, which
    means the same in a mask. Where neither side's bytes are left, the least that the counts tell.
    """

    reference_nan: int = 0
    reference_inf: int = 0
    candidate_nan: int = 0
    candidate_inf: int = 0
    reference_neginf: int = 0
    candidate_neginf: int = 0
    differ: int = 0
    reference_alone: int = 0
    candidate_alone: int = 0
    mask_alike: int = 0

    @property
    def total(self) -> int:
        return self.reference_nan + self.reference_inf + self.candidate_nan + self.candidate_inf


class LogitsDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution-level difference of one logits pair over its rows (positions).

    ``kl_*``: KL(reference‖candidate) in nats; ``top1_agreement``: share of rows with the
    same argmax; ``top5_overlap``: mean size of the common top-5 over 5; ``margin_min``:
    smallest top1-top2 gap of the reference; ``chosen_logprob_diff_max``: largest change
    of the reference's argmax' log-probability.
    """

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    top5_overlap: float
    margin_min: float
    chosen_logprob_diff_max: float


class TruthDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One site against the truth R (float64): a = reference, b = candidate.

    ``reference_error``, ``candidate_error``: ‖a-R‖/‖R‖ and ‖b-R‖/‖R‖ of the median token. The
    first is the measured floor. r = err(a, b) / err(a, R): how far apart in floor units;
    w = err(b, R) / err(a, R): who is farther from the truth; each for the median token, p99,
    the worst token and the worst channel (Σ over tokens). Sink tokens are left out.
    x/0 is inf; 0/0 is 1 for w, 0 for r. ``gain_*``: <·-R, R>/‖R‖², mean over tokens.
    """

    reference_error: float
    candidate_error: float
    r_median: float
    r_p99: float
    r_max: float
    r_channel: float
    w_median: float
    w_p99: float
    w_max: float
    w_channel: float
    gain_reference: float
    gain_candidate: float


class PromptRatio(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's rows of a forward that holds several. ``ratio``: of its median token; ``usage``:
    the largest share of any limit that it uses there."""

    sample: int
    ratio: float
    num_rows: int
    usage: float = 0.0


class SiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """One compared pair of tensors, a = reference, b = candidate, d = a - b.

    Formulas and care in divergence.numerics.pairs.pair. ``rel_l2`` = ‖d‖/‖a‖. ``floor``: the
    rel_l2 that correct implementations of this dtype are expected to reach here (median
    token); ``ratio``: the median token's error made here over its floor, ``ratio_max`` the
    worst token's, ``ratio_sink`` the worst sink token's (norm over 10 × the median), which is in
    neither of the two; ``limit``: the multiple of the floor at which the judge flags this site's
    typical token; ``limit_usage``: the largest share that any limit is used by this site, over all
    its samples and steps of a phase; ``flagged``: beyond what rounding explains.
    ``match``: how the pair was found (``exact`` or the name map's rule). ``truth``: both sides
    against a float64 run, where one was given. ``of``: in the escalated pass, whose pass this is:
    it is compared with the truth (or, where None, with the reference's own escalated pass).
    ``estimated``: how well this is known, where it was estimated from sketches; what cannot be is
    None. Where a run keeps neither bytes nor a sketch, nothing is known but ``identical`` and, from
    its statistics, ``at_least``: what ``rel_l2`` is no less than.
    ``prompts``: in a forward of several prompts, the ratio of each. ``usage``: the largest share of
    any limit that this forward alone uses.
    ``num_rerouted``: tokens that rounding sent to other experts on one side, which are in none of
    the ratios; None where that is not known.
    """

    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    order: int
    candidate_site: str | None = None
    match: str = "exact"
    block: str | None = None
    role: str | None = None
    kind: str | None = None
    shape: tuple[int, ...]
    reference_dtype: str
    candidate_dtype: str
    identical: bool
    numel: int
    num_masked: int = 0
    rel_l2: float | None
    cosine: float | None
    one_minus_cosine: float | None
    sqnr_db: float | None
    max_abs: float | None
    max_abs_index: tuple[int, ...] | None = None
    max_abs_reference: float | None = None
    max_abs_candidate: float | None = None
    reference_norm: float | None
    candidate_norm: float | None
    gain: float | None
    gain_se: float | None
    ulp_format: str | None = None
    ulp_share_over_1: float | None = None
    ulp_p99: float | None = None
    ulp_max: float | None = None
    token_rel_l2_median: float | None
    token_rel_l2_p99: float | None
    token_rel_l2_max: float | None
    worst_sample: int | None = None
    worst_position: int | None = None
    channel_rel_l2_max: float | None
    worst_channel: int | None = None
    update_rel_l2: float | None = None
    num_sink_tokens: int = 0
    rel_l2_without_sinks: float | None = None
    pad_rel_l2: float | None = None
    nonfinite: NonfiniteCount | None = None
    logits: LogitsDiff | None = None
    floor: float | None = None
    ratio: float | None = None
    ratio_max: float | None = None
    ratio_sink: float | None = None
    num_rerouted: int | None = None
    limit: float | None = None
    limit_usage: float | None = None
    truth: TruthDiff | None = None
    of: Side | None = None
    flagged: bool = False
    estimated: Estimate | None = None
    at_least: float | None = None
    prompts: list[PromptRatio] = []
    usage: float | None = None

    @property
    def key(self) -> SiteKey:
        """What tells it from all other results of a comparison."""
        return self.pass_, self.of, self.sample, self.step, self.site


def onset_at(site: SiteResult) -> Onset:
    """The place of a result, as that of a verdict."""
    return Onset(
        site=site.site,
        block=site.block,
        sample=site.sample if site.worst_sample is None else site.worst_sample,
        step=site.step,
        position=site.worst_position,
        pass_=site.pass_,
    )


def order_of(result: SiteResult) -> tuple[int, int, int]:
    """Execution order over the whole run."""
    return (result.sample, result.step, result.order)


def num_rows(result: SiteResult) -> int:
    """Rows that were measured: all axes but the last."""
    columns = result.shape[-1] if result.shape else 1
    return max(1, (result.numel - result.num_masked) // max(1, columns))

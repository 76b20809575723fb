"""What is measured of one pair of tensors, and how much was measured: SiteResult and Coverage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.results.findings import Onset, SiteKey
from divergence.facts import Fact, Worded
from divergence.numerics.sums import Estimate
from divergence.run.site import of_parameter, phase_of
from divergence.words import Side, SideOrBoth

__all__ = [
    "Allowed", "Coverage", "LogitsDiff", "NonfiniteCount", "PassCoverage", "PromptRatio",
    "SiteResult", "Skipped", "TruthDiff", "Unexercised", "allowed_errors", "main_path", "num_rows",
    "onset_at", "order_of",
]  # fmt: skip


class NonfiniteCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of elements that are nan or infinite, per side.

    Where neither side's bytes are left, the counts come from the recorded statistics, and the
    differences are lower bounds.
    """

    reference_nan: int = 0
    reference_inf: int = 0
    """Infinities of both signs."""
    candidate_nan: int = 0
    candidate_inf: int = 0
    """Infinities of both signs."""
    reference_neginf: int = 0
    """How many of ``reference_inf`` are -inf."""
    candidate_neginf: int = 0
    """How many of ``candidate_inf`` are -inf."""
    differ: int = 0
    """Elements where the sides disagree: one is finite, nan, +inf or -inf and the other is not."""
    reference_alone: int = 0
    """How many of ``differ`` are finite in the candidate."""
    candidate_alone: int = 0
    """How many of ``differ`` are finite in the reference."""
    mask_alike: int = 0
    """How many of ``differ`` are -inf against a number below -10,000. In a mask both mean the
    same."""
    sample: int | None = None
    """Prompt of the first row at which the sides disagree; of the first row with nan or inf, where
    they agree everywhere. None where the rows are not known, or not of one prompt."""
    position: int | None = None
    """Token index of that row, where rows are tokens."""
    prompts: list[int] = []
    """All prompts with such a row, of a forward that holds several."""

    @property
    def total(self) -> int:
        return self.reference_nan + self.reference_inf + self.candidate_nan + self.candidate_inf


class LogitsDiff(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart two logits tensors are as distributions, over their rows (positions)."""

    kl_mean: float
    """KL(reference‖candidate) in nats, mean over rows."""
    kl_p99: float
    """The same, 99th percentile over rows."""
    kl_max: float
    """The same, largest row."""
    top1_agreement: float
    """Share of rows with the same argmax."""
    top5_overlap: float
    """Number of tokens common to both top-5 lists, over 5; mean over rows."""
    margin_min: float
    """Smallest gap between the reference's first and second logit."""
    chosen_logprob_diff_max: float
    """Largest change of the log-probability of the reference's argmax."""


class TruthDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides of one site against the truth R (float64); a = reference, b = candidate.

    err(x, y) = ‖x-y‖/‖R‖ of a token. r and w are given for the median token, the 99th percentile,
    the worst token and the worst channel (summed over tokens). Sink tokens are left out. x/0 is
    inf; 0/0 is 1 for w and 0 for r.
    """

    reference_error: float
    """‖a-R‖/‖R‖ of the median token. This is the measured floor."""
    candidate_error: float
    """‖b-R‖/‖R‖ of the median token."""
    r_median: float
    """r = err(a, b) / err(a, R): the difference of the two sides in units of the floor."""
    r_p99: float
    r_max: float
    r_channel: float
    w_median: float
    """w = err(b, R) / err(a, R): how much farther the candidate is from the truth."""
    w_p99: float
    w_max: float
    w_channel: float
    gain_reference: float
    """<a-R, R>/‖R‖², mean over tokens: the reference's error of scale."""
    gain_candidate: float
    """<b-R, R>/‖R‖², mean over tokens: the candidate's error of scale."""
    estimated: Side | None = None
    """The side whose error follows from the difference and the other's own, which a floor holds."""


class PromptRatio(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's rows in a forward that holds several prompts."""

    sample: int
    ratio: float
    """The median token's error made here, over its floor."""
    num_rows: int
    usage: float = 0.0
    """The largest share of any limit that this prompt uses here; over 1 is beyond the limit."""


class SiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """One compared pair of tensors: a = reference, b = candidate, d = a - b.

    Rows are tokens and columns are channels. 0/0 = 0 and x/0 = inf. divergence.numerics.pairs
    defines the metrics. A metric is None where it cannot be computed, for example from a sketch.
    Where a run keeps neither bytes nor a sketch, only ``identical`` and ``at_least`` are known.
    """

    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    order: int
    """Execution order within the forward."""
    candidate_site: str | None = None
    """The candidate's name of the site, where it differs."""
    match: str = "exact"
    """How the pair was found: ``exact`` (same name), or the name map's rule."""
    block: str | None = None
    """Module path of the repeated block that the site is or lies in; None outside all blocks."""
    role: str | None = None
    """Part in the model: ``block``, ``trunk`` or ``inner`` (run.schema.manifest.ModuleNote)."""
    kind: str | None = None
    """Class of the module."""
    shape: tuple[int, ...]
    reference_dtype: str
    candidate_dtype: str
    identical: bool
    """Same dtype, shape and bytes."""
    numel: int
    """Number of elements in the rows that were measured."""
    num_masked: int = 0
    """Number of rows that were left out, such as padding."""
    rel_l2: float | None
    """‖d‖/‖a‖."""
    cosine: float | None
    one_minus_cosine: float | None
    """1 - cosine of a and b, computed without cancellation."""
    sqnr_db: float | None
    """-20 log10 ``rel_l2``, in dB; inf where the sides are equal."""
    max_abs: float | None
    """max|d|, in the tensors' unit."""
    max_abs_index: tuple[int, ...] | None = None
    """Where |d| is largest; None where d = 0."""
    max_abs_reference: float | None = None
    """The reference's value there."""
    max_abs_candidate: float | None = None
    """The candidate's value there."""
    reference_norm: float | None
    """‖a‖."""
    candidate_norm: float | None
    """‖b‖."""
    gain: float | None
    """b·a/‖a‖² - 1: the relative difference of scale."""
    gain_se: float | None
    """Standard error of ``gain``."""
    ulp_format: str | None = None
    """The format whose ulp are counted: the narrower of the two dtypes. None unless both are
    floats."""
    ulp_share_over_1: float | None = None
    """Share of elements that are more than one ulp apart."""
    ulp_p99: float | None = None
    """99th percentile of the distance in ulp."""
    ulp_max: float | None = None
    """Largest distance in ulp."""
    token_rel_l2_median: float | None
    """‖d_t‖/‖a_t‖ of the median row t."""
    token_rel_l2_p99: float | None
    """The same, 99th percentile over rows."""
    token_rel_l2_max: float | None
    """The same, worst row."""
    worst_sample: int | None = None
    """Prompt of the worst row."""
    worst_position: int | None = None
    """Token index of the worst row, where rows are tokens."""
    channel_rel_l2_max: float | None
    """max over channels c of ‖d_c‖ / max(‖a_c‖, u·‖a‖/√C): C channels, u the unit roundoff of the
    narrower format."""
    worst_channel: int | None = None
    update_rel_l2: float | None = None
    """‖d‖ / ‖a - base‖, where base is the block's input; None without one."""
    num_sink_tokens: int = 0
    """Rows with a norm over 10 × the median row norm."""
    rel_l2_without_sinks: float | None = None
    """``rel_l2`` without these rows; None where there are none."""
    pad_rel_l2: float | None = None
    """``rel_l2`` of the masked rows alone; None where none is masked."""
    nonfinite: NonfiniteCount | None = None
    """Counts of nan and inf; None where there are none."""
    logits: LogitsDiff | None = None
    """Set at the site of the logits."""
    floor: float | None = None
    """The ``rel_l2`` that two correct implementations of this dtype are expected to reach here
    (median token)."""
    ratio: float | None = None
    """The median token's error made here, over its floor. Sink tokens are left out."""
    ratio_max: float | None = None
    """The same of the worst token. Sink tokens are left out."""
    ratio_sink: float | None = None
    """The same of the worst sink token; None without sinks."""
    num_rerouted: int | None = None
    """Tokens that rounding sent to other experts on one side. They are in none of the ratios. None
    where it is not known."""
    limit: float | None = None
    """The ``ratio`` beyond which the judge flags this site's typical token."""
    limit_usage: float | None = None
    """The largest share of any limit that this site uses, over all its samples and steps of a
    phase; over 1 is beyond the limit."""
    truth: TruthDiff | None = None
    """Both sides against a float64 run, where one was given."""
    of: Side | None = None
    """In the escalated pass: whose pass this is. It is compared with the truth. None where the
    candidate's is compared with the reference's own escalated pass."""
    flagged: bool = False
    """Is the difference more than rounding explains?"""
    estimated: Estimate | None = None
    """How well the numbers are known, where they were estimated from sketches."""
    at_least: float | None = None
    """A lower bound of ``rel_l2``, from the statistics of runs that keep neither bytes nor a
    sketch."""
    prompts: list[PromptRatio] = []
    """In a forward of several prompts: each prompt's ratio."""
    usage: float | None = None
    """The largest share of any limit that this forward alone uses."""

    @property
    def phase(self) -> str:
        """One of run.schema.site.PHASES."""
        return phase_of(self.site, self.step)

    @property
    def key(self) -> SiteKey:
        """What tells it from all other results of a comparison."""
        return self.pass_, self.of, self.sample, self.step, self.site

    @property
    def is_unmeasured(self) -> bool:
        """Do the two differ by nobody knows how much?"""
        return not self.identical and self.rel_l2 is None


class Unexercised(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the model that no prompt reached, of which a comparison says nothing."""

    what: Literal["module", "experts", "window"]
    """A module that was never called; experts of a block that no token went to; a window of
    attention that is longer than what was seen."""
    name: str
    """Of the module or block, or the key of the configuration."""
    share: float | None = None
    """Of a module: of all parameters of the model."""
    size: int | None = None
    """How many experts; the window's tokens."""
    of: int | None = None
    """Of how many experts; the tokens of the longest sequence."""

    @property
    def text(self) -> str:
        """In words."""
        if self.what == "experts":
            return f"{self.size} of {self.of} experts of {self.name}"
        if self.what == "window":
            return f"{self.name} {self.size:,} (the longest sequence has {self.of:,} tokens)"
        return f"{self.name}, {100 * (self.share or 0):.2g}% of the parameters"


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
    """Execution order over the whole run: what is of parameters comes behind all prompts."""
    sample = _BEHIND_ALL if of_parameter(result.site) else result.sample
    return (sample, result.step, result.order)


_BEHIND_ALL = 1 << 40


def num_rows(result: SiteResult) -> int:
    """Rows that were measured: all axes but the last."""
    columns = result.shape[-1] if result.shape else 1
    return max(1, result.numel // max(1, columns))


class PassCoverage(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """How much of one pass of the reference was compared.

    num_reference = num_compared + num_missing + num_skipped + num_empty + num_elsewhere.
    """

    TEXTS: ClassVar[Mapping[str, str]] = {"elsewhere": "ways", "reason": "why"}

    pass_: str = msgspec.field(name="pass")
    """The name under which the pass is compared. It is ``anchored`` also where the candidate was
    anchored to the reference's free pass; ``num_reference`` then counts what the anchored pass
    should have recorded again."""
    what: Literal["tensors", "operators", "tokens"]
    """What is counted: ``tensors`` of modules, ``operators`` (their results and operands), or
    generated ``tokens``, whose pass is ``free``."""
    num_reference: int
    """How many the reference recorded."""
    num_compared: int
    """Measured against a partner."""
    num_missing: int = 0
    """The candidate has no partner."""
    num_skipped: int = 0
    """The candidate has a partner that cannot be compared: another shape, other positions or other
    tokens before it."""
    num_empty: int = 0
    """Without any element on both sides, so nothing could differ."""
    num_elsewhere: int = 0
    """Judged in another way, which ``elsewhere`` names."""
    num_extra: int = 0
    """Records of modules that only the candidate has, although the reference's sites would have
    recorded them. Not part of the sum above."""
    ways: list[Fact] = []
    """How those of ``num_elsewhere`` are judged: weights by their digests, inputs that the anchored
    pass puts in place, or a pass that the candidate repeats more closely."""
    elsewhere: str | None = None
    """The same in words."""
    why: Fact | None = None
    """Why the first missing, skipped or extra one was not compared."""
    reason: str | None = None
    """The same in words."""

    @property
    def share(self) -> float:
        """Compared over compared + missing + skipped + extra; 1 where nothing was to compare."""
        total = self.num_compared + self.num_missing + self.num_skipped + self.num_extra
        return self.num_compared / total if total else 1.0


class Skipped(msgspec.Struct, Worded, frozen=True):
    """A tensor that was not compared, and why. It never counts as a pass."""

    TEXTS: ClassVar[Mapping[str, str]] = {"reason": "why"}

    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    why: Fact | None
    side: SideOrBoth
    """The side that has the tensor."""
    reason: str = ""
    """``why`` in words."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what was recorded was compared.

    The numbers count pairs of tensors. Operators and tokens are counted in ``passes`` alone, and in
    ``num_only_reference`` where the candidate lacks them.
    """

    num_compared: int
    num_only_reference: int = 0
    """Recorded by the reference alone."""
    num_only_candidate: int = 0
    """Recorded by the candidate alone."""
    num_skipped: int = 0
    """Recorded by both, but not comparable."""
    unmatched: list[Skipped] = []
    """The tensors without a partner and the skipped ones, with the reason of each."""
    passes: list[PassCoverage] = []
    """For each pass: what the reference recorded, and what became of it."""

    @classmethod
    def of(cls, num_compared: int, unmatched: list[Skipped]) -> Coverage:
        """Counts what was not compared by the side that has it."""
        sides = Counter(item.side for item in unmatched)
        return cls(
            num_compared=num_compared, num_only_reference=sides["reference"],
            num_only_candidate=sides["candidate"], num_skipped=sides["both"], unmatched=unmatched,
        )  # fmt: skip


Allowed = Mapping[tuple[int, int], float]
"""By (sample, step)."""


def main_path(sites: Sequence[SiteResult]) -> dict[tuple[int, int], list[SiteResult]]:
    """The free pass' results that end in the logits, by forward: the first output of every block,
    and of what comes after the last one, in execution order."""
    by_forward: dict[tuple[int, int], list[SiteResult]] = {}
    for site in sorted(sites, key=order_of):
        judged = site.pass_ == "free" and site.phase in ("prefill", "decode")
        if judged and site.site.endswith(":out") and site.rel_l2 is not None:
            by_forward.setdefault((site.sample, site.step), []).append(site)
    paths: dict[tuple[int, int], list[SiteResult]] = {}
    for place, path in by_forward.items():
        blocks = [n for n, site in enumerate(path) if site.role == "block"]
        if blocks:
            rest = [site for site in path[blocks[-1] :] if site.role == "trunk"]
            paths[place] = [*(path[n] for n in blocks), *rest]
    return paths


def allowed_errors(sites: Sequence[SiteResult]) -> Allowed:
    """The relative error of the last site of each forward that rounding explains: the root of the
    summed squares of the floors on its way (numerics.floor). No fault moves that scale: it is made
    of formats, widths and norms. It leaves out what one block makes of another's error, so limits
    are stated multiples of it (``drift``)."""
    paths = main_path(sites)
    allowed: dict[tuple[int, int], float] = {}
    for (sample, step), path in paths.items():
        here = {site.site for site in path}  # an encoder runs in the first forward alone
        first = [site for site in paths.get((sample, 0), ()) if site.site not in here]
        square = sum(site.floor**2 for site in [*path, *first] if site.floor is not None)
        if square:
            allowed[sample, step] = math.sqrt(square)
    return allowed

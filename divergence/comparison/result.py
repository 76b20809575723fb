"""The answer of `compare`, typed: findings and verdict, sites, operators, tokens, and the Report
that holds them all.

An analysis returns findings and knows neither the others nor the verdict. ``decide`` makes one
verdict of them. Everything here is frozen. A field that a class's ``TEXTS`` names says in words, or
ready for a shell, what the field beside it there holds.

Rendering (terminal, JSON, CSV) lives in divergence.report and needs nothing but this. The JSON form
is stable and versioned; numbers that JSON cannot hold (nan, inf) are written as the strings "nan",
"inf", "-inf".
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import msgspec

from divergence.domain import added, placed
from divergence.errors import UsageError
from divergence.facts import Fact, JsonValue, Worded, fact, sentence
from divergence.numerics.sums import Estimate
from divergence.run.command import Command
from divergence.run.manifest import SCHEME_UNKNOWN, Manifest, SampleTokens
from divergence.run.site import is_of_parameter, phase_of
from divergence.words import Side, SideBothOrNeither, SideOrBoth, printable_json

if TYPE_CHECKING:
    import pandas
    import polars

    from divergence.html.picture import Picture
    from divergence.run.reader import Run


# What is claimed and decided: PreflightLine, Finding and Verdict.

VerdictKind = Literal[
    "identical",
    "within_floor",
    "systematic",
    "localized",
    "drift",
    "nonfinite",
    "incomparable",
    "undetermined",
]

Role = Literal["convicts", "refines", "context", "explains", "hints", "abstains"]
"""What a finding may do: be the verdict; make another's place more precise; be told beside any
verdict; say why; name a place to look at; take certainty away."""

SiteKey = tuple[str, str | None, int, int, str]
"""(pass, whose escalated pass, sample, step, site)."""


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """The first site, in execution order, where the error is made rather than inherited."""

    site: str
    block: str | None
    """Module path of the repeated block that the site is or lies in; None outside all blocks."""
    sample: int
    step: int
    position: int | None
    """Token index of the worst row, where rows are tokens."""
    pass_: str = msgspec.field(name="pass", default="free")
    """The pass in which it was found. ``anchored`` is exact."""

    @property
    def phase(self) -> str:
        """One of run.site.PHASES."""
        return phase_of(self.site, self.step)


class Check(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One condition that a verdict's confidence rests on."""

    TEXTS: ClassVar[Mapping[str, str]] = {"detail": "lacking"}

    name: str
    state: Literal["met", "failed", "not_made"]
    lacking: Fact | None = None
    """What is lacking, where the condition is not met."""
    detail: str = ""


class Verdict(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The judgement: what differs, where it begins, and how certain that is."""

    TEXTS: ClassVar[Mapping[str, str]] = {"summary": "headline", "next": "commands"}

    kind: VerdictKind
    headline: list[Fact] = []
    """What the summary tells, in order."""
    summary: str = ""
    """One line for people, made of ``headline`` at the very end."""
    onset: Onset | None = None
    confidence: Literal["high", "medium", "low"]
    """Computed from ``checks``."""
    side: SideBothOrNeither | None = None
    """The run that is wrong, where that can be told."""
    evidence: list[Fact] = []
    """The facts that the verdict rests on."""
    commands: list[Command] = []
    """What goes deeper."""
    next: list[str] = []
    checks: list[Check] = []
    """The conditions that the confidence is computed from."""


class Finding(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Says what one analysis claims."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "summary": "headline",
        "clause": "addition",
        "next": "commands",
    }

    claim: str
    role: Role = "convicts"
    kind: VerdictKind | None = None
    """The kind of the verdict, if this finding becomes the verdict."""
    headline: list[Fact] = []
    """What the verdict's summary tells, if this finding becomes the verdict."""
    summary: str = ""
    onset: Onset | None = None
    place: tuple[int, int, int] | None = None
    """(sample, step, order) of the claim. Orders findings in time."""
    step: int | None = None
    """The forward in which a claim without an onset was seen."""
    accumulated_at: list[tuple[int, int]] = []
    """(sample, step) of the free forwards at whose ends this was seen: rounding may have been
    enlarged."""
    only_rounds: dict[int, int] = {}
    """Of how many first forwards of a sample every part was given equal inputs, and only rounds."""
    equal_inputs: bool = False
    """Was it seen in a pass in which both sides got the same inputs (anchored or escalated)?"""
    side: SideBothOrNeither | None = None
    rests_on: list[Check] = []
    """The checks that the claim needs. The confidence is computed from them."""
    evidence: list[Fact] = []
    """The facts behind the claim, the most telling one first."""
    beside: list[Fact] = []
    """The facts to report where another finding is the verdict."""
    addition: list[Fact] = []
    """What continues the summary of a verdict about the same place."""
    clause: str = ""
    leads: bool = False
    """For explanations: show it before the verdict's own evidence, not after all of it."""
    about_onset: bool = False
    """For explanations: show it after the first fact of the verdict's evidence."""
    commands: list[Command] = []
    """What goes deeper."""
    next: list[str] = []
    flags: list[SiteKey] = []
    """Sites that the claim rests on. They are flagged if this finding becomes the verdict."""

    @property
    def says_something(self) -> bool:
        """Is it a claim, or is there evidence in it? An analysis may have looked and found none."""
        return bool(self.evidence or self.addition) or self.role in ("convicts", "refines")


PreflightStatus = Literal["same", "differs", "blocking", "unknown"]
"""``unknown``: a side does not say it."""


class PreflightLine(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One setting or fact of the two runs that is checked before any number."""

    TEXTS: ClassVar[Mapping[str, str]] = {"detail": "details"}

    check: str
    status: PreflightStatus
    reference: str
    candidate: str
    details: list[Fact] = []
    """What differs, for example the first parameters."""
    detail: str | None = None


def schemes_apart(reference: str, candidate: str) -> tuple[str, str]:
    """Return how each side is quantised (a ``QuantizationNote`` in words, or ``none``), in a word:
    two of one name with what each alone has."""
    names = [
        f"quantised ({text.rpartition(' (')[2]}"
        if text.startswith(SCHEME_UNKNOWN)
        else text.partition(": ")[0]
        for text in (reference, candidate)
    ]
    if names[0] != names[1]:
        first, second = ("not quantised" if name == "none" else name for name in names)
        return first, second
    parts = [_parts(text) for text in (reference, candidate)]
    own = ["; ".join(part for part in parts[n] if part not in parts[1 - n]) for n in range(2)]
    first, second = (f"{names[n]} ({own[n]})" if own[n] else names[n] for n in range(2))
    return first, second


def _parts(text: str) -> list[str]:
    """``W8A8: int8 weights per channel, int8 activations per token; not quantised: lm_head (by)``
    → what stands between its commas, with the list of modules in one piece."""
    scheme, *rest = text.partition(": ")[2].rpartition(" (")[0].split("; ")
    return [*scheme.split(", "), *rest]


# What is measured of one pair of tensors, and how much was measured: SiteResult and Coverage.


class NonfiniteCount(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class LogitsDiff(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Says how far apart two logits tensors are as distributions, over their rows (positions)."""

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


class TruthDiff(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class PromptRatio(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prompt's rows in a forward that holds several prompts."""

    sample: int
    ratio: float
    """The median token's error made here, over its floor."""
    num_rows: int
    ratio_max: float | None = None
    """The same of its worst token, sinks too."""
    usage: float = 0.0
    """The largest share of any limit that this prompt uses here; over 1 is beyond the limit."""


class Visible(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest errors that a comparison would have flagged in the middle block: relative L2 of
    the block's output. None where that is not asked, or so few numbers convict nothing."""

    block: float
    """At all tokens."""
    forward: float | None = None
    """In one prompt or decode step of several."""
    token: float | None = None
    """In one token, of that token's row."""
    channel: float | None = None
    """In one channel of all tokens."""


class SiteResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """Part in the model: ``block``, ``trunk`` or ``inner`` (run.manifest.ModuleNote)."""
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
    """The same of the worst token, its floor no less than the median token's as far as that is 4
    times its own. Sink tokens are left out."""
    ratio_position: int | None = None
    """Token index of that row, or of the worst sink where its ratio is larger."""
    ratio_sink: float | None = None
    """The same of the worst sink token; None without sinks."""
    num_rerouted: int | None = None
    """Tokens that rounding sent to other experts on one side. They are in none of the ratios. None
    where it is not known."""
    limit: float | None = None
    """The ``ratio`` beyond which the judge flags this site's typical token."""
    limit_usage: float | None = None
    """The largest share of any limit that this site uses, over all its samples and steps of a
    phase: 0 where the sides do not differ, 1 or more where it is flagged, and beyond 1 how many
    times the limit. Of a ratio of errors it is the share of the logarithm."""
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
    statistics_agree: bool = False
    """Statistics alone were kept, and they agree: nothing shows that the two differ, or not."""
    prompts: list[PromptRatio] = []
    """In a forward of several prompts: each prompt's ratio."""
    usage: float | None = None
    """The largest share of any limit that this forward alone uses."""

    @property
    def phase(self) -> str:
        """One of run.site.PHASES."""
        return phase_of(self.site, self.step)

    @property
    def key(self) -> SiteKey:
        """Return what tells it from all other results of a comparison."""
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
        """The fact in words."""
        return sentence(
            fact(
                f"unexercised_{self.what}",
                name=self.name,
                size=self.size,
                of=self.of,
                percent=100 * (self.share or 0),
            )
        )


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
    sample = _BEHIND_ALL if is_of_parameter(result.site) else result.sample
    return (sample, result.step, result.order)


_BEHIND_ALL = 1 << 40


def num_rows(result: SiteResult) -> int:
    """Rows that were measured: all axes but the last."""
    columns = result.shape[-1] if result.shape else 1
    return max(1, result.numel // max(1, columns))


class PassCoverage(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Says how much of one pass of the reference was compared.

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
    why: Fact | None = None
    """Why the first missing, skipped or extra one was not compared."""
    reason: str | None = None

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
    side: SideOrBoth
    """The side that has the tensor."""
    why: Fact | None = None
    reason: str = ""
    """``why`` in words."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Says how much of what was recorded was compared.

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
            num_compared=num_compared,
            num_only_reference=sides["reference"],
            num_only_candidate=sides["candidate"],
            num_skipped=sides["both"],
            unmatched=unmatched,
        )


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


# What compare says of operators: one result per operator and phase, and where it begins; and the
# precision audit: in which dtype each part of a model really ran, on each side.

Question = Literal[
    "typical", "row", "column", "slice", "codes", "nonfinite", "operands", "roundings", "masked"
]
"""By which an operator is beyond its limit."""

OperatorVerdict = Literal["fine", "candidate", "reference", "both", "differs", "unjudged"]


class OtherInput(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """An argument that comes from elsewhere on the two sides: another operator's result, another
    view of one, another weight, or an outside value that differs."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "reference": "origin_in_reference",
        "candidate": "origin_in_candidate",
    }

    argument: str
    origin_in_reference: Fact
    """Where the reference's value comes from."""
    origin_in_candidate: Fact
    """Where the candidate's value comes from."""
    reference: str = ""
    """Where the reference's value comes from, in words."""
    candidate: str = ""
    """Where the candidate's value comes from, in words."""
    viewed: bool = False
    """The origin is the same, but it is viewed in another way (another shape or stride)."""
    difference: float | None = None
    """Relative difference of the values that the operator saw. None where a side did not store
    them."""


class OtherMask(msgspec.Struct, frozen=True, kw_only=True):
    """Scores that one side alone hides: the sides' masks are not the same."""

    num_by_reference: int
    """How many the reference hides, and the candidate does not."""
    num_by_candidate: int
    first: tuple[int, ...]
    """Index of the first of them in the result; the last two numbers are query and key."""
    of_tokens: bool
    """Query and key are tokens' positions: a prefill without pads."""


class OtherOperand(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """A scalar argument, or a constant made outside the recorded modules, that differs between the
    sides. This is a fact about the calls, not a measurement."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "reference": "reference_value",
        "candidate": "candidate_value",
    }

    argument: str
    site: str | None = None
    """Of a region: the reference's call. None where it is the operator of the result itself."""
    kind: Literal["scalar", "constant"]
    reference_value: Fact
    candidate_value: Fact
    reference: str = ""
    """The reference's value, in words."""
    candidate: str = ""
    """The candidate's value, in words."""
    is_value: bool = True
    """The argument enters the arithmetic as a number (an attention scale, an epsilon, a mask).
    False for a dim, size, flag or dtype."""
    difference: float | None = None
    """Relative difference of the number, or of the constant's values. None where it is not a
    number."""


class RegionResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Operators of both sides that compute one thing in different ways, compared as one step."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "replaced"}

    replaced: Fact
    """The candidate's operators in place of the reference's."""
    text: str = ""
    """The same in words, for example ``8 products and 7 additions in place of one product``."""
    reference: list[str]
    """Paths of the reference's operators in execution order. The last one gives the common result;
    where ``argument`` is set, it gives that argument of ``consumer``."""
    candidate: list[str]
    """The same for the candidate."""
    inputs: list[str] = []
    """The values that the reference's operators begin from."""
    consumer: str | None = None
    """The operator, called by both sides, that takes the region's result as ``argument``."""
    argument: str | None = None
    reference_times: float | None = None
    """Error that the reference's operators add on their own recorded inputs, measured against
    float64 and divided by one rounding of the result (1 for an ideal product). None where the
    region is not made of 16-bit products and additions, or an input was not recorded."""
    candidate_times: float | None = None
    """The same for the candidate."""


def called_at(source: str | None, backward_of: str | None) -> str | None:
    """The line of Python that called an operator, or whose backward did; None where unknown."""
    if source is None and backward_of is None:
        return None
    return sentence(fact("operators.called_at", source=source, backward_of=backward_of))


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of the reference and its partner, over all forwards of a phase.

    Errors are relative L2 norms, median over rows (the last axis); a = reference, b = candidate, R
    = truth. A number is None where there was no truth, or nothing to measure.
    """

    site: str
    """Site of the reference's first result, without the port."""
    candidate_site: str
    match: Literal["exact", "sequence", "value", "dataflow"]
    """How the partner was found:

    * ``exact``: same module, operator, call number and shape.
    * ``sequence``: same place in the order of calls.
    * ``value``: other operators that come to the same value, such as the end of a fused kernel.
    * ``dataflow``: the same argument of matched operators, with other values.
    """
    operator: str
    candidate_operator: str
    kind: str | None = None
    """Class of the module that called the operator."""
    block: str | None = None
    source: str | None = None
    """The Python line that called it, or of which it is the backward."""
    backward_of: str | None = None
    """The forward operator, or torch.autograd.Function, of whose backward it is."""
    phase: str
    """``prefill``, ``backward`` or ``decode``."""
    order: int
    sample: int = 0
    step: int = 0
    shape: tuple[int, ...]
    reference_dtype: str
    candidate_dtype: str
    identical: bool = False
    difference: float | None = None
    """err(b, a), rms over rows, since most rows may be equal."""
    reference_error: float | None = None
    """err(a, R)."""
    candidate_error: float | None = None
    """err(b, R)."""
    floor: float | None = None
    """The ideal store error ‖round(R) - R‖ / ‖R‖ and the rounding of the sum, together."""
    w: float | None = None
    """err(b, R) / err(a, R), each with the floor added in quadrature."""
    w_entering: float | None = None
    """The largest ``w`` among the operators that feed this one."""
    peak: float | None = None
    """The largest error of one row, column or slice (such as a head), one side's over the
    other's."""
    ulp_share_reference: float | None = None
    """Share of the reference's elements that are more than one ulp of their dtype from R."""
    ulp_share_candidate: float | None = None
    """The same for the candidate."""
    codes: float | None = None
    """For integers: share of elements that differ."""
    limit_usage: float = 0.0
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    leans: Side | None = None
    """The side that uses it."""
    fed_by: list[str] = []
    """The operators that feed this one and that only ``fed_by_side`` calls, in order."""
    fed_by_side: Side | None = None
    why: Question | None = None
    """The question by which most of the limit is used."""
    verdict: OperatorVerdict = "unjudged"
    other_inputs: list[OtherInput] = []
    """Arguments that the two sides take from elsewhere."""
    other_operands: list[OtherOperand] = []
    """Scalars and constants that differ."""
    other_mask: OtherMask | None = None
    """Scores that one side alone hides, in the first forward in which one does."""
    measurable: bool = True
    """Where ``other_operands`` are the reason: are the errors alone beyond a limit too?"""
    region: RegionResult | None = None
    """All operators of the region, where the sides call other operators and this is their common
    result."""

    @property
    def called_at(self) -> str | None:
        """The line, and of which operator it is the backward."""
        return called_at(self.source, self.backward_of)


class UnmatchedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that only one side called (in a fused kernel's place, or beyond the other's)."""

    side: Side
    site: str
    operator: str
    source: str | None = None
    """The Python line that called it."""


class CausalCheck(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment: the candidate is run again with the reference's result in place of its own at
    the onset. If the rest is then fine, the onset is the cause."""

    site: str
    """The site whose result was replaced."""
    holds: bool
    """Neither a later operator nor the block's output is beyond its limit any more."""
    num_after: int = 0
    """Number of operators after the onset that were checked."""
    before: float
    """``largest_limit_usage`` without the replacement."""
    largest_limit_usage: float
    """The largest share of its limit that any of these operators still uses."""
    still: list[str] = []
    """The sites that are still beyond their limit."""


class OperatorsResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """All operators of the modules that were recorded."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    frame: Literal["block", "operator"]
    """Where the sides had equal inputs. ``block``: each side ran the block on its own from equal
    inputs, so errors are inherited within it. ``operator``: each operator alone got equal
    inputs."""
    pass_: str = msgspec.field(name="pass", default="anchored")
    """``escalated`` where the difference was found in float32 alone."""
    judged: Literal["truth", "difference"]
    """Judged against a truth, or by the difference of the two sides alone."""
    num_matched: int
    num_value_matches: int = 0
    """How many of ``num_matched`` were matched by value."""
    onset: str | None = None
    """The site where the difference begins; None where nothing is beyond a limit."""
    side: SideOrBoth | None = None
    """The side that is wrong at the onset."""
    results: list[OperatorResult] = []
    unmatched: list[UnmatchedOperator] = []
    causal: CausalCheck | None = None
    remarks: list[Fact] = []
    """What was not compared or not judged, and why."""
    notes: list[str] = []


Part = Literal[
    "norm statistics",
    "norm weight",
    "softmax",
    "attention scores",
    "router",
    "router product",
    "rotary",
    "rotary table",
    "residual add",
    "matrix product",
    "activation",
    "kv cache",
    "logits",
    "reduced gradients",
    "gradient sums",
    "main weights",
    "moments",
    "buffers",
]

PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which they are shown: what is most often wrong first."""


INSIDE = "inside "
"""Before the name of a kernel, where a dtype would stand if it were recorded."""


class AuditedPlace(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One part (such as a softmax) at one place of the model: the dtypes it really ran in."""

    TEXTS: ClassVar[Mapping[str, str]] = {"expected_by": "expected_from"}

    part: Part
    module: str
    """Path of the module that called it."""
    kind: str | None = None
    """Class of that module, where the run records it."""
    site: str
    """The operator that ``computed`` describes, without the port."""
    operators: list[str]
    """All operators that belong to the part here."""
    near: list[str] = []
    """Operators next to them, where a fault of the part may first be seen."""
    source: str | None = None
    """The Python line."""
    operands: list[str]
    """Dtypes that went in."""
    result: str
    """Dtype that came out."""
    computed: str | None
    """The narrowest dtype that a value was rounded to on the way. None where one kernel did all of
    it and no record shows its inside."""
    kernel: str | None = None
    """Name of that kernel."""
    accumulates: bool = False
    """``computed`` belongs to a kernel that adds up inside, in a dtype that no record shows."""
    expected: list[str] = []
    """The dtypes that are wide enough; any one of them will do."""
    expected_from: Fact | None = None
    """The source of that expectation."""
    expected_by: str = ""
    own: bool = False
    """The run's own dtype and settings promise it; otherwise it is common practice."""
    below: bool = False
    """``computed`` is narrower than all expected dtypes."""
    num_calls: int = 1


class AuditRow(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One part on both sides."""

    TEXTS: ClassVar[Mapping[str, str]] = {"expected_by": "expected_from"}

    part: Part
    reference: list[str] | None = None
    """The dtypes it was computed in, the most frequent first, or ``inside KERNEL``. Empty where the
    side has no such part; None where the side was not audited."""
    candidate: list[str] | None = None
    """The same for the candidate."""
    expected: list[str] = []
    expected_from: Fact | None = None
    expected_by: str = ""
    own: bool = False
    """The run's own dtype and settings promise it; otherwise it is common practice."""
    below: SideOrBoth | None = None
    """The side that is narrower than expected."""
    differs: bool = False
    """The sides computed the same module's part in different dtypes."""
    num_places: int = 0


class AuditFinding(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One thing that the audit found wrong."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "what"}

    part: Part
    what: Fact
    """Who computed what in which dtype, and what was expected."""
    text: str = ""
    operators: list[str] = []
    """Operators of either side where it would be seen first."""


class AuditResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The audit of one run or of two."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    rows: list[AuditRow] = []
    findings: list[AuditFinding] = []
    reference: list[AuditedPlace] | None = None
    """The reference's places. None if it recorded no operators, or computed in float64."""
    candidate: list[AuditedPlace] | None = None
    """The same for the candidate."""
    remarks: list[Fact] = []
    """What to know beside the table."""
    notes: list[str] = []


# What a Report says of tokens, as typed data.


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a top-k list."""

    id: int
    text: str | None
    logprob: float
    """In nats."""


class TokenDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token on which the two sides disagree (a flip)."""

    sample: int
    step: int
    reference: TokenChoice
    candidate: TokenChoice
    margin: float | None
    """Logit of the reference's choice minus its runner-up, on the reference."""
    candidate_margin: float | None
    """Logit of the candidate's choice minus its runner-up, on the candidate."""
    truth_choice: TokenChoice | None = None
    """The token that the truth itself chose."""
    truth_margin: float | None = None
    """The truth's logit of the reference's choice minus that of the candidate's choice."""
    z: float | None = None
    """The gap that the flip had to overcome, in standard deviations of the difference of two
    logits. A row's mean error moves nothing and is taken off."""
    z_of: Literal["floor", "model", "difference"] | None = None
    """What the standard deviation is that of:

    * ``floor``: z = |truth_margin| / (√2 · rms of the logit error in this row), of the side nearer
      to the truth (``TokensResult.floor_side``): what rounding moves.
    * ``model``, without a truth: z = the larger of the two sides' gaps between the two tokens, over
      √2 · 2.2 · what all blocks together may add to this row by rounding.
    * ``difference``, without that: z = margin / (√2 · rms of the two sides' own difference in this
      row). A faulty difference makes every flip look small, so this is never judged.
    """
    z_farther: float | None = None
    """The same by the other side's own error. Where that is small, the error is spread over all
    logits of the row, as enlarged rounding is."""
    judgement: Literal["tie", "fault"] | None = None
    """``tie``: rounding may flip it. ``fault``: rounding does not; judged over ``floor`` alone.
    None between the two, or where it was not judged (tokens.find)."""
    reference_top: list[TokenChoice] = []
    """The reference's top list; of the first flip alone."""
    candidate_top: list[TokenChoice] = []
    """The candidate's top list; of the first flip alone."""
    order_to_onset: Literal["before", "same step", "after"] | None = None
    """Where the first flip lies from the forward of the numeric onset."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Says how far the error of ``sites`` alone moves the logits that decide one token.

    An experiment on the machine ``device`` (divergence.experiments.explain): one side's run is
    repeated with the other's error added at these sites. Margins are the logit of ``reference``
    minus that of ``candidate``.
    """

    sample: int
    step: int
    differs: bool
    """The two sides chose different tokens here. Otherwise it is the closest decision."""
    sites: list[str]
    flagged: bool
    """The verdict points at the sites. Otherwise they have the largest error."""
    disturbed: Side
    """The side whose run was repeated with the other's error."""
    reference: TokenChoice
    candidate: TokenChoice
    reference_margin: float
    """In the reference."""
    candidate_margin: float
    """In the candidate."""
    baseline_margin: float
    """In the repeated run as it is."""
    injected_margin: float
    """In the repeated run with the error."""
    share: float | None
    """(injected - baseline) / (the other side - the disturbed side). None for 0/0 and x/0."""
    baseline_choice: TokenChoice
    injected_choice: TokenChoice
    flips: bool
    """The error changes the repeated run's choice."""
    num_forwards: int
    """Number of forwards in which the error was added."""
    dtype: str
    device: str


class TokensResult(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of greedy choices, and of the distributions behind them."""

    num_tokens: int
    """Tokens that both sides generated."""
    num_equal: int
    num_reference: int = 0
    """All tokens that the reference generated."""
    num_missing: int = 0
    """How many of ``num_reference`` the candidate did not go on to, although the two texts had not
    parted."""
    num_other_text: int = 0
    """How many of ``num_tokens`` come after a difference."""
    forced: bool
    """The candidate was fed the reference's tokens, so every step is comparable. Otherwise steps
    after the first difference are not."""
    first_difference: TokenDifference | None = None
    differences: list[TokenDifference] = []
    """Every comparable flip, the first included."""
    kl_mean: float | None = None
    """KL(reference‖candidate) of the distributions that decided the comparable tokens, in nats.
    None where no logits were recorded."""
    kl_p99: float | None = None
    """The same, 99th percentile."""
    floor_side: Side | None = None
    """The side that is nearer to the truth. None without a truth."""
    floor_kl_mean: float | None = None
    """KL(truth‖``floor_side``) in nats. None without a truth."""
    floor_kl_p99: float | None = None
    """The same, 99th percentile."""
    kl_ratio: float | None = None
    """The larger of kl_mean / floor_kl_mean and kl_p99 / floor_kl_p99."""
    kl_limit: float | None = None
    """The limit of ``kl_ratio`` (numerics.floor, threshold ``kl``). None where blocks choose
    experts, which rounding may flip."""
    kl_places: list[tuple[int, int]] = []
    """(sample, step) of the positions that alone are farther apart than ``kl_limit`` times the
    floor's mean; none where ``kl_ratio`` is within its limit, there is no limit, or the median
    position is so far apart, too."""
    explanation: Explanation | None = None
    """The answer of `compare --explain-token`."""

    @property
    def is_far(self) -> bool:
        """Does a token flip, or a distribution lie farther off, than rounding of the end tells?"""
        return bool(self.kl_places) or any(d.judgement == "fault" for d in self.differences)

    def related_to(self, onset: Onset | None) -> TokensResult:
        """Notes whether the first flip lies before, at or after the onset's forward."""
        if self.first_difference is None or onset is None:
            return self
        flip = self.first_difference
        place, other = (flip.sample, flip.step), (onset.sample, onset.step)
        order = "same step" if place == other else "before" if place < other else "after"
        return msgspec.structs.replace(
            self, first_difference=msgspec.structs.replace(flip, order_to_onset=order)
        )


class ReportPart(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a domain adds to a report: a field of it, by name (``Domain.parts``)."""

    @property
    def num_runs(self) -> int:
        """Return how many runs it tells of: one, where that was judged without another."""
        return 2

    @property
    def by_truth(self) -> bool:
        """Was each side held to a truth, so that two copies of one run tell something, too?"""
        return False

    @property
    def is_told(self) -> bool:
        """Do both sides tell their settings? Else one that is not known fails no policy."""
        return True

    @property
    def agreement(self) -> tuple[int, int, int] | None:
        """Return how many tokens are equal, how many part at ties, and of how many, where a policy
        asks for a share of them."""
        return None

    @property
    def numbers(self) -> Mapping[str, float]:
        """Return what a policy may limit, by name."""
        return {}


# What a page shows beside its report: the two machines, the prompts, and the tokens of both sides.
#
# A report is made to be sent and compared, so it holds none of that; the runs do.


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The error of each token of one prompt, block by block, in the pass that counts."""

    sample: int
    tokens: list[str]
    """The prompt's tokens, as text where it is known."""
    blocks: list[str]
    floors: list[list[float | None]]
    """For each block and token ‖a_t - b_t‖ / ‖a_t‖ over the block's floor. None where a side has no
    such number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Both runs' manifests, as far as the runs are still where the report says."""

    reference: Manifest | None = None
    candidate: Manifest | None = None
    positions: Positions | None = None
    notes: tuple[str, ...] = ()
    """What could not be opened, and so is not shown."""

    def text_of(self, token: int) -> str:
        """A token as text, ``#id`` where neither run knows it."""
        for manifest in (self.reference, self.candidate):
            if manifest is not None and str(token) in manifest.tokens.texts:
                return manifest.tokens.texts[str(token)]
        return f"#{token}"

    def samples(self) -> list[tuple[SampleTokens, SampleTokens]]:
        """Each prompt on both sides."""
        if self.reference is None or self.candidate is None:
            return []
        pair = self.reference.tokens.samples, self.candidate.tokens.samples
        return list(zip(*pair, strict=False))


REPORT_SCHEMA_VERSION = 1

Cell = str | int | float | bool | tuple[int, ...] | None
"""One value of a row of Report.to_records."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the report says about each run, so that the run need not be opened again."""

    path: str
    id: str
    label: str
    """What to call the machine."""
    model: str
    dtype: str
    device: str
    complete: bool
    """The run reached its end."""
    stopped_by: str | None = None
    """What ended an incomplete run."""
    num_records: int = 0
    plants: list[str] = []
    """Faults that were planted."""
    substitutes: list[str] = []
    """Operators whose results were replaced by another run's."""
    compute_dtype: str | None = None
    """Of a truth: the dtype that its operators were computed in."""
    generates: bool = False
    """The model chooses tokens."""
    anchored_to: str | None = None
    """The id of the run whose inputs its blocks got in the anchored pass."""


class JsonAnswer:
    """Says what a command found: a Struct that is written as JSON."""

    __slots__ = ()

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole answer as strict JSON; nan and inf become strings."""
        return strict_json(self, indent=indent)


class Answer(JsonAnswer):
    """One that is written as a page too."""

    __slots__ = ()
    COMMAND: ClassVar[str] = "compare"
    DOCUMENTS: ClassVar[str | None] = None
    """Where the function is that gives the document of its page, or several, ``module:function``;
    None where the page is one of its own."""

    def html(self) -> str:
        """A page for a browser: one file that loads nothing. What an answer does not hold (texts,
        machines) is read from the runs, where they are still there."""
        report = self if isinstance(self, Report) else getattr(self, "report", None)
        background = report and _by_name("comparison", "background").background_of(report)
        page: str = _by_name("report", "page").page_of(self, background)
        return page

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write ``html()`` to a file, as a whole or not at all; its path."""
        written: Path = _by_name("output").write_output(self.html(), path, what="page")
        return written

    def to_markdown(self) -> str:
        """What its page says in words and tables, to paste into an issue: text that a run names
        obeys nothing there."""
        text: str = _by_name("report", "page").markdown_of(self)
        return text

    def _repr_html_(self) -> str:
        text: str = _by_name("report", "page").notebook_of(self)
        return text


BESIDE = "(parts)"
"""The name of a field whose entries are written as fields of the Struct that has it."""


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Struct with those that lie in ``BESIDE`` among them."""
    beside = fields.get(BESIDE)
    if not isinstance(beside, dict):
        return fields
    return {name: value for name, value in fields.items() if name != BESIDE} | beside


def no_parts() -> dict[str, ReportPart | None]:
    """Nothing of any domain."""
    return dict.fromkeys(added("parts"))


class Report(msgspec.Struct, Answer, Worded, frozen=True, kw_only=True):
    """The answer of `compare`."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    schema_version: int = REPORT_SCHEMA_VERSION
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    verdict: Verdict
    preflight: list[PreflightLine]
    tokens: TokensResult | None
    coverage: Coverage
    sites: list[SiteResult]
    remarks: list[Fact] = []
    """What else to know of the two runs."""
    notes: list[str] = []
    not_exercised: list[Unexercised] = []
    """What no prompt reached on the reference."""
    visible: Visible | None = None
    """How small an error would have been seen; None where no block was judged."""
    operators: OperatorsResult | None = None
    """None unless both sides recorded operators."""
    audit: AuditResult | None = None
    """None where neither side recorded operators."""
    replicas: list[ReplicaCheck] = []
    """For each side that several ranks made: its ranks compared with one another."""
    findings: list[Finding] = []
    """What each analysis claimed. The verdict was made of these."""
    parts: dict[str, ReportPart | None] = msgspec.field(name=BESIDE, default_factory=no_parts)
    """What domains have to say, None where they say nothing: ``report.NAME``, and in the JSON a key
    of that name beside the others."""

    def __getattr__(self, name: str) -> Any:
        """The part of that name. Only what is no field is asked for here."""
        try:
            return self.parts[name]
        except KeyError:
            raise AttributeError(f"a report has no {name!r}") from None

    def __repr__(self) -> str:
        """``<Report a b: localized>``: all fields are megabytes."""
        return f"<Report {self.reference.path} {self.candidate.path}: {self.verdict.kind}>"

    def to_records(self) -> list[dict[str, Cell]]:
        """One flat dict per compared site, ready for pandas.DataFrame or csv.DictWriter."""
        rows: list[dict[str, Cell]] = []
        for site in self.sites:
            row: dict[str, Any] = msgspec.to_builtins(site)
            row.pop("prompts")
            for name in ("logits", "nonfinite", "truth", "estimated"):
                nested = row.pop(name) or {}
                row.update({f"{name}_{key}": value for key, value in nested.items()})
            rows.append(row)
        return rows

    def to_pandas(self) -> pandas.DataFrame:
        """Makes ``to_records`` a pandas DataFrame; the columns are the fields of SiteResult. Raises
        UsageError where pandas is not installed."""
        frame: pandas.DataFrame = _library("pandas").DataFrame(self.to_records())
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Makes ``to_records`` a polars DataFrame."""
        frame: polars.DataFrame = _library("polars").DataFrame(
            self.to_records(), infer_schema_length=None, strict=False
        )
        return frame

    @classmethod
    def of(cls, fields: dict[str, JsonValue]) -> Report:
        """The report of which these are the fields, as JSON has them. Raises what msgspec does."""
        fields, parts = flat(fields), no_parts()
        for name, place in added("parts").items():
            if fields.get(name) is not None:
                parts[name] = msgspec.convert(fields[name], placed(place), strict=False)
        report = msgspec.convert(fields, cls, strict=False)  # "nan" is a number
        return msgspec.structs.replace(report, parts=parts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """The report in a file that ``compare --json``, ``check --json`` or ``localize --json``
        wrote. Raises UsageError where there is none."""
        from divergence.outside import json_value, read_bytes

        hint = "divergence compare A B --json > report.json"

        def refused(why: str, hint: str = hint) -> UsageError:
            return UsageError(f"no report can be read: {why}", where=os.fspath(path), hint=hint)

        try:
            data = read_bytes(path, error=UsageError, hint=hint)
            stored = json_value(data, where=os.fspath(path), error=UsageError, hint=hint)
            stored = stored.get("report", stored)
            version = stored["schema_version"]
            if version != REPORT_SCHEMA_VERSION:
                raise refused(
                    f"its schema_version is {version}",
                    hint="a newer divergence wrote it, which reads it too",
                )
            return cls.of(stored)
        except (AttributeError, KeyError, TypeError):
            raise refused("it holds something else") from None
        except (ValueError, RecursionError) as error:  # what msgspec raises is a ValueError
            raise refused(str(error)) from None

    def plot(self) -> Picture:
        """The error of each block beside what rounding explains, as a picture that a notebook
        shows; ``plot().save("error.svg")`` or ``"error.png"`` (extra ``plot``) writes it. Raises
        UsageError where no block was compared."""
        made: Picture = _by_name("report", "page").picture_of(self)
        return made


def _by_name(*names: str) -> ModuleType:
    """A module that is needed for a page alone, and that knows reports."""
    return import_module(".".join(("divergence", *names)))


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} is not installed", hint=f"pip install {name}, or take to_records()"
        ) from error


def strict_json(value: Any, *, indent: int | None = 2) -> str:
    """Structs, dicts and lists as JSON text that any parser reads and any terminal may show.
    Indented, each of a report's sites is one line: they are nearly all of it."""
    return "".join(json_parts(value, indent=indent))


def json_parts(value: Any, *, indent: int | None = 2) -> Iterator[str]:
    """Yields ``strict_json`` in pieces, in order: 26 MB are not held at once."""
    waiting = bytearray()
    for part in _written(value, b" " * (indent or 0), b"\n" if indent else b""):
        waiting += part
        if len(waiting) > _PIECE_BYTES:
            yield printable_json(waiting.decode())
            waiting.clear()
    yield printable_json(waiting.decode())


def _written(value: Any, step: bytes, line: bytes) -> Iterator[bytes]:
    """The JSON of a value, ``line`` before each of its closing brackets, ``step`` deeper before
    what is in them."""
    if isinstance(value, msgspec.Struct) and not type(value).__struct_config__.omit_defaults:
        values = (getattr(value, name) for name in value.__struct_fields__)
        value = dict(zip(value.__struct_encode_fields__, values, strict=True))
    elif isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    is_object = isinstance(value, dict)
    if not value or not (is_object or isinstance(value, list | tuple | set | frozenset)):
        yield _encoded(value)
        return
    inner, colon = line + step if line else b"", b": " if line else b":"
    before = b"{" if is_object else b"["
    if isinstance(value, list) and isinstance(value[0], SiteResult):
        for start in range(0, len(value), _AT_ONCE):
            part = value[start : start + _AT_ONCE]
            yield before + inner
            if _is_plain(part):  # all at once
                yield _ENCODER.encode_lines(part)[:-1].replace(b"\n", b"," + inner)
            else:
                yield (b"," + inner).join(map(_encoded, part))
            before = b","
        yield line + b"]"
        return
    for key, item in flat(value).items() if is_object else enumerate(value):
        yield before + inner + (_encoded(key) + colon if is_object else b"")
        yield from _written(item, step, inner)
        before = b","
    yield line + (b"}" if is_object else b"]")


_NONFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""How msgpack begins a nan or an infinity, which JSON writes as null."""


def _number(value: Any) -> Any:
    """A numpy scalar as Python's own number. Raises AttributeError for what is none."""
    return value.item()


_ENCODER = msgspec.json.Encoder(enc_hook=_number)
_PIECE_BYTES = 1 << 16
_AT_ONCE = 64
"""Sites that are written in one go."""


def _encoded(value: Any) -> bytes:
    """A number, a text, or a site's result; a key."""
    return _ENCODER.encode(value if _is_plain(value) else _json_safe(value))


def _is_plain(value: Any) -> bool:
    """Is JSON's own way of writing it right?"""
    try:
        return _NONFINITE.search(msgspec.msgpack.encode(value, enc_hook=_number)) is None
    except UnicodeEncodeError:  # undecodable bytes of a path
        return False


def _json_safe(value: Any) -> Any:
    """Replace non-finite floats, which JSON cannot hold, by their names, and what UTF-8 cannot hold
    by escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if isinstance(value, msgspec.Struct):
        values = zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)
        return msgspec.structs.replace(value, **{name: _json_safe(item) for name, item in values})
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value


ToldBy = Literal["majority", "other run", "nobody"]
"""What tells which of the ranks are wrong."""


class ReplicaDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that should hold the same tensor and do not."""

    side: Side
    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    ranks: tuple[int, ...]
    """The ranks that differ from ``peers``."""
    peers: tuple[int, ...]
    """The ranks they are held against: most of them. Where two versions are equally frequent and
    ``told_by`` is ``other run``: those with the version nearer to the other run."""
    told_by: ToldBy = "majority"
    """What tells which ranks are wrong; ``nobody`` where it cannot be told."""
    rel_l2: float | None = None
    """‖odd - peers'‖ / ‖peers'‖ of the version farthest off. None where it was not measured."""


class ReplicaCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one run, compared with one another."""

    side: Side
    mesh: str
    """The ranks in words, for example ``4 ranks (dp 2 × tp 2)``."""
    num_tensors: int
    """Tensors of which several ranks hold an equal copy."""
    num_different: int
    """How many of them differ between ranks."""
    first: list[ReplicaDiff] = []
    """The first difference of each pass that has any, in execution order, measured."""


def summary_of(run: Run) -> RunSummary:
    manifest = run.manifest
    return RunSummary(
        path=str(run.path),
        id=manifest.id,
        label=manifest.environment.label,
        model=manifest.model.source,
        dtype=manifest.model_dtype,
        device=f"{manifest.environment.device_type}: {manifest.environment.device_name}",
        complete=manifest.complete,
        stopped_by=manifest.stopped_by,
        num_records=len(run.records),
        compute_dtype=manifest.settings.compute_dtype,
        generates=manifest.model.task in ("causal-lm", "encoder-decoder")
        and manifest.plan.replayed_pass is None,
        plants=manifest.plan.plants,
        substitutes=manifest.plan.substitutes,
        anchored_to=manifest.plan.anchored_to,
    )

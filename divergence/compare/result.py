"""The Report: everything `compare` found, as typed data.

Rendering (terminal, JSON, CSV) lives in divergence.report and needs nothing but
this. The JSON form is stable and versioned; numbers that JSON cannot hold
(nan, inf) are written as the strings "nan", "inf", "-inf".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from divergence.compare.audit_result import AuditedPlace, AuditFinding, AuditResult, AuditRow
from divergence.compare.coverage_result import PassCoverage
from divergence.compare.operators_result import (
    CausalCheck,
    OperatorResult,
    OperatorsResult,
    OtherInput,
    OtherOperand,
    RegionResult,
    UnmatchedOperator,
)
from divergence.compare.replicas_result import RankShare, ReplicaCheck, ReplicaDiff
from divergence.compare.suite_result import SuiteCase, SuiteOperator, SuiteResult, SuiteSide
from divergence.compare.tokens_result import (
    Explanation,
    TokenChoice,
    TokenDifference,
    TokensResult,
)
from divergence.numerics.pair_metrics import Estimate

__all__ = [
    "REPORT_SCHEMA_VERSION",
    "AuditFinding",
    "AuditResult",
    "AuditRow",
    "AuditedPlace",
    "CausalCheck",
    "Check",
    "Coverage",
    "Estimate",
    "Evidence",
    "Explanation",
    "LogitsDiff",
    "NonfiniteCount",
    "Onset",
    "OperatorResult",
    "OperatorsResult",
    "OtherInput",
    "OtherOperand",
    "PassCoverage",
    "PreflightLine",
    "PromptRatio",
    "RankShare",
    "RegionResult",
    "ReplicaCheck",
    "ReplicaDiff",
    "Report",
    "RunSummary",
    "SiteResult",
    "Skipped",
    "SuiteCase",
    "SuiteOperator",
    "SuiteResult",
    "SuiteSide",
    "TokenChoice",
    "TokenDifference",
    "TokensResult",
    "TruthDiff",
    "UnmatchedOperator",
    "Verdict",
    "VerdictKind",
    "json_safe",
]

REPORT_SCHEMA_VERSION = 1

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


class _Part(msgspec.Struct, kw_only=True):
    """Shared options; no fields of its own."""


class Onset(_Part, frozen=True, kw_only=True):
    """The first site, in execution order, where the error is made rather than inherited.

    ``block``: module path of the repeated block the site is or lies in, or None.
    ``position``: token index of the worst row there, where rows are tokens. ``pass``:
    where it was found; ``anchored`` is exact.
    """

    site: str
    block: str | None
    sample: int
    step: int
    position: int | None
    pass_: str = msgspec.field(name="pass", default="free")


class Evidence(_Part, frozen=True, kw_only=True):
    """One fact the verdict rests on: a sentence, and its numbers by name."""

    text: str
    values: dict[str, float] = {}


class Check(_Part, frozen=True, kw_only=True):
    """One thing that a verdict's confidence rests on. ``detail``: what is lacking, where it is."""

    name: str
    state: Literal["met", "failed", "not_made"]
    detail: str = ""


class Verdict(_Part, frozen=True, kw_only=True):
    """The judgement. ``side``: which run is wrong, where that can be told.

    ``summary``: one line for people. ``checks``: what the confidence is computed from, where it is
    computed. ``next``: commands that go deeper.
    """

    kind: VerdictKind
    summary: str
    onset: Onset | None = None
    confidence: Literal["high", "medium", "low"]
    side: Literal["reference", "candidate", "both", "neither"] | None = None
    evidence: list[Evidence] = []
    next: list[str] = []
    checks: list[Check] = []


class PreflightLine(_Part, frozen=True, kw_only=True):
    """One thing checked before any number. ``detail``: e.g. the first parameters that differ."""

    check: str
    status: Literal["same", "differs", "blocking"]
    reference: str
    candidate: str
    detail: str | None = None


class NonfiniteCount(_Part, frozen=True, kw_only=True):
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


class LogitsDiff(_Part, frozen=True, kw_only=True):
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


class TruthDiff(_Part, frozen=True, kw_only=True):
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


class PromptRatio(_Part, frozen=True, kw_only=True):
    """One prompt's rows of a forward that holds several. ``ratio``: of its median token; ``usage``:
    the largest share of any limit that it uses there."""

    sample: int
    ratio: float
    num_rows: int
    usage: float = 0.0


class SiteResult(_Part, kw_only=True):
    """One compared pair of tensors, a = reference, b = candidate, d = a - b.

    Formulas and care in divergence.numerics.pair. ``rel_l2`` = ‖d‖/‖a‖. ``floor``: the
    rel_l2 that correct implementations of this dtype are expected to reach here (median
    token); ``ratio``: the median token's error made here over its floor, ``ratio_max`` the
    worst token's, ``ratio_sink`` the worst sink token's (norm over 10 × the median), which is in
    neither of the two; ``limit``: the multiple of the floor at which the judge flags this site's
    typical token; ``strain``: the largest share that any limit is used by this site, over all its
    samples and steps of a phase; ``flagged``: beyond what rounding explains.
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
    strain: float | None = None
    truth: TruthDiff | None = None
    of: Literal["reference", "candidate"] | None = None
    flagged: bool = False
    estimated: Estimate | None = None
    at_least: float | None = None
    prompts: list[PromptRatio] = []
    usage: float | None = None


class Skipped(_Part, frozen=True, kw_only=True):
    """Tensors that were not compared, and why; never counted as passes."""

    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    reason: str
    side: Literal["reference", "candidate", "both"]


class Coverage(_Part, frozen=True, kw_only=True):
    """How much of what was recorded was compared. ``passes``: by pass, what the reference holds
    and what became of it; the other numbers are sums over pairs of tensors. Operators and tokens
    are in ``passes`` alone, and in ``num_only_reference`` where the candidate lacks them."""

    num_compared: int
    num_only_reference: int
    num_only_candidate: int
    num_skipped: int
    unmatched: list[Skipped] = []
    passes: list[PassCoverage] = []


class RunSummary(_Part, frozen=True, kw_only=True):
    """What the report says about each run without opening it again. ``compute_dtype``: of a
    truth, what its operators were computed in."""

    path: str
    id: str
    label: str
    model: str
    dtype: str
    device: str
    complete: bool
    stopped_by: str | None = None
    num_records: int = 0
    plants: list[str] = []
    substitutes: list[str] = []
    compute_dtype: str | None = None


class Report(_Part, kw_only=True):
    """The answer of `compare`. ``operators``: None where not both sides recorded any; ``audit``:
    None where neither did; ``replicas``: of each side that several ranks made, its ranks against
    one another; ``suite``: None unless both runs are of an operator suite, which has no
    other sites."""

    schema_version: int = REPORT_SCHEMA_VERSION
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    verdict: Verdict
    preflight: list[PreflightLine]
    tokens: TokensResult | None
    coverage: Coverage
    sites: list[SiteResult]
    notes: list[str] = []
    operators: OperatorsResult | None = None
    audit: AuditResult | None = None
    replicas: list[ReplicaCheck] = []
    suite: SuiteResult | None = None

    def __repr__(self) -> str:
        """``<Report a b: localized>``: all fields are megabytes."""
        return f"<Report {self.reference.path} {self.candidate.path}: {self.verdict.kind}>"

    def to_records(self) -> list[dict[str, Any]]:
        """One flat dict per compared site, ready for pandas.DataFrame or csv.DictWriter."""
        rows = []
        for site in self.sites:
            row = msgspec.to_builtins(site)
            row.pop("prompts")
            for name in ("logits", "nonfinite", "truth", "estimated"):
                nested = row.pop(name) or {}
                row.update({f"{name}_{key}": value for key, value in nested.items()})
            rows.append(row)
        return rows

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole report as strict JSON; nan and inf become strings."""
        text = msgspec.json.encode(json_safe(msgspec.to_builtins(self)))
        if indent:
            text = msgspec.json.format(text, indent=indent)
        return text.decode()


def json_safe(value: Any) -> Any:
    """Replace non-finite floats, which JSON cannot hold, by their names, and what UTF-8 cannot
    (undecodable bytes of a path) by escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        if value != value:
            return "nan"
        if value in (float("inf"), float("-inf")):
            return "inf" if value > 0 else "-inf"
        return value
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value

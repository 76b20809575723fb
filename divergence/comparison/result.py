"""The Report: everything `compare` found, as typed data.

Rendering (terminal, JSON, CSV) lives in divergence.report and needs nothing but
this. The JSON form is stable and versioned; numbers that JSON cannot hold
(nan, inf) are written as the strings "nan", "inf", "-inf".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from divergence.comparison.align.coverage_result import PassCoverage
from divergence.comparison.operators.result import (
    CausalCheck,
    OperatorResult,
    OperatorsResult,
    OtherInput,
    OtherOperand,
    RegionResult,
    UnmatchedOperator,
)
from divergence.comparison.precision.result import AuditedPlace, AuditFinding, AuditResult, AuditRow
from divergence.comparison.ranks.result import RankShare, ReplicaCheck, ReplicaDiff
from divergence.comparison.site_result import (
    LogitsDiff,
    NonfiniteCount,
    PromptRatio,
    SiteResult,
    TruthDiff,
)
from divergence.comparison.suite.result import SuiteCase, SuiteOperator, SuiteResult, SuiteSide
from divergence.comparison.tokens.result import (
    Explanation,
    TokenChoice,
    TokenDifference,
    TokensResult,
)
from divergence.numerics.pairs.metrics import Estimate
from divergence.printable import printable_json

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
    "strict_json",
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
    """One fact the verdict rests on: a sentence, and its numbers by name. ``block``: one that it
    points at, to look into, though nothing is beyond a limit there."""

    text: str
    values: dict[str, float] = {}
    block: str | None = None


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
    truth, what its operators were computed in. ``generates``: a model that chooses tokens."""

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
    generates: bool = False


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
        return strict_json(self, indent=indent)


def strict_json(value: Any, *, indent: int | None = 2) -> str:
    """Structs, dicts and lists as JSON text that any parser reads and any terminal may show."""
    text = msgspec.json.encode(json_safe(msgspec.to_builtins(value)))
    if indent:
        text = msgspec.json.format(text, indent=indent)
    return printable_json(text.decode())


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
        return {json_safe(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value

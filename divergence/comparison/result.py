"""The Report: everything `compare` found, as typed data.

Rendering (terminal, JSON, CSV) lives in divergence.report and needs nothing but
this. The JSON form is stable and versioned; numbers that JSON cannot hold
(nan, inf) are written as the strings "nan", "inf", "-inf".
"""

from __future__ import annotations

from typing import Any

import msgspec

from divergence.comparison.results.coverage import Coverage, PassCoverage, Skipped
from divergence.comparison.results.findings import (
    Check,
    Claim,
    Evidence,
    Finding,
    Onset,
    Role,
    SiteKey,
    Verdict,
    VerdictKind,
)
from divergence.comparison.results.operators import (
    CausalCheck,
    OperatorResult,
    OperatorsResult,
    OtherInput,
    OtherOperand,
    RegionResult,
    UnmatchedOperator,
)
from divergence.comparison.results.precision import (
    AuditedPlace,
    AuditFinding,
    AuditResult,
    AuditRow,
)
from divergence.comparison.results.preflight import PreflightLine
from divergence.comparison.results.ranks import RankShare, ReplicaCheck, ReplicaDiff
from divergence.comparison.results.sites import (
    LogitsDiff,
    NonfiniteCount,
    PromptRatio,
    SiteResult,
    TruthDiff,
)
from divergence.comparison.results.suite import SuiteCase, SuiteOperator, SuiteResult, SuiteSide
from divergence.comparison.results.tokens import (
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
    "Cell",
    "Check",
    "Claim",
    "Coverage",
    "Estimate",
    "Evidence",
    "Explanation",
    "Finding",
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
    "Role",
    "RunSummary",
    "SiteKey",
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

Cell = str | int | float | bool | tuple[int, ...] | None
"""One value of a row of Report.to_records."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the report says about each run, so that the run need not be opened again."""

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


class Report(msgspec.Struct, kw_only=True):
    """The answer of `compare`."""

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
    """None unless both sides recorded operators."""
    audit: AuditResult | None = None
    """None where neither side recorded operators."""
    replicas: list[ReplicaCheck] = []
    """For each side that several ranks made: its ranks compared with one another."""
    suite: SuiteResult | None = None
    """None unless both runs are of an operator suite. Such runs have no other sites."""
    findings: list[Finding] = []
    """What each analysis claimed. The verdict was made of these."""

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

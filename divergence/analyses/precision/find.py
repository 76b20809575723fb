"""Precision: what one side computed in another dtype, told beside a verdict."""

from __future__ import annotations

from divergence.analyses.precision.audit import audit_runs
from divergence.comparison.answer import Answer
from divergence.comparison.measured import Measured
from divergence.comparison.results.findings import Evidence, Finding, Verdict
from divergence.comparison.results.operators import AuditResult

__all__ = ["explain", "find"]


def find(measured: Measured) -> Answer:
    """The audit; it claims nothing by itself."""
    audit = audit_runs(measured.reference, measured.candidate, rename=measured.rename)
    return Answer(parts={"audit": audit})


def explain(measured: Measured, verdict: Verdict, answer: Answer) -> list[Finding]:
    """The audit's sentences: those about the operator at the onset before all other evidence."""
    audit = answer.parts["audit"]
    if not isinstance(audit, AuditResult):
        return []
    onset = verdict.onset.site.rpartition(":")[0] if verdict.onset is not None else None
    return [
        Finding(
            claim="explanation", role="explains", leads=leads,
            evidence=[
                Evidence(text=item.text) for item in audit.findings
                if (onset in item.operators) == leads
            ],
        )
        for leads in (True, False)
    ]  # fmt: skip

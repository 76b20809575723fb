"""Precision: what one side computed in another dtype, told beside a verdict."""

from __future__ import annotations

from divergence.analyses.precision.audit import PHASES, audit_runs, gradient_errors
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.result import AuditResult, Finding, Verdict
from divergence.run.site import is_of_parameter


def find(measured: Measured) -> AnalysisResult:
    """The audit; it claims nothing by itself."""
    audit = audit_runs(measured.reference, measured.candidate, rename=measured.rename)
    return AnalysisResult(parts={"audit": audit})


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Return what the audit found: that about the operator at the onset before all other evidence,
    and that about sums of gradients, or the optimizer's weights, where it is one of these."""
    audit = answer.parts["audit"]
    if not isinstance(audit, AuditResult):
        return []
    onset, phase = None, None
    if verdict.onset is not None:
        onset = verdict.onset.site.rpartition(":")[0]
        phase = verdict.onset.phase if is_of_parameter(verdict.onset.site) else None
    training = any(item.part in PHASES for item in audit.findings)
    errors = gradient_errors(measured) if training else None
    return [
        Finding(
            claim="explanation",
            role="explains",
            leads=leads,
            evidence=[
                item.what.with_values(errors=errors)
                if item.part == "reduced gradients"
                else item.what
                for item in audit.findings
                if (onset in item.operators or PHASES.get(item.part, "") == phase) == leads
            ],
        )
        for leads in (True, False)
    ]

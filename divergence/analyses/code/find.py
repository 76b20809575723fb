"""Code: what the onset's block runs otherwise, and whose truth it is that names a side."""

from __future__ import annotations

from divergence.comparison.analysis import Answer, Measured
from divergence.comparison.decide import check
from divergence.comparison.preflight.code import code_evidence, why_no_side
from divergence.comparison.results.findings import Evidence, Finding, Verdict

__all__ = ["explain"]


def explain(measured: Measured, verdict: Verdict, answer: Answer) -> list[Finding]:
    """Other code in the onset's block; and where the truth cannot tell the side, why."""
    a, b = measured.reference.manifest, measured.candidate.manifest
    findings = []
    if verdict.onset is not None:
        evidence = code_evidence(a, b, verdict.onset.block)
        findings.append(Finding(claim="explanation", role="explains", evidence=evidence))
    reason = None
    if measured.truth is not None:
        reason = why_no_side(verdict, measured.truth.run, a, b)
    if reason is not None:
        findings.append(
            Finding(
                claim="side_not_told",
                role="abstains",
                rests_on=[
                    check(
                        "truth_of_reference_code",
                        False,
                        "the sides run different code, the truth A's",
                        made=False,
                    )
                ],
                evidence=[Evidence(text=reason)],
            )
        )
    return findings

"""Two probe runs: the facts that differ are the answer, the tensors their proof.

Another order of additions, other multiply-adds or another last bit of a function is rounding: the
kind of difference that any two correct machines have. Fewer bits of inputs or partial sums, another
rounding mode or a much coarser function is a difference of precision, which a model feels.
"""

from __future__ import annotations

from divergence.comparison.analysis import AnalysisResult, Measured, is_of_machine
from divergence.comparison.arithmetic import Explained, explain_arithmetic
from divergence.comparison.decide import check
from divergence.comparison.result import Finding, VerdictKind
from divergence.facts import fact


def find(measured: Measured) -> AnalysisResult:
    """Find the verdict of two probes; of any other runs, what the arithmetic explains."""
    a, b = measured.reference.manifest, measured.candidate.manifest
    arithmetic = explain_arithmetic(a, b)
    if is_of_machine(a) and is_of_machine(b):
        return AnalysisResult(findings=[_probe_finding(measured, arithmetic)])
    return AnalysisResult(
        findings=[Finding(claim="context", role="context", evidence=arithmetic.brief())]
    )


def _probe_finding(measured: Measured, arithmetic: Explained) -> Finding:
    total, missing = len(measured.sites), measured.missing
    num_different = sum(not site.identical for site in measured.sites)
    evidence = [
        *arithmetic.evidence,
        fact("probe.tensors_differ", num_different=num_different, total=total),
    ]
    if missing:
        evidence.append(fact("probe.tensors_without_partner", num=missing))
    num, num_precise = arithmetic.num_differ, len(arithmetic.precise)
    kind: VerdictKind = "within_floor"
    headline, rests_on = fact("probe.other_rounding", num=num), []
    if not arithmetic.evidence:
        kind, headline = "undetermined", fact("probe.no_fact_in_common")
        rests_on = [check("measured", False)]
    elif num_precise:
        kind, headline = (
            "systematic",
            fact("probe.other_precision", num=num, num_precise=num_precise),
        )
    elif not num:
        kind = "within_floor" if num_different else "identical"
        headline = fact("probe.same_arithmetic", num_same=None if num_different else total)
        rests_on = [check("coverage", not missing, fact("probe.not_all_compared"))]
        evidence = evidence if num_different or missing else []
    return Finding(
        claim="arithmetic",
        kind=kind,
        headline=[headline],
        rests_on=rests_on,
        evidence=evidence,
        side="neither" if kind in ("within_floor", "identical") else None,
    )

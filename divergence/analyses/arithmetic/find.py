"""Two probe runs: the facts that differ are the answer, the tensors their proof.

Another order of additions, other multiply-adds or another last bit of a function is rounding: the
kind of difference that any two correct machines have. Fewer bits of inputs or partial sums, another
rounding mode or a much coarser function is a difference of precision, which a model feels.
"""

from __future__ import annotations

from divergence.comparison.analysis import AnalysisResult, Measured, is_probe
from divergence.comparison.decide import check
from divergence.comparison.facts import Explained, count_of, explain_arithmetic
from divergence.comparison.results.findings import Finding
from divergence.facts import plain

__all__ = ["find"]


def find(measured: Measured) -> AnalysisResult:
    """Of two probes, the verdict; of any other runs, what the arithmetic explains."""
    a, b = measured.reference.manifest, measured.candidate.manifest
    facts = explain_arithmetic(a, b)
    if is_probe(a) and is_probe(b):
        return AnalysisResult(findings=[_of_probes(measured, facts)])
    return AnalysisResult(
        findings=[Finding(claim="context", role="context", evidence=facts.brief())]
    )


def _of_probes(measured: Measured, facts_found: Explained) -> Finding:
    sites, missing = measured.sites, measured.missing
    different = [site for site in sites if not site.identical]
    tensors = f"{len(different)} of {len(sites)} recorded tensors differ"
    count = plain(tensors, num_different=len(different))
    evidence = [*facts_found.evidence, count]
    if missing:
        evidence.append(plain(f"{missing} tensors had no partner: other shapes or orders"))
    if not facts_found.evidence:
        return Finding(
            claim="arithmetic", kind="undetermined", headline=[plain("the runs hold no fact in common")],
            rests_on=[check("measured", False, "")], evidence=evidence,
        )  # fmt: skip
    facts = count_of(facts_found.num_differ, "fact")
    if facts_found.precise:
        return Finding(
            claim="arithmetic",
            kind="systematic",
            headline=[
                plain(
                    f"the two machines compute in other precision: {facts} differ, "
                    f"{len(facts_found.precise)} of them in precision"
                )
            ],
            evidence=evidence,
        )
    if facts_found.num_differ:
        return Finding(
            claim="arithmetic",
            kind="within_floor",
            headline=[
                plain(
                    f"the two machines round otherwise: {facts} differ, none of them in precision"
                )
            ],
            side="neither",
            evidence=evidence,
        )
    same = not different
    return Finding(
        claim="arithmetic",
        kind="identical" if same else "within_floor",
        headline=[
            plain(
                "the probed arithmetic is the same"
                + (f", and all {len(sites)} recorded tensors are equal bit for bit" if same else "")
            )
        ],
        side="neither",
        rests_on=[check("coverage", not missing, "not everything was compared")],
        evidence=[] if same and not missing else evidence,
    )

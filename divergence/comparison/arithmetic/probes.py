"""Two probe runs: the facts that differ are the answer, the tensors their proof.

Another order of additions, other multiply-adds or another last bit of a function is rounding: the
kind of difference that any two correct machines have. Fewer bits of inputs or partial sums, another
rounding mode or a much coarser function is a difference of precision, which a model feels.
"""

from __future__ import annotations

from divergence.comparison.arithmetic.facts import Explained, count_of, is_probe
from divergence.comparison.decide.case import Case
from divergence.comparison.result import Evidence, Verdict
from divergence.run.schema.manifest import Manifest

__all__ = ["judge_probes"]


def judge_probes(a: Manifest, b: Manifest, found: Explained, case: Case) -> Verdict | None:
    """The verdict on two probe runs; None for any others.

    Floors are taken off the sites: a probe's inputs cancel on purpose, and no model's floor fits.
    """
    if not (is_probe(a) and is_probe(b)):
        return None
    sites, missing = case.sites, case.missing
    for site in sites:
        site.floor = site.ratio = site.ratio_max = site.ratio_sink = None
        site.limit = site.strain = None
    different = [site for site in sites if not site.identical]
    tensors = f"{len(different)} of {len(sites)} recorded tensors differ"
    count = Evidence(text=tensors, values={"num_different": len(different)})
    evidence = [*found.evidence, count]
    if missing:
        evidence.append(Evidence(text=f"{missing} tensors had no partner: other shapes or orders"))
    if not found.evidence:
        return Verdict(
            kind="undetermined", summary="the runs hold no fact in common", confidence="low",
            evidence=evidence,
        )  # fmt: skip
    facts = count_of(found.num_differ, "fact")
    if found.precise:
        return Verdict(
            kind="systematic",
            summary=f"the two machines compute in other precision: {facts} differ, "
            f"{len(found.precise)} of them in precision",
            confidence="high",
            evidence=evidence,
        )
    if found.num_differ:
        return Verdict(
            kind="within_floor",
            summary=f"the two machines round otherwise: {facts} differ, none of them in precision",
            confidence="high",
            side="neither",
            evidence=evidence,
        )
    same = not different
    return Verdict(
        kind="identical" if same else "within_floor",
        summary="the probed arithmetic is the same"
        + (f", and all {len(sites)} recorded tensors are equal bit for bit" if same else ""),
        confidence="high" if not missing else "medium",
        side="neither",
        evidence=[] if same and not missing else evidence,
    )

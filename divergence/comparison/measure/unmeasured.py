"""What a verdict says of tensors that were estimated, or of which only digests or statistics are
left: how well the numbers are known, and what was not measured at all.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from divergence.comparison.results.findings import Evidence
from divergence.comparison.results.sites import SiteResult

__all__ = ["NO_PREFILL", "estimated_evidence", "is_unmeasured", "unmeasured_evidence"]

NO_PREFILL = (
    "the prefill was not recorded: what goes wrong there is seen only as far as it shows in later "
    "steps"
)


def is_unmeasured(site: SiteResult) -> bool:
    """Do the two differ by nobody knows how much?"""
    return not site.identical and site.rel_l2 is None


def estimated_evidence(sites: Sequence[SiteResult]) -> list[Evidence]:
    """How well estimated numbers are known."""
    found = [site for site in sites if site.estimated is not None]
    if not found:
        return []
    said, values = [], {"num_estimated": float(len(found))}
    for phase, steps in (("prefill", False), ("decode", True)):
        errors = [
            site.estimated.relative_error
            for site in found
            if site.estimated is not None
            and (site.step > 0) == steps
            and site.estimated.relative_error is not None
        ]
        if errors:
            middle, worst = statistics.median(errors), max(errors)
            values[phase] = middle
            said.append(f"in the {phase} ±{100 * middle:.0f}% (at worst ±{100 * worst:.0f}%)")
    return [
        Evidence(
            text=f"{len(found)} of {len(sites)} differences are estimated from sketches; relative "
            f"L2 {', '.join(said)}, in 95 of 100 cases",
            values=values,
        )
    ]


def unmeasured_evidence(sites: Sequence[SiteResult]) -> list[Evidence]:
    """What differs and was not measured, and the most that its statistics tell."""
    found = [site for site in sites if is_unmeasured(site)]
    if not found:
        return []
    evidence = [
        Evidence(
            text=f"{len(found)} of {len(sites)} compared tensors differ, but by how much is not "
            "known: neither bytes nor sketches of both sides are left",
            values={"num_unmeasured": len(found)},
        )
    ]
    told = [site for site in found if site.at_least]
    if told:
        most = max(told, key=lambda site: site.at_least or 0.0)
        evidence.append(
            Evidence(
                text=f"by their statistics, at {most.site} ({most.pass_}, step {most.step}) the "
                f"two are at least {most.at_least:.1e} apart (relative L2)",
                values={"at_least": most.at_least or 0.0},
            )
        )
    return evidence

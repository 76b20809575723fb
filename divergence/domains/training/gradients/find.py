"""Gradients: what parameters' gradients that are off have in common.

Kernels make an error in one place, and it shows in what leaves a block's backward as well. A loop
that adds up micro-batches, reduces among ranks or divides makes one in the gradients of parameters
alone, of all of them or of a bucket. Where all are one multiple of the other side's, the factor
says which divisor to look for.

Such an error may come and go: a bucket that is sent before it is full depends on time. Then the
anchored pass is right and the free pass is not. There a gradient is off by what its own rounding
makes (which the anchored pass shows) and by what enters it, so by no more than

    typical · free_gain × max(rounding, floor) × max(1, largest activation difference / floor)

where differences are ‖a - b‖ / ‖a‖ and the factors the thresholds of that name: 24, where healthy
pairs stay below 10.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.constants import EXPLAINED_SHARE
from divergence.comparison.decide import check
from divergence.comparison.parameters import together
from divergence.comparison.result import Finding, SiteResult, Verdict, order_of
from divergence.facts import fact
from divergence.run.site import OPTIMIZER, is_of_parameter


def find(measured: Measured) -> AnalysisResult:
    """The first gradient of a parameter that is off in the free pass alone."""
    free = [site for site in measured.sites if site.pass_ == "free"]
    again = {site.site: site for site in measured.sites if site.pass_ == "anchored"}
    own = [site for site in free if site.phase == "backward" and is_of_parameter(site.site)]
    if not own or any(
        (again[site.site].limit_usage or 0) > 1 for site in own if site.site in again
    ):
        return AnalysisResult()  # told of the anchored pass
    spread = max(
        (site.rel_l2 or 0.0 for site in free if not is_of_parameter(site.site)), default=0.0
    )
    ample = measured.thresholds.typical * measured.thresholds.free_gain
    beyond = []
    for site in own:
        same, floor = again.get(site.site), site.floor
        if same is None or same.rel_l2 is None or site.rel_l2 is None or not floor:
            continue
        bound = ample * max(same.rel_l2, floor) * max(1.0, spread / floor)
        if site.rel_l2 > bound:
            beyond.append((site, same.rel_l2, bound))
    if not beyond:
        return AnalysisResult()
    first, rounding, bound = min(beyond, key=lambda item: order_of(item[0]))
    evidence = fact(
        "gradients.free_alone",
        site=first.site,
        rel_l2=first.rel_l2,
        limit=bound,
        rounding=rounding,
        num_beyond=len(beyond),
        num=len(own),
    )
    finding = measured.finding_at(
        first,
        claim="error_between",
        kind="localized",
        evidence=[evidence],
        beside=[evidence],
        headline=[fact("gradients.made_in_free", site=first.site)],
        rests_on=[check("repeats", False, fact("gradients.anchored_passes"))],
        flags=[site.key for site, *_ in beyond],
    )
    return AnalysisResult(findings=[finding])


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Return what a verdict about gradients of parameters means."""
    onset = verdict.onset
    if onset is None or not is_of_parameter(onset.site):
        return []
    if onset.phase == "optimizer" and not measured.anchored:
        return []  # what enters its step is not equal
    pass_ = "anchored" if measured.anchored else "free"
    here = [site for site in measured.sites if site.pass_ == pass_]
    first = next((site for site in here if site.site == onset.site), None)
    shared = None if first is None else together(first, [(site, site.flagged) for site in here])
    if shared is None or len(shared.beyond) < 2:
        return []
    num, entering = len(shared.beyond), f"{OPTIMIZER}:in." in onset.site
    off: dict[str, Any] = {"num": num, "total": shared.total, "what": shared.rows}
    cause = fact("gradients.cause_clipping") if entering else shared.cause
    evidence = [fact("gradients.off", **off, optimizer=onset.phase == "optimizer", cause=cause)]
    factor = _factor(shared.beyond) if onset.phase == "backward" or entering else None
    if factor is not None:
        evidence.append(fact("gradients.factor", factor=factor, clipped=entering))
    addition = [fact("gradients.as_in_others", **off | {"num": num - 1})]
    if verdict.kind == "systematic":  # which says how many are off itself
        addition = []
    return [Finding(claim="explanation", role="explains", addition=addition, evidence=evidence)]


def _factor(sites: Sequence[SiteResult]) -> float | None:
    """B over A, where one factor explains the difference of all of them."""
    if any(None in (site.gain, site.one_minus_cosine) or not site.rel_l2 for site in sites):
        return None
    factor = statistics.median(1 + (site.gain or 0.0) for site in sites)
    for site in sites:  # ‖b - factor · a‖² / ‖a‖², from ‖b‖ / ‖a‖ and the cosine of both
        size, apart = 1 + (site.gain or 0.0), site.one_minus_cosine or 0.0
        rest = (size - factor) ** 2 + 2 * size * factor * apart
        if not rest <= (1 - EXPLAINED_SHARE) * (site.rel_l2 or 0.0) ** 2:
            return None
    return factor

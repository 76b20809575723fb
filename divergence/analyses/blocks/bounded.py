"""Statistics alone show one thing: that two tensors are apart by at least so much, never that they
are near.

Of a tensor whose bytes nobody kept, norm, mean and extremes are known, and ‖a - b‖ is no less than
any of their differences (comparison.measure.reduced). Rounding explains no more than a multiple of
the floors on the way to a place, added as squares (numerics.floor; as for drift, a token's limit,
since one token may hold all of it). A lower bound beyond that shows a fault, made there or before
it. Where none is, nothing is known: rounding turns a tensor far more than it makes it longer, and
so do faults. Then the smallest bound that would have been seen is said.

What a place computes with is not known: tables of angles, masks, gradients and decode steps of
unknown tokens are not judged, and where experts are chosen a tie may send a token elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from divergence.analyses.blocks.units import Escalation, is_table, next_commands
from divergence.comparison.analysis import Measured
from divergence.comparison.decide import check
from divergence.comparison.result import Finding, SiteResult, onset_at, order_of
from divergence.facts import fact
from divergence.numerics.formats import format_named
from divergence.run.contents import is_mask
from divergence.run.site import module_of

_PART = re.compile(r"(?:.+?\.)?\d+(?=\.|$)")
"""The repeated part of the model that a path lies in."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Says how far a site is apart at least, and what rounding explains there; both relative."""

    site: SiteResult
    least: float
    limit: float


def bounds(measured: Measured) -> Iterator[Bound]:
    """Yields the bound of each site that is judged, in order of execution."""
    generates = measured.reference.manifest.model.task != "encoder"
    samples = measured.reference.manifest.tokens.samples
    others = measured.candidate.manifest.tokens.samples
    floors: dict[tuple[str, int, int], dict[str, float]] = {}
    for site in sorted(measured.sites, key=order_of):
        if site.at_least is None or site.floor is None or site.phase not in ("prefill", "decode"):
            continue
        exact = format_named(site.reference_dtype).kind != "float"
        unknown = not all(
            number < len(every) and every[number].prompt_ids
            for every in (samples, others)
            for number in (site.sample,)
        )
        if is_table(site) or is_mask(site.site) or (site.step and unknown and generates):
            continue
        path = module_of(site.site)
        match = _PART.match(path)
        made = floors.setdefault((site.pass_, site.sample, site.step), {})
        part = match[0] if match else path
        made[part] = max(site.floor, made.get(part, 0.0))
        squares = [made[part]] if site.pass_ != "free" else made.values()
        limit = measured.thresholds.token * math.sqrt(sum(floor**2 for floor in squares))
        yield Bound(site, site.at_least, 0.0 if exact else limit)


def bounded(measured: Measured, escalation: Escalation) -> Finding | None:
    """Finds what the statistics alone show; None where that is another question's matter."""
    judged = list(bounds(measured))
    beyond = [] if measured.experts else [bound for bound in judged if bound.least > bound.limit]
    unmeasured = [site for site in measured.sites if site.is_unmeasured]
    if not judged and not all(site.statistics_agree for site in unmeasured):
        return None
    if beyond:
        first = beyond[0]
        if not first.limit:
            return measured.finding_at(
                first.site,
                claim="integers_differ",
                kind="localized",
                headline=[fact("blocks.other_integers", site=first.site.site)],
                rests_on=[check("anchored", False, fact("blocks.seen_in_free_run"), made=False)],
                evidence=[fact("blocks.made_at_or_before")],
            )
        worst = max(beyond, key=lambda bound: bound.least / max(bound.limit, 1e-300))
        return Finding(
            claim="drift",
            kind="drift",
            headline=[
                fact(
                    "blocks.apart_at_least",
                    site=first.site.site,
                    least=first.least,
                    limit=first.limit,
                )
            ],
            rests_on=[check("anchored", False, fact("blocks.seen_in_free_run"), made=False)],
            onset=onset_at(first.site),
            place=order_of(first.site),
            step=first.site.step,
            flags=[bound.site.key for bound in beyond],
            evidence=[
                fact("blocks.made_at_or_before"),
                fact(
                    "blocks.most_apart",
                    site=worst.site.site,
                    least=worst.least,
                    limit=worst.limit,
                    num=len(beyond),
                    total=len(judged),
                ),
            ],
            commands=next_commands(measured, None, escalation)
            or measured.advice.look_at(first.site.site),
        )
    floats = [bound for bound in judged if bound.limit]
    apart = [bound.site for bound in judged if not bound.site.statistics_agree]
    smallest = min(floats, key=lambda bound: bound.limit, default=None)
    largest = max(floats, key=lambda bound: bound.limit, default=None)
    experts = fact("blocks.bounds_of_experts") if measured.experts else None
    evidence = [fact("blocks.one_sided"), *([] if experts is None else [experts])]
    if apart:
        evidence.append(
            fact(
                "blocks.first_apart",
                site=apart[0].site,
                step=apart[0].step,
                num=len(apart),
                total=len(judged),
            )
        )
    return Finding(
        claim="not_known",
        kind="undetermined",
        headline=[
            fact(
                "blocks.statistics_show_nothing",
                num=len(judged or unmeasured),
                smallest=None if smallest is None else smallest.limit,
                at=None if smallest is None else smallest.site.site,
                largest=None if largest is None else largest.limit,
                end=None if largest is None else largest.site.site,
            )
        ],
        rests_on=[check("measured", False, fact("blocks.not_kept"))],
        evidence=evidence,
        commands=next_commands(measured, None, escalation),
    )

"""Blocks: is an error made somewhere, in equal inputs, in free runs, or below the dtype's floor?

Asked in this order: nan or inf on one side (then no error can be measured, and nothing else is
asked)? every bit equal? beyond what rounding explains in the anchored pass (the error was made
there), or without one in what each block adds to the free pass? in the escalated pass, which sees
below the floor of a 16-bit dtype? Only where nothing is: accumulated beyond what the blocks make
(drift)? within rounding?
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from divergence.analyses.blocks.sides import flag_units
from divergence.analyses.blocks.units import (
    JudgedUnits,
    Unit,
    build_units,
    escalated_units,
    is_whole,
    next_commands,
    places_of,
    stacks_of,
    visible_of,
)
from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.analysis import AnalysisResult, Measured, Shown
from divergence.comparison.decide import check
from divergence.comparison.results import Finding, SiteResult, onset_at, order_of
from divergence.facts import Fact, fact
from divergence.run.contents import is_mask
from divergence.run.site import module_of
from divergence.words import SIDES, SideOrBoth, grouped, other_side

# Nan and inf: the first place where a result is no number, and which side it is on.
#
# Two sides agree at an element where both are finite, both nan, or both the same infinity
# (numerics.sums): nan at other places, or +inf against -inf, is a difference although the
# counts are equal. Where both agree, a result is still no result: nan, +inf, or -inf in a block's
# output or input, is a verdict on both sides, however equal the bits are.
#
# Masks hold -inf by right, equal on both sides or against a number that means the same; so may
# logits (a token that must not be chosen) and what is inside a block. A nan inside a block counts
# where it comes out of it: rows of padding may be nan inside.
#
# The first place is the earliest in execution order, in whichever pass: a nan that is made between
# blocks shows in the free pass alone, and one that is made in a block shows in both at one place.


def find_nonfinite(measured: Measured) -> Finding | None:
    sites = [site for site in measured.sites if site.nonfinite is not None]
    if not sites:
        return None
    free = {(s.sample, s.step, s.site): s.order for s in measured.sites if s.pass_ == "free"}

    def place(site: SiteResult) -> tuple[int, int, int, bool]:
        order = free.get((site.sample, site.step, site.site), site.order)
        return site.sample, site.step, order, site.pass_ != "anchored"

    apart = [site for site in sites if _num_apart(site)]
    without_result = [site for site in sites if not _num_apart(site) and _is_no_result(site)]

    def part(site: SiteResult) -> tuple[str, int, int, str | None]:
        return site.pass_, site.sample, site.step, site.block

    outer = {part(site) for site in without_result if site.role in ("block", "trunk")}
    shared = [site for site in without_result if part(site) in outer]
    candidates = [site for site in (*apart, *shared) if site.pass_ != "escalated"] or apart
    if not candidates:
        return None
    first = min(candidates, key=place)
    counts = first.nonfinite
    assert counts is not None
    nans = {"reference": counts.reference_nan, "candidate": counts.candidate_nan}
    infs = {"reference": counts.reference_inf, "candidate": counts.candidate_inf}
    alone = {"reference": counts.reference_alone, "candidate": counts.candidate_alone}
    sides = [side for side in SIDES if alone[side]]
    side: SideOrBoth | None = sides[0] if len(sides) == 1 else "both" if sides else None
    if first in shared:
        side, what = "both", _numbers(nans["reference"], infs["reference"])
        headline = [fact("blocks.nonfinite_shared", what=what, site=first.site)]
    elif side is None:
        headline = [fact("blocks.nonfinite_other_kind", site=first.site)]
    elif side == "both":
        headline = [fact("blocks.nonfinite_apart", site=first.site)]
    else:
        other = other_side(side)
        headline = [
            fact(
                "blocks.nonfinite_alone",
                what=_numbers(nans[side], infs[side]),
                side=side,
                site=first.site,
                fewer=bool(nans[other] or infs[other]),
            )
        ]
    num_prompts = len(measured.reference.manifest.tokens.group_of(first.sample))
    if 0 < len(counts.prompts) < num_prompts:
        prompts = sorted(counts.prompts)
        some = fact("some", what="prompt", numbers=prompts, total=num_prompts, alone=False)
        headline.append(fact("blocks.in_prompts", prompts=some))
    onset = onset_at(first)
    if counts.sample is not None:
        onset = replace(onset, sample=counts.sample, position=counts.position)
    flagged = [site for site in apart if site.pass_ == first.pass_]
    return Finding(
        claim="nonfinite",
        kind="nonfinite",
        headline=headline,
        onset=onset,
        place=order_of(first),
        equal_inputs=first.pass_ == "anchored",
        flags=[site.key for site in (*flagged, first)],
        side=side,
        evidence=[
            fact(
                "blocks.nonfinite_counts",
                site=first.site,
                num_elements=first.numel,
                reference_nan=counts.reference_nan,
                reference_inf=counts.reference_inf,
                reference_neginf=counts.reference_neginf,
                candidate_nan=counts.candidate_nan,
                candidate_inf=counts.candidate_inf,
                candidate_neginf=counts.candidate_neginf,
                num_apart=_num_apart(first),
            )
        ],
        commands=[
            *(measured.advice.descent() if measured.anchored else []),
            *measured.advice.look_at(first.site, side),
        ],
    )


def _num_apart(site: SiteResult) -> int:
    """Elements at which the two sides do not agree."""
    counts = site.nonfinite
    if counts is None:
        return 0
    return counts.differ - (counts.mask_alike if is_mask(site.site) else 0)


def _is_no_result(site: SiteResult) -> bool:
    counts = site.nonfinite
    if counts is None:
        return False
    if counts.reference_nan and counts.candidate_nan:
        return True
    if is_mask(site.site):
        return False
    if counts.reference_inf > counts.reference_neginf:
        return True
    main = site.site == f"{module_of(site.site)}:out" or site.site == f"{module_of(site.site)}:in"
    return site.role == "block" and main and counts.reference_neginf > 0


def _numbers(num_nan: int, num_inf: int) -> list[Fact]:
    counts = ((num_nan, "nan"), (num_inf, "inf"))
    return [fact("blocks.num_nonfinite", num=num, what=what) for num, what in counts if num]


def find(measured: Measured) -> AnalysisResult:
    """Return what the blocks show, and all sites with the limits that they were held against."""
    if not measured.sites:
        return AnalysisResult(parts={"sites": []})
    if any(site.nonfinite is not None for site in measured.sites):
        bad = find_nonfinite(measured)
        if bad is not None:
            return AnalysisResult(findings=[bad], parts={"sites": list(measured.sites)})
    judged = judged_units(measured)
    escalation = judged.escalation
    sites = _with_limits(
        measured.sites, [*judged.units, *escalation.units], [*judged.flagged, *escalation.flagged]
    )
    findings = _claims(dataclasses.replace(measured, sites=sites), judged)
    # how small an error would have been seen, in float32 where both sides were
    main = [unit for unit in judged.units if unit.pass_ != "free" or not measured.anchored]
    visible = visible_of(escalation.units if escalation.complete else []) or visible_of(main)
    # what the reader must know beside the numbers
    evidence: list[Fact] = []
    if steps := judged.unanchored:  # judged less exactly
        evidence.append(fact("blocks.not_anchored", steps=steps[:6], more=len(steps) > 6))
    evidence += estimated_evidence(measured.sites)
    evidence += unmeasured_evidence(measured.sites)
    evidence += measured.alignment.notes
    evidence += _weights_evidence(measured)
    evidence += [
        fact("blocks.own_noise", what=line.details or line.detail)
        for line in measured.preflight
        if line.check == "repeatability" and line.status == "differs"
    ]
    context = Finding(claim="context", role="context", evidence=evidence)
    return AnalysisResult(findings=[*findings, context], parts={"sites": sites, "visible": visible})


def judged_units(measured: Measured) -> JudgedUnits:
    """Hold the sites of the pass that counts against their limits: the anchored pass; what no
    anchor reached, and where there is none, the free pass."""
    units = build_units(measured.sites, "anchored" if measured.anchored else "free")
    unanchored: list[int] = []
    if measured.anchored:
        covered = {(s.sample, s.step) for s in measured.sites if s.pass_ == "anchored"}
        free = (s for s in measured.sites if s.pass_ == "free")
        rest = [s for s in free if (s.sample, s.step) not in covered]
        units += build_units(rest, "free")
        unanchored = sorted({s.step for s in rest})
    for unit in units:
        used = (measured.shown or {}).get((unit.pass_, unit.site, unit.phase), 0.0)
        unit.widened = max(1.0, measured.thresholds.widen * used)
    escalation = escalated_units(measured.sites)
    flag_units(
        [*units, *escalation.units],
        measured.samples,
        routed=measured.routed,
        thresholds=measured.thresholds,
    )
    return JudgedUnits(units=units, unanchored=unanchored, escalation=escalation)


def limits_used(measured: Measured) -> Shown:
    return {
        (unit.pass_, unit.site, unit.phase): max(unit.shown, unit.limit_usage if unit.why else 0.0)
        for unit in judged_units(measured).units
    }


def _claims(measured: Measured, judged: JudgedUnits) -> list[Finding]:
    flagged, escalation = judged.flagged, judged.escalation
    compared = [site for site in measured.sites if site.pass_ != "escalated"]
    if all(site.identical for site in compared):
        # equal runs; with a truth, perhaps equally wrong ones
        shared = [unit for unit in flagged if unit.side == "both"]
        if shared or not escalation.flagged:
            return [_equal(measured, shared, len(compared))]
        flagged = []
    if flagged or escalation.flagged:
        from divergence.analyses.blocks.onset import below_floor, made_at

        if flagged:
            return [made_at(measured, judged.units, flagged, escalation)]
        return [below_floor(measured, escalation)]
    if any(site.at_least is not None or site.statistics_agree for site in compared) and not any(
        site.ratio for site in compared
    ):
        from divergence.analyses.blocks.bounded import bounded

        if (bound := bounded(measured, escalation)) is not None:
            return [bound]
    # what differs by no more than rounding at every place, and is perhaps too much together
    from divergence.analyses.blocks.rounding import (
        find_drifts,
        find_standouts,
        within_rounding,
    )
    from divergence.comparison.experts import free_routes_differ

    runs = [measured.reference, measured.candidate]
    runs += [] if measured.truth is None else [measured.truth.run]
    two_dtypes = any(line.check == "dtype" and line.status != "same" for line in measured.preflight)
    standouts = find_standouts(judged.units, measured.thresholds, two_dtypes=two_dtypes)
    drifts = find_drifts(
        measured.sites,
        measured.thresholds,
        two_dtypes=two_dtypes,
        routed=measured.experts,
        coded=measured.reference.manifest.quantizes_activations,
        rerouted=lambda *place: measured.experts and free_routes_differ(runs, *place),
    )
    at_ends = bool(drifts) or (measured.tokens is not None and measured.tokens.is_far)
    only_rounds = _only_rounds(measured) if at_ends and measured.anchored else {}
    findings = [within_rounding(measured, judged, standouts, only_rounds)]
    findings += [
        Finding(
            claim="drift",
            kind="drift",
            headline=[drift.headline],
            rests_on=[check("anchored", False, fact("blocks.seen_in_free_run"))],
            step=drift.step,
            accumulated_at=drift.places if drift.accumulated else [],
            side=drift.side,
            evidence=[drift.evidence],
            commands=next_commands(measured, None, escalation),
        )
        for drift in drifts
    ]
    if standouts:
        findings.append(
            Finding(
                claim="stands_out", role="hints", evidence=[each.fact for each in standouts[:3]]
            )
        )
    return findings


def _equal(measured: Measured, shared: Sequence[Unit], num_compared: int) -> Finding:
    """Every bit. ``shared``: units of which both sides are far from the truth."""
    missing, evidence = measured.missing, list[Fact]()
    headline = [fact("blocks.all_equal", num=num_compared)]
    if missing > num_compared:  # as those of a training step and a decoding
        headline.append(fact("blocks.most_without_partner", num=missing))
    elif missing:
        headline.append(fact("blocks.without_partner", num=missing))
    if shared:
        from divergence.analyses.blocks.onset import unit_evidence

        headline.append(fact("blocks.both_far"))
        evidence += map(unit_evidence, shared[:3])
    return Finding(
        claim="equal",
        kind="identical",
        headline=headline,
        rests_on=[check("coverage", not missing, fact("blocks.not_all_compared"))],
        side="both" if shared else "neither",
        evidence=[*evidence, *_weights_evidence(measured)],
    )


def _only_rounds(measured: Measured) -> dict[int, int]:
    """Counts, by sample, in how many first forwards every block, and what stands beside, was given
    equal inputs, and makes no error beyond rounding in the free runs, in which it is allowed to
    enlarge what comes in, and that of a single token once more; the anchored pass is known to only
    round."""
    free = build_units(measured.sites, "free")
    off: set[PromptStep] = set()
    for unit in flag_units(free, routed=measured.routed, thresholds=measured.thresholds):
        if unit.why != "token" or unit.limit_usage > measured.thresholds.free_gain:
            off |= places_of(unit)
    seen: dict[str, set[tuple[int, int, str]]] = {"free": set(), "anchored": set()}
    rounded: set[int] = set()
    stacks = stacks_of(measured.sites)
    for site in measured.sites:
        made = site.role in ("block", "trunk") and not is_whole(module_of(site.site), stacks)
        measured_there = site.pass_ == "free" or not site.is_unmeasured
        if made and measured_there and site.pass_ in seen and ":out" in site.site:
            seen[site.pass_].add((site.sample, site.step, site.site))
            if site.pass_ == "anchored" and not site.identical:
                rounded.add(site.sample)
    lacking = {(sample, step) for sample, step, _ in seen["free"] - seen["anchored"]}
    of_a, of_b = (run.manifest.tokens for run in (measured.reference, measured.candidate))
    together = of_a.groups == of_b.groups  # else each prompt has results of its own
    steps: dict[int, int] = {}
    for sample in rounded:  # of equal bits there is nothing to enlarge
        members = (of_a.group_of(sample) if together else []) or [sample]
        sound = {step for first, step, _ in seen["anchored"] if first == sample}
        sound -= {step for first, step in lacking | off if first in (sample, *members)}
        count = next(step for step in range(len(sound) + 1) if step not in sound)
        steps |= dict.fromkeys(members, count)
    return steps


def _weights_evidence(measured: Measured) -> list[Fact]:
    """Return how the weights belong together, where they are not simply equal."""
    return [
        fact("blocks.weights", relation=line.details or line.detail)
        for line in measured.preflight
        if (line.check, line.status) == ("weights", "differs") and (line.details or line.detail)
    ]


def _with_limits(
    sites: Sequence[SiteResult], units: Sequence[Unit], flagged: Sequence[Unit]
) -> list[SiteResult]:
    fields: dict[int, dict[str, Any]] = {}
    beyond = {id(unit) for unit in flagged}
    for unit in units:
        many = len(unit.looks) > 1
        looks = grouped(unit.looks if many else (), lambda look: id(look.result))
        for result in unit.results:
            used = {look.sample: look.used for look in looks.get(id(result), ())}
            values: dict[str, Any] = {
                "limit": unit.limit,
                "limit_usage": max(unit.limit_usage, float(id(unit) in beyond)),
                "usage": max(used.values(), default=0.0 if many else unit.limit_usage),
                "prompts": [
                    replace(row, usage=used.get(row.sample, row.usage)) for row in result.prompts
                ],
            }
            if id(unit) in beyond:
                # by all forwards together, perhaps, and by no single one
                values["flagged"] = _is_beyond(unit, result)
                values["usage"] = max(values["usage"], float(values["flagged"]))
            fields[id(result)] = values
    return [replace(site, **fields[id(site)]) if id(site) in fields else site for site in sites]


def _is_beyond(unit: Unit, result: SiteResult) -> bool:
    """Is this one of the results for which the unit is flagged? A healthy prompt beside a faulty
    one is not; where none is beyond by itself, all of them together are."""
    beyond = [look for look in unit.looks if look.used > 1]
    if unit.why in ("forward", "token") or beyond:
        at = None if unit.blame is None or unit.why == "typical" else unit.blame.at
        return result is at or any(look.result is result for look in beyond)
    return unit.blame is not None or (result.ratio or 0) > unit.limit


def estimated_evidence(sites: Sequence[SiteResult]) -> list[Fact]:
    estimates = [(site.step > 0, site.estimated) for site in sites if site.estimated is not None]
    if not estimates:
        return []
    facts = []
    for phase, steps in (("prefill", False), ("decode", True)):
        errors = [
            estimate.relative_error
            for is_step, estimate in estimates
            if is_step == steps and estimate.relative_error is not None
        ]
        if errors:
            middle, worst = statistics.median(errors), max(errors)
            facts.append(fact("blocks.estimate", phase=phase, typical=middle, worst=worst))
    return [fact("blocks.estimated", num_estimated=len(estimates), num=len(sites), errors=facts)]


def unmeasured_evidence(sites: Sequence[SiteResult]) -> list[Fact]:
    """Return what differs and was not measured, and the most that its statistics tell."""
    unmeasured = [site for site in sites if site.is_unmeasured]
    if not unmeasured:
        return []
    num_agree, evidence = sum(site.statistics_agree for site in unmeasured), []
    if num_agree < len(unmeasured):
        num = len(unmeasured) - num_agree
        evidence.append(fact("blocks.unmeasured", num_unmeasured=num, num=len(sites)))
    if num_agree:
        evidence.append(fact("blocks.statistics_agree", num_agree=num_agree, num=len(sites)))
    most = max(unmeasured, key=lambda site: site.at_least or 0.0)
    if most.at_least:
        evidence.append(
            fact(
                "blocks.at_least_apart",
                site=most.site,
                pass_=most.pass_,
                step=most.step,
                at_least=most.at_least,
            )
        )
    return evidence

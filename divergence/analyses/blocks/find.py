"""Blocks: is an error made somewhere, in equal inputs, in free runs, or below the dtype's floor?

Asked in this order: nan or inf on one side (then no error can be measured, and nothing else is
asked)? every bit equal? beyond what rounding explains in the anchored pass (the error was made
there), or without one in what each block adds to the free pass? in the escalated pass, which sees
below the floor of a 16-bit dtype? Only where nothing is: accumulated beyond what the blocks make
(drift)? within rounding?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from divergence.analyses.blocks.blame import TABLES
from divergence.analyses.blocks.drift import find_drift
from divergence.analyses.blocks.evidence import (
    checks_of,
    estimated_evidence,
    is_confined,
    made_before,
    next_commands,
    only_in,
    unanchored_evidence,
    unit_evidence,
    unmeasured_evidence,
)
from divergence.analyses.blocks.rounding import evidence_of, find_standouts, within_rounding
from divergence.analyses.blocks.suspects import Escalation, find_suspects, judge_escalated
from divergence.analyses.blocks.units import Family, Unit, build_units, find_family
from divergence.comparison.answer import Answer
from divergence.comparison.decide import check
from divergence.comparison.measured import Measured, Shown
from divergence.comparison.results.findings import Evidence, Finding
from divergence.comparison.results.sites import SiteResult, onset_at, order_of
from divergence.words import SideOrBoth, letter

__all__ = ["JudgedUnits", "find", "judge_units", "limits_used"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedUnits:
    """The units of the pass that counts, held against their limits."""

    units: list[Unit]
    flagged: list[Unit]
    """Beyond what rounding explains, in execution order."""
    excused: list[Unit]
    """The sides differ by more than the rounding model has it, and are equally near the truth."""
    unanchored: list[int]
    """Steps that no anchor reached."""


def find(measured: Measured) -> Answer:
    """What the blocks show, and all sites with the limits that they were held against."""
    if not measured.sites:
        return Answer(parts={"sites": []})
    if any(site.nonfinite is not None for site in measured.sites):
        from divergence.analyses.blocks.nonfinite import find_nonfinite

        bad = find_nonfinite(measured)
        if bad is not None:
            return Answer(findings=[bad], parts={"sites": list(measured.sites)})
    judged = judge_units(measured)
    escalation = judge_escalated(
        measured.sites, routed=measured.routed, thresholds=measured.thresholds
    )
    sites = _with_limits(measured.sites, [*judged.units, *escalation.units],
                         [*judged.flagged, *escalation.flagged])  # fmt: skip
    findings = _claims(replace(measured, sites=sites), judged, escalation)
    return Answer(findings=[*findings, _context(measured, judged)], parts={"sites": sites})


def judge_units(measured: Measured) -> JudgedUnits:
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
    flagged, excused = find_suspects(
        units,
        truth_samples=measured.truth_samples,
        routed=measured.routed,
        thresholds=measured.thresholds,
        shown=measured.shown,
    )
    return JudgedUnits(units=units, flagged=flagged, excused=excused, unanchored=unanchored)


def limits_used(measured: Measured) -> Shown:
    """The largest share of a limit that each site uses, by (pass, site, phase)."""
    units = judge_units(measured).units
    return {(unit.pass_, unit.site, unit.phase): unit.limit_usage for unit in units}


def _rerouted(measured: Measured, sample: int, step: int) -> bool:
    from divergence.comparison.rerouted import free_routes_differ

    runs = [measured.reference, measured.candidate]
    runs += [] if measured.truth is None else [measured.truth.run]
    return free_routes_differ(runs, sample, step)


def _claims(measured: Measured, judged: JudgedUnits, escalation: Escalation) -> list[Finding]:
    flagged = judged.flagged
    if all(site.identical for site in measured.sites if site.pass_ != "escalated"):
        if not escalation.flagged or any(unit.side == "both" for unit in flagged):
            return [_equal(measured, flagged)]
        flagged = []
    if flagged:
        return [_made(measured, judged, escalation)]
    if escalation.flagged:
        return [_below_floor(measured, escalation)]
    two_dtypes = any(line.check == "dtype" and line.status != "same" for line in measured.preflight)
    standouts = find_standouts(judged.units, judged.excused, measured.thresholds)
    drift = find_drift(
        measured.sites,
        measured.thresholds,
        two_dtypes=two_dtypes,
        routed=measured.experts or bool(measured.routed),
        coded=measured.reference.manifest.quantizes_activations,
        rerouted=lambda sample, step: measured.experts and _rerouted(measured, sample, step),
    )
    findings = [
        within_rounding(
            measured, judged.units, judged.excused, judged.unanchored, escalation, standouts
        )
    ]
    if drift is not None:
        findings.append(
            Finding(
                claim="drift",
                kind="drift",
                summary=drift.summary,
                rests_on=[check("anchored", False, "seen in the free run alone")],
                step=drift.step,
                side=drift.side,
                evidence=[drift.evidence],
                next=next_commands(measured, None, escalated=bool(escalation.judged)),
            )
        )
    if standouts:
        findings.append(Finding(claim="stands_out", role="hints", evidence=evidence_of(standouts)))
    return findings


def _context(measured: Measured, judged: JudgedUnits) -> Finding:
    """What the reader must know beside the numbers."""
    return Finding(
        claim="context",
        role="context",
        evidence=[
            *unanchored_evidence(judged.unanchored),
            *estimated_evidence(measured.sites),
            *unmeasured_evidence(measured.sites),
            *(Evidence(text=note) for note in measured.alignment.notes),
            *(
                Evidence(text=f"{line.detail}: differences include its own noise")
                for line in measured.preflight
                if line.check == "repeatability" and line.status == "differs"
            ),
        ],
    )


def _with_limits(
    sites: Sequence[SiteResult], units: Sequence[Unit], flagged: Sequence[Unit]
) -> list[SiteResult]:
    """The sites with what they were held against, and whether they are beyond it."""
    fields: dict[int, dict[str, Any]] = {}
    for unit in units:
        many = len(unit.looks) > 1
        for result in unit.results:
            fields[id(result)] = {
                "limit": unit.limit, "limit_usage": unit.limit_usage,
                "usage": 0.0 if many else unit.limit_usage,
            }  # fmt: skip
        for look in unit.looks if many else ():
            mine = fields[id(look.result)]
            mine["usage"] = max(mine["usage"], look.usage)
            mine["prompts"] = [
                msgspec.structs.replace(one, usage=look.usage) if one.sample == look.sample else one
                for one in mine.get("prompts", look.result.prompts)
            ]
    for unit in flagged:
        for result in unit.results:
            mine, beyond = fields[id(result)], _is_beyond(unit, result)
            mine["flagged"] = beyond
            if beyond and _one_token(unit):  # of no look: its prompt uses as much all the same
                mine["usage"] = unit.limit_usage
                mine["prompts"] = [
                    msgspec.structs.replace(one, usage=unit.limit_usage)
                    if one.sample == result.worst_sample else one
                    for one in mine.get("prompts", result.prompts)
                ]  # fmt: skip
    return [
        msgspec.structs.replace(site, **fields[id(site)]) if id(site) in fields else site
        for site in sites
    ]


def _is_beyond(unit: Unit, result: SiteResult) -> bool:
    """Is this one of the results for which the unit is flagged?"""
    if unit.why == "forward":
        return any(look.result is result for look in unit.beyond)
    if unit.blame is not None:
        return unit.blame.why not in ("token", "sink") or result is unit.blame.at
    worst = max(result.ratio_max or 0, result.ratio_sink or 0)
    return (result.ratio or 0) > unit.limit or (
        unit.why in ("token", "sink") and worst > unit.worst_limit
    )


def _one_token(unit: Unit) -> bool:
    return (unit.why if unit.blame is None else unit.blame.why) in ("token", "sink")


def _equal(measured: Measured, flagged: list[Unit]) -> Finding:
    """Equal runs; with a truth, perhaps equally wrong ones."""
    missing = measured.missing
    shared = [unit for unit in flagged if unit.side == "both"]
    count = sum(site.pass_ != "escalated" for site in measured.sites)
    summary = f"all {count} compared tensors are equal bit for bit"
    if missing > count:  # as of a training step and of a decoding
        summary += f"; most had no partner: {missing} tensors or tokens"
    elif missing:
        summary += f" ({missing} tensors or tokens had no partner)"
    return Finding(
        claim="equal",
        kind="identical",
        summary=summary + ("; both are far from the truth" if shared else ""),
        rests_on=[check("coverage", not missing, "not everything was compared")],
        side="both" if shared else "neither",
        evidence=[unit_evidence(unit) for unit in shared[:3]],
    )


_CAUSES = {"optimizer": "the optimizer's step or its settings, not one layer"}


def _made(measured: Measured, judged: JudgedUnits, escalation: Escalation) -> Finding:
    """An error beyond the limit, at one site or at most of a kind."""
    units, flagged = judged.units, judged.flagged
    family = find_family(units, flagged)
    first = family.members[0] if family else min(flagged, key=lambda u: order_of(u.first))
    table = None if family is None else _table_behind(measured, family, flagged)
    if table is not None:
        first, family = table, None
    evidence = [unit_evidence(first)]
    if table is not None:
        evidence.append(
            Evidence(text="the blocks read this table, and an engine did not let it be replaced")
        )
    if not measured.anchored:
        evidence.append(
            Evidence(
                text="judged from free runs alone: what each block adds to the "
                "error that came in, against a rounding model"
            )
        )
    evidence += _where(first, units)
    evidence += escalation.beside(first)
    side = _side(flagged)
    by = f", by {letter(side)}" if side in ("reference", "candidate") else ""
    made = "is made at" if measured.anchored and first.pass_ != "free" else "seems to be made at"
    before = f" or before it in {first.first.block}" if made_before(measured, first) else ""
    summary = f"the error {made} {first.first.site}{before}{by}{_only(first, by)}"
    if family is not None:
        side = _side(family.members)
        evidence = [_family_evidence(family), *evidence]
        what = _CAUSES.get(first.phase, "a kernel or a precision setting, not one layer")
        what = "what is special there?" if only_in(first) and is_confined(first) else what
        summary = (
            f"every {family.name} differs by more than rounding, from {first.first.site} "
            f"on{_only(first, '')}: {what}"
        )
    else:
        evidence += _others(flagged, first)
    return Finding(
        claim="error_made_here" if family is None else "error_everywhere_of_kind",
        kind="localized" if family is None else "systematic",
        summary=summary,
        onset=onset_at(first.first),
        place=min(order_of(unit.first) for unit in flagged),
        equal_inputs=any(unit.pass_ != "free" for unit in flagged),
        side=side,
        rests_on=checks_of(first),
        evidence=evidence,
        next=next_commands(measured, first, escalated=bool(escalation.judged)),
    )


def _table_behind(measured: Measured, family: Family, flagged: list[Unit]) -> Unit | None:
    """The rotary table that makes a whole kind differ: it is off itself, and an input of a block
    on one side, which the other does not show, so that no anchored pass could replace it."""
    block, side = family.members[0].results[0].block, family.members[0].side
    unseen = [one for one in measured.alignment.unmatched if one.site.startswith(f"{block}:in.")]
    for unit in sorted(flagged, key=lambda unit: order_of(unit.first)):
        if TABLES not in (unit.results[0].kind or "").lower() or unit.side != side:
            continue
        for one in unseen:
            run = measured.reference if one.side == "reference" else measured.candidate
            sites = (unit.site, one.site)
            records = [run.find(("free", one.sample, one.step, site)) for site in sites]
            digests = {record and (record.xxh3 or record.fold) for record in records}
            if len(digests) == 1 and None not in digests:
                return unit
    return None


def _only(unit: Unit, by: str) -> str:
    where = only_in(unit)
    return f",{where}" if where and (by or not is_confined(unit)) else where


def _side(flagged: list[Unit]) -> SideOrBoth | None:
    """The side all flagged units agree on; both where they do not."""
    sides = {unit.side for unit in flagged if unit.side is not None}
    if not sides:
        return None
    return sides.pop() if len(sides) == 1 else "both"


def _family_evidence(family: Family) -> Evidence:
    low = min(unit.limit_usage for unit in family.members)
    return Evidence(
        text=f"{len(family.members)} of {family.num_all} {family.name} are beyond their limit, "
        f"the least by {low:.1f} ×",
        values={"num_flagged": len(family.members), "least": low},
    )


def _others(flagged: list[Unit], first: Unit) -> list[Evidence]:
    mine = first.results[0].block or first.site
    others = sorted({unit.results[0].block or unit.site for unit in flagged} - {mine})
    if not others:
        return []
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return [Evidence(text=f"also beyond the limit: {', '.join(others[:4])}{more}")]


def _where(first: Unit, units: list[Unit]) -> list[Evidence]:
    """What feeds the onset passes; and whether it shows in decode steps alone."""
    texts: list[str] = []
    healthy = [unit for unit in units if unit.why is None]
    if first.results[0].role == "inner" and first.pass_ != "free":
        place, block = first.results[0].order, first.results[0].block
        inside = (u for u in healthy if u.phase == first.phase and u.results[0].block == block)
        before = [unit for unit in inside if unit.results[0].order < place]
        if before:
            last = max(before, key=lambda unit: unit.results[0].order)
            texts.append(f"the last site before it in this block that passes: {last.site}")
    if first.phase == "decode":
        same = [u for u in units if u.site == first.site and u.phase == "prefill"]
        if same and all(unit.why is None for unit in same):
            texts.append(
                "the prefill passes there: look at what is kept between steps (KV cache, "
                "positions, recurrent state) and at kernels for one token"
            )
    return [Evidence(text=text) for text in texts]


def _below_floor(measured: Measured, escalation: Escalation) -> Finding:
    """Nothing beyond the floor of the runs' dtype, but something in float32."""
    flagged = escalation.flagged
    family = find_family(escalation.units, flagged)
    first = family.members[0] if family else min(flagged, key=lambda u: order_of(u.first))
    side = escalation.side
    by = f", by {letter(side)}" if side in ("reference", "candidate") else ""
    below = "below the floor of the runs' own dtype, but far above float32's"
    return Finding(
        claim="error_below_floor",
        kind="systematic" if family else "localized",
        summary=f"every {family.name} is off, {below}: a wrong formula or wrong data, not one layer"
        if family
        else f"the error is made at {first.first.site}{by}{_only(first, by)}: {below}",
        onset=onset_at(first.first),
        place=order_of(first.first),
        equal_inputs=True,
        rests_on=checks_of(first),
        side=side,
        evidence=[
            unit_evidence(first),
            Evidence(
                text="escalated pass: the same inputs in float32; what coarse kernels of the runs' "
                "dtype do vanishes there, so this is a wrong formula or wrong data"
            ),
            *_others(flagged, first),
        ],
        next=next_commands(measured, first, escalated=bool(escalation.judged)),
    )

"""The verdict: from measured sites to one sentence, or to "undetermined".

Order of questions: nothing compared? other experiment (preflight)? nan or inf on one
side? every bit equal? beyond what rounding explains in the anchored pass (the error was
made there)? without one, in what each block adds to the free pass (low confidence)? in
the escalated pass, which sees below the floor of a 16-bit dtype? accumulated beyond what
the blocks make (drift)? Only then: rounding.
"""

from __future__ import annotations

import msgspec

from divergence.comparison.blocks.drift import find_drift
from divergence.comparison.blocks.escalation import Escalation, judge_escalated
from divergence.comparison.blocks.families import Family, find_family
from divergence.comparison.blocks.nonfinite import find_nonfinite
from divergence.comparison.blocks.standouts import evidence_of, find_standouts
from divergence.comparison.blocks.suspects import find_suspects
from divergence.comparison.blocks.units import Unit, build_units, order_of
from divergence.comparison.decide.case import Case
from divergence.comparison.decide.confidence import checks_of, confidence_of
from divergence.comparison.decide.ends import judge_ends, with_ends
from divergence.comparison.decide.evidence import (
    only_in,
    onset_of,
    unit_evidence,
)
from divergence.comparison.decide.rounding import within_floor
from divergence.comparison.preflight.settings import with_settings
from divergence.comparison.result import Evidence, Verdict
from divergence.numerics.rounding.floor import THRESHOLDS, Thresholds

__all__ = ["Case", "judge", "judge_units"]


def judge(case: Case, *, thresholds: Thresholds = THRESHOLDS) -> Verdict:
    """Judge, and set ``flagged`` on the sites that the verdict rests on.

    Where a blocking difference was overridden, it explains whatever is found: confidence is low.
    """
    verdict = with_settings(with_ends(_judge(case, thresholds), case), case.preflight)
    forced = [line.check for line in case.preflight if line.status == "blocking"]
    if not forced:
        return verdict
    return msgspec.structs.replace(
        verdict,
        summary=f"{verdict.summary} (compared by force: other {' and '.join(forced)})",
        confidence="low",
        side=None,
        evidence=[
            Evidence(text=f"other {' and '.join(forced)}, which may explain everything below"),
            *verdict.evidence,
        ],
    )


def judge_units(
    case: Case, thresholds: Thresholds = THRESHOLDS
) -> tuple[list[Unit], list[Unit], list[Unit], list[int]]:
    """(all units, flagged, excused, steps that no anchor reached) of the pass that counts."""
    units = build_units(case.sites, "anchored" if case.anchored else "free")
    unanchored: list[int] = []
    if case.anchored:  # forwards that no anchor reached are judged as in free runs
        covered = {(s.sample, s.step) for s in case.sites if s.pass_ == "anchored"}
        rest = [s for s in case.sites if s.pass_ == "free" and (s.sample, s.step) not in covered]
        units += build_units(rest, "free")
        unanchored = sorted({s.step for s in rest})
    flagged, excused = find_suspects(
        units,
        tallies=case.tallies,
        routed=case.routed,
        thresholds=thresholds,
        shown=case.shown,
    )
    return units, flagged, excused, unanchored


def _judge(case: Case, thresholds: Thresholds) -> Verdict:
    bad = find_nonfinite(case)
    if bad is not None:
        return bad
    units, flagged, excused, unanchored = judge_units(case, thresholds)
    _mark(units, flagged)
    escalation = judge_escalated(case.sites, routed=case.routed, thresholds=thresholds)
    _mark(escalation.units, escalation.flagged)
    ends = judge_ends(case, flagged, escalation.flagged)
    if ends is not None:
        return ends
    if all(site.identical for site in case.sites if site.pass_ != "escalated"):
        if not escalation.flagged or any(unit.side == "both" for unit in flagged):
            return _identical(case, flagged)
        flagged = []
    if flagged:
        return _beyond_floor(case, units, flagged, escalation)
    if escalation.flagged:
        return _hidden(case, escalation)
    two_dtypes = any(line.check == "dtype" and line.status != "same" for line in case.preflight)
    standouts = find_standouts(units, excused, thresholds)
    drift = find_drift(
        case.sites,
        thresholds,
        case.tokens,
        two_dtypes=two_dtypes,
        routed=case.experts or bool(case.routed),
    )
    if drift is not None:
        return Verdict(
            kind="drift",
            summary=drift.summary,
            confidence="low",
            side=drift.side,
            evidence=[drift.evidence, *evidence_of(standouts), *case.context()],
            next=case.next_commands(None, escalated=bool(escalation.judged)),
        )
    return within_floor(case, units, excused, unanchored, escalation, standouts)


def _mark(units: list[Unit], flagged: list[Unit]) -> None:
    for unit in units:
        for result in unit.results:
            result.limit, result.strain = unit.limit, unit.strain
            result.usage = 0.0 if len(unit.looks) > 1 else unit.strain
        for look in unit.looks if len(unit.looks) > 1 else ():
            look.result.usage = max(look.result.usage or 0.0, look.usage)
            look.result.prompts = [
                msgspec.structs.replace(one, usage=look.usage) if one.sample == look.sample else one
                for one in look.result.prompts
            ]
    for unit in flagged:
        for result in unit.results:
            if unit.blame is not None:
                narrow = unit.blame.why in ("token", "sink")
                result.flagged = not narrow or result is unit.blame.at
                if unit.why == "forward":
                    result.flagged = any(look.result is result for look in unit.beyond)
            elif unit.why == "forward":
                result.flagged = any(look.result is result for look in unit.beyond)
            else:
                worst = max(result.ratio_max or 0, result.ratio_sink or 0)
                result.flagged = (result.ratio or 0) > unit.limit or (
                    unit.why in ("token", "sink") and worst > unit.worst_limit
                )


def _identical(case: Case, flagged: list[Unit]) -> Verdict:
    """Equal runs; with a truth, perhaps equally wrong ones."""
    partly = "" if not case.missing else f" ({case.missing} tensors or tokens had no partner)"
    shared = [unit for unit in flagged if unit.side == "both"]
    count = sum(site.pass_ != "escalated" for site in case.sites)
    return Verdict(
        kind="identical",
        summary=f"all {count} compared tensors are equal bit for bit{partly}"
        + ("; both are far from the truth" if shared else ""),
        confidence="high" if not case.missing else "medium",
        side="both" if shared else "neither",
        evidence=[unit_evidence(unit) for unit in shared[:3]],
    )


def _beyond_floor(
    case: Case, units: list[Unit], flagged: list[Unit], escalation: Escalation
) -> Verdict:
    family = find_family(units, flagged)
    first = family.members[0] if family else min(flagged, key=lambda u: order_of(u.first))
    evidence = [unit_evidence(first)]
    if not case.anchored:
        evidence.append(
            Evidence(
                text="judged from free runs alone: what each block adds to the "
                "error that came in, against a rounding model"
            )
        )
    evidence += _where(first, units)
    evidence += escalation.beside(first)
    if family is not None:
        return Verdict(
            kind="systematic",
            summary=f"every {family.name} differs by more than rounding, from {first.first.site} "
            f"on{only_in(first)}: "
            + (
                "what is special there?"
                if only_in(first)
                else "a kernel or a precision setting, not one layer"
            ),
            onset=onset_of(first.first),
            confidence=confidence_of(checks_of(first)),
            checks=checks_of(first),
            side=_side(family.members),
            evidence=[_family_evidence(family), *evidence, *case.context()],
            next=case.next_commands(first, escalated=bool(escalation.judged)),
        )
    evidence += _others(flagged, first)
    made = "is made at" if case.anchored and first.pass_ != "free" else "seems to be made at"
    side = _side(flagged)
    by = f", by the {side}" if side in ("reference", "candidate") else ""
    return Verdict(
        kind="localized",
        summary=f"the error {made} {first.first.site}{by}{_only(first, by)}",
        onset=onset_of(first.first),
        confidence=confidence_of(checks_of(first)),
        checks=checks_of(first),
        side=side,
        evidence=evidence + case.context(),
        next=case.next_commands(first, escalated=bool(escalation.judged)),
    )


def _only(unit: Unit, by: str) -> str:
    where = only_in(unit)
    return f",{where}" if by and where else where


def _side(flagged: list[Unit]) -> str | None:
    """The side all flagged units agree on; both where they do not."""
    sides = {unit.side for unit in flagged if unit.side is not None}
    if not sides:
        return None
    return sides.pop() if len(sides) == 1 else "both"


def _family_evidence(family: Family) -> Evidence:
    low = min(unit.strain for unit in family.members)
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
    found: list[Evidence] = []
    inner = first.results[0].role == "inner"
    if inner and first.pass_ != "free":
        place = order_of(first.first)
        before = [
            unit
            for unit in units
            if unit.why is None
            and unit.phase == first.phase
            and unit.results[0].block == first.results[0].block
            and order_of(unit.results[0]) < place
        ]
        if before:
            last = max(before, key=lambda unit: order_of(unit.results[0]))
            found.append(
                Evidence(text=f"the last site before it in this block that passes: {last.site}")
            )
    if first.phase == "decode":
        same = [u for u in units if u.site == first.site and u.phase == "prefill"]
        if same and all(unit.why is None for unit in same):
            found.append(
                Evidence(
                    text="the prefill passes there: look at what is kept between steps (KV cache, "
                    "positions, recurrent state) and at kernels for one token"
                )
            )
    return found


def _hidden(case: Case, escalation: Escalation) -> Verdict:
    """Nothing beyond the floor of the runs' dtype, but something in float32."""
    flagged = escalation.flagged
    family = find_family(escalation.units, flagged)
    first = family.members[0] if family else min(flagged, key=lambda u: order_of(u.first))
    side = escalation.side
    by = f", by the {side}" if side in ("reference", "candidate") else ""
    below = "below the floor of the runs' own dtype, but far above float32's"
    return Verdict(
        kind="systematic" if family else "localized",
        summary=f"every {family.name} is off, {below}: a wrong formula or wrong data, not one layer"
        if family
        else f"the error is made at {first.first.site}{by}{_only(first, by)}: {below}",
        onset=onset_of(first.first),
        confidence=confidence_of(checks_of(first)),
        checks=checks_of(first),
        side=side,
        evidence=[
            unit_evidence(first),
            Evidence(
                text="escalated pass: the same inputs in float32; what coarse kernels of the runs' "
                "dtype do vanishes there, so this is a wrong formula or wrong data"
            ),
            *_others(flagged, first),
            *case.context(),
        ],
        next=case.next_commands(first, escalated=bool(escalation.judged)),
    )

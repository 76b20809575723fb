"""Within the floor: nothing stands out, and how near the nearest came."""

from __future__ import annotations

from divergence.comparison.blocks.escalation import Escalation
from divergence.comparison.blocks.standouts import StandOut, evidence_of
from divergence.comparison.blocks.units import Unit, order_of
from divergence.comparison.decide.case import Case
from divergence.comparison.decide.confidence import check, confidence_of
from divergence.comparison.decide.evidence import unanchored_evidence
from divergence.comparison.measure.unmeasured import is_unmeasured
from divergence.comparison.result import Evidence, Verdict

__all__ = ["within_floor"]


def within_floor(
    case: Case,
    units: list[Unit],
    excused: list[Unit],
    unanchored: list[int],
    escalation: Escalation,
    standouts: list[StandOut],
) -> Verdict:
    judged = [unit for unit in units if unit.results]
    unmeasured = [site for site in case.sites if is_unmeasured(site)]
    if unmeasured and not any(site.ratio for site in case.sites):
        first = min(unmeasured, key=order_of)
        return Verdict(
            kind="undetermined",
            summary=f"the two differ, first at {first.site} (step {first.step}), but by how much "
            "is not known: only digests or statistics of it were kept",
            confidence="low",
            evidence=case.context(),
            next=case.next_commands(None, escalated=bool(escalation.judged)),
        )
    if not judged:
        return Verdict(
            kind="undetermined",
            summary="the runs differ, but nothing that rounds was compared",
            confidence="low",
            evidence=case.context(),
            next=case.next_commands(None, escalated=bool(escalation.judged)),
        )
    sure = case.anchored and not unanchored
    against_truth = [unit for unit in judged if unit.standing is not None]
    evidence = [_largest(judged)]
    if against_truth:
        closest = max(against_truth, key=lambda unit: unit.strain)
        evidence.append(
            Evidence(
                text=f"against the truth: {len(against_truth)} sites judged, none beyond a "
                f"limit; the nearest to one is {closest.site} ({closest.phase}), at "
                f"{100 * closest.strain:.0f}% of it",
                values={"strain": closest.strain, "num_judged": len(against_truth)},
            )
        )
    for unit in excused[:3]:
        evidence.append(
            Evidence(
                text=f"{unit.site} ({unit.phase}): the sides differ by {unit.typical:.1f} × the "
                "rounding model, but are equally near the truth: a legitimate difference"
            )
        )
    evidence += escalation.healthy()
    deeper = case.narrow and bool(case.advice.escalate())
    if deeper and sure and not escalation.judged:
        evidence.append(
            Evidence(
                text="what is smaller than this dtype's floor stays invisible without an "
                "escalated pass: see next"
            )
        )
    elif case.narrow and case.advice.divided and sure and not escalation.judged:
        evidence.append(
            Evidence(
                text="what is smaller than this dtype's floor stays invisible without an "
                "escalated pass, which takes a candidate that one process runs"
            )
        )
    evidence += evidence_of(standouts)
    # of what is estimated the truth judges nothing, and so says nothing of either side
    estimated = any(result.estimated for unit in judged for result in unit.results)
    told = sure and bool(against_truth) and not case.partial and not estimated
    checks = [
        check("anchored", sure, "not every forward has an anchored pass"),
        check(
            "measured", not unmeasured, "of some tensors only digests or statistics were kept"
        ),
        check("truth", told, _no_truth(case, bool(against_truth), estimated),
              made=bool(against_truth)),
        check("no_standout", not standouts, _what_stands_out(standouts)),
        check("floor_trusted", not case.widened_beyond, "a --floor run is beyond the limits "
              "itself"),
    ]  # fmt: skip
    if case.narrow:
        checks.append(
            check("escalated", escalation.complete, "no escalated pass shows what a 16-bit dtype "
                  "hides", made=False)
        )  # fmt: skip
    return Verdict(
        kind="within_floor",
        summary="the runs differ by no more than rounding explains: "
        + (
            "no block makes an error beyond the floor"
            if sure
            else "no block adds more than rounding explains (judged from free runs)"
        ),
        confidence=confidence_of(checks),
        checks=checks,
        side="neither" if told and not any(one.side for one in standouts) else None,
        evidence=[*evidence, *unanchored_evidence(unanchored), *case.context()],
        next=_next(case, standouts, escalation),
    )


def _next(case: Case, standouts: list[StandOut], escalation: Escalation) -> list[str]:
    """What looks inside the first stand-out; what raises the confidence."""
    commands = []
    block = standouts[0].unit.results[0].block if standouts else None
    if block is not None:
        commands += case.advice.inside(block)
    commands += case.next_commands(None, escalated=bool(escalation.judged))
    if case.anchored and case.tallies is None and not commands:
        commands += case.advice.truth()
    return commands


def _what_stands_out(standouts: list[StandOut]) -> str:
    sides = [one.side for one in standouts if one.side is not None]
    if sides:
        return f"the {sides[0]} is farther from the truth in all blocks"
    return "a block differs more than its siblings"


def _no_truth(case: Case, judged: bool, estimated: bool) -> str:
    if estimated:
        return "the truth judges only what was kept in full"
    if judged and case.partial:
        return "the truth is incomplete"
    return "no float64 truth judged the blocks"


def _largest(judged: list[Unit]) -> Evidence:
    worst = max(judged, key=lambda unit: (unit.typical, unit.worst))
    token = max(judged, key=lambda unit: unit.worst)
    largest = (
        f"largest error of a typical token: {worst.typical:.2f} × the floor, at {worst.site} "
        f"({worst.phase}; limit {worst.limit:.2g})"
        if worst.typical
        else "the typical token is equal bit for bit at every site"
    )
    return Evidence(
        text=f"{largest}; of any token: {token.worst:.2f} ×, at {token.site} "
        f"(limit {token.worst_limit:.2g})",
        values={"ratio": worst.typical, "limit": worst.limit},
    )

"""Within the floor: nothing stands out, and how near the nearest came."""

from __future__ import annotations

from divergence.analyses.blocks.escalated import Escalation
from divergence.analyses.blocks.next import next_commands
from divergence.analyses.blocks.standouts import StandOut
from divergence.analyses.blocks.units import Unit
from divergence.comparison.decide import check
from divergence.comparison.measure.unmeasured import is_unmeasured
from divergence.comparison.measured import Measured
from divergence.comparison.results.findings import Evidence, Finding
from divergence.comparison.results.sites import order_of

__all__ = ["within_rounding"]


def within_rounding(
    measured: Measured,
    units: list[Unit],
    excused: list[Unit],
    unanchored: list[int],
    escalation: Escalation,
    standouts: list[StandOut],
) -> Finding:
    judged = [unit for unit in units if unit.results]
    unmeasured = [site for site in measured.sites if is_unmeasured(site)]
    if unmeasured and not any(site.ratio for site in measured.sites):
        first = min(unmeasured, key=order_of)
        return Finding(
            claim="not_known",
            kind="undetermined",
            summary=f"the two differ, first at {first.site} (step {first.step}), but by how much "
            "is not known: only digests or statistics of it were kept",
            rests_on=[check("measured", False, "")],
            next=next_commands(measured, None, escalated=bool(escalation.judged)),
        )
    if not judged:
        return Finding(
            claim="not_known",
            kind="undetermined",
            summary="the runs differ, but nothing that rounds was compared",
            rests_on=[check("measured", False, "")],
            next=next_commands(measured, None, escalated=bool(escalation.judged)),
        )
    sure = measured.anchored and not unanchored
    against_truth = [unit for unit in judged if unit.stats is not None]
    evidence = [_largest(judged)]
    if against_truth:
        closest = max(against_truth, key=lambda unit: unit.limit_usage)
        evidence.append(
            Evidence(
                text=f"against the truth: {len(against_truth)} sites judged, none beyond a "
                f"limit; the nearest to one is {closest.site} ({closest.phase}), at "
                f"{100 * closest.limit_usage:.0f}% of it",
                values={"limit_usage": closest.limit_usage, "num_judged": len(against_truth)},
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
    deeper = measured.narrow and bool(measured.advice.escalate())
    if deeper and sure and not escalation.judged:
        evidence.append(
            Evidence(
                text="what is smaller than this dtype's floor stays invisible without an "
                "escalated pass: see next"
            )
        )
    elif measured.narrow and measured.advice.divided and sure and not escalation.judged:
        evidence.append(
            Evidence(
                text="what is smaller than this dtype's floor stays invisible without an "
                "escalated pass, which takes a candidate that one process runs"
            )
        )
    # of what is estimated the truth judges nothing, and so says nothing of either side
    estimated = any(result.estimated for unit in judged for result in unit.results)
    told = sure and bool(against_truth) and not measured.partial and not estimated
    checks = [
        check("anchored", sure, "not every forward has an anchored pass"),
        check(
            "measured", not unmeasured, "of some tensors only digests or statistics were kept"
        ),
        check("truth", told, _no_truth(measured, bool(against_truth), estimated),
              made=bool(against_truth)),
        check("no_standout", not standouts, _what_stands_out(standouts)),
        check("floor_trusted", not measured.widened_beyond, "a --floor run is beyond the limits "
              "itself"),
    ]  # fmt: skip
    if measured.narrow:
        checks.append(
            check("escalated", escalation.complete, "no escalated pass shows what a 16-bit dtype "
                  "hides", made=False)
        )  # fmt: skip
    return Finding(
        claim="within_rounding",
        kind="within_floor",
        summary="the runs differ by no more than rounding explains: "
        + (
            "no block makes an error beyond the floor"
            if sure
            else "no block adds more than rounding explains (judged from free runs)"
        ),
        rests_on=checks,
        side="neither" if told and not any(one.side for one in standouts) else None,
        evidence=evidence,
        next=_next(measured, standouts, escalation),
    )


def _next(measured: Measured, standouts: list[StandOut], escalation: Escalation) -> list[str]:
    """What looks inside the first stand-out; what raises the confidence."""
    commands = []
    block = standouts[0].unit.results[0].block if standouts else None
    if block is not None:
        commands += measured.advice.inside(block)
    commands += next_commands(measured, None, escalated=bool(escalation.judged))
    if measured.anchored and measured.truth_samples is None and not commands:
        commands += measured.advice.truth()
    return commands


def _what_stands_out(standouts: list[StandOut]) -> str:
    sides = [one.side for one in standouts if one.side is not None]
    if sides:
        return f"the {sides[0]} is farther from the truth in all blocks"
    return "a block differs more than its siblings"


def _no_truth(measured: Measured, judged: bool, estimated: bool) -> str:
    if estimated:
        return "the truth judges only what was kept in full"
    if judged and measured.partial:
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

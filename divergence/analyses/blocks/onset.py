"""Onset: the claim that an error is made somewhere, with what it rests on.

The first flagged unit in execution order is the onset, and its evidence says by how much it is
beyond which limit. Where most of its kind are, the claim is about a family (blocks.suspects).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from divergence.analyses.blocks.suspects import (
    Escalation,
    Family,
    find_family,
    made_before,
    next_commands,
)
from divergence.analyses.blocks.units import TABLES, Blame, Unit
from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.decide import check
from divergence.comparison.parameters import together
from divergence.comparison.results.findings import Check, Evidence, Finding, figure, some_of
from divergence.comparison.results.sites import onset_at, order_of
from divergence.words import SideOrBoth, letter

__all__ = ["below_floor", "checks_of", "is_everywhere", "made_at", "only_in", "unit_evidence"]

_CONFINED = 2.0
"""An error is in some forwards alone where the least of them uses so many times as much of its
limit as any other forward: the factor from which on a verdict is clear."""


def made_at(
    measured: Measured, units: list[Unit], flagged: list[Unit], escalation: Escalation
) -> Finding:
    """An error beyond the limit, at one site or at most of a kind."""
    family = find_family(units, flagged)
    alike = _alike(family.members[0], flagged) if family else flagged
    first = min(alike, key=lambda u: order_of(u.first))
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
    evidence += _where(first, [*units, *escalation.flagged])
    evidence += escalation.beside(first)
    side = _side(flagged)
    by = f", by {letter(side)}" if side in ("reference", "candidate") else ""
    made = "is made at" if measured.anchored and first.pass_ != "free" else "seems to be made at"
    before = f" or before it in {first.first.block}" if made_before(measured, first) else ""
    summary = f"the error {made} {first.first.site}{before}{by}"
    everywhere = is_everywhere(first, escalation)
    summary += "" if everywhere else _only([first], by)
    if family is not None:
        side = _side(family.members)
        evidence = [_family_evidence(family), *evidence]
        who, what = _who_and_why(family, len(alike), units, flagged)
        if not everywhere and only_in(*alike) and _is_confined(alike):
            what = "what is special there?"
        where = "" if everywhere else _only(alike, "")
        where = f",{where}" if where.startswith(" from") else where
        summary = f"{who} by more than rounding, from {first.first.site} on{where}: {what}"
    else:
        evidence += _others(flagged, first)
    return Finding(
        claim="error_made_here" if family is None else "error_everywhere_of_kind",
        kind="localized" if family is None else "systematic",
        summary=summary,
        onset=onset_at(first.first),
        place=order_of(first.first),
        equal_inputs=any(unit.pass_ != "free" for unit in flagged),
        side=side,
        rests_on=checks_of(first),
        evidence=evidence,
        next=next_commands(measured, first, escalation),
    )


def _alike(member: Unit, flagged: list[Unit]) -> list[Unit]:
    """The flagged ones of a family's kind and side, also those that are off in other forwards."""
    return [u for u in flagged if u.kind == member.kind and u.side in (None, member.side)]


def _who_and_why(
    family: Family, count: int, units: list[Unit], flagged: list[Unit]
) -> tuple[str, str]:
    """``every LlamaMLP differs``, or ``count`` of them do, and where to look. Of parameters how
    many are off, where it is more than this family."""
    all_ = count >= family.num_all
    who = (
        f"every {family.name} differs"
        if all_
        else f"{count} of {family.num_all} {family.name} differ"
    )
    beyond = {id(unit) for unit in flagged}
    judged = [(unit.results[0], id(unit) in beyond) for unit in units]
    shared = together(family.members[0].results[0], judged)
    if shared is None:
        cause = "a kernel, a formula or a precision setting"
        if _passes_prefill(family.members[0], units):
            cause = "what is kept between steps, or a kernel for one token"
        return who, f"{cause}, not one layer"
    if len(shared.beyond) <= len(family.members):
        return who, shared.cause
    return f"{len(shared.beyond)} of {shared.total} {shared.what} differ", shared.cause


def below_floor(measured: Measured, escalation: Escalation) -> Finding:
    """Nothing beyond the floor of the runs' dtype, but something in float32."""
    flagged = escalation.flagged
    family = find_family(escalation.units, flagged)
    first = family.members[0] if family else min(flagged, key=lambda u: order_of(u.first))
    side = escalation.side
    by = f", by {letter(side)}" if side in ("reference", "candidate") else ""
    below = "within the limits of the runs' own dtype, but far above float32's"
    return Finding(
        claim="error_below_floor",
        kind="systematic" if family else "localized",
        summary=f"every {family.name} is off, {below}: a wrong formula or wrong data, not one layer"
        if family
        else f"the error is made at {first.first.site}{by}{_only([first], by)}: {below}",
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
        next=next_commands(measured, first, escalation),
    )


def _table_behind(measured: Measured, family: Family, flagged: list[Unit]) -> Unit | None:
    """The rotary table that makes a whole kind differ: it is off itself, and an input of a block
    that no anchored pass replaced, as the other side does not show it or has it in another shape.
    """
    block, side = family.members[0].results[0].block, family.members[0].side
    read = f"{block}:in."
    unseen = [(lone.side, lone.sample, lone.step, lone.site)
              for lone in measured.alignment.unmatched if lone.site.startswith(read)]  # fmt: skip
    unseen += [("candidate", result.sample, result.step, result.candidate_site or result.site)
               for result in measured.sites
               if result.site.startswith(read) and result.pass_ == "anchored"
               and not result.identical]  # fmt: skip
    for unit in sorted(flagged, key=lambda unit: order_of(unit.first)):
        if TABLES not in (unit.results[0].kind or "").lower() or unit.side != side:
            continue
        for holder, sample, step, input_ in unseen:
            run = measured.reference if holder == "reference" else measured.candidate
            sites = (unit.site, input_)
            records = [run.find(("free", sample, step, site)) for site in sites]
            digests = {record and (record.xxh3 or record.fold) for record in records}
            if len(digests) == 1 and None not in digests:
                return unit
    return None


def _only(units: Sequence[Unit], by: str) -> str:
    where = only_in(*units)
    return f",{where}" if where and (by or not _is_confined(units)) else where


def _side(flagged: list[Unit]) -> SideOrBoth | None:
    """The side all flagged units agree on; both where they do not."""
    sides = {unit.side for unit in flagged if unit.side is not None}
    if not sides:
        return None
    return sides.pop() if len(sides) == 1 else "both"


def _family_evidence(family: Family) -> Evidence:
    low = min(unit.margin for unit in family.members)
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
    if _passes_prefill(first, units):
        texts.append(
            "the prefill passes there: look at what is kept between steps (KV cache, "
            "positions, recurrent state) and at kernels for one token"
        )
    return [Evidence(text=text) for text in texts]


def _passes_prefill(unit: Unit, units: list[Unit]) -> bool:
    """Is it off in decode steps, and its site's prefill is not?"""
    same = [u for u in units if u.site == unit.site and u.phase == "prefill"]
    return unit.phase == "decode" and bool(same) and all(u.why is None for u in same)


def is_everywhere(unit: Unit, escalation: Escalation) -> bool:
    """Does the float32 pass show it in every forward? Those that pass in 16 bits hide it then."""
    deeper = [u for u in escalation.flagged if (u.site, u.phase) == (unit.site, unit.phase)]
    return any(not only_in(u) for u in deeper)


def _usages(units: Sequence[Unit]) -> dict[PromptStep, float]:
    """By forward, the largest share of a limit that one of these units uses there."""
    usages: dict[PromptStep, float] = {}
    for look in (look for unit in units for look in unit.looks):
        usages[look.place] = max(look.usage, usages.get(look.place, 0.0))
    return usages


def _is_confined(units: Sequence[Unit]) -> bool:
    """Are some forwards beyond their limit, and no other near to it? Else the error may be in all,
    above the limit in some."""
    usages, beyond, rest = _usages(units), dict[PromptStep, float](), [0.0]
    for look in (look for unit in units for look in unit.looks):
        if usages[look.place] <= 1:
            rest.append(max(look.usage, min(look.between, 1.0)))
        elif look.usage > 1:
            own = look.between if look.between > 1 else look.usage
            beyond[look.place] = max(own, beyond.get(look.place, 0.0))
    return 0 < len(beyond) < len(usages) and min(beyond.values()) > _CONFINED * max(rest)


def only_in(*units: Unit) -> str:
    """`` in prompt 2 alone (of 8)``, or `` seen in prompt 2 (of 8)`` where others are near to their
    limits; begins with a space if there is anything to say. Of one unit, or all of a family."""
    usages = _usages(units)
    beyond, everywhere = {place for place, usage in usages.items() if usage > 1}, set(usages)
    if not beyond or beyond == everywhere:
        return ""
    alone = _is_confined(units)
    samples, all_samples = ({sample for sample, _ in places} for places in (beyond, everywhere))
    steps, all_steps = ({step for _, step in places} for places in (beyond, everywhere))
    parts = []
    if samples != all_samples:
        parts.append(some_of("prompt", samples, len(all_samples), alone=alone))
    since = ""
    if steps != all_steps:
        if len(steps) > 1 and steps == {step for step in all_steps if step >= min(steps)}:
            since = f" from decode step {min(steps)} on"
        else:
            parts.append(some_of("decode step", steps, len(all_steps), alone=alone))
    where = (f" in {' and '.join(parts)}" if parts else "") + since
    return where if alone or not where else f" seen{where}"


def unit_evidence(unit: Unit) -> Evidence:
    """Why a unit is flagged."""
    if unit.blame is not None:
        return _blame_evidence(unit, unit.blame)
    worst = unit.first
    if math.isinf(unit.typical):
        return Evidence(
            text=f"{unit.site} ({unit.phase}): A is zero there, and B is not",
            values={"ratio": unit.typical, "limit": unit.limit},
        )
    if unit.why in ("token", "sink"):
        what, ratio = ("one token", unit.worst)
        if unit.why == "sink":
            what, ratio = ("one sink token", unit.sink)
        return Evidence(
            text=f"{unit.site}: {what}'s error is {figure(ratio)} × what rounding "
            f"makes (limit {unit.worst_limit:.1f} ×)"
            + ("" if worst.worst_position is None else f", token {worst.worst_position}"),
            values={"ratio": ratio, "limit": unit.worst_limit},
        )
    if unit.why == "forward":
        look = max(unit.beyond, key=lambda forward_look: forward_look.usage)
        forward = f"step {look.result.step}" if look.result.step else look.result.phase
        return Evidence(
            text=f"{unit.site}: in prompt {look.sample} ({forward}) the typical token's error is "
            f"{figure(look.typical)} × what rounding makes (limit {look.limit:.1f} × for the "
            f"largest of {len(unit.looks)} forwards); over all of them {figure(unit.typical)} ×",
            values={"ratio": look.typical, "limit": look.limit, "num_looks": len(unit.looks)},
        )
    control = f", in the other blocks {unit.control:.2f} ×" if unit.num_siblings else ""
    rounding = "float32 rounding" if unit.pass_ == "escalated" else "rounding"
    return Evidence(
        text=f"{unit.site} ({unit.phase}): the typical token's error is {figure(unit.typical)} × "
        f"what {rounding} makes{control} (limit {unit.limit:.1f} ×); rel L2 {worst.rel_l2:.2e}",
        values={"ratio": unit.typical, "control": unit.control, "limit": unit.limit},
    )


_OTHER = {"candidate": "reference", "reference": "candidate"}


def _blame_evidence(unit: Unit, blame: Blame) -> Evidence:
    values = {"value": blame.value, "control": blame.control, "limit": blame.limit}
    truth = unit.first.truth
    if truth is not None:
        values["reference_error"] = truth.reference_error
        values["candidate_error"] = truth.candidate_error
    place = f"{unit.site} ({unit.phase})"
    if blame.why == "both":
        text = f"{place}: both are {figure(blame.value)} × what rounding makes away from the truth"
        return Evidence(text=f"{text} (limit {blame.limit:.1f} ×)", values=values)
    far = f"{place}: {letter(blame.side)}'s error is {{}} {letter(_OTHER[blame.side])}'s"
    held = f"; in the other blocks {blame.control:.2f} × (limit {blame.limit:.1f} ×)"
    if blame.why in ("typical", "forward") and blame.detail:
        held = f", like {blame.detail} (limit {blame.limit:.1f} ×)"
    times = f"{figure(blame.value)} ×"
    where = f"at step {blame.at.step}" if blame.at.step else f"in the {blame.at.phase}"
    prompt = blame.at.sample if blame.place is None else blame.place[0]
    looks = f" for the largest of {len(unit.looks)} forwards)" if unit.looks else ")"
    text = {
        "typical": far.format(times) + held,
        "forward": f"{far.format(times)} {where}, prompt {prompt}{held.removesuffix(')')}{looks}",
        "token": f"{far.format(times)} at one token {where}{held}",
        "sink": f"{far.format(times)} at a sink token {where}{held}",
        "channel": f"{far.format(times)} in one channel{held}",
        "gain": f"{place}: {blame.detail} in {letter(blame.side)}, {blame.value:.0f} standard "
        f"deviations off the blocks of its kind (limit {blame.limit:.0f})",
    }[blame.why]
    if truth is not None and blame.why == "typical":
        errors = (truth.reference_error, truth.candidate_error)
        mine, other = errors if blame.side == "reference" else errors[::-1]
        text += f"; median token off by {mine:.2e} and {other:.2e}"
        if truth.estimated is not None:
            text += f", {letter(truth.estimated)}'s by their difference, the other's measured"
    return Evidence(text=text, values=values)


def checks_of(unit: Unit) -> list[Check]:
    """Equal inputs, and an error clearly over its limit."""
    return [
        check("anchored", unit.pass_ != "free", "no anchored pass (capture --like)"),
        check(
            "clear", unit.margin > 2,
            f"{unit.margin:.1f} × its limit; above 2 × it would be high",
        ),
    ]  # fmt: skip

"""What the verdict about a unit rests on, in words and numbers, and what to run next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from divergence.analyses.blocks.blame import Blame
from divergence.analyses.blocks.units import Unit
from divergence.comparison.decide import check
from divergence.comparison.measured import Measured
from divergence.comparison.results.findings import Check, Evidence, figure
from divergence.comparison.results.sites import SiteResult
from divergence.run.schema.site import BACKWARD, module_of, of_parameter
from divergence.words import letter

__all__ = ["checks_of", "estimated_evidence", "is_confined", "made_before", "next_commands",
           "only_in", "unanchored_evidence", "unit_evidence", "unmeasured_evidence"]  # fmt: skip

_CONFINED = 2.0
"""An error is in some forwards alone where the least of them uses so many times as much of its
limit as any other forward: the factor from which on a verdict is clear."""


def is_confined(unit: Unit) -> bool:
    """Are some forwards beyond their limit, and no other near to it? Else the error may be in all,
    above the limit in some."""
    beyond = unit.beyond
    rest = [look.usage for look in unit.looks if look.usage <= 1]
    return bool(beyond and rest) and min(x.usage for x in beyond) > _CONFINED * max(rest)


def only_in(unit: Unit) -> str:
    """`` in prompt 2 alone (of 8)``, or `` seen in prompt 2 (of 8)`` where others are near to their
    limits; begins with a space if there is anything to say."""
    beyond = {look.place for look in unit.beyond}
    everywhere = {look.place for look in unit.looks}
    if not beyond or beyond == everywhere:
        return ""
    alone = is_confined(unit)
    samples, all_samples = ({sample for sample, _ in places} for places in (beyond, everywhere))
    steps, all_steps = ({step for _, step in places} for places in (beyond, everywhere))
    parts = []
    if samples != all_samples:
        parts.append(_some("prompt", samples, len(all_samples), alone=alone))
    since = ""
    if steps != all_steps:
        if len(steps) > 1 and steps == {step for step in all_steps if step >= min(steps)}:
            since = f" from decode step {min(steps)} on"
        else:
            parts.append(_some("decode step", steps, len(all_steps), alone=alone))
    where = (f" in {' and '.join(parts)}" if parts else "") + since
    return where if alone or not where else f" seen{where}"


def _some(what: str, numbers: set[int], total: int, *, alone: bool) -> str:
    shown = [str(number) for number in sorted(numbers)]
    if len(shown) == 1:
        return f"{what} {shown[0]}{' alone' if alone else ''} (of {total})"
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return f"{what}s {', '.join(shown[:4])}{more} (of {total})"


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
            f"makes (alarm at {unit.worst_limit:.1f} ×), token {worst.worst_position}",
            values={"ratio": ratio, "limit": unit.worst_limit},
        )
    if unit.why == "forward":
        look = max(unit.beyond, key=lambda one: one.usage)
        forward = f"step {look.result.step}" if look.result.step else look.result.phase
        return Evidence(
            text=f"{unit.site}: in prompt {look.sample} ({forward}) the typical token's error is "
            f"{figure(look.typical)} × what rounding makes (alarm at {look.limit:.1f} × for the "
            f"largest of {len(unit.looks)} forwards); over all of them {figure(unit.typical)} ×",
            values={"ratio": look.typical, "limit": look.limit, "num_looks": len(unit.looks)},
        )
    control = f", elsewhere of its kind {unit.control:.2f} ×" if unit.num_siblings else ""
    rounding = "float32 rounding" if unit.pass_ == "escalated" else "rounding"
    return Evidence(
        text=f"{unit.site} ({unit.phase}): the typical token's error is {figure(unit.typical)} × "
        f"what {rounding} makes{control} (alarm at {unit.limit:.1f} ×); rel L2 {worst.rel_l2:.2e}",
        values={"ratio": unit.typical, "control": unit.control, "limit": unit.limit},
    )


def made_before(measured: Measured, unit: Unit) -> bool:
    """May the error be made before the module inside a block that is off? So it is where nothing
    tells that what enters the module is right."""
    result, module = unit.results[0], module_of(unit.site)
    if result.role != "inner" or unit.pass_ == "free" or of_parameter(unit.site):
        return False
    entries = (f"{module}:in", f"{module}:in.")
    return not any(
        site.pass_ == unit.pass_ and site.site.startswith(entries) for site in measured.sites
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
        return Evidence(text=f"{text} (alarm at {blame.limit:.1f} ×)", values=values)
    far = f"{place}: {letter(blame.side)}'s error is {{}} {letter(_OTHER[blame.side])}'s"
    held = f"; elsewhere of its kind {blame.control:.2f} × (alarm at {blame.limit:.1f} ×)"
    if blame.why == "typical" and blame.detail:
        held = f", like {blame.detail} (alarm at {blame.limit:.1f} ×)"
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
    return Evidence(text=text, values=values)


def unanchored_evidence(steps: list[int]) -> list[Evidence]:
    """Forwards that the anchored pass did not reach are judged less exactly."""
    if not steps:
        return []
    names = ", ".join(map(str, steps[:6])) + (" …" if len(steps) > 6 else "")
    return [Evidence(text=f"not anchored, so judged from free runs: step {names}")]


def estimated_evidence(sites: Sequence[SiteResult]) -> list[Evidence]:
    """How well estimated numbers are known."""
    estimated = [site for site in sites if site.estimated is not None]
    if not estimated:
        return []
    said, values = [], {"num_estimated": float(len(estimated))}
    for phase, steps in (("prefill", False), ("decode", True)):
        errors = [
            site.estimated.relative_error
            for site in estimated
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
            text=f"{len(estimated)} of {len(sites)} differences are estimated from sketches; "
            f"relative L2 {', '.join(said)}, in 95 of 100 cases",
            values=values,
        )
    ]


def unmeasured_evidence(sites: Sequence[SiteResult]) -> list[Evidence]:
    """What differs and was not measured, and the most that its statistics tell."""
    unmeasured = [site for site in sites if site.is_unmeasured]
    if not unmeasured:
        return []
    evidence = [
        Evidence(
            text=f"{len(unmeasured)} of {len(sites)} compared tensors differ, but by how much is "
            "not known: neither bytes nor sketches of both sides are left",
            values={"num_unmeasured": len(unmeasured)},
        )
    ]
    told = [site for site in unmeasured if site.at_least]
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


def checks_of(unit: Unit) -> list[Check]:
    """Equal inputs, and an error clearly over its limit."""
    return [
        check("anchored", unit.pass_ != "free", "no anchored pass (capture --like)"),
        check(
            "clear", unit.margin > 2,
            f"{unit.margin:.1f} × its limit; above 2 × it would be high",
        ),
    ]  # fmt: skip


def next_commands(measured: Measured, unit: Unit | None, *, escalated: bool) -> list[str]:
    """What to run next. ``unit``: the one that the verdict is about, if it is about one;
    ``escalated``: was an escalated pass judged?"""
    advice = measured.advice
    if not measured.anchored:
        return advice.certainty(_outside_blocks(measured.sites))
    commands: list[str] = []
    again: list[str] = []
    unmeasured = [site for site in measured.sites if site.is_unmeasured]
    if unmeasured or (unit is not None and any(r.estimated for r in unit.results)):
        named = [site.site for site in unmeasured if site.role == "inner"]
        again = advice.in_full([*_outside_blocks(measured.sites), *dict.fromkeys(named)])
        commands += again
        if unit is None and commands:
            return commands
    if unit is not None:
        block = unit.results[0].block
        inside = block is not None and (made_before(measured, unit) or _of_block(unit.site, block))
        if block is None or not inside:
            commands += advice.look_at(unit.site)
        else:
            commands += advice.into_block(block, hidden=unit.pass_ == "escalated")
        if measured.truth_samples is None:
            commands += advice.judged() or advice.truth(full=bool(again))
    if measured.narrow and not escalated and unit is None:
        made = advice.escalated and measured.truth_samples is None  # and a truth judges it
        commands += (advice.judged() or advice.truth()) if made else advice.escalate()
    return commands


def _of_block(site: str, block: str) -> bool:
    """Is it the block's own, or a gradient of its parameters? Then its operators tell more."""
    own = site.partition(":")[0] in (block, block + BACKWARD)
    return own or (of_parameter(site) and BACKWARD in site)


def _outside_blocks(sites: Sequence[SiteResult]) -> list[str]:
    """Flagged sites that recording the blocks' own inputs and outputs would leave out."""
    return list(dict.fromkeys(s.site for s in sites if s.flagged and s.role == "inner"))

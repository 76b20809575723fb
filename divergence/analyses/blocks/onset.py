"""Onset: the claim that an error is made somewhere, with what it rests on.

The first flagged unit in execution order is the onset, and its evidence says by how much it is
beyond which limit. Where most of its kind are, the claim is about a family (blocks.units).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from divergence.analyses.blocks.structure import (
    layer_type_of,
    layer_types_of,
    structures_at,
)
from divergence.analyses.blocks.units import (
    Blame,
    Escalation,
    JudgedUnit,
    Why,
    block_outputs,
    farther_side,
    is_table,
    made_before,
    next_commands,
    only_step,
    places_of,
)
from divergence.comparison.align import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.constants import (
    BEGINS_TIMES,
    CLEAR_TIMES,
    FEWEST_SIBLINGS,
    NEAR_BITS,
    NOISE_DEVIATIONS,
    SURE_LOG_ODDS,
)
from divergence.comparison.decide import check
from divergence.comparison.parameters import together
from divergence.comparison.preflight import other_numbers
from divergence.comparison.result import (
    Check,
    Finding,
    SiteResult,
    VerdictKind,
    num_rows,
    onset_at,
    order_of,
)
from divergence.facts import Fact, fact
from divergence.numerics.floor import input_bits
from divergence.run.site import module_of
from divergence.words import SIDES, SideOrBoth, common_side, grouped, other_side


def made_at(
    measured: Measured, units: list[JudgedUnit], flagged: list[JudgedUnit], escalation: Escalation
) -> Finding:
    """An error beyond the limit, at one site or at most of a kind."""
    family = find_family(units, flagged, measured)
    alike = flagged
    if family is not None:  # those of its kind and side, also those that are off in other forwards
        member = family.members[0]
        alike = [
            unit
            for unit in flagged
            if unit.kind.any_phase == member.kind.any_phase and unit.side in (None, member.side)
        ]
    first = min(alike, key=lambda u: order_of(u.first))
    table = None if family is None else _table_behind(measured, family, flagged)
    if table is not None:
        first, family = table, None
    structures = structures_at(measured, first)
    evidence = [unit_evidence(first), *structures]
    evidence += [fact("blocks.too_few", site=first.site)] if first.too_few else []
    layers = layer_type_of(measured, units, flagged)
    named = family is not None and isinstance(family.name, Fact) and family.name["type"]
    evidence += [] if layers is None or named else [layers]
    if table is not None:
        evidence.append(fact("blocks_read_table"))
    if not measured.anchored:
        evidence.append(fact("judged_from_free_runs"))
    if first.results[0].role == "inner" and first.pass_ != "free":  # what feeds it passes
        order, block = first.results[0].order, first.block
        healthy = [u for u in units if u.why is None and u.phase == first.phase]
        inside = (u for u in healthy if u.block == block and u.results[0].order < order)
        last = max(inside, key=lambda unit: unit.results[0].order, default=None)
        if last is not None:
            evidence.append(fact("last_that_passes", site=last.site))
    if _passes_prefill(first, [*units, *escalation.flagged]):
        evidence.append(fact("prefill_passes"))
    evidence += escalation.beside(first)
    # forwards that pass in 16 bits hide what the float32 pass shows in every one
    deeper = [u for u in escalation.flagged if (u.site, u.phase) == (first.site, first.phase)]
    everywhere = any(len({look.used > 1 for look in unit.looks}) <= 1 for unit in deeper)
    kind: VerdictKind = "localized"
    commands = next_commands(measured, first, escalation)
    if family is None:
        side = first.side or common_side(unit.side for unit in flagged)
        by = side if side in ("reference", "candidate") else None
        seems = not measured.anchored or first.pass_ == "free" or first.in_tail
        before = first.first.block if made_before(measured, first) else None
        headline = [
            fact("made_at", seems=seems, site=first.first.site, before=before, by=by),
            *([] if everywhere else _scope(first, flagged, structures, named=by is not None)),
            *([] if table is not None else _elsewhere(flagged, first, units)),
        ]
        evidence += _others(flagged, first)
        # rounding, or a fault
        if all(unit.in_tail and unit.margin <= CLEAR_TIMES for unit in flagged):
            kind = "undetermined"
            ratio, control = (
                (first.worst, None) if first.of_token else (first.typical, first.control)
            )
            at = first.first.site
            headline = [fact("blocks.end_of_tail", site=at, ratio=ratio, control=control)]
            commands = [*(measured.advice.judged() or measured.advice.truth()), *commands]
    else:
        kind = "systematic"
        side = common_side(unit.side for unit in family.members)
        evidence = [_family_evidence(family, unexplained=measured.unexplained), *evidence]
        # who is off: every member, or some; of parameters those of other families, too
        count = len({unit.block for unit in (*alike, *family.members)})
        num = None if count >= family.num_all else count
        off = fact(
            "family_off",
            name=family.name,
            num=num,
            total=family.num_all,
            before=made_before(measured, first),
        )
        decode = all(_passes_prefill(unit, units) for unit in family.members)
        cause = fact("cause_of_kind", decode=decode)
        beyond = {id(unit) for unit in flagged}
        shared = together(
            member.results[0], [(unit.results[0], id(unit) in beyond) for unit in units]
        )
        if shared is not None:
            cause = shared.cause
            if len(shared.beyond) > len(family.members):
                off = fact("rows_off", num=len(shared.beyond), total=shared.total, what=shared.rows)
        no_rounding = structures or decode
        bits = None if no_rounding else _input_bits(family, units)
        cause = cause if bits is None else fact("cause_inputs", bits=bits)
        scope = None if everywhere else only_in(*alike)
        if scope is not None and scope["alone"]:
            cause = fact("cause_special")
            scope = scope.with_values(comma=True)
        elif scope is not None:  # else its members are off there, too, within their limits
            every = len({unit.block for unit in alike}) >= len(family.members)
            scope = scope.with_values(comma=True) if every else None
        start = order_of(first.first)  # a block before it is off by another fault
        earlier = [u for u in block_outputs(flagged) if order_of(u.first) < start]
        tokens = _tokens_of(structures, alike)
        if tokens:
            scope = (scope or _SCOPE).with_values(**tokens)
            cause = cause if "onward" in tokens else fact("cause_special")
        headline = [
            fact("every_differs", off=off, site=first.first.site, scope=scope, cause=cause),
            *_elsewhere(
                [u for u in flagged if {u.side, first.side} == set(SIDES)] + earlier, first, units
            ),
        ]
        step = only_step(measured) if scope is None else None
        headline += [] if step is None else [fact("blocks.only_step", step=step)]
    sides = measured.reference.manifest, measured.candidate.manifest
    numbers = other_numbers(*sides, first.block or module_of(first.site))
    if numbers:  # where it is one block that is off, it need not be what is special there
        in_all = first.block is not None and not any(n["where"] or n["num"] for n in numbers)
        headline += [fact("numbers_there", numbers=numbers, alike=in_all and family is None)]
    begin, changed = _changed(measured, first)
    return Finding(
        claim="error_made_here" if family is None else "error_everywhere_of_kind",
        kind=kind,
        headline=[*headline, *changed],
        onset=onset_at(begin),
        place=order_of(first.first),
        equal_inputs=any(unit.pass_ != "free" for unit in flagged),
        side=side,
        rests_on=checks_of(
            first, units, family, of_a_module=measured.reference.manifest.is_of_a_module
        ),
        evidence=evidence,
        commands=[item for n, item in enumerate(commands) if item not in commands[:n]],
    )


def _changed(measured: Measured, unit: JudgedUnit) -> tuple[SiteResult, list[Fact]]:
    """Finds the first result that is off, and tells where the free pass, which runs before the
    anchored one, shows that it was not yet: an error that a block makes is in its free output, too.
    """
    looks = {(look.result.sample, look.result.step): look for look in unit.looks}
    off = {at: look.result for at, look in looks.items() if look.used > 1}
    sites = (s for s in measured.sites if (s.pass_, s.site) == ("free", unit.site))
    free = {(s.sample, s.step): s.rel_l2 for s in sites if s.rel_l2 is not None}
    free = {at: size for at, size in free.items() if at in off}
    late = [at for at, size in free.items() if CLEAR_TIMES * size >= (off[at].rel_l2 or 0.0)]
    if unit.pass_ != "anchored" or len(late) == len(free):
        return unit.first, []
    scope = (_in_places(late, looks, alone=True) or _SCOPE) if late else None
    first = min((off[at] for at in late), key=order_of, default=unit.first)
    return first, [fact("blocks.changed", scope=scope)]


def _input_bits(family: Family, units: Sequence[JudgedUnit]) -> int | None:
    """Tells the fraction bits of the shorter format to which products' inputs were rounded, where
    all blocks in float32 are off as such products are, and no block's product is healthy. (That of
    a head may be: one row takes kernels that round no inputs.)"""
    member = family.members[0]
    first = member.first
    kind = member.pass_, member.of, member.phase
    products = (unit for unit in units if (unit.pass_, unit.of, unit.phase) == kind)
    if any(
        unit.why is None
        for unit in products
        if unit.kind.role == "block"
        and (not unit.kind.place or unit.kind.class_ in ("Linear", "Conv1D"))
    ):
        return None
    dtypes = {first.reference_dtype, first.candidate_dtype} - {"float64"}  # that of a truth
    if first.role != "block" or dtypes != {"float32"} or len(family.members) < family.num_all:
        return None
    bits = [
        input_bits(
            unit.typical if unit.standing is None else max(unit.standing.stats.typical.values()),
            first.shape[-1],
        )
        for unit in family.members
    ]
    gains = [
        abs(result.gain) / result.gain_se
        for unit in family.members
        for result in unit.results
        if result.gain and result.gain_se
    ]
    if gains and statistics.median(gains) > NOISE_DEVIATIONS:
        return None
    middle = statistics.median(bits)
    near = max(bits) - min(bits) < 2 * NEAR_BITS
    # fraction bits of TF32 and float16, and of bfloat16
    return next((n for n in (10, 7) if near and abs(middle - n) < NEAR_BITS), None)


def below_floor(measured: Measured, escalation: Escalation) -> Finding:
    """Nothing beyond the floor of the runs' dtype, but something in float32."""
    flagged = escalation.flagged
    family = find_family(escalation.units, flagged, measured)
    first = family.members[0] if family else min(flagged, key=lambda u: order_of(u.first))
    side = escalation.side
    by = side if side in ("reference", "candidate") else None
    if family:
        bits = _input_bits(family, escalation.units)
        cause = fact("cause_data") if bits is None else fact("cause_inputs", bits=bits)
        headline = [fact("every_off_below", name=family.name, cause=cause)]
    else:
        made = fact("made_at", seems=False, site=first.first.site, before=None, by=by)
        headline = [
            made,
            *_scope(first, flagged, named=by is not None),
            *_elsewhere(flagged, first, escalation.units),
            fact("below_floor"),
        ]
    return Finding(
        claim="error_below_floor",
        kind="systematic" if family else "localized",
        headline=headline,
        onset=onset_at(first.first),
        place=order_of(first.first),
        equal_inputs=True,
        rests_on=checks_of(first, escalation.units, family),
        side=side,
        evidence=[unit_evidence(first), fact("escalated_is_formula"), *_others(flagged, first)],
        commands=next_commands(measured, first, escalation),
    )


def _table_behind(
    measured: Measured, family: Family, flagged: list[JudgedUnit]
) -> JudgedUnit | None:
    """The rotary table that makes a whole kind differ: it is off itself, and an input of a block
    that no anchored pass replaced, as the other side does not show it or has it in another shape.
    """
    block, side = family.members[0].results[0].block, family.members[0].side
    read = f"{block}:in."
    unseen = [
        (lone.side, lone.sample, lone.step, lone.site)
        for lone in measured.alignment.unmatched
        if lone.site.startswith(read)
    ]
    unseen += [
        ("candidate", result.sample, result.step, result.candidate_site or result.site)
        for result in measured.sites
        if result.site.startswith(read) and result.pass_ == "anchored" and not result.identical
    ]
    for unit in sorted(flagged, key=lambda unit: order_of(unit.first)):
        if not is_table(unit.results[0]) or unit.side != side:
            continue
        for holder, sample, step, input_ in unseen:
            run = measured.reference if holder == "reference" else measured.candidate
            sites = (unit.site, input_)
            records = [run.find(("free", sample, step, site)) for site in sites]
            digests = {record and (record.xxh3 or record.fold) for record in records}
            if len(digests) == 1 and None not in digests:
                return unit
    return None


def _scope(
    unit: JudgedUnit, flagged: Sequence[JudgedUnit], structures: Sequence[Fact] = (), *, named: bool
) -> list[Fact]:
    """Tells where alone the unit's module is off, by all of its tensors that are. ``named``: behind
    the side that is to blame."""
    own = module_of(unit.site), unit.pass_, unit.phase, unit.side
    units = [u for u in flagged if (module_of(u.site), u.pass_, u.phase, u.side) == own]
    scope, tokens = only_in(unit, *units), _tokens_of(structures, [unit])
    if scope is None:
        return [_SCOPE.with_values(**tokens)] if tokens else []
    return [scope.with_values(comma=named or not scope["alone"], **tokens)]


_SCOPE = fact(
    "scope", parts=[], since=None, alone=True, comma=False, token=None, last=False, onward=None
)
"""All forwards, all tokens."""


def _tokens_of(structures: Sequence[Fact], units: Sequence[JudgedUnit]) -> dict[str, int]:
    """Tells the ``token`` that holds the difference at the onset, and the largest wherever it is
    beyond its limit; or ``last``, where that is the last one of each prompt; or ``onward``: the one
    from which on the difference is."""
    looks = [
        look
        for unit in units
        for look in [k for k in unit.looks if k.used > 1 and k not in unit.others] or unit.looks
    ]
    # of several prompts, or blocks, the token of the same number
    tokens = {look.result.ratio_position for look in looks}
    positions = [unit.first.ratio_position for unit in units]
    for item in structures:
        token, places = item["token"], [at for at in positions if at is not None]
        if item.code == "blocks.one_token" and tokens | set(positions) == {token}:
            return {"token": token}
        begins = item.code == "blocks.beginning"
        if begins and len(places) == len(units) and min(places) >= token:
            return {"onward": token}
    several = len({look.sample for look in looks}) > 1 or (
        len(units) > 1
        and all(  # one token holds more than half of the squared difference
            2 * (of.token_rel_l2_max or 0.0) ** 2 > num_rows(of) * (of.rel_l2 or 0.0) ** 2
            for of in (look.result for look in looks)
        )
    )
    # the largest token of a forward that is off as a whole may be all that is
    single = all(look.worst**2 > BEGINS_TIMES * look.typical**2 for look in looks)
    if not several or not (single or all(unit.of_token for unit in units)):
        return {}
    if len(tokens) > 1 and all(
        look.result.ratio_position == look.num_rows - 1 and not look.result.prompts
        for look in looks
    ):
        return {"last": True}
    token = tokens.pop()
    return {} if tokens or token is None else {"token": token}


def _family_evidence(family: Family, *, unexplained: bool = False) -> Fact:
    beyond = [unit for unit in family.members if unit.why is not None]
    if len(beyond) < len(family.members):
        places = places_of(beyond[0])
        sizes = [
            statistics.median(
                [look.typical for look in unit.looks if look.place in places] or [unit.typical]
            )
            for unit in family.members
        ]
        return fact(
            "family_alike",
            num_flagged=len(beyond),
            num=len(family.members),
            total=family.num_all,
            name=family.name,
            least=min(sizes),
            most=max(sizes),
            unexplained=unexplained,
        )
    num, least = len(family.members), max(1.0, min(unit.margin for unit in beyond))
    return fact(
        "family_beyond", num_flagged=num, total=family.num_all, name=family.name, least=least
    )


def _elsewhere(
    flagged: list[JudgedUnit], first: JudgedUnit, units: Sequence[JudgedUnit]
) -> list[Fact]:
    """The other places where an error is made in equal inputs, by side: that of ``first`` comes
    first. They are blocks, and modules behind them that are given what passes."""
    blocks: dict[SideOrBoth | None, dict[str, None]] = {first.side: {}}
    outer = [unit for unit in units if unit.kind.role == "trunk" or unit.kind.place == ""]
    outer.sort(key=lambda unit: unit.results[0].order)
    for unit in flagged:
        block = unit.block
        if block is None and unit.site != first.site and unit.kind.port == "out":
            kind, order = (unit.pass_, unit.phase), unit.results[0].order
            before = [u for u in outer if (u.pass_, u.phase) == kind and u.results[0].order < order]
            blocks_before = [u for u in before if u.kind.role == "block"]
            if blocks_before and before[-1].why is None and blocks_before[-1].why is None:
                block = module_of(unit.site)
        # at the same site the other side may be off in the other phase
        apart = unit.site == first.site and {unit.side, first.side} == set(SIDES)
        elsewhere = block is not None and (block != first.block or apart)
        if elsewhere and unit.pass_ != "free":
            blocks.setdefault(unit.side, {})[str(block)] = None
    for unit in (unit for unit in units if unit.others):
        blocks.setdefault(unit.others[0].side, {})[unit.block or module_of(unit.site)] = None
    return [
        fact(
            "made_elsewhere",
            num=len(places),
            places=list(places),
            by=None if by in (first.side, "both") else by,
        )
        for by, places in blocks.items()
        if places
    ]


def _others(flagged: list[JudgedUnit], first: JudgedUnit) -> list[Fact]:
    others = sorted({unit.block or unit.site for unit in flagged} - {first.block or first.site})
    return [fact("also_beyond", places=others)] if others else []


def _passes_prefill(unit: JudgedUnit, units: list[JudgedUnit]) -> bool:
    """Is it off in decode steps, and its site's prefill is not, nor as far on the same side?"""
    same = [u for u in units if u.site == unit.site and u.phase == "prefill"]
    if unit.phase != "decode" or not same or any(other.why is not None for other in same):
        return False
    near = max(math.log(unit.thresholds.truth_confirm), unit.farther(unit.side) / 2)
    return unit.blame is None or max(each.farther(unit.side) for each in same) <= near


def _may_be_elsewhere(unit: JudgedUnit, beyond: Collection[PromptStep]) -> bool:
    """May the error be in forwards that are not among those ``beyond`` a limit? It may where the
    sides differ by half as much there, or at all where most is equal bit for bit; by more than
    rounding, where no truth excuses it; or where log W is over half of that beyond the limit: few
    numbers convict none, and the truth may not hold those forwards."""
    own = [look for look in unit.looks if look not in unit.others]
    sizes = {look.place: look.worst if unit.of_token else look.typical for look in own}
    inside, outside = [at for at in sizes if at in beyond], [at for at in sizes if at not in beyond]
    nearest = max((sizes[at] for at in outside), default=0.0)
    least = min((sizes[at] for at in inside), default=0.0)
    if least <= CLEAR_TIMES * nearest or (unit.mostly_equal and nearest > 0):
        return True
    if unit.blame is None and not unit.of_token and nearest > unit.thresholds.truth_confirm**2:
        return True
    if unit.of_token or unit.side not in ("reference", "candidate"):
        return False
    off, rest = ([unit.farther(unit.side, at) for at in places] for places in (inside, outside))
    return max(rest, default=0.0) > min(off, default=0.0) / CLEAR_TIMES > 0


def only_in(*units: JudgedUnit) -> Fact | None:
    """The prompts and steps that alone are off (``alone``), or that are beyond their limits where
    others may be off, too; None where all are beyond, or where all may be off and it is of all rows
    together that the units are beyond theirs. Of one unit, or all of a family."""
    places = grouped((look for unit in units for look in unit.looks), lambda look: look.place)
    others = {id(look) for unit in units for look in unit.others}
    own = {at: [k for k in looks if id(k) not in others] for at, looks in places.items()}
    beyond = {at: looks for at, looks in own.items() if any(look.used > 1 for look in looks)}
    if len(beyond) == len(places):
        return None
    elsewhere = not beyond or any(_may_be_elsewhere(unit, beyond) for unit in units)
    if elsewhere:  # what is within its limits may be off as well, what is equal is not
        off = {at: looks for at, looks in places.items() if any(look.worst for look in looks)}
        if off and beyond.keys() <= off.keys() < places.keys():
            return _in_places(off, places)
        if not beyond or all(
            unit.mostly_equal or unit.why in ("typical", "both", "gain") for unit in units
        ):
            return None
    # they alone are off where no other is near to its limit, of the two sides' difference either
    least = min(
        max(look.between if look.between > 1 else look.used for look in looks if look.used > 1)
        for looks in beyond.values()
    )
    within = (look for at, looks in own.items() if at not in beyond for look in looks)
    nearest = max((max(look.used, min(look.between, 1.0)) for look in within), default=0.0)
    alone = not elsewhere and least > CLEAR_TIMES * nearest
    return _in_places(beyond, places, alone=alone)


def _in_places(
    beyond: Collection[PromptStep], places: Collection[PromptStep], *, alone: bool = False
) -> Fact | None:
    """Names the prompts and steps that hold all that is ``beyond``; None where all do."""
    parts, since = [], None
    levels = [{at[number] for at in beyond} for number in range(2)]
    within = [at for at in places if all(n in level for n, level in zip(at, levels, strict=True))]
    # no prompt or step, as a race would have it
    if alone and len(within) > len(beyond) >= FEWEST_SIBLINGS:
        (sample, step), total = min(beyond), len(places)
        part = fact("scattered", num=len(beyond), total=total, sample=sample, step=step)
        return _SCOPE.with_values(parts=[part])
    for number, what in enumerate(("prompt", "step")):
        some, every = levels[number], {at[number] for at in places}
        if what == "step" and len(some) > 1 and some == {n for n in every if n >= min(some)}:
            since = min(some) if some != every else None
        elif some != every:
            lone, numbers = alone and len(some) == 1, sorted(some)
            parts.append(fact("some", what=what, numbers=numbers, total=len(every), alone=lone))
    if not parts and since is None:
        return None
    return _SCOPE.with_values(parts=parts, since=since, alone=alone)


def unit_evidence(unit: JudgedUnit) -> Fact:
    if unit.blame is not None:
        return _blame_evidence(unit, unit.blame)
    worst = unit.first
    place = {"site": unit.site, "phase": unit.phase}
    if math.isinf(unit.typical):
        return fact("zero_in_reference", **place, ratio=unit.typical, limit=unit.limit)
    if unit.why == "token":
        return fact(
            "token_ratio",
            **place,
            sink=unit.sink,
            ratio=unit.worst,
            limit=unit.worst_limit,
            token=worst.ratio_position,
        )
    if unit.why == "forward":
        look = max(unit.beyond, key=lambda beyond: beyond.usage)
        return fact(
            "forward_ratio",
            **place,
            sample=look.sample,
            step=look.result.step or None,
            forward=look.result.phase,
            ratio=look.typical,
            limit=look.limit,
            num_looks=len(unit.looks),
            typical=unit.typical,
        )
    return fact(
        "typical_ratio",
        **place,
        ratio=unit.typical,
        escalated=unit.pass_ == "escalated",
        control=unit.control,
        limit=unit.limit,
        rel_l2=worst.rel_l2,
    )


def _blame_evidence(unit: JudgedUnit, blame: Blame) -> Fact:
    """One of ``both_off``, ``typical_off``, ``forward_off``, ``token_off``, ``channel_off`` and
    ``gain_off``."""
    values: dict[str, Any] = {
        "site": unit.site,
        "phase": unit.phase,
        "value": blame.value,
        "control": blame.control,
        "limit": blame.limit,
        "like": blame.like,
    }
    at, truth, estimated = blame.at, unit.first.truth, None
    errors: dict[str, float | None] = {"reference": None, "candidate": None}
    if truth is not None and not blame.in_units:
        errors = {"reference": truth.reference_error, "candidate": truth.candidate_error}
        values |= {f"{side}_error": error for side, error in errors.items()}
        estimated = truth.estimated
    if blame.side != "both":
        values |= {"side": blame.side, "other": other_side(blame.side)}
    sample, step = (None, None) if blame.place is None else blame.place
    forward = {"step": at.step or None, "forward": at.phase}
    units = {"in_units": blame.in_units}
    own: dict[Any, float | None] = dict.fromkeys(SIDES)
    if unit.standing is not None:
        typical = unit.standing.stats.typical
        own |= typical if max(typical.values()) > CLEAR_TIMES * blame.value else {}
    more: dict[Why, dict[str, Any]] = {
        "both": own,
        "typical": {
            **units,
            "own": errors.get(blame.side),
            "estimated": estimated,
            "other_error": errors.get(str(values.get("other"))),
        },
        "forward": {
            **forward,
            **units,
            "sample": at.sample if sample is None else sample,
            "num_looks": len(unit.looks) or None,
        },
        "token": {**forward, **units, "sink": blame.sink},
        "channel": {"channel": blame.channel},
        "gain": {"what": blame.scaled, "factor": blame.factor, "sample": sample, "step": step},
    }
    return fact(f"{blame.why}_off", **values, **more[blame.why])


def checks_of(
    unit: JudgedUnit,
    units: Sequence[JudgedUnit],
    family: Family | None = None,
    *,
    of_a_module: bool = False,
) -> list[Check]:
    """Equal inputs, and an error clearly over its limit: twice as large, or one that the truth
    blames a side for, where the others of its kind differ in nothing."""
    kin = [u for u in units if u.kind == unit.kind and u.pass_ == unit.pass_ and u is not unit]
    healthy = [other for other in kin if other.why is None]
    # the same kernels ran on both sides, and it is no other kernel's healthy error either
    only_here = len(healthy) >= max(2, len(kin) / 2) and all(
        result.identical for other in healthy for result in other.results
    )
    sided = unit.side not in (None, "both")
    clear = unit.margin > CLEAR_TIMES or (only_here and sided)
    checks = [
        check("anchored", unit.pass_ != "free", fact("no_anchored_pass", of_a_module=of_a_module)),
        check("clear", clear, fact("not_clear", margin=unit.margin)),
    ]
    if unit.in_tail and (family is None or unit.of_token):
        checks.append(check("apart", False, fact("in_tail", token=unit.of_token)))
    among_siblings = unit.blame is not None and unit.blame.like is None
    if sided and among_siblings and unit.standing is not None:
        finer = fact("other_may_be_finer", other=other_side(unit.side))
        checks.append(check("own", unit.standing.odds > SURE_LOG_ODDS, finer))
        # more than one by the same side, and the rest leans to it: the rest may have what they have
        kind, rest = unit.kind.any_phase, [other.farther(unit.side) for other in healthy]
        off = {u.block for u in units if (u.kind.any_phase, u.side) == (kind, unit.side)}
        if family is None and len(off) > 1 and rest:
            leaning = statistics.median(rest)
            in_all = fact("may_be_in_all", side=unit.side, times=math.exp(leaning))
            checks.append(check("alone", leaning <= unit.standing.usual_reach, in_all))
    return checks


# The kind of module that a fault runs through.


@dataclass(frozen=True, slots=True)
class Family:
    """All of a kind, off together. ``name``: a class, or a fact that tells which of it are
    meant."""

    name: str | Fact
    members: list[JudgedUnit]
    num_all: int


def find_family(
    units: Sequence[JudgedUnit], flagged: Sequence[JudgedUnit], measured: Measured
) -> Family | None:
    """The kind of the onset, where more than half of at least three of its kind are flagged, in
    either phase, or off by the same measure as a flagged one, or by more than rounding where
    nothing lets them differ; or where those that are flagged are most of one type of layer.

    What follows a bad module inside a block is off as well, so the first kind in execution
    order counts. Where every place of its class is off, the class is named alone.
    """
    # in a free pass one bad token is off in all that follows
    narrow = ("token", "channel")
    judged = [unit for unit in flagged if unit.pass_ != "free" or unit.why not in narrow]
    judged = [unit for unit in judged if unit.kind.role == "block"]
    judged.sort(key=lambda unit: order_of(unit.first))
    for unit in judged:
        blocks = {other.block for other in units if other.kind.any_phase == unit.kind.any_phase}
        prompts = {sample for sample, _ in places_of(unit)}
        off = [
            other
            for other in judged
            if other.kind.any_phase == unit.kind.any_phase
            and other.side in (None, unit.side)  # two faults are no kind
            and prompts & {sample for sample, _ in places_of(other)}
        ]
        members = [own[0] for own in grouped(off, lambda each: each.block).values()]
        name = _name(unit, units, judged)
        named = {str(each.block) for each in members}
        for type_, of_type in layer_types_of(measured, map(str, blocks)).items():
            if named <= of_type < blocks and 2 * len(named) > len(of_type) >= FEWEST_SIBLINGS:
                name = fact("blocks.kind_of_type", kind=name, type=type_)
                return Family(name, members, len(of_type))
        more = _off_alike(unit, units, measured)
        members += [other for other in more if str(other.block) not in named]
        if 2 * len(members) > len(blocks) >= FEWEST_SIBLINGS:
            return Family(name, members, len(blocks))
    return None


def _off_alike(
    unit: JudgedUnit, units: Sequence[JudgedUnit], measured: Measured
) -> list[JudgedUnit]:
    """Lists those of a kind that are off as a flagged one of them is, although within their own
    limits: it is the first to pass, and not what is wrong. None where it stands out from them by
    itself."""
    if unit.why not in ("typical", "forward"):
        return []
    thresholds, near = measured.thresholds, measured.thresholds.truth_confirm
    kin = [other for other in units if other.kind == unit.kind]
    others = [other for other in kin if other is not unit]
    off = {look.place for look in unit.beyond}

    def size(other: JudgedUnit) -> float:
        """Its median ratio where the unit is off."""
        if unit.why == "typical":
            return other.typical
        ratios = [look.typical for look in other.looks if look.place in off]
        return statistics.median(ratios or [0.0])

    def beyond(least: float) -> list[JudgedUnit]:
        return [unit, *(other for other in others if size(other) > least)]

    # Where equal inputs gave equal bits in some of the kind the same kernels ran, and what differs
    # by more than a floor is off by no rounding; nor by less, where that is so in the same forward.
    kind, places = unit.kind.any_phase, places_of(unit)
    any_phase = (other for other in units if other.kind.any_phase == kind)
    equal = {(r.sample, r.step) for other in any_phase for r in other.results if r.identical}
    if equal and unit.pass_ != "free":
        return beyond(thresholds.least_sibling if places <= equal else 1.0)
    if unit.blame is not None:
        beside_them = unit.blame.like is None and unit.blame.why != "gain"  # among its siblings
        if beside_them and unit.blame.value > thresholds.truth_systematic * unit.blame.control:
            return []
        side, times = farther_side(kin, thresholds.truth_standout) or (None, 0.0)
        if side != unit.side or times <= near:
            return []
        far = math.log(near)
        middle = {o: statistics.median(o.farther(side, place) for place in places) for o in others}
        return [unit, *(other for other in others if middle[other] > far)]
    # All are beyond what rounding makes, and it is no farther than others are. A limit that its
    # siblings set is far above them: near to it is nobody but the unit.
    level = statistics.median([other.typical for other in others] or [0.0])
    typical = unit.why == "typical" and near**2 < level
    if typical and unit.typical < thresholds.truth_systematic * level:
        return beyond(near**2)
    return []


def _name(
    unit: JudgedUnit, units: Sequence[JudgedUnit], judged: Sequence[JudgedUnit]
) -> str | Fact:
    """A family's name: its class, or one place of it; for what enters a module, the module around
    it, whose own code lies between."""
    _, path, port, kind, *_ = unit.kind
    place = path.removeprefix(".")
    if not place:
        return kind or "block"
    if port.startswith("in"):
        around = path.rpartition(".")[0]
        outer = next((u.kind.class_ for u in units if u.kind[:2] == ("block", around)), "")
        if not outer:
            return fact("blocks.kind_input", kind=kind, place=place)
        where = around.removeprefix(".") or "block"
        return fact("blocks.kind_entering", kind=outer, place=where, module=place)
    entering = {u.site: u for u in units if u.kind.port == "in"}

    def is_source(other: JudgedUnit) -> bool:
        """An output of the same class in the same phase, whose module was entered by what passes,
        or by an error that its own stands out from."""
        if other.kind.role != "block" or other.kind[2:5] != unit.kind[2:5] or not other.kind.place:
            return False
        fed = entering.get(other.site.rpartition(":")[0] + ":in")
        if other.kind == unit.kind or fed is None or fed.why is None:
            return other.kind == unit.kind or fed is not None
        given, own = (each.results[0].truth for each in (fed, other))
        if given is None or own is None or other.side not in ("reference", "candidate"):
            return False
        before, after = (getattr(truth, f"{other.side}_error") for truth in (given, own))
        return bool(after > unit.thresholds.truth_confirm * before)

    sources = [other for other in units if is_source(other)]
    if len({u.kind.place for u in sources}) == 1 or not all(u in judged for u in sources):
        return fact("blocks.kind_at", kind=kind, place=place)
    if kind in ("Linear", "Conv1D"):
        return fact("blocks.kind_products", kind=kind, dtype=unit.results[0].candidate_dtype)
    return kind or place

"""Sides: which side of a unit is wrong, by the truth.

Each side's own error is held against the siblings' (blocks.blame). A difference of the two sides
counts only where one of them is the farther from what is right: two equally good answers may
differ. What all of a kind shares no comparison among them would show: their own median is held
against its limit, over all forwards and in each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from divergence.analyses.blocks.blame import (
    forward_controls,
    least_of,
    lone_control,
    questions,
    usages,
)
from divergence.analyses.blocks.looks import FEW_ROWS, Controls, one_step
from divergence.analyses.blocks.units import (
    TABLES,
    Blame,
    Unit,
    Why,
    block_outputs,
    families_of,
    medians,
)
from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.measure.truth import SamplesBySite
from divergence.comparison.measure.truth_stats import TruthStats, stats_of
from divergence.numerics.floor import Thresholds, spread
from divergence.run.site import PHASES
from divergence.words import Side

__all__ = ["blame_units"]

_WHOLE = ("typical", "both", "forward")
"""Questions that are asked first: what is off in a whole forward is so at its tokens, too."""


def blame_units(
    units: list[Unit], truth_samples: SamplesBySite, routed: frozenset[str], thresholds: Thresholds
) -> list[Unit]:
    """Hold every unit that the truth has samples of against it. Returns those that are excused:
    beyond a limit of the two sides' difference, and equally near the truth."""
    judged: list[Unit] = []
    for unit in units:
        samples = truth_samples.find(unit.pass_, unit.site, unit.phase)
        if samples is None or _no_measure(unit):
            continue
        unit.stats = samples.once(stats_of)
        if unit.stats is not None:
            judged.append(unit)
    _name_sides([unit for unit in judged if unit.pass_ == "free"], routed, thresholds)
    judged = [unit for unit in judged if unit.pass_ != "free"]
    block_w = _block_w(judged, thresholds)
    at_blocks = {phase: _block_forwards(judged, phase, thresholds) for phase in PHASES}
    excused: list[Unit] = []
    for family in families_of(judged):
        held = [Controls(at_blocks[family[0].phase], 1.0) for _ in family]
        if len(family) >= 3:
            held = forward_controls(_stats_of(family), thresholds)
        for unit, forwards in zip(family, held, strict=True):
            others = _stats_of(other for other in family if other is not unit)
            assert unit.stats is not None
            answers = questions(
                unit.stats,
                others,
                lone_w=block_w.get(unit.phase),
                forwards=forwards,
                routed=unit.results[0].block in routed,
                widened=unit.widened,
                thresholds=thresholds,
            )
            far = _far_forwards(unit, others, thresholds)
            answers += far.values()
            answers.sort(key=lambda answer: answer.why not in _WHOLE)
            suspected = {look.place for look in unit.beyond}
            apart = _use_looks(unit, others, forwards, routed, thresholds)
            for look in unit.looks:
                if look.place in far:
                    look.usage = max(look.usage, far[look.place].limit_usage)
            unit.limit_usage = max((answer.limit_usage for answer in answers), default=0.0)
            unit.blame = next((answer for answer in answers if answer.limit_usage > 1), None)
            if unit.blame is None and unit.why is not None:
                unit.blame = _confirmed(unit, answers, thresholds)
                if unit.why == "forward":
                    sure = [at for at in suspected if apart.get(at, 0) >= thresholds.truth_confirm]
                    unit.blame = unit.blame if sure else None
                    for look in unit.looks:
                        if look.place in sure:
                            look.usage = max(look.usage, apart[look.place])
                beside = None
                if unit.blame is None:
                    beside = _beside_truth(unit, routed) or _beside_floor(unit, suspected)
                if unit.blame is None and beside is None:
                    excused.append(unit)
                if unit.blame is None and beside is not None:  # no truth, so no side
                    unit.why, unit.limit_usage = beside, max(unit.limit_usage, unit.between)
                    continue
            unit.why = None if unit.blame is None else unit.blame.why
            if unit.why is None:
                for look in unit.looks:
                    look.usage = min(look.usage, 1.0)
        _blame_family(family, thresholds)
        if all(unit.results[0].block not in routed for unit in family):
            _blame_forwards(family, thresholds)
    return excused


def _stats_of(units: Iterable[Unit]) -> list[TruthStats]:
    """Of units that were judged against the truth: each has them."""
    return [unit.stats for unit in units if unit.stats is not None]


def _beside_truth(unit: Unit, routed: frozenset[str]) -> Why | None:
    """By which limit a unit is beyond rounding in forwards that the truth does not hold: it excuses
    nothing there."""
    rest = [result for result in unit.results if result.truth is None and result.ratio is not None]
    if not rest:
        return None
    if statistics.median(result.ratio or 0.0 for result in rest) > unit.limit:
        return "typical"
    if any(look.result.truth is None for look in unit.beyond):
        return "forward"
    if unit.results[0].block in routed:
        return None
    if any((result.ratio_max or 0.0) > unit.worst_limit for result in rest):
        return "token"
    return "sink" if any((result.ratio_sink or 0.0) > unit.worst_limit for result in rest) else None


def _beside_floor(unit: Unit, suspected: set[PromptStep]) -> Why | None:
    """By which limit a unit is beyond rounding where one side's error is not measured, and may be
    far smaller than the other's: then the floor excuses nothing. ``suspected``: the looks that were
    beyond their limits."""
    assert unit.stats is not None
    if unit.why == "typical":
        return None if unit.stats.alike else "typical"
    forwards = unit.stats.forwards
    if unit.why == "forward":
        unsure = {at for at in suspected if at in forwards and not forwards[at].alike[0]}
        for look in unit.looks:
            if look.place in unsure:
                look.usage = max(look.usage, look.between)
        return "forward" if unsure else None
    far = {
        (result.sample, result.step) for result in unit.results
        if max(result.ratio_max or 0.0, result.ratio_sink or 0.0) > unit.worst_limit
    }  # fmt: skip
    alike = all(forward.alike[1] for forward in forwards.values()
                if (forward.result.sample, forward.result.step) in far)  # fmt: skip
    return None if alike else "sink" if unit.why == "sink" else "token"


def _name_sides(units: list[Unit], routed: frozenset[str], thresholds: Thresholds) -> None:
    """Of a free pass a floor tells which side is wrong where the two differ by more than rounding;
    it neither excuses a difference there nor finds another: inputs were not equal."""
    for unit in units:
        if unit.why is None or unit.stats is None or unit.results[0].block in routed:
            continue
        answers = questions(
            unit.stats, [], lone_w=None, forwards=Controls({}, 1.0), routed=False,
            widened=unit.widened, thresholds=thresholds,
        )  # fmt: skip
        unit.blame = next((answer for answer in answers if answer.limit_usage > 1), None)
    for unit in units:
        unit.stats = None  # what else is asked of them takes equal inputs


def _no_measure(unit: Unit) -> bool:
    """A rotary table is computed from float32 angles whatever the dtype: in two dtypes its
    distances from the truth have nothing to do with either's rounding."""
    first = unit.results[0]
    two_dtypes = first.reference_dtype != first.candidate_dtype
    return TABLES in (first.kind or "").lower() and two_dtypes


def _use_looks(
    unit: Unit,
    others: list[TruthStats],
    forwards: Controls,
    routed: frozenset[str],
    thresholds: Thresholds,
) -> dict[PromptStep, float]:
    """Each look of what the truth judges uses the limits of the truth. Returns how far the W of
    each is from its control, in either direction."""
    assert unit.stats is not None
    family = [unit.stats, *others] if len(others) >= 2 else []
    is_routed = unit.results[0].block in routed
    by_place = usages(unit.stats, family, forwards, is_routed, unit.widened, thresholds)
    for look in unit.looks:
        if look.place in by_place:
            excess, _, limit = by_place[look.place]
            look.usage = max(excess, 1 / max(excess, 1e-300)) / limit
    return {place: max(excess, 1 / max(excess, 1e-300)) for place, (excess, *_) in by_place.items()}


def _far_forwards(
    unit: Unit, others: list[TruthStats], thresholds: Thresholds
) -> dict[PromptStep, Blame]:
    """Forwards in which the sides differ by more than rounding, and one is farther from the truth
    than any healthy kernel, however its siblings fare: they may have the same fault there."""
    assert unit.stats is not None
    least = least_of([unit.stats, *others] if len(others) >= 2 else [], thresholds)
    far: dict[PromptStep, Blame] = {}
    for look in unit.beyond:
        forward = unit.stats.forwards.get(look.place)
        if forward is None:
            continue
        w = max(forward.w(least), 1e-300)
        width = spread(forward.num_values, num_looks=len(unit.looks))
        side: Side = "candidate" if w > 1 else "reference"
        blame = Blame(
            side, "forward", max(w, 1 / w), 1.0, thresholds.truth_systematic * width * unit.widened,
            forward.result, "others", look.place,
        )  # fmt: skip
        if blame.limit_usage > 1:
            far[look.place] = blame
    return far


def _confirmed(unit: Unit, answers: list[Blame], thresholds: Thresholds) -> Blame | None:
    """The sides differ by more than the siblings', over all or in one forward: one of them must be
    the farther off there, too."""
    answer = next((answer for answer in answers if answer.why == unit.why), None)
    if unit.why not in ("typical", "forward") or answer is None:
        return None
    if answer.value / answer.control < thresholds.truth_confirm:
        return None
    return replace(answer, limit=thresholds.truth_confirm)


def _blame_family(family: list[Unit], thresholds: Thresholds) -> None:
    """All of one kind: their own median W, which no comparison among them would show."""
    if len(family) < 3:
        return
    family_stats = _stats_of(family)
    least = least_of(family_stats, thresholds)
    ratios = [stats.w(least) for stats in family_stats]
    middle = statistics.median(ratios)
    limit = thresholds.truth_systematic
    if max(middle, 1 / middle) <= limit * max(unit.widened for unit in family):
        return
    side: Side = "candidate" if middle > 1 else "reference"
    for unit, ratio in zip(family, ratios, strict=True):
        value = ratio if middle > 1 else 1 / ratio
        if value > limit / thresholds.truth_confirm:
            unit.blame = Blame(side, "typical", value, 1.0, limit, unit.results[0], "all")
            unit.why = "typical"
            unit.limit_usage = max(unit.limit_usage, value / limit)
            assert unit.stats is not None
            for look in unit.looks:  # beside its siblings, which are as wrong, it shows nothing
                forward = unit.stats.forwards.get(look.place)
                if forward is not None:
                    own = forward.w(least) if middle > 1 else 1 / max(forward.w(least), 1e-300)
                    look.usage = max(look.usage, own / limit)


def _blame_forwards(family: list[Unit], thresholds: Thresholds) -> None:
    """One forward in all of one kind: their median W there, beside that of the others."""
    if len(family) < 3:
        return
    family_stats = _stats_of(family)
    least = least_of(family_stats, thresholds)
    places = [place for place in family_stats[0].forwards
              if all(place in s.forwards for s in family_stats)]  # fmt: skip
    if len(places) < 2:
        return
    middle = {at: statistics.median(s.forwards[at].w(least) for s in family_stats) for at in places}
    widened = max(unit.widened for unit in family)
    for place in places:
        others = statistics.median(middle[other] for other in places if other != place)
        usual = lone_control(middle[place], others)  # others excuse; they may be what is wrong
        over = middle[place] / max(usual, 1e-300)
        there = [s.forwards[place] for s in family_stats]
        few = sum(forward.num_rows for forward in there) < FEW_ROWS
        if few and any(one_step(forward.result) for forward in there):
            continue
        width = spread(sum(forward.num_values for forward in there), num_looks=len(places))
        limit = (thresholds.truth_token if few else thresholds.truth_systematic) * width * widened
        excused = (over > 1) != (middle[place] > 1)  # the others are farther off
        if excused or max(over, 1 / max(over, 1e-300)) <= limit:
            continue
        side: Side = "candidate" if over > 1 else "reference"
        for unit, stats in zip(family, family_stats, strict=True):
            own = stats.forwards[place].w(least) / max(usual, 1e-300)
            value = own if over > 1 else 1 / max(own, 1e-300)
            if value <= limit / thresholds.truth_confirm or unit.why == "typical":
                continue
            at = stats.forwards[place].result
            unit.blame = Blame(side, "forward", value, 1.0, limit, at, "all", place)
            unit.why = "forward"
            unit.limit_usage = max(unit.limit_usage, value / limit)
            for look in unit.looks:
                if look.place == place:
                    look.usage = max(look.usage, value / limit, 1.0 + 1e-9)


def _block_w(units: list[Unit], thresholds: Thresholds) -> dict[str, float]:
    """By phase, the median W of the blocks' outputs."""
    ratios: list[tuple[str, float]] = []
    for phase in PHASES:
        blocks = _stats_of(unit for unit in block_outputs(units) if unit.phase == phase)
        least = least_of(blocks, thresholds)
        ratios += [(phase, stats.w(least)) for stats in blocks]
    return medians(ratios)


def _block_forwards(
    units: list[Unit], phase: str, thresholds: Thresholds
) -> dict[PromptStep, float]:
    """The same for each forward."""
    blocks = _stats_of(unit for unit in block_outputs(units) if unit.phase == phase)
    least = least_of(blocks, thresholds)
    return medians((at, f.w(least)) for stats in blocks for at, f in stats.forwards.items())

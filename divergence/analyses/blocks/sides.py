"""The side that a truth blames, and which of its forwards, tokens or channels show it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from divergence.analyses.blocks.units import (
    FEW_ROWS,
    TABLES,
    Blame,
    Controls,
    Unit,
    Why,
    block_outputs,
    controls,
    families_of,
    medians,
    one_step,
)
from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.measure.truth import (
    LEAST_LONE,
    SIDES,
    SamplesBySite,
    TruthStats,
    stats_of,
)
from divergence.numerics.floor import ALLOWED, Thresholds, normal_deviate, spread
from divergence.run.site import PHASES
from divergence.words import Side

if TYPE_CHECKING:
    from collections.abc import Sequence


# Blame: which side is farther from the truth than correct rounding explains.
#
# For every site W = err(b, R) / err(a, R) is held against the median W of its siblings, the
# same place in the other blocks of its kind. That is a difference of differences: what makes
# a block hard (sharp attention, large activations) troubles both sides alike and cancels in
# W; what makes one side's kernels coarser troubles all blocks alike and cancels in the
# comparison with the siblings. Left is what happened to one side in one block.
#
# Beside the typical token, five narrower questions: one forward of one prompt, its W over its
# siblings' there, held against the largest that a sibling shows among as many (blocks.looks); and
# one side's error over the other's at one token, one sink token, one channel, and a consistent
# scale error (the gain), which averages rounding away.
#
# A family's W itself beyond ``truth_systematic`` blames a side for all of it, in one forward as
# over all.

_LEAST_FAMILY = 0.05


_Floats = npt.NDArray[np.float64]


def questions(
    mine: TruthStats,
    siblings: list[TruthStats],
    *,
    lone_w: float | None,
    forwards: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> list[Blame]:
    """Every question's answer, the plainest question first.

    ``siblings``: at least two, or none count; the median is taken over them and this one, so that
    one bad block among three moves nobody's control. ``lone_w``: the W of all blocks, for a site
    without them. ``forwards``: the controls of this one's forwards. ``routed``: one token may go to
    another expert by rounding. ``widened``: what trusted runs have shown, as a factor >= 1.
    """
    family = [mine, *siblings] if len(siblings) >= 2 else []
    assert mine.first is not None
    blames = [_typical(mine, family, lone_w, widened, thresholds)]
    if TABLES not in mine.kind.lower():
        limit = thresholds.typical * spread(mine.num_values) * widened
        blames.append(Blame("both", "both", min(mine.typical.values()), 1.0, limit, mine.first))
    blames += _forward(mine, family, forwards, routed, widened, thresholds)
    asked: tuple[tuple[Why, float, int], ...] = (
        ("channel", thresholds.truth_channel, mine.num_rows),
        ("token", thresholds.truth_token, mine.num_columns),
        ("sink", thresholds.truth_token, mine.num_columns),
    )
    for why, room, count in asked:
        # one forward's only row is no outlier among its like: a rerouted token fills the channels
        few = ("token", "sink", "channel") if mine.first.step else ("token", "sink")
        if not (routed and why in few):
            blames += _excess(mine, family[1:], why, room * widened, spread(count))
    return blames + _gain(mine, family, thresholds, widened)


def _typical(
    mine: TruthStats,
    family: list[TruthStats],
    lone_w: float | None,
    widened: float,
    thresholds: Thresholds,
) -> Blame:
    least = least_of(family, thresholds)
    w = mine.w(least)
    if family:
        control = statistics.median(o.w(least) for o in family)
    else:
        control = lone_control(w, lone_w or 1.0)
    room = thresholds.truth_sibling if family else thresholds.truth_lone
    limit = room * spread(mine.num_values) * widened
    assert mine.first is not None
    if not _stands_out(w, control, room):
        return Blame("candidate", "typical", 1.0, 1.0, limit, mine.first)
    if w >= control:
        return Blame("candidate", "typical", w, control, limit, mine.first)
    return Blame(
        "reference", "typical", 1 / max(w, 1e-300), 1 / max(control, 1e-300), limit, mine.first
    )


def _stands_out(w: float, control: float, room: float) -> bool:
    """Has one side the larger error, and more so than its control? A side is convicted by its own
    error: where it is not clearly the larger one, by the root of ``room``, it is to blame for
    nothing, however its siblings fare."""
    return max(w, 1 / max(w, 1e-300)) > math.sqrt(room) and (w > 1) == (w > control)


def lone_control(w: float, blocks: float) -> float:
    """Of a site without siblings, or of one forward of all siblings beside the others. The W of the
    ``blocks`` (or others) excuses it where the kernels of one side are coarser everywhere. It never
    blames it: the blocks may be what is wrong."""
    return max(blocks, 1.0) if w > 1 else min(blocks, 1.0)


def forward_controls(family: Sequence[TruthStats], thresholds: Thresholds) -> list[Controls]:
    """What a family shows for the forwards of each of its members."""
    least = least_of(family if len(family) >= 3 else [], thresholds)
    values = [{at: f.w(least) for at, f in stats.forwards.items()} for stats in family]
    return controls(values, _apart, own=True)


def usages(
    mine: TruthStats,
    family: list[TruthStats],
    held: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> dict[PromptStep, tuple[float, float, float]]:
    """By forward: (W over its control, the control, the limit of either direction). Nothing where
    there is but one forward, which is judged as a whole."""
    if len(mine.forwards) < 2:
        return {}
    least = least_of(family, thresholds)
    room = thresholds.truth_sibling if family else thresholds.truth_lone
    by_place: dict[PromptStep, tuple[float, float, float]] = {}
    for place, forward in mine.forwards.items():
        few = forward.num_rows < FEW_ROWS
        if place not in held.at or (few and (routed or one_step(forward.result))):
            continue
        width = spread(forward.num_values, num_looks=len(mine.forwards))
        limit = max(room * width, thresholds.truth_forward * held.largest) * widened
        w = forward.w(least)
        control = max(held.at[place] if family else lone_control(w, held.at[place]), 1e-300)
        excess = w / control if _stands_out(w, control, room) else 1.0
        by_place[place] = excess, control, limit
    return by_place


def _apart(value: _Floats, control: _Floats) -> _Floats:
    """How far a W is from its control, in either direction."""
    over: _Floats = np.maximum(value, 1e-300) / np.maximum(control, 1e-300)
    return np.maximum(over, 1 / over)


def _forward(
    mine: TruthStats,
    family: list[TruthStats],
    held: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> list[Blame]:
    """The forward that stands out most."""
    by_place = usages(mine, family, held, routed, widened, thresholds)
    if not by_place:
        return []
    place = max(by_place, key=lambda at: max(by_place[at][0], 1 / max(by_place[at][0], 1e-300))
                / by_place[at][2])  # fmt: skip
    excess, control, limit = by_place[place]
    at = mine.forwards[place].result
    if excess >= 1:
        return [Blame("candidate", "forward", excess * control, control, limit, at, place=place)]
    value, control = 1 / max(excess * control, 1e-300), 1 / max(control, 1e-300)
    return [Blame("reference", "forward", value, control, limit, at, place=place)]


def least_of(family: Sequence[TruthStats], thresholds: Thresholds) -> float:
    """Added to both errors, in floor units: two tiny errors make no large ratio."""
    if not family:
        return LEAST_LONE
    usual = statistics.median(math.sqrt(math.prod(o.typical.values())) for o in family)
    return max(_LEAST_FAMILY, thresholds.truth_least * usual)


def _excess(
    mine: TruthStats, siblings: list[TruthStats], why: Why, limit: float, chance: float
) -> list[Blame]:
    """``chance``: what few numbers do by themselves; the siblings' own excess shows it as well.
    Siblings excuse nothing beyond the largest threshold that there may be: what is wrong in all of
    them at one token is no rounding."""
    blames: list[Blame] = []
    for side, (value, at) in mine.peak.get(why, {}).items():
        others = [o.peak[why][side][0] for o in siblings if side in o.peak.get(why, {})]
        usual = min(statistics.median(others), ALLOWED[1] / limit) if others else 0.0
        control = max(chance, usual)
        blames.append(Blame(side, why, value, control, limit, at))
    return sorted(blames, key=lambda blame: -blame.limit_usage)[:1]


def _gain(
    mine: TruthStats, family: list[TruthStats], thresholds: Thresholds, widened: float
) -> list[Blame]:
    """A scale error that stands out among the siblings'."""
    blames: list[Blame] = []
    for number, own in enumerate(mine.gains):
        others = [o.gains[number] for o in family if len(o.gains) > number]
        if len(others) < 3:
            continue
        usual = statistics.median(o["difference"] for o in others)
        width = 1.4826 * statistics.median(abs(o["difference"] - usual) for o in others)
        common = own["common"] * statistics.median(max(o.typical.values()) for o in family)
        sigma = math.hypot(own["error"], width, common)
        if not 0 < sigma < math.inf:
            continue
        # siblings that are off make no healthy one odd
        apart = min(abs(own["difference"] - usual), abs(own["difference"]))
        deviations = normal_deviate(apart / sigma, mine.num_rows - 1)
        off = {s: abs(own[s] - statistics.median(o[s] for o in others)) for s in SIDES}
        side: Side = max(SIDES, key=lambda s: off[s])
        assert mine.first is not None
        blames.append(
            Blame(side, "gain", deviations, 1.0, thresholds.truth_gain * widened, mine.first,
                  scaled=("output", "update")[number], factor=1 + own[side])
        )  # fmt: skip
    return sorted(blames, key=lambda blame: -blame.limit_usage)[:1]


# Sides: which side of a unit is wrong, by the truth.
#
# Each side's own error is held against the siblings' (blocks.blame). A difference of the two sides
# counts only where one of them is the farther from what is right: two equally good answers may
# differ. What all of a kind shares no comparison among them would show: their own median is held
# against its limit, over all forwards and in each.

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

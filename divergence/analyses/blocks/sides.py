"""The side that a truth blames, and which of its forwards, tokens or channels show it."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from divergence.analyses.blocks.units import (
    FEW_ROWS,
    TABLES,
    Blame,
    Controls,
    Unit,
    Why,
    block_outputs,
    families_of,
    medians,
    one_step,
)
from divergence.comparison.align.pieces import PromptStep
from divergence.comparison.judge import JudgedTable, Level, common, limit_of, observed, outliers
from divergence.comparison.measure.truth import (
    LEAST_LONE,
    SIDES,
    RowErrors,
    SamplesBySite,
    TruthStats,
    stats_of,
)
from divergence.numerics.floor import ALLOWED, Thresholds, spread
from divergence.run.site import PHASES
from divergence.words import Side

if TYPE_CHECKING:
    from divergence.comparison.judge import Floats
    from divergence.comparison.results import SiteResult


# Blame: which side is farther from the truth than correct rounding explains.
#
# For every site W = err(b, R) / err(a, R) is held against the W of its siblings, the same place in
# the other blocks of its kind. That is a difference of differences: what makes a block hard (sharp
# attention, large activations) troubles both sides alike and cancels in W; what makes one side's
# kernels coarser troubles all blocks alike and cancels in the comparison with the siblings. Left is
# what happened to one side in one block. The judge (comparison.judge) asks it of all rows together,
# of each forward of each prompt, and of each row; and of the forwards and rows that all blocks
# share.
#
# Beside it, of one channel, and of a consistent scale error (the gain, judged alike), which
# averages rounding away.
# A site without siblings is held against the W of all blocks.
#
# A family's W itself beyond ``truth_systematic`` blames a side for all of it.

_LEAST_FAMILY = 0.05


@dataclass(frozen=True, slots=True)
class JudgedGains:
    """The scale errors of one kind: ``table`` (M, K), of all rows (K = 1) or of each forward."""

    of: Literal["output", "update"]
    table: JudgedTable
    limit: float
    """The deviate of an outlier."""
    places: list[PromptStep | None]
    sides: Floats
    """(2, M, K): each side's own."""


@dataclass(frozen=True, slots=True)
class JudgedFamily:
    """The sites of one kind, judged together; the places and rows are those that all of them have.

    ``rows``: None where a row may be elsewhere by rounding (experts), and where each forward has
    but one.
    """

    stats: list[TruthStats]
    least: float
    sites: JudgedTable
    typical: Sequence[float]
    """Of each member the median row's x."""
    places: list[PromptStep]
    forwards: JudgedTable | None
    rows: JudgedTable | None
    errors: RowErrors
    """Of the first member."""
    is_few: Sequence[bool]
    """Has the forward of a place few rows, of which nothing is to be told?"""
    gains: list[JudgedGains]


def judge_family(
    stats: Sequence[TruthStats], limits: Mapping[Level, float], routed: bool, thresholds: Thresholds
) -> JudgedFamily:
    """``limits``: by level, the deviate of an outlier. ``routed``: one token may go to another
    expert by rounding."""
    family, least = list(stats), least_of(stats, thresholds)
    errors = [member.rows for member in stats if member.rows is not None]
    keys = functools.reduce(np.intersect1d, [each.key for each in errors])
    together = [each.only(keys) for each in errors]
    energy = np.stack([each.energy for each in together], axis=1)
    numbers = np.stack([each.numbers for each in together], axis=1)

    def whole(typical: bool) -> tuple[Floats, Floats]:
        by_member = [
            observed(
                each.energy, each.numbers, least, np.zeros(len(each.key), np.intp), typical=typical
            )
            for each in errors
        ]
        return np.stack([x for x, _ in by_member]), np.stack([own for _, own in by_member])

    sites = outliers(*whole(routed), thresholds.site_spread, limits["site"])
    typical = whole(True)[0][:, 0].tolist()
    first = together[0]
    held, place = np.unique(first.place, return_inverse=True)
    places, results = ([each[n] for n in held] for each in (first.places, first.results))
    counts = np.bincount(place, minlength=len(places))
    few = [
        bool(count < FEW_ROWS)
        and (routed or any(one_step(of_place(member, at)) for member in family))
        for count, at in zip(counts, places, strict=True)
    ]
    forwards = rows = None
    if len(places) > 1:
        by_place = observed(energy, numbers, least, place, typical=routed)
        forwards = outliers(*by_place, thresholds.forward_spread, limits["forward"])
    if not routed and (counts > 1).any():
        rows = outliers(*observed(energy, numbers, least), thresholds.row_spread, limits["row"])
    return JudgedFamily(
        family,
        least,
        sites,
        typical,
        places,
        forwards,
        rows,
        replace(first, place=place, places=places, results=results),
        few,
        list(_judge_gains(family, limits)),
    )


def of_place(stats: TruthStats, place: PromptStep) -> SiteResult:
    """The result of that forward."""
    return stats.forwards[place].result


def questions(
    mine: TruthStats,
    siblings: list[TruthStats],
    *,
    judged: JudgedFamily | None,
    lone_w: float | None,
    forwards: Controls,
    routed: bool,
    widened: float,
    thresholds: Thresholds,
) -> list[Blame]:
    """Every question's answer, the plainest question first.

    ``judged``: the family of ``mine``, where it has one. ``lone_w``: the W of all blocks, for a
    site without siblings, and ``forwards`` that of its forwards. ``routed``: one token may go to
    another expert by rounding. ``widened``: what trusted runs have shown, as a factor >= 1.
    """
    assert mine.first is not None
    if judged is None:
        blames = [_lone(mine, lone_w, widened, thresholds)]
    else:
        member = next(n for n, stats in enumerate(judged.stats) if stats is mine)
        blames = [_blame_of(judged.sites, member, 0, "typical", mine.first, widened)]
    if TABLES not in mine.kind.lower():
        limit = thresholds.typical * spread(mine.num_values) * widened
        blames.append(Blame("both", "both", min(mine.typical.values()), 1.0, limit, mine.first))
    if judged is None:
        blames += _lone_forward(mine, forwards, routed, widened, thresholds)
    else:
        answers = forwards_of(judged, member, widened)
        blames += sorted(answers.values(), key=lambda blame: -blame.limit_usage)[:1]
        blames += _rows_of(judged, member, widened)
    asked: tuple[tuple[Why, float, int], ...] = (
        ("channel", thresholds.truth_channel, mine.num_rows),
        ("token", thresholds.truth_token, mine.num_columns),
        ("sink", thresholds.truth_token, mine.num_columns),
    )
    for why, room, count in asked if judged is None else asked[:1]:
        # one forward's only row is no outlier among its like: a rerouted token fills the channels
        few = ("token", "sink", "channel") if mine.first.step else ("token", "sink")
        if not (routed and why in few):
            blames += _excess(
                mine, siblings if len(siblings) >= 2 else [], why, room * widened, spread(count)
            )
    if judged is None:
        return blames
    return _narrowed([*blames, *_gains_of(judged, member, widened)], judged, member, thresholds)


def _narrowed(
    blames: list[Blame], judged: JudgedFamily, member: int, thresholds: Thresholds
) -> list[Blame]:
    """Without what holds of all rows together where something narrower explains it: a forward, a
    token or a channel where the median row is off by less than half as much, or a scale error where
    the whole is off by little more than rounding."""
    typical = blames[0]
    beyond = {blame.why for blame in blames[1:] if blame.limit_usage > 1}
    control = float(judged.sites.control[member, 0])
    whole, median = (abs(x - control) for x in (float(judged.sites.x[member, 0]),
                                                judged.typical[member]))  # fmt: skip
    narrower = median < whole / 2 and beyond & {"forward", "token", "sink", "channel"}
    slight = typical.value / typical.control < thresholds.truth_systematic and "gain" in beyond
    return blames[1:] if narrower or slight else blames


def _blame_of(
    table: JudgedTable, member: int, column: int, why: Why, at: SiteResult, widened: float,
    place: PromptStep | None = None,
) -> Blame:  # fmt: skip
    """A side is convicted by its own error: where it is not clearly the larger one, by half of what
    an outlier is apart, it is to blame for nothing, however its siblings fare."""
    x, control, reach = (
        float(each[member, column]) for each in (table.x, table.control, table.reach)
    )
    limit = math.exp(min(reach, 700.0)) * widened
    if not (abs(x) > reach / 2 and (x > 0) == (x > control)):
        return Blame("candidate", why, 1.0, 1.0, limit, at, place=place)
    side: Side = "candidate" if x > 0 else "reference"
    sign = 1 if x > 0 else -1
    value, usual = math.exp(min(sign * x, 700.0)), math.exp(sign * control)
    return Blame(side, why, value, usual, limit, at, place=place)


def forwards_of(judged: JudgedFamily, member: int, widened: float) -> dict[PromptStep, Blame]:
    """By forward, what the judge says of it; nothing where there is but one."""
    if judged.forwards is None:
        return {}
    return {
        place: _blame_of(
            judged.forwards, member, column, "forward", of_place(judged.stats[member], place),
            widened, place,
        )
        for column, place in enumerate(judged.places)
        if not judged.is_few[column]
    }  # fmt: skip


def _rows_of(judged: JudgedFamily, member: int, widened: float) -> list[Blame]:
    """The row that stands out most."""
    if judged.rows is None:
        return []
    x, control, reach = (
        each[member] for each in (judged.rows.x, judged.rows.control, judged.rows.reach)
    )
    own = (np.abs(x) > reach / 2) & ((x > 0) == (x > control))
    with np.errstate(invalid="ignore"):
        usage = np.where(own, np.abs(x - control) / reach, 0.0)
    top = int(np.nan_to_num(usage).argmax())
    why: Why = "sink" if judged.errors.sink[top] else "token"
    at = of_place(judged.stats[member], judged.places[int(judged.errors.place[top])])
    return [_blame_of(judged.rows, member, top, why, at, widened)]


def shared_by_all(judged: JudgedFamily, widened: float) -> Iterator[list[Blame | None]]:
    """For each forward, then each row, that stands out beside the others in what all members have
    in common: of each member its blame, None where it is not off there itself."""
    tables: tuple[tuple[Why, JudgedTable | None], ...] = (
        ("forward", judged.forwards),
        ("token", judged.rows),
    )
    for why, table in tables:
        if table is None:
            continue
        reach = table.column_reach + math.log(widened)
        # the others excuse; they may be what is wrong
        own = (table.usual + table.column > 0) == (table.column > 0)
        for column in np.flatnonzero((np.abs(table.column) > reach) & own).tolist():
            number = column if why == "forward" else int(judged.errors.place[column])
            if why == "forward" and judged.is_few[column]:
                continue
            sign = 1 if table.column[column] > 0 else -1
            side: Side = "candidate" if sign > 0 else "reference"
            limit = math.exp(min(float(reach[column]), 700.0))
            excesses = sign * table.x[:, column] - max(0.0, sign * table.usual)
            blames: list[Blame | None] = []
            for stats, excess in zip(judged.stats, excesses.tolist(), strict=True):
                place, value = judged.places[number], math.exp(min(excess, 700.0))
                at = of_place(stats, place)
                blame = Blame(side, why, value, 1.0, limit, at, "all", place)
                blames.append(blame if excess > reach[column] / 2 else None)
            yield blames


def _lone(mine: TruthStats, lone_w: float | None, widened: float, thresholds: Thresholds) -> Blame:
    """Of a site without siblings."""
    w = mine.w(LEAST_LONE)
    control, room = lone_control(w, lone_w or 1.0), thresholds.truth_lone
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
    """Has one side the larger error, and more so than its control?"""
    return max(w, 1 / max(w, 1e-300)) > math.sqrt(room) and (w > 1) == (w > control)


def lone_control(w: float, blocks: float) -> float:
    """Of a site without siblings, or of one forward of all siblings beside the others. The W of the
    ``blocks`` (or others) excuses it where the kernels of one side are coarser everywhere. It never
    blames it: the blocks may be what is wrong."""
    return max(blocks, 1.0) if w > 1 else min(blocks, 1.0)


def lone_usages(
    mine: TruthStats, held: Controls, routed: bool, widened: float, thresholds: Thresholds
) -> dict[PromptStep, tuple[float, float, float]]:
    """Of a site without siblings, by forward: (W over its control, the control, the limit of either
    direction). Nothing where there is but one forward, which is judged as a whole."""
    if len(mine.forwards) < 2:
        return {}
    room = thresholds.truth_lone
    by_place: dict[PromptStep, tuple[float, float, float]] = {}
    for place, forward in mine.forwards.items():
        few = forward.num_rows < FEW_ROWS
        if place not in held.at or (few and (routed or one_step(forward.result))):
            continue
        limit = room * spread(forward.num_values, num_looks=len(mine.forwards)) * widened
        w = forward.w(LEAST_LONE)
        control = max(lone_control(w, held.at[place]), 1e-300)
        by_place[place] = w / control if _stands_out(w, control, room) else 1.0, control, limit
    return by_place


def _lone_forward(
    mine: TruthStats, held: Controls, routed: bool, widened: float, thresholds: Thresholds
) -> list[Blame]:
    """The forward that stands out most."""
    by_place = lone_usages(mine, held, routed, widened, thresholds)
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


def _judge_gains(
    family: Sequence[TruthStats], limits: Mapping[Level, float]
) -> Iterator[JudgedGains]:
    """Scale errors of the output, and of what a block adds: of all rows, then of each forward.

    Of all rows together a few dominant channels may be rounded the same way at every token, which
    the rows' own spread does not show; in one forward beside the others of its block that cancels.
    """
    typical = statistics.median(max(each.typical.values()) for each in family)
    levels: tuple[Level, ...] = ("site", "forward")
    scaled: tuple[Literal["output", "update"], ...] = ("output", "update")
    for number, of in enumerate(scaled):
        known = [each for each in family if len(each.gains) > number]
        if len(known) < 3:
            continue
        places = sorted({place for each in known for place in each.gains_at})
        for level in levels[: 2 if len(places) > 1 else 1]:
            columns: list[PromptStep | None] = [None] if level == "site" else [*places]
            values = np.full((4, len(family), len(columns)), math.nan)
            for member, each in enumerate(family):
                for column, place in enumerate(columns):
                    found = each.gains if place is None else each.gains_at.get(place, ())
                    if len(found) > number:
                        gain = found[number]
                        common = gain["common"] * typical if place is None else 0.0
                        values[:, member, column] = (
                            gain["reference"], gain["candidate"], gain["error"], common
                        )  # fmt: skip
            sides, (error, common) = values[:2], values[2:]
            if np.isnan(error).all():
                continue
            # of few rows a small error may be chance
            own = np.square(np.maximum(error, np.nanmedian(error))) + np.square(common)
            table = outliers(sides[1] - sides[0], own, 0.0, limits[level], linear=True)
            yield JudgedGains(of, table, limits[level], columns, sides)


def _gains_of(judged: JudgedFamily, member: int, widened: float) -> list[Blame]:
    """The scale error that stands out most."""
    mine = judged.stats[member]
    assert mine.first is not None
    blames: list[Blame] = []
    for gains in judged.gains:
        table = gains.table
        # siblings that are off make no healthy one odd
        apart = np.fmin(np.abs(table.x[member] - table.control[member]), np.abs(table.x[member]))
        with np.errstate(all="ignore"):
            usage = np.nan_to_num(apart / table.reach[member], posinf=0.0)
        column = int(usage.argmax())
        if usage[column] == 0:
            continue
        place = gains.places[column]
        own = gains.sides[:, member, column]
        usual = np.nanmedian(gains.sides[:, :, column], axis=1)
        number = int(np.abs(own - usual).argmax())
        at = mine.first if place is None else of_place(mine, place)
        blames.append(
            Blame(SIDES[number], "gain", float(usage[column]) * gains.limit, 1.0,
                  gains.limit * widened, at, place=place, scaled=gains.of,
                  factor=1 + float(own[number]))
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
    families = families_of(judged)
    limits = _limits(families)
    excused: list[Unit] = []
    for family in families:
        forwards = Controls(at_blocks[family[0].phase], 1.0)
        is_routed = any(unit.results[0].block in routed for unit in family)
        together = None
        if len(family) >= 3:
            together = judge_family(_stats_of(family), limits, is_routed, thresholds)
        for number, unit in enumerate(family):
            others = _stats_of(other for other in family if other is not unit)
            assert unit.stats is not None
            answers = questions(
                unit.stats, others, judged=together, lone_w=block_w.get(unit.phase),
                forwards=forwards, routed=is_routed, widened=unit.widened, thresholds=thresholds,
            )  # fmt: skip
            far = _far_forwards(unit, others, thresholds)
            answers += far.values()
            answers.sort(key=lambda answer: answer.why not in _WHOLE)
            suspected = {look.place for look in unit.beyond}
            usage = _usage_by_forward(unit, number, together, forwards, is_routed, thresholds)
            usage |= {at: max(blame.limit_usage, usage.get(at, 0.0)) for at, blame in far.items()}
            for look in unit.looks:
                look.usage = usage.get(look.place, look.usage)
            unit.limit_usage = max((answer.limit_usage for answer in answers), default=0.0)
            unit.blame = next((answer for answer in answers if answer.limit_usage > 1), None)
            if unit.blame is None and unit.why is not None:
                beside = _beside_truth(unit, is_routed) or _beside_floor(unit, suspected)
                if beside is not None:  # no truth, so no side
                    unit.why, unit.limit_usage = beside, max(unit.limit_usage, unit.between)
                    continue
                excused.append(unit)
            unit.why = None if unit.blame is None else unit.blame.why
            if unit.blame is not None and unit.blame.why == "gain" and unit.blame.place is not None:
                unit.why = "forward"
                for look in unit.looks:
                    if look.place == unit.blame.place:
                        look.usage = max(look.usage, unit.blame.limit_usage)
            if unit.why is None:
                for look in unit.looks:
                    look.usage = min(look.usage, 1.0)
        _blame_family(family, thresholds)
        if together is not None and not is_routed:
            _blame_columns(family, together)
    return excused


def _stats_of(units: Iterable[Unit]) -> list[TruthStats]:
    """Of units that were judged against the truth: each has them."""
    return [unit.stats for unit in units if unit.stats is not None]


def _beside_truth(unit: Unit, routed: bool) -> Why | None:
    """By which limit a unit is beyond rounding in forwards that the truth does not hold: it excuses
    nothing there."""
    rest = [result for result in unit.results if result.truth is None and result.ratio is not None]
    if not rest:
        return None
    if statistics.median(result.ratio or 0.0 for result in rest) > unit.limit:
        return "typical"
    if any(look.result.truth is None for look in unit.beyond):
        return "forward"
    if routed:
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
            unit.stats, [], judged=None, lone_w=None, forwards=Controls({}, 1.0), routed=False,
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


def _usage_by_forward(
    unit: Unit, number: int, together: JudgedFamily | None, forwards: Controls, routed: bool,
    thresholds: Thresholds,
) -> dict[PromptStep, float]:  # fmt: skip
    """How much of its limit each forward of what the truth judges uses. ``number``: of the unit in
    its family."""
    assert unit.stats is not None
    if together is not None:
        judged = forwards_of(together, number, unit.widened)
        return {place: blame.limit_usage for place, blame in judged.items()}
    by_place = lone_usages(unit.stats, forwards, routed, unit.widened, thresholds)
    return {
        place: max(excess, 1 / max(excess, 1e-300)) / limit
        for place, (excess, _, limit) in by_place.items()
    }


def _limits(families: Sequence[Sequence[Unit]]) -> dict[Level, float]:
    """By level, the deviate of an outlier among all that are looked at."""
    counts: dict[Level, int] = {"site": 0, "forward": 0, "row": 0}
    for stats in (stats for family in families if len(family) >= 3 for stats in _stats_of(family)):
        counts["site"] += 1
        counts["forward"] += len(stats.forwards)
        counts["row"] += stats.num_rows
    return {level: limit_of(count) for level, count in counts.items()}


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


@dataclass(frozen=True, slots=True)
class Farther:
    """``side`` is ``times`` as far from the truth as the other in all of a kind, by their median;
    ``least``: what is added to both errors."""

    side: Side
    times: float
    least: float


def farther_side(family: Sequence[Unit], thresholds: Thresholds) -> Farther | None:
    """The side that is farther from the truth in all of a kind, by more than other kernels and
    chance make; None where there is none, or not all were judged."""
    family_stats = _stats_of(family)
    if len(family_stats) < max(3, len(family)):
        return None
    least = least_of(family_stats, thresholds)
    middle = statistics.median(stats.w(least) for stats in family_stats)
    times = max(middle, 1 / max(middle, 1e-300))
    rows = [stats.rows for stats in family_stats if stats.rows is not None]
    chance = common([(each.energy, each.numbers) for each in rows], least)
    limit = thresholds.truth_standout * math.exp(min(chance, 50.0))
    if times <= limit * max(unit.widened for unit in family):
        return None
    return Farther("candidate" if middle > 1 else "reference", times, least)


def _blame_columns(family: list[Unit], together: JudgedFamily) -> None:
    """What all of one kind have in common in one forward, then in one row, blames those of them
    that are not blamed for more."""
    widened = max(unit.widened for unit in family)
    for shared in shared_by_all(together, widened):
        for unit, blame in zip(family, shared, strict=True):
            if unit.why is not None or blame is None:
                continue
            unit.blame, unit.why = blame, blame.why
            unit.limit_usage = max(unit.limit_usage, blame.limit_usage, 1.0 + 1e-9)
            for look in unit.looks:
                if look.place == blame.place:
                    look.usage = max(look.usage, unit.limit_usage)


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

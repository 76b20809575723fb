"""The side that a truth blames, and which of its forwards, tokens or channels show it."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from divergence.analyses.blocks.units import (
    FEW_ROWS,
    SURE,
    TABLES,
    Blame,
    JudgedFamily,
    JudgedGains,
    Unit,
    Why,
    block_outputs,
    families_of,
    log_ratio,
    medians,
    narrowed,
    one_step,
)
from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.judge import (
    JudgedTable,
    Level,
    limit_of,
    observed,
    outliers,
    reach_of_median,
)
from divergence.comparison.measure.truth import (
    LEAST_LONE,
    SIDES,
    RowErrors,
    SamplesBySite,
    TruthStats,
    stats_of,
)
from divergence.numerics.floor import Thresholds, spread
from divergence.numerics.formats import format_named
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
# A site without siblings is held against the W of all blocks, where that excuses it: kernels of one
# side that are coarser everywhere are. It never blames it: the blocks may be what is wrong.
#
# A family's W itself beyond ``truth_systematic`` blames a side for all of it.

_LEAST_FAMILY = 0.05
_LEAST_HARD = 0.1
"""By how much, in log, the errors of both sides vary from block to block at least."""
_SHARED = 0.5
"""Of the rounding that all rows of a block may share: how much differs between its forwards."""

ByForward = Mapping[PromptStep, float]
"""Of each forward the control."""


@dataclass(frozen=True, slots=True)
class BlocksBeside:
    """What a site without siblings is held against: the blocks' median log W, and that of each
    forward."""

    x: float = 0.0
    forwards: ByForward = field(default_factory=dict)


def judge_family(
    stats: Sequence[TruthStats],
    limits: Mapping[Level, float],
    routed: bool,
    thresholds: Thresholds,
    beside: BlocksBeside | None = None,
) -> JudgedFamily:
    """``limits``: by level, the deviate of an outlier. ``routed``: one token may go to another
    expert by rounding. ``beside``: of one site without siblings."""
    family, least = list(stats), least_of(stats if beside is None else (), thresholds)
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

    spreads = thresholds.site_spread, thresholds.forward_spread, thresholds.row_spread
    if beside is not None:
        spreads = (thresholds.lone_spread,) * 3
    typical, of_typical = whole(True)
    equal = np.array([[bool((each.energy[0] == each.energy[1]).all())] for each in errors])
    first = together[0]
    held, place = np.unique(first.place, return_inverse=True)
    places, results = ([each[n] for n in held] for each in (first.places, first.results))
    counts = np.bincount(place, minlength=len(places))
    few = [
        bool(count < FEW_ROWS)
        and (routed or any(one_step(of_place(member, at)) for member in family))
        for count, at in zip(counts, places, strict=True)
    ]

    def judged(level: Level, observations: tuple[Floats, Floats], usual: Floats) -> JudgedTable:
        """``usual`` (K,): of the blocks."""
        x, own = observations
        control = None if beside is None else _excused(x, usual)
        sigma = spreads[("site", "forward", "row").index(level)]
        return outliers(x, own, sigma, limits[level], control=control, kept=finer)

    finer, odds = None, np.full(len(family), np.inf)
    blocks = np.array([0.0 if beside is None else beside.x])
    x, own = whole(routed)  # sides that agree bit for bit are as far off as each other for certain
    sites, forwards, rows = judged("site", (x, np.where(equal, 0.0, own)), blocks), None, None
    if beside is None:
        odds = _odds_of_own(sites, errors, least, routed)
        finer = odds < -SURE
        sites = replace(sites, control=np.where(finer[:, None], sites.x, sites.control))
    if len(places) > 1:
        usual = blocks.repeat(len(places))
        if beside is not None:
            few = [few or at not in beside.forwards for few, at in zip(few, places, strict=True)]
            usual = np.array([beside.forwards.get(at, 0.0) for at in places])
        by_place = observed(energy, numbers, least, place, typical=routed)
        forwards = judged("forward", by_place, usual)
    if not routed and (counts > 1).any():
        rows = judged("row", observed(energy, numbers, least), typical[0])
    return JudgedFamily(
        family,
        least,
        sites,
        typical[:, 0].tolist(),
        statistics.median(log_ratio(each.typical, least) or 0.0 for each in family),
        reach_of_median(of_typical),
        places,
        forwards,
        rows,
        replace(first, place=place, places=places, results=results),
        few,
        _judge_channels(
            family, limits["channel"], None if beside is None else typical[0].tolist(), thresholds
        ),
        list(_judge_gains(family, limits)),
        odds.tolist(),
    )


def _odds_of_own(
    sites: JudgedTable, errors: Sequence[RowErrors], least: float, routed: bool
) -> npt.NDArray[np.float64]:
    """(M,): how much likelier, in log, it is that a member's farther side is farther off than in
    its siblings, than that the other side is nearer; inf where the sides are not apart.

    Errors are in floors, each side's beside the median of its siblings: a and b, in log, apart by
    d. What makes a block hard troubles both alike, with a deviation τ between siblings, which the
    nearer of a and b tells. If the farther side is off, their sum is d, else -d, with the variance
    4τ²: the odds are d (a + b) / 2τ². Below 0 only where the farther side's error is what it is in
    its siblings: where both are smaller, the block is an easy one."""
    middle = np.median if routed else np.mean
    levels = np.array([0.5 * np.log(middle(each.energy, axis=1) + least**2) for each in errors])
    beside = levels - np.median(levels, axis=0)
    off = (sites.x - sites.control)[:, 0]
    farther = np.where(off > 0, beside[:, SIDES.index("candidate")], beside[:, 0])
    tau = max(_LEAST_HARD, 1.4826 * float(np.median(np.abs(beside).min(axis=1))))
    odds = np.abs(off) * beside.sum(axis=1) / (2 * tau**2)
    odds = np.where(np.abs(farther) < 2 * tau, odds, np.maximum(odds, 0.0))
    return np.where(np.abs(off) > sites.reach[:, 0] / 2, odds, np.inf)


def _excused(x: Floats, usual: Floats) -> Floats:
    """What excuses a side whose error is the larger: that it is so elsewhere."""
    return np.where(x > 0, np.maximum(usual, 0.0), np.minimum(usual, 0.0))


def of_place(stats: TruthStats, place: PromptStep) -> SiteResult:
    return stats.forwards[place].result


def questions(
    judged: JudgedFamily, member: int, *, routed: bool, widened: float, thresholds: Thresholds
) -> list[Blame]:
    """Every question's answer of one member, the plainest question first.

    ``routed``: one token may go to another expert by rounding. ``widened``: what trusted runs have
    shown, as a factor >= 1.
    """
    mine = judged.stats[member]
    assert mine.first is not None
    blames = [_blame_of(judged.sites, member, 0, "typical", mine.first, widened)]
    if TABLES not in mine.kind.lower():
        limit = thresholds.typical * spread(mine.num_values) * widened
        blames.append(Blame("both", "both", min(mine.typical.values()), 1.0, limit, mine.first))
    answers = forwards_of(judged, member, widened)
    blames += sorted(answers.values(), key=lambda blame: -blame.limit_usage)[:1]
    blames += _rows_of(judged, member, widened)
    # one forward's only row is no outlier among its like: a rerouted token fills the channels
    if judged.channels is not None and not (routed and mine.first.step):
        channel = _farthest(judged.channels, member)
        blame = _blame_of(judged.channels, member, channel, "channel", mine.first, widened)
        blames.append(replace(blame, channel=channel))
    # the scale error that stands out most
    mine = judged.stats[member]
    assert mine.first is not None
    scaled: list[Blame] = []
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
        scaled.append(
            Blame(SIDES[number], "gain", float(usage[column]) * gains.limit, 1.0,
                  gains.limit * widened, at, place=place, scaled=gains.of,
                  factor=1 + float(own[number]))
        )  # fmt: skip
    blames += sorted(scaled, key=lambda blame: -blame.limit_usage)[:1]
    # what holds of all rows together goes where something narrower explains it: a forward, a token
    # or a channel where the median row is off by less than half as much, or a scale error where the
    # whole is off by little more than rounding
    typical = blames[0]
    beyond = {blame.why for blame in blames[1:] if blame.limit_usage > 1}
    control = float(judged.sites.control[member, 0])
    whole, median = (
        abs(x - control) for x in (float(judged.sites.x[member, 0]), judged.typical[member])
    )
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


def _farthest(table: JudgedTable, member: int) -> int:
    """The column in which a member uses most of its limit by an error of its own."""
    x, control, reach = (each[member] for each in (table.x, table.control, table.reach))
    own = (np.abs(x) > reach / 2) & ((x > 0) == (x > control))
    with np.errstate(invalid="ignore"):
        usage = np.where(own, np.abs(x - control) / reach, 0.0)
    return int(np.nan_to_num(usage).argmax())


def _rows_of(judged: JudgedFamily, member: int, widened: float) -> list[Blame]:
    if judged.rows is None:
        return []
    top = _farthest(judged.rows, member)
    why: Why = "sink" if judged.errors.sink[top] else "token"
    at = of_place(judged.stats[member], judged.places[int(judged.errors.place[top])])
    return [_blame_of(judged.rows, member, top, why, at, widened)]


def _tokens_used(judged: JudgedFamily, member: int, widened: float) -> dict[PromptStep, float]:
    """By forward, the largest share of a row's limit that a row uses there."""
    if judged.rows is None:
        return {}
    x, control, reach = (
        each[member] for each in (judged.rows.x, judged.rows.control, judged.rows.reach)
    )
    own = (np.abs(x) > reach / 2) & ((x > 0) == (x > control))
    with np.errstate(all="ignore"):
        beyond = np.exp(np.minimum(np.abs(x - control) - reach, 300.0)) / widened
    used = np.nan_to_num(np.where(own, beyond, 0.0))
    return {
        place: float(used[judged.errors.place == number].max(initial=0.0))
        for number, place in enumerate(judged.places)
    }


def _is_of_storing(stats: TruthStats, side: Side, channel: int, thresholds: Thresholds) -> bool:
    """Is a channel's error no more than storing makes, as of one that is large in all blocks?"""
    assert stats.first is not None and stats.channels is not None
    dtypes = stats.first.reference_dtype, stats.first.candidate_dtype
    roundoff = max(format_named(dtype).unit_roundoff for dtype in dtypes)
    stored = np.square(thresholds.truth_systematic * roundoff) * stats.channels.values[channel]
    return bool(stats.channels.energy[SIDES.index(side), channel] <= stored)


def shared_by_all(
    judged: JudgedFamily, widened: float, thresholds: Thresholds
) -> Iterator[list[Blame | None]]:
    """For each forward, then each row and each channel, that stands out beside the others in what
    all members have in common: of each member its blame, None where it is not off there itself."""
    tables: tuple[tuple[Why, JudgedTable | None], ...] = (
        ("forward", judged.forwards),
        ("token", judged.rows),
        ("channel", judged.channels),
    )
    for why, table in tables:
        if table is None:
            continue
        reach = table.column_reach + math.log(widened)
        # the others excuse; they may be what is wrong
        own = (table.usual + table.column > 0) == (table.column > 0)
        for column in np.flatnonzero((np.abs(table.column) > reach) & own).tolist():
            number = int(judged.errors.place[column]) if why == "token" else column
            if why == "forward" and judged.is_few[column]:
                continue
            sign = 1 if table.column[column] > 0 else -1
            side: Side = "candidate" if sign > 0 else "reference"
            limit = math.exp(min(float(reach[column]), 700.0))
            excesses = sign * table.x[:, column] - max(0.0, sign * table.usual)
            blames: list[Blame | None] = []
            for stats, excess in zip(judged.stats, excesses.tolist(), strict=True):
                value = math.exp(min(excess, 700.0))
                if why == "channel":
                    assert stats.first is not None
                    blame = Blame(side, why, value, 1.0, limit, stats.first, "all", channel=column)
                    if _is_of_storing(stats, side, column, thresholds):
                        excess = 0.0
                else:
                    place = judged.places[number]
                    at = of_place(stats, place)
                    blame = Blame(side, why, value, 1.0, limit, at, "all", place)
                blames.append(blame if excess > reach[column] / 2 else None)
            yield blames


# What would have been seen: the smallest error of a block that would be beyond its limit, by level.


def _visible_sizes(
    unit: Unit, judged: JudgedFamily, member: int, *, routed: bool
) -> dict[Level, float]:
    """With a truth: how large an error of B, beside the rounding that A has, too, would have to be
    for W to stand out. A site without siblings, and tables that were not made, say nothing."""
    stats = judged.stats[member]
    if stats.rows is None:
        return {}
    floor = stats.floor
    middle = np.median if routed else np.mean

    def size(table: JudgedTable, energy: Floats, least: float | Floats) -> Floats:
        control, reach = table.control[member], table.reach[member] + math.log(unit.widened)
        stands_out = np.maximum(control + reach, reach / 2)
        with np.errstate(all="ignore"):
            grown = np.exp(2 * np.minimum(stands_out, 300.0)) - np.exp(
                2 * np.minimum(control, 300.0)
            )
            size = np.sqrt((energy + np.square(least)) * grown)
            return np.where(stands_out < 300.0, size, math.inf)

    energy = stats.rows.only(judged.errors.key).energy[0]
    whole = np.array([middle(stats.rows.energy[0])])
    sizes: dict[Level, float] = {"site": floor * _middle(size(judged.sites, whole, judged.least))}
    if judged.forwards is not None:
        rows = [energy[judged.errors.place == number] for number in range(len(judged.places))]
        by_place = np.array([middle(each) for each in rows])
        asked = size(judged.forwards, by_place, judged.least)[~np.array(judged.is_few)]
        if len(asked):
            sizes["forward"] = floor * _middle(asked)
    if judged.rows is not None:
        sizes["row"] = floor * _middle(size(judged.rows, energy, judged.least))
    channels = stats.channels
    known = channels is not None and channels.total > 0 and not (routed and unit.results[0].step)
    if judged.channels is not None and channels is not None and known:
        sizes["channel"] = _middle(
            size(judged.channels, channels.energy[0], channels.least)
        ) / math.sqrt(channels.total)
    return narrowed(sizes)


def _middle(sizes: Floats) -> float:
    return float(np.nanmedian(sizes))


def least_of(family: Sequence[TruthStats], thresholds: Thresholds) -> float:
    """Added to both errors, in floor units: two tiny errors make no large ratio."""
    if not family:
        return LEAST_LONE
    usual = statistics.median(math.sqrt(math.prod(o.typical.values())) for o in family)
    return max(_LEAST_FAMILY, thresholds.truth_least * usual)


def _judge_channels(
    family: Sequence[TruthStats],
    limit: float,
    usual: Sequence[float] | None,
    thresholds: Thresholds,
) -> JudgedTable | None:
    """Each channel over all rows. ``usual``: log W that a site without siblings is held against."""
    channels = [each.channels for each in family if each.channels is not None]
    if len({each.energy.shape for each in channels}) != 1 or len(channels) < len(family):
        return None
    judged = [
        observed(each.energy, np.full(each.energy.shape, each.num_rows), each.least)
        for each in channels
    ]
    x, own = (np.stack(arrays) for arrays in zip(*judged, strict=True))
    control = None if usual is None else _excused(x, np.array(usual)[:, None])
    return outliers(x, own, thresholds.channel_spread, limit, control=control)


def _judge_gains(
    family: Sequence[TruthStats], limits: Mapping[Level, float]
) -> Iterator[JudgedGains]:
    """Scale errors of the output, and of what a block adds: of all rows, then of each forward.

    A few dominant channels may be rounded the same way at every token, which the rows' own spread
    does not show; in one forward beside the others of its block some of that cancels.
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
                    gains = each.gains if place is None else each.gains_at.get(place, ())
                    if len(gains) > number:
                        gain = gains[number]
                        common = gain["common"] * typical * (1.0 if place is None else _SHARED)
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


# Sides: which side of a unit is wrong, by the truth.
#
# Each side's own error is held against the siblings' (blocks.sides). A difference of the two sides
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
    # of a free pass a floor tells which side is wrong where the two differ by more than rounding:
    # it neither excuses a difference there nor finds another, since inputs were not equal
    free = [unit for unit in judged if unit.pass_ == "free"]
    limits = _limits([free])
    for unit in free:
        if unit.why is not None and unit.stats is not None and unit.results[0].block not in routed:
            alone = judge_family([unit.stats], limits, False, thresholds, BlocksBeside())
            answers = questions(alone, 0, routed=False, widened=unit.widened, thresholds=thresholds)
            unit.blame = next((answer for answer in answers if answer.limit_usage > 1), None)
    for unit in free:
        unit.stats = None  # what else is asked of them takes equal inputs
    judged = [unit for unit in judged if unit.pass_ != "free"]
    families = families_of(judged)
    limits = _limits(families)

    def judge_together(family: Sequence[Unit]) -> None:
        is_routed = any(unit.results[0].block in routed for unit in family)
        together = judge_family(_stats_of(family), limits, is_routed, thresholds)
        for number, unit in enumerate(family):
            unit.judged = together, number

    for family in families:
        if len(family) >= 3 and block_outputs(family):
            judge_together(family)
    # by pass and phase, the median W of the blocks, and of each forward
    sites: dict[tuple[str, str], list[float]] = {}
    forwards: dict[tuple[str, str], list[tuple[PromptStep, float]]] = {}
    for unit in block_outputs(judged):
        assert unit.stats is not None
        kind = unit.pass_, unit.phase
        least = LEAST_LONE if unit.judged is None else unit.judged[0].least
        sites.setdefault(kind, []).append(log_ratio(unit.stats.typical, least) or 0.0)
        by_place = {at: log_ratio(f.typical, least) for at, f in unit.stats.forwards.items()}
        forwards.setdefault(kind, []).extend((at, x) for at, x in by_place.items() if x is not None)
    blocks_beside = {
        kind: BlocksBeside(statistics.median(values), medians(forwards[kind]))
        for kind, values in sites.items()
        if len(values) >= 3
    }
    excused: list[Unit] = []
    for family in families:
        is_routed = any(unit.results[0].block in routed for unit in family)
        if len(family) >= 3 and family[0].judged is None:
            judge_together(family)
        for unit in family:
            assert unit.stats is not None
            if unit.judged is None:
                control = blocks_beside.get((unit.pass_, unit.phase), BlocksBeside())
                lone = judge_family([unit.stats], limits, is_routed, thresholds, control)
                unit.judged = lone, 0
            own, member = unit.judged
            if unit.results[0].role == "block":
                unit.visible = _visible_sizes(unit, own, member, routed=is_routed)
            answers = questions(
                own, member, routed=is_routed, widened=unit.widened, thresholds=thresholds
            )
            far = _far_forwards(unit, thresholds)
            answers += far.values()
            answers.sort(key=lambda answer: answer.why not in _WHOLE)
            suspected = {look.place for look in unit.beyond}
            shown = forwards_of(own, member, unit.widened)
            usage = {place: (blame.limit_usage, blame.share_used) for place, blame in shown.items()}
            tokens = dict.fromkeys(unit.stats.forwards, 0.0)
            tokens |= _tokens_used(own, member, unit.widened)
            for look in unit.looks:
                look.of_token = tokens.get(look.place, look.of_token)
                if look.place in usage:
                    look.usage, look.from_nothing = usage[look.place]
                if look.place in far:
                    look.usage = max(far[look.place].limit_usage, usage.get(look.place, (0.0,))[0])
            unit.limit_usage = max((answer.limit_usage for answer in answers), default=0.0)
            unit.from_nothing = max((answer.share_used for answer in answers), default=0.0)
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
                    look.usage, look.of_token = min(look.usage, 1.0), min(look.of_token, 1.0)
        if len(family) >= 3:
            _blame_family(family, thresholds)
            if not is_routed:
                _blame_columns(family, thresholds)
        for unit in family:  # what is asked later needs no table of rows
            assert unit.judged is not None
            unit.judged = (
                replace(unit.judged[0], rows=None, channels=None, gains=[]),
                unit.judged[1],
            )
    return excused


def _stats_of(units: Iterable[Unit]) -> list[TruthStats]:
    return [unit.stats for unit in units if unit.stats is not None]


def _beside_truth(unit: Unit, routed: bool) -> Why | None:
    """By which limit a unit is beyond rounding in forwards that the truth does not hold."""
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
        (result.sample, result.step)
        for result in unit.results
        if max(result.ratio_max or 0.0, result.ratio_sink or 0.0) > unit.worst_limit
    }
    alike = all(forward.alike[1] for forward in forwards.values()
                if (forward.result.sample, forward.result.step) in far)  # fmt: skip
    return None if alike else "sink" if unit.why == "sink" else "token"


def _no_measure(unit: Unit) -> bool:
    """A rotary table is computed from float32 angles whatever the dtype: in two dtypes its
    distances from the truth have nothing to do with either's rounding."""
    first = unit.results[0]
    two_dtypes = first.reference_dtype != first.candidate_dtype
    return TABLES in (first.kind or "").lower() and two_dtypes


def _limits(families: Sequence[Sequence[Unit]]) -> dict[Level, float]:
    """By level, the deviate of an outlier among all that are looked at."""
    counts: dict[Level, int] = {"site": 0, "forward": 0, "row": 0, "channel": 0}
    for stats in (stats for family in families for stats in _stats_of(family)):
        counts["site"] += 1
        counts["forward"] += len(stats.forwards)
        counts["row"] += stats.num_rows
        counts["channel"] += 0 if stats.channels is None else stats.channels.energy.shape[1]
    return {level: limit_of(count) for level, count in counts.items()}


def _far_forwards(unit: Unit, thresholds: Thresholds) -> dict[PromptStep, Blame]:
    """Forwards in which the sides differ by more than rounding, and one is farther from the truth
    than any healthy kernel, however its siblings fare: they may have the same fault there."""
    assert unit.stats is not None and unit.judged is not None
    judged, member = unit.judged
    far: dict[PromptStep, Blame] = {}
    for look in unit.beyond:
        forward, x = unit.stats.forwards.get(look.place), judged.x_of(member, look.place)
        if forward is None or x is None:
            continue
        width = spread(forward.num_values, num_looks=len(unit.looks))
        blame = Blame(
            _side(x), "forward", math.exp(min(abs(x), 700.0)), 1.0,
            thresholds.truth_systematic * width * unit.widened, forward.result, "others",
            look.place,
        )  # fmt: skip
        if blame.limit_usage > 1:
            far[look.place] = blame
    return far


def _blame_family(family: list[Unit], thresholds: Thresholds) -> None:
    """All of one kind: their own median W, which no comparison among them would show."""
    assert family[0].judged is not None
    together = family[0].judged[0]
    limit = thresholds.truth_systematic
    reach = math.log(limit * max(unit.widened for unit in family))
    if limit <= thresholds.truth_standout:  # near enough to 1 for chance to matter
        reach += together.usual_reach
    if abs(together.usual) <= reach:
        return
    sign = 1 if together.usual > 0 else -1
    for member, unit in enumerate(family):
        value = math.exp(min(sign * (together.x_of(member) or 0.0), 700.0))
        if value > max(limit / thresholds.truth_confirm, math.sqrt(limit)):  # itself, not its kin
            unit.blame = Blame(
                _side(together.usual), "typical", value, 1.0, limit, unit.results[0], "all"
            )
            unit.why = "typical"
            unit.limit_usage = max(unit.limit_usage, value / limit)
            for look in unit.looks:  # beside its siblings, which are as wrong, it shows nothing
                x = together.x_of(member, look.place)
                if x is not None:
                    look.usage = max(look.usage, math.exp(min(sign * x, 700.0)) / limit)


def _side(x: float) -> Side:
    return "candidate" if x > 0 else "reference"


def _blame_columns(family: list[Unit], thresholds: Thresholds) -> None:
    """What all of one kind have in common in one forward, then in one row or one channel, blames
    those of them that are not blamed for more."""
    assert family[0].judged is not None
    widened = max(unit.widened for unit in family)
    for shared in shared_by_all(family[0].judged[0], widened, thresholds):
        for unit, blame in zip(family, shared, strict=True):
            if blame is None or (unit.blame is not None and unit.blame.side != blame.side):
                continue
            used = max(blame.limit_usage, 1.0 + 1e-9)
            for look in unit.looks:
                if look.place != blame.place:  # a channel is that of all forwards
                    continue
                if blame.why == "token":
                    look.of_token = max(look.of_token, used)
                else:
                    look.usage = max(look.usage, used)
            if unit.why is None:
                unit.blame, unit.why = blame, blame.why
                unit.limit_usage = max(unit.limit_usage, used)

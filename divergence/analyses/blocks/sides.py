"""Finds what is beyond what rounding explains: by the two sides' difference, and by a truth, which
tells the side, and which of its forwards, tokens or channels show it."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from divergence.analyses.blocks.units import (
    Blame,
    JudgedFamily,
    JudgedGains,
    Unit,
    Why,
    block_outputs,
    families_of,
    farther_side,
    few_numbers,
    is_table,
    medians,
    narrowed,
    num_columns,
    num_values,
    numbers_alike,
    tail_of,
    worst_of,
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
from divergence.comparison.limits import CANCELS, CLEAR, FEW_ROWS, FEWEST, LEAST, SURE
from divergence.comparison.measure.truth import (
    ForwardStats,
    RowErrors,
    SamplesBySite,
    TruthStats,
    stats_of,
)
from divergence.comparison.results import num_rows
from divergence.numerics.floor import ALLOWED, THRESHOLDS, Thresholds, spread
from divergence.numerics.formats import format_named
from divergence.run.site import is_of_parameter
from divergence.words import SIDES, grouped

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


@dataclass(frozen=True, slots=True)
class BlocksBeside:
    """Says what a site without siblings is held against: the blocks' median log W, and that of each
    forward."""

    x: float = 0.0
    forwards: Mapping[PromptStep, float] = field(default_factory=dict)


def judged_family(
    stats: Sequence[TruthStats],
    limits: Mapping[Level, float],
    routed: bool,
    thresholds: Thresholds,
    beside: BlocksBeside | None = None,
) -> JudgedFamily:
    """Asks the judge all tables of a family. ``limits``: by level, the deviate of an outlier.
    ``routed``: one token may go to another expert by rounding. ``beside``: of one site without
    siblings."""
    rows_of = [each.rows for each in stats if each.rows is not None]
    between = stats[0].is_difference
    # added to both errors, in floors, so that two tiny ones make no large ratio
    family_least = thresholds.truth_least
    if beside is None:
        errors = (math.sqrt(math.prod(each.typical.values())) for each in stats)
        family_least = max(LEAST, family_least * statistics.median(errors))
    keys = functools.reduce(np.intersect1d, [each.key for each in rows_of])
    together = [each.only(keys) for each in rows_of]
    energy = np.stack([each.energy for each in together], axis=1)
    numbers = np.stack([each.numbers for each in together], axis=1)
    least: float | Floats = family_least
    if between:
        least = np.stack([each.least for each in together if each.least is not None])
    first = together[0]
    place_numbers, place = np.unique(first.place, return_inverse=True)
    places = [first.places[n] for n in place_numbers]
    counts = np.bincount(place, minlength=len(places))
    few = [routed and bool(count < FEW_ROWS) for count in counts]

    def whole(typical: bool) -> tuple[Floats, Floats]:
        by_member = [
            observed(
                each.energy,
                each.numbers,
                family_least,
                np.zeros(len(each.key), np.intp),
                typical=typical,
            )
            if each.least is None
            # forwards may round alike: their median is no more certain than they are
            else observed(
                *(
                    np.median(values, axis=-1, keepdims=True)
                    for values in (each.energy, each.numbers, each.least)
                )
            )
            for each in rows_of
        ]
        return np.stack([x for x, _ in by_member]), np.stack([own for _, own in by_member])

    spreads = dict(
        site=thresholds.site_spread, forward=thresholds.forward_spread, row=thresholds.row_spread
    )
    if between:
        spreads = dict.fromkeys(spreads, thresholds.ratio_spread)

    def judged(
        level: Level, x: Floats, own: Floats, usual: Floats, kept: npt.NDArray[np.bool_] | None
    ) -> JudgedTable:
        """Asks the judge one table. ``usual``: of the blocks; it excuses a site without siblings
        that is off as they are."""
        control, sigma = None, spreads[level]
        if beside is not None:
            sigma = thresholds.lone_spread
            control = usual + np.zeros_like(x) if between else _excused(x, usual)
        table = outliers(x, own, sigma, limits[level], control=control, kept=kept)
        return replace(table, one_sided=between)

    typical, of_typical = whole(True)
    blocks = np.array([0.0 if beside is None else beside.x])
    x, own = whole(routed)
    # sides that agree bit for bit are as far off as each other for certain
    equal = np.array([[bool((each.energy[0] == each.energy[1]).all())] for each in rows_of])
    sites = judged("site", x, np.where(equal, 0.0, own), blocks, None)
    odds, finer = np.full(len(x), np.inf), None
    if beside is None and not between:
        odds = _odds_of_own(sites, rows_of, family_least, routed, thresholds)
        finer = odds < -SURE
        sites = replace(sites, control=np.where(finer[:, None], sites.x, sites.control))
    forwards = rows = None
    if len(places) > 1:
        usual = blocks.repeat(len(places))
        if beside is not None:
            few = [few or at not in beside.forwards for few, at in zip(few, places, strict=True)]
            usual = np.array([beside.forwards.get(at, 0.0) for at in places])
        groups = None if between else place
        of_places = observed(energy, numbers, least, groups, typical=routed)
        forwards = judged("forward", *of_places, usual, finer)
    if not routed and (counts > 1).any():
        rows = judged("row", *observed(energy, numbers, least), typical[0], finer)
    return JudgedFamily(
        stats=list(stats),
        least=family_least,
        sites=sites,
        typical=typical[:, 0].tolist(),
        typical_at=[_typical_at(each, family_least) for each in rows_of],
        usual_reach=reach_of_median(of_typical),
        places=places,
        forwards=forwards,
        rows=rows,
        errors=replace(first, place=place, places=places),
        is_few=few,
        channels=_judged_channels(
            stats, limits["channel"], None if beside is None else typical[0], thresholds
        ),
        gains=list(_judged_gains(stats, limits)),
        odds=odds.tolist(),
    )


def _typical_at(rows: RowErrors, least: float) -> dict[PromptStep, float]:
    """The median row's log W, by forward."""
    added = least if rows.least is None else rows.least
    x, _ = observed(rows.energy, rows.numbers, added, rows.place, typical=True)
    return dict(zip(rows.places, x.tolist(), strict=True))


def _odds_of_own(
    sites: JudgedTable,
    errors: Sequence[RowErrors],
    least: float,
    routed: bool,
    thresholds: Thresholds,
) -> npt.NDArray[np.float64]:
    """Tells how much likelier (M,), in log, it is that a member's farther side is farther off than
    in its siblings, than that the other side is nearer; inf where the sides are not apart.

    Errors are in floors, each side's beside the median of its siblings: a and b, in log, apart by
    d. What makes a block hard troubles both alike, with a deviation τ between siblings, which the
    nearer of a and b tells. If the farther side is off, their sum is d, else -d, with the variance
    4τ²: the odds are d (a + b) / 2τ². Below 0 only where the farther side's error is what it is in
    its siblings: where both are smaller, the block is an easy one."""
    middle = np.median if routed else np.mean
    levels = np.array([0.5 * np.log(middle(each.energy, axis=1) + least**2) for each in errors])
    beside = levels - np.median(levels, axis=0)
    off = (sites.x - sites.control)[:, 0]
    farther = np.where(off > 0, beside[:, 1], beside[:, 0])
    tau = max(thresholds.ratio_spread, 1.4826 * float(np.median(np.abs(beside).min(axis=1))))
    odds = np.abs(off) * beside.sum(axis=1) / (2 * tau**2)
    odds = np.where(np.abs(farther) < 2 * tau, odds, np.maximum(odds, 0.0))
    return np.where(np.abs(off) > sites.reach[:, 0] / 2, odds, np.inf)


def _excused(x: Floats, usual: Floats) -> Floats:
    """Return what excuses a side whose error is the larger: that it is so elsewhere."""
    return np.where(x > 0, np.maximum(usual, 0.0), np.minimum(usual, 0.0))


def questions(
    judged: JudgedFamily, member: int, *, routed: bool, widened: float, thresholds: Thresholds
) -> list[Blame]:
    """Every question's answer of one member, the plainest question first.

    ``routed``: one token may go to another expert by rounding. ``widened``: what trusted runs have
    shown, as a factor >= 1.
    """
    stats = judged.stats[member]
    first = stats.first
    assert first is not None
    typical = _blame_of(judged.sites, member, 0, "typical", first, widened)
    blames = []
    own_too = False
    if not is_table(first):
        limit = thresholds.typical * spread(stats.num_values) * widened
        nearer = min(SIDES, key=lambda side: stats.typical[side])
        least = stats.typical[nearer]
        blames.append(Blame("both", "both", least, 1.0, limit, first))
        # the side that is nearer is not excused by the other: its own error is no sibling's,
        # where it is measured and not a figure made of the other's
        figured = None if first.truth is None else first.truth.estimated
        level = statistics.median(each.typical[nearer] for each in judged.stats)
        own_too = figured != nearer and least > limit * max(1.0, level)
    answers = forwards_of(judged, member, widened)
    blames += sorted(answers.values(), key=lambda blame: -blame.limit_usage)[:1]
    if judged.rows is not None:
        row = int(judged.rows.excess(member).argmax())
        at = stats.forwards[judged.places[int(judged.errors.place[row])]].result
        blame = _blame_of(judged.rows, member, row, "token", at, widened)
        blames.append(replace(blame, sink=bool(judged.errors.sink[row])))
    # one forward's only row is no outlier among its like: a rerouted token fills the channels
    if judged.channels is not None and not (routed and first.step):
        channel = int(judged.channels.excess(member).argmax())
        blame = _blame_of(judged.channels, member, channel, "channel", first, widened)
        blames.append(replace(blame, channel=channel))
    # the scale error that stands out most
    scaled: list[Blame] = []
    for gains in judged.gains:
        table = gains.table
        # siblings that are off make no healthy one odd
        apart = np.fmin(np.abs(table.x[member] - table.control[member]), np.abs(table.x[member]))
        with np.errstate(all="ignore"):
            usage = np.nan_to_num(apart / table.reach[member], posinf=0.0)
        column = int(usage.argmax())
        place, own = gains.places[column], gains.sides[:, member, column]
        if usage[column] > 0:
            usual = np.nanmedian(gains.sides[:, :, column], axis=1)
            number = int(np.abs(own - usual).argmax())
            at = first if place is None else stats.forwards[place].result
            scaled.append(
                Blame(
                    SIDES[number],
                    "gain",
                    float(usage[column]) * gains.limit,
                    1.0,
                    gains.limit * widened,
                    at,
                    place=place,
                    scaled=gains.of,
                    factor=1 + float(own[number]),
                )
            )
    blames += sorted(scaled, key=lambda blame: -blame.limit_usage)[:1]
    # what holds of all rows together goes where something narrower explains it: a forward, a token
    # or a channel where the median row is off by less than half as much, or a scale error where the
    # whole is off by little more than rounding
    beyond = {blame.why for blame in blames if blame.limit_usage > 1}
    control = float(judged.sites.control[member, 0])
    whole, median = (
        abs(x - control) for x in (float(judged.sites.x[member, 0]), judged.typical[member])
    )
    narrower = median < whole / 2 and beyond & {"forward", "token", "channel"}
    slight = typical.value / typical.control < thresholds.truth_systematic and "gain" in beyond
    if narrower or slight or own_too:
        return blames
    return [typical, *blames]


def _blame_of(
    table: JudgedTable,
    member: int,
    column: int,
    why: Why,
    at: SiteResult,
    widened: float,
    place: PromptStep | None = None,
) -> Blame:
    """One answer of the judge as a blame; of nobody, where no side has an error of its own."""
    x, control = float(table.x[member, column]), float(table.control[member, column])
    limit = math.exp(min(float(table.reach[member, column]), 700.0)) * widened
    if not table.excess(member)[column]:
        return Blame("candidate", why, 1.0, 1.0, limit, at, place=place)
    sign = 1 if x > 0 else -1
    value, usual = math.exp(min(sign * x, 700.0)), math.exp(sign * control)
    return Blame(SIDES[x > 0], why, value, usual, limit, at, place=place)


def forwards_of(judged: JudgedFamily, member: int, widened: float) -> dict[PromptStep, Blame]:
    """Return what the judge says of each forward; nothing where there is but one."""
    if judged.forwards is None:
        return {}
    return {
        place: _blame_of(
            judged.forwards,
            member,
            column,
            "forward",
            judged.stats[member].forwards[place].result,
            widened,
            place,
        )
        for column, place in enumerate(judged.places)
        if not judged.is_few[column]
    }


def _tokens_used(judged: JudgedFamily, member: int, widened: float) -> dict[PromptStep, float]:
    """The largest share of its limit that a row uses, by forward."""
    if judged.rows is None:
        return {}
    reach = judged.rows.reach[member]
    with np.errstate(all="ignore"):
        ratio, limit = judged.rows.excess(member) * reach, reach + math.log(widened)
        beyond = np.exp(np.minimum(ratio - limit, 300.0))
        used = np.nan_to_num(np.where(ratio > limit, beyond, ratio / limit))
    return {
        place: float(used[judged.errors.place == number].max(initial=0.0))
        for number, place in enumerate(judged.places)
    }


def shared_by_all(
    judged: JudgedFamily, widened: float, thresholds: Thresholds
) -> Iterator[list[Blame | None]]:
    """Yield, for each forward, then each row and each channel, that stands out beside the others in
    what all members have in common: of each member its blame, None where it is not off there
    itself."""
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
            side = SIDES[sign > 0]
            limit = math.exp(min(float(reach[column]), 700.0))
            excesses = sign * table.x[:, column] - max(0.0, sign * table.usual)
            blames: list[Blame | None] = []
            for stats, excess in zip(judged.stats, excesses.tolist(), strict=True):
                assert stats.first is not None
                place, at, off = None, stats.first, excess > reach[column] / 2
                if why != "channel":
                    place = judged.places[number]
                    at = stats.forwards[place].result
                elif stats.channels is not None:
                    # one that is large in all blocks is off by what storing it makes
                    dtypes = stats.first.reference_dtype, stats.first.candidate_dtype
                    roundoff = max(format_named(dtype).unit_roundoff for dtype in dtypes)
                    stored = (thresholds.truth_systematic * roundoff) ** 2
                    energy = stats.channels.energy[SIDES.index(side), column]
                    off = off and energy > stored * stats.channels.values[column]
                blame = Blame(
                    side,
                    why,
                    math.exp(min(excess, 700.0)),
                    1.0,
                    limit,
                    at,
                    "all",
                    place,
                    channel=None if place else column,
                )
                blames.append(blame if off else None)
            yield blames


# What would have been seen: the smallest error of a block that would be beyond its limit, by level.


def _visible_sizes(
    unit: Unit, judged: JudgedFamily, member: int, *, routed: bool
) -> dict[Level, float]:
    """Tells, with a truth, how large an error of B, beside the rounding that A has, too, would have
    to be for W to stand out. A site without siblings, and tables that were not made, say
    nothing."""
    stats = judged.stats[member]
    if stats.rows is None:
        return {}
    floor = stats.floor
    middle = np.median if routed else np.mean

    def size(table: JudgedTable, energy: Floats, least: float | Floats) -> Floats:
        far, usual = table.standing_out(member, energy, least, unit.widened)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(far - usual))

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
    usable = channels is not None and channels.total > 0 and not (routed and unit.results[0].step)
    if judged.channels is not None and channels is not None and usable:
        sizes["channel"] = _middle(
            size(judged.channels, channels.energy[0], channels.least)
        ) / math.sqrt(channels.total)
    return narrowed(sizes)


def _middle(sizes: Floats) -> float:
    return float(np.nanmedian(sizes))


def _judged_channels(
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
    return outliers(x, own, thresholds.row_spread, limit, control=control)


def _judged_gains(
    family: Sequence[TruthStats], limits: Mapping[Level, float]
) -> Iterator[JudgedGains]:
    """Scale errors of the output, and of what a block adds: of all rows, then of each forward.

    A few dominant channels may be rounded the same way at every token, which the rows' own spread
    does not show.
    """
    typical = statistics.median(max(each.typical.values()) for each in family)
    scaled: tuple[Literal["output", "update"], ...] = ("output", "update")
    for number, of in enumerate(scaled):
        with_gains = [each for each in family if len(each.gains) > number]
        if len(with_gains) < FEWEST:
            continue
        places = sorted({place for each in with_gains for place in each.gains_at})
        levels: dict[Level, list[PromptStep | None]] = {"site": [None]}
        if len(places) > 1:
            levels["forward"] = [*places]
        for level, columns in levels.items():
            values = np.full((4, len(family), len(columns)), math.nan)
            for member, each in enumerate(family):
                for column, place in enumerate(columns):
                    gains = each.gains if place is None else each.gains_at.get(place, [])
                    if len(gains) > number:
                        values[:, member, column] = gains[number]
            sides, error, common = values[:2], values[2], values[3] * typical
            if np.isnan(error).all():
                continue
            # of few rows a small error may be chance
            own = np.square(np.maximum(error, np.nanmedian(error))) + np.square(common)
            table = outliers(sides[1] - sides[0], own, 0.0, limits[level], linear=True)
            yield JudgedGains(of, table, limits[level], columns, sides)


# Units: what is beyond what rounding explains.
#
# The difference of the two sides is held against the rounding model and against the siblings', by
# the same judge that asks the truth: the model stands for the side whose error is known. A unit is
# flagged where its typical ratio is beyond ``typical`` absolutely, or stands out among its siblings
# (beside all blocks' outputs, where it has none, and of a parameter's gradient beside the blocks'
# gradients, if they differ by more: how prompts are added up moves them and no output); where one
# forward of one prompt is or does; or where a single token is beyond its limit. Limits are wider
# where few numbers are judged.
#
# With a truth, each side's own error is held against the siblings'. A difference of the two sides
# counts only where one of them is the farther from what is right: two equally good answers may
# differ. What all of a kind shares no comparison among them would show: their own median is held
# against its limit, over all forwards and in each.


def flag_units(
    units: Sequence[Unit],
    samples: SamplesBySite | None = None,
    *,
    routed: frozenset[str] = frozenset(),
    thresholds: Thresholds = THRESHOLDS,
) -> list[Unit]:
    """Sets limits, flags and blames of units of any passes. Returns those that are flagged.

    ``samples``: of their rows, and of a truth where there is one. ``routed``: blocks in which
    rounding may send a token to another expert.
    """
    for unit in units:
        unit.stats = _difference_of(unit, thresholds)
        if samples is not None:
            ratios = samples.ratios(unit.pass_, unit.site, unit.phase)
            unit.tail = tail_of(ratios)
            differing = len(ratios) and int(np.count_nonzero(ratios))
            rows = sum(map(num_rows, unit.results))
            unit.mostly_equal = unit.pass_ != "free" and 0 < 2 * differing < rows
    in_prefill = {
        (unit.pass_, unit.of, unit.site): unit.worst for unit in units if unit.phase == "prefill"
    }
    for family in families_of(units):
        tokens = (in_prefill.get((unit.pass_, unit.of, unit.site), 0.0) for unit in family)
        _find_odd(family, statistics.median_low(tokens), thresholds)
    # In a free pass a block is allowed what it may make of an error that came in, the first one
    # nothing: their ratios are no measure for each other.
    _ask_kinds([unit for unit in units if unit.pass_ != "free"], frozenset(), thresholds)
    for unit in units:
        hardest = in_prefill.get((unit.pass_, unit.of, unit.site), 0.0)
        _hold(unit, hardest, unit.chooses(routed), thresholds)
        unit.stats = unit.judged = None
    if samples is not None:
        _ask_truth(units, samples, routed, thresholds)
    return [unit for unit in units if unit.why is not None]


def _find_odd(family: Sequence[Unit], hardest: float, thresholds: Thresholds) -> None:
    """Sets which looks of a kind, of units most of whose rows are equal bit for bit, have tokens
    that are off by no kernel's rounding: only single tokens of the forward differ, and its siblings
    are equal there, most of them, or most are beyond rounding, too, and a decode step beyond the
    ``hardest`` token of the prefill. Where they differ by less, another kernel ran, as in long
    prompts, and sharp attention enlarges its rounding of a token."""
    beyond = thresholds.truth_confirm**2
    if family[0].phase == "decode":
        beyond = max(beyond, hardest)
    for looks in grouped(
        (look for unit in family for look in unit.looks), lambda look: look.place
    ).values():
        usual = statistics.median_low(look.worst for look in looks)
        for look in looks:
            single = look.typical == 0 or look.num_rows < FEW_ROWS
            same = usual == 0 or usual > beyond
            look.is_odd = single and same and len(looks) >= FEWEST


def _difference_of(unit: Unit, thresholds: Thresholds) -> TruthStats:
    """The two sides' difference in each forward of each prompt, as a table's rows. The floor is a
    model: no chance is in it, and the error that is held against it is of so many numbers."""
    ratios = np.array([look.typical for look in unit.looks])
    numbers = np.array([numbers_alike(look.result) * look.share for look in unit.looks])
    cancel = [
        CANCELS if look.result.role == "inner" and look.num_rows < FEW_ROWS else 1.0
        for look in unit.looks
    ]
    index = np.arange(len(ratios))
    return TruthStats(
        typical={"reference": unit.typical, "candidate": unit.typical},
        first=unit.results[0],
        forwards={look.place: ForwardStats(look.result, 0) for look in unit.looks},
        rows=RowErrors(
            key=np.array([(look.sample << 32) + look.result.step for look in unit.looks]),
            place=index,
            places=[look.place for look in unit.looks],
            energy=np.stack([np.ones_like(ratios), np.square(np.minimum(ratios, ALLOWED[1]))]),
            numbers=np.stack([np.full_like(numbers, 1e12), numbers]),
            sink=np.zeros(len(ratios), bool),
            least=thresholds.least_sibling * np.array(cancel),
        ),
    )


def _hold(unit: Unit, hardest: float, in_routed: bool, thresholds: Thresholds) -> None:
    """Sets the limits of one unit's difference, and its flags. ``hardest``: the largest ratio of
    any token of its prefill."""
    beside, forwards = math.inf, dict[PromptStep, float]()
    if unit.judged is not None:
        assert unit.stats is not None and unit.stats.rows is not None
        judged, member = unit.judged
        rows = unit.stats.rows.only(judged.errors.key)
        assert rows.least is not None

        def far(table: JudgedTable, least: Floats) -> list[float]:
            energy, _ = table.standing_out(member, np.ones_like(least), least)
            ratios: list[float] = np.sqrt(np.maximum(energy - np.square(least), 0.0)).tolist()
            return ratios

        (beside,) = far(judged.sites, np.array([np.median(rows.least)]))
        if judged.forwards is not None:
            forwards = dict(zip(judged.places, far(judged.forwards, rows.least), strict=True))
        if len(judged.stats) >= FEWEST:
            others = [each.typical["candidate"] for each in judged.stats if each is not unit.stats]
            unit.control = statistics.median(others)
    wider = unit.widened * (thresholds.escalated if unit.pass_ == "escalated" else 1.0)
    few = [few_numbers(r) if num_rows(r) < FEW_ROWS else 1.0 for r in unit.results]
    width = spread(sum(map(num_values, unit.results))) * statistics.median(few)
    unit.limit = min(thresholds.typical * width, beside) * wider
    columns = min(num_columns(result) for result in unit.results)
    width = spread(columns) * few_numbers(max(unit.results, key=worst_of))
    typical, token = thresholds.typical, max(thresholds.token, 2 * thresholds.typical)
    alone = token
    if unit.mostly_equal:  # the same kernels ran, which round alike
        typical = thresholds.standout
        if max(unit.looks, key=lambda look: look.worst).is_odd:
            alone = typical
    leads_up = max(unit.tail, *(look.typical for look in unit.looks))
    unit.worst_limit = (alone if unit.worst > CLEAR * leads_up else token) * width * wider
    # the only look of a unit is judged as the unit is
    for look in unit.looks if len(unit.looks) > 1 else ():
        few_rows = look.num_rows < FEW_ROWS
        if few_rows and in_routed:
            continue
        count = round(num_values(look.result) * look.share)
        width = spread(count, num_looks=len(unit.looks))
        limit = typical * width
        beside = forwards.get(look.place, math.inf)
        if few_rows:  # then the typical row is a single token
            single = typical if unit.mostly_equal and look.is_odd else thresholds.token
            limit = single * width * few_numbers(look.result)
            if unit.phase == "decode":  # as hard as tokens of the prefill may be there
                beside = max(beside, CLEAR * hardest)
        look.limit = min(limit, beside) * wider
        look.usage = look.between = look.typical / look.limit
    floors = [result.floor for result in unit.results if result.floor]
    if unit.results[0].role == "block" and floors:
        floor = statistics.median(floors)
        unit.visible = {"site": unit.limit * floor}
        if looks := [k.limit * (k.result.floor or floor) for k in unit.looks if k.limit]:
            unit.visible["forward"] = statistics.median(looks)
        if not in_routed:
            unit.visible["row"] = alone * width * wider * floor
        unit.visible = narrowed(unit.visible)
    used = [unit.typical / unit.limit, *(look.usage for look in unit.looks)]
    if not in_routed:
        used.append(unit.worst / unit.worst_limit)
        for look in unit.looks:
            look.of_token = look.worst / unit.worst_limit
    unit.limit_usage = unit.between = unit.shown = max(used)
    if unit.typical > unit.limit:
        unit.why = "typical"
    elif unit.beyond:
        unit.why = "forward"
    elif unit.worst > unit.worst_limit and not in_routed:
        unit.why = "token"


def _ask_kinds(units: Sequence[Unit], routed: frozenset[str], thresholds: Thresholds) -> None:
    """Sets ``judged`` of each, by its ``stats``: together with its siblings; without any, beside
    the blocks' outputs. No difference is judged so where these are not known."""
    families = families_of(units)
    limits = {
        pass_: _limits(alike) for pass_, alike in grouped(units, lambda unit: unit.pass_).items()
    }

    def ask_together(members: Sequence[Unit], beside: BlocksBeside | None = None) -> None:
        in_routed = any(unit.chooses(routed) for unit in members)
        stats, of_pass = _stats_of(members), limits[members[0].pass_]
        together = judged_family(stats, of_pass, in_routed, thresholds, beside)
        for number, unit in enumerate(members):
            unit.judged = together, number

    for family in families:
        if len(family) >= FEWEST:
            ask_together(family)

    def usual_of(among: Sequence[Unit]) -> dict[tuple[object, ...], BlocksBeside]:
        """The median x, and that of each forward, by pass and phase."""
        sites = list[tuple[tuple[object, ...], float]]()
        forwards = dict[tuple[object, ...], list[tuple[PromptStep, float]]]()
        for unit in among:
            if unit.judged is None:
                ask_together([unit], BlocksBeside())
            kind = unit.pass_, unit.of, unit.phase
            sites.append((kind, unit.x_at()))
            forwards.setdefault(kind, []).extend(
                (look.place, unit.x_at(look.place)) for look in unit.looks
            )
        return {
            kind: BlocksBeside(x, medians(forwards[kind])) for kind, x in medians(sites).items()
        }

    usual = usual_of(block_outputs(units))
    gradients = usual_of(
        [
            unit
            for unit in units
            if unit.stats
            and unit.stats.is_difference
            and is_of_parameter(unit.site)
            and unit.kind[0] == "block"
        ]
    )
    for unit in (unit for family in families if len(family) < FEWEST for unit in family):
        kind = unit.pass_, unit.of, unit.phase
        beside = usual.get(kind, BlocksBeside())
        if unit.stats and unit.stats.is_difference:
            if kind not in usual:
                unit.judged = None
                continue
            least = beside.x
            if is_of_parameter(unit.site) and kind in gradients:
                least = max(least, gradients[kind].x)
            at = {k.place: max(least, beside.forwards.get(k.place, least)) for k in unit.looks}
            beside = BlocksBeside(least, at)
        ask_together([unit], beside)


def _ask_in_units(units: Sequence[Unit], routed: frozenset[str], thresholds: Thresholds) -> None:
    """An observation whose numbers hang on few channels is asked again in each channel's own unit
    (``measure_in_units``), together with those siblings of which it is so, too."""
    for alike in grouped(units, lambda unit: unit.pass_).values():
        limits = _limits(alike)
        again = [unit for unit in alike if unit.stats is not None and unit.stats.in_units]
        for family in families_of(again):
            stats = [unit.stats.in_units for unit in family if unit.stats and unit.stats.in_units]
            if len(stats) < FEWEST:
                continue
            in_routed = any(unit.chooses(routed) for unit in family)
            together = judged_family(stats, limits, in_routed, thresholds)
            for number, unit in enumerate(family):
                unit.in_units = together, number


def _ask_truth(
    units: Sequence[Unit], samples: SamplesBySite, routed: frozenset[str], thresholds: Thresholds
) -> None:
    """Holds every unit that the truth has samples of against it."""
    for unit in units:
        first = unit.results[0]
        against = samples.find(unit.pass_, unit.site, unit.phase)
        if against and not (is_table(first) and first.reference_dtype != first.candidate_dtype):
            unit.stats = against.once(stats_of)
    # of a free pass a floor tells which side is wrong where the two differ by more than rounding:
    # it neither excuses a difference there nor finds another, since inputs were not equal
    free = [unit for unit in units if unit.stats is not None and unit.pass_ == "free"]
    limits = _limits(free)
    for unit in free:
        if unit.why is not None and not unit.chooses(routed):
            alone = judged_family(_stats_of([unit]), limits, False, thresholds, BlocksBeside())
            answers = questions(alone, 0, routed=False, widened=unit.widened, thresholds=thresholds)
            unit.blame = next((answer for answer in answers if answer.limit_usage > 1), None)
        unit.stats = None  # what else is asked of them takes equal inputs
    judged = [unit for unit in units if unit.stats is not None]
    _ask_kinds(judged, routed, thresholds)
    _ask_in_units(judged, routed, thresholds)
    for family in families_of(judged):
        in_routed = any(unit.chooses(routed) for unit in family)
        for unit in family:
            unit.excused = _is_excused(unit, in_routed, thresholds)
        if len(family) >= FEWEST:
            _blame_family(family, thresholds)
            if not in_routed:
                _blame_columns(family, thresholds)
        for unit in family:  # what is asked later needs no table of rows
            assert unit.judged is not None
            unit.judged = _without_rows(*unit.judged)
            unit.in_units = unit.in_units and _without_rows(*unit.in_units)


def _without_rows(judged: JudgedFamily, member: int) -> tuple[JudgedFamily, int]:
    return replace(judged, rows=None, channels=None, gains=[]), member


def _is_excused(unit: Unit, routed: bool, thresholds: Thresholds) -> bool:
    """Asks what the truth says of one unit, and gives it its blame. Is it beyond a limit of the two
    sides' difference, and both are equally near the truth?"""
    assert unit.judged is not None and unit.stats is not None
    judged, member = unit.judged
    if unit.results[0].role == "block":
        unit.visible = _visible_sizes(unit, judged, member, routed=routed) or unit.visible
    answers = questions(judged, member, routed=routed, widened=unit.widened, thresholds=thresholds)
    # forwards in which the sides differ by more than rounding, and one is farther from the truth
    # than any healthy kernel, however its siblings fare: they may have the same fault there
    shown = forwards_of(judged, member, unit.widened)
    tokens = dict.fromkeys(unit.stats.forwards, 0.0)
    tokens |= _tokens_used(judged, member, unit.widened)
    if unit.in_units is not None:
        asked = questions(
            *unit.in_units, routed=routed, widened=unit.widened, thresholds=thresholds
        )
        answers += [replace(answer, in_units=True) for answer in asked if answer.why != "both"]
        for place, again in forwards_of(*unit.in_units, unit.widened).items():
            if place not in shown or again.limit_usage > shown[place].limit_usage:
                shown[place] = again
        for place, used in _tokens_used(*unit.in_units, unit.widened).items():
            tokens[place] = max(used, tokens.get(place, 0.0))
    suspected = [look.place for look in unit.beyond]
    for look in unit.looks:
        forward, answer = unit.stats.forwards.get(look.place), shown.get(look.place)
        look.of_token = tokens.get(look.place, look.of_token)
        if answer is not None:
            look.usage = answer.limit_usage
        if look.place in suspected and forward is not None:
            x = unit.x_at(look.place)
            width = spread(forward.num_values, num_looks=len(unit.looks)) * unit.widened
            far = Blame(
                SIDES[x > 0],
                "forward",
                math.exp(min(abs(x), 700.0)),
                1.0,
                thresholds.truth_systematic * width,
                forward.result,
                "others",
                look.place,
            )
            if far.limit_usage > 1:
                answers.append(far)
                look.usage = max(far.limit_usage, 0.0 if answer is None else answer.limit_usage)
    # what is off in a whole forward is so at its tokens, too
    answers.sort(key=lambda answer: answer.why not in ("typical", "both", "forward"))
    unit.limit_usage = max((answer.limit_usage for answer in answers), default=0.0)
    unit.shown = max((answer.ratio / answer.limit for answer in answers), default=0.0)
    unit.blame = next((answer for answer in answers if answer.limit_usage > 1), None)
    was_beyond = unit.why is not None
    if unit.blame is None and was_beyond:
        unheld = _beyond_unheld(unit, suspected, routed)
        if unheld is None and _far_apart(unit, routed, thresholds):
            unheld, unit.too_few = "token", True
        if unheld is not None:  # no truth, or one that tells too little, so no side
            unit.why, unit.limit_usage = unheld, max(unit.limit_usage, unit.between)
            return False
    unit.why = None if unit.blame is None else unit.blame.why
    if unit.blame is not None and unit.blame.why == "gain" and unit.blame.place is not None:
        unit.why = "forward"
        for look in unit.looks:
            if look.place == unit.blame.place:
                look.usage = max(look.usage, unit.blame.limit_usage)
    if unit.why is None:
        for look in unit.looks:
            look.usage, look.of_token = min(look.usage, 1.0), min(look.of_token, 1.0)
    return unit.blame is None and was_beyond


def _beyond_unheld(unit: Unit, suspected: Sequence[PromptStep], routed: bool) -> Why | None:
    """Tells by which limit a unit is beyond rounding in forwards that excuse nothing: the truth
    does not hold them, or one side's error is not measured there, and may be far smaller than the
    other's. Single tokens may be as hard there as those that the truth holds. ``suspected``: the
    looks that were beyond their limits."""
    assert unit.stats is not None
    forwards, hard = unit.stats.forwards, CLEAR * unit.stats.hardest
    typical, token = (
        [
            look
            for look in unit.looks
            if (forward := forwards.get(look.place)) is None or not forward.alike[number]
        ]
        for number in range(2)
    )
    if typical and statistics.median(look.typical for look in typical) > unit.limit:
        return "typical"
    unsure = [
        look
        for look in typical
        if look.place in suspected and (look.num_rows >= FEW_ROWS or look.typical > hard)
    ]
    for look in unsure:
        look.usage = max(look.usage, look.between)
    if unsure:
        return "forward"
    far = not routed and any(look.worst > max(unit.worst_limit, hard) for look in token)
    return "token" if far else None


def _far_apart(unit: Unit, routed: bool, thresholds: Thresholds) -> bool:
    """Is a token beyond its limit, and one side there farther from the truth than any healthy
    kernel? Its error is made of too few numbers to convict a side, as beside a massive activation,
    and yet is no equally good answer."""
    assert unit.judged is not None and unit.stats is not None and unit.stats.rows is not None
    judged, member = unit.judged
    if judged.rows is None or routed:
        return False
    # one that no others lead up to, as where attention is sharp
    limit = max(unit.worst_limit, thresholds.typical, CLEAR * unit.tail)
    own = np.sqrt(unit.stats.rows.only(judged.errors.key).energy.max(axis=0))
    far = np.abs(judged.rows.x[member]) > math.log(thresholds.truth_systematic)
    places = {judged.places[n] for n in judged.errors.place[far & (own > limit / 2)]}
    tokens = [look for look in unit.looks if look.place in places and look.worst > limit]
    for look in tokens:
        look.of_token = look.worst / unit.worst_limit
    return bool(tokens)


def _stats_of(units: Sequence[Unit]) -> list[TruthStats]:
    return [unit.stats for unit in units if unit.stats is not None]


def _limits(units: Sequence[Unit]) -> dict[Level, float]:
    """The deviate of an outlier among all that are looked at in a pass, by level."""
    stats = _stats_of(units)
    stats += [each.in_units for each in stats if each.in_units]
    counts: dict[Level, int] = {
        "site": len(stats),
        "forward": sum(len(each.forwards) for each in stats),
        "row": sum(each.num_rows for each in stats),
        "channel": sum(each.channels.energy.shape[1] for each in stats if each.channels),
    }
    return {level: limit_of(count) for level, count in counts.items()}


def _blame_family(family: list[Unit], thresholds: Thresholds) -> None:
    """All of one kind: their own median W, which no comparison among them would show."""
    limit = thresholds.truth_systematic
    side, _ = farther_side(family, limit) or (None, 0.0)
    sign = 1 if side == "candidate" else -1
    for unit in family if side is not None else ():
        value = math.exp(min(sign * unit.x_at(), 700.0))
        if value <= max(limit / thresholds.truth_confirm, math.sqrt(limit)):
            continue  # its kin are off, and not itself
        assert side is not None
        unit.blame = Blame(side, "typical", value, 1.0, limit, unit.results[0], "all")
        unit.why, unit.too_few = "typical", False
        unit.limit_usage = max(unit.limit_usage, value / limit)
        for look in unit.looks:  # beside its siblings, which are as wrong, it shows nothing
            x = min(sign * unit.x_at(look.place), 700.0)
            look.usage = max(look.usage, math.exp(x) / limit)


def _blame_columns(family: list[Unit], thresholds: Thresholds) -> None:
    """Blame, for what all of one kind have in common in one forward, then in one row or one
    channel, those of them that are not blamed for more."""
    assert family[0].judged is not None
    widened = max(unit.widened for unit in family)
    for shared in shared_by_all(family[0].judged[0], widened, thresholds):
        for unit, blame in zip(family, shared, strict=True):
            if blame is None or (unit.blame is not None and unit.blame.side != blame.side):
                continue
            used = max(blame.limit_usage, 1.0 + 1e-9)
            for look in unit.looks:  # a channel is that of all forwards
                if look.place == blame.place and blame.why == "token":
                    look.of_token = max(look.of_token, used)
                elif look.place == blame.place:
                    look.usage = max(look.usage, used)
            if unit.why is None or unit.too_few:
                unit.blame, unit.why, unit.too_few = blame, blame.why, False
                unit.limit_usage = max(unit.limit_usage, used)

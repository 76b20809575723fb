"""Units: what is judged of a comparison, block by block, and what is beyond rounding.

A unit is a site of one pass and phase, over all its forwards. ``build_units`` makes them,
``flag_units`` asks the questions of each: by the two sides' difference, and by a truth, which tells
the side, and which of its forwards, tokens or channels show it. ``find_family`` tells the kind that
a fault runs through, and ``next_commands`` what to run then.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from divergence.comparison.align import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.constants import (
    CANCELLING_TIMES,
    CLEAR_TIMES,
    FEW_ROWS,
    FEWEST_SIBLINGS,
    LEAST_FLOORS,
    SURE_LOG_ODDS,
)
from divergence.comparison.judge import (
    JudgedTable,
    Level,
    limit_of,
    observed,
    outliers,
    reach_of_median,
)
from divergence.comparison.measure.truth import (
    ForwardStats,
    RowErrors,
    SamplesBySite,
    TruthStats,
    stats_of,
)
from divergence.comparison.preflight import truth_tells
from divergence.comparison.result import PromptRatio, SiteResult, Visible, num_rows, order_of
from divergence.facts import Fact, fact
from divergence.numerics.floor import (
    ALLOWED,
    ENOUGH,
    THRESHOLDS,
    Thresholds,
    share_from_nothing,
    spread,
)
from divergence.numerics.formats import format_named
from divergence.run.command import Command
from divergence.run.site import (
    BACKWARD,
    OPTIMIZER,
    ROOT,
    is_codes,
    is_norm,
    is_of_parameter,
    module_of,
)
from divergence.words import SIDES, Side, SideOrBoth, common_side, grouped

if TYPE_CHECKING:
    from divergence.comparison.judge import Floats


# Looks: each forward of each prompt at one site, judged by itself.
#
# A fault in one prompt of eight, or in one decode step of 64, disappears in a median over all of
# them. So each forward is an observation of its own, held against the same forward at the siblings
# of its site (the same place in the other blocks) by the judge (comparison.judge): the rounding
# model stands for the side whose error is known, and the ratio for the other's. An error that a few
# numbers hold, as the last bit of a massive activation, convicts hardly anything by itself.
#
# It refuses to judge a forward of few tokens in a block that routes tokens to experts where the
# routing is not known: rounding may send one token elsewhere.
#
# Where attention is sharp the rounding of a few scores is enlarged, of some tokens more than of
# others: the largest of them are the end of a long tail, not apart from the rest. A fault of
# attention looks alike. So a single token that is no farther off than such a tail goes on is named
# with low confidence, where no truth tells.


@dataclass(slots=True)
class Look:
    """One forward of one prompt at one site."""

    result: SiteResult
    sample: int
    typical: float
    """Its median token's ratio."""
    num_rows: int
    share: float = 1.0
    """Of the result's numbers, those that belong to this prompt."""
    limit: float = 0.0
    """Of ``typical``."""
    usage: float = 0.0
    """The largest share of any limit of this look that is used: over 1 where it is beyond one."""
    between: float = 0.0
    """The share that is used of the limit on the two sides' difference, which needs no truth."""
    worst: float = 0.0
    """Its worst token's ratio."""
    of_token: float = 0.0
    """The share of a single token's limit that its worst token uses."""
    is_odd: bool = False
    """Is a single token that differs here no other kernel's rounding?"""

    @property
    def place(self) -> PromptStep:
        return self.sample, self.result.step

    @property
    def used(self) -> float:
        """The largest share of any limit."""
        return max(self.usage, self.of_token)


# Units: all measurements of one site, over samples and steps, brought together for judging.
#
# A unit has *siblings*: the units of its kind (the same class of block, or the same
# place inside it), measured in the same pass and phase. They share dtype, shapes and
# kernels, so they are the controls of an experiment in which one block is suspected.

_Key = TypeVar("_Key")

Kind = tuple[str, str, str, str | None, str, str] | tuple[str, str, str, str | None, str]
"""(block, place inside it, port, class, phase, stack of blocks) or (trunk, path, port, class,
phase): units that are alike."""

Why = Literal["typical", "forward", "token", "channel", "gain", "both"]
"""The questions that a truth is asked."""


def is_table(result: SiteResult) -> bool:
    """Is it a rotary table? Its float32 angles are the convention, and are off the truth by
    position times u, whatever the dtype: that distance has nothing to do with rounding."""
    return "rotary" in (result.kind or "").lower()


def worst_of(result: SiteResult) -> float:
    """The largest ratio of any token, sinks too."""
    return max(result.ratio_max or 0.0, result.ratio_sink or 0.0)


@dataclass(frozen=True, slots=True)
class Blame:
    """One question's answer. ``value`` over ``control`` is held against ``limit``; ``share`` is
    how much of the limit is used, > 1 blames ``side``; ``at``: where it is largest."""

    side: SideOrBoth
    why: Why
    value: float
    control: float
    limit: float
    at: SiteResult
    like: Literal["others", "all"] | None = None
    """Whom of its kind it is held against, where that is not the other blocks."""
    place: PromptStep | None = None
    scaled: Literal["output", "update"] | None = None
    """Of a gain: what is scaled, by ``factor``."""
    factor: float = 1.0
    channel: int | None = None
    """Of a channel's error: which."""
    sink: bool = False
    """Of a token's error: is it a sink?"""
    in_units: bool = False
    """Was it asked in each channel's own unit?"""

    @property
    def ratio(self) -> float:
        return self.value / self.control if self.control > 0 else math.inf

    @property
    def limit_usage(self) -> float:
        """The share of the limit: 0 where both sides are alike, 1 at it. What both are off by is no
        difference of theirs until it is beyond its limit."""
        ratio = self.ratio
        if self.why == "gain" or ratio > self.limit:
            return ratio / self.limit
        return 0.0 if self.why == "both" else share_from_nothing(ratio, self.limit)


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
    typical_at: Sequence[Mapping[PromptStep, float]]
    """The same of each forward."""
    usual_reach: float
    """By how much chance may move the median of ``typical``."""
    places: list[PromptStep]
    forwards: JudgedTable | None
    rows: JudgedTable | None
    errors: RowErrors
    """Of the first member."""
    is_few: Sequence[bool]
    """Has the forward of a place few rows, of which nothing is to be told?"""
    channels: JudgedTable | None
    gains: list[JudgedGains]
    odds: Sequence[float]
    """Of each member, in log: that the farther side's error is larger than in its siblings, against
    that the other's is smaller."""

    @property
    def usual(self) -> float:
        """The members' median log W, of the median errors of both sides; 0 of one that is not
        known."""
        errors = np.array([[each.typical[side] for side in SIDES] for each in self.stats])
        with np.errstate(all="ignore"):
            a, b = np.clip(np.hypot(errors, self.least), 1e-300, 1e300).T
            return float(np.median(np.nan_to_num(np.log(b / a))))


@dataclass(slots=True)
class Unit:
    """All results of one site in one pass and phase (run.site.PHASES), judged together."""

    site: str
    pass_: str
    phase: str
    kind: Kind
    """Units of the same kind are its siblings."""
    results: list[SiteResult] = field(default_factory=list)
    typical: float = 0.0
    """Median over forwards of the median token's ratio."""
    worst: float = 0.0
    """Largest ratio of any token."""
    sink: bool = False
    """Is that a sink's?"""
    control: float | None = None
    """Median of the siblings' ``typical``; None without any."""
    limit: float = 0.0
    """Limit of ``typical``."""
    worst_limit: float = 0.0
    """Limit of ``worst``."""
    why: str | None = None
    """The limit that was exceeded, or what the truth blames; None where the unit is
    within all limits."""
    widened: float = 1.0
    """Factor on all limits, from what trusted runs have shown."""
    tail: float = 0.0
    """The largest ratio of its rows that no gap parts from the typical one (``tail_of``)."""
    mostly_equal: bool = False
    """Are most of its rows equal bit for bit, where inputs were equal?"""
    stats: TruthStats | None = None
    """The site against the truth, where one was given."""
    judged: tuple[JudgedFamily, int] | None = None
    """All of its kind against the truth, and which of them it is."""
    in_units: tuple[JudgedFamily, int] | None = None
    """The same of those whose rows few channels hold, in each channel's own unit."""
    blame: Blame | None = None
    """What the truth blames, if anything."""
    too_few: bool = False
    """Is one side farther from the truth than any healthy kernel, by an error of too few numbers to
    convict it?"""
    excused: bool = False
    """Do the sides differ by more than the rounding model has it, and are equally near the truth?
    """
    limit_usage: float = 0.0
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    between: float = 0.0
    """The same over the limits on the two sides' difference, which need no truth."""
    shown: float = 0.0
    """The largest ratio over its limit, which is what a trusted run widens limits by."""
    looks: list[Look] = field(default_factory=list)
    """Each forward of each prompt by itself."""
    visible: dict[Level, float] = field(default_factory=dict)
    """Of a block, by level, the smallest error that would have been beyond a limit."""

    @property
    def margin(self) -> float:
        """Tells by how much the unit is beyond its limits: of the two that agree, the larger
        one."""
        if self.blame is None:
            return self.between
        if self.blame.side == "both":
            return self.blame.limit_usage
        return max(self.blame.limit_usage, self.between)

    def chooses(self, routed: Collection[str]) -> bool:
        """May one token rightly take another way? ``routed``: blocks in which it may, and what is
        so of all gradients."""
        return self.results[0].block in routed or (BACKWARD in routed and BACKWARD in self.site)

    @property
    def beyond(self) -> list[Look]:
        """The looks that are beyond a limit, in execution order."""
        beyond = (look for look in self.looks if look.usage > 1)
        return sorted(beyond, key=lambda look: order_of(look.result))

    @property
    def side(self) -> SideOrBoth | None:
        return None if self.blame is None else self.blame.side

    @property
    def of_token(self) -> bool:
        """Is it a single token that is off?"""
        return (self.why if self.blame is None else self.blame.why) == "token"

    @property
    def in_tail(self) -> bool:
        """Is a single token off, by the difference alone, and no farther than others lead to?"""
        return self.blame is None and self.why == "token" and self.worst <= CLEAR_TIMES * self.tail

    @property
    def of(self) -> Side | None:
        """The side whose escalated pass this is."""
        return self.results[0].of

    def x_at(self, place: PromptStep | None = None) -> float:
        """log W of the median rows, in one forward or in all; 0 where no truth tells it."""
        if self.judged is None:
            return 0.0
        judged, member = self.judged
        x = judged.typical[member] if place is None else judged.typical_at[member].get(place, 0.0)
        return 0.0 if math.isnan(x) else x

    @property
    def first(self) -> SiteResult:
        """The first result in execution order that is beyond the limit (else the first)."""
        if self.why == "forward" and self.beyond:
            return self.beyond[0].result
        if self.blame is not None and self.blame.why in ("forward", "token"):
            return self.blame.at
        if self.why == "token":
            beyond = [result for result in self.results if worst_of(result) > self.worst_limit]
        else:
            beyond = [result for result in self.results if (result.ratio or 0) > self.limit]
        return min(beyond or self.results, key=order_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedUnits:
    """The units of the pass that counts, held against their limits."""

    units: list[Unit]
    unanchored: list[int]
    """Steps that no anchor reached."""
    escalation: Escalation

    @property
    def flagged(self) -> list[Unit]:
        """Beyond what rounding explains, in execution order."""
        return [unit for unit in self.units if unit.why is not None]


def build_units(results: Iterable[SiteResult], pass_: str) -> list[Unit]:
    """Units of a pass in execution order; only judged floating-point sites."""
    results = list(results)
    stacks = stacks_of(results)
    units: dict[tuple[str, str], Unit] = {}
    for result in results:
        if result.pass_ != pass_ or result.ratio is None:
            continue
        path, _, port = result.site.partition(":")
        # what an optimizer gets is made by clipping
        made = pass_ != "free" and (result.role == "inner" or OPTIMIZER in result.site)
        within = "" if result.block is None else result.site[len(result.block) :]
        if (
            is_codes(port)
            or (port.startswith("in") and not made)  # judged where it goes out
            or ".experts." in within  # rows are whatever tokens were sent there
            or (pass_ == "free" and is_whole(path, stacks))  # what it inherits is everything
        ):
            continue
        phase = result.phase
        kind: Kind = ("trunk", path, port, result.kind, phase)
        if result.block is not None:
            # the place inside the block: model.layers.3.mlp.up_proj → .mlp.up_proj; an encoder's
            # blocks are no controls for a decoder's, which run at other shapes
            stack = result.block.rpartition(".")[0]
            kind = ("block", path[len(result.block) :], port, result.kind, phase, stack)
        unit = units.setdefault((result.site, phase), Unit(result.site, pass_, phase, kind))
        unit.results.append(result)
        # one look a forward; of a batch, one for each of its prompts
        whole = PromptRatio(
            sample=result.sample,
            ratio=result.ratio,
            num_rows=num_rows(result),
            ratio_max=worst_of(result),
        )
        members = result.prompts or [whole]
        total = sum(member.num_rows for member in members)
        unit.looks += [
            Look(
                result,
                each.sample,
                each.ratio,
                each.num_rows,
                each.num_rows / total,
                worst=each.ratio_max or 0.0,
            )
            for each in members
        ]
    for unit in units.values():
        unit.typical = statistics.median(result.ratio or 0.0 for result in unit.results)
        farthest = max(unit.results, key=worst_of)
        unit.worst = worst_of(farthest)
        unit.sink = unit.worst > (farthest.ratio_max or 0.0)
    return sorted(units.values(), key=lambda unit: min(map(order_of, unit.results)))


def num_values(result: SiteResult) -> int:
    """Count the independent numbers that errors are made of: of an estimate, projections."""
    if is_norm(result.site):
        return ENOUGH
    return result.numel if result.estimated is None else result.estimated.num_values


def num_columns(result: SiteResult) -> int:
    """Return how many numbers a row's error is made of."""
    if result.estimated is not None:
        return result.estimated.num_projections
    return result.shape[-1] if result.shape else 1


def numbers_alike(result: SiteResult) -> float:
    """Return how many numbers of one size make an error of that norm and largest element: the
    largest square of n of them is 2 ln n times their mean one."""
    largest, size = result.max_abs, (result.rel_l2 or 0.0) * (result.reference_norm or 0.0)
    if result.estimated is not None or is_norm(result.site):
        return float(ENOUGH)
    most = float(max(1, result.numel))
    if not largest or not 0 < size / largest < math.inf:
        return most
    alike = max(1.0, (size / largest) ** 2)
    return min(most, alike * max(1.0, 2 * math.log(alike)))


def few_numbers(result: SiteResult) -> float:
    """Factor on a limit where a few elements hold the error, as a massive activation's rounding.

    The floor is a model, so the error of n numbers in floors is √(χ²_n / n); its quantile that one
    in a million exceeds (Wilson and Hilferty 1931), over that of as many as limits are made for.
    """

    def quantile(n: float) -> float:
        return math.pow(1 - 2 / (9 * n) + 4.75 * math.sqrt(2 / (9 * n)), 1.5)

    return max(1.0, quantile(numbers_alike(result)) / quantile(ENOUGH))


def tail_of(ratios: Floats) -> float:
    """The largest of a site's rows' ratios that is reached from a floor, or the typical row, by
    steps of at most ``CLEAR_TIMES`` times."""
    ordered = np.sort(np.maximum(ratios, 1.0))[len(ratios) // 2 :]
    apart = np.flatnonzero(ordered[1:] > CLEAR_TIMES * ordered[:-1])
    return float(ordered[apart[0] if len(apart) else -1]) if len(ordered) else 0.0


def families_of(units: Iterable[Unit]) -> list[list[Unit]]:
    """Units that are each other's siblings, together."""
    return list(grouped(units, lambda unit: (unit.pass_, unit.of, *unit.kind)).values())


def block_outputs(units: Iterable[Unit]) -> list[Unit]:
    """The blocks' own outputs where blocks got equal inputs."""
    whole = (unit for unit in units if unit.pass_ != "free" and unit.kind[0] == "block")
    return [u for u in whole if not u.kind[1] or u.kind[1:3] == (BACKWARD, "out")]


def medians(values: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """The median by key, where enough values tell."""
    by_key = grouped(values, lambda item: item[0])
    return {
        key: statistics.median(value for _, value in items)
        for key, items in by_key.items()
        if len(items) >= FEWEST_SIBLINGS
    }


def stacks_of(results: Iterable[SiteResult]) -> set[str]:
    return {result.block.rpartition(".")[0] for result in results if result.block is not None}


def is_whole(path: str, stacks: set[str]) -> bool:
    """Is it the model, or holds it a whole stack?"""
    return path == ROOT or any(stack.startswith(path + ".") for stack in stacks)


_NARROWER: tuple[Level, ...] = ("site", "forward", "row")
"""Each holds the next one."""


def visible_of(units: Sequence[Unit]) -> Visible | None:
    """The size that is seen in the middle block, the larger one of prefill and decode, if any."""
    blocks = [unit for unit in units if unit.results[0].role == "block"]
    levels: dict[Level, float] = {}
    for group in grouped(blocks, lambda unit: unit.phase).values():
        members = [unit.visible for unit in group]
        for level in dict.fromkeys(level for sizes in members for level in sizes):
            at_level = [sizes[level] for sizes in members if level in sizes]
            levels[level] = max(levels.get(level, 0.0), statistics.median(at_level))
    least = 0.0
    for level in (each for each in _NARROWER if each in levels):  # a phase may not tell all
        levels[level] = least = max(least, levels[level])
    finite = {level: size for level, size in levels.items() if size < 1}
    if "site" not in finite:
        return None
    return Visible(
        block=finite["site"],
        forward=finite.get("forward"),
        token=finite.get("row"),
        channel=finite.get("channel"),
    )


def narrowed(sizes: dict[Level, float]) -> dict[Level, float]:
    """Narrow what is seen in one row to where it is so in all of a forward, or of a block."""
    least, made = math.inf, dict(sizes)
    for level in reversed(_NARROWER):
        if level in sizes:
            made[level] = least = min(least, sizes[level])
    return made


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
        family_least = max(LEAST_FLOORS, family_least * statistics.median(errors))
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
        finer = odds < -SURE_LOG_ODDS
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
        if len(with_gains) < FEWEST_SIBLINGS:
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
    prompts, and sharp attention enlarges its rounding of a token.

    A table of blocks and forwards cannot ask this: that another kernel ran in one block for one
    prompt is in neither effect. Judged so, the hardest token of such a healthy prompt is an
    outlier (tests/analyses/blocks/test_everywhere.py has it)."""
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
            look.is_odd = single and same and len(looks) >= FEWEST_SIBLINGS


def _difference_of(unit: Unit, thresholds: Thresholds) -> TruthStats:
    """The two sides' difference in each forward of each prompt, as a table's rows. The floor is a
    model: no chance is in it, and the error that is held against it is of so many numbers."""
    ratios = np.array([look.typical for look in unit.looks])
    numbers = np.array([numbers_alike(look.result) * look.share for look in unit.looks])
    cancel = [
        CANCELLING_TIMES if look.result.role == "inner" and look.num_rows < FEW_ROWS else 1.0
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
        if len(judged.stats) >= FEWEST_SIBLINGS:
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
    unit.worst_limit = (alone if unit.worst > CLEAR_TIMES * leads_up else token) * width * wider
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
                beside = max(beside, CLEAR_TIMES * hardest)
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
        if len(family) >= FEWEST_SIBLINGS:
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
    for unit in (unit for family in families if len(family) < FEWEST_SIBLINGS for unit in family):
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
            if len(stats) < FEWEST_SIBLINGS:
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
        if len(family) >= FEWEST_SIBLINGS:
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
    forwards, hard = unit.stats.forwards, CLEAR_TIMES * unit.stats.hardest
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
    limit = max(unit.worst_limit, thresholds.typical, CLEAR_TIMES * unit.tail)
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


# Suspects: the units beyond what rounding explains, alone or all of a kind, and what to run next.
#
# Without a truth the difference of the two sides is held against a rounding model and against the
# siblings. With one, each side's own error is.
#
# The escalated pass is the anchored one in float32, held against the float32 floor and, as every
# pass, against the truth. A 16-bit dtype hides what is smaller than its own rounding. In float32 a
# wrong formula or wrong data exceeds the floor a hundredfold, and what only the 16-bit kernels do
# wrong is gone, so the two passes together tell one from the other.
#
# Most of a kind beyond their limits is a *family*: a kernel or a setting, not a layer.


@dataclass(frozen=True, slots=True)
class Escalation:
    """Says what the escalated pass shows. ``judged``: sides whose escalated pass was compared
    (None: both with each other)."""

    units: list[Unit]
    judged: set[Side | None]

    @property
    def flagged(self) -> list[Unit]:
        """Lists the units beyond what float32 explains."""
        return [unit for unit in self.units if unit.why is not None]

    @property
    def complete(self) -> bool:
        """Nothing is hidden on either side."""
        return None in self.judged or {"reference", "candidate"} <= self.judged

    @property
    def unseen(self) -> Side | None:
        """The side that was not seen in float32, where the other one was."""
        if self.complete or not self.judged:
            return None
        return SIDES["candidate" not in self.judged]

    @property
    def side(self) -> SideOrBoth | None:
        """Say which run is wrong, as far as the escalated passes tell: of steps that no truth
        reaches the side is that of the same site elsewhere."""
        judged = {unit.site for unit in self.flagged if side_of(unit) is not None}
        if any(unit.site not in judged for unit in self.flagged):
            return None
        return common_side(map(side_of, self.flagged))

    def beside(self, unit: Unit) -> list[Fact]:
        """Return what the float32 pass says of a unit that is flagged in the runs' own dtype."""
        block, site = unit.results[0].block, unit.site
        at_site = [u for u in self.units if u.site == site or (block and u.site == f"{block}:out")]
        at_site = [u for u in at_site if side_of(u) in (None, unit.side) or unit.side is None]
        if not at_site:
            return []
        worst = max(at_site, key=lambda u: u.limit_usage)
        of_token = worst.why == "token"
        ratio, limit = worst.typical, worst.limit
        if of_token:
            ratio, limit = worst.worst, worst.worst_limit
        return [
            fact(
                "blocks.escalated",
                site=worst.site,
                of_token=of_token,
                ratio=ratio,
                limit=limit,
                side=worst.side,
                times=worst.blame and worst.blame.value,
                stays=any(u in self.flagged for u in at_site),
            )
        ]

    def healthy(self) -> list[Fact]:
        """Says that the pass found nothing, and how near it came."""
        if not self.units:
            return []
        worst = max(self.units, key=lambda unit: unit.typical / unit.limit)
        return [
            fact(
                "blocks.escalated_healthy", site=worst.site, ratio=worst.typical, limit=worst.limit
            )
        ]


def escalated_units(sites: Sequence[SiteResult]) -> Escalation:
    """The units of every escalated pass that was compared."""
    units: list[Unit] = []
    sides = {site.of for site in sites if site.pass_ == "escalated"}
    for of in sorted(sides, key=str):
        units += build_units((s for s in sites if s.of == of and not is_table(s)), "escalated")
    return Escalation(units, sides)


def side_of(unit: Unit) -> SideOrBoth | None:
    """Say which side is wrong: the one that is judged by itself, or that the truth blames."""
    return unit.results[0].of or unit.side


@dataclass(frozen=True, slots=True)
class Family:
    """All of a kind, off together. ``name``: a class, or a fact that tells which of it are
    meant."""

    name: str | Fact
    members: list[Unit]
    num_all: int


def find_family(
    units: Sequence[Unit], flagged: Sequence[Unit], measured: Measured
) -> Family | None:
    """The kind of the onset, where more than half of at least three of its kind are flagged, or off
    by the same measure as a flagged one, or by more than rounding where nothing lets them differ;
    or where those that are flagged are most of one type of layer.

    What follows a bad module inside a block is off as well, so the first kind in execution
    order counts. Where every place of its class is off, the class is named alone.
    """
    # in a free pass one bad token is off in all that follows
    judged = [unit for unit in flagged if unit.pass_ != "free" or unit.why in _WHOLE]
    judged = [unit for unit in judged if unit.kind[0] == "block"]
    judged.sort(key=lambda unit: order_of(unit.first))
    for unit in judged:
        kin = [other for other in units if other.kind == unit.kind]
        places = places_of(unit)
        members = [
            other
            for other in judged
            if other.kind == unit.kind
            and other.side in (None, unit.side)  # two faults are no kind
            and places & places_of(other)
        ]
        name = _name(unit, units, judged)
        off, every = ({str(each.results[0].block) for each in some} for some in (members, kin))
        for type_, blocks in layer_types_of(measured, every).items():
            if off <= blocks < every and 2 * len(off) > len(blocks) >= FEWEST_SIBLINGS:
                of_type = fact("blocks.kind_of_type", kind=name, type=type_)
                return Family(of_type, members, len(blocks))
        if 2 * len(members) <= len(kin):
            members = _off_alike(unit, kin, measured)
        if 2 * len(members) > len(kin) >= FEWEST_SIBLINGS:
            return Family(name, members, len(kin))
    return None


def layer_types_of(measured: Measured, blocks: Iterable[str]) -> dict[str, set[str]]:
    """The blocks of each type that the model's configuration lists; none where it lists none."""
    config = measured.reference.manifest.model.config
    listed = config.get("layer_types", config.get("text_config.layer_types"))
    kinds: dict[str, set[str]] = {}
    for block in blocks:
        number = block.rpartition(".")[2]
        if isinstance(listed, list) and number.isdigit() and int(number) < len(listed):
            kinds.setdefault(str(listed[int(number)]), set()).add(block)
    return kinds


def only_step(measured: Measured) -> int | None:
    """The decode step that holds all that differs, of several that were given equal inputs."""
    rows = [site for site in measured.sites if site.pass_ == "anchored" and site.step]
    steps = {site.step for site in rows if not site.identical}
    others = {site.step for site in rows} - steps
    prefill = any(
        site.pass_ == "anchored" and not site.step and not site.identical for site in measured.sites
    )
    return (
        steps.pop() if len(steps) == 1 and len(others) >= FEWEST_SIBLINGS and not prefill else None
    )


def places_of(unit: Unit) -> set[PromptStep]:
    """The forwards in which a flagged unit is off: all, where it is so by its typical token."""
    if unit.why in ("forward", "token"):
        beyond = {look.place for look in unit.beyond}
        return beyond or {(unit.first.sample, unit.first.step)}
    return {look.place for look in unit.looks}


def _off_alike(unit: Unit, kin: Sequence[Unit], measured: Measured) -> list[Unit]:
    """Lists those of a kind that are off as a flagged one of them is, although within their own
    limits: it is the first to pass, and not what is wrong. None where it stands out from them by
    itself."""
    if unit.why not in ("typical", "forward"):
        return []
    thresholds, places = measured.thresholds, places_of(unit)
    near = thresholds.truth_confirm
    others = [other for other in kin if other is not unit]
    if unit.blame is not None:
        beside_them = unit.blame.like is None and unit.blame.why != "gain"  # among its siblings
        if beside_them and unit.blame.value > thresholds.truth_systematic * unit.blame.control:
            return []
        side, times = farther_side(kin, thresholds.truth_standout) or (None, 0.0)
        if side != unit.side or times <= near:
            return []
        sign = 1 if side == "candidate" else -1
        alike = (
            other
            for other in others
            if statistics.median(sign * other.x_at(place) for place in places) > math.log(near)
        )
        return [unit, *alike]
    # Where nothing lets the runs differ there are no other kernels, and what is beyond so many
    # floors is no rounding; but float32 sums have an order, and a training step hands on the errors
    # of what it is given. A limit that its siblings set is far above them: near to it is nobody but
    # the unit.
    unexplained = measured.unexplained and not measured.reference.manifest.training.train
    if unit.typical > thresholds.standout**2 * statistics.median(o.typical for o in others):
        unexplained = False
    limits = {look.place: look.limit for look in unit.beyond}
    level = statistics.median(other.typical for other in others)
    most = thresholds.truth_systematic * level
    among_them = unit.why == "typical" and near**2 < level and unit.typical < most

    def is_off(other: Unit) -> bool:
        if among_them:  # all are beyond what rounding makes, and it is no farther than others are
            return other.typical > near**2
        ratios = [(other.typical, unit.limit)]
        if unit.why == "forward":
            looks = (look for look in other.looks if look.place in limits)
            ratios = [(look.typical, limits[look.place]) for look in looks] or [(0.0, 1.0)]
        if unexplained:
            beyond = near if measured.narrow else near**2
            return statistics.median(ratio for ratio, _ in ratios) > beyond
        return statistics.median(ratio / limit for ratio, limit in ratios) > 1 / near

    return [unit, *filter(is_off, others)]


def farther_side(family: Sequence[Unit], times: float) -> tuple[Side, float] | None:
    """Finds (side, W), the side that is farther from the truth than the other in all of a kind, by
    their median, and by more than so many ``times`` and chance; None where there is none, or not
    all were judged together."""
    judged = [unit.judged[0] for unit in family if unit.judged is not None]
    if len(judged) < max(FEWEST_SIBLINGS, len(family)):
        return None
    usual = judged[0].usual
    limit = math.log(times * max(unit.widened for unit in family))
    if not abs(usual) > limit + judged[0].usual_reach:
        return None
    return SIDES[usual > 0], math.exp(min(abs(usual), 700.0))


_WHOLE = ("typical", "both", "gain", "forward")


def _name(unit: Unit, units: Sequence[Unit], judged: Sequence[Unit]) -> str | Fact:
    """A family's name: its class, or one place of it; for what enters a module, the module around
    it, whose own code lies between."""
    _, path, port, kind, *_ = unit.kind
    place = path.removeprefix(".")
    if not place:
        return kind or "block"
    if port.startswith("in"):
        around = path.rpartition(".")[0]
        outer = next((u.kind[3] for u in units if u.kind[0] == "block" and u.kind[1] == around), "")
        where = around.removeprefix(".") or "block"
        if outer:
            return fact("blocks.kind_entering", kind=outer, place=where, module=place)
        return fact("blocks.kind_input", kind=kind, place=place)
    entering = {u.site: u for u in units if u.kind[2] == "in"}

    def is_source(other: Unit) -> bool:
        """An output of the same class in the same phase, whose module was entered by what passes,
        or by an error that its own stands out from."""
        if other.kind[0] != "block" or other.kind[2:5] != unit.kind[2:5] or not other.kind[1]:
            return False
        fed = entering.get(other.site.rpartition(":")[0] + ":in")
        if other.kind == unit.kind or fed is None or fed.why is None:
            return other.kind == unit.kind or fed is not None
        given, own = (each.results[0].truth for each in (fed, other))
        if given is None or own is None or other.side not in ("reference", "candidate"):
            return False
        before, after = (getattr(truth, f"{other.side}_error") for truth in (given, own))
        return bool(after > THRESHOLDS.truth_confirm * before)

    sources = [other for other in units if is_source(other)]
    if len({u.kind[1] for u in sources}) == 1 or not all(u in judged for u in sources):
        return fact("blocks.kind_at", kind=kind, place=place)
    if kind in ("Linear", "Conv1D"):
        return fact("blocks.kind_products", kind=kind, dtype=unit.results[0].candidate_dtype)
    return kind or place


def next_commands(measured: Measured, unit: Unit | None, escalation: Escalation) -> list[Command]:
    """Return what to run next. ``unit``: the one that the verdict is about, if it is about one."""
    advice = measured.advice
    if not measured.anchored:
        more = advice.certainty(_outside_blocks(measured.sites))
        return more or ([] if unit is None else advice.look_at(unit.site))
    commands: list[Command] = []
    again: list[Command] = []
    unmeasured = [site for site in measured.sites if site.is_unmeasured]
    if unmeasured or (unit is not None and any(r.estimated for r in unit.results)):
        named = [site.site for site in unmeasured if site.role == "inner"]
        again = advice.in_full([*_outside_blocks(measured.sites), *dict.fromkeys(named)])
        commands += again
        if unit is None and commands:
            return commands
    if unit is not None:
        block = unit.results[0].block
        # the block's own, or a gradient of its parameters: then its operators tell more
        path = unit.site.partition(":")[0]
        own = block is not None and path in (block, block + BACKWARD)
        own = own or (is_of_parameter(unit.site) and BACKWARD in unit.site)
        if block is not None and (own or made_before(measured, unit)):
            commands += advice.into_block(block, hidden=unit.pass_ == "escalated")
        else:
            commands += [*advice.descent(), *advice.look_at(unit.site)]
        sides = measured.reference.manifest, measured.candidate.manifest
        if measured.truth is None and unit.side is None and truth_tells(*sides, block):
            commands += advice.judged() or advice.truth(full=bool(again))
    if measured.narrow and not escalation.complete and unit is None:
        made = advice.escalated and measured.truth is None  # and a truth judges it
        if made:
            commands += advice.judged() or advice.truth()
        else:
            commands += advice.escalate(escalation.unseen)
    return commands


def made_before(measured: Measured, unit: Unit) -> bool:
    """May the error be made before the module inside a block that is off? So it is where nothing
    tells that what enters the module is right."""
    result, module = unit.results[0], module_of(unit.site)
    if result.role != "inner" or unit.pass_ == "free" or is_of_parameter(unit.site):
        return False
    entries = (f"{module}:in", f"{module}:in.")
    return not any(
        site.pass_ == unit.pass_ and site.site.startswith(entries) for site in measured.sites
    )


def _outside_blocks(sites: Sequence[SiteResult]) -> list[str]:
    """Flagged sites that recording the blocks' own inputs and outputs would leave out."""
    return list(dict.fromkeys(s.site for s in sites if s.flagged and s.role == "inner"))

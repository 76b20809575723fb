"""Units: what is judged of a comparison, block by block, and what is beyond rounding.

A unit is a site of one pass and phase, over all its forwards: its measurements (``Unit``), and what
was judged of them (``JudgedUnit``). Neither is changed once it is built. The judge's questions, in
order, and who answers them:

* *exact*: blocks.find, before anything is measured in floors (nan and inf, equal bits);
* *outlier*: ``judge_units``. First of the two sides' difference (``_difference_judged``), then,
  where there is a truth, of each side's own error (``_truth_judged``);
* *family*: all of one kind off together, by their median (``_kind_judged``), in one forward, row
  or channel (``_columns_judged``);
* *accumulated*: blocks.find (``find_drifts``), where nothing is beyond its limit;
* *scope*: blocks.onset tells the kind that a fault runs through, and the prompts, steps and tokens;
* *masks*: ``build_units`` leaves out what may not be judged; ``Unit.chooses`` tells where rounding
  may send a token to another expert.

An observation holds one side's error against the other's, beside the same place in the other blocks
of its kind: W = err(b, R) / err(a, R). What makes a block hard (sharp attention, large activations)
troubles both sides alike and cancels in W; what makes one side's kernels coarser troubles all
blocks alike and cancels beside the siblings. Left is what happened to one side in one block. Where
no truth tells the errors apart, the rounding model stands for the side whose error is known.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from divergence.comparison.align import PromptStep
from divergence.comparison.analysis import Measured, Shown
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
    times_of,
)
from divergence.comparison.measure.truth import (
    ForwardStats,
    RowErrors,
    SamplesBySite,
    TruthStats,
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

Why = Literal["typical", "forward", "token", "channel", "gain", "both"]
"""The questions; the one whose limit is exceeded is why a unit is flagged."""


# What is measured.


class Kind(NamedTuple):
    """What units of one kind have in common. They share dtype, shapes and kernels, so each other's
    siblings are the controls of an experiment in which one block is suspected."""

    role: Literal["block", "trunk"]
    place: str
    """Path inside the block (``.mlp.up_proj``), or in the trunk."""
    port: str
    class_: str | None
    phase: str
    stack: str = ""
    """Of blocks: an encoder's are no controls for a decoder's, which run at other shapes."""

    @property
    def any_phase(self) -> Kind:
        """The kind in prefill and decode alike."""
        return self._replace(phase="")


@dataclass(frozen=True, eq=False)
class Look:
    """One forward of one prompt at one site, which is judged by itself: a fault in one prompt of
    eight, or in one decode step of 64, disappears in a median over all of them."""

    result: SiteResult
    sample: int
    typical: float
    """Its median token's ratio."""
    worst: float
    """Its worst token's ratio."""
    num_rows: int
    share: float
    """Of the result's numbers, those that belong to this prompt."""

    @property
    def place(self) -> PromptStep:
        return self.sample, self.result.step


@dataclass(frozen=True, eq=False)
class Unit:
    """All measurements of one site in one pass and phase (run.site.PHASES)."""

    site: str
    pass_: str
    phase: str
    kind: Kind
    results: list[SiteResult]
    looks: Sequence[Look]
    """Each forward of each prompt."""
    typical: float
    """Median over forwards of the median token's ratio."""
    worst: float
    """Largest ratio of any token."""
    sink: bool
    """Is that a sink's?"""
    hardest: float
    """Largest ratio of any token of the prefill at this site."""
    tail: float
    """The largest ratio of its rows that no gap parts from the typical one (``tail_of``)."""
    mostly_equal: bool
    """Are most of its rows equal bit for bit, where inputs were equal?"""
    widened: float
    """Factor on all limits, from what trusted runs have shown."""
    truth: TruthStats | None
    """The site against the truth, where one was given."""

    @property
    def block(self) -> str | None:
        return self.results[0].block

    @property
    def of(self) -> Side | None:
        """The side whose escalated pass this is."""
        return self.results[0].of

    def chooses(self, routed: Collection[str]) -> bool:
        """May one token rightly take another way? ``routed``: blocks in which it may, and what is
        so of all gradients."""
        return self.block in routed or (BACKWARD in routed and BACKWARD in self.site)


def build_units(
    results: Iterable[SiteResult],
    pass_: str,
    samples: SamplesBySite | None = None,
    shown: Shown | None = None,
    thresholds: Thresholds = THRESHOLDS,
) -> list[Unit]:
    """Makes the units of a pass, in execution order, of judged floating-point sites.

    ``samples``: of their rows, and of a truth where there is one. ``shown``: shares of limits that
    trusted runs use.
    """
    results, samples = list(results), samples or SamplesBySite()
    stacks = stacks_of(results)
    by_unit = grouped(
        (r for r in results if r.pass_ == pass_ and r.ratio is not None and _counts(r, stacks)),
        lambda result: (result.site, result.phase),
    )
    units = []
    for (site, phase), own in by_unit.items():
        first, (path, _, port) = own[0], site.partition(":")
        kind = Kind("trunk", path, port, first.kind, phase)
        if first.block is not None:
            stack = first.block.rpartition(".")[0]
            kind = Kind("block", path[len(first.block) :], port, first.kind, phase, stack)
        farthest = max(own, key=worst_of)
        ratios, against = samples.ratios(pass_, site, phase), samples.find(pass_, site, phase)
        num_differing = int(np.count_nonzero(ratios))
        if is_table(first) and first.reference_dtype != first.candidate_dtype:
            against = None
        unit = Unit(
            site=site,
            pass_=pass_,
            phase=phase,
            kind=kind,
            results=own,
            looks=[look for result in own for look in _looks_of(result)],
            typical=statistics.median(result.ratio or 0.0 for result in own),
            worst=worst_of(farthest),
            sink=worst_of(farthest) > (farthest.ratio_max or 0.0),
            hardest=max(map(worst_of, by_unit.get((site, "prefill"), [])), default=0.0),
            tail=tail_of(ratios),
            mostly_equal=pass_ != "free" and 0 < 2 * num_differing < sum(map(num_rows, own)),
            widened=max(1.0, thresholds.widen * (shown or {}).get((pass_, site, phase), 0.0)),
            truth=None if against is None else against.stats,
        )
        units.append(unit)
    return sorted(units, key=lambda unit: min(map(order_of, unit.results)))


def _counts(result: SiteResult, stacks: set[str]) -> bool:
    """Is a site judged as a unit?"""
    path, _, port = result.site.partition(":")
    # what an optimizer gets is made by clipping
    made = result.pass_ != "free" and (result.role == "inner" or OPTIMIZER in result.site)
    within = "" if result.block is None else result.site[len(result.block) :]
    return not (
        is_codes(port)
        or (port.startswith("in") and not made)  # judged where it goes out
        or ".experts." in within  # rows are whatever tokens were sent there
        or (result.pass_ == "free" and is_whole(path, stacks))  # what it inherits is everything
    )


def _looks_of(result: SiteResult) -> list[Look]:
    """Makes one look of a forward; of a batch, one for each of its prompts."""
    whole = PromptRatio(
        sample=result.sample,
        ratio=result.ratio or 0.0,
        num_rows=num_rows(result),
        ratio_max=worst_of(result),
    )
    prompts = result.prompts or [whole]
    total = sum(prompt.num_rows for prompt in prompts)
    return [
        Look(result, p.sample, p.ratio, p.ratio_max or 0.0, p.num_rows, p.num_rows / total)
        for p in prompts
    ]


def is_table(result: SiteResult) -> bool:
    """Is it a rotary table? Its float32 angles are the convention, and are off the truth by
    position times u, whatever the dtype: that distance has nothing to do with rounding."""
    return "rotary" in (result.kind or "").lower()


def worst_of(result: SiteResult) -> float:
    """The largest ratio of any token, sinks too."""
    return max(result.ratio_max or 0.0, result.ratio_sink or 0.0)


def num_values(result: SiteResult) -> int:
    """Counts the independent numbers that errors are made of: of an estimate, projections."""
    if is_norm(result.site):
        return ENOUGH
    return result.numel if result.estimated is None else result.estimated.num_values


def num_columns(result: SiteResult) -> int:
    """Counts the numbers that a row's error is made of."""
    if result.estimated is not None:
        return result.estimated.num_projections
    return result.shape[-1] if result.shape else 1


def numbers_alike(result: SiteResult) -> float:
    """Counts how many numbers of one size make an error of that norm and largest element: the
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
    """Makes the factor on a limit where a few elements hold the error, as a massive activation's
    rounding.

    The floor is a model, so the error of n numbers in floors is √(χ²_n / n); its quantile that one
    in a million exceeds (Wilson and Hilferty 1931), over that of as many as limits are made for.
    """

    def quantile(n: float) -> float:
        return math.pow(1 - 2 / (9 * n) + 4.75 * math.sqrt(2 / (9 * n)), 1.5)

    return max(1.0, quantile(numbers_alike(result)) / quantile(ENOUGH))


def tail_of(ratios: Floats) -> float:
    """Finds the largest of a site's rows' ratios that is reached from a floor, or the typical row,
    by steps of at most ``CLEAR_TIMES`` times. Where attention is sharp the rounding of a few scores
    is enlarged, of some tokens more than of others; a fault of attention looks alike."""
    ordered = np.sort(np.maximum(ratios, 1.0))[(len(ratios) - 1) // 2 :]
    apart = np.flatnonzero(ordered[1:] > CLEAR_TIMES * ordered[:-1])
    return float(ordered[apart[0] if len(apart) else -1]) if len(ordered) else 0.0


def stacks_of(results: Iterable[SiteResult]) -> set[str]:
    return {result.block.rpartition(".")[0] for result in results if result.block is not None}


def is_whole(path: str, stacks: set[str]) -> bool:
    """Is it the model, or holds it a whole stack?"""
    return path == ROOT or any(stack.startswith(path + ".") for stack in stacks)


_Units = TypeVar("_Units", bound=Unit)
_Key = TypeVar("_Key")


def families_of(units: Iterable[_Units]) -> list[list[_Units]]:
    """Brings units that are each other's siblings together."""
    return list(grouped(units, lambda unit: (unit.pass_, unit.of, *unit.kind)).values())


def block_outputs(units: Iterable[_Units]) -> list[_Units]:
    """The blocks' own outputs where blocks got equal inputs."""
    whole = (unit for unit in units if unit.pass_ != "free" and unit.kind.role == "block")
    return [u for u in whole if not u.kind.place or u.kind[1:3] == (BACKWARD, "out")]


# What is judged of it.


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
    like: Literal["others", "all", "blocks", "alone"] | None = None
    """Whom of its kind it is held against, where that is not the other blocks; of what has no
    siblings the ``blocks``, or nothing (``alone``)."""
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


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedLook(Look):
    """A look, and what it uses of its limits."""

    limit: float
    """Of ``typical``; 0 where that is not judged."""
    usage: float
    """The largest share of any limit of the forward that is used: over 1 where it is beyond one."""
    between: float
    """The share that is used of the limit on the two sides' difference, which needs no truth."""
    of_token: float
    """The share of a single token's limit that its worst token uses."""
    side: SideOrBoth | None = None
    """Whom the truth's answer of the largest usage blames."""

    @property
    def used(self) -> float:
        """The largest share of any limit."""
        return max(self.usage, self.of_token)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a unit stands to the truth beside its kind."""

    stats: TruthStats
    x: Mapping[PromptStep | None, float]
    """log W of the median rows, of each forward and at None of all; 0 where it is not known."""
    usual: float
    """The same of its kind, by the members' medians."""
    usual_reach: float
    """By how much chance may move that."""
    odds: float
    """In log: that the farther side's error is larger than in its siblings, against that the
    other's is smaller."""


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedUnit(Unit):
    """A unit, and what was judged of it."""

    thresholds: Thresholds
    """Those it was held against."""
    looks: Sequence[JudgedLook]
    why: Why | None
    """The limit that was exceeded, or what the truth blames; None where the unit is within all
    limits."""
    control: float | None
    """Median of the siblings' ``typical``; None without any."""
    limit: float
    """Limit of ``typical``."""
    worst_limit: float
    """Limit of ``worst``."""
    limit_usage: float
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    between: float
    """The same over the limits on the two sides' difference, which need no truth."""
    shown: float
    """The largest ratio over its limit, which is what a trusted run widens limits by."""
    visible: Mapping[Level, float]
    """Of a block, by level, the smallest error that would have been beyond a limit."""
    blame: Blame | None = None
    """What the truth blames, if anything."""
    too_few: bool = False
    """Is one side farther from the truth than any healthy kernel, by an error of too few numbers to
    convict it?"""
    excused: bool = False
    """Do the sides differ by more than the rounding model has it, and are equally near the truth?
    """
    standing: Standing | None = None
    """Where a truth was asked beside the siblings."""

    @property
    def side(self) -> SideOrBoth | None:
        return None if self.blame is None else self.blame.side

    @property
    def margin(self) -> float:
        """By how much the unit is beyond its limits: of the two that agree, the larger one."""
        if self.blame is None:
            return self.between
        if self.blame.side == "both":
            return self.blame.limit_usage
        return max(self.blame.limit_usage, self.between)

    @property
    def beyond(self) -> list[JudgedLook]:
        """The looks that are beyond a limit by the unit's side, in execution order."""
        beyond = (look for look in self.looks if look.usage > 1 and look not in self.others)
        return sorted(beyond, key=lambda look: order_of(look.result))

    @functools.cached_property
    def others(self) -> list[JudgedLook]:
        """The looks that are beyond a limit by the other side than the unit's."""
        both = set(SIDES)
        return [look for look in self.looks if look.used > 1 and {look.side, self.side} == both]

    @property
    def of_token(self) -> bool:
        """Is it a single token that is off?"""
        return (self.why if self.blame is None else self.blame.why) == "token"

    @property
    def in_tail(self) -> bool:
        """Is it off by the difference alone, and no farther than others lead to: a single token
        beside its site's, a site beside siblings that rounding does not explain either?"""
        if self.blame is not None or self.why not in ("token", "typical"):
            return False
        if self.why == "token":
            return self.worst <= CLEAR_TIMES * self.tail
        control = self.control or 0.0
        far = self.thresholds.standout**2 * control
        return control > self.thresholds.truth_standout and self.typical <= far

    def farther(self, side: SideOrBoth | None, place: PromptStep | None = None) -> float:
        """log W of the median rows, in one forward or in all, of a side (the reference's, or else
        the candidate's) over the other; 0 where no truth tells it."""
        x = 0.0 if self.standing is None else self.standing.x.get(place, 0.0)
        return -x if side == "reference" else x

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


def judge_units(
    units: Sequence[Unit],
    *,
    routed: frozenset[str] = frozenset(),
    thresholds: Thresholds = THRESHOLDS,
) -> list[JudgedUnit]:
    """Judges units of any passes: the outlier and the family questions, first of the two sides'
    difference, then of each side's distance from the truth.

    ``routed``: blocks in which rounding may send a token to another expert.
    """
    # In a free pass a block is allowed what it may make of an error that came in, the first one
    # nothing: their ratios are no measure for each other.
    equal_inputs = [unit for unit in units if unit.pass_ != "free"]
    differences = {unit: _difference_of(unit, thresholds) for unit in equal_inputs}
    tables = _ask_all(differences, frozenset(), thresholds)
    odd = {id(look) for family in families_of(units) for look in _odd_looks(family, thresholds)}
    judged = {
        unit: _difference_judged(unit, tables.get(unit), odd, unit.chooses(routed), thresholds)
        for unit in units
    }
    # Of a free pass a truth tells which side is wrong where the two differ by more than rounding:
    # it neither excuses a difference there nor finds another, since inputs were not equal.
    truths = {unit: unit.truth for unit in units if unit.truth is not None}
    free = {unit: stats for unit, stats in truths.items() if unit.pass_ == "free"}
    limits = _limits(free.values())
    for unit, stats in free.items():
        if judged[unit].why is not None and not unit.chooses(routed):
            alone = judged_family([stats], limits, False, thresholds, BlocksBeside())
            answers = FamilyMember(alone, 0, unit.widened).answers(thresholds)
            blame = next((answer for answer in answers if answer.limit_usage > 1), None)
            judged[unit] = replace(judged[unit], blame=blame)
        del truths[unit]
    tables = _ask_all(truths, routed, thresholds)
    # An observation whose numbers hang on few channels is asked again in each channel's own unit
    # (``measure_in_units``), together with those siblings of which it is so, too.
    again = {unit: stats.in_units for unit, stats in truths.items() if stats.in_units}
    in_units = _ask_together(again, _limits_by_pass(truths), routed, thresholds)
    for family in families_of(truths):
        members = [
            _truth_judged(judged[unit], tables[unit], in_units.get(unit), thresholds)
            for unit in family
        ]
        together = tables[family[0]].family
        if len(family) >= FEWEST_SIBLINGS:
            members = _kind_judged(members, thresholds)
            if not together.routed:
                members = _columns_judged(members, together, thresholds)
        judged |= zip(family, members, strict=True)
    return list(judged.values())


# Tables: each site, forward, row and channel beside the same of its siblings (comparison.judge). A
# site without siblings is held against the blocks' W, where that excuses it: kernels of one side
# that are coarser everywhere are. It never blames it: the blocks may be what is wrong.


def _limits(stats: Iterable[TruthStats]) -> dict[Level, float]:
    """Tells the deviate of an outlier among all that are looked at, by level."""
    asked = [each for own in stats for each in (own, own.in_units) if each is not None]
    counts: dict[Level, int] = {
        "site": len(asked),
        "forward": sum(len(each.forwards) for each in asked),
        "row": sum(each.num_rows for each in asked),
        "channel": sum(each.channels.energy.shape[1] for each in asked if each.channels),
    }
    return {level: limit_of(count) for level, count in counts.items()}


def _limits_by_pass(stats: Mapping[Unit, TruthStats]) -> dict[str, dict[Level, float]]:
    by_pass = grouped(stats, lambda unit: unit.pass_)
    return {pass_: _limits(stats[unit] for unit in alike) for pass_, alike in by_pass.items()}


def _ask_together(
    stats: Mapping[Unit, TruthStats],
    limits: Mapping[str, Mapping[Level, float]],
    routed: frozenset[str],
    thresholds: Thresholds,
) -> dict[Unit, FamilyMember]:
    """Asks the judge of each kind that has enough members."""
    members: dict[Unit, FamilyMember] = {}
    for family in families_of(stats):
        if len(family) >= FEWEST_SIBLINGS:
            in_routed = any(unit.chooses(routed) for unit in family)
            of_pass = limits[family[0].pass_]
            together = judged_family([stats[u] for u in family], of_pass, in_routed, thresholds)
            members |= {
                unit: FamilyMember(together, n, unit.widened) for n, unit in enumerate(family)
            }
    return members


def _ask_all(
    stats: Mapping[Unit, TruthStats], routed: frozenset[str], thresholds: Thresholds
) -> dict[Unit, FamilyMember]:
    """Asks the judge of each unit: together with its siblings; without any, beside the blocks'
    outputs. No difference is judged so where these are not known; and a parameter's gradient beside
    the blocks' gradients, if they differ by more: how prompts are added up moves them and no
    output."""
    limits = _limits_by_pass(stats)
    members = _ask_together(stats, limits, routed, thresholds)

    def ask_alone(unit: Unit, beside: BlocksBeside) -> FamilyMember:
        of_pass = limits[unit.pass_]
        alone = judged_family([stats[unit]], of_pass, unit.chooses(routed), thresholds, beside)
        return FamilyMember(alone, 0, unit.widened)

    def usual_of(among: Iterable[Unit]) -> dict[tuple[object, ...], BlocksBeside]:
        """The median x, and that of each forward, by pass and phase."""
        sites = defaultdict[tuple[object, ...], list[float]](list)
        forwards = defaultdict[tuple[object, ...], dict[PromptStep, list[float]]](dict)
        for unit in among:
            member, kind = members.get(unit), (unit.pass_, unit.of, unit.phase)
            member = member or ask_alone(unit, BlocksBeside())
            sites[kind].append(member.x())
            for look in unit.looks:
                forwards[kind].setdefault(look.place, []).append(member.x(look.place))

        def middle(values: Mapping[_Key, list[float]]) -> dict[_Key, float]:
            many = {key: each for key, each in values.items() if len(each) >= FEWEST_SIBLINGS}
            return {key: statistics.median(each) for key, each in many.items()}

        return {k: BlocksBeside(x, middle(forwards[k])) for k, x in middle(sites).items()}

    between = any(each.is_difference for each in stats.values())
    usual = usual_of(block_outputs(stats))
    in_blocks = (u for u in stats if u.kind.role == "block" and is_of_parameter(u.site))
    gradients = usual_of(in_blocks) if between else {}
    for unit in [unit for unit in stats if unit not in members]:
        kind = unit.pass_, unit.of, unit.phase
        beside = usual.get(kind, BlocksBeside())
        if between:
            if kind not in usual:
                continue
            least = beside.x
            if is_of_parameter(unit.site) and kind in gradients:
                least = max(least, gradients[kind].x)
            at = {k.place: max(least, beside.forwards.get(k.place, least)) for k in unit.looks}
            beside = BlocksBeside(least, at)
        members[unit] = ask_alone(unit, beside)
    return members


@dataclass(frozen=True, slots=True)
class BlocksBeside:
    """Says what a site without siblings is held against: the blocks' median log W, and that of each
    forward."""

    x: float = 0.0
    forwards: Mapping[PromptStep, float] = field(default_factory=dict)


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

    stats: Sequence[TruthStats]
    beside: BlocksBeside | None
    """Of one site without siblings."""
    least: float
    routed: bool
    """May one token go to another expert by rounding?"""
    sites: JudgedTable
    typical: Sequence[Mapping[PromptStep | None, float]]
    """Of each member the median row's x, of each forward; at None of all."""
    usual: float
    """The members' median log W, of the median errors of both sides; 0 of one that is not known."""
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
        """Observes each member over all its rows, (M, 1) twice."""
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

    def judged(
        level: Level,
        sigma: float,
        x: Floats,
        own: Floats,
        usual: Floats,
        kept: npt.NDArray[np.bool_] | None = None,
    ) -> JudgedTable:
        """Asks the judge one table. ``usual``: of the blocks; it excuses a site without siblings
        that is off as they are."""
        control, sigma = None, thresholds.ratio_spread if between else sigma
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
    sites = judged("site", thresholds.site_spread, x, np.where(equal, 0.0, own), blocks)
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
        forwards = judged("forward", thresholds.forward_spread, *of_places, usual, finer)
    if not routed and (counts > 1).any():
        of_rows = observed(energy, numbers, least)
        rows = judged("row", thresholds.row_spread, *of_rows, typical[0], finer)
    medians = np.array([[each.typical[side] for side in SIDES] for each in stats])
    with np.errstate(all="ignore"):
        a, b = np.clip(np.hypot(medians, family_least), 1e-300, 1e300).T
        log_w = np.nan_to_num(np.log(b / a))
    return JudgedFamily(
        stats=stats,
        beside=beside,
        least=family_least,
        routed=routed,
        sites=sites,
        typical=[
            {None: x} | _typical_at(each, family_least)
            for x, each in zip(typical[:, 0].tolist(), rows_of, strict=True)
        ],
        usual=float(np.median(log_w)),
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
    """Tells what excuses a side whose error is the larger: that it is so elsewhere."""
    return np.where(x > 0, np.maximum(usual, 0.0), np.minimum(usual, 0.0))


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


# Answers: what the tables of its kind say of one unit.


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """One unit in the tables of its kind. ``widened``: what trusted runs have shown, as a factor
    >= 1."""

    family: JudgedFamily
    number: int
    widened: float

    @property
    def stats(self) -> TruthStats:
        return self.family.stats[self.number]

    def x(self, place: PromptStep | None = None) -> float:
        """log W of the median rows, in one forward or in all; 0 where it is not known."""
        x = self.family.typical[self.number].get(place, 0.0)
        return 0.0 if math.isnan(x) else x

    def blame(
        self,
        table: JudgedTable,
        column: int,
        why: Why,
        at: SiteResult,
        place: PromptStep | None = None,
    ) -> Blame:
        """Makes a blame of one cell; of nobody, where no side has an error of its own."""
        x, control, reach = (
            float(values[self.number, column]) for values in (table.x, table.control, table.reach)
        )
        limit = times_of(reach) * self.widened
        if not table.excess(self.number)[column]:
            return Blame("candidate", why, 1.0, 1.0, limit, at, place=place)
        sign = 1 if x > 0 else -1
        value, usual = times_of(sign * x), math.exp(sign * control)
        like: Literal["blocks", "alone"] | None = None
        if len(self.family.stats) == 1:
            like = "alone" if self.family.beside == BlocksBeside() else "blocks"
        return Blame(SIDES[x > 0], why, value, usual, limit, at, like, place)

    def forwards(self) -> dict[PromptStep, Blame]:
        """Answers of each forward; nothing where there is but one."""
        family = self.family
        if family.forwards is None:
            return {}
        return {
            place: self.blame(
                family.forwards, n, "forward", self.stats.forwards[place].result, place
            )
            for n, place in enumerate(family.places)
            if not family.is_few[n]
        }

    def tokens(self) -> dict[PromptStep, tuple[float, SideOrBoth | None]]:
        """Finds, by forward, the largest share of its limit that a row uses, by which side."""
        family = self.family
        if family.rows is None:
            return {}
        reach = family.rows.reach[self.number]
        with np.errstate(all="ignore"):
            ratio, limit = family.rows.excess(self.number) * reach, reach + math.log(self.widened)
            beyond = np.exp(np.minimum(ratio - limit, 300.0))
            used = np.nan_to_num(np.where(ratio > limit, beyond, ratio / limit))
        rows_of = (np.flatnonzero(family.errors.place == n) for n in range(len(family.places)))
        most = [int(rows[used[rows].argmax()]) for rows in rows_of]
        x = family.rows.x[self.number]
        return {
            place: (float(used[row]), SIDES[bool(x[row] > 0)])
            for place, row in zip(family.places, most, strict=True)
        }

    def answers(self, thresholds: Thresholds) -> list[Blame]:
        """Answers every question, the plainest one first."""
        family, stats, first = self.family, self.stats, self.stats.first
        assert first is not None
        typical = self.blame(family.sites, 0, "typical", first)
        blames = []
        own_too = False
        if not is_table(first):
            limit = thresholds.typical * spread(stats.num_values) * self.widened
            nearer = min(SIDES, key=lambda side: stats.typical[side])
            least = stats.typical[nearer]
            blames.append(Blame("both", "both", least, 1.0, limit, first))
            # the side that is nearer is not excused by the other: its own error is no sibling's,
            # where it is measured and not a figure made of the other's
            figured = None if first.truth is None else first.truth.estimated
            level = statistics.median(each.typical[nearer] for each in family.stats)
            own_too = figured != nearer and least > limit * max(1.0, level)
        blames += sorted(self.forwards().values(), key=lambda blame: -blame.limit_usage)[:1]
        if family.rows is not None:
            row = int(family.rows.excess(self.number).argmax())
            at = stats.forwards[family.places[int(family.errors.place[row])]].result
            blame = self.blame(family.rows, row, "token", at)
            blames.append(replace(blame, sink=bool(family.errors.sink[row])))
        # one forward's only row is no outlier among its like: a rerouted token fills the channels
        if family.channels is not None and not (family.routed and first.step):
            channel = int(family.channels.excess(self.number).argmax())
            blame = self.blame(family.channels, channel, "channel", first)
            blames.append(replace(blame, channel=channel))
        gains = (self._gain(each) for each in family.gains)
        scaled = [gain for gain in gains if gain is not None]
        blames += sorted(scaled, key=lambda blame: -blame.limit_usage)[:1]
        # what holds of all rows together goes where something narrower explains it: a forward, a
        # token or a channel where the median row is off by less than half as much, or a scale error
        # where the whole is off by little more than rounding
        beyond = {blame.why for blame in blames if blame.limit_usage > 1}
        control = float(family.sites.control[self.number, 0])
        whole, median = (
            abs(x - control)
            for x in (float(family.sites.x[self.number, 0]), family.typical[self.number][None])
        )
        narrower = median < whole / 2 and beyond & {"forward", "token", "channel"}
        slight = typical.value / typical.control < thresholds.truth_systematic and "gain" in beyond
        return blames if narrower or slight or own_too else [typical, *blames]

    def _gain(self, gains: JudgedGains) -> Blame | None:
        """Answers by the scale error that stands out most, if any does."""
        table, number = gains.table, self.number
        # siblings that are off make no healthy one odd
        apart = np.fmin(np.abs(table.x[number] - table.control[number]), np.abs(table.x[number]))
        with np.errstate(all="ignore"):
            usage = np.nan_to_num(apart / table.reach[number], posinf=0.0)
        column = int(usage.argmax())
        if not usage[column] > 0:
            return None
        place, own = gains.places[column], gains.sides[:, number, column]
        side = int(np.abs(own - np.nanmedian(gains.sides[:, :, column], axis=1)).argmax())
        at = self.stats.first if place is None else self.stats.forwards[place].result
        assert at is not None
        return Blame(
            SIDES[side],
            "gain",
            float(usage[column]) * gains.limit,
            1.0,
            gains.limit * self.widened,
            at,
            place=place,
            scaled=gains.of,
            factor=1 + float(own[side]),
        )

    def far_ratios(self) -> tuple[float, dict[PromptStep, float]]:
        """Finds the ratios of the two sides' difference at which the unit, and each forward, would
        stand out."""
        family, rows = self.family, self.stats.rows
        assert rows is not None
        rows = rows.only(family.errors.key)
        assert rows.least is not None

        def far(table: JudgedTable, least: Floats) -> list[float]:
            energy, _ = table.standing_out(self.number, np.ones_like(least), least)
            ratios: list[float] = np.sqrt(np.maximum(energy - np.square(least), 0.0)).tolist()
            return ratios

        (whole,) = far(family.sites, np.array([np.median(rows.least)]))
        if family.forwards is None:
            return whole, {}
        return whole, dict(zip(family.places, far(family.forwards, rows.least), strict=True))

    def visible_sizes(self, step: int) -> dict[Level, float]:
        """Tells, with a truth, how large an error of B, beside the rounding that A has, too, would
        have to be for W to stand out. A site without siblings, and tables that were not made, say
        nothing."""
        family, stats = self.family, self.stats
        if stats.rows is None:
            return {}
        middle = np.median if family.routed else np.mean

        def size(
            table: JudgedTable, energy: Floats, least: float | Floats, kept: Any = slice(None)
        ) -> float:
            far, usual = table.standing_out(self.number, energy, least, self.widened)
            with np.errstate(invalid="ignore"):
                return float(np.nanmedian(np.sqrt(far - usual)[kept]))

        energy = stats.rows.only(family.errors.key).energy[0]
        whole = np.array([middle(stats.rows.energy[0])])
        sizes: dict[Level, float] = {"site": stats.floor * size(family.sites, whole, family.least)}
        if family.forwards is not None and not all(family.is_few):
            rows = [energy[family.errors.place == number] for number in range(len(family.places))]
            by_place, many = np.array([middle(each) for each in rows]), ~np.array(family.is_few)
            sizes["forward"] = stats.floor * size(family.forwards, by_place, family.least, many)
        if family.rows is not None:
            sizes["row"] = stats.floor * size(family.rows, energy, family.least)
        channels = stats.channels
        usable = channels is not None and channels.total > 0 and not (family.routed and step)
        if family.channels is not None and channels is not None and usable:
            of_channel = size(family.channels, channels.energy[0], channels.least)
            sizes["channel"] = of_channel / math.sqrt(channels.total)
        return narrowed(sizes)

    def standing(self, again: FamilyMember | None) -> Standing:
        """Sums up what is asked later. ``again``: the same unit in each channel's own unit."""
        members = [self] if again is None else [self, again]
        return Standing(
            stats=self.stats,
            x={place: self.x(place) for place in self.family.typical[self.number]},
            usual=self.family.usual,
            usual_reach=self.family.usual_reach,
            odds=min(each.family.odds[each.number] for each in members),
        )


# The outlier question of the two sides' difference. A unit is flagged where its typical ratio is
# beyond ``typical`` absolutely, or stands out among its siblings; where one forward of one prompt
# is or does; or where a single token is beyond its limit. Limits are wider where few numbers are
# judged. A forward of few tokens in a block that routes tokens to experts is not judged: rounding
# may send one token elsewhere.


def _difference_of(unit: Unit, thresholds: Thresholds) -> TruthStats:
    """Makes a table's rows of the two sides' difference in each forward of each prompt, in the
    order of their keys. The floor is a model: no chance is in it, and the error that is held
    against it is of so many numbers."""
    looks = sorted(unit.looks, key=lambda look: look.place)
    ratios = np.array([look.typical for look in looks])
    numbers = np.array([numbers_alike(look.result) * look.share for look in looks])
    cancel = [
        CANCELLING_TIMES if look.result.role == "inner" and look.num_rows < FEW_ROWS else 1.0
        for look in looks
    ]
    index = np.arange(len(ratios))
    return TruthStats(
        typical={"reference": unit.typical, "candidate": unit.typical},
        first=unit.results[0],
        forwards={look.place: ForwardStats(look.result, 0) for look in looks},
        rows=RowErrors(
            key=np.array([(look.sample << 32) + look.result.step for look in looks]),
            place=index,
            places=[look.place for look in looks],
            energy=np.stack([np.ones_like(ratios), np.square(np.minimum(ratios, ALLOWED[1]))]),
            numbers=np.stack([np.full_like(numbers, 1e12), numbers]),
            sink=np.zeros(len(ratios), bool),
            least=thresholds.least_sibling * np.array(cancel),
        ),
    )


def _odd_looks(family: Sequence[Unit], thresholds: Thresholds) -> Iterator[Look]:
    """Yields the looks of a kind, of units most of whose rows are equal bit for bit, whose tokens
    are off by no kernel's rounding: only single tokens of the forward differ, and its siblings are
    equal there, most of them, or most are beyond rounding, too, and a decode step beyond the
    hardest token of the prefill. Where they differ by less, another kernel ran, as in long prompts,
    and sharp attention enlarges its rounding of a token.

    A table of blocks and forwards cannot ask this: that another kernel ran in one block for one
    prompt is in neither effect. Judged so, the hardest token of such a healthy prompt is an
    outlier (tests/analyses/blocks/test_everywhere.py has it)."""
    beyond = thresholds.truth_confirm**2
    if family[0].phase == "decode":
        beyond = max(beyond, statistics.median_low(unit.hardest for unit in family))
    all_looks = (look for unit in family for look in unit.looks)
    for looks in grouped(all_looks, lambda look: look.place).values():
        usual = statistics.median_low(look.worst for look in looks)
        if len(looks) >= FEWEST_SIBLINGS and (usual == 0 or usual > beyond):
            yield from (look for look in looks if look.typical == 0 or look.num_rows < FEW_ROWS)


def _difference_judged(
    unit: Unit,
    member: FamilyMember | None,
    odd: Collection[int],
    in_routed: bool,
    thresholds: Thresholds,
) -> JudgedUnit:
    """Holds one unit's difference against its limits. ``odd``: ids of odd looks."""
    beside, forwards, control = math.inf, dict[PromptStep, float](), None
    if member is not None:
        beside, forwards = member.far_ratios()
        others = [s.typical["candidate"] for s in member.family.stats if s is not member.stats]
        control = statistics.median(others) if len(others) + 1 >= FEWEST_SIBLINGS else None
    wider = unit.widened * (thresholds.escalated if unit.pass_ == "escalated" else 1.0)
    few = [few_numbers(r) if num_rows(r) < FEW_ROWS else 1.0 for r in unit.results]
    width = spread(sum(map(num_values, unit.results))) * statistics.median(few)
    limit = min(thresholds.typical * width, beside) * wider
    # of a single token
    columns = min(num_columns(result) for result in unit.results)
    width = spread(columns) * few_numbers(max(unit.results, key=worst_of))
    typical, token = thresholds.typical, max(thresholds.token, 2 * thresholds.typical)
    alone = token
    if unit.mostly_equal:  # the same kernels ran, which round alike
        typical = thresholds.standout
        if id(max(unit.looks, key=lambda look: look.worst)) in odd:
            alone = typical
    leads_up = max(unit.tail, *(look.typical for look in unit.looks))
    worst_limit = (alone if unit.worst > CLEAR_TIMES * leads_up else token) * width * wider

    def limit_of_forward(look: Look) -> float:
        few_rows = look.num_rows < FEW_ROWS
        if len(unit.looks) == 1 or (few_rows and in_routed):
            return 0.0  # the only look of a unit is judged as the unit is
        count = round(num_values(look.result) * look.share)
        width = spread(count, num_looks=len(unit.looks))
        limit, beside = typical * width, forwards.get(look.place, math.inf)
        if few_rows:  # then the typical row is a single token
            single = typical if unit.mostly_equal and id(look) in odd else thresholds.token
            limit = single * width * few_numbers(look.result)
            if unit.phase == "decode":  # as hard as tokens of the prefill may be there
                beside = max(beside, CLEAR_TIMES * unit.hardest)
        return min(limit, beside) * wider

    looks = []
    for look in unit.looks:
        of_forward = limit_of_forward(look)
        usage = look.typical / of_forward if of_forward else 0.0
        of_token = 0.0 if in_routed else look.worst / worst_limit
        judged = {"limit": of_forward, "usage": usage, "between": usage, "of_token": of_token}
        looks.append(JudgedLook(**vars(look) | judged))
    used = max(unit.typical / limit, *(look.usage for look in looks))
    worst_used = 0.0 if in_routed else unit.worst / worst_limit
    why: Why | None = "token" if worst_used > 1 else None
    if unit.typical > limit:
        why = "typical"
    elif any(look.usage > 1 for look in looks):
        why = "forward"
    visible: dict[Level, float] = {}
    floors = [result.floor for result in unit.results if result.floor]
    if unit.results[0].role == "block" and floors:
        floor = statistics.median(floors)
        visible["site"] = limit * floor
        if sizes := [look.limit * (look.result.floor or floor) for look in looks if look.limit]:
            visible["forward"] = statistics.median(sizes)
        if not in_routed:
            visible["row"] = alone * width * wider * floor
    most = max(used, worst_used)
    return JudgedUnit(
        **vars(unit)
        | dict(
            thresholds=thresholds,
            looks=looks,
            why=why,
            control=control,
            limit=limit,
            worst_limit=worst_limit,
            limit_usage=most,
            between=most,
            shown=most,
            visible=narrowed(visible),
        )
    )


# The outlier question of each side's distance from the truth. A difference of the two sides counts
# only where one of them is the farther from what is right: two equally good answers may differ.


def _truth_judged(
    unit: JudgedUnit, member: FamilyMember, again: FamilyMember | None, thresholds: Thresholds
) -> JudgedUnit:
    """Holds one unit against the truth. ``again``: the same in each channel's own unit."""
    forwards, answers = member.stats.forwards, list[Blame]()
    shown = dict[PromptStep, Blame]()
    tokens: dict[PromptStep, tuple[float, SideOrBoth | None]] = dict.fromkeys(forwards, (0.0, None))
    for each in (member,) if again is None else (member, again):
        for answer in each.answers(thresholds):
            if each is member or answer.why != "both":
                answers.append(replace(answer, in_units=each is not member))
        for place, answer in each.forwards().items():
            if place not in shown or answer.limit_usage > shown[place].limit_usage:
                shown[place] = answer
        for place, used in each.tokens().items():
            tokens[place] = max(tokens.get(place, used), used, key=lambda of: of[0])
    looks = []
    for look in unit.looks:
        of_forward = shown.get(look.place)
        # the sides differ by more than rounding, and one is farther from the truth than any healthy
        # kernel, however its siblings fare: they may have the same fault there
        if look.usage > 1 and look.place in forwards:
            forward, x = forwards[look.place], member.x(look.place)
            width = spread(forward.num_values, num_looks=len(unit.looks)) * unit.widened
            far = Blame(
                SIDES[x > 0],
                "forward",
                times_of(abs(x)),
                1.0,
                thresholds.truth_systematic * width,
                forward.result,
                "others",
                look.place,
            )
            if far.limit_usage > 1:
                answers.append(far)
                of_forward = max(far, of_forward or far, key=lambda each: each.limit_usage)
                shown[look.place] = of_forward
        usage = look.usage if of_forward is None else of_forward.limit_usage
        of_token, side = tokens.get(look.place, (look.of_token, None))
        if of_forward is not None and usage >= of_token:
            side = of_forward.side
        looks.append(replace(look, usage=usage, of_token=of_token, side=side))
    # what is off in a whole forward is so at its tokens, too
    answers.sort(key=lambda answer: answer.why not in ("typical", "both", "forward"))
    limit_usage = max((answer.limit_usage for answer in answers), default=0.0)
    blame = next((answer for answer in answers if answer.limit_usage > 1), None)
    off = [look for look in looks if look.usage > 1 and look.place in shown]
    if blame is not None and blame.why == "forward" and off:
        # each side may be off in forwards of its own: that of the first one counts
        first = min(off, key=lambda look: order_of(look.result)).side
        of_first = (shown[look.place] for look in off if look.side == first)
        blame = max(of_first, key=lambda answer: answer.limit_usage)
    why, too_few = None if blame is None else blame.why, False
    if blame is None and unit.why is not None:  # no truth, or one that tells too little: no side
        why, unsure = _beyond_unheld(unit, member)
        looks = _raised(looks, unsure)
        if why is None and (far_tokens := _far_tokens(unit, member)):
            why, too_few = "token", True
            looks = _raised(looks, far_tokens, "of_token")
        limit_usage = limit_usage if why is None else max(limit_usage, unit.between)
    elif blame is not None and blame.why == "gain" and blame.place is not None:
        why = "forward"
        looks = _raised(looks, {blame.place: blame.limit_usage}, side=blame.side)
    if why is None:
        looks = [
            replace(look, usage=min(look.usage, 1.0), of_token=min(look.of_token, 1.0))
            for look in looks
        ]
    sizes = member.visible_sizes(unit.results[0].step) if unit.results[0].role == "block" else {}
    return replace(
        unit,
        looks=looks,
        why=why,
        blame=blame,
        limit_usage=limit_usage,
        shown=max((answer.ratio / answer.limit for answer in answers), default=0.0),
        visible=sizes or unit.visible,
        too_few=too_few,
        excused=why is None and unit.why is not None,
        standing=member.standing(again),
    )


def _raised(
    looks: Sequence[JudgedLook],
    used: Mapping[PromptStep, float],
    what: str = "usage",
    side: SideOrBoth | None = None,
) -> list[JudgedLook]:
    """Raises what looks use of their limits to the shares that are ``used``, by a ``side``."""
    return [
        look
        if look.place not in used
        else replace(
            look,
            side=side or look.side,
            **{what: max(getattr(look, what), used[look.place])},
        )
        for look in looks
    ]


def _beyond_unheld(
    unit: JudgedUnit, member: FamilyMember
) -> tuple[Why | None, dict[PromptStep, float]]:
    """Tells by which limit of the difference a unit is beyond rounding in forwards that excuse
    nothing, and what these use: the truth does not hold them, or one side's error is not measured
    there, and may be far smaller than the other's. Single tokens may be as hard there as those that
    the truth holds."""
    forwards, hard = member.stats.forwards, CLEAR_TIMES * member.stats.hardest
    typical, token = (
        [
            look
            for look in unit.looks
            if (forward := forwards.get(look.place)) is None or not forward.alike[number]
        ]
        for number in range(2)
    )
    if typical and statistics.median(look.typical for look in typical) > unit.limit:
        return "typical", {}
    unsure = {
        look.place: look.between
        for look in typical
        if look.usage > 1 and (look.num_rows >= FEW_ROWS or look.typical > hard)
    }
    far = any(look.worst > max(unit.worst_limit, hard) for look in token)
    far = far and not member.family.routed
    return "forward" if unsure else "token" if far else None, unsure


def _far_tokens(unit: JudgedUnit, member: FamilyMember) -> dict[PromptStep, float]:
    """Finds what the forwards use of a token's limit that have one beyond it, where one side is
    farther from the truth than any healthy kernel. Its error is made of too few numbers to convict
    a side, as beside a massive activation, and yet is no equally good answer."""
    family, rows = member.family, member.stats.rows
    if family.rows is None or rows is None:
        return {}
    # one that no others lead up to, as where attention is sharp
    limit = max(unit.worst_limit, unit.thresholds.typical, CLEAR_TIMES * unit.tail)
    own = np.sqrt(rows.only(family.errors.key).energy.max(axis=0))
    far = np.abs(family.rows.x[member.number]) > math.log(unit.thresholds.truth_systematic)
    places = {family.places[n] for n in family.errors.place[far & (own > limit / 2)]}
    far_looks = [look for look in unit.looks if look.place in places and look.worst > limit]
    return {look.place: look.worst / unit.worst_limit for look in far_looks}


# The family question: what all of a kind share, no comparison among them would show.


def _kind_judged(family: list[JudgedUnit], thresholds: Thresholds) -> list[JudgedUnit]:
    """Holds all of one kind against their own median W."""
    limit = thresholds.truth_systematic
    side, _ = farther_side(family, limit) or (None, 0.0)
    if side is None:
        return family
    judged = []
    for unit in family:
        value = times_of(unit.farther(side))
        if value > max(limit / thresholds.truth_confirm, math.sqrt(limit)):  # and not its kin alone
            # beside its siblings, which are as wrong, a look shows nothing
            own = [k for k in unit.looks if k.used <= 1 or {k.side, side} != set(SIDES)]
            at = {look.place: unit.farther(side, look.place) for look in own}
            used = {place: times_of(x) / limit for place, x in at.items()}
            tokens = {look.place: look.worst / unit.worst_limit for look in own}
            unit = replace(
                unit,
                blame=Blame(side, "typical", value, 1.0, limit, unit.results[0], "all"),
                why="typical",
                too_few=False,
                limit_usage=max(unit.limit_usage, value / limit),
                looks=_raised(_raised(unit.looks, used, side=side), tokens, "of_token"),
            )
        judged.append(unit)
    return judged


def _columns_judged(
    members: list[JudgedUnit], family: JudgedFamily, thresholds: Thresholds
) -> list[JudgedUnit]:
    """Blames, for each forward, then each row and each channel, that stands out beside the others
    in what all of one kind have in common, those of them that are off there themselves."""
    judged, widened = list(members), max(unit.widened for unit in members)
    tables: tuple[tuple[Why, JudgedTable | None], ...] = (
        ("forward", family.forwards),
        ("token", family.rows),
        ("channel", family.channels),
    )
    for why, table in tables:
        if table is None:
            continue
        reach = table.column_reach + math.log(widened)
        # the others excuse; they may be what is wrong
        own = (table.usual + table.column > 0) == (table.column > 0)
        for column in np.flatnonzero((np.abs(table.column) > reach) & own).tolist():
            if why == "forward" and family.is_few[column]:
                continue
            place = None  # a channel is that of all forwards
            if why != "channel":
                place = family.places[
                    int(family.errors.place[column]) if why == "token" else column
                ]
            sign = 1 if table.column[column] > 0 else -1
            side, limit = SIDES[sign > 0], times_of(float(reach[column]))
            excesses = (sign * table.x[:, column] - max(0.0, sign * table.usual)).tolist()
            for n, (unit, stats) in enumerate(zip(judged, family.stats, strict=True)):
                at = stats.first if place is None else stats.forwards[place].result
                assert at is not None
                off = excesses[n] > reach[column] / 2 and unit.side in (None, side)
                if place is None and stats.channels is not None:
                    # one that is large in all blocks is off by what storing it makes
                    dtypes = at.reference_dtype, at.candidate_dtype
                    roundoff = max(format_named(dtype).unit_roundoff for dtype in dtypes)
                    stored = (thresholds.truth_systematic * roundoff) ** 2
                    energy = stats.channels.energy[SIDES.index(side), column]
                    off = off and energy > stored * stats.channels.values[column]
                if not off:
                    continue
                value, channel = times_of(excesses[n]), None if place else column
                blame = Blame(side, why, value, 1.0, limit, at, "all", place, channel=channel)
                used = max(blame.limit_usage, 1.0 + 1e-9)
                what = "of_token" if why == "token" else "usage"
                at_place = {} if place is None else {place: used}
                judged[n] = unit = replace(unit, looks=_raised(unit.looks, at_place, what, side))
                if unit.why is None or unit.too_few:
                    most = max(unit.limit_usage, used)
                    judged[n] = replace(unit, blame=blame, why=why, too_few=False, limit_usage=most)
    return judged


# What would have been seen.

_NARROWER: tuple[Level, ...] = ("site", "forward", "row")
"""Each holds the next one."""


def visible_of(units: Sequence[JudgedUnit]) -> Visible | None:
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
    """Narrows what is seen in one row to where it is so in all of a forward, or of a block."""
    least, made = math.inf, dict(sizes)
    for level in reversed(_NARROWER):
        if level in sizes:
            made[level] = least = min(least, sizes[level])
    return made


# The escalated pass is the anchored one in float32, held against the float32 floor and, as every
# pass, against the truth. A 16-bit dtype hides what is smaller than its own rounding. In float32 a
# wrong formula or wrong data exceeds the floor a hundredfold, and what only the 16-bit kernels do
# wrong is gone, so the two passes together tell one from the other.


@dataclass(frozen=True, slots=True)
class Escalation:
    """Says what the escalated pass shows. ``judged``: sides whose escalated pass was compared
    (None: both with each other)."""

    units: list[JudgedUnit]
    judged: set[Side | None]

    @property
    def flagged(self) -> list[JudgedUnit]:
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
        """Which run is wrong, as far as the escalated passes tell: of steps that no truth
        reaches the side is that of the same site elsewhere."""
        judged = {unit.site for unit in self.flagged if (unit.of or unit.side) is not None}
        if any(unit.site not in judged for unit in self.flagged):
            return None
        return common_side(unit.of or unit.side for unit in self.flagged)

    def beside(self, unit: JudgedUnit) -> list[Fact]:
        """Tells what the float32 pass says of a unit that is flagged in the runs' own dtype."""
        block, site = unit.block, unit.site
        at_site = [u for u in self.units if u.site == site or (block and u.site == f"{block}:out")]
        at_site = [u for u in at_site if (u.of or u.side) in (None, unit.side) or unit.side is None]
        if not at_site:
            return []
        worst = max(at_site, key=lambda u: u.limit_usage)
        of_token = worst.why == "token"
        return [
            fact(
                "blocks.escalated",
                site=worst.site,
                of_token=of_token,
                ratio=worst.worst if of_token else worst.typical,
                limit=worst.worst_limit if of_token else worst.limit,
                side=worst.side,
                times=None if worst.blame is None else worst.blame.value,
                stays=any(u.why is not None for u in at_site),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Says what was judged: the units of the pass that counts, and of the escalated passes."""

    units: list[JudgedUnit]
    unanchored: list[int]
    """Steps that no anchor reached."""
    escalation: Escalation

    @property
    def flagged(self) -> list[JudgedUnit]:
        """Beyond what rounding explains, in execution order."""
        return [unit for unit in self.units if unit.why is not None]


def only_step(measured: Measured) -> int | None:
    """The decode step that holds all that differs, of several that were given equal inputs."""
    anchored = [site for site in measured.sites if site.pass_ == "anchored"]
    steps = {site.step for site in anchored if not site.identical}
    others = {site.step for site in anchored if site.step} - steps
    only = len(steps) == 1 and 0 not in steps and len(others) >= FEWEST_SIBLINGS
    return steps.pop() if only else None


def places_of(unit: JudgedUnit) -> set[PromptStep]:
    """The forwards in which a flagged unit is off: all, where it is so by its typical token."""
    if unit.why not in ("forward", "token"):
        return {look.place for look in unit.looks}
    return {look.place for look in unit.beyond} or {(unit.first.sample, unit.first.step)}


def farther_side(family: Sequence[JudgedUnit], times: float) -> tuple[Side, float] | None:
    """Finds (side, W), the side that is farther from the truth than the other in all of a kind, by
    their median, and by more than so many ``times`` and chance; None where there is none, or not
    all were judged together."""
    judged = [unit.standing for unit in family if unit.standing is not None]
    if len(judged) < max(FEWEST_SIBLINGS, len(family)):
        return None
    usual = judged[0].usual
    limit = math.log(times * max(unit.widened for unit in family))
    if not abs(usual) > limit + judged[0].usual_reach:
        return None
    return SIDES[usual > 0], times_of(abs(usual))


def next_commands(
    measured: Measured, unit: JudgedUnit | None, escalation: Escalation
) -> list[Command]:
    """Lists what to run next. ``unit``: the one that the verdict is about, if it is about one."""
    advice = measured.advice
    if not measured.anchored:
        more = advice.certainty(_outside_blocks(measured.sites))
        return more or ([] if unit is None else advice.look_at(unit.site))
    commands, again = list[Command](), list[Command]()
    unmeasured = [site for site in measured.sites if site.is_unmeasured]
    if unmeasured or (unit is not None and any(r.estimated for r in unit.results)):
        named = [site.site for site in unmeasured if site.role == "inner"]
        again = advice.in_full([*_outside_blocks(measured.sites), *dict.fromkeys(named)])
        commands += again
        if unit is None and commands:
            return commands
    if unit is not None:
        # the block's own, or a gradient of its parameters: then its operators tell more
        block, path = unit.block, unit.site.partition(":")[0]
        own = path in (block, f"{block}{BACKWARD}")
        own = own or (is_of_parameter(unit.site) and BACKWARD in unit.site)
        if block is not None and (own or made_before(measured, unit)):
            commands += advice.into_block(block, hidden=unit.pass_ == "escalated")
        else:
            commands += [*advice.descent(), *advice.look_at(unit.site)]
        sides = measured.reference.manifest, measured.candidate.manifest
        if measured.truth is None and unit.side is None and truth_tells(*sides, block):
            commands += advice.judged() or advice.truth(full=bool(again))
    if measured.narrow and not escalation.complete and unit is None:
        if advice.escalated and measured.truth is None:  # it is made, and a truth judges it
            commands += advice.judged() or advice.truth()
        else:
            commands += advice.escalate(escalation.unseen)
    return commands


def made_before(measured: Measured, unit: JudgedUnit) -> bool:
    """May the error be made before the module inside a block that is off? So it is where nothing
    tells that what enters the module is right."""
    result, module = unit.results[0], module_of(unit.site)
    if result.role != "inner" or unit.pass_ == "free" or is_of_parameter(unit.site):
        return False
    same_pass = (site.site for site in measured.sites if site.pass_ == unit.pass_)
    return not any(site.startswith(f"{module}:in") for site in same_pass)


def _outside_blocks(sites: Sequence[SiteResult]) -> list[str]:
    """Flagged sites that recording the blocks' own inputs and outputs would leave out."""
    return list(dict.fromkeys(s.site for s in sites if s.flagged and s.role == "inner"))

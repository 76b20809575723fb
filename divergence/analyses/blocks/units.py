"""The units that are judged, block by block, and those beyond what rounding explains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.limits import CLEAR, FEWEST
from divergence.comparison.preflight.code import truth_tells
from divergence.comparison.results import PromptRatio, SiteResult, Visible, num_rows, order_of
from divergence.facts import Fact, fact
from divergence.numerics.floor import (
    ENOUGH,
    THRESHOLDS,
    share_from_nothing,
)
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
    from divergence.comparison.judge import Floats, JudgedTable, Level
    from divergence.comparison.measure.truth import RowErrors, TruthStats


# Suspects: the units beyond what rounding explains, alone or all of a kind, and what to run next.
#
# Without a truth the difference of the two sides is held against a rounding model and against the
# siblings (blocks.units). With one, each side's own error is (blocks.sides).
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
            if off <= blocks < every and 2 * len(off) > len(blocks) >= FEWEST:
                of_type = fact("blocks.kind_of_type", kind=name, type=type_)
                return Family(of_type, members, len(blocks))
        if 2 * len(members) <= len(kin):
            members = _off_alike(unit, kin, measured)
        if 2 * len(members) > len(kin) >= FEWEST:
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
    if len(judged) < max(FEWEST, len(family)):
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
    """One forward of one prompt at one site. ``typical``: its median token's ratio; ``share``: of
    the result's numbers that belong to this prompt; ``limit``: of ``typical``; ``usage``: the
    largest share of any limit of this look that is used, over 1 where it is beyond one;
    ``between``: of the limit on the two sides' difference, which needs no truth."""

    result: SiteResult
    sample: int
    typical: float
    num_rows: int
    share: float = 1.0
    limit: float = 0.0
    usage: float = 0.0
    between: float = 0.0
    worst: float = 0.0
    """Its worst token's ratio."""
    of_token: float = 0.0
    """The share of a single token's limit that its worst token uses."""
    is_odd: bool = False
    """Is a single token that differs here no other kernel's rounding? (blocks.sides)"""

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
"""The questions that a truth is asked (blocks.sides)."""


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
    """The limit that was exceeded, or what the truth blames (blocks.sides); None where the unit is
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
    """All of its kind against the truth, and which of them it is (blocks.sides)."""
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
        return self.blame is None and self.why == "token" and self.worst <= CLEAR * self.tail

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
    steps of at most ``CLEAR`` times."""
    ordered = np.sort(np.maximum(ratios, 1.0))[len(ratios) // 2 :]
    apart = np.flatnonzero(ordered[1:] > CLEAR * ordered[:-1])
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
        if len(items) >= FEWEST
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

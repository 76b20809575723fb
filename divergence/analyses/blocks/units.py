"""The units that are judged, block by block, and those beyond what rounding explains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.judge import limit_of, observed, outliers
from divergence.comparison.preflight.code import truth_tells
from divergence.comparison.results import SiteResult, Visible, num_rows, order_of
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
    PHASES,
    ROOT,
    is_codes,
    is_norm,
    module_of,
    of_parameter,
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
    """``judged``: sides whose escalated pass was compared (None: both with each other)."""

    units: list[Unit]
    judged: set[Side | None]

    @property
    def flagged(self) -> list[Unit]:
        """Those beyond what float32 explains."""
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
        """Which run is wrong, as far as the escalated passes tell: of steps that no truth reaches
        the side is that of the same site elsewhere."""
        judged = {unit.site for unit in self.flagged if side_of(unit) is not None}
        if any(unit.site not in judged for unit in self.flagged):
            return None
        return common_side(map(side_of, self.flagged))

    def beside(self, unit: Unit) -> list[Fact]:
        """What the float32 pass says of a unit that is flagged in the runs' own dtype."""
        block, site = unit.results[0].block, unit.site
        mine = [u for u in self.units if u.site == site or (block and u.site == f"{block}:out")]
        mine = [u for u in mine if side_of(u) in (None, unit.side) or unit.side is None]
        if not mine:
            return []
        worst = max(mine, key=lambda u: u.limit_usage)
        blame, of_token = worst.blame, worst.why in OF_TOKEN
        ratio, limit = worst.typical, worst.limit
        if of_token:
            ratio, limit = max(worst.worst, worst.sink), worst.worst_limit
        stays = any(u in self.flagged for u in mine)
        return [
            fact("blocks.escalated", site=worst.site, of_token=of_token, ratio=ratio, limit=limit,
                 side=worst.side, times=blame and blame.value, stays=stays)
        ]  # fmt: skip

    def healthy(self) -> list[Fact]:
        """That it found nothing, and how near it came."""
        if not self.units:
            return []
        worst = max(self.units, key=lambda unit: unit.typical / unit.limit)
        return [fact("blocks.escalated_healthy", site=worst.site, ratio=worst.typical,
                     limit=worst.limit)]  # fmt: skip


def escalated_units(
    sites: Sequence[SiteResult], *, routed: frozenset[str], thresholds: Thresholds
) -> Escalation:
    """The units of every escalated pass that was compared, held against float32's floor."""
    units: list[Unit] = []
    sides = {site.of for site in sites if site.pass_ == "escalated"}
    for of in sorted(sides, key=str):
        mine = [s for s in sites if s.of == of and TABLES not in (s.kind or "").lower()]
        built = build_units(mine, "escalated")
        flag(built, routed=routed, thresholds=thresholds, wider=thresholds.escalated)
        units += built
    return Escalation(units, sides)


def side_of(unit: Unit) -> SideOrBoth | None:
    """Which side is wrong: the one that is judged by itself, or that the truth blames."""
    return unit.results[0].of or unit.side


_MATMULS = ("Linear", "Conv1D")
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Family:
    """``name``: a class, or a fact that tells the place where not all of the class are meant."""

    name: str | Fact
    members: list[Unit]
    num_all: int


def find_family(
    units: Sequence[Unit], flagged: Sequence[Unit], measured: Measured
) -> Family | None:
    """The kind of the onset, where more than half of at least three of its kind are flagged, or off
    by the same measure as a flagged one, or by more than rounding where nothing lets them differ.

    What follows a bad module inside a block is off as well, so the first kind in execution
    order counts. Where every place of its class is off, the class is named alone.
    """
    # in a free pass one bad token is off in all that follows
    judged = [unit for unit in flagged if unit.pass_ != "free" or unit.why in _WHOLE]
    judged = [unit for unit in judged if unit.kind[0] == "block"]
    judged.sort(key=lambda unit: order_of(unit.first))
    for unit in judged:
        kin = [other for other in units if other.kind == unit.kind]
        if len(kin) < _LEAST:
            continue
        places = places_of(unit)
        members = [
            other
            for other in judged
            if other.kind == unit.kind
            and other.side in (None, unit.side)  # two faults are no kind
            and places & places_of(other)
        ]
        if 2 * len(members) <= len(kin):
            confirm = measured.thresholds.truth_confirm
            unexplained = None
            # a training step hands on the errors of what it is given
            if measured.unexplained and not measured.reference.manifest.training.train:
                unexplained = confirm if measured.narrow else confirm**2  # float32 sums have order
            members = _off_alike(unit, kin, measured.thresholds, unexplained)
        if 2 * len(members) > len(kin):
            return Family(_name(unit, units, judged), members, len(kin))
    return None


def places_of(unit: Unit) -> set[PromptStep]:
    """The forwards in which a flagged unit is off: all, where it is so by its typical token."""
    if unit.why in ("forward", *OF_TOKEN):
        beyond = {look.place for look in unit.beyond}
        return beyond or {(unit.first.sample, unit.first.step)}
    return {look.place for look in unit.looks}


def _off_alike(
    unit: Unit, kin: Sequence[Unit], thresholds: Thresholds, unexplained: float | None
) -> list[Unit]:
    """Those of a kind that are off as a flagged one of them is, although within their own limits:
    it is the first to pass, and not what is wrong. None where it stands out from them by itself.
    ``unexplained``: there are no other kernels, and what is beyond so many floors is no rounding.
    """
    if unit.why not in ("typical", "forward"):
        return []
    near, places = thresholds.truth_confirm, places_of(unit)
    if unit.blame is None:
        # a limit that its siblings set is far above them: near to it is nobody but it
        usual = statistics.median(other.typical for other in kin if other is not unit)
        stands_out = unit.typical > thresholds.standout**2 * usual

        limits = {look.place: look.limit for look in unit.beyond}

        def is_off(other: Unit) -> bool:
            ratios = [(other.typical, unit.limit)]
            if unit.why == "forward":
                looks = (look for look in other.looks if look.place in limits)
                ratios = [(look.typical, limits[look.place]) for look in looks] or [(0.0, 1.0)]
            if unexplained is not None and not stands_out:
                return statistics.median(ratio for ratio, _ in ratios) > unexplained
            return statistics.median(ratio / limit for ratio, limit in ratios) > 1 / near

        return [unit, *(other for other in kin if other is not unit and is_off(other))]
    blame = unit.blame
    beside_them = blame.like is None and blame.why != "gain"  # an outlier among its siblings
    if beside_them and blame.value > thresholds.truth_systematic * blame.control:
        return []
    side, times = farther_side(kin, thresholds) or (None, 0.0)
    if side != unit.side or times <= near:
        return []

    def x(other: Unit) -> float:
        assert other.judged is not None  # of all or of none
        judged, member = other.judged
        known = [x for place in places if (x := judged.x_of(member, place)) is not None]
        middle = statistics.median(known) if known else judged.x_of(member) or 0.0
        return middle if side == "candidate" else -middle

    return [unit, *(other for other in kin if other is not unit and x(other) > math.log(near))]


def farther_side(family: Sequence[Unit], thresholds: Thresholds) -> tuple[Side, float] | None:
    """(side, times): the side that is so many times as far from the truth as the other in all of a
    kind, by their median, and by more than other kernels and chance make; None where there is none,
    or not all were judged."""
    judged = [unit.judged for unit in family if unit.judged is not None]
    if len(judged) < max(3, len(family)):
        return None
    together = judged[0][0]
    limit = math.log(thresholds.truth_standout * max(unit.widened for unit in family))
    if abs(together.usual) <= limit + together.usual_reach:
        return None
    return SIDES[together.usual > 0], math.exp(min(abs(together.usual), 700.0))


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
    # outputs of the same class in the same phase whose module was entered by what passes, or
    entering = {u.site: u for u in units if u.kind[2] == "in"}
    sources = []
    for other in units:
        if other.kind[0] != "block" or other.kind[2:5] != unit.kind[2:5] or not other.kind[1]:
            continue
        fed = entering.get(other.site.rpartition(":")[0] + ":in")
        if other.kind == unit.kind or (fed is not None and (fed.why is None or _adds(other, fed))):
            sources.append(other)
    if len({u.kind[1] for u in sources}) > 1 and all(u in judged for u in sources):
        if kind in _MATMULS:
            dtype = unit.results[0].candidate_dtype
            return fact("blocks.kind_products", kind=kind, dtype=dtype)
        return kind or place
    return fact("blocks.kind_at", kind=kind, place=place)


def _adds(out: Unit, entering: Unit) -> bool:
    """The module's own error stands out from the one that it was given."""
    given, own = entering.results[0].truth, out.results[0].truth
    if given is None or own is None or out.side not in ("reference", "candidate"):
        return False
    before, after = (getattr(truth, f"{out.side}_error") for truth in (given, own))
    return bool(after > THRESHOLDS.truth_confirm * before)


def next_commands(measured: Measured, unit: Unit | None, escalation: Escalation) -> list[Command]:
    """What to run next. ``unit``: the one that the verdict is about, if it is about one."""
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
        inside = block is not None and (made_before(measured, unit) or _of_block(unit.site, block))
        if block is None or not inside:
            commands += [*advice.descent(), *advice.look_at(unit.site)]
        else:
            commands += advice.into_block(block, hidden=unit.pass_ == "escalated")
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
    if result.role != "inner" or unit.pass_ == "free" or of_parameter(unit.site):
        return False
    entries = (f"{module}:in", f"{module}:in.")
    return not any(
        site.pass_ == unit.pass_ and site.site.startswith(entries) for site in measured.sites
    )


def _of_block(site: str, block: str) -> bool:
    """Is it the block's own, or a gradient of its parameters? Then its operators tell more."""
    own = site.partition(":")[0] in (block, block + BACKWARD)
    return own or (of_parameter(site) and BACKWARD in site)


def _outside_blocks(sites: Sequence[SiteResult]) -> list[str]:
    """Flagged sites that recording the blocks' own inputs and outputs would leave out."""
    return list(dict.fromkeys(s.site for s in sites if s.flagged and s.role == "inner"))


# Looks: each forward of each prompt at one site, judged by itself.
#
# A fault in one prompt of eight, or in one decode step of 64, disappears in a median over all of
# them. So each forward is an observation of its own, held against the same forward at the siblings
# of its site (the same place in the other blocks) by the judge (comparison.judge): the rounding
# model stands for the side whose error is known, and the ratio for the other's.
#
# It refuses to judge a forward of few tokens in a block that routes tokens to experts where the
# routing is not known: rounding may send one token elsewhere. Nor one whose difference is a single
# step of the format in a single number (``one_step``): trained models have channels a hundred times
# as large as the others, whose last bit is then the whole error of a decode step.

FEW_ROWS = 8
"""With fewer rows the typical row is held to the limits of a single token."""
_CANCELS = 2
"""Inside a block the terms of a few rows may cancel, which the rounding model does not know: so
many times ``least_sibling`` is added to them."""
_LEAST_BLOCKS = 0.25
"""The blocks' typical ratio counts for no less where a site without siblings is held against it."""


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
    from_nothing: float | None = None
    """``usage`` as ``share_from_nothing`` has it, where that is another number."""
    worst: float = 0.0
    """Its worst token's ratio."""
    of_token: float = 0.0
    """The share of a single token's limit that its worst token uses."""

    @property
    def place(self) -> PromptStep:
        return self.sample, self.result.step

    @property
    def share_used(self) -> float:
        """Of its limit, as it is told: 0 where nothing is off."""
        if max(self.usage, self.of_token) > 1:
            return max(self.usage, self.of_token)
        return self.usage if self.from_nothing is None else min(1.0, self.from_nothing)


def one_step(result: SiteResult) -> bool:
    """Is most of the difference (of its squares) that of one number, and that the smallest which
    there is: 1 ulp?

    No fault can be told from it. Two correct results on either side of a rounding boundary differ
    by as much.
    """
    if result.ulp_format is None or not result.rel_l2 or not result.reference_norm:
        return False
    values = result.max_abs, result.max_abs_reference, result.max_abs_candidate
    if any(value is None or not math.isfinite(value) for value in values):
        return False
    largest, reference, candidate = (abs(value) for value in values if value is not None)
    if math.sqrt(2) * largest <= result.rel_l2 * result.reference_norm:  # no square: it overflows
        return False
    form = format_named(result.ulp_format)
    exponent = math.frexp(max(reference, candidate, form.smallest_normal))[1] - 1
    return largest <= math.ldexp(1.0, exponent - form.mantissa_bits)


# Units: all measurements of one site, over samples and steps, brought together for judging.
#
# A unit has *siblings*: the units of its kind (the same class of block, or the same
# place inside it), measured in the same pass and phase. They share dtype, shapes and
# kernels, so they are the controls of an experiment in which one block is suspected.

_Key = TypeVar("_Key")

Kind = tuple[str, str, str, str | None, str, str] | tuple[str, str, str, str | None, str]
"""(block, place inside it, port, class, phase, stack of blocks) or (trunk, path, port, class,
phase): units that are alike."""

Why = Literal["typical", "forward", "token", "sink", "channel", "gain", "both"]
"""The questions that a truth is asked (blocks.sides)."""

OF_TOKEN: tuple[Why, Why] = ("token", "sink")

TABLES = "rotary"  # computed from float32 angles: the convention is off the truth by position x u


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

    @property
    def limit_usage(self) -> float:
        if self.control <= 0:
            return math.inf
        return self.value / self.control / self.limit

    @property
    def share_used(self) -> float:
        """``limit_usage`` as it is told of the difference of the two sides. What both are off by
        is no difference, until it is beyond its limit."""
        if self.why == "gain" or self.limit_usage > 1:
            return self.limit_usage
        if self.why == "both":
            return 0.0
        return share_from_nothing(self.value / self.control, self.limit)


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


SURE = 3.0
"""Log odds of 20 to 1."""


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
    usual: float
    """Their median ``w``, in log; ``usual_reach``: by how much chance may move that."""
    usual_reach: float
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

    def x_of(self, member: int, place: PromptStep | None = None) -> float | None:
        """log W of the two sides' median rows, in one forward or in all; None where not known."""
        stats = self.stats[member]
        forward = stats if place is None else stats.forwards.get(place)
        return None if forward is None else log_ratio(forward.typical, self.least)


def log_ratio(typical: Mapping[Side, float], least: float) -> float | None:
    """log W of a candidate's and a reference's error, ``least`` added to both; None where both are
    without bound, or not known."""
    a, b = (math.hypot(typical[side], least) for side in ("reference", "candidate"))
    if not (a + b > 0 and min(a, b) < math.inf):  # nan, too
        return None
    ends = (min(max(error, 1e-300), 1e300) for error in (b, a))
    return math.log(next(ends)) - math.log(next(ends))


@dataclass(slots=True)
class Unit:
    """All results of one site in one pass and phase (run.schema.site.PHASES), judged together."""

    site: str
    pass_: str
    phase: str
    kind: Kind
    """Units of the same kind are its siblings."""
    results: list[SiteResult] = field(default_factory=list)
    typical: float = 0.0
    """Median over forwards of the median token's ratio."""
    worst: float = 0.0
    """Largest ratio of any token, sink tokens left out."""
    sink: float = 0.0
    """Largest ratio of any sink token."""
    control: float = 0.0
    """Median of the siblings' ``typical``."""
    num_siblings: int = 0
    limit: float = 0.0
    """Limit of ``typical``."""
    worst_limit: float = 0.0
    """Limit of ``worst`` and ``sink``."""
    why: str | None = None
    """The limit that was exceeded, or what the truth blames (blocks.sides); None where the unit is
    within all limits."""
    widened: float = 1.0
    """Factor on all limits, from what trusted runs have shown."""
    stats: TruthStats | None = None
    """The site against the truth, where one was given."""
    judged: tuple[JudgedFamily, int] | None = None
    """All of its kind against the truth, and which of them it is (blocks.sides)."""
    blame: Blame | None = None
    """What the truth blames, if anything."""
    limit_usage: float = 0.0
    """The largest share of any limit that is used; over 1 is beyond the limit."""
    between: float = 0.0
    """The same over the limits on the two sides' difference, which need no truth."""
    from_nothing: float | None = None
    """``limit_usage`` as ``share_from_nothing`` has it, where a truth was asked."""
    looks: list[Look] = field(default_factory=list)
    """Each forward of each prompt by itself."""
    visible: dict[Level, float] = field(default_factory=dict)
    """Of a block, by level, the smallest error that the truth would have shown (blocks.sides)."""

    @property
    def share_used(self) -> float:
        """Of its limit, as it is told: 0 where nothing is off, 1 or more where it is flagged."""
        used = self.limit_usage
        share = used if used > 1 or self.from_nothing is None else self.from_nothing
        return share if self.why is None else max(1.0, share)

    @property
    def margin(self) -> float:
        """By how much the unit is beyond its limits: of the two that agree, the larger one."""
        if self.blame is None:
            return self.between
        if self.blame.side == "both":
            return self.blame.limit_usage
        return max(self.blame.limit_usage, self.between)

    @property
    def beyond(self) -> list[Look]:
        """The looks that are beyond a limit, in execution order."""
        beyond = (look for look in self.looks if look.usage > 1)
        return sorted(beyond, key=lambda look: order_of(look.result))

    @property
    def side(self) -> SideOrBoth | None:
        return None if self.blame is None else self.blame.side

    @property
    def first(self) -> SiteResult:
        """The first result in execution order that is beyond the limit (else the first)."""
        if self.why == "forward" and self.beyond:
            return self.beyond[0].result
        if self.blame is not None and self.blame.why in ("forward", *OF_TOKEN):
            return self.blame.at
        if self.why in OF_TOKEN:
            limit = self.worst_limit
            beyond = [r for r in self.results if max(r.ratio_max or 0, r.ratio_sink or 0) > limit]
        else:
            beyond = [r for r in self.results if (r.ratio or 0) > self.limit]
        return min(beyond or self.results, key=order_of)


def build_units(results: Iterable[SiteResult], pass_: str) -> list[Unit]:
    """Units of a pass in execution order; only judged floating-point sites."""
    results = list(results)
    stacks = stacks_of(results)
    units: dict[tuple[str, str], Unit] = {}
    for result in results:
        if result.pass_ != pass_ or result.ratio is None:
            continue
        port = result.site.partition(":")[2]
        if is_codes(port):
            continue
        made = result.role == "inner" or OPTIMIZER in result.site  # by clipping
        if port.startswith("in") and (not made or pass_ == "free"):
            continue  # what comes in is judged where it goes out
        if result.block is not None and ".experts." in result.site[len(result.block) :]:
            continue  # rows are whatever tokens were sent there; judged where they come together
        if pass_ == "free" and is_whole(module_of(result.site), stacks):
            continue  # the model, or a whole stack of it: what it inherits is everything
        phase = result.phase
        unit = units.setdefault(
            (result.site, phase), Unit(result.site, pass_, phase, _kind(result, phase))
        )
        unit.results.append(result)
    for unit in units.values():
        unit.typical = statistics.median(
            0.0 if num_rows(r) < FEW_ROWS and one_step(r) else r.ratio or 0.0 for r in unit.results
        )
        unit.worst = max(r.ratio_max or 0.0 for r in unit.results)
        unit.sink = max(r.ratio_sink or 0.0 for r in unit.results)
        for result in unit.results:  # one look a forward; of a batch, one for each of its prompts
            rows, worst = num_rows(result), max(result.ratio_max or 0.0, result.ratio_sink or 0.0)
            if not result.prompts:
                ratio = result.ratio or 0.0
                unit.looks.append(Look(result, result.sample, ratio, rows, worst=worst))
            total = sum(prompt.num_rows for prompt in result.prompts)
            unit.looks += [
                Look(
                    result, prompt.sample, prompt.ratio, prompt.num_rows, prompt.num_rows / total,
                    worst=prompt.ratio_max or 0.0,
                )
                for prompt in result.prompts
            ]  # fmt: skip
    return sorted(units.values(), key=lambda unit: min(map(order_of, unit.results)))


def flag(
    units: list[Unit],
    *,
    routed: frozenset[str] = frozenset(),
    thresholds: Thresholds = THRESHOLDS,
    wider: float = 1.0,
) -> list[Unit]:
    """Set limits, ``wider`` times as wide, and flags; returns the flagged units in execution order.

    A unit is flagged where its typical ratio is beyond ``typical`` absolutely, or stands out among
    its siblings (is beyond ``lone`` times that of all blocks' outputs, where it has none, and of a
    parameter's gradient that of the blocks' gradients, if they differ by more: how prompts are
    added up moves them and no output); where one forward of one prompt is or does; or where a
    single token is beyond its limit (not in ``routed`` blocks: there, rounding may send a
    token to another expert). Limits are wider where few numbers are judged.
    """
    outputs = block_outputs(units)
    blocks = medians((unit.phase, unit.typical) for unit in outputs)
    gradients = medians(
        (unit.phase, unit.typical)
        for unit in units
        if unit.pass_ != "free" and unit.kind[0] == "block" and of_parameter(unit.site)
    )
    at_blocks = {
        phase: medians((look.place, look.typical) for unit in outputs if unit.phase == phase
                       for look in unit.looks)
        for phase in PHASES
    }  # fmt: skip
    families = families_of(units)
    # In a free pass a block is allowed what it may make of an error that came in, the first one
    # nothing: their ratios are no measure for each other.
    judged = [family for family in families if len(family) >= 3 and family[0].pass_ != "free"]
    limits = (
        limit_of(sum(len(family) for family in judged)),
        limit_of(sum(len(unit.looks) for family in judged for unit in family)),
    )
    for family in families:
        alone = len(family) < 3 or family[0].pass_ == "free"
        sites, forwards = ([], []) if alone else _beside_siblings(family, limits, thresholds)
        for number, unit in enumerate(family):
            others = [other for other in family if other is not unit]
            unit.limit = absolute = thresholds.typical
            unit.worst_limit = max(thresholds.token, 2 * absolute)
            numel = sum(num_values(result) for result in unit.results)
            few = [few_numbers(r) if num_rows(r) < FEW_ROWS else 1.0 for r in unit.results]
            width = spread(numel) * statistics.median(few)
            if not alone:
                unit.num_siblings = len(others)
                unit.control = statistics.median(other.typical for other in others)
                unit.limit = min(absolute * width, sites[number])
            elif unit.phase in blocks and unit.pass_ != "free":
                control = max(blocks[unit.phase], _LEAST_BLOCKS)
                if of_parameter(unit.site):
                    control = max(control, gradients.get(unit.phase, 0.0))
                unit.limit = min(absolute, thresholds.lone * control) * width
            else:
                unit.limit = absolute * width
            farthest = max(unit.results, key=lambda r: max(r.ratio_max or 0.0, r.ratio_sink or 0.0))
            columns = min(_num_columns(result) for result in unit.results)
            unit.limit *= unit.widened * wider
            unit.worst_limit *= spread(columns) * few_numbers(farthest) * unit.widened * wider
            usual = None if unit.pass_ == "free" else blocks.get(unit.phase)
            # the only look of a unit is judged as the unit is
            far = forwards[number] if forwards else {}
            for look in unit.looks if len(unit.looks) > 1 else ():
                few_rows = look.num_rows < FEW_ROWS
                if few_rows and (unit.results[0].block in routed or one_step(look.result)):
                    continue
                count = round(num_values(look.result) * look.share)
                look_width = spread(count, num_looks=len(unit.looks))
                look_width *= few_numbers(look.result) if few_rows else 1.0
                look.limit = (thresholds.token if few_rows else thresholds.typical) * look_width
                if look.place in far:
                    look.limit = min(look.limit, far[look.place])
                elif usual is not None:
                    # of one row, a few bits are the whole error
                    lower = _LEAST_BLOCKS * (2 if few_rows else 1)
                    lower *= _CANCELS if few_rows and look.result.role == "inner" else 1
                    beside = max(usual, at_blocks[unit.phase].get(look.place, 0.0), lower)
                    look.limit = min(look.limit, thresholds.lone * look_width * beside)
                look.limit *= unit.widened * wider
                look.usage = look.between = look.typical / look.limit
            unit.limit_usage = unit.typical / unit.limit
            in_routed = unit.results[0].block in routed
            if not in_routed:
                worst = max(unit.worst, unit.sink)
                unit.limit_usage = max(unit.limit_usage, worst / unit.worst_limit)
                for look in unit.looks:
                    look.of_token = look.worst / unit.worst_limit
            if unit.typical > unit.limit:
                unit.why = "typical"
            elif unit.beyond:
                unit.why = "forward"
            elif max(unit.worst, unit.sink) > unit.worst_limit and not in_routed:
                unit.why = "token" if unit.worst > unit.worst_limit else "sink"
            unit.limit_usage = max(unit.limit_usage, *(look.usage for look in unit.looks))
            unit.between = unit.limit_usage
    return [unit for unit in units if unit.why is not None]


def _beside_siblings(
    family: Sequence[Unit], limits: tuple[float, float], thresholds: Thresholds
) -> tuple[list[float], list[dict[PromptStep, float]]]:
    """The ratios beyond which each member stands out among its family: over all forwards, and in
    each. ``limits``: the deviates of an outlier among sites, and among forwards."""
    places = sorted({look.place for unit in family for look in unit.looks})
    at = {place: column for column, place in enumerate(places)}
    ratios = np.full((len(family), len(places)), math.nan)
    numbers = np.full_like(ratios, math.nan)
    least = np.full_like(ratios, thresholds.least_sibling)
    for member, unit in enumerate(family):
        for look in unit.looks:
            place = member, at[look.place]
            ratios[place] = look.typical
            numbers[place] = numbers_alike(look.result) * look.share
            if look.result.role == "inner" and look.num_rows < FEW_ROWS:
                least[place] *= _CANCELS
    # rows may round alike: the median of many forwards is no more certain than they are
    of_sites, least_of_sites = (
        np.nanmedian(values, axis=1, keepdims=True) for values in (numbers, least)
    )
    typical = np.array([[unit.typical] for unit in family])
    sites = _far(typical, of_sites, least_of_sites, limits[0], thresholds.ratio_spread)
    forwards = np.full_like(ratios, math.nan)
    if len(places) > 1:
        sigma = thresholds.ratio_forward_spread
        forwards = _far(ratios, numbers, least, limits[1], sigma)
        forwards[:, (~np.isnan(ratios)).sum(axis=0) < 3] = math.nan
    beyond = [
        {place: float(far) for place, far in zip(places, row, strict=True) if far == far}
        for row in forwards
    ]
    return sites[:, 0].tolist(), beyond


def _far(ratios: Floats, numbers: Floats, least: Floats, limit: float, sigma: float) -> Floats:
    """(M, K): the ratio beyond which each would stand out. The floor is a model: no chance is in
    it, and the error that it is held against is of ``numbers``."""
    energy = np.stack([np.ones_like(ratios), np.square(np.minimum(ratios, ALLOWED[1]))])
    x, own = observed(energy, np.stack([np.full_like(numbers, 1e12), numbers]), least)
    table = outliers(x, own, sigma, limit)
    far = np.exp(2 * np.minimum(table.control + table.reach, 300.0)) * (1 + least**2) - least**2
    return np.asarray(np.sqrt(np.maximum(far, 0.0)))


def num_values(result: SiteResult) -> int:
    """How many independent numbers the result's errors are made of: of an estimate, projections."""
    if is_norm(result.site):
        return ENOUGH
    return result.numel if result.estimated is None else result.estimated.num_values


def _num_columns(result: SiteResult) -> int:
    if result.estimated is not None:
        return result.estimated.num_projections
    return result.shape[-1] if result.shape else 1


def numbers_alike(result: SiteResult) -> float:
    """How many numbers of one size make an error of that norm and largest element: the largest
    square of n of them is 2 ln n times their mean one."""
    largest, size = result.max_abs, (result.rel_l2 or 0.0) * (result.reference_norm or 0.0)
    if result.estimated is not None or is_norm(result.site):
        return float(ENOUGH)
    if not largest or not 0 < size / largest < math.inf:
        return float(max(1, result.numel))
    alike = max(1.0, (size / largest) ** 2)
    return min(float(max(1, result.numel)), alike * max(1.0, 2 * math.log(alike)))


def few_numbers(result: SiteResult) -> float:
    """Factor on a limit where a few elements hold the error, as a massive activation's rounding.

    The floor is a model, so the error of n numbers in floors is √(χ²_n / n); its quantile that one
    in a million exceeds (Wilson and Hilferty 1931), over that of as many as limits are made for.
    """
    numbers = numbers_alike(result)

    def quantile(n: float) -> float:
        return math.pow(1 - 2 / (9 * n) + 4.75 * math.sqrt(2 / (9 * n)), 1.5)

    return max(1.0, quantile(numbers) / quantile(ENOUGH))


def families_of(units: Iterable[Unit]) -> list[list[Unit]]:
    """Units that are each other's siblings, together."""
    return list(grouped(units, lambda unit: (unit.pass_, *unit.kind)).values())


def block_outputs(units: Iterable[Unit]) -> list[Unit]:
    """The blocks' own outputs where blocks got equal inputs."""
    whole = (unit for unit in units if unit.pass_ != "free" and unit.kind[0] == "block")
    return [u for u in whole if not u.kind[1] or u.kind[1:3] == (BACKWARD, "out")]


def medians(values: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """The median by key, where at least three values tell."""
    by_key = grouped(values, lambda item: item[0])
    return {
        key: statistics.median(value for _, value in items)
        for key, items in by_key.items()
        if len(items) >= 3
    }


def stacks_of(results: Iterable[SiteResult]) -> set[str]:
    return {result.block.rpartition(".")[0] for result in results if result.block is not None}


def is_whole(path: str, stacks: set[str]) -> bool:
    """Is it the model, or holds it a whole stack?"""
    return path == ROOT or any(stack.startswith(path + ".") for stack in stacks)


def _kind(result: SiteResult, phase: str) -> Kind:
    path, _, port = result.site.partition(":")
    if result.block is not None:
        # the place inside the block: model.layers.3.mlp.up_proj → .mlp.up_proj; an encoder's
        # blocks are no controls for a decoder's, which run at other shapes
        stack = result.block.rpartition(".")[0]
        return ("block", path[len(result.block) :], port, result.kind, phase, stack)
    return ("trunk", path, port, result.kind, phase)


def visible_of(units: Sequence[Unit], routed: frozenset[str]) -> Visible | None:
    """Of the middle block, the larger one of prefill and decode; None where there is no block."""
    blocks = [unit for unit in units if unit.results[0].role == "block"]
    levels: dict[str, float] = {}
    for group in grouped(blocks, lambda unit: unit.phase).values():
        members = [
            unit.visible or _of_limits(unit, routed=unit.results[0].block in routed)
            for unit in group
        ]
        for level in dict.fromkeys(level for sizes in members for level in sizes):
            known = [sizes[level] for sizes in members if level in sizes]
            levels[level] = max(levels.get(level, 0.0), statistics.median(known))
    finite = {level: size for level, size in levels.items() if size < 1}
    if "site" not in finite:
        return None
    return Visible(
        block=finite["site"], forward=finite.get("forward"), token=finite.get("row"),
        channel=finite.get("channel"),
    )  # fmt: skip


def _of_limits(unit: Unit, *, routed: bool) -> dict[Level, float]:
    """Without a truth: what the two sides may differ by."""
    floors = [result.floor for result in unit.results if result.floor]  # of equal ones it is 0
    if not floors:
        return {}
    floor = statistics.median(floors)
    sizes: dict[Level, float] = {"site": unit.limit * floor}
    looks = [look.limit * (look.result.floor or floor) for look in unit.looks if look.limit]
    if looks:
        sizes["forward"] = statistics.median(looks)
    if not routed:
        sizes["row"] = unit.worst_limit * floor
    return narrowed(sizes)


def narrowed(sizes: dict[Level, float]) -> dict[Level, float]:
    """What is seen in one row is so where it is in all of a forward, or of a block."""
    for level, narrower in (("forward", "row"), ("site", "forward"), ("site", "row")):
        if level in sizes and narrower in sizes:
            sizes[level] = min(sizes[level], sizes[narrower])
    return sizes

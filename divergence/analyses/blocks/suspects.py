"""Suspects: the units beyond what rounding explains, alone or all of a kind, and what to run next.

Without a truth the difference of the two sides is held against a rounding model and against the
siblings (blocks.units). With one, each side's own error is (blocks.sides).

The escalated pass is the anchored one in float32, held against the float32 floor and, as every
pass, against the truth. A 16-bit dtype hides what is smaller than its own rounding. In float32 a
wrong formula or wrong data exceeds the floor a hundredfold, and what only the 16-bit kernels do
wrong is gone, so the two passes together tell one from the other.

Most of a kind beyond their limits is a *family*: a kernel or a setting, not a layer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from divergence.analyses.blocks.units import TABLES, Unit, build_units, flag
from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.preflight.code import truth_tells
from divergence.comparison.results import SiteResult, order_of
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.run.command import Command
from divergence.run.site import BACKWARD, module_of, of_parameter
from divergence.words import Side, SideOrBoth


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
        return "reference" if "candidate" in self.judged else "candidate"

    @property
    def side(self) -> SideOrBoth | None:
        """Which run is wrong, as far as the escalated passes tell: of steps that no truth reaches
        the side is that of the same site elsewhere."""
        sides = {side_of(unit) for unit in self.flagged} - {None}
        judged = {unit.site for unit in self.flagged if side_of(unit) is not None}
        if not sides or any(unit.site not in judged for unit in self.flagged):
            return None
        return sides.pop() if len(sides) == 1 else "both"

    def beside(self, unit: Unit) -> list[Fact]:
        """What the float32 pass says of a unit that is flagged in the runs' own dtype."""
        block, site = unit.results[0].block, unit.site
        mine = [u for u in self.units if u.site == site or (block and u.site == f"{block}:out")]
        mine = [u for u in mine if side_of(u) in (None, unit.side) or unit.side is None]
        if not mine:
            return []
        worst = max(mine, key=lambda u: u.limit_usage)
        of_token = worst.why in ("token", "sink")
        return [
            fact(
                "blocks.escalated",
                site=worst.site,
                of_token=of_token,
                ratio=max(worst.worst, worst.sink) if of_token else worst.typical,
                limit=worst.worst_limit if of_token else worst.limit,
                side=None if worst.blame is None else worst.blame.side,
                times=None if worst.blame is None else worst.blame.value,
                stays=any(u in self.flagged for u in mine),
            )
        ]

    def healthy(self) -> list[Fact]:
        """That it found nothing, and how near it came."""
        if not self.units:
            return []
        worst = max(self.units, key=lambda unit: unit.typical / unit.limit)
        return [
            fact(
                "blocks.escalated_healthy", site=worst.site, ratio=worst.typical, limit=worst.limit
            )
        ]


def escalated_units(
    sites: Sequence[SiteResult], *, routed: frozenset[str], thresholds: Thresholds
) -> Escalation:
    """The units of every escalated pass that was compared, held against float32's floor."""
    units: list[Unit] = []
    escalated = [s for s in sites if s.pass_ == "escalated"]
    sides = sorted({site.of for site in escalated}, key=str)
    for of in sides:
        mine = [s for s in escalated if s.of == of and TABLES not in (s.kind or "").lower()]
        built = build_units(mine, "escalated")
        flag(built, routed=routed, thresholds=thresholds, wider=thresholds.escalated)
        units += built
    return Escalation(units, set(sides))


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
    judged = [unit for unit in flagged if unit.kind[0] == "block" and _counts(unit)]
    judged.sort(key=lambda unit: order_of(unit.first))
    for unit in judged:
        kin = [other for other in units if other.kind == unit.kind]
        if len(kin) < _LEAST:
            continue
        places = places_of(unit)
        members = [
            other
            for other in judged
            if other.kind == unit.kind and other.side in (None, unit.side)  # two faults are no kind
            and places & places_of(other)
        ]  # fmt: skip
        if 2 * len(members) <= len(kin):
            confirm = measured.thresholds.truth_confirm
            unexplained = confirm if measured.narrow else confirm**2  # float32 sums have an order
            # a training step hands on the errors of what it is given
            alone = measured.unexplained and not measured.reference.manifest.training.train
            members = _off_alike(unit, kin, measured.thresholds, unexplained if alone else None)
        if 2 * len(members) > len(kin):
            return Family(_name(unit, units, judged), members, len(kin))
    return None


def _counts(unit: Unit) -> bool:
    """May a unit be off as its kind is? In a free pass one bad token is off in all that follows."""
    return unit.pass_ != "free" or unit.why in _WHOLE


def places_of(unit: Unit) -> set[PromptStep]:
    """The forwards in which a flagged unit is off: all, where it is so by its typical token."""
    if unit.why in ("forward", "token", "sink"):
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

        def is_off(other: Unit) -> bool:
            ratios = [(other.typical, unit.limit)]
            if unit.why == "forward":
                limits = {look.place: look.limit for look in unit.beyond}
                ratios = [
                    (look.typical, limits[look.place])
                    for look in other.looks
                    if look.place in limits
                ] or [(0.0, 1.0)]
            if unexplained is not None and not stands_out:
                return statistics.median(ratio for ratio, _ in ratios) > unexplained
            return statistics.median(ratio / limit for ratio, limit in ratios) > 1 / near

        return [unit, *(other for other in kin if other is not unit and is_off(other))]
    from divergence.analyses.blocks.sides import farther_side

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
    sources = _sources(unit, units)
    if len({u.kind[1] for u in sources}) > 1 and all(u in judged for u in sources):
        if kind in _MATMULS:
            dtype = unit.results[0].candidate_dtype
            return fact("blocks.kind_products", kind=kind, dtype=dtype)
        return kind or place
    return fact("blocks.kind_at", kind=kind, place=place)


def _sources(unit: Unit, units: Sequence[Unit]) -> list[Unit]:
    """Outputs of the same class in the same phase whose module was entered by what passes, or
    which are much farther off than what entered, and the unit's own family. What is merely
    fed by something bad says nothing of its own."""
    entering = {u.site: u for u in units if u.kind[2] == "in"}
    sources = []
    for other in units:
        if other.kind[0] != "block" or other.kind[2:5] != unit.kind[2:5] or not other.kind[1]:
            continue
        fed = entering.get(other.site.rpartition(":")[0] + ":in")
        if other.kind == unit.kind or (fed is not None and (fed.why is None or _adds(other, fed))):
            sources.append(other)
    return sources


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

"""Families: units of one kind. All of a kind off is a kernel or a setting, not a layer."""

from __future__ import annotations

from dataclasses import dataclass

from divergence.analyses.blocks.units import Unit
from divergence.comparison.results.sites import order_of
from divergence.numerics.rounding.floor import THRESHOLDS

__all__ = ["Family", "find_family"]

_MATMULS = ("Linear", "Conv1D")
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Family:
    """``name`` for "every ...": a class, with the places where not all of them are meant."""

    name: str
    members: list[Unit]
    num_all: int


def find_family(units: list[Unit], flagged: list[Unit]) -> Family | None:
    """The kind of the onset, where more than half of at least three of its kind are flagged.

    What follows a bad module inside a block is off as well, so the first kind in execution
    order counts. Where every place of its class is off, the class is named alone.
    """
    typical = [unit for unit in flagged if unit.kind[0] == "block" and unit.why in _WHOLE]
    typical.sort(key=lambda unit: order_of(unit.first))
    for unit in typical:
        members = [
            other
            for other in typical
            if other.kind == unit.kind and other.side in (None, unit.side)  # two faults are no kind
        ]
        if unit.why == "forward":  # of one forward: the others must be off in that one
            place = unit.beyond[0].place
            members = [o for o in members if any(look.place == place for look in o.beyond)]
        total = sum(other.kind == unit.kind for other in units)
        if total >= _LEAST and len(members) > total / 2:
            return Family(_name(unit, units, typical), members, total)
    return None


_WHOLE = ("typical", "both", "gain", "forward")


def _name(unit: Unit, units: list[Unit], typical: list[Unit]) -> str:
    """What "every ..." is about: a class, or one place of it; for what enters a module, the
    module around it, whose own code lies between."""
    _, path, port, kind, *_ = unit.kind
    place = path.removeprefix(".")
    if not place:
        return kind or "block"
    if port.startswith("in"):
        around = path.rpartition(".")[0]
        outer = next((u.kind[3] for u in units if u.kind[0] == "block" and u.kind[1] == around), "")
        where = around.removeprefix(".") or "block"
        return f"{outer} ({where}, what enters {place})" if outer else f"input of {place} ({kind})"
    sources = _sources(unit, units)
    if len({u.kind[1] for u in sources}) > 1 and all(u in typical for u in sources):
        dtype = unit.results[0].candidate_dtype
        return f"{kind} ({dtype} matrix products)" if kind in _MATMULS else kind or place
    return f"{place} ({kind})"


def _sources(unit: Unit, units: list[Unit]) -> list[Unit]:
    """Outputs of the same class in the same phase whose module was entered by what passes, or
    which are much farther off than what entered, and the unit's own family. What is merely
    fed by something bad says nothing of its own."""
    entering = {u.site: u for u in units if u.kind[2] == "in"}
    found = []
    for other in units:
        if other.kind[0] != "block" or other.kind[2:5] != unit.kind[2:5] or not other.kind[1]:
            continue
        fed = entering.get(other.site.rpartition(":")[0] + ":in")
        if other.kind == unit.kind or (fed is not None and (fed.why is None or _adds(other, fed))):
            found.append(other)
    return found


def _adds(out: Unit, entering: Unit) -> bool:
    """The module's own error stands out from the one that it was given."""
    one, two = entering.results[0].truth, out.results[0].truth
    if one is None or two is None or out.side not in ("reference", "candidate"):
        return False
    before, after = (getattr(truth, f"{out.side}_error") for truth in (one, two))
    return bool(after > THRESHOLDS.truth_confirm * before)

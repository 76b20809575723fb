"""Families: units of one kind. All of a kind off is a kernel or a setting, not a layer."""

from __future__ import annotations

from dataclasses import dataclass

from divergence.compare.units import Unit, order_of

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
        members = [other for other in typical if other.kind == unit.kind]
        total = sum(other.kind == unit.kind for other in units)
        if total >= _LEAST and len(members) > total / 2:
            return Family(_name(unit, units, typical), members, total)
    return None


_WHOLE = ("typical", "both", "gain")


def _name(unit: Unit, units: list[Unit], typical: list[Unit]) -> str:
    kind, place = unit.kind[3], unit.kind[1].removeprefix(".")
    if not place:
        return kind
    same = [u for u in units if u.kind[0] == "block" and u.kind[3] == kind and u.kind[1]
            and u.kind[2] == unit.kind[2] and u.phase == unit.phase]  # fmt: skip
    bad = sum(u in typical for u in same)
    places = {u.kind[1].rpartition(".")[2] for u in same}
    if bad > len(same) / 2 and len(places) > 1:
        dtype = unit.results[0].candidate_dtype
        return f"{kind} ({dtype} matrix products)" if kind in _MATMULS else kind
    return f"{place} ({kind})"

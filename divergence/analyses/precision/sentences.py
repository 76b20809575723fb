"""What the precision audit has to say, as sentences.

A sentence is made where the sides computed the same module's part in different dtypes, or where a
side is below what the model's own code asks for. Below common practice alone is shown in the
table and accuses nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from divergence.analyses.precision.expectations import is_below
from divergence.comparison.results.operators import AuditedPlace, AuditFinding, AuditRow

__all__ = ["differing", "finding"]

PlacePair = tuple[AuditedPlace, AuditedPlace]


def differing(
    ours: list[AuditedPlace], theirs: list[AuditedPlace], rename: Callable[[str], str]
) -> list[PlacePair]:
    """Places of the same module and part whose dtypes are known on both sides, and differ."""
    one = _by_module(ours, lambda path: rename(f"{path}:out").rpartition(":")[0])
    two = _by_module(theirs, lambda path: path)
    pairs = []
    for module in one.keys() & two.keys():
        mine, other = one[module], two[module]
        if mine.keys() != other.keys():
            odd = [place for dtype, place in mine.items() if dtype not in other]
            new = [place for dtype, place in other.items() if dtype not in mine]
            pairs.append(((odd or list(mine.values()))[0], (new or list(other.values()))[0]))
    return sorted(pairs, key=lambda pair: pair[0].site)


def _by_module(
    places: list[AuditedPlace], named: Callable[[str], str]
) -> dict[str, dict[str, AuditedPlace]]:
    found: dict[str, dict[str, AuditedPlace]] = {}
    for place in places:
        if place.computed is not None:
            found.setdefault(named(place.module), {}).setdefault(place.computed, place)
    return found


def finding(
    row: AuditRow,
    ours: list[AuditedPlace],
    theirs: list[AuditedPlace],
    pairs: list[PlacePair],
    *,
    alone: bool,
) -> AuditFinding | None:
    """What there is to say of one part; None where nothing is. ``pairs``: see ``differing``."""
    accused = row.below if row.own else None
    if pairs:
        text, places = _against_each_other(row, pairs)
    elif accused:
        places = [place for place in (*ours, *theirs) if place.below]
        who = {"both": "both sides compute", "reference": "the reference computes"}.get(
            accused, "the candidate computes"
        )
        who = "the run computes" if alone else who
        other = {"reference": theirs, "candidate": ours}.get(accused, [])
        inside = next((place.kernel for place in other if place.kernel), None)
        hidden = "" if inside is None else f"; on the other side it is inside {inside}"
        text = f"{who} {row.part} in {_dtype_and_place(places[0])}{_expected(row)}{hidden}"
    else:
        return None
    sites = [site for place in places for site in (*place.operators, *place.near)]
    return AuditFinding(part=row.part, text=text, operators=list(dict.fromkeys(sites)))


def _against_each_other(row: AuditRow, pairs: list[PlacePair]) -> tuple[str, list[AuditedPlace]]:
    """The odd side first: the one below what is expected, else the one that is not as expected,
    else the narrower one, else the candidate."""
    reference, candidate = pairs[0]
    sides = [("reference", reference, candidate), ("candidate", candidate, reference)]
    (one, first, second) = max(
        sides,
        key=lambda side: (
            side[1].below,
            side[1].computed not in side[1].expected,
            is_below(side[1].computed or "", [side[2].computed or ""]),
            side[0] == "candidate",
        ),
    )
    two = "candidate" if one == "reference" else "reference"
    others = len({place.module for place, _ in pairs}) - 1
    more = f", also in {others} other module{'s' if others > 1 else ''}" if others else ""
    text = (
        f"the {one} computes {row.part} in {_dtype_and_place(first)}, the {two} in "
        f"{second.computed}{more}{_expected(row)}"
    )
    return text, [place for pair in pairs for place in pair]


def _dtype_and_place(place: AuditedPlace) -> str:
    where = (place.source or place.site).partition(" in ")[0]
    # one kernel: it rounds what it gives; what it adds up in is not in the records
    inside = "; as stored: what its kernel accumulates in is for the probe to tell"
    return f"{place.computed} ({where}{inside if place.accumulates else ''})"


def _expected(row: AuditRow) -> str:
    if not row.expected:
        return ""
    return f"; expected {' or '.join(row.expected)} ({row.expected_by})"

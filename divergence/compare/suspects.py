"""Suspects: the units that a pass makes answer for something, and which side of them.

Without a truth the difference of the two sides is held against a rounding model and
against the siblings (compare.units). With one, each side's own error is (compare.blame);
then a difference between the sides counts only where one of them is the farther from what
is right: two equally good answers may differ, which is a legitimate difference.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from divergence.compare.blame import (
    TABLES,
    Blame,
    Standing,
    least_of,
    questions,
    standing_of,
)
from divergence.compare.truth import Tallies
from divergence.compare.units import Unit, flag
from divergence.numerics.floor import Thresholds

__all__ = ["Shown", "find_suspects", "shown_by"]

Shown = Mapping[tuple[str, str, str], float]
"""By (pass, site, phase): the share of its limits that trusted runs use."""


def find_suspects(
    units: Sequence[Unit],
    *,
    tallies: Tallies | None,
    routed: frozenset[str],
    thresholds: Thresholds,
    shown: Shown | None = None,
) -> tuple[list[Unit], list[Unit]]:
    """(flagged, excused): units beyond what rounding explains, in execution order, and those
    whose sides differ by more than the rounding model has it, but are equally near the truth."""
    units = list(units)
    for unit in units:
        used = (shown or {}).get((unit.pass_, unit.site, unit.phase), 0.0)
        unit.widened = max(1.0, thresholds.widen * used)
    flag(units, routed=routed, thresholds=thresholds)
    if tallies is None:
        return [unit for unit in units if unit.why is not None], []
    excused = _blame_all(units, tallies, routed, thresholds)
    return [unit for unit in units if unit.why is not None], excused


def shown_by(units: Sequence[Unit]) -> dict[tuple[str, str, str], float]:
    """What a trusted run shows, from its own judged units."""
    return {(unit.pass_, unit.site, unit.phase): unit.strain for unit in units}


def _blame_all(
    units: list[Unit], tallies: Tallies, routed: frozenset[str], thresholds: Thresholds
) -> list[Unit]:
    judged: list[Unit] = []
    for unit in units:
        tally = tallies.find(unit.pass_, unit.site, unit.phase)
        if tally is None or unit.pass_ == "free" or _no_measure(unit):
            continue
        unit.standing = tally.once(standing_of)
        if unit.standing is not None:
            judged.append(unit)
    families: dict[tuple, list[Unit]] = {}
    for unit in judged:
        families.setdefault((unit.pass_, *unit.kind), []).append(unit)
    block_w = _block_w(judged, thresholds)
    excused: list[Unit] = []
    for family in families.values():
        for unit in family:
            others = [other.standing for other in family if other is not unit]
            answers = questions(
                unit.standing,
                others,
                lone_w=block_w.get(unit.phase),
                routed=unit.results[0].block in routed,
                widened=unit.widened,
                thresholds=thresholds,
            )
            unit.strain = max(answer.share for answer in answers)
            unit.blame = next((answer for answer in answers if answer.share > 1), None)
            if unit.blame is None and unit.why is not None:
                unit.blame = _confirmed(unit, answers[0], thresholds)
                if unit.blame is None:
                    excused.append(unit)
            unit.why = None if unit.blame is None else unit.blame.why
        _blame_family(family, thresholds)
    return excused


def _no_measure(unit: Unit) -> bool:
    """A rotary table is computed from float32 angles whatever the dtype: in two dtypes its
    distances from the truth have nothing to do with either's rounding."""
    first = unit.results[0]
    two_dtypes = first.reference_dtype != first.candidate_dtype
    return TABLES in (first.kind or "").lower() and two_dtypes


def _confirmed(unit: Unit, answer: Blame, thresholds: Thresholds) -> Blame | None:
    """The sides differ by more than the siblings': one of them must be the farther off, too."""
    if unit.why != "typical" or answer.value / answer.control < thresholds.truth_confirm:
        return None
    return replace(answer, limit=thresholds.truth_confirm)


def _blame_family(family: list[Unit], thresholds: Thresholds) -> None:
    """All of one kind: their own median W, which no comparison among them would show."""
    if len(family) < 3:
        return
    standings = [unit.standing for unit in family]
    ratios = [s.w(least_of(s, standings, thresholds)) for s in standings]
    middle = statistics.median(ratios)
    limit = thresholds.truth_systematic
    if max(middle, 1 / middle) <= limit * max(unit.widened for unit in family):
        return
    side = "candidate" if middle > 1 else "reference"
    for unit, ratio in zip(family, ratios, strict=True):
        value = ratio if middle > 1 else 1 / ratio
        if value > limit / thresholds.truth_confirm:
            unit.blame = Blame(
                side, "typical", value, 1.0, limit, unit.results[0], "all of its kind"
            )
            unit.why = "typical"
            unit.strain = max(unit.strain, value / limit)


def _block_w(units: list[Unit], thresholds: Thresholds) -> dict[str, float]:
    """By phase, the median W of the blocks' outputs, where at least three tell."""
    found: dict[str, list[Standing]] = {}
    for unit in units:
        if unit.kind[0] == "block" and not unit.kind[1] and unit.standing is not None:
            found.setdefault(unit.phase, []).append(unit.standing)
    return {
        phase: statistics.median(s.w(least_of(s, them, thresholds)) for s in them)
        for phase, them in found.items()
        if len(them) >= 3
    }

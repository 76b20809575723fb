"""Stand-outs: blocks that differ by more than other blocks or kernels do, though within rounding.

They are places to look first, never verdicts: a coarser sum in one block of twelve, say, whose
error a 16-bit dtype hides. A site stands out where its typical token's error in the anchored pass
is over ``standout`` times the median of its siblings', or where it was beyond a limit and both
sides turned out equally near the truth. One look counts once: of a block's sites the first in
execution order is named.

All blocks together stand out where one side is farther from the truth in all of them, by their
median W beyond ``truth_standout``: a kernel that is wrong everywhere has no healthy siblings.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from divergence.analyses.blocks.blame import least_of
from divergence.analyses.blocks.units import Kind, Unit, num_values
from divergence.comparison.results.findings import Evidence
from divergence.comparison.results.sites import order_of
from divergence.numerics.rounding.chance import spread
from divergence.numerics.rounding.floor import Thresholds
from divergence.words import Side

__all__ = ["StandOut", "evidence_of", "find_standouts"]

_SEEN = 0.02
"""Floors: siblings nearer to each other than this are taken to be this far apart, so that one
element rounded otherwise makes no stand-out."""


@dataclass(frozen=True, slots=True)
class StandOut:
    """``times``: the typical token's error over its siblings'; where all blocks of a kind stand
    out, ``side``'s error over the other side's. ``unit``: the first of them then."""

    unit: Unit
    times: float
    side: Side | None = None

    @property
    def text(self) -> str:
        """One sentence."""
        unit = self.unit
        if self.side is not None:
            other = "reference" if self.side == "candidate" else "candidate"
            return (
                f"in all blocks ({unit.phase}) the {self.side} is {self.times:.1f} × as far from "
                f"the truth as the {other}: within the limit, and more than other kernels usually "
                f"make; {unit.results[0].block} is as good a place to look as any"
            )
        worst = max(unit.results, key=lambda result: result.rel_l2 or 0.0)
        return (
            f"{unit.site} ({unit.phase}) differs {self.times:.1f} × more than its siblings (rel L2 "
            f"{worst.rel_l2:.1e}), within rounding: the first place to look"
        )


def evidence_of(standouts: Sequence[StandOut]) -> list[Evidence]:
    """The first three, for a verdict."""
    return [
        Evidence(text=one.text, values={"times": one.times}, block=one.unit.results[0].block)
        for one in standouts[:3]
    ]


def find_standouts(
    units: Sequence[Unit], excused: Sequence[Unit], thresholds: Thresholds
) -> list[StandOut]:
    """In execution order, one a block; ``excused``: beyond a limit, yet equally near the truth."""
    families: dict[Kind, list[Unit]] = {}
    for unit in units:
        if unit.pass_ == "anchored" and unit.kind[0] == "block":
            families.setdefault(unit.kind, []).append(unit)
    found: list[StandOut] = []
    for family in families.values():
        for unit in family if len(family) >= 4 else ():
            usual = statistics.median(o.typical for o in family if o is not unit)
            times = unit.typical / max(usual, _SEEN)
            numbers = max(num_values(result) for result in unit.results)
            if times > thresholds.standout * spread(numbers) or (
                unit in excused and times > thresholds.truth_confirm
            ):
                found.append(StandOut(unit, times))
        found += _all_of(family, thresholds)
    found.sort(key=lambda one: order_of(one.unit.first))
    named: dict[str | None, StandOut] = {}
    for one in found:
        named.setdefault(one.unit.results[0].block, one)
    return list(named.values())


def _all_of(family: Sequence[Unit], thresholds: Thresholds) -> list[StandOut]:
    """One side is farther from the truth in all of a kind."""
    stats = [unit.stats for unit in family if unit.stats is not None]
    if len(stats) < max(3, len(family)):
        return []
    ratios = [one.w(least_of(one, stats, thresholds)) for one in stats]
    middle = statistics.median(ratios)
    times = max(middle, 1 / max(middle, 1e-300))
    width = spread(sum(one.num_values for one in stats))
    if times <= thresholds.truth_standout * width * max(unit.widened for unit in family):
        return []
    first = min(family, key=lambda unit: order_of(unit.first))
    return [StandOut(first, times, "candidate" if middle > 1 else "reference")]

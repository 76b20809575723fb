"""Escalation: the anchored pass once more in float32, held against the float32 floor.

A 16-bit dtype hides what is smaller than its own rounding. In float32 a wrong formula or
wrong data exceeds the floor a hundredfold, while what only the kernels of the 16-bit
dtype do wrong is gone: the same machine, the same inputs, another dtype. So the two
passes together tell one from the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from divergence.analyses.blocks.blame import TABLES
from divergence.analyses.blocks.units import Unit, build_units, flag
from divergence.comparison.results.findings import Evidence
from divergence.comparison.results.sites import SiteResult
from divergence.numerics.rounding.floor import Thresholds
from divergence.words import Side, SideOrBoth

__all__ = ["Escalation", "judge_escalated"]


@dataclass(slots=True)
class Escalation:
    """``judged``: sides whose escalated pass was compared (None: both with each other)."""

    units: list[Unit] = field(default_factory=list)
    flagged: list[Unit] = field(default_factory=list)
    judged: set[Side | None] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Nothing is hidden on either side; the reference's own pass may be a shared one."""
        return bool(self.judged)

    @property
    def side(self) -> SideOrBoth | None:
        """Which run is wrong, as far as the escalated passes tell."""
        sides = {unit.results[0].of for unit in self.flagged}
        if not sides or None in sides:
            return None
        return sides.pop() if len(sides) == 1 else "both"

    def beside(self, unit: Unit) -> list[Evidence]:
        """What the float32 pass says of a unit that is flagged in the runs' own dtype."""
        block, site = unit.results[0].block, unit.site
        mine = [u for u in self.units if u.site == site or (block and u.site == f"{block}:out")]
        mine = [u for u in mine if u.results[0].of in (None, unit.side) or unit.side is None]
        if not mine:
            return []
        worst = max(mine, key=lambda u: u.limit_usage)
        what, ratio, limit = "", worst.typical, worst.limit
        if worst.why in ("token", "sink"):
            what, ratio = "one token's error is ", max(worst.worst, worst.sink)
            limit = worst.worst_limit
        if any(u in self.flagged for u in mine):
            says = "it stays in float32, so it is a wrong formula or wrong data"
        else:
            says = "it vanishes in float32: kernels of the runs' dtype that compute too coarsely"
        return [
            Evidence(
                text=f"escalated pass: {what}{ratio:.3g} × the float32 floor at {worst.site} "
                f"(limit {limit:.1f}); {says}",
                values={"ratio": ratio, "limit": limit},
            )
        ]

    def healthy(self) -> list[Evidence]:
        """That it found nothing, and how near it came."""
        if not self.units:
            return []
        worst = max(self.units, key=lambda unit: unit.limit_usage)
        return [
            Evidence(
                text=f"escalated pass (float32): nothing of formula or data is wrong; the largest "
                f"is {worst.typical:.2f} × the float32 floor, at {worst.site} "
                f"(limit {worst.limit:.1f})",
                values={"ratio": worst.typical, "limit": worst.limit},
            )
        ]


def judge_escalated(
    sites: Sequence[SiteResult], *, routed: frozenset[str], thresholds: Thresholds
) -> Escalation:
    """Units and flags of every escalated pass that was compared."""
    limits = {
        name: getattr(thresholds, name) * thresholds.escalated
        for name in ("typical", "sibling", "lone", "token", "token_sibling")
    }
    wider = msgspec.structs.replace(thresholds, **limits)
    found = Escalation()
    escalated = [s for s in sites if s.pass_ == "escalated"]
    for of in sorted({site.of for site in escalated}, key=str):
        mine = [s for s in escalated if s.of == of and TABLES not in (s.kind or "").lower()]
        units = build_units(mine, "escalated")
        found.judged.add(of)
        found.units += units
        found.flagged += flag(units, routed=routed, thresholds=wider)
    return found

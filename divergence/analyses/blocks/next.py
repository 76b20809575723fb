"""The commands that give certainty about blocks, or go deeper."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.analyses.blocks.units import Unit
from divergence.comparison.measure.unmeasured import is_unmeasured
from divergence.comparison.measured import Measured
from divergence.comparison.results.sites import SiteResult

__all__ = ["next_commands"]


def next_commands(measured: Measured, unit: Unit | None, *, escalated: bool) -> list[str]:
    """What to run next. ``unit``: the one that the verdict is about, if it is about one;
    ``escalated``: was an escalated pass judged?"""
    advice = measured.advice
    if not measured.anchored:
        return advice.certainty(_outside_blocks(measured.sites))
    commands: list[str] = []
    again: list[str] = []
    unmeasured = [site for site in measured.sites if is_unmeasured(site)]
    if unmeasured or (unit is not None and any(r.estimated for r in unit.results)):
        named = [site.site for site in unmeasured if site.role == "inner"]
        again = advice.in_full([*_outside_blocks(measured.sites), *dict.fromkeys(named)])
        commands += again
        if unit is None and commands:
            return commands
    if unit is not None:
        block = unit.results[0].block
        if block is None or unit.site.partition(":")[0] != block:
            commands += advice.look_at(unit.site)
        else:
            commands += advice.into_block(block, hidden=unit.pass_ == "escalated")
        if measured.truth_samples is None:
            commands += advice.truth(full=bool(again))
    if measured.narrow and not escalated and unit is None:
        commands += advice.escalate()
    return commands


def _outside_blocks(sites: Sequence[SiteResult]) -> list[str]:
    """Flagged sites that recording the blocks' own inputs and outputs would leave out."""
    return list(dict.fromkeys(s.site for s in sites if s.flagged and s.role == "inner"))

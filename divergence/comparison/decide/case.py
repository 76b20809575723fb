"""The case before the judge: everything a verdict may rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from divergence.comparison.blocks.ends import Ends
from divergence.comparison.blocks.suspects import Shown
from divergence.comparison.blocks.units import Unit
from divergence.comparison.decide.advice import Advice
from divergence.comparison.decide.evidence import context
from divergence.comparison.measure.truth import Tallies
from divergence.comparison.measure.unmeasured import (
    estimated_evidence,
    is_unmeasured,
    unmeasured_evidence,
)
from divergence.comparison.result import Evidence, PreflightLine, SiteResult, TokensResult

__all__ = ["Case"]


def _outside_blocks(sites: Sequence[SiteResult]) -> list[str]:
    """Flagged sites that recording the blocks' own inputs and outputs would leave out."""
    return list(dict.fromkeys(s.site for s in sites if s.flagged and s.role == "inner"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything the judge may look at. ``anchored``: pairs of an anchored pass are there;
    ``routed``: blocks with experts whose choices are not known; ``experts``: are there blocks with
    experts at all; ``advice`` prints commands;
    ``missing``: records without a partner or skipped; ``tallies``: both sides against the
    truth, where one was given; ``shown``: what trusted runs differ by; ``narrow``: a side
    computes in a dtype whose floor hides what an escalated pass would see; ``partial``: the
    truth was cut off; ``widened_beyond``: a trusted run is itself beyond the limits that it widens;
    ``arithmetic``: what the probed machines' arithmetic explains; ``ends``: what lies between the
    blocks and behind them, where it was looked at."""

    sites: Sequence[SiteResult]
    preflight: Sequence[PreflightLine]
    tokens: TokensResult | None
    anchored: bool
    routed: frozenset[str]
    advice: Advice
    missing: int
    notes: Sequence[str] = ()
    tallies: Tallies | None = None
    shown: Shown | None = None
    narrow: bool = False
    partial: bool = False
    widened_beyond: bool = False
    experts: bool = False
    arithmetic: Sequence[Evidence] = ()
    ends: Ends | None = None

    def context(self) -> list[Evidence]:
        """What the reader must know beside the numbers."""
        return [
            *estimated_evidence(self.sites),
            *unmeasured_evidence(self.sites),
            *context(self.notes, self.preflight, self.tokens),
            *self.arithmetic,
        ]

    def next_commands(self, unit: Unit | None, *, escalated: bool) -> list[str]:
        """The commands that give certainty, or go deeper."""
        advice = self.advice
        if not self.anchored:
            return advice.certainty(_outside_blocks(self.sites))
        commands: list[str] = []
        again: list[str] = []
        unmeasured = [site for site in self.sites if is_unmeasured(site)]
        if unmeasured or (unit is not None and any(r.estimated for r in unit.results)):
            named = [site.site for site in unmeasured if site.role == "inner"]
            again = advice.in_full([*_outside_blocks(self.sites), *dict.fromkeys(named)])
            commands += again
            if unit is None and commands:
                return commands
        if unit is not None:
            block = unit.results[0].block
            if block is None or unit.site.partition(":")[0] != block:
                commands += advice.look_at(unit.site)
            else:
                commands += advice.into_block(block, hidden=unit.pass_ == "escalated")
            if self.tallies is None:
                commands += advice.truth(full=bool(again))
        if self.narrow and not escalated and unit is None:
            commands += advice.escalate()
        return commands

"""Measured: two runs, aligned and measured. Everything that an analysis may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from divergence.comparison.advice import Advice
from divergence.comparison.align.pairs import Alignment
from divergence.comparison.experts import Routes
from divergence.comparison.measure.truth import SamplesBySite, Truth
from divergence.comparison.results.findings import PreflightLine
from divergence.comparison.results.operators import OperatorsResult
from divergence.comparison.results.sites import PassCoverage, SiteResult
from divergence.comparison.results.tokens import TokensResult
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.run.reader import Run
from divergence.run.schema.contents import call_passes
from divergence.run.schema.manifest import Manifest

__all__ = ["Measured", "Shown", "is_probe"]

Shown = Mapping[tuple[str, str, str], float]
"""(pass, site, phase) → the largest share of a limit that trusted runs use there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Two runs, and the numbers of every pair of tensors. Nothing writes into it."""

    reference: Run
    candidate: Run
    truth: Truth | None = None
    """The float64 run, where one was given."""
    alignment: Alignment
    sites: Sequence[SiteResult]
    """One result for each pair of tensors."""
    preflight: Sequence[PreflightLine] = ()
    thresholds: Thresholds = THRESHOLDS
    advice: Advice
    """Prints commands for these runs."""
    tokens: TokensResult | None = None
    operators: OperatorsResult | None = None
    """None unless both sides recorded operators."""
    routes: Routes = field(default_factory=Routes)
    """The experts that each token was sent to."""
    truth_samples: SamplesBySite | None = None
    """The measurements of both sides against the truth, where one was given."""
    shown: Shown | None = None
    """The largest share of each limit that trusted runs use, where any were given."""
    covered: Sequence[PassCoverage] = ()
    """How much of each pass was compared."""
    notes: Sequence[str] = ()
    """Notes for the report. Those of ``alignment`` are evidence too."""
    rename: Callable[[str], str] = str
    """Maps a site of the reference to the candidate's."""
    anchored: bool
    """Were pairs of an anchored pass measured?"""
    routed: frozenset[str] = frozenset()
    """Blocks with experts, where the choices of experts are not known."""
    experts: bool = False
    """Are there blocks with experts at all?"""
    narrow: bool = False
    """Does a side compute in a dtype whose floor hides what an escalated pass would see?"""
    missing: int = 0
    """Number of records without a partner or skipped, and of tokens without one."""

    @property
    def has_operators(self) -> bool:
        """Did a side record operators?"""
        runs = (self.reference, self.candidate)
        return any(call_passes(run.records) for run in runs)

    @property
    def partial(self) -> bool:
        """Was the truth cut off?"""
        return self.truth is not None and not self.truth.run.manifest.complete

    @property
    def widened_beyond(self) -> bool:
        """Is a trusted run itself beyond the limits that it widens?"""
        return self.shown is not None and any(used > 1 for used in self.shown.values())


def is_probe(manifest: Manifest) -> bool:
    """Was the run made by `divergence probe`?"""
    return manifest.model.task == "operators" and manifest.model.source == "probe"

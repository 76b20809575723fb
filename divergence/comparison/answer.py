"""What an analysis is to the comparison: three functions, looked up by the name of its folder.

An analysis is a folder of ``divergence.analyses``. Its ``__init__`` says whether it applies, so
that only what applies is imported; its ``find`` module claims, and explains. It knows neither the
other analyses nor the verdict of which they become a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

from divergence._version import __version__
from divergence.comparison.decide import decide
from divergence.comparison.result import Report, summary_of
from divergence.comparison.results.findings import Finding, PreflightLine, Verdict

if TYPE_CHECKING:
    from divergence.comparison.measured import Measured, Shown
    from divergence.comparison.result import ReplicaCheck
    from divergence.comparison.results.operators import AuditResult, OperatorsResult
    from divergence.comparison.results.sites import Coverage, SiteResult
    from divergence.comparison.results.tokens import TokensResult
    from divergence.run.reader import Run

__all__ = [
    "ANALYSES", "Analysis", "Answer", "applying", "limits_used", "numbers_of", "report_of",
    "without_partner", "without_sites",
]  # fmt: skip

ANALYSES = (
    "blocks", "codes", "tokens", "arithmetic", "ends", "experts", "operators", "precision",
    "ranks", "code", "gradients",
)  # fmt: skip
"""Folders of divergence.analyses, in the order in which they are asked. What has no sites is
compared by its own analysis alone (``without_sites``)."""


class Parts(TypedDict, total=False):
    """Fields of the Report, by name: an analysis fills its own."""

    sites: list[SiteResult]
    tokens: TokensResult | None
    operators: OperatorsResult | None
    audit: AuditResult | None
    replicas: list[ReplicaCheck]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an analysis found in two runs."""

    findings: Sequence[Finding] = ()
    parts: Parts = field(default_factory=Parts)
    notes: Sequence[str] = ()
    """Lines below the report: no findings, and worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """One folder of divergence.analyses."""

    name: str
    find: Callable[[Measured], Answer] | None
    """What it claims, from the numbers alone."""
    explain: Callable[[Measured, Verdict, Answer], list[Finding]] | None
    """What it has to say of a verdict, given its own answer: why it is so."""


def applying(measured: Measured, names: Sequence[str] | None = None) -> list[Analysis]:
    """The analyses that have something to look at in these runs, imported; of ``names`` alone,
    where they are given."""
    analyses = []
    for name in ANALYSES if names is None else names:
        if not _module_of(name).applies(measured):
            continue
        module = _module_of(name, "find")
        analyses.append(
            Analysis(
                name=name, find=getattr(module, "find", None),
                explain=getattr(module, "explain", None),
            )
        )  # fmt: skip
    return analyses


def numbers_of(name: str, measured: Measured) -> Any:
    """What one analysis measures before coverage is accounted for; None where it does not
    apply."""
    if not _module_of(name).applies(measured):
        return None
    return _module_of(name, "measure").measure(measured)


def limits_used(measured: Measured) -> Shown:
    """What the blocks of two runs use of their limits."""
    used: Shown = _module_of("blocks", "find").limits_used(measured)
    return used


_WITHOUT_SITES = ("collectives", "suite", "logprobs")


def without_sites(a: Run, b: Run) -> Callable[..., Report] | None:
    """What compares two runs that are not compared site by site (suites of operators,
    log-probabilities alone); None where they are."""
    for name in _WITHOUT_SITES:
        if _module_of(name).applies(a, b):
            report: Callable[..., Report] = _module_of(name, "compare").report_on
            return report
    return None


def without_partner(run: Run) -> Callable[..., Report] | None:
    """What judges one run without another (collectives, by their definitions); None where nothing
    does."""
    if not _module_of("collectives").alone(run):
        return None
    report: Callable[..., Report] = _module_of("collectives", "compare").report_alone
    return report


def report_of(
    a: Run, b: Run, finding: Finding, coverage: Coverage, preflight: list[PreflightLine],
    *, notes: Sequence[str] = (), **part: Any,
) -> Report:  # fmt: skip
    """The report where one finding says it all, and no site was compared. ``part``: the field of
    the Report that tells more."""
    return Report(
        tool_version=__version__, reference=summary_of(a), candidate=summary_of(b),
        verdict=decide([finding]).verdict, findings=[finding], preflight=preflight, tokens=None,
        coverage=coverage, sites=[], notes=list(notes), **part,
    )  # fmt: skip


def _module_of(*names: str) -> ModuleType:
    """A module of an analysis, by name: the comparison imports none that does not apply."""
    return import_module(".".join(("divergence.analyses", *names)))

"""To the comparison an analysis is three functions, looked up by the name of its folder.

An analysis is a package: a folder of ``divergence.analyses``, or one that a domain names. Its
``__init__`` says whether it applies, so that only what applies is imported; its ``find`` module
claims, and explains. All of them are given what was measured, and give an answer each. An analysis
knows neither the others nor the verdict of which they become a part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from divergence._version import __version__
from divergence.comparison.align import Pieces
from divergence.comparison.decide import claim_named, decide, nothing_explains
from divergence.comparison.measure.truth import SamplesBySite
from divergence.comparison.result import (
    Finding,
    PreflightLine,
    Report,
    ReportPart,
    Role,
    Verdict,
    Visible,
    no_parts,
    onset_at,
    order_of,
    summary_of,
)
from divergence.domain import added
from divergence.errors import first_line
from divergence.facts import Fact, fact, sentence
from divergence.numerics.arrays import as_tensor
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.run.contents import call_passes
from divergence.run.manifest import SUITE

if TYPE_CHECKING:
    import torch

    from divergence.comparison.advice import Advice
    from divergence.comparison.align import Alignment, NameMap, Pair
    from divergence.comparison.experts import Routes
    from divergence.comparison.measure.truth import Truth
    from divergence.comparison.result import (
        AuditResult,
        Coverage,
        OperatorsResult,
        PassCoverage,
        ReplicaCheck,
        SiteResult,
        TokensResult,
    )
    from divergence.run.manifest import Manifest
    from divergence.run.reader import Run

ANALYSES = ("blocks", "tokens", "ends", "experts", "operators", "precision", "ranks", "code")
"""Folders of divergence.analyses, in the order in which they are asked. What has no sites is
compared by its own analysis alone (``whole_report``)."""


Shown = Mapping[tuple[str, str, str], float]
"""(pass, site, phase) → the largest share of a limit that trusted runs use there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Two runs, aligned and measured: everything that an analysis may look at. Nothing writes into
    it."""

    reference: Run
    candidate: Run
    truth: Truth | None = None
    """The float64 run, where one was given."""
    floor: Run | None = None
    """The side that carries the floor which both are held against, where there is no truth."""
    alignment: Alignment
    sites: Sequence[SiteResult]
    """One result for each pair of tensors."""
    preflight: Sequence[PreflightLine] = ()
    thresholds: Thresholds = THRESHOLDS
    advice: Advice
    """Makes commands for these runs."""
    tokens: TokensResult | None = None
    operators: OperatorsResult | None = None
    """None unless both sides recorded operators."""
    routes: Routes
    """The experts that each token was sent to."""
    samples: SamplesBySite = field(default_factory=SamplesBySite)
    """The rows of both sides' difference, and their measurements against the truth or the floor,
    where there is one."""
    shown: Shown | None = None
    """The largest share of each limit that trusted runs use, where any were given."""
    covered: Sequence[PassCoverage] = ()
    """How much of each pass was compared."""
    notes: Sequence[Fact] = ()
    """Notes for the report. Those of ``alignment`` are evidence too."""
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

    def tensors(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both tensors of one of ``alignment.pairs``, of the same tokens of the same prompts
        however each run batched them; None where a side kept no bytes."""
        sides = ((self.reference, pair.reference), (self.candidate, pair.candidate))
        if not all(run.has_bytes(piece.record) for run, piece in sides):
            return None
        pieces = Pieces(self.reference, self.candidate)
        x, y = (as_tensor(pieces.array(run, piece)) for run, piece in sides)
        return x, y

    def tokens_of(self, pair: Pair) -> list[tuple[int, int] | None]:
        """(prompt, token) of each row of the pair's tensors of shape (B, T, ...), flattened to
        B · T; None of pads, and where it is not known."""
        pieces, shape = Pieces(self.reference, self.candidate), (*pair.reference.shape[:2], 1)
        rows = (pieces.locate(pair.reference, shape, row) for row in range(math.prod(shape)))
        return [
            None if sample is None or token is None or token < 0 else (sample, token)
            for sample, token in rows
        ]

    @property
    def rename(self) -> NameMap:
        """Maps a site of the reference to the candidate's."""
        return self.alignment.rename

    @property
    def unexplained(self) -> bool:
        """Does nothing that is recorded let the runs differ?"""
        return nothing_explains(self.reference, self.candidate, self.preflight)

    @property
    def has_operators(self) -> bool:
        """Did a side record operators?"""
        runs = (self.reference, self.candidate)
        return any(call_passes(run.records) for run in runs)

    @property
    def partial(self) -> bool:
        """Was the truth cut off?"""
        return self.truth is not None and not self.truth.run.manifest.complete

    def finding_at(self, result: SiteResult, **claimed: Any) -> Finding:
        """A finding about the place of one result, which it flags and says how to look at."""
        usual: dict[str, Any] = {
            "onset": onset_at(result),
            "place": order_of(result),
            "flags": [result.key],
            "commands": self.advice.look_at(result.site),
        }
        return Finding(**(usual | claimed))


class Parts(TypedDict, total=False):
    """Fields of the Report, by name: an analysis fills its own. Those of domains are
    ``ReportPart``s."""

    sites: list[SiteResult]
    visible: Visible | None
    tokens: TokensResult | None
    operators: OperatorsResult | None
    audit: AuditResult | None
    replicas: list[ReplicaCheck]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisResult:
    """Says what an analysis found in two runs."""

    findings: Sequence[Finding] = ()
    parts: Parts | Mapping[str, ReportPart] = field(default_factory=Parts)
    notes: Sequence[Fact] = ()
    """Lines below the report: no findings, and worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """One folder of divergence.analyses."""

    name: str
    find: Callable[[Measured], AnalysisResult] | None
    """What it claims, from the numbers alone."""
    explain: Callable[[Measured, Verdict, AnalysisResult], list[Finding]] | None
    """What it has to say of a verdict, given its own answer: why it is so."""


def applying(measured: Measured, names: Sequence[str] | None = None) -> list[Analysis]:
    """The analyses that have something to look at in these runs, imported; of ``names`` alone,
    where they are given. One of somebody's package that fails is left out, with a note: it must not
    take the comparison away."""
    analyses = []
    for name in places() if names is None else names:
        package = places().get(name, "")
        if package and not package.startswith("divergence."):
            analyses.append(_careful(name, package))
        elif _module_of(name).applies(measured):
            module = _module_of(name, "find")
            find, explain = getattr(module, "find", None), getattr(module, "explain", None)
            analyses.append(Analysis(name=name, find=find, explain=explain))
    return analyses


def _careful(name: str, package: str) -> Analysis:
    """An analysis of somebody's package: whatever it raises, or says that cannot be told, is a note
    of its own."""

    def left_out(error: Exception) -> Fact:
        return fact("analysis_failed", name=name, package=package, error=first_line(error))

    def find(measured: Measured) -> AnalysisResult:
        try:
            if not _module_of(name).applies(measured):
                return AnalysisResult()
            asked = getattr(_module_of(name, "find"), "find", None)
            answer: AnalysisResult = asked(measured) if asked else AnalysisResult()
            _check(answer.findings)
        except Exception as error:
            return AnalysisResult(notes=[left_out(error)])
        return answer

    def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
        try:
            if answer.notes or not _module_of(name).applies(measured):
                return []
            asked = getattr(_module_of(name, "find"), "explain", None)
            findings: list[Finding] = asked(measured, verdict, answer) if asked else []
            _check(findings)
        except Exception as error:
            evidence = [left_out(error)]
            return [Finding(claim="explanation", role="explains", evidence=evidence)]
        return findings

    return Analysis(name=name, find=find, explain=explain)


def _check(findings: Sequence[Finding]) -> None:
    """Raises ValueError or KeyError for a finding that could not be told or decided about."""
    for finding in findings:
        if finding.role not in get_args(Role):
            raise ValueError(f"role {finding.role!r} is none of {', '.join(get_args(Role))}")
        if finding.role == "convicts":
            claim_named(finding.claim)
        for item in (*finding.headline, *finding.evidence, *finding.beside, *finding.addition):
            sentence(item)


def places() -> dict[str, str]:
    """The package of each analysis, by its name, in the order in which they are asked."""
    packages = {name: f"divergence.analyses.{name}" for name in ANALYSES}
    names = list(packages)
    for name, question in added("analyses").items():
        if not question.whole:
            packages[name] = question.package
            names.insert(
                names.index(question.after) + 1 if question.after in names else len(names), name
            )
    return {name: packages[name] for name in names}


def numbers_of(name: str, measured: Measured) -> Any:
    """Return what one analysis measures before coverage is accounted for; None where it does not
    apply."""
    if not _module_of(name).applies(measured):
        return None
    return _module_of(name, "find").measure(measured)


def limits_used(measured: Measured) -> Shown:
    """Return what the blocks of two runs use of their limits."""
    used: Shown = _module_of("blocks", "find").limits_used(measured)
    return used


def whole_places() -> dict[str, str]:
    """The packages that compare runs as a whole, by name. Each has ``applies(a, b)``, and in its
    ``compare`` module ``report_on``; one that tells of a run without another has ``alone(run)`` and
    ``report_alone``, too."""
    questions = added("analyses").items()
    return {name: question.package for name, question in questions if question.whole}


def whole_report(says: str, report: str, *runs: Run) -> Callable[..., Report] | None:
    """The function ``report`` of the first package that ``says`` so of the runs: what compares two
    that are not compared site by site (suites, log-probabilities alone), or tells of one without
    another. One of somebody's package that fails is left out, with a warning: it must not take
    other comparisons away."""
    for package in whole_places().values():
        try:
            question = getattr(import_module(package), says, None)
            if question is not None and question(*runs):
                function: Callable[..., Report] = getattr(
                    import_module(f"{package}.compare"), report
                )
                return function
        except Exception as error:
            if package.startswith("divergence."):
                raise
            warnings.warn(f"{package} is left out: {first_line(error)}", stacklevel=2)
    return None


def report_of(
    a: Run,
    b: Run,
    finding: Finding,
    coverage: Coverage,
    preflight: list[PreflightLine],
    *,
    notes: Sequence[Fact] = (),
    **part: Any,
) -> Report:
    """The report where one finding says it all, and no site was compared. ``part``: the field of
    the Report that tells more."""
    own = {name: part.pop(name) for name in no_parts() if name in part}
    return Report(
        tool_version=__version__,
        reference=summary_of(a),
        candidate=summary_of(b),
        verdict=decide([finding]).verdict,
        findings=[finding],
        preflight=preflight,
        tokens=None,
        coverage=coverage,
        sites=[],
        remarks=list(notes),
        parts=no_parts() | own,
        **part,
    )


def _module_of(name: str, *module: str) -> ModuleType:
    """A module of an analysis, by name: the comparison imports none that does not apply."""
    package = places().get(name, f"divergence.analyses.{name}")
    return import_module(".".join((package, *module)))


def is_of_machine(manifest: Manifest) -> bool:
    """Is it a run of the machine itself, of neither a model nor a suite?"""
    return manifest.model.task == "operators" and not manifest.model.source.startswith(SUITE)

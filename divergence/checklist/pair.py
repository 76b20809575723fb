"""Two runs as the checklist sees them: manifests, the lines of preflight, and what compare says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from divergence.checklist.result import PointState
from divergence.comparison.decide import tells
from divergence.comparison.result import Report
from divergence.comparison.results import Claim, Finding, PreflightLine, SiteResult, Verdict
from divergence.facts import Fact, fact, plain
from divergence.run.contents import records_at
from divergence.run.manifest import Manifest
from divergence.run.reader import Run

__all__ = [
    "CheckedPair", "both", "choices_off", "differs", "in_both", "logits_kept", "not_recorded",
    "worst",
]  # fmt: skip

_STATES: dict[str, PointState] = {"same": "pass", "differs": "fail", "blocking": "fail"}
_DIVERGED = ("localized", "systematic", "nonfinite", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPair:
    """``report``: compare's, or None where it had nothing to compare, for ``reason``."""

    a: Run
    b: Run
    lines: Mapping[str, PreflightLine]
    report: Report | None
    reason: str = ""

    @property
    def manifests(self) -> tuple[Manifest, Manifest]:
        return self.a.manifest, self.b.manifest

    @property
    def verdict(self) -> Verdict | None:
        return None if self.report is None else self.report.verdict

    @property
    def why_unjudged(self) -> list[Fact] | None:
        """Why compare says nothing of the numbers; None where it does."""
        if self.report is None:
            return [plain(self.reason)]
        verdict = self.report.verdict
        if verdict.kind not in ("incomparable", "undetermined"):
            return None
        behind = verdict.headline[0]["beyond"] if verdict.headline else False
        return verdict.headline[1 if behind else 0 :]

    @property
    def diverged(self) -> bool:
        """Does compare find more than rounding explains?"""
        return self.verdict is not None and self.verdict.kind in _DIVERGED

    def state_of(self, check: str) -> PointState:
        """What a line of preflight says; one that is not there, since neither run has anything to
        say of it, is the same."""
        status: str = self.lines[check].status if check in self.lines else "same"
        return _STATES.get(status, "unknown")

    def differs(self, check: str) -> bool:
        """Does this line of preflight differ?"""
        return self.state_of(check) == "fail"

    @property
    def untold(self) -> list[str]:
        """The runs that say nothing of how they were made: no engine, and no weights."""
        return [
            name
            for name, manifest in zip("AB", self.manifests, strict=True)
            if manifest.engine is None and not manifest.model.digest
        ]

    def sites(self, *, decode: bool) -> list[SiteResult]:
        """What was compared of the prefill, or of the decode steps."""
        if self.report is None:
            return []
        return [site for site in self.report.sites if (site.step > 0) == decode]

    def claims(self, *claims: Claim) -> list[Finding]:
        """What the analyses claim, of these kinds, where it can be a verdict."""
        if self.report is None:
            return []
        return [
            finding
            for finding in self.report.findings
            if finding.claim in claims and finding.role in ("convicts", "refines")
        ]

    @property
    def sampled(self) -> bool:
        """Is the verdict about a token that its own logits do not decide?"""
        return any(map(self.is_verdict, self.claims("not_the_largest_logit")))

    def is_verdict(self, finding: Finding) -> bool:
        """Is it what the verdict says?"""
        verdict = self.verdict
        return verdict is not None and verdict.onset == finding.onset and tells(verdict, finding)


def worst(*states: PointState) -> PointState:
    """Of several conditions together."""
    return "fail" if "fail" in states else "unknown" if "unknown" in states else "pass"


def both(pair: CheckedPair, say: Callable[[Manifest], Any]) -> Fact:
    """``both: bfloat16``, or ``A: bfloat16, B: float16``."""
    return in_both(*map(say, pair.manifests))


def in_both(reference: Any, candidate: Any, *, apart: bool = False) -> Fact:
    """The same of two values, with a semicolon between those that stand ``apart``."""
    if reference == candidate:
        return fact("checklist.both", what=reference)
    return fact("checklist.each", reference=reference, candidate=candidate, apart=apart)


def not_recorded(sides: Sequence[str], what: str) -> Fact:
    """``A and B: settings are not recorded``"""
    return fact("checklist.not_recorded", sides=sides, what=what)


def differs(line: PreflightLine) -> Fact:
    """``attention eager / sdpa``, with what is known of it."""
    return fact(
        "checklist.line_differs", check=line.check, reference=line.reference,
        candidate=line.candidate, details=line.details,
    )  # fmt: skip


def choices_off(finding: Finding) -> list[Fact]:
    """Which tokens are not the largest of their own logits."""
    return [Fact(code="checklist.choices_off", values=finding.evidence[0].values)]


def logits_kept(run: Run) -> tuple[int, int]:
    """(forwards of which the logits were recorded, those of them whose values were kept)."""
    site = run.manifest.plan.logits_site
    records = [] if site is None else records_at(run.records, [site])
    free = [record for record in records if record.pass_ == "free"]
    return len(free), sum(run.has_bytes(record) for record in free)

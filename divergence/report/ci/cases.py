"""The answer of `check` as cases: what a CI server counts, lists and follows from build to build.

A case is a rule of the policy or one of its known differences, so that its name is the same in
every build. The number of cases that fail is above zero where the policy is not met, and only
there. What stopped before any rule was asked is one case more, ``comparison``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from divergence.comparison.result import Report
from divergence.errors import DivergenceError
from divergence.gate.result import CheckResult, Failure
from divergence.layout import share
from divergence.report.screen import screen_lines
from divergence.words import HEADLINES, printable

__all__ = ["CheckPage", "RuleOutcome", "checked_page", "screen_text", "stopped_page"]

_MOST = 100
"""Failures and facts of one case that are written out."""


class RuleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one rule. All text prints on one line."""

    rule: str
    status: Literal["passed", "failed", "skipped", "stopped"]
    text: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()


class CheckPage(msgspec.Struct, frozen=True, kw_only=True):
    """What is written for a CI server. ``report``: none where nothing was compared."""

    golden: str
    new: str
    policy: str
    headline: str
    """``FAILED: 2 of 4 rules of policy ci are not met``."""
    cases: tuple[RuleOutcome, ...]
    report: Report | None = None

    @property
    def bad(self) -> list[RuleOutcome]:
        """The cases that failed or stopped."""
        return [case for case in self.cases if case.status in ("failed", "stopped")]


def checked_page(result: CheckResult) -> CheckPage:
    """A case for each rule of the policy, in its order, then one for each known difference."""
    policy = f"policy {printable(result.policy.name or 'given')}"
    cases = (*_rules(result), *_known(result))
    num_bad = sum(case.status == "failed" for case in cases)
    headline = f"PASSED: {policy} is met"
    if num_bad:
        headline = f"FAILED: {num_bad} of {len(cases)} rules of {policy} are not met"
    return CheckPage(
        golden=printable(result.report.reference.path), new=printable(result.report.candidate.path),
        policy=policy, headline=headline, cases=cases, report=result.report,
    )  # fmt: skip


def stopped_page(error: DivergenceError, golden: str, new: str) -> CheckPage:
    """The one case of runs that could not be checked."""
    hints = (error.hint,) if isinstance(error.hint, str) else error.hint or ()
    case = RuleOutcome(
        rule="comparison",
        status="stopped",
        text=printable(error.message),
        evidence=tuple(printable(text) for text in (error.where, *hints) if text),
    )
    return CheckPage(
        golden=printable(golden), new=printable(new), policy="policy",
        headline=f"{HEADLINES['incomparable']}: {case.text}", cases=(case,),
        report=getattr(error, "report", None),
    )  # fmt: skip


def screen_text(page: CheckPage) -> list[str]:
    """The first screen of the report; nothing where there is none."""
    if page.report is None:
        return []
    return [printable(item.text) for item in screen_lines(page.report)]


def _rules(result: CheckResult) -> Iterator[RuleOutcome]:
    policy, report = result.policy, result.report
    verdict = report.verdict
    excused = ", which its known differences excuse" if result.excused else ""
    facts = (*(why.text for why in verdict.evidence), *(f"next: {tip}" for tip in verdict.next[:1]))
    yield _case(result, "verdicts", f"the verdict is {verdict.kind}{excused}", facts)
    if any(row.pass_ == "whole" and row.num_elsewhere for row in report.coverage.passes):
        yield _case(result, "whole", "the new run's whole pass has a verdict that is allowed")
    least = share(policy.min_coverage)
    yield _case(result, "min_coverage", f"at least {least} of the golden's records were compared")
    yield _case(result, "preflight", "no setting differs that must not")
    least_equal, num_equal = policy.tokens.min_equal, policy.tokens.min_equal_count
    if least_equal is not None:
        text = f"at least {share(least_equal)} of the generated tokens are equal"
        yield _case(result, "tokens.min_equal", text)
    if num_equal is not None:
        text = f"at least {num_equal:,} of the generated tokens are equal"
        yield _case(result, "tokens.min_equal_count", text)
    for number, tolerance in enumerate(policy.tolerance):
        limits = ", ".join(f"{name} <= {limit:g}" for name, limit in tolerance.limits().items())
        yield _case(result, f"tolerance[{number}]", f"{tolerance.text}: {limits}", tolerance=number)


def _case(
    result: CheckResult,
    rule: str,
    text: str,
    facts: tuple[str, ...] = (),
    *,
    tolerance: int | None = None,
) -> RuleOutcome:
    """``text`` and nothing else where it holds; else what is wrong, with its evidence."""
    failures = tuple(
        failure
        for failure in result.failures
        if (failure.rule == rule if tolerance is None else failure.tolerance == tolerance)
    )
    if not failures:
        return RuleOutcome(rule=rule, status="passed", text=printable(text))
    more = f" (and {len(failures) - 1:,} more)" if len(failures) > 1 else ""
    evidence = [*(failure.text for failure in failures[1:]), *facts]
    if len(evidence) > _MOST:
        evidence = [*evidence[:_MOST], f"{len(evidence) - _MOST:,} more: check --json has them all"]
    return RuleOutcome(
        rule=rule, status="failed", text=printable(failures[0].text) + more,
        evidence=tuple(map(printable, evidence)), failures=failures,
    )  # fmt: skip


def _known(result: CheckResult) -> Iterator[RuleOutcome]:
    """A known difference that was exceeded or is over fails where the verdict does; one that
    excused nothing is skipped."""
    judged = any(failure.rule == "verdicts" for failure in result.failures)
    for use in result.known:
        status: Literal["passed", "failed", "skipped"] = "skipped"
        if use.status == "used":
            status = "passed"
        elif use.status in ("exceeded", "expired") and use.num_records and judged:
            status = "failed"
        yield RuleOutcome(rule=f"known[{use.number}]", status=status, text=printable(str(use)))

"""The answer of `check`: as documents, and for CI (annotations, summaries, JUnit, code quality)."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Literal
from xml.etree import ElementTree

import msgspec
from msgspec.structs import replace

from divergence.comparison.result import Report, strict_json
from divergence.document import Column, Document, Headline, Sentence, Table, named
from divergence.errors import DivergenceError
from divergence.gate.result import Blessing, CheckResult, Failure
from divergence.layout import cut
from divergence.report.screen import screen_document, screen_lines
from divergence.report.summary import VERDICT_STYLES, report_document, unseen
from divergence.report.text import document_lines, fenced_lines
from divergence.words import (
    HEADLINES,
    count,
    list_names,
    markdown_code,
    printable,
    share,
    shortened,
    size,
)

# `check` and `check --bless` as documents.

MAX_LISTED = 12
_MOST_OF_RULE = 2


def check_documents(result: CheckResult, *, verbose: bool = False) -> list[Document]:
    """The answer, then the report that it rests on."""
    answer, report = check_document(result, verbose=verbose), result.report
    if verbose:
        return [answer, report_document(report, verbose=True)]
    return [answer, screen_document(report, num_above=len(document_lines(answer)) + 1)]


def check_document(result: CheckResult, *, verbose: bool = False, brief: bool = False) -> Document:
    """PASSED or FAILED with each rule that is not met and each known difference. ``brief``: no
    report stands below it, so it also says what the golden cannot see; ``verbose``: each failure of
    a rule."""
    page = checked_page(result)
    word, _, text = page.headline.partition(": ")
    entries = [("not seen", text, "") for text in unseen(result.report) if brief and result.passed]
    for case in page.bad:
        if case.rule.startswith("known["):
            continue  # each stands below
        most = None if verbose else _MOST_OF_RULE
        entries += [(item.rule, item.text, "") for item in case.failures[:most]]
        if more := len(case.failures[most:]) if most else 0:
            entries.append(("…", f"{more:,} more of {case.rule} (-v lists them)", "dim"))
    if result.excused:
        what = f"the verdict is {result.report.verdict.kind}, and all of it is known:"
        entries.append(("excused", what, "yellow"))
    # of each known difference of the policy what it excused, or why it did not
    entries += [("known", str(use), "yellow") for use in result.known]
    if result.num_ties and not brief:
        flipped = count(result.num_ties, "flipped token")
        entries.append(("ties", f"{flipped} counted as equal: within the policy's tie", ""))
    entries += [("note", note, "yellow") for note in result.notes if not brief]
    return Document(
        headline=Headline(
            word,
            text,
            "bold green" if result.passed else "bold red",
            [
                Sentence(text, f"{label}:", style=style, indent=2, hang=4)
                for label, text, style in entries
            ],
        )
    )


def blessing_documents(blessing: Blessing, *, asked: bool = False) -> list[Document]:
    """What became the golden, what it replaces and how they differ. ``asked``: what would."""
    word, becomes, style = "BLESSED", "is the golden now", "bold green"
    if asked:
        word, becomes, style = "REPLACE?", "would be another golden", "bold yellow"
    stored = "" if blessing.num_bytes is None else f", {size(blessing.num_bytes)}"
    text = f"{blessing.golden} {becomes}{stored}"
    facts = []
    if blessing.forced_by is not None:
        whose = f"those of run {blessing.forced_by}, where this model would choose others"
        facts.append(named("tokens", whose))
    if blessing.verdict is None and blessing.reason is None:
        return [Document(headline=Headline(word, f"{text}; there was none before", style, facts))]
    if blessing.replaced_bytes is not None:
        captured = blessing.replaced_created
        when = "" if captured is None else f", of a run captured {captured[:16].replace('T', ' ')}"
        facts.append(named("replaces", f"{size(blessing.replaced_bytes)}{when}"))
    if blessing.previous is not None:
        facts.append(named("previous", f"kept as {blessing.previous}"))
    change, colour = f"not compared: {blessing.reason}", "yellow"
    if blessing.verdict is not None:
        change, colour = f"{blessing.verdict}: {blessing.summary}", VERDICT_STYLES[blessing.verdict]
    facts.append(named("old to new", change, colour))
    for name, sites in (("added", blessing.added_sites), ("removed", blessing.removed_sites)):
        listed = f": {list_names(sites, MAX_LISTED)}" if sites else ""
        facts.append(named(name, f"{count(len(sites), 'site')}{listed}"))
    answer = Document(headline=Headline(word, text, style, facts))
    if blessing.report is None:
        return [answer]
    # the old golden is gone: nothing is to be done with the two
    verdict = replace(blessing.report.verdict, commands=[], next=[])
    return [answer, screen_document(replace(blessing.report, verdict=verdict))]


# The answer of `check` as cases: what a CI server counts, lists and follows from build to build.
#
# A case is a rule of the policy or one of its known differences, so that its name is the same in
# every build. The number of cases that fail is above zero where the policy is not met, and only
# there. What stopped before any rule was asked is one case more, ``comparison``.

_MOST = 100
"""Failures and facts of one case that are written out."""


class RuleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Says what became of one rule. All text prints on one line."""

    rule: str
    status: Literal["passed", "failed", "skipped", "stopped"]
    text: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()


class CheckPage(msgspec.Struct, frozen=True, kw_only=True):
    """Says what is written for a CI server. ``report``: none where nothing was compared."""

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
        verb = "is" if num_bad == 1 else "are"
        headline = f"FAILED: {num_bad} of {len(cases)} rules of {policy} {verb} not met"
    return CheckPage(
        golden=printable(result.report.reference.path),
        new=printable(result.report.candidate.path),
        policy=policy,
        headline=headline,
        cases=cases,
        report=result.report,
    )


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
        golden=printable(golden),
        new=printable(new),
        policy="policy",
        headline=f"{HEADLINES['incomparable']}: {case.text}",
        cases=(case,),
        report=getattr(error, "report", None),
    )


def _rules(result: CheckResult) -> Iterator[RuleOutcome]:
    policy, report = result.policy, result.report
    verdict = report.verdict
    excused = ", which its known differences excuse" if result.excused else ""
    facts = (
        verdict.summary,
        *(why.text for why in verdict.evidence),
        *(f"next: {tip}" for tip in verdict.next[:1]),
    )
    yield _case(result, "verdicts", f"the verdict is {verdict.kind}{excused}", facts)
    if any(row.pass_ == "whole" and row.num_elsewhere for row in report.coverage.passes):
        yield _case(result, "whole", "the new run's whole pass has a verdict that is allowed")
    if report.candidate.anchored_to not in (None, report.reference.id):
        yield _case(result, "anchored", "the new run's blocks got the same inputs as the golden's")
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
        rule=rule,
        status="failed",
        text=printable(failures[0].text) + more,
        evidence=tuple(map(printable, evidence)),
        failures=failures,
    )


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


# `check --codequality`: what is not met as GitLab's code quality report reads it.
#
# A merge request shows what is new against its target branch by fingerprints, so a fingerprint is
# made of the golden, the rule and the site, and of nothing that changes from run to run. A report
# names files of the repository: the golden stands for the place.

_MOST_ISSUES = 1000
"""Issues of a file; each is a row on a page."""


def codequality_json(page: CheckPage) -> str:
    """A list with one issue for each failure."""
    # from here, where it lies here; else its name alone, so that no home is told
    golden = page.golden
    relative = os.path.relpath(golden) if os.path.isabs(golden) else os.path.normpath(golden)
    path = PurePath(relative).as_posix()
    if "://" in golden or relative.startswith(".."):
        path = PurePath(golden).name or "golden"
    seen: dict[str, int] = {}
    issues = []
    failures = [(case, each) for case in page.bad for each in case.failures or (None,)]
    for case, failure in failures[:_MOST_ISSUES]:
        check, text, site = case.rule, case.text, ""
        if failure is not None:
            check, text, site = failure.rule, printable(failure.text), failure.site or ""
        key = f"{path}\n{check}\n{site}"
        seen[key] = seen.get(key, 0) + 1  # a site fails once in each pass, step and prompt
        issues.append(
            {
                "description": text,
                "check_name": f"divergence.{check}",
                "fingerprint": hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest(),
                "severity": _severity(case),
                "location": {"path": path, "lines": {"begin": 1}},
            }
        )
    return strict_json(issues)


def _severity(case: RuleOutcome) -> str:
    if case.status == "stopped" or case.rule in ("verdicts", "whole"):
        return "critical"
    return "minor" if case.rule == "preflight" else "major"


# `check --github`: annotations as GitHub's runner reads them from the log, and a step summary.
#
# A line of the log that begins with ``::`` is a command of the runner. Names come from runs, so
# what else is printed stands between ``stop-commands`` and its end (``fence``), and texts in
# commands are escaped by the runner's rules. The summary is Markdown in which every such text is
# code (divergence.words). GitHub shows 10 errors of a step and refuses a summary of 1 MiB; both are
# kept to by cutting, and what is cut is said.

_MOST_ANNOTATIONS = 10
_MOST_FACTS = 5
_MOST_ROWS = 60
_WIDEST = 300
"""Characters of a text; Markdown writes one in up to 9 bytes, so a summary has less than 400 kB."""
_STATES = {"passed": "pass", "failed": "**FAIL**", "skipped": "skipped", "stopped": "**STOPPED**"}


def annotation_lines(page: CheckPage) -> list[str]:
    """One ``::error`` for each rule that is not met, or one ``::notice``."""
    bad = page.bad
    if not bad:
        return [_command("notice", "divergence check", [page.headline])]
    shown = bad if len(bad) <= _MOST_ANNOTATIONS else bad[: _MOST_ANNOTATIONS - 1]
    lines = [
        _command(
            "error", f"divergence check: {case.rule}", [case.text, *case.evidence[:_MOST_FACTS]]
        )
        for case in shown
    ]
    if len(shown) < len(bad):
        more = f"{len(bad) - len(shown)} more rules are not met"
        lines.append(_command("error", "divergence check", [more]))
    return lines


def fence() -> tuple[str, str]:
    """The lines between which the runner obeys nothing."""
    token = secrets.token_hex(16)  # so that nothing between them can end it
    return f"::stop-commands::{token}", f"::{token}::"


def _command(name: str, title: str, lines: Sequence[str]) -> str:
    title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{name} title={title}::" + "%0A".join(_escaped(_shortened(line)) for line in lines)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _shortened(text: str) -> str:
    return shortened(printable(text), _WIDEST)


def summary_markdown(page: CheckPage) -> str:
    """The step summary: the rules as a table, then the first screen."""
    lines = [f"### divergence check: {page.headline.partition(':')[0]}", ""]
    lines += [markdown_code(_shortened(page.headline)), ""]
    ordered = [*page.bad, *(case for case in page.cases if case not in page.bad)]
    state = Column("", lambda status: _STATES[status], own=True)
    table = Table(
        columns=("rule", state, Column("what was found", _shortened)),
        most=_MOST_ROWS,
        rows=[(case.rule, case.status, case.text) for case in ordered],
    )
    lines += table.markdown()
    if page.report is not None:
        lines += ["", f"{markdown_code(cut(page.golden, 80))} / {markdown_code(cut(page.new, 80))}"]
        lines += ["", *fenced_lines(screen_lines(page.report))]
    return "\n".join(lines) + "\n\n"


# `check --junit`: one test suite, a test case for each rule, as CI servers read it.
#
# The form is that of Jenkins' junit-10.xsd, which GitLab, Azure and others read too: at most one
# ``failure`` in a case, before its ``system-out``. Characters that XML 1.0 cannot hold (controls,
# single surrogates, U+FFFE) are written out like all that does not print.

_TAGS = {"failed": "failure", "stopped": "error", "skipped": "skipped"}


def junit_xml(page: CheckPage) -> str:
    """The whole file."""
    counts: dict[str, int] = {
        "tests": len(page.cases),
        "failures": sum(case.status == "failed" for case in page.cases),
        "errors": sum(case.status == "stopped" for case in page.cases),
        "skipped": sum(case.status == "skipped" for case in page.cases),
        "time": 0,
    }
    numbers: dict[str, str] = {name: str(number) for name, number in counts.items()}
    root = ElementTree.Element("testsuites", {"name": "divergence check", **numbers})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "divergence check", **numbers})
    class_name = f"divergence.check.{page.policy.replace(' ', '.')}"
    for case in page.cases:
        element = ElementTree.SubElement(
            suite, "testcase", classname=class_name, name=case.rule, time="0"
        )
        if tag := _TAGS.get(case.status):
            child = ElementTree.SubElement(element, tag, message=case.text)
        if tag and tag != "skipped":
            child.set("type", case.rule)
            child.text = "\n".join([case.text, *(f"- {fact}" for fact in case.evidence)])
    screen = [] if page.report is None else screen_lines(page.report)
    texts = [printable(item.text) for item in screen]
    text = "\n".join([f"{page.golden} / {page.new}: {page.headline}", "", *texts])
    ElementTree.SubElement(suite, "system-out").text = f"{text}\n"
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'

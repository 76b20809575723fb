"""The top of a page: the verdict in the terminal's words, why, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.analyses.tokens.show import explained_lines
from divergence.comparison.result import Report, RunSummary
from divergence.html.parts import Element, Node, Section, el, facts, name, prose_block
from divergence.layout import Line, count
from divergence.report.page.frame import next_commands, opening
from divergence.report.screen import compared_lines, settings_lines, token_lines
from divergence.report.summary import headline, verdict_lines, visible_lines
from divergence.words import HEADLINES

__all__ = ["STANDINGS", "findings_section", "policy", "verdict"]

STANDINGS = {
    "identical": ("good", "✓"),
    "within_floor": ("good", "✓"),
    "systematic": ("bad", "✕"),
    "localized": ("bad", "✕"),
    "nonfinite": ("bad", "✕"),
    "drift": ("unsure", "!"),
    "undetermined": ("unsure", "?"),
    "incomparable": ("unsure", "≠"),
}
"""By kind of verdict: how it stands, and a sign that needs no colour."""


def verdict(report: Report) -> Element:
    """What the terminal's first screen says, why, and the command that goes deeper."""
    kind = report.verdict.kind
    standing, sign = STANDINGS[kind]
    if headline(report) != HEADLINES[kind]:
        standing, sign = STANDINGS["incomparable"]
    lines = [
        *verdict_lines(report), *visible_lines(report), *settings_lines(report.preflight),
        *token_lines(report), *explained_lines(report), *compared_lines(report),
    ]  # fmt: skip
    return opening(
        lines, *_why(report), standing=standing, sign=sign, beside=_pair(report),
        below=next_commands(report.verdict.next),
    )  # fmt: skip


def policy(answer: Sequence[Line]) -> Element:
    """What `check` says of the policy, before the verdict that it judges."""
    first, *more = answer
    items = [el("li", prose_block(line.text.strip())) for line in more]
    return opening(
        [first], el("ul", *items, class_="why") if items else None, id="policy", label="Policy"
    )


def _why(report: Report) -> list[Node]:
    if not report.verdict.evidence:
        return []
    items = [el("li", prose_block(fact.text)) for fact in report.verdict.evidence]
    shown, hidden = items[:4], items[4:]
    more = el(
        "details", el("summary", f"{count(len(hidden), 'more fact')}"), el("ul", *hidden),
        class_="more",
    )  # fmt: skip
    return [el("h2", "Why"), el("ul", *shown, class_="why"), more if hidden else None]


def _pair(report: Report) -> Element:
    """Both runs: what was compared with what."""
    runs = ("A", "reference", report.reference), ("B", "candidate", report.candidate)
    return el("aside", *(_run(*run) for run in runs), class_="pair", aria_label="The two runs")


def _run(letter: str, side: str, run: RunSummary) -> Element:
    dtype = run.dtype.removeprefix("torch.")
    rows = [("model", run.model), ("computed", f"{dtype} on {run.device}"), ("run", run.path)]
    changed = [*(f"planted fault: {plant}" for plant in run.plants),
               *(f"substituted: {substitute}" for substitute in run.substitutes)]  # fmt: skip
    if not run.complete:
        why = f"stopped by {run.stopped_by}" if run.stopped_by else "the capture did not finish"
        changed.append(f"incomplete: {why}")
    head = el("h2", el("span", letter, class_=f"letter {side}"), name(run.label or run.path))
    notes = el("ul", *(el("li", name(text)) for text in changed), class_="warnings")
    return el("article", head, facts(rows), notes if changed else None, class_="run")


def findings_section(report: Report) -> Section | None:
    """All findings, of which one verdict was made."""
    if not report.findings:
        return None
    items = []
    for finding in report.findings:
        claim = finding.claim.replace("_", " ")
        evidence = [
            el("li", prose_block(fact.text)) for fact in (*finding.evidence, *finding.beside)
        ]
        items.append(el(
            "li", el("p", el("strong", claim), el("small", finding.role)),
            prose_block(finding.summary) if finding.summary else None,
            el("ul", *evidence) if evidence else None,
        ))  # fmt: skip
    return Section(
        id="findings", title="All findings",
        lead="What each analysis found. The verdict was made of these; a hint or a context is a "
        "place to look, and no fault.",
        body=(el("ol", *items, class_="findings"),),
    )  # fmt: skip

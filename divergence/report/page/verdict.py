"""The top of a page: the verdict in the terminal's words, why, and what to do next."""

from __future__ import annotations

from divergence.comparison.result import Report, RunSummary
from divergence.html.element import Element, Node, el
from divergence.html.parts import Section, command, facts, name, prose_block
from divergence.layout import count
from divergence.report.summary import verdict_lines

__all__ = ["STANDINGS", "findings_section", "verdict"]

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
    """What `compare --quiet` prints, why, and the command that goes deeper."""
    standing, sign = STANDINGS[report.verdict.kind]
    headline, *more = verdict_lines(report)
    first, *rest = (span.text for span in headline.spans)
    word = first.strip().rstrip(":").replace("_", " ") if rest else ""
    title = "".join(rest) or first
    rows = [
        (line.spans[0].text.strip(), line.spans[1].text) for line in more if len(line.spans) > 1
    ]
    badge = el("p", el("span", sign, class_="sign", aria_hidden="true"), word, class_="badge")
    heading = el("h1", name(title[:1].upper() + title[1:]), class_=_size(title))
    said = el(
        "div", badge if word else None, heading,
        facts(rows, class_="facts verdict-facts") if rows else None, *_why(report),
    )  # fmt: skip
    return el(
        "section", el("div", said, _pair(report), class_="opening"), *_next(report),
        class_=f"verdict {standing}", id="verdict", aria_label="Verdict",
    )  # fmt: skip


def _size(title: str) -> str | None:
    return "long" if len(title) > 110 else None


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


def _next(report: Report) -> list[Node]:
    commands = report.verdict.next
    if not commands:
        return []
    return [el("h2", "Do this next"), *map(command, commands)]


def _pair(report: Report) -> Element:
    """Both runs: what was compared with what."""
    runs = ("A", "reference", report.reference), ("B", "candidate", report.candidate)
    return el("aside", *(_run(*run) for run in runs), class_="pair", aria_label="The two runs")


def _run(letter: str, side: str, run: RunSummary) -> Element:
    dtype = run.dtype.removeprefix("torch.")
    rows = [("model", run.model), ("computed", f"{dtype} on {run.device}"), ("run", run.path)]
    changed = [*(f"planted fault: {one}" for one in run.plants),
               *(f"substituted: {one}" for one in run.substitutes)]  # fmt: skip
    if not run.complete:
        why = f"stopped by {run.stopped_by}" if run.stopped_by else "the capture did not finish"
        changed.append(f"incomplete: {why}")
    head = el("h2", el("span", letter, class_=f"letter {side}"), name(run.label or run.path),
              el("small", side))  # fmt: skip
    notes = el("ul", *(el("li", name(text)) for text in changed), class_="warnings")
    return el("article", head, facts(rows), notes if changed else None, class_="run")


def findings_section(report: Report) -> Section | None:
    """All findings, of which one verdict was made."""
    if not report.findings:
        return None
    items = []
    for one in report.findings:
        claim = one.claim.replace("_", " ")
        evidence = [el("li", prose_block(fact.text)) for fact in (*one.evidence, *one.beside)]
        items.append(el(
            "li", el("p", el("strong", claim), el("small", one.role)),
            prose_block(one.summary) if one.summary else None,
            el("ul", *evidence) if evidence else None,
        ))  # fmt: skip
    return Section(
        id="findings", title="All findings",
        lead="What each analysis found. The verdict was made of these; a hint or a context is a "
        "place to look, and no fault.",
        body=(el("ol", *items, class_="findings"),),
    )  # fmt: skip

"""`check --github`: annotations as GitHub's runner reads them from the log, and a step summary.

A line of the log that begins with ``::`` is a command of the runner. Names come from runs, so what
else is printed stands between ``stop-commands`` and its end (``fence``), and texts in commands are
escaped by the runner's rules. The summary is Markdown in which every such text is code
(divergence.words). GitHub shows 10 errors of a step and refuses a summary of 1 MiB; both are kept
to by cutting, and what is cut is said.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from divergence.layout import cut
from divergence.report.ci.cases import CheckPage, screen_text
from divergence.words import markdown_code, markdown_text, printable

__all__ = ["annotation_lines", "fence", "summary_markdown"]

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
    text = printable(text)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def summary_markdown(page: CheckPage) -> str:
    """The step summary: the rules as a table, then the first screen."""
    lines = [f"### divergence check: {page.headline.partition(':')[0]}", ""]
    lines += [markdown_code(_shortened(page.headline)), ""]
    lines += ["| rule | | what was found |", "| --- | --- | --- |"]
    ordered = [*page.bad, *(case for case in page.cases if case not in page.bad)]
    lines += [
        f"| {markdown_code(case.rule)} | {_STATES[case.status]} "
        f"| {markdown_code(_shortened(case.text))} |"
        for case in ordered[:_MOST_ROWS]
    ]
    if len(ordered) > _MOST_ROWS:
        lines.append(f"| {len(ordered) - _MOST_ROWS} more | | |")
    screen = screen_text(page)
    if screen:
        lines += ["", f"{markdown_code(cut(page.golden, 80))} / {markdown_code(cut(page.new, 80))}"]
        lines += ["", "<pre>", *(markdown_text(_shortened(line)) for line in screen[:_MOST_ROWS])]
        if len(screen) > _MOST_ROWS:
            lines.append(f"{len(screen) - _MOST_ROWS} more lines")
        lines.append("</pre>")
    return "\n".join(lines) + "\n\n"

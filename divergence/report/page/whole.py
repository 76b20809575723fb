"""The page of a report: verdict first, then what each analysis has to show, then the two runs.

Nothing here opens a run: ``background`` brings what the report does not hold. An analysis shows its
part by a ``page`` module in its folder, as it prints it by ``show``; where it has that alone, what
it prints stands on the page as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from divergence.comparison.result import Report, strict_json
from divergence.comparison.results.background import Background
from divergence.html.document import document
from divergence.html.element import Element, el
from divergence.html.parts import BlockPart, Section
from divergence.layout import Line
from divergence.report.machine import csv_columns
from divergence.report.page.attachment import attached
from divergence.report.page.runs import coverage_section, machines_section, settings_section
from divergence.report.page.verdict import findings_section, policy, verdict
from divergence.report.summary import headline, shown_analyses

__all__ = ["page"]


def page(report: Report, background: Background, *, answer: Sequence[Line] = ()) -> str:
    """The whole file, as text. ``answer``: a policy's (report.checking), which comes first."""
    packed, num_kept = attached(report)
    sections = [
        *_of_analyses(report, background),
        settings_section(report),
        machines_section(background),
        findings_section(report),
        coverage_section(report, background),
        _download(report, num_kept),
    ]
    shown = [section for section in sections if section is not None]
    body = el(
        "body",
        el("a", "Skip to the verdict", href="#verdict", class_="skip"),
        _top(),
        el(
            "main", policy(answer) if answer else None, verdict(report), _contents(shown),
            *(section.element() for section in shown),
        ),
        _bottom(report),
    )  # fmt: skip
    a, b = (run.label or run.path for run in (report.reference, report.candidate))
    title = f"{headline(report)}: {a[:60]} / {b[:60]} · divergence"
    return document(title, body, data=strict_json(_data(shown), indent=None), attachment=packed)


_FIRST = ("blocks", "suite")
"""Before the others, which keep the terminal's order."""


def _of_analyses(report: Report, background: Background) -> list[Section]:
    found: list[Section] = []
    names = sorted(shown_analyses(), key=lambda name: name not in _FIRST)
    for name in names:
        path = f"divergence.analyses.{name}"
        if find_spec(f"{path}.page") is not None:
            found += import_module(f"{path}.page").page(report, background)
            continue
        lines = import_module(f"{path}.show").show(report, all_sites=False)
        if lines:
            text = "\n".join(line.text for line in lines).strip("\n")
            printed = el("pre", text, class_="printed", tabindex=0)
            found.append(Section(id=name, title=name.capitalize(), body=(printed,)))
    return found


def _data(sections: list[Section]) -> dict[str, Any]:
    """What the script needs: the figures' numbers, and each block's tables."""
    blocks: dict[str, dict[str, Any]] = {}
    for part in (part for section in sections for part in section.blocks):
        _add(blocks, part)
    figures = {id: data for section in sections for id, data in section.figures.items()}
    chosen = next((one.chosen for one in sections if one.chosen is not None), None)
    return {"figures": figures, "blocks": blocks, "chosen": chosen, "columns": csv_columns()}


def _add(blocks: dict[str, dict[str, Any]], part: BlockPart) -> None:
    """All that the analyses know of one block, in their order."""
    known = blocks.setdefault(part.block, {"facts": [], "tables": []})
    known["facts"] += part.facts
    known["tables"] += [table.data() for table in part.tables]


def _top() -> Element:
    toggle = el("button", "Theme", type="button", id="theme", hidden=True,
                aria_label="Switch between light and dark")  # fmt: skip
    return el(
        "header",
        el("span", el("b", "divergence"), " compare", class_="brand"),
        toggle,
        class_="top",
    )


def _contents(sections: list[Section]) -> Element:
    links = [el("li", el("a", one.title, href=f"#{one.id}")) for one in sections]
    return el("nav", el("ul", *links), class_="contents", aria_label="On this page")


def _download(report: Report, num_kept: int) -> Section:
    total = len(report.sites)
    lead = "This page holds the report it was made of."
    if num_kept < total:
        lead = (
            f"This page holds {num_kept:,} of {total:,} results, the worst first, so that it stays "
            "small; `divergence compare --json` and `--csv` write all of them."
        )
    buttons = [
        el("button", "Download JSON", type="button", id="download-json"),
        el("button", "Download CSV", type="button", id="download-csv"),
    ]
    return Section(
        id="download", title="Data", lead=lead,
        body=(
            el("p", *buttons, class_="buttons", hidden=True, id="downloads"),
            el("noscript", el("p", "Downloads need scripts, which this viewer does not run.")),
        ),
    )  # fmt: skip


def _bottom(report: Report) -> Element:
    made = f"Made by divergence {report.tool_version}. This file loads nothing and sends nothing."
    return el("footer", el("p", made))

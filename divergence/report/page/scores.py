"""The page of a ScoresReport: the verdict, a table of all scores, and each in full."""

from __future__ import annotations

from divergence.evaluations.result import Candidate, ScoresReport
from divergence.evaluations.show import TITLES, facts_of, headline, name_of, task_cells
from divergence.html.element import el
from divergence.html.parts import Section, Table, facts, table
from divergence.report.page.frame import frame, next_commands, opening

__all__ = ["scores_page"]

_STANDINGS = {"equal": "good", "worse": "bad", "incomparable": "bad"}


def scores_page(report: ScoresReport) -> str:
    """The whole file, as text."""
    openings = [
        opening([headline(one)], facts([("A", report.reference.path), ("B", one.side.path)]),
                standing=_STANDINGS.get(one.verdict, "unsure"), id=f"verdict-{number}",
                below=next_commands(report.next) if not number else ())
        for number, one in enumerate(report.candidates)
    ]  # fmt: skip
    sections = [_section(number, one) for number, one in enumerate(report.candidates)]
    return frame(
        "scores", f"{headline(report.candidates[0]).text[:120]} · divergence", openings, sections,
        attachment=report.to_json().encode(), made_by=report.tool_version,
        data_lead="This page holds the answer it was made of.",
    )  # fmt: skip


def _section(number: int, one: Candidate) -> Section:
    grid = Table(
        caption="Each score, candidate against reference", titles=TITLES, num_left=2,
        rows=[task_cells(task) for task in one.tasks],
        marks=["flagged" if task.verdict == "worse" else "" for task in one.tasks],
    )  # fmt: skip
    told = [
        el("div", el("h3", name_of(task)), facts(list(facts_of(task, verbose=True))))
        for task in one.tasks
    ]
    notes = [el("p", text) for text in (*one.reasons, *one.notes, *one.side.notes)]
    return Section(
        id=f"scores-{number}", title=f"Scores of {one.side.path}", body=(table(grid), *told, *notes)
    )  # fmt: skip

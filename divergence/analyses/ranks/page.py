"""Ranks on a page: whether a run's own ranks agree where they must."""

from __future__ import annotations

from divergence.analyses.ranks.show import check_text, diff_text
from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.html.parts import Section, el, facts, name


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where each run was made by one process."""
    if not report.replicas:
        return []
    letters = {"reference": "A", "candidate": "B"}
    rows = [(letters[check.side], check_text(check)) for check in report.replicas]
    first = [el("li", name(diff_text(diff))) for check in report.replicas for diff in check.first]
    return [
        Section(
            id="ranks", title="Ranks", lead="Tensors that several of a run's ranks computed alike.",
            body=(facts(rows), el("ul", *first, class_="notes") if first else None),
        )
    ]  # fmt: skip

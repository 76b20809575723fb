"""A suite of operators on a page: one row each, the worse ones first."""

from __future__ import annotations

from divergence.analyses.suite.show import all_rows, operator_row, titles
from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.html.parts import Section, Table, details, table
from divergence.layout import count

_MOST_RESULTS = 1000


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where models were compared."""
    suite = report.suite
    if suite is None:
        return []
    against = "against the truth" if suite.judged else "against one another: no truth was given"
    what = f"{count(len(suite.operators), 'operator')}, {count(len(suite.cases), 'result')}"
    lead = f"{what}, {against}."
    marks = {"wrong": "flagged", "flushed": "differs", "ties": "differs"}
    operators = Table(
        caption="Operators", titles=titles(suite.judged),
        rows=[operator_row(operator, judged=suite.judged) for operator in suite.operators],
        marks=[marks.get(operator.status, "") for operator in suite.operators], num_left=2,
    )  # fmt: skip
    first, *rows = all_rows(suite.cases[:_MOST_RESULTS], judged=suite.judged)
    left = len(suite.cases) - len(rows)
    results = Table(
        caption="Results", titles=first, rows=rows, num_left=2,
        marks=[marks.get(case.status, "") for case in suite.cases[:_MOST_RESULTS]],
        note=f"{left:,} more are in the JSON." if left else "",
    )  # fmt: skip
    return [
        Section(
            id="suite", title="Operators", lead=lead,
            body=(table(operators), details(f"All {len(suite.cases):,} results", table(results))),
        )
    ]  # fmt: skip

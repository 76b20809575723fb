"""The precision audit on a page: in which dtype each part of the model ran, on each side."""

from __future__ import annotations

from divergence.analyses.precision.show import dtype_words, expectation, footer
from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.html.parts import Section, Table, el, table


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where no operator was recorded."""
    audit = report.audit
    if audit is None or not audit.rows:
        return []
    content = Table(
        caption="Parts of the model", num_left=4,
        titles=("part", "A ran in", "B ran in", "expected"),
        rows=[
            (row.part, dtype_words(row.reference), dtype_words(row.candidate), expectation(row))
            for row in audit.rows
        ],
        marks=["flagged" if row.differs or (row.below is not None and row.own) else ""
               for row in audit.rows],
    )  # fmt: skip
    notes = [el("p", line.text.strip(), class_="note") for line in footer(audit, alone=False)]
    lead = "In which dtype each part ran, by the operators that were recorded."
    return [Section(id="precision", title="Precision", lead=lead, body=(table(content), *notes))]

"""Collectives on a page: the same tables as in the terminal."""

from __future__ import annotations

from divergence.analyses.collectives.show import (
    bandwidth_rows,
    collective_rows,
    fault_rows,
    order_rows,
)
from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.html.parts import Section, Table, details, table
from divergence.layout import count
from divergence.words import letter

_MOST_FAULTS = 1000


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where models or operators were compared."""
    if report.collectives is None:
        return []
    sections = []
    for side in report.collectives.sides:
        whose = "" if len(report.collectives.sides) == 1 else f" of {letter(side.side)}"
        first, *rows = collective_rows(side)
        body = [
            table(
                Table(
                    caption=f"Collectives{whose}", titles=first, rows=rows, num_left=2,
                    marks=["" if row.num_right == row.num_cases else "flagged"
                           for row in side.rows],
                )
            )
        ]  # fmt: skip
        if side.faults:
            first, *rows = fault_rows(side, whole=len(side.faults) <= _MOST_FAULTS)
            faults = Table(caption=f"Faults{whose}", titles=first, rows=rows, num_left=5)
            body.append(table(faults))
        if side.orders:
            first, *rows = order_rows(side, whole=True)
            orders = Table(caption=f"Order of addition{whose}", titles=first, rows=rows, num_left=6)
            body.append(details("Order of addition", table(orders)))
        if side.bandwidth:
            first, *rows = bandwidth_rows(side, whole=True)
            rates = Table(caption=f"Bandwidth{whose}", titles=first, rows=rows)
            body.append(details("Bandwidth", table(rates)))
        cases = count(sum(row.num_cases for row in side.rows), "case")
        sections.append(
            Section(
                id=f"collectives-{side.side}", title=f"Collectives{whose}",
                lead=f"{side.num_ranks} ranks, {side.backend}, {cases}.", body=tuple(body),
            )
        )  # fmt: skip
    return sections

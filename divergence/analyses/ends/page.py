"""Distributions on a page: how far apart the logits are."""

from __future__ import annotations

from divergence.analyses.ends.show import TITLES, logit_rows
from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.html.parts import Section, Table, table


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where no logits were recorded."""
    rows = logit_rows(report)
    if not rows:
        return []
    content = Table(caption="The worst of all steps", titles=TITLES, rows=rows)
    lead = "How far apart the distributions over the next token are; KL in nats, from A to B."
    return [Section(id="logits", title="Logits", lead=lead, body=(table(content),))]

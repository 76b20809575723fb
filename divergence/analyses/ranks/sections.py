"""Sections that show what the ranks of a run said of one another."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.document import Section, named
from divergence.words import letter, rank_names


def sections(report: Report, **_: object) -> list[Section]:
    """Nothing where each run was made by one process."""
    if not report.replicas:
        return []
    body = []
    for check in report.replicas:
        text = f"all {check.num_tensors:,} replicas agree bit for bit"
        if check.num_different:
            disagree = f"{check.num_different:,} of {check.num_tensors:,}"
            text = f"ranks disagree at {disagree} replicas"
        text = text if check.num_tensors else "no tensor is on more than one"
        style = "bold red" if check.num_different else ""
        body.append(named(letter(check.side), f"{check.mesh}: {text}", style, indent=2))
        for diff in check.first:
            size = "" if diff.rel_l2 is None else f", rel L2 {diff.rel_l2:.1e}"
            body.append(
                named(
                    "",
                    (
                        f"first in the {diff.pass_} pass: rank {rank_names(diff.ranks)} against "
                        f"{rank_names(diff.peers)} at {diff.site} (prompt {diff.sample}, step "
                        f"{diff.step}){size}"
                    ),
                )
            )
    detail = "tensors that several of a run's ranks computed alike"
    return [Section(id="ranks", title="ranks", detail=detail, body=body)]

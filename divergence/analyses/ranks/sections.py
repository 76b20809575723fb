"""What the ranks of a run said of one another."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.document import Facts, Section
from divergence.layout import rank_names
from divergence.words import letter


def sections(report: Report, **_: object) -> list[Section]:
    """Nothing where each run was made by one process."""
    if not report.replicas:
        return []
    rows, styles = [], []
    for check in report.replicas:
        text = f"all {check.num_tensors:,} replicas agree bit for bit"
        if check.num_different:
            disagree = f"{check.num_different:,} of {check.num_tensors:,}"
            text = f"ranks disagree at {disagree} replicas"
        text = text if check.num_tensors else "no tensor is on more than one"
        rows.append((letter(check.side), f"{check.mesh}: {text}"))
        styles.append("bold red" if check.num_different else "")
        for diff in check.first:
            size = "" if diff.rel_l2 is None else f", rel L2 {diff.rel_l2:.1e}"
            rows.append(("", (
                f"first in the {diff.pass_} pass: rank {rank_names(diff.ranks)} against "
                f"{rank_names(diff.peers)} at {diff.site} (prompt {diff.sample}, step {diff.step})"
                f"{size}"
            )))  # fmt: skip
            styles.append("")
    detail = "tensors that several of a run's ranks computed alike"
    return [Section(id="ranks", title="ranks", detail=detail,
                    body=[Facts(rows, width=12, styles=styles)])]  # fmt: skip

"""What the ranks of a run said of one another, as lines."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.result import ReplicaDiff, Report
from divergence.layout import BLANK, Line, heading, prose

__all__ = ["show"]


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Nothing where each run was made by one process."""
    checks = report.replicas
    if not checks:
        return []
    lines = [heading("ranks", "tensors that several of a run's ranks computed alike")]
    for check in checks:
        if not check.num_tensors:
            text = f"{check.mesh}: no tensor is on more than one"
        elif not check.num_different:
            text = f"{check.mesh}: all {check.num_tensors:,} replicas agree bit for bit"
        else:
            disagree = f"{check.num_different:,} of {check.num_tensors:,}"
            text = f"{check.mesh}: ranks disagree at {disagree} replicas"
        style = "bold red" if check.num_different else ""
        lines.append(prose(f"  {check.side}", text, style=style))
        lines += [prose("", _diff_text(diff)) for diff in check.first]
    return [*lines, BLANK]


def _diff_text(diff: ReplicaDiff) -> str:
    size = "" if diff.rel_l2 is None else f", rel L2 {diff.rel_l2:.1e}"
    return (
        f"first in the {diff.pass_} pass: rank {_listed(diff.ranks)} against "
        f"{_listed(diff.peers)} at {diff.site} (sample {diff.sample}, step {diff.step}){size}"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")

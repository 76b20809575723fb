"""What the ranks of a run said of one another, as lines."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.result import ReplicaCheck, ReplicaDiff, Report
from divergence.layout import BLANK, Line, heading, prose
from divergence.words import letter


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Nothing where each run was made by one process."""
    checks = report.replicas
    if not checks:
        return []
    lines = [heading("ranks", "tensors that several of a run's ranks computed alike")]
    for check in checks:
        style = "bold red" if check.num_different else ""
        lines.append(prose(f"  {letter(check.side)}", check_text(check), style=style))
        lines += [prose("", diff_text(diff)) for diff in check.first]
    return [*lines, BLANK]


def check_text(check: ReplicaCheck) -> str:
    """Whether one run's ranks agree."""
    if not check.num_tensors:
        return f"{check.mesh}: no tensor is on more than one"
    if not check.num_different:
        return f"{check.mesh}: all {check.num_tensors:,} replicas agree bit for bit"
    disagree = f"{check.num_different:,} of {check.num_tensors:,}"
    return f"{check.mesh}: ranks disagree at {disagree} replicas"


def diff_text(diff: ReplicaDiff) -> str:
    """The first difference of a pass."""
    size = "" if diff.rel_l2 is None else f", rel L2 {diff.rel_l2:.1e}"
    return (
        f"first in the {diff.pass_} pass: rank {_listed(diff.ranks)} against "
        f"{_listed(diff.peers)} at {diff.site} (prompt {diff.sample}, step {diff.step}){size}"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")

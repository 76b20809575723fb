"""What may be held against what: a golden must be one, and no run its own."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.decide.qualify import WITH_ITSELF
from divergence.comparison.result import Report
from divergence.errors import UsageError
from divergence.run.untrusted.command import command_line

__all__ = ["refuse_unfit", "why_no_golden"]


def refuse_unfit(report: Report) -> None:
    """Raise UsageError where both runs are one, and where the golden is none."""
    golden, new = report.reference, report.candidate
    if golden.id == new.id:
        raise UsageError(
            f"{new.path} is the golden itself, or a copy of it (run {golden.id}): {WITH_ITSELF}",
            hint=command_line("capture", like=golden.path, o="NEW"),
        )
    problem = why_no_golden(golden.compute_dtype, golden.plants, golden.substitutes)
    if problem is not None:
        raise UsageError(
            f"{golden.path} is no golden: {problem}",
            hint="capture one without, and store it: divergence check GOLDEN RUN --bless",
        )
    if new.compute_dtype is not None:
        raise UsageError(
            f"{new.path} is a truth, computed in {new.compute_dtype}, and not a run to check",
            hint=command_line("check", "GOLDEN", "RUN", truth=new.path),
        )


def why_no_golden(
    compute_dtype: str | None, plants: Sequence[str], substitutes: Sequence[str]
) -> str | None:
    """Why the results of such a run must not be asked of another, or None."""
    if compute_dtype is not None:
        return f"it is a truth, computed in {compute_dtype}"
    if plants:
        return f"it carries planted faults ({', '.join(plants)})"
    if substitutes:
        return f"it holds results of another run ({', '.join(substitutes)})"
    return None

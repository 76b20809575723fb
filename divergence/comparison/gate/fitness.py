"""What may be held against what: a golden must be one, and a run proves nothing about itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from divergence.comparison.result import Evidence, Report
from divergence.errors import UsageError
from divergence.run.schema.manifest import Manifest
from divergence.run.untrusted.command import command_line

__all__ = ["refuse_unfit", "why_no_golden", "with_itself"]

_WITH_ITSELF = "a run compared with itself proves nothing"


def refuse_unfit(report: Report) -> None:
    """Raise UsageError where both runs are one, and where the golden is none."""
    golden, new = report.reference, report.candidate
    if golden.id == new.id:
        raise UsageError(
            f"{new.path} is the golden itself, or a copy of it (run {golden.id}): {_WITH_ITSELF}",
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


def with_itself(report: Report, reference: Manifest, candidate: Manifest) -> Report:
    """The report of two runs of one id: equal bits are no finding then. What differs all the same
    (a damaged copy, ranks that disagree), and what a truth says of both, stays."""
    if reference.id != candidate.id:
        return report
    fact = Evidence(text=f"both are run {reference.id}: one of them, or both, is a copy")
    verdict = report.verdict
    if verdict.kind == "within_floor" or (report.suite is not None and report.suite.judged):
        verdict = msgspec.structs.replace(verdict, confidence="low")
    elif verdict.kind in ("identical", "undetermined"):
        replicas = [] if any(one.num_different for one in report.replicas) else report.replicas[:1]
        held = sum(one.num_tensors for one in replicas)
        but = f", but that its ranks agree on the {held} tensors that several hold" if held else ""
        both = "; it is far from the truth" if verdict.side == "both" else ""
        verdict = msgspec.structs.replace(
            verdict,
            kind="undetermined",
            summary=f"{_WITH_ITSELF}{but}{both}",
            confidence="low",
            side="both" if both else None,
            onset=None,
            next=[command_line("capture", like=report.reference.path, o="NEW")],
        )
    report.verdict = msgspec.structs.replace(verdict, evidence=[fact, *verdict.evidence])
    return report

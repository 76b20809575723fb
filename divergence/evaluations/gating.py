"""A candidate's scores against the ``[scores]`` table of a policy."""

from __future__ import annotations

from msgspec.structs import replace

from divergence.evaluations.result import Candidate
from divergence.gate.policy import ScoresPolicy

__all__ = ["gated"]


def gated(candidate: Candidate, policy: ScoresPolicy) -> Candidate:
    """With whether the policy is met. What was not compared is not a pass."""
    reasons: list[str] = []
    for task in candidate.tasks:
        name = " ".join(part for part in (task.task, task.filter, task.metric) if part)
        if task.verdict not in policy.verdicts:
            reasons.append(f"{name}: {task.summary}")
        elif task.pairing is not None:
            held = task.pairing
            all_of_both = held.num_paired + held.num_left_out
            if held.num_paired < policy.min_paired * all_of_both:
                reasons.append(
                    f"{name}: {held.num_paired:,} of {all_of_both:,} documents were paired, and "
                    f"the policy asks for {100 * policy.min_paired:g}%"
                )
    reasons += [note for note in candidate.notes if note[:2] in ("A:", "B:")]
    return replace(candidate, passed=not reasons, reasons=reasons)

"""Log-probabilities alone: a server's, a rollout's, a trainer's. What does a difference mean?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.run.site import LOGPROBS

if TYPE_CHECKING:
    from divergence.run.reader import Run


def applies(a: Run, b: Run) -> bool:
    """Where one of both runs holds nothing else."""
    return any(run.manifest.plan.sites == [LOGPROBS] for run in (a, b))

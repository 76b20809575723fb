"""Log-probabilities alone: a server's, a rollout's, a trainer's. What does a difference mean?"""

from divergence.run.reader import Run
from divergence.run.site import LOGPROBS


def applies(a: Run, b: Run) -> bool:
    """Where one of both runs holds nothing else."""
    return any(run.manifest.plan.sites == [LOGPROBS] for run in (a, b))

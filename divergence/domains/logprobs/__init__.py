"""Log-probabilities alone: a server's, a rollout's, a trainer's. What does a difference mean?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.domain import Claim, Domain

if TYPE_CHECKING:
    from divergence.run.reader import Run

_AT = "divergence.domains.logprobs"

DOMAIN = Domain(
    name="logprobs",
    sources={"endpoint": f"{_AT}.endpoints.capture:capture_endpoint"},
    judges={"logprobs": _AT},
    claims={"logprobs": Claim(20, measured=False, alone=True)},
    basis=("prompts", "scale", "told", "experts"),
    parts={"logprobs": f"{_AT}.result:LogprobsResult"},
    sentences={"endpoints": f"{_AT}.endpoints.sentences", "logprobs": f"{_AT}.sentences"},
)


def applies(a: Run, b: Run) -> bool:
    """Where one of both runs holds nothing else."""
    return any(run.manifest.scores_alone for run in (a, b))

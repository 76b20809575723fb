"""Log-probabilities alone: a server's, a rollout's, a trainer's. What does a difference mean?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.domain import Addition, AnalysisPackage, Claim, Domain, Source

if TYPE_CHECKING:
    from divergence.run.reader import Run

_AT = "divergence.domains.logprobs"

DOMAIN = Domain(
    name="logprobs",
    public={"ServerOptions": f"{_AT}.options"},
    adds={
        "capture": Addition(
            groups={"server": f"{_AT}.options:ServerOptions"},
            source=Source(
                option="endpoint",
                function=f"{_AT}.endpoints.capture:capture_endpoint",
                note="of the other server",
            ),
            examples=(
                "divergence capture --endpoint http://localhost:8000 --model NAME -o served "
                "--prompts p.txt",
            ),
        ),
    },
    analyses={"logprobs": AnalysisPackage(_AT, whole=True)},
    claims={
        "logprobs": Claim(
            20, measured=False, alone=True, basis=("prompts", "scale", "told", "experts")
        )
    },
    parts={"logprobs": f"{_AT}.result:LogprobsResult"},
    sentences={"endpoints": f"{_AT}.endpoints.sentences", "logprobs": f"{_AT}.sentences"},
)


def applies(a: Run, b: Run) -> bool:
    """Does one of both runs hold nothing else?"""
    return any(run.manifest.scores_alone for run in (a, b))

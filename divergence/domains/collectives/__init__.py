"""Collectives: does every rank hold what it should, and in which order were the ranks added?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from divergence.domain import Addition, AnalysisPackage, Claim, Domain, Suite

if TYPE_CHECKING:
    from divergence.run.reader import Run

_AT = "divergence.domains.collectives"
SOURCE = "suite:collectives"

DOMAIN = Domain(
    name="collectives",
    suites=(
        Suite(
            "collectives",
            f"{_AT}.capturing",
            "of a process group",
            takes=("--impl", "--plant", "--ranks", "--link-rate"),
            answers="does every rank hold what it should?",
        ),
    ),
    analyses={"collectives": AnalysisPackage(_AT, whole=True)},
    claims={"collectives": Claim(20, measured=False, alone=True)},
    parts={"collectives": f"{_AT}.result:CollectivesResult"},
    sentences={"collectives": f"{_AT}.sentences"},
    adds={
        "capture": Addition(
            examples=(
                "torchrun --nproc-per-node 8 -m divergence capture suite:collectives -o c    "
                "# the ranks alone",
            )
        ),
        "compare": Addition(
            examples=(
                "divergence compare c                # of suite:collectives: does each rank hold "
                "what it should?",
            )
        ),
    },
)


def applies(a: Run, b: Run) -> bool:
    """Are both runs of collectives?"""
    return a.manifest.model.source == b.manifest.model.source == SOURCE


def alone(run: Run) -> bool:
    """Is it a run that is judged without another?"""
    return run.manifest.model.source == SOURCE

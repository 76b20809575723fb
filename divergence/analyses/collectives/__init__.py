"""Collectives: does every rank hold what it should, and in which order were the ranks added?"""

from divergence.run.reader import Run

_SOURCE = "suite:collectives"


def applies(a: Run, b: Run) -> bool:
    """Where both runs are of collectives."""
    return a.manifest.model.source == b.manifest.model.source == _SOURCE


def alone(run: Run) -> bool:
    """Is it a run that is judged without another?"""
    return run.manifest.model.source == _SOURCE

"""Ranks: do those agree that must hold the same?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Did several ranks make a side?"""
    return any(run.manifest.mesh is not None for run in (measured.reference, measured.candidate))

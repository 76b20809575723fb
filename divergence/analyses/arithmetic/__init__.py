"""Arithmetic: what the probed machines compute otherwise."""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where a machine was probed."""
    return bool(measured.reference.manifest.arithmetic or measured.candidate.manifest.arithmetic)

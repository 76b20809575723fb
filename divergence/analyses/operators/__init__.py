"""Operators: which one makes the error?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where a side recorded operators."""
    return measured.has_operators

"""Operators: which one makes the error?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Did a side record operators?"""
    return measured.has_operators

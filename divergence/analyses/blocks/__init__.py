"""Blocks: where is an error made, beyond what rounding explains?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Every pair of runs."""
    return True

"""Ends: what lies between blocks and behind them, integers, sampling."""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Every pair of runs."""
    return True

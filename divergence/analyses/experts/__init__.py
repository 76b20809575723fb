"""Experts: which one do all tokens share that are far off?"""

from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Were tokens and their experts seen?"""
    return bool(measured.routes.found or measured.routes.unexplained)

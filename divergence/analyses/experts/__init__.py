"""Experts: which one do all tokens share that are far off?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where tokens and their experts were seen."""
    return bool(measured.routes.found or measured.routes.unexplained)

"""Blocks: where is an error made, beyond what rounding explains?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Every pair of runs."""
    return True

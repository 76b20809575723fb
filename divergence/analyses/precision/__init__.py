"""Precision: in which dtype did each part of the model really run?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.measured import Measured


def applies(measured: Measured) -> bool:
    """Where a side recorded operators."""
    return measured.has_operators

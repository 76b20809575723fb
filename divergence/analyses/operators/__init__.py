"""Operators: which one makes the error?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where a side recorded operators."""
    return measured.has_operators

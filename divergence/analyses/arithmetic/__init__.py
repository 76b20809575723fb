"""Arithmetic: what the probed machines compute otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where a machine was probed."""
    return bool(measured.reference.manifest.arithmetic or measured.candidate.manifest.arithmetic)

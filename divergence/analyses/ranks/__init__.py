"""Ranks: do those agree that must hold the same?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where several ranks made a side."""
    return any(run.manifest.mesh is not None for run in (measured.reference, measured.candidate))

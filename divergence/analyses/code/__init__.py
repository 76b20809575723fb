"""Code: what did the onset's block run otherwise, and whose is the truth?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from divergence.comparison.analysis import Measured


def applies(measured: Measured) -> bool:
    """Where both sides' code was recorded and differs, or there is a truth."""
    one, two = (run.manifest.model.code for run in (measured.reference, measured.candidate))
    return measured.truth is not None or bool(one and two and one != two)

"""Confidence: computed from the checks that a verdict rests on, never chosen.

High where every check was met; medium where one was not made, or failed; low where a failed one is
what the verdict stands on (no anchored pass, or numbers that are not known). So more evidence that
agrees can only raise it. What would raise it is said with each check that was not met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from divergence.comparison.results.findings import Check

__all__ = ["RANK", "check", "confidence_of"]

RANK = {"low": 0, "medium": 1, "high": 2}
_BASIS = frozenset(
    {
        "anchored",  # seen where both sides got the same inputs
        "measured",  # by how much the two differ is known
        "told_by_truth",  # of operators: held against the truth, not against the other side
        "one_side_alone",  # between modules: one side hands on what it got
        "agreement",  # no level blames the other side
        "same_experiment",  # nothing that blocks a comparison was overridden
        "two_runs",  # the two are not one run
    }
)
"""Where one of these failed nothing better than low is left."""


def confidence_of(checks: Sequence[Check]) -> Literal["high", "medium", "low"]:
    """One word for the checks of a verdict."""
    if any(one.state == "failed" and one.name in _BASIS for one in checks):
        return "low"
    return "high" if all(one.state == "met" for one in checks) else "medium"


def check(name: str, met: bool, lacking: str, *, made: bool = True) -> Check:
    """``lacking``: what to say where it is not met. ``made``: could it be made at all?"""
    if met:
        return Check(name=name, state="met")
    return Check(name=name, state="failed" if made else "not_made", detail=lacking)

"""Confidence: computed from the checks that a verdict rests on, never chosen.

High where every check was met; medium where one was not made, or failed; low where a failed one is
what the verdict stands on (no anchored pass, or numbers that are not known). So more evidence that
agrees can only raise it. What would raise it is said with each check that was not met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from divergence.comparison.blocks.units import Unit
from divergence.comparison.result import Check

__all__ = ["RANK", "check", "checks_of", "confidence_of"]

RANK = {"low": 0, "medium": 1, "high": 2}
_BASIS = frozenset({"anchored", "measured"})
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


def checks_of(unit: Unit) -> list[Check]:
    """What a verdict about one site rests on: equal inputs, and an error clearly over its limit."""
    return [
        check("anchored", unit.pass_ != "free", "judged from free runs alone: no anchored pass"),
        check(
            "clear", unit.margin > 2,
            f"{unit.margin:.1f} × its limit; above 2 × it would be high",
        ),
    ]  # fmt: skip

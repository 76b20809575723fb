"""What a verdict about one site rests on."""

from __future__ import annotations

from divergence.analyses.blocks.units import Unit
from divergence.comparison.decide import check
from divergence.comparison.results.findings import Check

__all__ = ["checks_of"]


def checks_of(unit: Unit) -> list[Check]:
    """Equal inputs, and an error clearly over its limit."""
    return [
        check("anchored", unit.pass_ != "free", "judged from free runs alone: no anchored pass"),
        check(
            "clear", unit.margin > 2,
            f"{unit.margin:.1f} × its limit; above 2 × it would be high",
        ),
    ]  # fmt: skip

"""What each analysis shows of itself in a report, in one order."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from divergence.comparison import answer
from divergence.comparison.result import Report
from divergence.layout.lines import Line

__all__ = ["shown_by_analyses"]

_ORDER = ("tokens", "blocks", "suite", "operators", "precision", "ends", "ranks")


def shown_by_analyses(report: Report, *, all_sites: bool) -> list[Line]:
    """The sections of all analyses that have a ``show`` module, others behind those of _ORDER."""
    lines = []
    for name in dict.fromkeys((*_ORDER, *answer.ANALYSES)):
        path = f"divergence.analyses.{name}.show"
        if name in _ORDER or find_spec(path) is not None:
            lines += import_module(path).show(report, all_sites=all_sites)
    return lines

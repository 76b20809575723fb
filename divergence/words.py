"""Words that mean one thing in every room: which side of a comparison, and how progress is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

__all__ = ["Progress", "Side", "SideBothOrNeither", "SideOrBoth"]

Progress = Callable[[str, int, int | None, str], None]
"""Called as work goes on, with (event, how much is done, of how much, detail); the total is None
where nobody knows it. ``event``: ``load``, ``digest``, ``probe``, ``free``, ``repeat``,
``anchored``, ``escalated``, ``whole``, ... or ``note`` for a warning in the detail."""

Side = Literal["reference", "candidate"]
"""One of the two runs that are compared."""

SideOrBoth = Literal["reference", "candidate", "both"]
"""Where something was found: in one of them, or in each."""

SideBothOrNeither = Literal["reference", "candidate", "both", "neither"]
"""The same where it is an answer too that there is nothing in either."""

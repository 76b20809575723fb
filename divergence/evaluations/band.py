"""The band: how far a score may be off and still count as the same.

    3%       relative, to the reference's score: 41% may be 39.8 to 42.2%
    1.5pp    percentage points of a score from 0 to 1: absolute
    0.015    the same, in the score's own unit

The default is the 3% that users of other hardware go by, as a share of the score; 5%, their wider
one, is told beside it.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from divergence.errors import UsageError


class Band(NamedTuple):
    """``limit``: 0.03 for 3%. ``relative``: of the reference's score."""

    limit: float
    relative: bool

    def __str__(self) -> str:
        return f"{100 * self.limit:g}%" if self.relative else f"{self.limit:g}"


DEFAULT_BANDS = (Band(0.03, True), Band(0.05, True))
_WRITTEN = re.compile(r"\s*±?\s*([0-9.]+(?:e-?\d+)?)\s*(%|pp)?\s*", re.IGNORECASE)


def parse_band(text: str | float) -> Band:
    """Raises UsageError for what is no band."""
    match = _WRITTEN.fullmatch(str(text))
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    unit = (match[2] or "").lower() if match else ""
    limit = value / 100 if unit else value
    # as far off as the score itself (or as a scale from 0 to 1) excludes nothing
    if not 0 < limit < (1 if unit else math.inf):
        raise UsageError(
            f"{text!r} is no band", where="--band",
            hint="3% of A's score, 1.5pp for percentage points, or 0.015 in the score's own unit",
        )  # fmt: skip
    return Band(limit, unit == "%")

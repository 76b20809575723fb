"""How much so many documents can tell, and how many would be needed.

``spread``: the standard deviation of one document's difference, clusters included: √n times the
clustered standard error without made-up clusters. ``pad``: of these, in units of one document.
A padded error at n documents is √(n spread² + 2 pad²) / n, to within 2/n.
"""

from __future__ import annotations

import math

__all__ = ["LEVEL", "POWER", "documents_needed", "smallest_difference"]

LEVEL = 0.05
"""Of intervals (95%), of tests, and of each of the two tests of equivalence."""
POWER = 0.8


def smallest_difference(error: float, freedom: float) -> float:
    """The true difference that the test would find in four of five such sets."""
    from scipy import stats

    return float((stats.t.ppf(1 - LEVEL / 2, freedom) + stats.t.ppf(POWER, freedom)) * error)


def documents_needed(
    spread: float, pad: float, *, difference: float, band: float, num: int
) -> int | None:
    """So many documents like these would settle it, with probability POWER.

    First: as many as show that sides without any true difference are equal within the band. Where
    there are as many already, the difference is near the band's edge: then as many as tell on
    which side of it a true difference of this size lies, or beyond the band that it is none of 0.
    None where no number would.
    """
    from scipy import stats

    z_test, z_two, z_power, z_half = stats.norm.ppf(
        [1 - LEVEL, 1 - LEVEL / 2, POWER, (1 + POWER) / 2]
    )
    if band <= 0:
        return None
    least = _count(spread, pad, (z_test + z_half) / band)
    if least > num:
        return least
    if abs(difference) < band:
        room = (z_test + z_power) / (band - abs(difference))
    else:
        room = (z_two + z_power) / abs(difference)
    return max(_count(spread, pad, room), num + 1)


def _count(spread: float, pad: float, per_error: float) -> int:
    """The least n with √(n spread² + 2 pad²) / n ≤ 1 / per_error."""
    a = (spread * per_error) ** 2
    b = 2 * (pad * per_error) ** 2
    return max(2, math.ceil((a + math.sqrt(a * a + 4 * b)) / 2))

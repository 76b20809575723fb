"""The smallest size of a fault that is seen, by bisection on a logarithmic grid.

The grid has eight points to a doubling, so a size is found to 9 %. What is seen need not grow
with the size (rounding of a format, a question that one size answers and a larger one does
not), so twice and four times the found size must be seen as well; where they are not, the
search goes on above them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["LOWEST", "smallest_seen"]

LOWEST = 1e-8
"""The smallest size tried: a tenth of the rounding of float32."""
PER_DOUBLING = 8
_DOUBLINGS_ABOVE = (1, 2)


def smallest_seen(
    seen: Callable[[float], bool], *, high: float, low: float = LOWEST, guess: float | None = None
) -> float | None:
    """The smallest size in [low, high] from which on it is seen, at the found size, twice and
    four times that (as far as they are below ``high``). None where ``high`` itself is not seen.

    ``guess``: where to begin, for example what was found elsewhere; saves trials.
    """
    top = math.ceil(math.log2(high / low) * PER_DOUBLING)
    known: dict[int, bool] = {}

    def size(place: int) -> float:
        return min(low * math.pow(2.0, place / PER_DOUBLING), high)

    def at(place: int) -> bool:
        if place not in known:
            known[place] = seen(size(place))
        return known[place]

    if not at(top):
        return None
    below, above = -1, top  # not seen (nothing is tried there), seen
    if guess is not None:
        below, above = _around(at, round(math.log2(guess / low) * PER_DOUBLING), top)
    while True:
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if at(middle) else (middle, above)
        missed = [
            above + n * PER_DOUBLING
            for n in _DOUBLINGS_ABOVE
            if above + n * PER_DOUBLING <= top and not at(above + n * PER_DOUBLING)
        ]
        if not missed:
            return size(above)
        below, above = max(missed), top


def _around(at: Callable[[int], bool], guess: int, top: int) -> tuple[int, int]:
    """(not seen, seen) near a guess, in strides that double."""
    place, stride = min(max(guess, 0), top), 2
    if at(place):
        while place - stride >= 0 and at(place - stride):
            place, stride = place - stride, 2 * stride
        return max(place - stride, -1), place
    while place + stride < top and not at(place + stride):
        place, stride = place + stride, 2 * stride
    return place, min(place + stride, top)

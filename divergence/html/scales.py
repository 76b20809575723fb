"""Scales of figures: where a value stands on a logarithmic axis, which step of colour it has."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["DECADES", "FLOORS", "LIMIT_SHARES", "HeatScale", "LogAxis"]

_MOST_DECADES = 12


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis of whole decades, ``low`` below and ``high`` above, ``height`` pixels.
    What is zero stands in a lane of its own below, nan and inf in one above."""

    low: int
    high: int
    height: float
    has_zero: bool = False
    has_nonfinite: bool = False

    @classmethod
    def over(cls, values: Iterable[float | None], height: float) -> LogAxis:
        known = [value for value in values if value is not None]
        real = [abs(value) for value in known if math.isfinite(value) and value != 0]
        low = math.floor(math.log10(min(real))) if real else -1
        high = math.ceil(math.log10(max(real))) if real else 0
        high = max(high, low + 1)
        return cls(
            max(low, high - _MOST_DECADES), high, height,
            any(value == 0 for value in known), any(not math.isfinite(value) for value in known),
        )  # fmt: skip

    @property
    def top(self) -> float:
        return _LANE if self.has_nonfinite else 0.0

    @property
    def bottom(self) -> float:
        return self.height - (_LANE if self.has_zero else 0.0)

    def at(self, value: float) -> float:
        """Distance from the upper edge."""
        if not math.isfinite(value):
            return _LANE / 2
        if value == 0:
            return self.height - _LANE / 2
        part = (math.log10(abs(value)) - self.low) / (self.high - self.low)
        return self.bottom - min(max(part, 0.0), 1.0) * (self.bottom - self.top)

    def ticks(self) -> list[tuple[float, str]]:
        """(distance from the upper edge, what stands there), eight decades at most named."""
        step = 1 + (self.high - self.low - 1) // 7
        marks = [
            (self.at(10.0**power), _power(power)) for power in range(self.low, self.high + 1, step)
        ]
        marks += [(self.at(0.0), "equal")] if self.has_zero else []
        return marks + ([(self.at(math.inf), "nan, inf")] if self.has_nonfinite else [])


_LANE = 28.0


def _power(power: int) -> str:
    if -2 <= power <= 3:
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatScale:
    """Steps of colour: values below ``bounds[0]`` have the first. ``num_calm``: so many are within
    a limit, the others beyond it, in another hue."""

    bounds: tuple[float, ...]
    names: tuple[str, ...]
    num_calm: int
    unit: str

    def step(self, value: float) -> int:
        """The number of the step; -1 for nan and inf."""
        return bisect_right(self.bounds, value) if math.isfinite(value) else -1

    def classes(self) -> Sequence[str]:
        """The CSS class of each step."""
        calm = [f"calm{number}" for number in range(self.num_calm)]
        return [*calm, *(f"hot{n}" for n in range(len(self.names) - self.num_calm))]


LIMIT_SHARES = HeatScale(
    bounds=(0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0, 5.0),
    names=("under 3%", "10%", "20%", "40%", "70%", "100%", "to 2 ×", "to 5 ×", "over 5 ×"),
    num_calm=6,
    unit="× the limit",
)
"""Shares of a limit; beyond 1 the limit is exceeded."""

FLOORS = HeatScale(
    bounds=(0.1, 0.5, 1.0, 3.0, 6.0, 12.0, 25.0, 50.0),
    names=("under 0.1", "0.5", "1", "3", "6", "12", "to 25", "to 50", "over 50"),
    num_calm=6,
    unit="× the rounding floor",
)
"""A single token's error in floors; a threshold of 12 is the default (numerics.floor, token)."""

DECADES = HeatScale(
    bounds=(1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
    names=("under 1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "over 1e-2"),
    num_calm=7,
    unit="relative L2",
)
"""Relative differences, where nothing tells what rounding explains."""

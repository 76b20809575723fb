"""What a threshold may be: a multiple of the floor that decides something.

Correct kernels reach 2.2 floors, a fault that leaves no digit right some 1 / u = 256 in bfloat16;
0.01 to 1000 holds both. A limit of zero would flag every healthy pair, one of a billion would
excuse every fault, and nan is above and below nothing.
"""

from __future__ import annotations

import math

from divergence.errors import ConfigError
from divergence.numerics.rounding.floor import Thresholds

__all__ = ["ALLOWED", "check_range", "check_thresholds"]

ALLOWED = (0.01, 1000.0)
"""The least and the largest threshold."""


def check_thresholds(thresholds: Thresholds, *, where: str = "thresholds") -> None:
    """Raise ConfigError for a multiple of the floor that is none."""
    for name in thresholds.__struct_fields__:
        check_range(getattr(thresholds, name), ALLOWED, where=f"{where}: thresholds.{name}")


def check_range(value: float, allowed: tuple[float, float], *, where: str) -> None:
    """Raise ConfigError for a number outside ``allowed``, and for nan."""
    least, most = allowed
    # written as "not <=", so that a nan is in no range
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(
            f"{value:g} is out of range; allowed is {least:g} to {most:g}", where=where
        )

"""How far apart the values of a format lie around a number: the unit of its last rounding.

Rounding to nearest errs by at most half the spacing; uniformly over that, by 1/√12 = 0.29 of it in
the root mean square. Unlike the unit roundoff, which is relative to the number, the spacing stands
still within a binade and among subnormals.
"""

from __future__ import annotations

import math

import torch

from divergence.numerics.formats import Format

__all__ = ["ROUNDING_RMS", "spacing"]

ROUNDING_RMS = 1 / math.sqrt(12)
"""Rms error of rounding to nearest, in spacings."""


def spacing(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Distance of neighbouring values of ``form`` around each float64 ``x``.

    Unit: that of x. The subnormals' distance at 0, nan where x is not finite; no upper end.
    """
    _, exponent = torch.frexp(x)  # |x| = m · 2^exponent, 1/2 <= m < 1
    least = math.log2(form.smallest_subnormal)
    power = (exponent.double() - 1 - form.mantissa_bits).clamp_min(least)
    power = torch.where(x == 0.0, least, power)
    return torch.where(x.isfinite(), torch.exp2(power), math.nan)

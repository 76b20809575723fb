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


_EXPONENT_BITS = 0x7FF << 52


def spacing(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Distance of neighbouring values of ``form`` around each float64 ``x``.

    Unit: that of x. The subnormals' distance at 0, nan where x is not finite; no upper end.
    """
    # the exponent bits alone are the power of two at or below |x|: 0 for 0, inf for inf and nan
    power = (x.contiguous().view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    found = (power * 2.0**-form.mantissa_bits).clamp_min(form.smallest_subnormal)
    return found.masked_fill_(power == math.inf, math.nan)

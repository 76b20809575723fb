"""Distance in representable values of a named format.

Read as integers, the magnitudes of one sign of a binary float format count its
values upwards from zero; negate those with the sign bit and the whole format lies
on one integer line, the *lattice* (Bruce Dawson, "Comparing Floating Point
Numbers", 2012). The key of -0 is the key of +0; the largest finite value and inf
are neighbours. The distance of two values is the difference of their keys.

It refuses to compare across formats silently: the format is always named, and
values stored in another one are rounded to it first.

``spacing``: how far apart the values of a format lie around a number, the unit of its last
rounding. Rounding to nearest errs by at most half the spacing; uniformly over that, by 1/√12 = 0.29
of it in the root mean square. Unlike the unit roundoff, which is relative to the number, the
spacing stands still within a binade and among subnormals.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from divergence.numerics.formats import Format, format_of

__all__ = ["NAN_DISTANCE", "ROUNDING_RMS", "byte_keys", "distance_array", "key_array", "spacing",
           "ulp_distance"]  # fmt: skip


NAN_DISTANCE = 2**63 - 1
"""What ulp_distance answers where exactly one side is nan; also its ceiling."""


def ulp_distance(a: torch.Tensor, b: torch.Tensor, form: Format) -> torch.Tensor:
    """|key(a) - key(b)| per element, int64, symmetric.

    Unit: ulp of ``form``. 0 for equal values, +0 and -0, and for nan beside nan;
    NAN_DISTANCE where one side only is nan. Distances beyond 2^63 - 1 (float64 of
    opposite signs) stop there. Source: module docstring.
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    distance = distance_array(
        key_array(stored_bits(a, form), form), key_array(stored_bits(b, form), form)
    )
    distance = np.minimum(distance.astype(np.uint64), np.uint64(NAN_DISTANCE)).astype(np.int64)
    result = torch.from_numpy(distance).reshape(a.shape)
    nan_a, nan_b = _isnan(a, form), _isnan(b, form)
    result[nan_a ^ nan_b] = NAN_DISTANCE
    result[nan_a & nan_b] = 0
    return result


def stored_bits(values: torch.Tensor, form: Format) -> np.ndarray:
    """The bit patterns of ``values`` in ``form``, as signed integers (uint8 for one byte)."""
    if form.kind != "float":
        raise ValueError(f"ulp distances exist in float formats, not in {form.name}")
    values = values.detach()
    if format_of(values.dtype).name != form.name:
        values = values.to(form.torch_dtype)
    pattern = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[form.itemsize]
    return values.contiguous().view(pattern).cpu().numpy()


def key_array(
    bits: np.ndarray,
    form: Format,
    *,
    out: np.ndarray | None = None,
    scratch: np.ndarray | None = None,
) -> np.ndarray:
    """Keys of bit patterns as signed integers of the same width (int16 for one byte).

    With s = bits >> (width - 1), which is -1 for a set sign and 0 otherwise,
    (bits ^ (s & 0x7f..)) - s turns sign and magnitude into two's complement.
    ``out`` and ``scratch``: buffers of the keys' dtype and ``bits``' shape, or None.
    """
    if form.itemsize == 1:
        return np.take(byte_keys(form), bits, out=out)
    width = 8 * form.itemsize
    sign = np.right_shift(bits, width - 1, out=scratch)
    keys: np.ndarray = np.bitwise_and(sign, bits.dtype.type(2 ** (width - 1) - 1), out=out)
    np.bitwise_xor(keys, bits, out=keys)
    np.subtract(keys, sign, out=keys)
    return keys


def distance_array(
    a: np.ndarray,
    b: np.ndarray,
    *,
    out: np.ndarray | None = None,
    scratch: np.ndarray | None = None,
) -> np.ndarray:
    """|a - b| of two key arrays as unsigned integers of their width: exact, because the
    larger minus the smaller, modulo 2^width, is the distance even where it wraps."""
    high: np.ndarray = np.maximum(a, b, out=out)
    low = np.minimum(a, b, out=scratch)
    np.subtract(high, low, out=high)
    return high.view(f"u{high.itemsize}")


def byte_keys(form: Format) -> np.ndarray:
    """The key of each of the 256 patterns of a one-byte format."""
    patterns = np.arange(256, dtype=np.int16)
    if not form.signed:  # e8m0fnu: a bare exponent, in order as it stands; 0xff is nan
        return patterns
    keys = np.where(patterns < 128, patterns, 128 - patterns).astype(np.int16)
    if form.name.endswith("fnuz"):
        keys[0x80] = 128  # nan sits where -0 would
    return keys


def _isnan(values: torch.Tensor, form: Format) -> torch.Tensor:
    if format_of(values.dtype).name != form.name:
        values = values.to(form.torch_dtype)
    return torch.isnan(values.detach().cpu().to(torch.float64))


ROUNDING_RMS = 1 / math.sqrt(12)
"""Rms error of rounding to nearest, in spacings."""


_EXPONENT_BITS = 0x7FF << 52


def spacing(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Distance of neighbouring values of ``form`` around each float64 ``x``.

    Unit: that of x. The subnormals' distance at 0, nan where x is not finite; no upper end.
    """
    # the exponent bits alone are the power of two at or below |x|: 0 for 0, inf for inf and nan
    power = (x.contiguous().view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    distance = (power * 2.0**-form.mantissa_bits).clamp_min(form.smallest_subnormal)
    return distance.masked_fill_(power == math.inf, math.nan)

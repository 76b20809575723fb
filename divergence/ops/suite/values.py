"""Input values of the suite, the same bytes on every machine.

A counter-based generator: element i of a tensor is a hash of (seed, i), so neither the order of
filling nor the number of threads matters. SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, the finaliser) in 64-bit integer arithmetic; a
normal value is the sum of twelve 20-bit uniforms less its mean (Irwin-Hall: mean 0, variance 1
after division by 2^20), an integer below 2^24 and so exact in float32. What follows are additions,
products and quotients, which IEEE 754 rounds in one way only; no logarithm, no cosine. The last
step rounds to the dtype to nearest even, by integer operations for bfloat16: a vector unit may
flush the subnormals that are meant here.

Distributions: ``normal``; ``outliers``: some channels of the last axis times 1000, as trained
models have them (Sun et al., "Massive Activations in Large Language Models", COLM 2024);
``subnormals`` of the dtype; ``cancelling``: neighbours that differ in sign and, by up to 2^-8,
in size, so that sums lose their leading digits; ``equal``: one value everywhere; ``ties``: small
multiples of 1/4, which are equal in many places and lie half-way between integers in many.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

__all__ = ["FLOATS", "Values", "cancel", "integers", "normal", "outlier_channels", "to_tensor"]

Values = Literal["normal", "outliers", "subnormals", "cancelling", "equal", "ties"]

FLOATS = ("float32", "bfloat16", "float16")

OUTLIER_FACTOR = 1000.0
_OUTLIER_PERIOD, _OUTLIER_FIRST = 43, 5
"""Every 43rd channel from the sixth on: three in a row of 129, twelve of 512."""

_SUBNORMAL_EXPONENT = {"float32": -130, "bfloat16": -130, "float16": -18}
"""2^this times a normal value is subnormal: the smallest normals are 2^-126 and 2^-14."""


def _hash(seed: int, count: int, stream: int) -> np.ndarray:
    """``count`` 64-bit hashes (uint64) of (seed, stream, index): SplitMix64."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z + np.uint64((seed << 34) + (stream << 32))) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _seed(name: str, shape: tuple[int, ...]) -> int:
    """Thirty bits of the tensor's name and shape."""
    return zlib.crc32(f"{name}{list(shape)}".encode()) & 0x3FFFFFFF


@lru_cache(maxsize=32)  # operators and dtypes share tensors, one after the other
def normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal values, mean 0 and variance 1, |x| <= 6, float64 holding 24 bits or fewer;
    read-only."""
    count = int(np.prod(shape))
    seed, total = _seed(name, shape), np.zeros(count, dtype=np.int64)
    for stream in range(4):  # three 20-bit uniforms of each hash
        bits = _hash(seed, count, stream)
        for shift in (0, 20, 40):
            total += ((bits >> np.uint64(shift)) & np.uint64(0xFFFFF)).astype(np.int64)
    values = ((total - 6 * (2**20 - 1)) / 2.0**20).reshape(shape)
    values.setflags(write=False)
    return values


def integers(name: str, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Integers from ``low`` to ``high - 1``, int64; the slight bias of a remainder is kept."""
    count = int(np.prod(shape))
    drawn = _hash(_seed(name, shape), count, 0) >> np.uint64(33)
    return (drawn.astype(np.int64) % (high - low) + low).reshape(shape)


def outlier_channels(size: int) -> slice:
    """Which channels of ``size`` are massive."""
    return slice(min(_OUTLIER_FIRST, size - 1), None, _OUTLIER_PERIOD)


def cancel(x: np.ndarray, axis: int) -> np.ndarray:
    """Each odd element along ``axis`` is the one before it, negated and up to 2^-8 larger."""
    x = np.moveaxis(x.copy(), axis, -1)
    pairs = x.shape[-1] // 2 * 2
    change = np.abs(x[..., 1:pairs:2]) / 2.0**10  # |x| <= 6: below 2^-7
    x[..., 1:pairs:2] = -x[..., 0:pairs:2] * (1.0 + change)
    return np.moveaxis(x, -1, axis)


def draw(
    name: str, shape: tuple[int, ...], *, values: Values, dtype: str, axis: int = -1
) -> np.ndarray:
    """Values of one distribution, float64, not yet rounded to ``dtype``. ``axis``: the one that
    the operator sums over, along which ``cancelling`` values cancel."""
    if values == "ties":
        return integers(name, shape, -8, 9) / 4.0
    if values == "equal":
        return np.full(shape, 0.7)
    x = normal(name, shape)
    if values == "outliers":
        x = x.copy()
        x[..., outlier_channels(shape[-1])] *= OUTLIER_FACTOR
    elif values == "subnormals":
        x = x * 2.0 ** _SUBNORMAL_EXPONENT[dtype]
    elif values == "cancelling":
        x = cancel(x, axis)
    return x


def to_tensor(x: np.ndarray, dtype: str) -> torch.Tensor:
    """Round float64 values to ``dtype``, to nearest even, subnormals kept."""
    single = np.ascontiguousarray(x, dtype=np.float32)
    if dtype == "float32":
        return torch.from_numpy(single)
    if dtype == "float16":
        return torch.from_numpy(single.astype(np.float16))
    bits = single.view(np.uint32)  # finite: nothing here overflows
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)

"""Numbers that are the same bytes on every machine: input values of cases, and signs.

A counter-based generator: element i of a tensor is a hash of (seed, i), by SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, the finaliser) in 64-bit
integer arithmetic; a normal value is the sum of twelve 20-bit uniforms less its mean (Irwin-Hall:
mean 0, variance 1 after division by 2^20), an integer below 2^24 and so exact in float32. What
follows are additions, products and quotients, which IEEE 754 rounds in one way only. The last step
rounds to the dtype to nearest even, by integer operations for bfloat16: a vector unit may flush the
subnormals that are meant here.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.arrays import as_tensor, rounded

if TYPE_CHECKING:
    from torch import Tensor

OUTLIER_FACTOR = 1000.0
_OUTLIER_PERIOD, _OUTLIER_FIRST = 43, 5
"""Every 43rd channel from the sixth on: three in a row of 129, twelve of 512."""


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
    """Say which channels of ``size`` are massive."""
    return slice(min(_OUTLIER_FIRST, size - 1), None, _OUTLIER_PERIOD)


def to_tensor(x: np.ndarray, dtype: str) -> Tensor:
    """Round float64 values to ``dtype``, to nearest even, subnormals kept."""
    import torch

    if dtype in ("float64", "float16", "bfloat16"):
        return as_tensor(rounded(np.ascontiguousarray(x), dtype))
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(getattr(torch, dtype))


def signs(count: int, num: int, start: int = 0) -> np.ndarray:
    """(count, num) of -1 and 1, float32, by place: sums with them tell vectors from one another."""
    mixed = np.arange(start + 1, start + count + 1, dtype=np.int64) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = mixed ^ (mixed >> 27)
    bits = mixed[:, None] >> np.arange(20, 20 + num)
    return ((bits & 1) * 2 - 1).astype(np.float32)

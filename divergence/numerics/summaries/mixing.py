"""The integer mixer from which every constant of digests and sketches is made.

splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
n-th output of a stream is a bijective mix of seed + (n + 1) · the golden gamma, all modulo 2^64.
Constants are computed on the host with integers and only then moved, so they are bit-identical on
every machine whatever its arithmetic does.
"""

from __future__ import annotations

import numpy as np

__all__ = ["MASK64", "mixed", "stream"]

MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(value: int) -> int:
    """One number of 64 bits, mixed; a bijection."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * _FIRST) & MASK64
    value = ((value ^ (value >> 27)) * _SECOND) & MASK64
    return value ^ (value >> 31)


def stream(seed: int, count: int, *, start: int = 0) -> np.ndarray:
    """Numbers ``start`` to ``start + count - 1`` of the stream ``seed``, uint64: the n-th is
    ``mixed(seed + (n + 1) * gamma)``."""
    with np.errstate(over="ignore"):
        at = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        value = at * np.uint64(_GAMMA) + np.uint64(seed & MASK64)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
        return value ^ (value >> np.uint64(31))

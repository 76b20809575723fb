"""Signs that are the same on every machine: sums with them tell vectors from one another."""

from __future__ import annotations

import numpy as np


def signs(count: int, num: int, start: int = 0) -> np.ndarray:
    """(count, num) of -1 and 1, float32, by place alone (splitmix64's first rounds)."""
    mixed = np.arange(start + 1, start + count + 1, dtype=np.int64) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = mixed ^ (mixed >> 27)
    bits = mixed[:, None] >> np.arange(20, 20 + num)
    return ((bits & 1) * 2 - 1).astype(np.float32)

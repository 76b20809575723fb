"""What each rank puts in: the same bytes on every machine, made of (values, rank, size) alone.

``random``       nearly normal, variance about 1, every digit of the significand in use
``cancelling``   ranks 2k and 2k + 1 differ in sign and, by up to 2^-8, in size: the sum loses its
                 leading digits. The last of an odd number of ranks holds values 2^-12 as big
``outlier``      random, and every 43rd element of one rank (another for each) times 1000
``subnormal``    below the dtype's smallest normal value: are they flushed to zero?
``integers``     so small that every partial sum is exact, in whatever order: any other bit is wrong
``rank_coded``   where ranks are added, rank r puts in 2^r, so that the binary digits of a result
                 tell whose terms are in it (element e codes only some ranks, where there are more
                 than the significand has digits). Where nothing is added, another number for each
                 piece of each rank
"""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np
import torch

from divergence.numerics.formats import format_named
from divergence.ops.suite.definition import OUTLIER_FACTOR, integers, normal, outlier_channels
from divergence.ops.suite.definition import to_tensor as to_16_or_32

__all__ = ["ROUNDED", "Values", "coded_ranks", "draw"]

Values = Literal["random", "cancelling", "outlier", "subnormal", "integers", "rank_coded"]

ROUNDED = ("random", "cancelling", "outlier", "subnormal")
"""Values whose sums are rounded; of the others every sum is exact."""

_SUBNORMAL_EXPONENT = {"float64": -1030, "float32": -130, "bfloat16": -130, "float16": -18}


def draw(
    values: Values, dtype: str, size: int, *, rank: int, num_ranks: int, adds: bool = True
) -> torch.Tensor:
    """(size,): what ``rank`` of ``num_ranks`` puts in. ``adds``: are the ranks' values added?"""
    form = format_named(dtype)
    if form.kind != "float":
        return _integral(values, dtype, size, rank=rank, num_ranks=num_ranks)
    name, digits = f"collective.{rank}", form.mantissa_bits + 1
    if values == "integers":
        most = max(1, 2**digits // max(1, num_ranks) // 2)
        x = integers(name, (size,), -min(most, 2**20), min(most, 2**20) + 1).astype(np.float64)
    elif values == "rank_coded":
        x = _coded(size, digits, rank=rank, num_ranks=num_ranks, adds=adds)
    elif values == "cancelling":
        x = _cancelling(size, rank, num_ranks)
    else:
        x = _full(name, size)
        if values == "outlier":
            mine = np.zeros(size, dtype=bool)
            mine[outlier_channels(size)] = True
            x[mine & (np.arange(size) % num_ranks == rank)] *= OUTLIER_FACTOR
        elif values == "subnormal":
            x = np.ldexp(x, _SUBNORMAL_EXPONENT.get(dtype, -130))
    return _to_tensor(x, dtype)


def coded_ranks(element: int, dtype: str, num_ranks: int) -> range:
    """Which ranks put something into ``element`` of rank-coded terms; the first of them 1, the
    next 2, then 4."""
    digits = format_named(dtype).mantissa_bits + 1
    groups = -(-num_ranks // digits)
    first = element % groups * digits
    return range(first, min(first + digits, num_ranks))


def _full(name: str, size: int) -> np.ndarray:
    """Nearly normal values whose significands fill float64: ``normal`` alone lies on a grid of
    2^-20, on which few ranks' sums are exact. Products of two float64 are rounded in one way."""
    factors = [1.0 + np.abs(normal(f"{name}.{k}", (size,))) / 16.0 for k in (1, 2)]
    x: np.ndarray = normal(name, (size,)) * factors[0] * factors[1]
    return x


def _coded(size: int, digits: int, *, rank: int, num_ranks: int, adds: bool) -> np.ndarray:
    if not adds:
        pieces = np.arange(size) * num_ranks // max(1, size)
        codes: np.ndarray = 1.0 + (rank * num_ranks + pieces) % (2**digits - 1)
        return codes
    groups = -(-num_ranks // digits)
    group, place = divmod(rank, digits)
    return np.where(np.arange(size) % groups == group, 2.0**place, 0.0)


def _cancelling(size: int, rank: int, num_ranks: int) -> np.ndarray:
    base = _full(f"collective.pair.{rank // 2}", size)
    if rank % 2:  # |normal| <= 6, so by less than 2^-7
        other: np.ndarray = -base * (1.0 + np.abs(normal(f"collective.{rank}", (size,))) / 2.0**10)
        return other
    return base / 2.0**12 if rank == num_ranks - 1 else base.copy()


def _integral(values: Values, dtype: str, size: int, *, rank: int, num_ranks: int) -> torch.Tensor:
    """Integers: sums fit, whatever the order."""
    name = f"collective.{zlib.crc32(values.encode())}.{rank}"
    kind = getattr(torch, dtype)
    most = min(torch.iinfo(kind).max // max(1, num_ranks), 2**20)
    low = 0 if torch.iinfo(kind).min == 0 else -most
    return torch.from_numpy(integers(name, (size,), low, most + 1)).to(kind)


def _to_tensor(x: np.ndarray, dtype: str) -> torch.Tensor:
    """float64 → ``dtype``, to nearest even."""
    if dtype == "float64":
        return torch.from_numpy(np.ascontiguousarray(x))
    if dtype in ("float32", "bfloat16", "float16"):
        return to_16_or_32(x, dtype)
    return to_16_or_32(x, "float32").to(getattr(torch, dtype))

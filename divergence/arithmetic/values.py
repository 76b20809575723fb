"""Inputs that are the same bytes on every machine.

Made of the raw output of PCG64, which numpy guarantees for a seed (NEP 19; its distributions are
not), by shifts and exact scalings alone. Signs, significands and a few exponents are uniform:
enough exponents that sums in float32 round at nearly every step, also of 16-bit terms.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.formats import format_of

if TYPE_CHECKING:
    import torch

__all__ = ["cancelling", "exact_values", "permutation"]

_LOWEST = {"float16": -12, "bfloat16": -16, "float32": -4}
"""Exponents go from here to _HIGHEST: a product of two float16 stays normal."""
_HIGHEST = {"float16": 3, "bfloat16": 4, "float32": 0}


@functools.lru_cache(maxsize=16)  # the same values go through many operators; nobody writes to them
def exact_values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uniform signs, significands and exponents; never 0, subnormal or infinite."""
    import torch

    form = format_of(dtype)
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    bits = form.mantissa_bits
    significand = 1 + (raw >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits
    low = _LOWEST.get(form.name, -4)
    span = np.uint64(_HIGHEST.get(form.name, 0) - low + 1)
    exponent = low + ((raw & np.uint64(0xFFFF)) % span).astype(np.int64)
    sign = np.where(raw >> np.uint64(16) & np.uint64(1), -1.0, 1.0)
    values = sign * np.ldexp(significand, exponent)
    return torch.from_numpy(values.reshape(shape)).to(dtype)  # exact: bits + 1 digits


def permutation(seed: int, length: int) -> np.ndarray:
    """A fixed shuffle of 0 … length-1."""
    return np.argsort(np.random.PCG64(seed).random_raw(length), kind="stable")


def cancelling(
    seed: int, leaves: torch.Tensor, partner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(leaves, partner) changed so that every exact sum over the last axis is 0.

    Terms are paired off by a fixed shuffle, one being minus the other. What an operator then
    returns is its rounding errors alone, which a 16-bit output would otherwise hide.
    """
    shuffled = permutation(seed, leaves.shape[-1])
    half = len(shuffled) // 2
    one, other = shuffled[:half], shuffled[half : 2 * half]
    leaves, partner = leaves.clone(), partner.clone()
    leaves[..., other] = -leaves[..., one]
    partner[..., other] = partner[..., one]
    if len(shuffled) % 2:
        leaves[..., shuffled[-1]] = 0
    return leaves, partner

"""Operators that sum, as one kind of thing: so many terms, so many sums in one call.

``call(leaves, partner)``: leaves (S, n) are the terms of S sums, partner (M, n) what they are
multiplied with; the answer is (M, S), [m, s] = Σ_k partner[m, k] · leaves[s, k]. A plain sum has
no partner (M = 1). Where the real operator has another layout, ``call`` brings the terms there and
the answer back, so that the probes see one form, on a machine and in a simulation alike.

Kernels are chosen by shape, so a finding names the shape: n terms (K), M rows, N columns.

Values are the same bytes on every machine, made of the raw output of PCG64, which numpy guarantees
for a seed (NEP 19; its distributions are not), by shifts and exact scalings alone. Signs,
significands and a few exponents are uniform: enough exponents that sums in float32 round at nearly
every step, also of 16-bit terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from divergence.numerics.formats import format_of

__all__ = [
    "COLUMNS", "Summing", "attention", "cancelling", "exact_values", "linear", "matmul", "sdpa",
    "summing",
]  # fmt: skip

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

COLUMNS = 64
"""Sums in one call: wide enough that no kernel for narrow matrices is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing:
    """One operator at one shape. ``rows``: M; ``columns``: S; ``products``: has a partner.
    ``even``: its terms are weighted by 1/n inside, which is exact for n a power of two."""

    name: str
    shape: str
    dtype: torch.dtype
    terms: int
    rows: int = 1
    columns: int = COLUMNS
    products: bool = True
    even: bool = False
    call: Call

    @property
    def title(self) -> str:
        """``linear M=1 K=512 N=64 bfloat16``."""
        return f"{self.name} {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def values(self, seed: int, *, alike: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact (leaves, partner); the partner is 1 where there is none. ``alike``: one row of
        each, as if all sums had the same terms."""
        columns, rows = (1, 1) if alike else (self.columns, self.rows)
        leaves = exact_values(seed, (columns, self.terms), self.dtype)
        if self.products:
            return leaves, exact_values(seed + 1, (rows, self.terms), self.dtype)
        return leaves, torch.ones(rows, self.terms, dtype=self.dtype)


def summing(terms: int, dtype: torch.dtype, device: str = "cpu") -> Summing:
    """torch.sum over the last axis."""

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        return leaves.to(device).sum(-1)[None].cpu()

    return Summing(
        name="sum", shape=f"rows={COLUMNS} n={terms}", dtype=dtype, terms=terms, products=False,
        call=call,
    )  # fmt: skip


def linear(terms: int, dtype: torch.dtype, device: str = "cpu", *, rows: int = 1) -> Summing:
    """torch.nn.functional.linear: weights (N, K) in the layout that models keep them in."""

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        weight, x = leaves.to(device), partner.to(device)
        return torch.nn.functional.linear(x, weight).cpu()

    return Summing(
        name="linear", shape=f"M={rows} K={terms} N={COLUMNS}", dtype=dtype, terms=terms,
        rows=rows, call=call,
    )  # fmt: skip


def matmul(terms: int, dtype: torch.dtype, device: str = "cpu", *, rows: int = 64) -> Summing:
    """torch.matmul of (M, K) and (K, N), both row-major."""

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        b = leaves.to(device).T.contiguous()
        return torch.matmul(partner.to(device), b).cpu()

    return Summing(
        name="matmul", shape=f"M={rows} K={terms} N={COLUMNS}", dtype=dtype, terms=terms,
        rows=rows, call=call,
    )  # fmt: skip


def attention(terms: int, dtype: torch.dtype, device: str = "cpu", *, rows: int = 16) -> Summing:
    """P @ V of eager attention, batched over heads: (H, T, n) and (H, n, D)."""
    heads = 2

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        size = COLUMNS // heads
        v = leaves.to(device).view(heads, size, terms).transpose(1, 2).contiguous()  # (H, n, D)
        p = partner.to(device).expand(heads, -1, -1).contiguous()  # (H, T, n)
        return torch.matmul(p, v).transpose(0, 1).reshape(len(partner), COLUMNS).cpu()

    return Summing(
        name="attention P@V", shape=f"heads={heads} T={rows} n={terms} D={COLUMNS // heads}",
        dtype=dtype, terms=terms, rows=rows, call=call,
    )  # fmt: skip


def sdpa(terms: int, dtype: torch.dtype, device: str = "cpu", *, rows: int = 1) -> Summing:
    """scaled_dot_product_attention with queries of 0: every weight is exp(0) = 1, so V is summed.

    ``terms``: a power of two, so that the division by their sum is exact.
    """
    heads = 2

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        size = COLUMNS // heads
        v = leaves.to(device).view(1, heads, size, terms).transpose(2, 3).contiguous()
        q = torch.zeros(1, heads, rows, size, dtype=dtype, device=device)
        k = torch.ones(1, heads, terms, size, dtype=dtype, device=device)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)  # (1, H, T, D)
        return out[0].transpose(0, 1).reshape(rows, COLUMNS).cpu()

    return Summing(
        name="sdpa V", shape=f"heads={heads} T={rows} n={terms} D={COLUMNS // heads}",
        dtype=dtype, terms=terms, rows=rows, products=False, even=True, call=call,
    )  # fmt: skip


_LOWEST = {"float16": -12, "bfloat16": -16, "float32": -4}
"""Exponents go from here to _HIGHEST: a product of two float16 stays normal."""
_HIGHEST = {"float16": 3, "bfloat16": 4, "float32": 0}


@functools.lru_cache(maxsize=16)  # the same values go through many operators; nobody writes to them
def exact_values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uniform signs, significands and exponents; never 0, subnormal or infinite."""
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


def cancelling(
    seed: int, leaves: torch.Tensor, partner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(leaves, partner) changed so that every exact sum over the last axis is 0.

    Terms are paired off by a fixed shuffle, one being minus the other. What an operator then
    returns is its rounding errors alone, which a 16-bit output would otherwise hide.
    """
    shuffled = np.argsort(np.random.PCG64(seed).random_raw(leaves.shape[-1]), kind="stable")
    half = len(shuffled) // 2
    kept, other = shuffled[:half], shuffled[half : 2 * half]
    leaves, partner = leaves.clone(), partner.clone()
    leaves[..., other] = -leaves[..., kept]
    partner[..., other] = partner[..., kept]
    if len(shuffled) % 2:
        leaves[..., shuffled[-1]] = 0
    return leaves, partner

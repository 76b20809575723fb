"""Operators that sum, as one kind of thing: so many terms, so many sums in one call.

``call(leaves, partner)``: leaves (S, n) are the terms of S sums, partner (M, n) what they are
multiplied with; the answer is (M, S), [m, s] = Σ_k partner[m, k] · leaves[s, k]. A plain sum has
no partner (M = 1). Where the real operator has another layout, ``call`` brings the terms there and
the answer back, so that the probes see one form, on a machine and in a simulation alike.

Kernels are chosen by shape, so a finding names the shape: n terms (K), M rows, N columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["COLUMNS", "Summing", "attention", "linear", "matmul", "sdpa", "summing"]

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

"""Matrix units in software, so that the probes can be held against arithmetic that is known.

A unit of width w multiplies w pairs exactly, aligns the products and the sum so far to the largest
exponent among them, cuts each off after f fraction bits, adds them exactly and cuts the result off
to float32. f is 23 on Volta, 24 on Turing, Ampere and Ada, 25 on Hopper (Fasi et al., PeerJ Comput.
Sci. 7:e330, 2021; Li et al., "FTTN: Feature-Targeted Testing for Numerical Properties of NVIDIA &
AMD Matrix Accelerators", CCGrid 2024, arXiv 2403.00232). Inputs of an "fp32" product may keep 10
bits (TF32) or 7 (bfloat16), cut off or rounded.

No answer about a real machine comes from here.
"""

import numpy as np
import torch

from divergence.domains.probe.additions import COLUMNS, Summing, keep_bits
from divergence.numerics.formats import format_of

__all__ = ["matrix_unit"]


def matrix_unit(
    terms: int,
    dtype: torch.dtype,
    *,
    width: int,
    fraction_bits: int,
    cut: bool = True,
    input_bits: int | None = None,
    cut_inputs: bool = True,
    splits: int = 1,
    rows: int = 1,
    columns: int = COLUMNS,
) -> Summing:
    """A linear operator on such a unit, one block of ``width`` terms after the other.

    ``splits``: so many parts of the terms are summed apart, and their sums added in float32,
    rounded to nearest, as a split-K kernel does.
    """

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        a, b = leaves.double().numpy(), partner.double().numpy()
        if input_bits is not None:
            a = keep_bits(a, input_bits, cut=cut_inputs)
            b = keep_bits(b, input_bits, cut=cut_inputs)
        whole = None
        for part in np.array_split(np.arange(terms), splits):
            total = np.zeros((len(b), len(a)))
            for start in range(int(part[0]), int(part[-1]) + 1, width):
                block = slice(start, start + width)
                products = b[:, None, block] * a[None, :, block]  # (M, S, w): exact in float64
                joined = np.concatenate([total[:, :, None], products], axis=2)
                total = _fused(joined, fraction_bits, cut=cut)
            mine = total.astype(np.float32)  # exact
            whole = mine if whole is None else whole + mine
        return torch.from_numpy(whole).to(dtype)

    bits = f"{fraction_bits} bits, {format_of(dtype).name}"
    return Summing(
        name="simulated",
        shape=f"{width} wide, {bits}, M={rows} K={terms} N={columns}",
        dtype=dtype,
        terms=terms,
        rows=rows,
        columns=columns,
        call=call,
    )


def _fused(parts: np.ndarray, fraction_bits: int, *, cut: bool) -> np.ndarray:
    """The last axis in one step: aligned, cut off, added, stored as float32."""
    largest = np.abs(parts).max(axis=-1, keepdims=True)
    _, exponent = np.frexp(np.where(largest == 0, 1.0, largest))
    quantum = np.ldexp(1.0, exponent - 1 - fraction_bits)
    total = (np.trunc(parts / quantum) * quantum).sum(axis=-1)
    return keep_bits(total, 23, cut=cut)

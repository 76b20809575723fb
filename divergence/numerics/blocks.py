"""A tensor as a grid of rows, read in blocks that stay in cache and hold exact floats.

Everything in this room streams: a tensor may be a memory map larger than memory, so
it is never copied whole and never written to. A block is either a view of the
tensor (float32, float64) or its widening into a caller's buffer. bfloat16, float16,
float8, bool and 8/16-bit integers are exact in float32; everything else goes to
float64 (integers beyond 2^53 are rounded there, and nowhere else).

Arithmetic on blocks is numpy's: its loops release the interpreter lock and start no
threads of their own. torch is used where numpy lacks the dtype.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.formats import Format, format_of

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "Grid", "Rows", "column_dots", "compute_dtype", "row_dots"]

BLOCK = 31 * 1024
"""Elements in a block. Four float32 buffers of it fit a core's L2, and torch starts no threads
below its grain size of 32768 (a parallel region costs more than the block, and stalls for
milliseconds on a busy machine)."""

_SEGMENT = 1024
"""Longest run of products summed in the block's own precision; longer sums are carried on in
float64. BLAS' dot keeps at least four running sums, so float32 stays near 2^-24 · sqrt(256)."""

_BY_TORCH = {"bfloat16", "float16"}  # numpy converts its float16 ten times slower than torch

Rows = slice | np.ndarray
"""Which rows of a grid: a slice, or row numbers where a mask leaves gaps."""


class Grid:
    """A tensor read as ``num_rows`` rows (product of the leading dims) of ``num_cols``.

    A 0-d tensor is one row of one. Complex tensors are read as their components,
    interleaved (``width`` 2): norms and inner products over components are those of the
    complex vector, real part.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        self.format: Format = format_of(tensor.dtype)
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        self.width = 1
        if self.format.kind == "complex":
            tensor = torch.view_as_real(tensor.resolve_conj()).flatten(-2)
            self.width = 2
        tensor = tensor.resolve_neg().contiguous()
        self.num_cols = tensor.shape[-1] if tensor.ndim else 1
        self.num_rows = math.prod(tensor.shape[:-1])
        self.torch = tensor.view(self.num_rows, self.num_cols)
        size = self.torch.element_size()
        name = self.format.name
        if name in _BY_TORCH or name.startswith("float8"):
            self._values = None
            self.bits = self.torch.view(torch.int16 if size == 2 else torch.uint8).numpy()
        else:
            self._values = self.torch.numpy()
            self.bits = self._values if name == "bool" else self._values.view(f"i{size}")

    def load(self, rows: Rows, cols: slice, out: np.ndarray) -> np.ndarray:
        """The block ``[rows, cols]`` in ``out``'s dtype: a view where that is the tensor's
        own (never write to the result), else widened into the flat buffer ``out``."""
        if self._values is not None and self._values.dtype == out.dtype:
            return self._values[rows, cols]
        if self._values is None:
            import torch

            part = self.torch[rows, cols]
            block = out[: part.numel()].reshape(part.shape)
            torch.from_numpy(block).copy_(part)
        else:
            values = self._values[rows, cols]
            block = out[: values.size].reshape(values.shape)
            np.copyto(block, values, casting="unsafe")
        return block


def compute_dtype(*formats: Format) -> type[np.float32] | type[np.float64]:
    """float32 if it holds every value of all formats, else float64."""
    for form in formats:
        if form.kind in ("int", "bool"):
            exact = form.itemsize <= 2
        else:
            exact = form.mantissa_bits <= 23
        if not exact:
            return np.float64
    return np.float32


def _einsum_dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.einsum("...j,...j->...", x, y)


_vecdot = getattr(np, "vecdot", _einsum_dot)  # numpy >= 2.0: one BLAS dot per row


def row_dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ_j x[i, j] y[i, j] per row, float64 across segments of 1024, exact to 1e-6 of
    Σ|x y| (float32) or 1e-15 (float64)."""
    rows, cols = x.shape
    if cols == 1:
        return (x[:, 0] * y[:, 0]).astype(np.float64)
    if cols <= _SEGMENT:
        return _vecdot(x, y).astype(np.float64)
    whole = cols - cols % _SEGMENT
    parts = (rows, whole // _SEGMENT, _SEGMENT)  # splitting the last axis copies nothing
    sums = _vecdot(x[:, :whole].reshape(parts), y[:, :whole].reshape(parts))
    total = sums.sum(axis=1, dtype=np.float64)
    if whole < cols:
        total += _vecdot(x[:, whole:], y[:, whole:])
    return total


def column_dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ_i x[i, j] y[i, j] per column in float64. Runs of at most 64 rows are summed in the
    block's own precision: taller blocks are folded, k rows side by side."""
    rows, cols = x.shape
    if rows == 1:
        return (x[0] * y[0]).astype(np.float64)
    if rows <= 64:
        return np.einsum("ij,ij->j", x, y).astype(np.float64)
    fold = -(-rows // 64)
    whole = rows - rows % fold
    shape = (whole // fold, fold * cols)
    sums = np.einsum("ij,ij->j", x[:whole].reshape(shape), y[:whole].reshape(shape))
    total = sums.reshape(fold, cols).sum(axis=0, dtype=np.float64)
    if whole < rows:
        total += np.multiply(x[whole:], y[whole:]).sum(axis=0, dtype=np.float64)
    return total

"""A tensor as a grid of rows, read in blocks that stay in cache and hold exact floats.

Everything in this room streams: a tensor may be a memory map larger than memory, so
it is never copied whole and never written to. A block is either a view of the
tensor (float32, float64) or its widening into a caller's buffer. bfloat16, float16,
float8, bool and 8/16-bit integers are exact in float32; everything else goes to
float64 (integers beyond 2^53 are rounded there, and nowhere else).

Arithmetic on blocks is numpy's: its loops release the interpreter lock and start no
threads of their own. torch is used where numpy lacks the dtype.

``run_split`` shares blocks out between threads: numpy's loops release the interpreter lock, so
threads scale. torch's own threads are left alone (a parallel region per 31k elements costs more
than the work).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np

from divergence.numerics.formats import Format, format_of

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "Grid", "Rows", "column_dots", "columns_of_many", "compute_dtype",
           "row_dots", "run_split"]  # fmt: skip


BLOCK = 128 * 1024
"""Elements in a block: large enough that calling numpy (about 40 us a block) costs little, small
enough for a core's caches."""

_TORCH_GRAIN = 32768
"""Below this many elements torch starts no threads of its own (at::internal::GRAIN_SIZE): a
parallel region costs more than it saves here, and stalls for milliseconds on a busy machine."""

_SEGMENT = 2048
"""Longest run of products summed in the block's own precision; longer sums are carried on in
float64. BLAS' dot keeps at least 16 running sums, so float32 stays near 2^-24 · sqrt(128)."""

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
        self.scale = 1.0  # float64 only: a power of two that load() multiplies by
        self.width = 1
        if self.format.kind == "complex":
            tensor = torch.view_as_real(tensor.resolve_conj()).flatten(-2)
            self.width = 2
        tensor = tensor.resolve_neg().contiguous()
        self.num_cols = tensor.shape[-1] if tensor.ndim else 1
        self.num_rows = math.prod(tensor.shape[:-1])
        self.torch = tensor.view(self.num_rows, self.num_cols)
        self.bits, self._values = _views(self.torch, self.format.name)

    def load(self, rows: Rows, cols: slice, out: np.ndarray) -> np.ndarray:
        """The block ``[rows, cols]`` in ``out``'s dtype: a view where that is the tensor's
        own (never write to the result), else widened into the flat buffer ``out``."""
        if self._values is not None and self._values.dtype == out.dtype:
            values = self._values[rows, cols]
            return values if self.scale == 1.0 else values * self.scale
        source = self.bits if self._values is None else self._values
        part = source[rows, cols]
        block = out[: part.size].reshape(part.shape)
        if self._values is not None:
            np.copyto(block, part, casting="unsafe")
        elif self.format.name == "bfloat16" and out.dtype == np.float32:
            # bfloat16 is the upper half of a float32.
            np.left_shift(part, 16, out=block.view(np.int32), dtype=np.int32)
        else:
            self._widen_by_torch(part, block)
        return block if self.scale == 1.0 else np.multiply(block, self.scale, out=block)

    def _widen_by_torch(self, part: np.ndarray, block: np.ndarray) -> None:
        import torch

        part = part.reshape(-1) if part.flags.c_contiguous else part.ravel()
        stored, flat = torch.from_numpy(part).view(self.torch.dtype), block.reshape(-1)
        for start in range(0, len(flat), _TORCH_GRAIN):
            piece = slice(start, start + _TORCH_GRAIN)
            torch.from_numpy(flat[piece]).copy_(stored[piece])

    def at(self, flat: int) -> float:
        """One element by its row-major number, unscaled."""
        return float(self.torch[divmod(flat, self.num_cols)])


def _views(tensor: torch.Tensor, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """numpy's views of the bit patterns and, where numpy should read the dtype, the values."""
    import torch

    # numpy has float16, but converts it ten times slower than torch.
    if name in ("bfloat16", "float16"):
        return tensor.view(torch.int16).numpy(), None
    if name.startswith("float8"):
        return tensor.view(torch.uint8).numpy(), None
    values = tensor.numpy()
    return values if name == "bool" else values.view(f"i{values.itemsize}"), values


def compute_dtype(*formats: Format) -> type[np.float32] | type[np.float64]:
    """float32 if it holds every value of all formats, else float64."""
    for form in formats:
        integral = form.kind in ("int", "bool")
        if (form.itemsize > 2) if integral else (form.mantissa_bits > 23):
            return np.float64
    return np.float32


def _einsum_dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.einsum("...j,...j->...", x, y)
    return sums


# numpy >= 2.0: one BLAS dot per row
_vecdot: Callable[[np.ndarray, np.ndarray], np.ndarray] = getattr(np, "vecdot", _einsum_dot)


def row_dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ_j x[i, j] y[i, j] per row, float64 across segments of 2048, exact to 1e-6 of
    Σ|x y| (float32) or 1e-15 (float64)."""
    rows, cols = x.shape
    if cols == 1:
        return np.asarray(x[:, 0] * y[:, 0], np.float64)
    if cols <= _SEGMENT:
        return _vecdot(x, y).astype(np.float64)
    whole = cols - cols % _SEGMENT
    parts = (rows, whole // _SEGMENT, _SEGMENT)  # splitting the last axis copies nothing
    sums = _vecdot(x[:, :whole].reshape(parts), y[:, :whole].reshape(parts))
    total: np.ndarray = sums.sum(axis=1, dtype=np.float64)
    if whole < cols:
        total += _vecdot(x[:, whole:], y[:, whole:])
    return total


def _column_sums(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.einsum("ij,ij->j", x, y)
    return sums


def column_dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ_i x[i, j] y[i, j] per column in float64. Runs of at most 64 rows are summed in the
    block's own precision: taller blocks are folded, k rows side by side."""
    rows, cols = x.shape
    if rows == 1:
        return np.asarray(x[0] * y[0], np.float64)
    if rows <= 64:
        return _column_sums(x, y).astype(np.float64)
    fold = -(-rows // 64)
    whole = rows - rows % fold
    shape = (whole // fold, fold * cols)
    sums = _column_sums(x[:whole].reshape(shape), y[:whole].reshape(shape))
    total: np.ndarray = sums.reshape(fold, cols).sum(axis=0, dtype=np.float64)
    if whole < rows:
        total += np.multiply(x[whole:], y[whole:]).sum(axis=0, dtype=np.float64)
    return total


def columns_of_many(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``column_dots`` of each of N blocks, (N, T, D) → (N, D)."""
    if x.shape[1] == 1:
        return np.asarray((x * y)[:, 0], np.float64)
    if x.shape[1] <= 64:
        sums: np.ndarray = np.einsum("nij,nij->nj", x, y)
        return sums.astype(np.float64)
    return np.array([column_dots(*block) for block in zip(x, y, strict=True)])


class Divisible(Protocol):
    """What is shared out: a list, range or array; a part of it is one too, items in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


Items = TypeVar("Items", bound=Divisible)
Result = TypeVar("Result")


def run_split(work: Callable[[Items], Result], items: Items, *, threads: int) -> list[Result]:
    """``work`` on ``threads`` contiguous parts of ``items``; results in the items' order."""
    threads = max(1, min(threads, len(items)))
    edges = [len(items) * number // threads for number in range(threads + 1)]
    parts = [items[edges[number] : edges[number + 1]] for number in range(threads)]
    if threads == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))

"""A tensor as a flat sequence of blocks that stay in cache, widened to an exact float.

Everything in this room streams: a tensor may be a memory map larger than memory, so
it is never copied whole and never written to. A block is either a view of the
tensor (float32, float64) or its widening into a caller's buffer. bfloat16, float16,
float8, bool and 8/16-bit integers are exact in float32; everything else goes to
float64 (integers beyond 2^53 are rounded there, and nowhere else).

Arithmetic on blocks is numpy's: its loops release the interpreter lock and start no
threads of their own. torch is used where numpy lacks the dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from divergence.numerics.formats import Format, format_of

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "Flat", "compute_dtype"]

BLOCK = 32768
"""Elements in a block. float32 blocks of it fit a core's L2 four times over; torch starts
no threads for copies up to this size (its grain size)."""

_TORCH_ONLY = {"bfloat16", "float16"}  # numpy has float16, but converts it ten times slower


class Flat:
    """A tensor read as a flat row-major sequence of real numbers.

    Complex tensors are read as their components, interleaved (``width`` 2): norms and
    inner products over components are those of the complex vector.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        self.format: Format = format_of(tensor.dtype)
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        self.width = 1
        if self.format.kind == "complex":
            tensor = torch.view_as_real(tensor.resolve_conj())
            self.width = 2
        self.torch = tensor.resolve_neg().contiguous().reshape(-1)
        self.numel = self.torch.numel()
        name = self.format.name
        self._by_torch = name in _TORCH_ONLY or name.startswith("float8")
        size = self.torch.element_size()
        if self._by_torch:
            # The bit patterns; numpy has no such float.
            self.bits = self.torch.view(torch.int16 if size == 2 else torch.uint8).numpy()
            self._values = None
        else:
            self._values = self.torch.numpy()
            self.bits = self._values.view(f"i{size}") if name != "bool" else self._values

    def load(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Elements [start, stop) in ``out``'s dtype: a view where that is the tensor's own
        (never write to the result), else widened into ``out``."""
        if self._values is not None and self._values.dtype == out.dtype:
            return self._values[start:stop]
        block = out[: stop - start]
        if self._values is None:
            import torch

            torch.from_numpy(block).copy_(self.torch[start:stop])
        else:
            np.copyto(block, self._values[start:stop], casting="unsafe")
        return block


def compute_dtype(*formats: Format) -> type[np.float32] | type[np.float64]:
    """float32 if it holds every value of all formats, else float64."""
    for form in formats:
        exact = form.mantissa_bits <= 23 if form.kind in ("float", "complex") else (
            form.itemsize <= 2
        )
        if not exact:
            return np.float64
    return np.float32

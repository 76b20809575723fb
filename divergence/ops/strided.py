"""Layout: a tensor laid out in memory as the operator saw it.

Kernels are chosen by layout, and so is the order of their additions: a matrix product with
a transposed operand is another kernel than with a contiguous one. So recorded values, which lie
contiguous on disk, are put back under the strides that the operator saw. Axes that share memory
(an expanded one has stride 0) share it again.

Always fresh memory, as torch's allocator aligns it: a memory map is aligned to 8 bytes, and
vector kernels look at that too. What is not restored: where in its storage a view began.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from divergence.ops.refusal import Refusal

__all__ = ["laid_out", "span_of"]

SPAN_BYTES = 1 << 30
"""A layout may span this much memory, or ``SPAN_RATIO`` times what the values take."""
SPAN_RATIO = 64


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both counted; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def laid_out(
    values: torch.Tensor, stride: Sequence[int] | None, *, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A fresh copy of ``values`` on ``device`` under ``stride`` (None: contiguous)."""
    shape = tuple(values.shape)
    if stride is None or 0 in shape:
        fresh = torch.empty(shape, dtype=values.dtype, device=device)
        fresh.copy_(values)
        return fresh
    if len(stride) != len(shape):
        raise Refusal("its operands' layout is damaged", detail=f"{stride} for shape {shape}")
    span = span_of(shape, stride)
    if span * values.itemsize > max(SPAN_BYTES, SPAN_RATIO * values.nbytes):
        raise Refusal("its operands' layout spans too much memory", detail=f"{span} elements")
    memory = torch.zeros(span, dtype=values.dtype, device=device)
    if not _overlaps(shape, stride):
        memory.as_strided(shape, stride).copy_(values)
        return memory.as_strided(shape, stride)
    # Elements that share memory: all of them hold the same value, so any may be the last written.
    places = torch.zeros(shape, dtype=torch.int64)
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        view = [1] * len(shape)
        view[axis] = size
        places += (torch.arange(size) * step).reshape(view)
    places = places.reshape(-1).to(device)
    memory[places] = values.reshape(-1).to(device)
    return memory.as_strided(shape, stride)


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """May two elements lie at one place? (Sorted by stride, each axis must step over the last.)"""
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False

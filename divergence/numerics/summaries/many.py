"""Summaries of many tensors at once.

A decode step leaves many small tensors of one shape. Summarised one by one, each costs
more interpreter time than arithmetic; stacked, they share it. The arithmetic is that of
summarize(): a row whose values are not all finite, or whose squares could leave float32's or
float64's range, goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from divergence.numerics.formats import format_of
from divergence.numerics.kernels import Kernel
from divergence.numerics.summaries.summary import Summary, summarize, summarize_rows

if TYPE_CHECKING:
    import torch

__all__ = ["summarize_many"]

_BLOCK_ELEMENTS = 1 << 15
_SMALL_ELEMENTS = 1 << 13
_SAFE_LOW, _SAFE_HIGH = 2.0**-400, 2.0**400  # squares of float64 stay normal
_STACKED = frozenset({"float64", "float32", "float16", "bfloat16"})


def summarize_many(tensors: Sequence[torch.Tensor], *, kernel: Kernel = "numpy") -> list[Summary]:
    """``[summarize(t) for t in tensors]``, faster where many are small and alike; CPU tensors.

    mean and rms of a tensor have the same bits whatever it is summarised with; those of
    ``summarize`` may differ in the last digits of the tensor's compute dtype.
    """
    results: list[Summary | None] = [None] * len(tensors)
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if 0 < tensor.numel() <= _SMALL_ELEMENTS and format_of(tensor.dtype).name in _STACKED:
            groups.setdefault((tensor.dtype, tensor.numel()), []).append(index)
    for (_, numel), indices in groups.items():
        rows = max(1, _BLOCK_ELEMENTS // numel)
        for start in range(0, len(indices), rows):
            part = indices[start : start + rows]
            # one alone too: the last digits must not depend on how many happened to wait
            found = _stacked([tensors[index] for index in part], kernel)
            for index, summary in zip(part, found, strict=True):
                results[index] = summary
    return [
        summarize(tensor, kernel=kernel) if found is None else found
        for tensor, found in zip(tensors, results, strict=True)
    ]


def _stacked(tensors: list[torch.Tensor], kernel: Kernel) -> list[Summary | None]:
    """One summary a tensor; None where it needs the careful way."""
    import numpy as np
    import torch

    flat = [tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors]
    stack = torch.stack(flat).detach()
    if kernel == "compiled":
        from divergence.numerics.pairs.blocks import Grid

        return summarize_rows(Grid(stack))
    x = stack.to(torch.float64).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = x.min(axis=1), x.max(axis=1)
        top = np.maximum(np.abs(low), np.abs(high))
        plain = np.isfinite(low) & np.isfinite(high) & (top < _SAFE_HIGH)
        plain &= (top > _SAFE_LOW) | (top == 0)
        mean = x.mean(axis=1)
        rms = np.sqrt(np.einsum("ij,ij->i", x, x) / x.shape[1])
        zeros = x.shape[1] - np.count_nonzero(x, axis=1)
    columns = zip(
        plain.tolist(), low.tolist(), high.tolist(), mean.tolist(), rms.tolist(), top.tolist(),
        zeros.tolist(), strict=True,
    )  # fmt: skip
    return [
        Summary(min=a, max=b, mean=m, rms=r, absmax=t, num_zero=z) if ok else None
        for ok, a, b, m, r, t, z in columns
    ]

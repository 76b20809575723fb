"""A tensor's statistics on the device that it lies on: nothing is copied, nothing waited for.

The definition is that of numerics.summaries.summary. Sums run in float64 where the device has
it, and agree with the host's to 1e-12 of the rms; else in float32 over values scaled by the
largest magnitude, to about 1e-6 of the rms, and integers beyond 2^24 are rounded first.
``summaries_of`` brings the numbers of many tensors to the host together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from divergence.numerics.summaries.sketch import sum_dtype_name
from divergence.numerics.summaries.summary import Summary

if TYPE_CHECKING:
    import torch

__all__ = ["statistics_on_device", "summaries_of"]

Statistics = tuple["torch.Tensor", "torch.Tensor"]
"""Floats (min, max, Σx / top, Σ(x / top)², top) and counts (finite, nan, +inf, -inf, zero)."""

_BLOCK = 1 << 25
"""Elements widened at a time: 256 MiB."""


def statistics_on_device(tensor: torch.Tensor) -> Statistics:
    """The numbers of one tensor, where it lies."""
    import torch

    wide = getattr(torch, sum_dtype_name(str(tensor.device)))
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = flat.to(torch.complex128 if wide == torch.float64 else flat.dtype).abs()
    if not len(flat):
        nothing = torch.tensor([math.inf, -math.inf, 0.0, 0.0, 0.0], dtype=wide, device=flat.device)
        return nothing, torch.zeros(5, dtype=torch.int64, device=flat.device)
    pieces = torch.split(flat, _BLOCK)
    low = torch.stack([_extreme(piece.to(wide), math.inf).amin() for piece in pieces]).amin()
    high = torch.stack([_extreme(piece.to(wide), -math.inf).amax() for piece in pieces]).amax()
    top = torch.maximum(low.abs(), high.abs())
    # a scale of 1 where nothing is finite, or all is zero
    scale = torch.where(torch.isfinite(top) & (top > 0), top, torch.ones_like(top))
    sums = torch.stack([_sums(piece.to(wide), scale) for piece in pieces]).sum(0)
    counts = torch.stack([_counts(piece) for piece in pieces]).sum(0)
    return torch.stack([low, high, sums[0], sums[1], scale]), counts


def _extreme(values: torch.Tensor, instead: float) -> torch.Tensor:
    import torch

    return torch.where(torch.isfinite(values), values, instead)


def _sums(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    import torch

    scaled = torch.where(torch.isfinite(values), values, 0.0) / scale
    return torch.stack([scaled.sum(), (scaled * scaled).sum()])


def _counts(piece: torch.Tensor) -> torch.Tensor:
    import torch

    if piece.is_floating_point() and piece.element_size() == 1:
        piece = piece.to(torch.float32)  # float8 has no comparisons of its own
    finite, nan = torch.isfinite(piece), torch.isnan(piece)
    up, down = piece == math.inf, piece == -math.inf
    return torch.stack([one.sum() for one in (finite, nan, up, down, piece == 0)])


def summaries_of(found: Sequence[Statistics]) -> list[Summary]:
    """The summaries, fetched from the device in two transfers."""
    import torch

    if not found:
        return []
    floats = torch.stack([one for one, _ in found]).cpu().tolist()
    counts = torch.stack([one for _, one in found]).cpu().tolist()
    return [_summary(*pair) for pair in zip(floats, counts, strict=True)]


def _summary(floats: list[float], counts: list[int]) -> Summary:
    low, high, total, squares, scale = floats
    count, nan, up, down, zero = counts
    numbers = {"num_nan": nan, "num_posinf": up, "num_neginf": down, "num_zero": zero}
    if not count:
        return Summary(min=None, max=None, mean=None, rms=None, absmax=None, **numbers)
    return Summary(
        min=low, max=high, mean=scale * total / count, rms=scale * math.sqrt(squares / count),
        absmax=max(abs(low), abs(high)), **numbers,
    )  # fmt: skip

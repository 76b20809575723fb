"""What an operator is given fits together: checks that several operators' kernels leave out.

Each raises ValueError with what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Bound = Mapping[str, Any]
"""All arguments of a call by name, defaults too."""


def fits(what: bool, why: str) -> None:
    if not what:
        raise ValueError(why)


def within(index: torch.Tensor, size: int, *, low: int = 0, masks: bool = True) -> None:
    """Every index from ``low`` to ``size - 1``; booleans are masks, not indices, where an operator
    takes ``masks``."""
    if masks and index.dtype in (torch.bool, torch.uint8):
        return
    fits(not index.is_floating_point() and not index.is_complex(), "an index is no integer")
    if index.numel():
        least, most = (int(extreme) for extreme in torch.aminmax(index.to(torch.int64)))
        fits(low <= least and most < size, f"indices {least} to {most} into {size}")


def weights_fit(bound: Bound, shape: tuple[int, ...]) -> None:
    for name in ("weight", "bias"):
        given = bound.get(name)
        fits(given is None or tuple(given.shape) == shape, f"{name} of another shape")


def normalized_axes(bound: Bound) -> tuple[int, ...]:
    """The last axes are normalized, by weights of their shape."""
    shape, given = tuple(bound["normalized_shape"]), tuple(bound["input"].shape)
    fits(0 < len(shape) <= len(given), f"normalized over {len(shape)} axes")
    fits(given[-len(shape) :] == shape, f"normalized over {shape}")
    weights_fit(bound, shape)
    return shape


def same_sequences(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """q (B, H, T, D), k (B, G, S, D), v (B, G, S, E)."""
    fits(len(query) == len(key) == len(value) == 4, "attention takes four axes")
    fits(key[:3] == value[:3], f"keys {tuple(key)} and values {tuple(value)}")
    fits(query[0] == key[0] and query[3] == key[3], f"queries {tuple(query)}, keys {tuple(key)}")


def mask_fits(mask: torch.Tensor | None, wanted: Sequence[int]) -> None:
    """Of the shape (B, H, T, S), or one that is broadcast to it."""
    if mask is not None:
        fits(mask.ndim <= 4, f"a mask of {mask.ndim} axes")
        pairs = zip(reversed(mask.shape), reversed(wanted), strict=False)
        fits(all(a in (1, b) for a, b in pairs), f"a mask {tuple(mask.shape)} for {tuple(wanted)}")

"""Keys and values that go through codes before a cache of transformers holds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from divergence.numerics.quantizers import Quantizer, codes_of, scales_of, values_of

__all__ = ["HELD", "CacheWatch", "QuantizedCache", "cache_of", "running_attention"]

CacheWatch = Callable[[int, str, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(layer, ``k`` or ``v``, codes, what is recorded of them) → the codes to go on with, or None for
the own ones; all (B, heads, T, D)."""


class QuantizedCache:
    """What stands between a model and its caches; a scale for each token and head."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.filled: set[int] = set()
        """The numbers of the layers that filled a cache."""
        self.watch: CacheWatch | None = None
        """Told of the codes of each layer's keys and values, and may give others to go on with."""

    def through(self, layer: int, what: str, x: torch.Tensor) -> torch.Tensor:
        """Keys or values (B, heads, T, D), as the cache is to hold them."""
        self.filled.add(layer)
        wide = x.float()
        scale, zero = scales_of(wide, self.quantizer)
        codes = codes_of(wide, self.quantizer, scale, zero)
        if self.watch is not None:
            told = codes
            if wide.dtype == torch.float64:  # before rounding: how near is a tie?
                told = wide / torch.where(scale == 0, 1.0, scale)
            given = self.watch(layer, what, codes, told)
            codes = codes if given is None else given.to(codes)
        return values_of(codes, self.quantizer, scale, zero).to(x.dtype)


HELD = "_quantized_cache"
"""The attribute of a model that holds what stands before its caches."""


def cache_of(model: nn.Module) -> QuantizedCache | None:
    """What stands before this model's caches."""
    held: QuantizedCache | None = model.__dict__.get(HELD)
    return held


@contextlib.contextmanager
def running_attention(model: nn.Module) -> Iterator[Callable[[int], str | None]]:
    """Gives what tells, of a layer's number in a cache, the path of the attention that fills it:
    the innermost module of that number that runs. Self- and cross-attention of one layer share a
    number."""
    running: list[tuple[str, int]] = []

    def enters(path: str, number: int) -> Callable[..., None]:
        return lambda *_: running.append((path, number))

    def leaves(*_: Any) -> None:
        running.pop()

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int):
                hook = module.register_forward_pre_hook(enters(path, number))
                stack.callback(hook.remove)
                hook = module.register_forward_hook(leaves, always_call=True)
                stack.callback(hook.remove)
        yield lambda layer: next((p for p, number in reversed(running) if number == layer), None)

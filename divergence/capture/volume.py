"""About how many bytes a capture will see, before a forward is made.

Exact numbers are the dry run's, which costs two forwards over shapes. Here the order of magnitude
is enough: whether there is so much that compiled loops pay for their start. A matrix (out, in)
makes rows of ``out`` features of rows of ``in``; a module without one of its own (a block, a norm)
takes and gives rows as wide as the last axis of its first parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from divergence.numerics.kernels import RESIDENT_BYTES, Kernel, kernel_for
from divergence.run.site import ROOT

if TYPE_CHECKING:
    import torch

    from divergence.capture.request import Request
    from divergence.run.manifest import SampleTokens

__all__ = ["about_bytes", "kernel_for_capture"]

_SHARE = 4
"""Compiled loops may take this part of the buffer, and no more."""


def about_bytes(module: torch.nn.Module, hooked: Collection[str], *, num_tokens: int) -> int:
    """Of all inputs and outputs of the ``hooked`` modules over ``num_tokens`` tokens."""
    total = 0
    for path, one in module.named_modules():
        if (path or ROOT) not in hooked:
            continue
        weight = getattr(one, "weight", None)
        if weight is None:
            weight = next(one.parameters(), None)
        if weight is None or weight.ndim == 0:
            continue
        own = one is not module and weight.ndim == 2 and getattr(one, "weight", None) is weight
        features = sum(weight.shape) if own else 2 * weight.shape[-1]
        total += num_tokens * features * weight.element_size()
    return total


def kernel_for_capture(
    request: Request,
    module: torch.nn.Module,
    hooked: Collection[str],
    samples: Sequence[SampleTokens],
    *,
    num_passes: int,
) -> Kernel:
    """Which loops digest what a capture sees: compiled ones where they pay, and where the memory
    that they take is a small part of the buffer, in whose bound it is."""
    if request.buffer_bytes < _SHARE * RESIDENT_BYTES:
        return "numpy"
    prompts = sum(len(sample.prompt_ids) for sample in samples)
    num_tokens = prompts + len(samples) * request.max_new_tokens
    return kernel_for(about_bytes(module, hooked, num_tokens=num_tokens) * num_passes)

"""About how many bytes a capture will see, before a forward is made.

Exact numbers are the dry run's, which costs two forwards over shapes. Here the order of magnitude
is enough: whether there is so much that compiled loops pay for their start. A matrix (out, in)
makes rows of ``out`` features of rows of ``in``; a module without one of its own (a block, a norm)
takes and gives rows as wide as the last axis of its first parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from divergence.run.schema.site import escape_path

if TYPE_CHECKING:
    import torch

    from divergence.run.schema.manifest import SampleTokens

__all__ = ["about_bytes"]


def about_bytes(
    module: torch.nn.Module,
    hooked: Collection[str],
    samples: Sequence[SampleTokens],
    max_new_tokens: int,
) -> int:
    """Of all inputs and outputs of the ``hooked`` modules in one pass over ``samples``."""
    prompts = sum(len(sample.prompt_ids) for sample in samples)
    num_tokens = prompts + len(samples) * max_new_tokens
    total = 0
    for path, one in module.named_modules():
        if escape_path(path) not in hooked:
            continue
        own = getattr(one, "weight", None)
        weight = own if own is not None else next(one.parameters(), None)
        if weight is None or weight.ndim == 0:
            continue
        features = sum(weight.shape) if own is not None and own.ndim == 2 else 2 * weight.shape[-1]
        total += num_tokens * features * weight.element_size()
    return total

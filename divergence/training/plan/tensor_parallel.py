"""A rank's part of a model under tensor parallelism, as shapes, without any other rank.

The model's own plan (``tp_plan`` of transformers) says which matrices are divided by rows and which
by columns. Weights are made that much smaller and the forward is run as it stands: attention and
MLP then compute this rank's heads and columns, as they do in a real run. What the plan holds beyond
that (experts, sequence parallelism) is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from divergence.errors import ModelError

__all__ = ["GATHERED", "REDUCED", "SHARED", "shrink"]

_COLUMNS = ("colwise", "packed_colwise")
GATHERED = ("colwise_gather_output", "colwise_rep")
"""Their output is put together from all ranks' parts: an all-gather in the forward."""
_ROWS = ("rowwise", "packed_rowwise")
_WHOLE = ("replicate", "replicated_with_grad_allreduce")

REDUCED = (*_ROWS, "embedding_rowwise")
"""Their outputs are sums over ranks: an all-reduce in the forward."""
SHARED = (*_COLUMNS, *GATHERED)
"""Their input is the same on all ranks: its gradient is a sum, an all-reduce in the backward."""


def shrink(module: torch.nn.Module, styles: Mapping[str, str], num_ranks: int) -> None:
    """Make the weights of ``module`` (on the meta device) the first rank's part. ``styles``: module
    path → style, as ``engines.placement.tensor_plan`` gives it.

    Raises ModelError where the model has no plan, or one with a style that is not known here.
    """
    if not styles:
        raise ModelError(
            f"{type(module).__name__} has no plan for tensor parallelism",
            hint="plan it without the axis tp",
        )
    for path, style in styles.items():
        if style in _WHOLE:
            continue
        part: Any = module.get_submodule(path)
        if style not in SHARED + REDUCED or not isinstance(
            part, torch.nn.Linear | torch.nn.Embedding
        ):
            raise ModelError(
                f"how {style!r} divides {type(part).__name__} is not known to the plan",
                where=path, hint="plan it without the axis tp",
            )  # fmt: skip
    tied = getattr(_call(module, "get_input_embeddings"), "weight", None)
    for path, style in styles.items():
        if style not in _WHOLE:
            part = module.get_submodule(path)
            if part.weight is not tied or style == "embedding_rowwise":
                _shrink_one(part, style, num_ranks)


def _shrink_one(part: Any, style: str, num_ranks: int) -> None:
    axis = 1 if style in _ROWS else 0
    whole = part.weight.shape[axis]
    own = -(-whole // num_ranks)
    part.weight = _first(part.weight, axis, own)
    if axis == 0 and getattr(part, "bias", None) is not None:
        part.bias = _first(part.bias, 0, own)
    if style in GATHERED:
        part.register_forward_hook(
            lambda _part, _inputs, output: torch.cat([output] * num_ranks, -1)[..., :whole]
        )


def _first(weight: torch.nn.Parameter, axis: int, length: int) -> torch.nn.Parameter:
    part = torch.empty_like(weight.narrow(axis, 0, length), device="meta")
    return torch.nn.Parameter(part.contiguous(), requires_grad=weight.requires_grad)


def _call(module: Any, name: str) -> Any:
    method = getattr(module, name, None)
    return None if method is None else method()

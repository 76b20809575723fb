"""Operators of a backward that have kernels of their own: what their kernels do not check of what
they are given (as ops.bounds does of others), and their definitions in float64.

g is the gradient of the loss by the forward's result, which each of them is given. Of a softmax
y = exp(x) / Σ exp(x) the gradient by x is y · (g - Σ g·y), of its logarithm g - exp(y) · Σ g. Of
fused attention it is that of its definition, made of the result and of the logarithm of the sum
that the forward kept: P = exp(scale·q·kᵀ + mask - logsumexp), dv = Pᵀ·g, dS = P · (g·vᵀ - Σ g·out),
dq = scale · dS·k, dk = scale · dSᵀ·q (Dao et al. 2022, algorithm 4, without its tiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from divergence.ops.fitting import Bound, fits, mask_fits, normalized_axes, same_sequences, within
from divergence.run.record import Operand

BACKWARD_NAMES = frozenset(
    """
    _fused_rms_norm_backward _log_softmax_backward_data _softmax_backward_data
    _scaled_dot_product_flash_attention_for_cpu_backward embedding_dense_backward
    native_layer_norm_backward nll_loss_backward nll_loss_forward select_backward slice_backward
    """.split()
)
"""Of aten, without the overload: those that are not tagged as pointwise."""


def _alike(bound: Bound) -> None:
    """A gradient of its result's shape."""
    shapes = [tuple(bound[name].shape) for name in ("grad_output", "output")]
    fits(shapes[0] == shapes[1], f"a gradient {shapes[0]} of {shapes[1]}")
    fits(-len(shapes[0]) <= bound["dim"] < max(len(shapes[0]), 1), f"axis {bound['dim']}")


def _norm(bound: Bound) -> None:
    """Of the last axes, with a mean and a deviation for each of the rest."""
    shape, given = normalized_axes(bound), tuple(bound["input"].shape)
    fits(tuple(bound["grad_out"].shape) == given, "a gradient of another shape")
    for name in ("mean", "rstd"):
        term = bound.get(name)
        fits(term is None or term.numel() == math.prod(given[: -len(shape)]), f"{name} of others")


def _embedding(bound: Bound) -> None:
    """A row of the gradient for each index, which is of one of the rows."""
    gradient, indices, size = bound["grad_output"], bound["indices"], bound["num_weights"]
    fits(gradient.ndim > 0 and gradient.shape[:-1] == indices.shape, "a gradient of other indices")
    within(indices, size, masks=False)


def _loss(bound: Bound) -> None:
    """One class for each row, but where it is to be ignored."""
    given, target = bound["self"], bound["target"]
    fits(given.ndim in (1, 2) and target.shape == given.shape[:-1], "targets of other rows")
    within(target[target != bound["ignore_index"]], given.shape[-1], masks=False)


def _attention(bound: Bound) -> None:
    """g and out (B, H, T, E), logsumexp (B, H, T); the rest as of the forward, of equal heads."""
    query, key, value = (tuple(bound[name].shape) for name in ("query", "key", "value"))
    same_sequences(query, key, value)
    fits(query[1] == key[1], f"queries {query}, keys {key}")
    for name in ("grad_out", "out"):
        fits(tuple(bound[name].shape) == (*query[:3], value[3]), f"{name} of another shape")
    fits(tuple(bound["logsumexp"].shape) == query[:3], "logsumexp of another shape")
    mask_fits(bound.get("attn_mask"), (*query[:3], key[2]))


BACKWARD_CHECKS: dict[str, Callable[[Bound], None]] = {
    "_softmax_backward_data": _alike,
    "_log_softmax_backward_data": _alike,
    "native_layer_norm_backward": _norm,
    "_fused_rms_norm_backward": _norm,
    "embedding_dense_backward": _embedding,
    "nll_loss_forward": _loss,
    "nll_loss_backward": _loss,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
}


def _softmax(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    gradient, result, dim = bound["grad_output"], bound["output"], bound["dim"]
    out: torch.Tensor = result * (gradient - (gradient * result).sum(dim, keepdim=True))
    return out


def _log_softmax(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    gradient, result, dim = bound["grad_output"], bound["output"], bound["dim"]
    out: torch.Tensor = gradient - result.exp() * gradient.sum(dim, keepdim=True)
    return out


def attention_scores(
    bound: Bound, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """(scale·q·kᵀ + mask, scale), the causal mask aligned at the top left as torch defines it."""
    if bound.get("dropout_p"):
        raise NotImplementedError("attention with dropout")
    scale = bound.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale  # (B, H, T, S)
    if bound.get("is_causal"):
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores, scale


def _fused_attention(
    bound: Bound, _: Sequence[Operand]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(by q, by k, by v)."""
    gradient, query, key, value = (bound[n] for n in ("grad_out", "query", "key", "value"))
    scores, scale = attention_scores(bound, query, key)
    sums = bound["logsumexp"].unsqueeze(-1)
    weights = (scores - sums).exp().masked_fill(~sums.isfinite(), 0.0)
    along = (gradient * bound["out"]).sum(-1, keepdim=True)
    by_scores = weights * (gradient @ value.transpose(-2, -1) - along) * scale
    by_key = by_scores.transpose(-2, -1) @ query
    return by_scores @ key, by_key, weights.transpose(-2, -1) @ gradient


BACKWARD_DEFINITIONS: dict[str, Callable[[Bound, Sequence[Operand]], Any]] = {
    "aten._softmax_backward_data.default": _softmax,
    "aten._log_softmax_backward_data.default": _log_softmax,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _fused_attention,
}

"""Wide definitions: operators whose kernels have no float64, written out.

Fused attention is softmax(scale·q·kᵀ + mask)·v by its definition (Vaswani et al. 2017), with the
causal mask aligned at the top left as torch defines it; scaled matrix products are those of their
dequantised operands. They take the call's arguments by name, floating-point ones widened
already, and run under Widening.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from divergence.run.schema.record import Operand

__all__ = ["definition"]

Bound = Mapping[str, Any]
Definition = Callable[[Bound, Sequence[Operand]], Any]


def definition(operator: str) -> Definition | None:
    """The operator's own definition in a wide dtype; None where its kernel will do."""
    return _DEFINITIONS.get(operator)


def _attention(bound: Bound, _: Sequence[Operand]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, logsumexp). q (B, H, T, D), k and v (B, G, S, D) with H a multiple of G."""
    query, key, value = bound["query"], bound["key"], bound["value"]
    if bound.get("dropout_p"):
        raise NotImplementedError("attention with dropout")
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=-3)
        value = value.repeat_interleave(groups, dim=-3)
    scale = bound.get("scale")
    scores = query @ key.transpose(-2, -1)  # (B, H, T, S)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bound.get("is_causal"):
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)


def _softmax(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    """``half_to_float`` asks for a float32 result of narrower input: here all is wide."""
    return torch.softmax(bound["self"], bound["dim"])


def _log_softmax(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    return torch.log_softmax(bound["self"], bound["dim"])


def _rms_norm(bound: Bound, operands: Sequence[Operand]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, 1/rms). Without eps it is that of what torch computes the norm in: float32 for
    narrower inputs."""
    one, weight, eps = bound["input"], bound.get("weight"), bound.get("eps")
    if eps is None:
        wide = operands and operands[0].dtype == "float64"
        eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    axes = tuple(range(-len(bound["normalized_shape"]), 0))
    inverse = (one.square().mean(axes, keepdim=True) + eps).rsqrt()
    normed = one * inverse
    return normed if weight is None else normed * weight, inverse


def _scaled_mm(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    """(M, K) × (K, N) codes with a scale each per tensor, per row (M, 1) or column (1, N)."""
    one, two = bound["self"].double(), bound["mat2"].double()
    a, b = bound["scale_a"], bound["scale_b"]
    fits = (a.numel() == 1 or tuple(a.shape) == (one.shape[0], 1)) and (
        b.numel() == 1 or tuple(b.shape) == (1, two.shape[1])
    )
    if not fits or bound.get("scale_result") is not None:
        raise NotImplementedError("a scaled matrix product with scales in blocks")
    out: torch.Tensor = (one @ two) * a * b
    return out if bound.get("bias") is None else out + bound["bias"]


def _int8pack(bound: Bound, _: Sequence[Operand]) -> torch.Tensor:
    """(M, K) × int8 codes (N, K)ᵀ, scaled by column."""
    out: torch.Tensor = (bound["self"] @ bound["mat2"].double().t()) * bound["scales"]
    return out


_DEFINITIONS: dict[str, Definition] = {
    **{
        f"aten._scaled_dot_product_{name}.default": _attention
        for name in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._scaled_mm.default": _scaled_mm,
    "aten._weight_int8pack_mm.default": _int8pack,
}

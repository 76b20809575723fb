"""Normalisation over the last axis: RMSNorm, RMSNorm after a residual addition, LayerNorm.

x may be stored in 16 bits; statistics belong in float32. The normalised value may be rounded to
the dtype of x before it is multiplied by the weight, as Hugging Face's models do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from divergence.ops.suite.definition import (
    Arguments,
    Implementation,
    Operator,
    TensorSource,
    cases_of,
    stored,
)

Shape = tuple[int, ...]
_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's own where it has one (2.4 and later)."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm_llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As LlamaRMSNorm in transformers: statistics in float32, the weight multiplied in x's dtype.
    Source: transformers/models/llama/modeling_llama.py."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _truth_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / √(mean(x²) + ε) · w (Zhang and Sennrich, "Root Mean Square Layer Normalization",
    NeurIPS 2019; ε inside the root as in Llama)."""
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return stored(x * scale) * weight


def _truth_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """h = x + r; y = h / √(mean(h²) + ε) · w; returns y and h. h may be rounded before the norm:
    fused kernels differ in that."""
    total = x + residual
    return _truth_rms_norm(stored(total), weight, eps), total


def _truth_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = (x - μ) / √(σ² + ε) · w + b, with σ² = mean((x - μ)²) (Ba, Kiros and Hinton, "Layer
    Normalization", 2016)."""
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return stored(centred * scale) * weight + bias


def _norm(source: TensorSource, shape: Shape) -> Arguments:
    weight = source.plain("norm", shape[-1:], scale=0.125, mean=1.0)
    return {"x": source.main("x", shape), "weight": weight, "eps": _EPS}


def _add_norm(source: TensorSource, shape: Shape) -> Arguments:
    residual = source.main("residual", shape, scale=2.0)
    return {"residual": residual, **_norm(source, shape)}


def _layer(source: TensorSource, shape: Shape) -> Arguments:
    return {
        **_norm(source, shape), "bias": source.plain("bias", shape[-1:], scale=0.125), "eps": 1e-5,
    }  # fmt: skip


def _npu_rms_norm() -> Implementation:
    import torch_npu

    return lambda x, weight, eps: torch_npu.npu_rms_norm(x, weight, eps)[0]


def _npu_add_rms_norm() -> Implementation:
    import torch_npu

    def call(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    return call


def _vllm_rms_norm() -> Implementation:
    from vllm import _custom_ops

    def call(x: Tensor, weight: Tensor, eps: float) -> Any:
        out = torch.empty_like(x)
        _custom_ops.rms_norm(out, x, weight, eps)
        return out

    return call


def _vllm_add_rms_norm() -> Implementation:
    from vllm import _custom_ops

    def call(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        out, total = x.clone(), residual.clone()  # both are overwritten
        _custom_ops.fused_add_rms_norm(out, total, weight, eps)
        return out, total

    return call


def _liger_rms_norm() -> Implementation:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight, eps: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


OPERATORS = (
    Operator(
        name="rms_norm", run=rms_norm, truth=_truth_rms_norm,
        cases=cases_of(_norm),
        implementations={
            "llama": lambda: rms_norm_llama, "torch_npu": _npu_rms_norm, "vllm": _vllm_rms_norm,
            "triton": _liger_rms_norm,
        },
    ),
    Operator(
        name="add_rms_norm", run=_add_rms_norm,
        truth=_truth_add_rms_norm, cases=cases_of(_add_norm),
        implementations={"torch_npu": _npu_add_rms_norm, "vllm": _vllm_add_rms_norm},
    ),
    Operator(
        name="layer_norm", run=_layer_norm,
        truth=_truth_layer_norm, cases=cases_of(_layer),
    ),
)  # fmt: skip

"""Activations: GELU in both forms, SiLU, and SwiGLU, the gated product of feed-forward blocks."""

from __future__ import annotations

import math
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


def _run_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def _truth_gelu(x: Tensor) -> Tensor:
    """x/2 (1 + erf(x/√2)) (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016)."""
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _truth_gelu_tanh(x: Tensor) -> Tensor:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), the paper's approximation: another function,
    up to 5e-4 away."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _truth_silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


def _truth_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(g) · u (Shazeer, "GLU Variants Improve Transformer", 2020); silu(g) may be stored."""
    return stored(_truth_silu(gate)) * up


def _one(source: TensorSource, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape)}


def _two(source: TensorSource, shape: Shape) -> Arguments:
    return {"gate": source.main("x", shape), "up": source.plain("up", shape)}


def _npu_swiglu() -> Implementation:
    import torch_npu

    return lambda gate, up: torch_npu.npu_swiglu(torch.cat([gate, up], -1), dim=-1)


def _vllm_swiglu() -> Implementation:
    import vllm._custom_ops  # noqa: F401 - registers torch.ops._C

    def call(gate: Tensor, up: Tensor) -> Any:
        out = torch.empty_like(up)
        torch.ops._C.silu_and_mul(out, torch.cat([gate, up], -1))
        return out

    return call


def _liger_swiglu() -> Implementation:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate.contiguous(), up)


OPERATORS = (
    Operator(
        name="gelu", run=_run_gelu, truth=_truth_gelu, cases=cases_of(_one),
    ),
    Operator(
        name="gelu_tanh", run=lambda x: functional.gelu(x, approximate="tanh"),
        truth=_truth_gelu_tanh, cases=cases_of(_one),
    ),
    Operator(
        name="silu", run=lambda x: functional.silu(x), truth=_truth_silu, cases=cases_of(_one),
    ),
    Operator(
        name="swiglu", run=lambda gate, up: functional.silu(gate) * up, truth=_truth_swiglu,
        cases=cases_of(_two),
        implementations={
            "torch_npu": _npu_swiglu, "vllm": _vllm_swiglu, "triton": _liger_swiglu,
        },
    ),
)  # fmt: skip

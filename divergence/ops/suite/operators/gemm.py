"""Matrix products: linear layers as GEMM and GEMV, with and without bias, plain and batched."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from divergence.ops.suite.definition import PLAN, Arguments, Operator, Plan, TensorSource, cases_of

Shape = tuple[int, ...]

_SHAPES = {
    "decode": (1, 1024, 256), "odd": (7, 129, 65), "prefill": (64, 512, 256),
    "large_k": (3, 16384, 32),
}  # fmt: skip
_PLAN: Plan = (*PLAN, ("large_k", "normal"), ("large_k", "cancelling"))


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def _run_matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


def _truth_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ, weight (N, K) as torch.nn.Linear keeps it."""
    return x @ weight.T


def _truth_linear_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = x Wᵀ + b."""
    return x @ weight.T + bias


def _truth_matmul(x: Tensor, y: Tensor) -> Tensor:
    """z_ij = Σ_k x_ik y_kj, over leading axes one by one."""
    return x @ y


def _linear(source: TensorSource, shape: Shape) -> Arguments:
    m, k, n = shape
    weight = source.paired("weight", (n, k), scale=2.0 ** -round(k.bit_length() / 2))
    return {"x": source.main("x", (m, k)), "weight": weight}


def _linear_bias(source: TensorSource, shape: Shape) -> Arguments:
    return {**_linear(source, shape), "bias": source.plain("bias", shape[-1:], scale=0.125)}


def _transposed(source: TensorSource, shape: Shape) -> Arguments:
    """y is the transposed view of a stored (N, K) matrix, as in x @ W.T."""
    linear = _linear(source, shape)
    return {"x": linear["x"], "y": linear["weight"].T}


def _batched(source: TensorSource, shape: Shape) -> Arguments:
    b, m, k, n = shape
    y = source.paired("batch", (b, n, k), scale=2.0 ** -round(k.bit_length() / 2))
    return {"x": source.main("x", (b, m, k)), "y": y.transpose(1, 2).contiguous()}


def _vector(source: TensorSource, shape: Shape) -> Arguments:
    n, k = shape
    x = source.main("x", (k,))
    weight = source.paired("weight", (n, k), scale=2.0 ** -round(k.bit_length() / 2))
    return {"matrix": weight, "vector": x}


def _truth_gemv(matrix: Tensor, vector: Tensor) -> Tensor:
    """y_i = Σ_k A_ik x_k."""
    return matrix @ vector


OPERATORS = (
    Operator(
        name="linear", run=_run_linear, truth=_truth_linear,
        cases=cases_of(_linear, shapes=_SHAPES, plan=_PLAN),
    ),
    Operator(
        name="linear_bias", run=_run_linear,
        truth=_truth_linear_bias, cases=cases_of(_linear_bias, shapes=_SHAPES),
    ),
    Operator(
        name="matmul", run=_run_matmul, truth=_truth_matmul,
        cases=cases_of(_transposed, shapes=_SHAPES, plan=_PLAN),
    ),
    Operator(
        name="batched_matmul", run=_run_matmul, truth=_truth_matmul,
        cases=cases_of(
            _batched,
            shapes={"decode": (4, 1, 128, 64), "odd": (3, 7, 129, 33), "prefill": (4, 48, 64, 48)},
        ),
    ),
    Operator(
        name="gemv", run=lambda matrix, vector: torch.mv(matrix, vector), truth=_truth_gemv,
        cases=cases_of(
            _vector,
            shapes={"odd": (65, 129), "large_k": (32, 16384)},
            plan=[("odd", v) for v in ("normal", "outliers", "subnormals", "cancelling", "equal")]
            + [("large_k", "normal"), ("large_k", "cancelling")],
        ),
    ),
)  # fmt: skip

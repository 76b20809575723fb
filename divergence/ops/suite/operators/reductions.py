"""Choices, rows of a table, sums: what picks from an axis, or adds along it.

Choices are top-k, the gating of a mixture of experts, argmax. Where scores are equal, the
definition takes the lowest index first. torch.argmax documents that; torch.topk documents no
order, so there a choice among exact ties is shown and is no fault.

Embedding is exact, so any difference is a fault. Sums are accumulated in float32, stored in the
dtype of x.
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
    Plan,
    TensorSource,
    cases_of,
)
from divergence.ops.suite.operators.attention import _truth_softmax

Shape = tuple[int, ...]
_K = 4


def _run_moe_gating(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As Mixtral's and Qwen's routers in transformers: softmax in float32, then top-k."""
    weights, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def _truth_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest, in descending order; of equal ones the lowest index first."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def _truth_moe_gating(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """p = softmax(logits); the k largest p, divided by their sum, and which they are."""
    weights, experts = _truth_topk(_truth_softmax(logits), k)
    return weights / weights.sum(-1, keepdim=True), experts


def _truth_argmax(x: Tensor) -> Tensor:
    """The lowest index of the largest value."""
    largest = x == x.amax(-1, keepdim=True)
    places = torch.arange(x.shape[-1]).expand(x.shape)
    return torch.where(largest, places, x.shape[-1]).amin(-1)


def _choose(source: TensorSource, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape), "k": _K}


def _route(source: TensorSource, shape: Shape) -> Arguments:
    return {"logits": source.main("x", shape), "k": _K}


def _one(source: TensorSource, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape)}


def _npu_moe_gating() -> Implementation:
    import torch_npu

    def call(logits: Tensor, k: int) -> Any:
        weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(logits, None, k)
        return weights / weights.sum(-1, keepdim=True), experts.long()

    return call


_PLAN: Plan = (
    ("decode", "normal"), ("odd", "normal"), ("odd", "outliers"), ("odd", "ties"),
    ("odd", "equal"), ("odd.strided", "normal"), ("prefill", "normal"), ("prefill", "ties"),
)  # fmt: skip
_EXPERTS = {"decode": (1, 128), "odd": (7, 60), "prefill": (64, 128)}
_VOCABULARY = {"decode": (1, 16384), "odd": (7, 129), "prefill": (16, 4096)}


def _truth_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """y_t = W[id_t]."""
    return weight[ids]


def _rows(source: TensorSource, shape: tuple[int, ...]) -> Arguments:
    tokens, rows, width = shape
    return {
        "ids": source.indices("ids", (tokens,), rows), "weight": source.main("x", (rows, width)),
    }  # fmt: skip


def _truth_sum(x: Tensor) -> Tensor:
    """Σ_i x_i."""
    return x.sum(-1)


def _truth_mean(x: Tensor) -> Tensor:
    """Σ_i x_i / n."""
    return x.sum(-1) / x.shape[-1]


def _truth_cumsum(x: Tensor) -> Tensor:
    """y_j = Σ_(i <= j) x_i."""
    return x.cumsum(-1)


_SUM_SHAPES = {"odd": (7, 129), "prefill": (64, 512), "long": (4, 32768)}
_SUM_PLAN: Plan = (
    ("odd", "normal"), ("odd", "outliers"), ("odd", "subnormals"), ("odd", "cancelling"),
    ("odd", "equal"), ("odd.strided", "normal"), ("prefill", "normal"), ("long", "normal"),
    ("long", "cancelling"), ("long", "equal"),
)  # fmt: skip

OPERATORS = (
    Operator(
        name="topk", run=lambda x, k: torch.topk(x, k, dim=-1), truth=_truth_topk,
        cases=cases_of(_choose, shapes=_VOCABULARY, plan=_PLAN), scores=lambda x, k: x,
    ),
    Operator(
        name="moe_gating", run=_run_moe_gating, truth=_truth_moe_gating,
        cases=cases_of(_route, shapes=_EXPERTS, plan=_PLAN),
        scores=lambda logits, k: _truth_softmax(logits),
        implementations={"torch_npu": _npu_moe_gating},
    ),
    Operator(
        name="argmax", run=lambda x: torch.argmax(x, -1), truth=_truth_argmax,
        cases=cases_of(_one, shapes=_VOCABULARY, plan=_PLAN),
    ),
    Operator(
        name="embedding", run=lambda ids, weight: functional.embedding(ids, weight),
        truth=_truth_embedding,
        cases=cases_of(
            _rows,
            shapes={"decode": (1, 64, 512), "odd": (7, 33, 129), "prefill": (64, 64, 512)},
            plan=[
                ("decode", "normal"), ("odd", "normal"), ("odd", "subnormals"),
                ("odd.strided", "normal"), ("prefill", "outliers"),
            ],
        ),
    ),
    *(
        Operator(
            name=name, run=run, truth=truth,
            cases=cases_of(_one, shapes=_SUM_SHAPES, plan=_SUM_PLAN),
        )
        for name, run, truth in (
            ("sum", lambda x: x.sum(-1), _truth_sum),
            ("mean", lambda x: x.mean(-1), _truth_mean),
            ("cumsum", lambda x: x.cumsum(-1), _truth_cumsum),
        )
    ),
)  # fmt: skip

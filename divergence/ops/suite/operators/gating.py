"""Choices: top-k, the gating of a mixture of experts, argmax. Where scores are equal, the
definition takes the lowest index first. torch.argmax documents that; torch.topk documents no
order, so there a choice among exact ties is shown and is no fault.
"""

from __future__ import annotations

from typing import Any

import torch

from divergence.ops.suite.cases import Plan, Source, cases_of
from divergence.ops.suite.definition import Arguments, Implementation, Operator
from divergence.ops.suite.operators.softmax import _truth_softmax

__all__ = ["OPERATORS"]

Shape = tuple[int, ...]
_K = 4


def _run_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(x, k, dim=-1)


def _run_moe_gating(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As Mixtral's and Qwen's routers in transformers: softmax in float32, then top-k."""
    weights, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def _run_argmax(x: torch.Tensor) -> torch.Tensor:
    return torch.argmax(x, -1)


def _truth_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest, in descending order; of equal ones the lowest index first."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def _truth_moe_gating(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p = softmax(logits); the k largest p, divided by their sum, and which they are."""
    weights, experts = _truth_topk(_truth_softmax(logits), k)
    return weights / weights.sum(-1, keepdim=True), experts


def _truth_argmax(x: torch.Tensor) -> torch.Tensor:
    """The lowest index of the largest value."""
    largest = x == x.amax(-1, keepdim=True)
    places = torch.arange(x.shape[-1]).expand(x.shape)
    return torch.where(largest, places, x.shape[-1]).amin(-1)


def _choose(source: Source, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape), "k": _K}


def _route(source: Source, shape: Shape) -> Arguments:
    return {"logits": source.main("x", shape), "k": _K}


def _one(source: Source, shape: Shape) -> Arguments:
    return {"x": source.main("x", shape)}


def _npu_moe_gating() -> Implementation:
    import torch_npu

    def call(logits: torch.Tensor, k: int) -> Any:
        weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(logits, None, k)
        return weights / weights.sum(-1, keepdim=True), experts.long()

    return call


_PLAN: Plan = (
    ("decode", "normal"), ("odd", "normal"), ("odd", "outliers"), ("odd", "ties"),
    ("odd", "equal"), ("odd.strided", "normal"), ("prefill", "normal"), ("prefill", "ties"),
)  # fmt: skip
_EXPERTS = {"decode": (1, 128), "odd": (7, 60), "prefill": (64, 128)}
_VOCABULARY = {"decode": (1, 16384), "odd": (7, 129), "prefill": (16, 4096)}

OPERATORS = (
    Operator(
        name="topk", arguments=("x", "k"), run=_run_topk, truth=_truth_topk,
        cases=cases_of(_choose, shapes=_VOCABULARY, plan=_PLAN), scores=lambda x, k: x,
    ),
    Operator(
        name="moe_gating", arguments=("logits", "k"), run=_run_moe_gating, truth=_truth_moe_gating,
        cases=cases_of(_route, shapes=_EXPERTS, plan=_PLAN),
        scores=lambda logits, k: _truth_softmax(logits),
        implementations={"torch_npu": _npu_moe_gating},
    ),
    Operator(
        name="argmax", arguments=("x",), run=_run_argmax, truth=_truth_argmax,
        cases=cases_of(_one, shapes=_VOCABULARY, plan=_PLAN),
    ),
)  # fmt: skip

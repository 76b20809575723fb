"""Softmax and its logarithm over the last axis."""

from __future__ import annotations

import torch

from divergence.ops.suite.cases import Source, cases_of
from divergence.ops.suite.definition import Arguments, Operator

__all__ = ["OPERATORS"]

Shape = tuple[int, ...]


def _run_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _run_log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def _truth_softmax(x: torch.Tensor) -> torch.Tensor:
    """p_i = exp(x_i - m) / Σ_j exp(x_j - m), m = max x."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def _truth_log_softmax(x: torch.Tensor) -> torch.Tensor:
    """x_i - m - log Σ_j exp(x_j - m)."""
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))


def _logits(source: Source, shape: Shape) -> Arguments:
    """Four times a normal value: what attention scores and router logits of trained models
    reach."""
    return {"x": source.main("x", shape, scale=1.0 if source.values == "subnormals" else 4.0)}


OPERATORS = (
    Operator(
        name="softmax", arguments=("x",), run=_run_softmax, truth=_truth_softmax,
        cases=cases_of(_logits),
    ),
    Operator(
        name="log_softmax", arguments=("x",), run=_run_log_softmax, truth=_truth_log_softmax,
        cases=cases_of(_logits),
    ),
)  # fmt: skip

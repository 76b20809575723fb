"""Sums: over the last axis, long ones, and running ones. Accumulated in float32, stored in the
dtype of x."""

from __future__ import annotations

import torch

from divergence.ops.suite.cases import Plan, Source, cases_of
from divergence.ops.suite.definition import Arguments, Operator

__all__ = ["OPERATORS"]


def _run_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def _run_mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(-1)


def _run_cumsum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


def _truth_sum(x: torch.Tensor) -> torch.Tensor:
    """Σ_i x_i."""
    return x.sum(-1)


def _truth_mean(x: torch.Tensor) -> torch.Tensor:
    """Σ_i x_i / n."""
    return x.sum(-1) / x.shape[-1]


def _truth_cumsum(x: torch.Tensor) -> torch.Tensor:
    """y_j = Σ_(i <= j) x_i."""
    return x.cumsum(-1)


def _one(source: Source, shape: tuple[int, ...]) -> Arguments:
    return {"x": source.main("x", shape)}


_SHAPES = {"odd": (7, 129), "prefill": (64, 512), "long": (4, 32768)}
_PLAN: Plan = (
    ("odd", "normal"), ("odd", "outliers"), ("odd", "subnormals"), ("odd", "cancelling"),
    ("odd", "equal"), ("odd.strided", "normal"), ("prefill", "normal"), ("long", "normal"),
    ("long", "cancelling"), ("long", "equal"),
)  # fmt: skip

OPERATORS = tuple(
    Operator(
        name=name, arguments=("x",), run=run, truth=truth,
        cases=cases_of(_one, shapes=_SHAPES, plan=_PLAN),
    )
    for name, run, truth in (
        ("sum", _run_sum, _truth_sum),
        ("mean", _run_mean, _truth_mean),
        ("cumsum", _run_cumsum, _truth_cumsum),
    )
)  # fmt: skip

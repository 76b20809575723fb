"""Embedding: rows of a table. Exact, so any difference is a fault."""

from __future__ import annotations

import torch
from torch.nn import functional

from divergence.ops.suite.cases import Source, cases_of
from divergence.ops.suite.definition import Arguments, Operator

__all__ = ["OPERATORS"]


def _run_embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.embedding(ids, weight)


def _truth_embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y_t = W[id_t]."""
    return weight[ids]


def _inputs(source: Source, shape: tuple[int, ...]) -> Arguments:
    tokens, rows, width = shape
    return {
        "ids": source.indices("ids", (tokens,), rows), "weight": source.main("x", (rows, width)),
    }  # fmt: skip


OPERATORS = (
    Operator(
        name="embedding", arguments=("ids", "weight"), run=_run_embedding, truth=_truth_embedding,
        cases=cases_of(
            _inputs,
            shapes={"decode": (1, 64, 512), "odd": (7, 33, 129), "prefill": (64, 64, 512)},
            plan=[
                ("decode", "normal"), ("odd", "normal"), ("odd", "subnormals"),
                ("odd.strided", "normal"), ("prefill", "outliers"),
            ],
        ),
    ),
)  # fmt: skip

"""Operators of a suite by name, ``suite.NAME``: what they do here, and what is right, in float64.

A suite's operator is a plain function of tensors and scalars by name. Nothing is registered: the
suite's own catalog is asked, when a run holds such an operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from divergence.ops.refusal import Refusal
from divergence.run.schema.site import near_names

__all__ = ["PREFIX", "Definition", "definitions", "find"]

PREFIX = "suite."
_CATALOG = "divergence.ops.suite.catalog"


class Definition(Protocol):
    """What is needed of one operator: both take the recorded arguments by name."""

    run: Callable[..., Any]
    truth: Callable[..., Any]


def definitions() -> Mapping[str, Definition]:
    """All operators by full name; none where this installation has no suite."""
    try:
        operators: Mapping[str, Definition] = importlib.import_module(_CATALOG).OPERATORS
        return operators
    except ModuleNotFoundError as error:
        if error.name is None or not _CATALOG.startswith(error.name):
            raise  # of the suite itself something is missing
        return {}


def find(operator: str, *, truth: bool = False) -> Callable[..., Any]:
    """The function that ``suite.NAME`` stands for, or its definition. Raises Refusal."""
    one = definitions().get(operator)
    if one is None:
        near = near_names(operator, definitions())
        raise Refusal(
            f"this divergence has no operator {operator}",
            detail=f"near: {', '.join(near)}" if near else None,
        )
    return one.truth if truth else one.run

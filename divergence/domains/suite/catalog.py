"""The catalog of operators, the suites made of them, and which implementation of each runs.

    --impl flash_attn                     where an operator has one of that name, that one
    --impl rms_norm=llama                 this operator's
    --impl rms_norm=my_kernels:rms_norm   a function of the user's, imported by name
    --impl inductor                       every operator through torch.compile

A user's function takes the operator's arguments by name and returns its results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from divergence.domains.suite.definition import (
    PREFIX,
    Operator,
    OperatorCase,
)
from divergence.domains.suite.operators import OPERATORS
from divergence.errors import UsageError
from divergence.recording.cases import Implementations, function_named, label_of, pairs_of
from divergence.run.site import did_you_mean


def find(name: str) -> Operator:
    """The operator called ``name`` (``suite.rms_norm``). Raises UsageError with near names."""
    operator = OPERATORS.get(name)
    if operator is None:
        raise UsageError(
            f"no operator of a suite is called {name!r}",
            hint=did_you_mean(name, OPERATORS) or f"one of {', '.join(OPERATORS)}",
        )
    return operator


def cases_in(suite: str) -> Iterator[tuple[Operator, OperatorCase]]:
    """Every case of a suite, in order."""
    for operator in OPERATORS.values():
        for case in operator.cases():
            if suite == "llm" or case.quick:
                yield operator, case


def case_path(operator: Operator, case: OperatorCase) -> str:
    """Return a case's path in its sites: ``rms_norm.bfloat16.decode.outliers``."""
    return f"{operator.full_name.removeprefix(PREFIX)}.{case.name}"


DEFAULT = "torch"
COMPILED = "inductor"
PACKAGES = {
    "torch_npu": "torch_npu",
    "vllm": "vllm._custom_ops",
    "triton": "liger_kernel",
    "flash_attn": "flash_attn",
}
"""What the implementations of a name need beside torch."""


@dataclass(frozen=True, slots=True)
class ChosenOperator:
    """Says what runs for one operator. ``name``: as it is recorded."""

    name: str
    call: Callable[..., Any]


def choose(wishes: Implementations) -> dict[str, ChosenOperator]:
    """Operator's full name → what runs, for every operator. ``wishes``: ``--impl`` values, or
    functions by operator name. Raises UsageError, which names what there is."""
    chosen = {name: ChosenOperator(DEFAULT, operator.run) for name, operator in OPERATORS.items()}
    for where, what in pairs_of(wishes):
        if not where:  # wherever there is one of that name
            having = [operator for operator in OPERATORS.values() if what in _ways(operator)]
            if not having:
                hint = _known()
                raise UsageError(f"no operator has an implementation called {what!r}", hint=hint)
            chosen |= {} if what == DEFAULT else _loaded(what, having)
            continue
        operator = find(where if where.startswith(PREFIX) else PREFIX + where)
        if not isinstance(what, str):
            chosen[operator.full_name] = ChosenOperator(label_of(what), what)
        elif ":" in what:
            function = function_named(what, operator.name)
            chosen[operator.full_name] = ChosenOperator(what, function)
        elif what in _ways(operator):
            chosen |= _loaded(what, [operator])
        else:
            raise UsageError(
                f"{operator.name} has no implementation called {what!r}",
                hint=f"it has {', '.join(_ways(operator))}; or your own: "
                f"{operator.name}=MODULE:FUNCTION",
            )
    return chosen


def _ways(operator: Operator) -> list[str]:
    """Return what can run it, by name."""
    return [DEFAULT, COMPILED, *operator.implementations]


def _loaded(name: str, operators: Sequence[Operator]) -> dict[str, ChosenOperator]:
    """The implementation of that name. Raises UsageError where its package is not here."""
    try:
        if name in PACKAGES:
            importlib.import_module(PACKAGES[name])
    except (ImportError, OSError) as error:
        raise UsageError(f"{name} is not here: {error}", hint=_known()) from error
    loaded: dict[str, ChosenOperator] = {}
    for operator in operators:
        call = {DEFAULT: operator.run, **operator.implementations}.get(name)
        if call is None:
            call = partial(torch.compile(operator.run, dynamic=False))
        loaded[operator.full_name] = ChosenOperator(name, call)
    return loaded


def _known() -> str:
    """Return what could be asked for here."""
    here: dict[str, list[str]] = {}
    for operator in OPERATORS.values():
        for name in operator.implementations:
            here.setdefault(name, []).append(operator.name)
    for name, package in PACKAGES.items():
        try:
            importlib.import_module(package)
        except (ImportError, OSError):
            here.pop(name, None)
    rows = [f"{name} ({', '.join(operators)})" for name, operators in sorted(here.items())]
    return "here are: " + "; ".join([DEFAULT, COMPILED, *rows])

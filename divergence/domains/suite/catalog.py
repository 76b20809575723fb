"""Which operators there are, which suites are made of them, and which implementation of each runs.

    --impl flash_attn                     where an operator has one of that name, that one
    --impl rms_norm=llama                 this operator's
    --impl rms_norm=my_kernels:rms_norm   a function of the user's, imported by name
    --impl inductor                       every operator through torch.compile

A user's function takes the operator's arguments by name and returns its results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from divergence.domains.suite.definition import PREFIX, Operator, OperatorCase, Unavailable
from divergence.domains.suite.operators import OPERATORS
from divergence.errors import UsageError
from divergence.recording.cases import Wishes, function_named, label_of, pairs_of
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
    """What stands for a module's path in its sites: ``rms_norm.bfloat16.decode.outliers``."""
    return f"{operator.full_name.removeprefix(PREFIX)}.{case.name}"


DEFAULT = "torch"
COMPILED = "inductor"


@dataclass(frozen=True, slots=True)
class ChosenOperator:
    """What runs for one operator. ``name``: as it is recorded."""

    name: str
    call: Callable[..., Any]


def choose(wishes: Wishes) -> dict[str, ChosenOperator]:
    """Operator's full name → what runs, for every operator. ``wishes``: ``--impl`` values, or
    functions by operator name. Raises UsageError, which names what there is."""
    chosen = {name: ChosenOperator(DEFAULT, operator.run) for name, operator in OPERATORS.items()}
    for where, what in pairs_of(wishes):
        if not where:
            chosen.update(_everywhere(what))
            continue
        operator = find(where if where.startswith(PREFIX) else PREFIX + where)
        name = what if isinstance(what, str) else label_of(what)
        call = _named(operator, what) if isinstance(what, str) else what
        chosen[operator.full_name] = ChosenOperator(name, call)
    return chosen


def available() -> dict[str, list[str]]:
    """Implementation name → operators that can run it here."""
    names: dict[str, list[str]] = {}
    for operator in OPERATORS.values():
        for name in operator.implementations:
            with contextlib.suppress(ImportError, Unavailable, OSError):
                operator.implementations[name]()
                names.setdefault(name, []).append(operator.name)
    return names


def _everywhere(name: str) -> dict[str, ChosenOperator]:
    """The implementation of that name wherever there is one."""
    if name == DEFAULT:
        return {}
    if name == COMPILED:
        return {
            full: ChosenOperator(name, _compiled(operator)) for full, operator in OPERATORS.items()
        }
    having = [operator for operator in OPERATORS.values() if name in operator.implementations]
    if not having:
        raise UsageError(f"no operator has an implementation called {name!r}", hint=_known())
    chosen, why = {}, ""
    for operator in having:
        try:
            chosen[operator.full_name] = ChosenOperator(name, operator.implementations[name]())
        except (ImportError, Unavailable, OSError) as error:
            why = str(error)
    if not chosen:
        raise UsageError(f"{name} is not here: {why}", hint=_known())
    return chosen


def _named(operator: Operator, name: str) -> Callable[..., Any]:
    if ":" in name:
        return function_named(name, operator.name)
    if name == DEFAULT:
        return operator.run
    if name == COMPILED:
        return _compiled(operator)
    if name not in operator.implementations:
        own = ", ".join((DEFAULT, COMPILED, *operator.implementations))
        raise UsageError(
            f"{operator.name} has no implementation called {name!r}",
            hint=f"it has {own}; or your own: {operator.name}=MODULE:FUNCTION",
        )
    try:
        return operator.implementations[name]()
    except (ImportError, Unavailable, OSError) as error:
        raise UsageError(f"{name} is not here: {error}", hint=_known()) from error


def _compiled(operator: Operator) -> Callable[..., Any]:
    import torch

    return partial(torch.compile(operator.run, dynamic=False))


def _known() -> str:
    """What could be asked for here."""
    here = available()
    rows = [f"{name} ({', '.join(operators)})" for name, operators in sorted(here.items())]
    return "here are: " + "; ".join([DEFAULT, COMPILED, *rows])

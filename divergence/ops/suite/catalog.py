"""Which operators there are, which suites are made of them, and which implementation of each runs.

    --impl flash_attn                     where an operator has one of that name, that one
    --impl rms_norm=llama                 this operator's
    --impl rms_norm=my_kernels:rms_norm   a function of the user's, imported by name
    --impl inductor                       every operator through torch.compile

A user's function takes the operator's arguments by name and returns its results.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from divergence.errors import UsageError
from divergence.ops.suite.definition import PREFIX, Operator, OperatorCase, Unavailable
from divergence.ops.suite.operators import (
    activations,
    attention,
    gemm,
    norms,
    paged_attention,
    quantization,
    reductions,
    rope,
)
from divergence.run.site import did_you_mean

_FAMILIES = (
    gemm, norms, rope, attention, paged_attention, activations, reductions, quantization,
)  # fmt: skip

OPERATORS: dict[str, Operator] = {
    operator.full_name: operator for family in _FAMILIES for operator in family.OPERATORS
}
"""By full name, in the order in which a suite runs them."""

SUITES = {
    "llm": "every operator, shape, dtype and distribution",
    "quick": "float32 and bfloat16, small shapes",
}


def find(name: str) -> Operator:
    """The operator called ``name`` (``suite.rms_norm``). Raises UsageError with near names."""
    operator = OPERATORS.get(name)
    if operator is None:
        raise UsageError(
            f"no operator of a suite is called {name!r}",
            hint=did_you_mean(name, OPERATORS) or f"one of {', '.join(OPERATORS)}",
        )
    return operator


def suite_named(name: str) -> str:
    """``name``, if there is such a suite. Raises UsageError with the known ones."""
    if name not in SUITES:
        known = ", ".join(f"suite:{known} ({what})" for known, what in SUITES.items())
        known += ", suite:collectives (of a process group)"
        raise UsageError(f"no suite is called {name!r}", hint=f"there are {known}")
    return name


def cases_in(suite: str) -> Iterator[tuple[Operator, OperatorCase]]:
    """Every case of a suite, in order."""
    for operator in OPERATORS.values():
        for case in operator.cases():
            if suite == "llm" or case.quick:
                yield operator, case


def case_path(operator: Operator, case: OperatorCase) -> str:
    """What stands for a module's path in its sites: ``rms_norm.bfloat16.decode.outliers``."""
    return f"{operator.full_name.removeprefix(PREFIX)}.{case.name}"


# What ``--impl`` says, of operators or collectives.

Wishes = str | Sequence[str] | Mapping[str, Callable[..., Any]]
"""Values of ``--impl``, or functions by what they are to run."""


def pairs_of(wishes: Wishes) -> list[tuple[str, Any]]:
    """(where, what): ``where`` is empty of what is meant everywhere. Raises UsageError for half a
    wish."""
    if isinstance(wishes, Mapping):
        return list(wishes.items())
    pairs = []
    for wish in [wishes] if isinstance(wishes, str) else wishes:
        where, equals, what = wish.rpartition("=")
        if not what or (equals and not where):
            raise UsageError(
                f"--impl {wish!r} has nothing {'before' if what else 'behind'} its '='"
                if equals else "--impl has no name",
                hint="NAME, WHERE=NAME or WHERE=MODULE:FUNCTION",
            )  # fmt: skip
        pairs.append((where, what))
    return pairs


def function_named(name: str, where: str) -> Callable[..., Any]:
    """The function of ``package.module:function``, for ``where``; modules of the directory that the
    command was given in count. Raises UsageError."""
    module, _, attribute = name.partition(":")
    hint = f"--impl {where}=MODULE:FUNCTION, where python -c 'import MODULE' works"
    here = os.getcwd()
    sys.path.insert(0, here)  # searched first, as ``python -m`` does
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's own
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UsageError(f"cannot import {name!r}: {kind}{error}", hint=hint) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
    if not callable(function):
        raise UsageError(f"{name!r} is not a function", hint=hint)
    return function


def label_of(function: Callable[..., Any]) -> str:
    """As a function that was handed over is recorded."""
    label: str = getattr(function, "__qualname__", type(function).__name__)
    return label


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

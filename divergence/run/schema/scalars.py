"""Scalar arguments of two calls of one operator: which differ, and how they are said.

Everything that is no tensor is a scalar here: numbers, flags, dims, dtypes. An argument that one
side leaves out has the default of torch's own schema. Where the values lie in memory (device,
layout, memory format, pinned) is no operand: it changes no number. Two Python floats that are equal
but for 2 u32 are the same: they are two ways of writing one number (``head_dim ** -0.5`` and
``1 / math.sqrt(head_dim)``). So are two fillings of a mask that are both far below every score
(-inf, finfo.min), and an axis counted from the front and from the end.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from divergence.run.schema.record import Call

__all__ = ["OtherScalar", "other_scalars", "scalar_words"]

_NOT_OPERANDS = frozenset({"device", "layout", "memory_format", "pin_memory", "non_blocking",
                           "generator", "copy"})  # fmt: skip
_SAME_NUMBER = 2 * 2.0**-24
_AXES = frozenset({"dim", "dims", "dim0", "dim1"})
_FILLINGS = frozenset({"value", "other", "fill_value"})
_INTEGERS = frozenset({"other", "alpha", "beta", "exponent", "value", "fill_value", "self", "scale",
                       "min", "max"})  # fmt: skip
"""Arguments whose integers enter the arithmetic; others are sizes, axes and counts."""
_BELOW = -1e4
"""Far below every score; finfo.min of float16 is -65504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherScalar:
    """A scalar argument whose value differs between two calls."""

    argument: str
    reference: Any
    """The reference's value, as JSON has it."""
    candidate: Any
    """The candidate's value, as JSON has it."""
    is_number: bool
    """Both values are numbers that enter the arithmetic, not dims, sizes or flags."""


def other_scalars(reference: Call, candidate: Call) -> list[OtherScalar]:
    """Scalar arguments whose values differ, by the operator's schema. Calls of two operators (or
    two overloads with other names) have nothing in common to compare: an empty list."""
    if _base(reference.operator) != _base(candidate.operator):
        return []
    differing = []
    for name in dict.fromkeys((*reference.arguments, *candidate.arguments)):
        if name in _NOT_OPERANDS:
            continue
        mine, other = _value(reference, name), _value(candidate, name)
        if _is_tensor(mine) or _is_tensor(other):
            continue
        if name in _FILLINGS and _masks(mine) and _masks(other):
            continue
        if _same(_from_front(name, mine, reference), _from_front(name, other, candidate)):
            continue
        differing.append(
            OtherScalar(
                argument=name, reference=mine, candidate=other,
                is_number=all(_is_number(name, value) for value in (mine, other)),
            )
        )  # fmt: skip
    return differing


def _from_front(name: str, value: Any, call: Call) -> Any:
    """An axis counted from the front."""
    if name not in _AXES or not call.operands:
        return value
    rank = len(call.operands[0].shape)
    if isinstance(value, list):
        return [_from_front(name, item, call) for item in value]
    return value + rank if type(value) is int and value < 0 else value


def _masks(value: Any) -> bool:
    return value == {"float": "-inf"} or (type(value) in (int, float) and value < _BELOW)


def _is_number(name: str, value: Any) -> bool:
    if type(value) is int:
        return name in _INTEGERS
    return type(value) is float or (isinstance(value, dict) and set(value) == {"float"})


def scalar_words(value: Any) -> str:
    """For people: numbers and names."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    if isinstance(value, list):
        return "[" + ", ".join(scalar_words(item) for item in value) + "]"
    return str(value)[:80]


def _base(operator: str) -> str:
    """Without the overload and the mark of an operator that writes in place."""
    name = ".".join(operator.split(".")[:2])
    return name if name.endswith("__") else name.rstrip("_")


def _value(call: Call, name: str) -> Any:
    if name in call.arguments:
        return call.arguments[name]
    return _defaults(call.operator).get(name)


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, list) and isinstance(other, list):
        return len(mine) == len(other) and all(map(_same, mine, other))
    both = [v for v in (mine, other) if type(v) in (int, float)]
    if len(both) == 2:
        least = min(abs(mine), abs(other))
        return bool(mine == other or abs(mine - other) <= _SAME_NUMBER * least)
    return type(mine) is type(other) and mine == other


def _is_tensor(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_tensor(item) for item in value)
    return isinstance(value, dict) and set(value) == {"tensor"}


@functools.cache
def _defaults(operator: str) -> dict[str, Any]:
    """Defaults of the operator's schema, if this torch has it; of aten alone, since asking for
    another package's operator may import it."""
    import torch

    parts = operator.split(".")
    if len(parts) < 2 or parts[0] != "aten" or not all(p.isidentifier() for p in parts):
        return {}
    try:
        packet = getattr(torch.ops.aten, parts[1])
        schema = getattr(packet, parts[2] if len(parts) > 2 else "default")._schema
    except (AttributeError, RuntimeError):
        return {}
    defaults = {}
    for argument in schema.arguments:
        if argument.has_default_value():
            value = argument.default_value
            if isinstance(value, float) and not math.isfinite(value):
                value = {"float": str(value)}
            defaults[argument.name] = value
    return defaults

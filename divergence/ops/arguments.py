"""Arguments: a recorded call's JSON as the Python values that the operator takes.

The operator's own schema gives order and defaults. The recorded device is replaced by the one
at hand; a generator cannot be recorded (such a call carries a note).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from divergence.ops import registry
from divergence.ops.lookup import find_operator, short_name
from divergence.ops.refusal import Refusal, Unsafe
from divergence.run.schema.record import Call

__all__ = ["check_names", "decoded", "fitted"]

_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decoded(value: Any, tensors: Sequence[Any], device: str | torch.device) -> Any:
    """One recorded argument as a Python value; ``{"tensor": n}`` is ``tensors[n]``."""
    if isinstance(value, list):
        return [decoded(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "tensor" and type(inner) is int and 0 <= inner < len(tensors):
            return tensors[inner]
        if kind == "device":
            return torch.device(device)
        if kind == "float" and isinstance(inner, str) and inner in _FLOATS:
            return _FLOATS[inner]
        if kind == "complex" and isinstance(inner, list) and len(inner) == 2:
            parts = [decoded(part, tensors, device) for part in inner]
            if all(isinstance(part, int | float) for part in parts):
                return complex(*parts)
        if kind in _KINDS and isinstance(inner, str):
            found = getattr(torch, inner.removeprefix("torch."), None)
            if isinstance(found, _KINDS[kind]):
                return found
            raise Refusal(f"this torch has no {kind} {inner}")
    raise Refusal("its arguments cannot be read", detail=repr(value)[:80])


def check_names(call: Call) -> None:
    """Are all arguments of the call its operator's, by torch's schema or the suite's own function?

    Raises Refusal, which names the first that is not, or where there is no such operator.
    """
    if call.operator.startswith(registry.PREFIX):
        known = set(inspect.signature(registry.find(call.operator)).parameters)
    else:
        known = {argument.name for argument in find_operator(call.operator)._schema.arguments}
    strange = sorted(name for name in call.arguments if name not in known)
    if strange:
        name = short_name(call.operator)
        raise Unsafe(f"{name} has no argument {strange[0][:80]!r} here")


def fitted(
    schema: Any, arguments: Mapping[str, Any], tensors: Sequence[Any], device: str | torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a call of the operator with this schema.

    Raises Refusal where one is missing that this torch's operator needs.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.name in arguments:
            value = decoded(arguments[argument.name], tensors, device)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise Refusal(f"{_name(schema)} needs an argument {argument.name!r} in this torch")
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _name(schema: Any) -> str:
    name: str = schema.name
    return name.replace("::", ".")

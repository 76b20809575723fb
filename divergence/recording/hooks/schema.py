"""What an operator's schema tells of a call: names, what is written to, whether chance is in it."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["draws_random_numbers", "named_arguments", "operator_name", "written_arguments"]


@functools.cache
def written_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def operator_name(func: Any) -> str:
    """``aten.mm``: namespace and operator, without the overload."""
    packet = func.overloadpacket
    return f"{func.namespace}.{packet.__name__}"


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by the schema's names."""
    return dict(zip(_argument_names(func), args, strict=False)) | kwargs


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def draws_random_numbers(func: Any, named: dict[str, Any]) -> bool:
    """Does this call draw random numbers? Attention kernels may, but for a dropout of 0 do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for argument in func._schema.arguments:
        if argument.name in ("dropout_p", "p") and argument.type.kind() == "FloatType":
            return bool(named.get(argument.name, argument.default_value))
    return True

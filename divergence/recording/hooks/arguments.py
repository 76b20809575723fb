"""Names for the tensors and values that modules and operators take and give.

``forward(hidden, mask=m, position_embeddings=(cos, sin))`` has the ports ``in``,
``in.mask``, ``in.position_embeddings.0`` and ``in.position_embeddings.1``. The
first tensor found is always ``in`` (or ``out``), given by position or by name, so
that ``layer(hidden)`` and ``layer(hidden_states=hidden)`` have the same sites;
the other positional arguments take their names from ``forward``'s signature for the
same reason. Caches and other objects are passed by.

Of an operator the schema tells the names, what is written to and whether chance is in it. Its
scalars become JSON, which has no word for a dtype, a device or an infinity: those are objects of
one key. What is no scalar at all (a generator) is named by its type, and a call with it cannot be
run again.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "argument_names", "as_json", "as_word", "bound_arguments", "draws_random_numbers",
    "input_leaves", "map_inputs", "map_output", "named_arguments", "operator_name",
    "output_leaves", "written_arguments",
]  # fmt: skip

Leaf = tuple[str, torch.Tensor]


def argument_names(module: torch.nn.Module) -> list[str]:
    """Names of the positional parameters of ``module.forward``; empty where it hides them.

    A wrapper put over one module's forward (tensor parallelism does) has none: then its class's.
    """
    names = _positional(module.forward)
    return names or _positional(functools.partial(type(module).forward, module))


def _positional(forward: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def input_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()
) -> list[Leaf]:
    """(port, tensor) for each tensor among the arguments, in order."""
    leaves: list[Leaf] = []
    for index, value in enumerate(args):
        if isinstance(value, _HOLDERS):
            _collect(value, f"in.{names[index] if index < len(names) else index}", leaves)
    for name, value in kwargs.items():
        if isinstance(value, _HOLDERS):
            _collect(value, f"in.{name}", leaves)
    if leaves:
        leaves[0] = "in", leaves[0][1]
    return leaves


def map_inputs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[str, torch.Tensor], torch.Tensor],
    names: Sequence[str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor replaced by ``change(port, tensor)``."""
    named = _first_named(change, "in")
    new_args = tuple(
        _walk(value, f"in.{names[index] if index < len(names) else index}", named)
        for index, value in enumerate(args)
    )
    return new_args, {name: _walk(value, f"in.{name}", named) for name, value in kwargs.items()}


def output_leaves(output: Any) -> list[Leaf]:
    """(port, tensor) for each tensor of a module's result, in order."""
    leaves: list[Leaf] = []
    _collect(output, "out", leaves)
    if leaves:
        leaves[0] = "out", leaves[0][1]
    return leaves


def map_output(output: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The result with each tensor replaced by ``change(port, tensor)``."""
    return _walk(output, "out", _first_named(change, "out"))


_HOLDERS = (torch.Tensor, tuple, list, dict)


def _collect(value: Any, name: str, leaves: list[Leaf]) -> None:
    """The same walk as _walk, without building anything: it runs at every module call."""
    if isinstance(value, torch.Tensor):
        leaves.append((name, value))
    elif type(value) in (tuple, list):
        for index, item in enumerate(value):
            if item is not None:
                _collect(item, f"{name}.{index}", leaves)
    elif isinstance(value, dict):
        for key, item in value.items():
            if item is not None:
                _collect(item, f"{name}.{key}", leaves)


def _first_named(
    change: Callable[[str, torch.Tensor], torch.Tensor], port: str
) -> Callable[..., Any]:
    """Give the first tensor the bare port, whatever it was called."""
    first = True

    def named(name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal first
        if first:
            first, name = False, port
        return change(name, tensor)

    return named


def _walk(value: Any, name: str, change: Callable[..., Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if type(value) in (tuple, list):
        new = [_walk(item, f"{name}.{index}", change) for index, item in enumerate(value)]
        changed = any(a is not b for a, b in zip(new, value, strict=True))
        return type(value)(new) if changed else value
    if isinstance(value, dict):  # ModelOutput is an ordered dict, made anew by each forward
        entries = {key: _walk(item, f"{name}.{key}", change) for key, item in value.items()}
        different = [key for key in entries if entries[key] is not value[key]]
        if different and type(value) is dict:
            value = dict(value)  # an argument that several blocks may share
        for key in different:
            value[key] = entries[key]
    return value


@functools.cache
def written_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that the operator writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def operator_name(func: Any) -> str:
    """``aten.mm``: namespace and operator, without the overload."""
    return f"{func.namespace}.{func.overloadpacket.__name__}"


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by the schema's names."""
    return dict(zip(_argument_names(func), args, strict=False)) | kwargs


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults too."""
    arguments = func._schema.arguments
    defaults = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    return defaults | named_arguments(func, args, kwargs)


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def draws_random_numbers(func: Any, named: Mapping[str, Any]) -> bool:
    """Does this call draw random numbers? Attention kernels may, but for a dropout of 0 do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {
        argument.name: named.get(argument.name, argument.default_value)
        for argument in func._schema.arguments
    }
    if given.get("train") is False or given.get("training") is False:
        return False
    chances = [given.get(name) for name in ("dropout_p", "dropout", "p")]
    numbers = [chance for chance in chances if isinstance(chance, int | float)]
    return not numbers or any(numbers)


def as_json(value: Any) -> Any:
    """A scalar argument as docs/dump-format.md writes it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [as_json(value.real), as_json(value.imag)]}
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    return {"object": type(value).__name__}


def as_word(value: Any) -> str:
    """For people: numbers and names; the end of a slice as such."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_word(item) for item in value) + "]"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, int) and value == sys.maxsize:
        return "end"
    encoded = as_json(value)
    return str(next(iter(encoded.values())) if isinstance(encoded, dict) else encoded)

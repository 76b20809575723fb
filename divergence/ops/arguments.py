"""Arguments: a recorded call's JSON and tensors as the values that the operator takes.

The operator's own schema gives order and defaults. The recorded device is replaced by the one
at hand; a generator cannot be recorded (such a call carries a note).

Kernels are chosen by layout, and so is the order of their additions: a matrix product with
a transposed operand is another kernel than with a contiguous one. So recorded values, which lie
contiguous on disk, are put back under the strides that the operator saw. Axes that share memory
(an expanded one has stride 0) share it again.

So is the address: vector kernels handle what lies before the first aligned element apart, so
where memory begins modulo 64 bytes changes the order of additions too (a float32 matrix-vector
product gives four results by the weight's address: benchmarks/alignment.py; weights that are
mapped from a safetensors file are not aligned). Always fresh memory, so that an operator may
write to it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from divergence.ops.allowed import (
    Refusal,
    Unsafe,
    find_operator,
    schema_name,
    short_name,
    suite_function,
)
from divergence.ops.suite.definition import PREFIX
from divergence.run.schema.record import Call

__all__ = ["check_names", "contiguous_stride", "decoded", "fitted", "laid_out", "span_of"]

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
            constant = getattr(torch, inner.removeprefix("torch."), None)
            if isinstance(constant, _KINDS[kind]):
                return constant
            raise Refusal(f"this torch has no {kind} {inner}")
    raise Refusal("its arguments cannot be read", detail=repr(value)[:80])


def check_names(call: Call) -> None:
    """Are all arguments of the call its operator's, by torch's schema or the suite's own function?

    Raises Refusal, which names the first that is not, or where there is no such operator.
    """
    if call.operator.startswith(PREFIX):
        known = set(inspect.signature(suite_function(call.operator)).parameters)
    else:
        known = {argument.name for argument in find_operator(call.operator)._schema.arguments}
    strange = sorted(name for name in call.arguments if name not in known)
    if strange:
        name = short_name(call.operator)
        raise Unsafe(f"{name} has no argument {strange[0][:80]!r} here")


def fitted(
    operator: torch._ops.OpOverload,
    arguments: Mapping[str, Any],
    tensors: Sequence[Any],
    device: str | torch.device,
) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a call of the operator, by its schema.

    Raises Refusal where one is missing that this torch's operator needs.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.name in arguments:
            value = decoded(arguments[argument.name], tensors, device)
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise Refusal(
                f"{schema_name(operator)} needs an argument {argument.name!r} in this torch"
            )
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


ALIGNED_BYTES = 64
"""A cache line: what torch's CPU allocator aligns to (others to more)."""
SPAN_BYTES = 1 << 30
"""A layout may span this much memory, or ``SPAN_RATIO`` times what the values take."""
SPAN_RATIO = 64


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both counted; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def laid_out(
    values: torch.Tensor,
    stride: Sequence[int] | None,
    *,
    device: str | torch.device = "cpu",
    misalignment_bytes: int = 0,
) -> torch.Tensor:
    """A fresh copy of ``values`` on ``device`` under ``stride`` (None: contiguous)."""
    shape = tuple(values.shape)
    if stride is None or 0 in shape:
        stride = contiguous_stride(shape)
    if len(stride) != len(shape):
        raise Unsafe("its operands' layout is damaged", detail=f"{stride} for shape {shape}")
    span = span_of(shape, stride)
    if span * values.itemsize > max(SPAN_BYTES, SPAN_RATIO * values.nbytes):
        raise Unsafe("its operands' layout spans too much memory", detail=f"{span} elements")
    room = ALIGNED_BYTES // values.itemsize
    memory = torch.zeros(span + room, dtype=values.dtype, device=device)
    # torch aligns what it allocates; an address between two elements cannot be had
    start = (misalignment_bytes - memory.data_ptr()) % ALIGNED_BYTES // values.itemsize
    fresh = memory.as_strided(shape, stride, start)
    if not _overlaps(shape, stride):
        fresh.copy_(values)
        return fresh
    # Elements that share memory: all of them hold the same value, so any may be the last written.
    places = torch.full(shape, start, dtype=torch.int64)
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        view = [1] * len(shape)
        view[axis] = size
        places += (torch.arange(size) * step).reshape(view)
    memory[places.reshape(-1).to(device)] = values.reshape(-1).to(device)
    return fresh


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major: ``(2, 3, 4)`` → ``(12, 4, 1)``."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """May two elements lie at one place? (Sorted by stride, each axis must step over the last.)"""
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False

"""What is recorded of a call: operator, source line, arguments, and where each operand is from."""

from __future__ import annotations

import json
from typing import Any

from divergence.layout.lines import Line, prose
from divergence.layout.numbers import shape_text
from divergence.run.schema.record import Call, Operand, operand_indices

__all__ = ["call_lines"]


def call_lines(call: Call) -> list[Line]:
    """Indented under the operator's site."""
    lines = [prose("  operator", call.operator, width=12)]
    if call.source is not None:
        lines.append(prose("  called at", call.source, width=12))
    if call.note is not None:
        lines.append(prose("  note", f"it cannot be run again alone: {call.note}", width=12))
    told: set[int] = set()
    for name, value in call.arguments.items():
        numbers = [n for n in operand_indices(call, name) if _is_number(n, call)]
        if not numbers:
            lines.append(prose("  argument", f"{name} = {_short(value)}", width=12))
        for place, number in enumerate(numbers):
            full = name if len(numbers) == 1 else f"{name}.{place}"
            lines.append(prose("  operand", f"{full}: {_operand(call.operands[number])}", width=12))
            told.add(number)
    for number, operand in enumerate(call.operands):
        if number not in told:
            lines.append(prose("  operand", _operand(operand), width=12))
    return lines


def _is_number(value: Any, call: Call) -> bool:
    """A stranger's run may hold anything there."""
    return type(value) is int and 0 <= value < len(call.operands)


def _operand(operand: Operand) -> str:
    whence = operand.site or "not recorded"
    if operand.weight is not None:
        stored = "" if operand.site is None else f", stored as {operand.site}"
        whence = f"weight {operand.weight}{stored}"
    parts = [f"{whence}, {operand.dtype} {shape_text(operand.shape)}"]
    if operand.stride is not None:
        parts.append(f"strides {shape_text(operand.stride)}")
    if operand.via:
        origin = f" of {operand.origin}" if operand.origin not in (None, operand.site) else ""
        parts.append(f"by {', '.join(operand.via)}{origin}")
    return "; ".join(parts)


def _short(value: Any) -> str:
    """JSON, and of an object of one key its value alone."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
        return str(value)[:80]
    return json.dumps(value)[:80]

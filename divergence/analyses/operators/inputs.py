"""What went into a matched operator: the same things on both sides, or others?

Wrong code often computes nothing wrong: it hands the right numbers on in the wrong order, takes
another result, another mask or another weight. Then the first operator that works on them
gives something else, while everything before it is fine. So each operand's provenance is
compared: whose memory it lies in (``Operand.origin``, of matched operators), through which
views, with which strides, and which weight it is.

Layouts differ between healthy kernels too: what differs in provenance counts only where the values
that the operator saw differ by more than what their origins differ by (operator_judge).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from divergence.comparison.calls.graph import Node, maker_of
from divergence.comparison.results.operators import OtherInput
from divergence.run.reader import Run
from divergence.run.schema.record import Call, Operand, Record

__all__ = ["argument_names", "operand_record", "other_inputs", "relative_difference"]


def other_inputs(
    one: Node, two: Node, a: Run, b: Run, *, partner: Callable[[str], str | None]
) -> list[OtherInput]:
    """Arguments of the reference's call ``one`` and the candidate's ``two`` that do not come from
    the same place. ``partner``: the candidate's path of a reference's matched call."""
    if one.name != two.name or len(one.call.operands) != len(two.call.operands):
        return []
    found: list[OtherInput] = []
    names = argument_names(one.call)
    for number, (mine, other) in enumerate(zip(one.call.operands, two.call.operands, strict=True)):
        if mine.weight is not None and other.weight is not None:
            if (mine.xxh3, mine.offset) == (other.xxh3, other.offset):
                continue
        elif _same_place(mine, other, partner):
            continue
        left, right = operand_record(one, mine, a), operand_record(two, other, b)
        if left is not None and right is not None and left.xxh3 == right.xxh3:
            continue
        viewed = _same_maker(mine, other, partner) and mine.weight == other.weight
        words = _words(mine), _words(other)
        if words[0] == words[1]:
            words = f"{words[0]}{_strides(mine)}", f"{words[1]}{_strides(other)}"
        difference = None
        if left is not None and right is not None and mine.shape == other.shape:
            difference = relative_difference(a.read(left), b.read(right))
        found.append(
            OtherInput(
                argument=names.get(number, str(number)), reference=words[0], candidate=words[1],
                viewed=viewed and maker_of(mine) is not None, difference=difference,
            )
        )  # fmt: skip
    return found


def relative_difference(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """‖x - y‖ / ‖x‖ over what is finite on both sides and no mask; None where there is nothing."""
    if x.numel() != y.numel() or x.is_complex() or y.is_complex():
        return None
    x, y = x.reshape(-1).to(torch.float64), y.reshape(-1).to(torch.float64)
    masked = [t.abs() > 1e4 for t in (x, y)]  # finfo.min of float16 is -65504
    if bool((masked[0] != masked[1]).any()):
        return 1.0
    kept = x.isfinite() & y.isfinite() & ~masked[0]
    norm = float(x[kept].norm())
    apart = float((x - y)[kept].norm())
    return apart / norm if norm > 0 else float(apart > 0)


def _same_place(mine: Operand, other: Operand, partner: Callable[[str], str | None]) -> bool:
    if maker_of(mine) is None and maker_of(other) is None:
        return False  # from outside: its value tells
    same = _same_maker(mine, other, partner)
    return same and mine.via == other.via and mine.stride == other.stride


def _same_maker(mine: Operand, other: Operand, partner: Callable[[str], str | None]) -> bool:
    made = maker_of(mine), maker_of(other)
    if made[0] is None or made[1] is None:
        return made[0] is made[1] and mine.origin == other.origin
    return partner(made[0]) == made[1]


def operand_record(node: Node, operand: Operand, run: Run) -> Record | None:
    """The record that holds an operand's value, as the operator saw it."""
    if operand.site is None:
        return None
    own = node.results[0]
    return run.find((own.pass_, own.sample, own.step, operand.site))


def argument_names(call: Call) -> dict[int, str]:
    found: dict[int, str] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, dict) and set(value) == {"tensor"}:
            found[value["tensor"]] = name
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(f"{name}[{index}]", item)

    for name, value in call.arguments.items():
        walk(name, value)
    return found


def _words(operand: Operand) -> str:
    """Where it comes from."""
    origin = operand.weight or maker_of(operand) or operand.origin or "outside the block"
    via = f" via {' '.join(operand.via)}" if operand.via else ""
    offset = f" from element {operand.offset}" if operand.offset else ""
    return f"{origin}{via}{offset}"


def _strides(operand: Operand) -> str:
    return f" with strides {operand.stride}" if operand.stride else " contiguous"

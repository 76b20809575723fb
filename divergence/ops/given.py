"""What two recorded calls were given: the first thing that is not the same, in words.

A reproducer shows what an operator makes of its inputs on two machines. Where the other machine's
operator had other inputs, other weights or other scalars, its result would blame it for what it was
given. Equal means equal bit for bit; where a side did not store an operand, its weight's digest
counts, and otherwise nothing can be said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from divergence.ops.calls import RecordedCall, operand_value
from divergence.ops.refusal import Refusal
from divergence.ops.reproducer.differences import difference
from divergence.run.reader import Run
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.record import Call, operand_indices
from divergence.run.schema.scalars import other_scalars, scalar_words

if TYPE_CHECKING:
    import torch

__all__ = ["what_differs"]


def what_differs(
    one: RecordedCall, values: Sequence[torch.Tensor], other: Run, theirs: RecordedCall
) -> str | None:
    """Of the call ``one``, whose operands have ``values``, and the call ``theirs`` of ``other``;
    None where they were given the same."""
    mine, call = one.call, theirs.call
    if mine.operator != call.operator or len(mine.operands) != len(call.operands):
        return f"it is {call.operator} with {len(call.operands)} tensors there"
    scalars = other_scalars(mine, call)
    if scalars:
        item = scalars[0]
        return (
            f"{item.argument}={scalar_words(item.candidate)} there, "
            f"{scalar_words(item.reference)} here"
        )
    names = _names(mine)
    for number, (x, y) in enumerate(zip(mine.operands, call.operands, strict=True)):
        name = names.get(number, str(number))
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} is {y.dtype} {y.shape} there, {x.dtype} {x.shape} here"
        if x.weight is not None and y.weight is not None:
            if (x.xxh3, x.offset, x.stride) != (y.xxh3, y.offset, y.stride):
                return f"{name} is another weight there ({y.weight}, here {x.weight})"
            continue
        try:
            value = operand_value(other, theirs.first, y, None)
        except Refusal:
            return f"what {name} was is not recorded there"
        if digest_tensor(value) != digest_tensor(values[number]):
            found = difference(value, values[number])
            by = "" if found is None else f" by rel L2 {found.rel_l2:.3g}"
            return f"{name} differs{by}"
    return None


def _names(call: Call) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in call.arguments:
        for place, number in enumerate(operand_indices(call, name)):
            found[number] = name if place == 0 else f"{name}[{place}]"
    return found

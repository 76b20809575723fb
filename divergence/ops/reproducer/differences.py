"""How two recorded calls differ: in what they were given, and in what they gave.

A reproducer shows what an operator makes of its inputs on two machines. Where the other machine's
operator had other inputs, other weights or other scalars, its result would blame it for what it was
given. Equal means equal bit for bit; where a side did not store an operand, its weight's digest
counts, and otherwise nothing can be said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from divergence.numerics.formats import format_of
from divergence.numerics.pairs.ulp import NAN_DISTANCE, ulp_distance
from divergence.ops.allowed import Refusal
from divergence.ops.calls import RecordedCall, operand_value
from divergence.run.reader import Run
from divergence.run.schema.fingerprint import digest_tensor
from divergence.run.schema.record import Call, operand_indices
from divergence.run.schema.scalars import other_scalars, scalar_words

__all__ = ["Difference", "difference", "store_error", "what_differs"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``max_abs``: greatest |a - b|. ``rel_l2``: ‖a - b‖ / ‖b‖ (0/0 = 0, x/0 = inf). ``max_ulp``:
    greatest distance in representable values of a's format, b rounded to it; None where it has
    none. ``num_different`` of ``numel`` elements; all in float64, nan where a value is nan."""

    max_abs: float
    rel_l2: float
    max_ulp: int | None
    num_different: int
    numel: int


def difference(a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """Of ``a`` from ``b``; None where their shapes differ."""
    if a.shape != b.shape:
        return None
    a, b = a.reshape(-1), b.reshape(-1)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    lhs, rhs = a.to(wide), b.to(wide)
    gap = torch.where(lhs == rhs, 0.0, (lhs - rhs).abs())  # equal infinities differ by nothing
    top, bottom = float(gap.norm()), float(rhs.abs().norm())
    ulp = None
    form = format_of(a.dtype)
    if form.kind == "float" and form.name != "float64":
        distances = ulp_distance(a, b.to(a.dtype), form)
        ulp = int(distances.max()) if distances.numel() else 0
        ulp = None if ulp == NAN_DISTANCE else ulp
    return Difference(
        max_abs=float(gap.max()) if gap.numel() else 0.0,
        rel_l2=0.0 if top == 0 else (top / bottom if bottom else math.inf),
        max_ulp=ulp,
        num_different=int((gap != 0).sum()),
        numel=a.numel(),
    )


def store_error(truth: torch.Tensor, dtype: torch.dtype) -> float | None:
    """‖round(R) - R‖ / ‖R‖: what storing the right result in ``dtype`` costs."""
    apart = difference(truth.to(dtype), truth)
    return None if apart is None else apart.rel_l2


def what_differs(
    ours: RecordedCall, values: Sequence[torch.Tensor], other: Run, theirs: RecordedCall
) -> str | None:
    """Of the call ``ours``, whose operands have ``values``, and the call ``theirs`` of ``other``;
    None where they were given the same."""
    mine, call = ours.call, theirs.call
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
            apart = difference(value, values[number])
            by = "" if apart is None else f" by rel L2 {apart.rel_l2:.3g}"
            return f"{name} differs{by}"
    return None


def _names(call: Call) -> dict[int, str]:
    names: dict[int, str] = {}
    for name in call.arguments:
        for place, number in enumerate(operand_indices(call, name)):
            names[number] = name if place == 0 else f"{name}[{place}]"
    return names

"""What went into a matched operator on both sides: tensors, scalars and constants.

Wrong code often computes nothing wrong: it hands the right numbers on in the wrong order, takes
another result, another mask or another weight. Then the first operator that works on them
gives something else, while everything before it is fine. So each tensor's provenance is
compared: whose memory it lies in (``Operand.origin``, of matched operators), through which
views, with which strides, and which weight it is. Layouts differ between healthy kernels too: other
provenance counts only where the values that the operator saw differ by more than what their
origins differ by (operators.judge).

A scalar or keyword argument (an attention scale, an epsilon, a flag) is an operand too, and a
difference in it is a fact, not a measurement: two calls with other numbers do other jobs. So are
constants: small tensors, masks and integers made outside the recorded modules, and small buffers.
Numbers are compared as they stand in the record (run.schema.scalars); small floating-point
constants may differ by 4 u of their dtype, two roundings of two values each within one ulp;
integers and masks must be equal. Large tables (rotary angles) count as tensors, since correct code
makes them differ by more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace

from divergence.analyses.operators.regions import Region, computing
from divergence.comparison.calls import COPIES, CallNode, maker_of
from divergence.comparison.results import OtherInput, OtherOperand
from divergence.facts import Fact, fact, plain, sentence, worded
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, OtherScalar, Record, other_scalars, scalar_words

_SMALL = 64
"""Elements of a constant: more are a table."""
_SHOWN = 4
"""Elements that are printed."""
_ROUNDINGS = 4
_ONE_ROUNDING = 1.01
"""Unit roundoffs: a number rounded to float32 first, and then to a narrower dtype."""
_MEASURED = 2.0**-5
"""Four ulp of bfloat16."""


def other_operands(
    ours: CallNode, theirs: CallNode, a: Run, b: Run, *, measured: bool = False
) -> list[OtherOperand]:
    """Scalars and constants that differ between the reference's call and its partner.

    ``measured``: the model takes numbers out of tensors (``.item()``), so a scalar may be a result,
    which rounding moves: one that is off by less than ``_MEASURED`` is told, and is no fact.
    """
    if ours.name != theirs.name:
        return []
    operands = [
        OtherOperand(
            argument=item.argument,
            kind="scalar",
            reference_value=plain(scalar_words(item.reference)),
            candidate_value=plain(scalar_words(item.candidate)),
            is_value=item.is_number and not (measured and _is_near(item)),
            difference=_relative(item.reference, item.candidate),
        )
        for item in other_scalars(ours.call, theirs.call)
    ]
    operands += _tensors_for_numbers((ours, a), (theirs, b))
    if len(ours.call.operands) != len(theirs.call.operands):
        return operands
    names = argument_names(ours.call)
    for number, (mine, other) in enumerate(
        zip(ours.call.operands, theirs.call.operands, strict=True)
    ):
        if _is_written(ours, names.get(number, "")):
            continue  # what it writes to may be memory that nothing was written to before
        item = _other_constant(names.get(number, str(number)), (ours, mine, a), (theirs, other, b))
        if item is not None:
            operands.append(item)
    return operands


def _tensors_for_numbers(
    mine: tuple[CallNode, Run], other: tuple[CallNode, Run]
) -> list[OtherOperand]:
    """Arguments that are a number on one side and a tensor of one number on the other (a buffer, a
    constant, or a copy of one), where the number is not the tensor's, rounded to its dtype."""
    operands = []
    tensors = [
        {name: index for index, name in argument_names(node.call).items()}
        for node, _ in (mine, other)
    ]
    for name in tensors[0].keys() ^ tensors[1].keys():
        numbers, units = [], []
        for (node, run), by_name in zip((mine, other), tensors, strict=True):
            value = node.call.arguments.get(name)
            if name in by_name:
                operand = node.call.operands[by_name[name]]
                record = operand_record(node, operand, run)
                if record is None or record.numel != 1 or not _is_given(operand):
                    break
                form = format_named(record.dtype)
                units.append(form.unit_roundoff if form.kind == "float" else 0.0)
                value = run.read(record).item() if run.has_bytes(record) else None
            if isinstance(value, bool) or not isinstance(value, int | float):
                break
            numbers.append(value)
        if len(numbers) < 2:
            continue
        difference = _relative(*numbers)
        if difference is not None and difference > _ONE_ROUNDING * max(*units, 2.0**-24):
            operands.append(OtherOperand(
                argument=name, kind="constant", reference_value=plain(f"{numbers[0]:.9g}"),
                candidate_value=plain(f"{numbers[1]:.9g}"), difference=difference,
            ))  # fmt: skip
    return operands


def _is_given(operand: Operand) -> bool:
    """Was it made outside the recorded modules, or is it a copy of what was?"""
    maker = maker_of(operand)
    return maker is None or maker.rpartition("/")[2].partition("#")[0] in COPIES


def region_operands(region: Region, a: Run, b: Run, *, measured: bool) -> list[OtherOperand]:
    """The same of a region whose sides call the same operators, each once, with other casts and
    layouts between them."""
    ours, theirs = (computing(side) for side in (region.reference, region.candidate))
    names = [node.name for node in ours]
    if names != [node.name for node in theirs] or len(set(names)) < len(names):
        return []
    return [
        replace(item, site=mine.path)
        for mine, other in zip(ours, theirs, strict=True)
        for item in other_operands(mine, other, a, b, measured=measured)
    ]


def _is_near(item: OtherScalar) -> bool:
    apart = _relative(item.reference, item.candidate)
    return apart is not None and apart < _MEASURED


def _is_written(node: CallNode, argument: str) -> bool:
    name = node.call.operator.split(".")[1] if "." in node.call.operator else ""
    return argument == "out" or (argument == "self" and name.endswith("_"))


def _other_constant(
    name: str, mine: tuple[CallNode, Operand, Run], other: tuple[CallNode, Operand, Run]
) -> OtherOperand | None:
    operands = mine[1], other[1]
    if any(maker_of(operand) is not None for operand in operands):
        return None
    left, right = operand_record(*mine), operand_record(*other)
    if left is None or right is None or left.xxh3 == right.xxh3:
        return None
    weights = [operand.weight is not None for operand in operands]
    if any(weights) and (not all(weights) or left.numel > _SMALL):
        return None  # a weight; a small buffer is a constant
    if operands[0].shape != operands[1].shape or operands[0].dtype != operands[1].dtype:
        return None
    if not (mine[2].has_bytes(left) and other[2].has_bytes(right)):
        return None
    x, y = mine[2].read(left), other[2].read(right)
    if x.numel() != y.numel():
        return None
    difference = relative_difference(x, y)
    if not _differs(x, y, operands[0].dtype, difference):
        return None
    return OtherOperand(
        argument=name, kind="constant", reference_value=_value(x), candidate_value=_value(y),
        is_value=True, difference=difference,
    )  # fmt: skip


def _differs(x: torch.Tensor, y: torch.Tensor, dtype: str, difference: float | None) -> bool:
    form = format_named(dtype)
    if form.kind in ("int", "bool"):
        return bool((x.reshape(-1) != y.reshape(-1)).any())
    if form.kind != "float" or difference is None:
        return False
    if _is_mask(x) and _is_mask(y):
        return difference > 0
    return x.numel() <= _SMALL and difference > _ROUNDINGS * form.unit_roundoff


def _is_mask(values: torch.Tensor) -> bool:
    """Nothing but zeros and numbers far below every score."""
    return values.is_floating_point() and bool(((values == 0) | (values < -1e4)).all())


def _value(tensor: torch.Tensor) -> Fact:
    """A tensor in a few words."""
    total, num_set = tensor.numel(), int((tensor != 0).sum())
    if total <= _SHOWN:
        numbers = [f"{v:.9g}" if isinstance(v, float) else str(v)
                   for v in tensor.reshape(-1).tolist()]  # fmt: skip
        return fact("operators.numbers", numbers=numbers, scalar=tensor.ndim == 0)
    if not tensor.is_floating_point():
        return fact("operators.num_set", num_set=num_set, total=total)
    if not num_set:
        return fact("operators.zeros", total=total)
    if _is_mask(tensor):
        return fact("operators.num_masked", num_set=num_set, total=total)
    return fact("operators.norm", total=total, norm=float(tensor.double().norm()))


def _relative(mine: object, other: object) -> float | None:
    """By how much the candidate's number is off the reference's; None for what is no number."""
    if isinstance(mine, bool) or isinstance(other, bool):
        return None
    if not isinstance(mine, int | float) or not isinstance(other, int | float):
        return None
    return abs(other - mine) / abs(mine) if mine else float("inf")


def operand_facts(items: list[OtherOperand], side: str = "candidate") -> list[Fact]:
    """``other=0.13125 (A 0.125)``: a side's own first."""
    return [
        fact("operators.operand", argument=item.argument, side=side,
             reference=item.reference_value, candidate=item.candidate_value)
        for item in items[:3]
    ]  # fmt: skip


def operands_text(items: list[OtherOperand], side: str) -> str:
    """The same in words, for a bug report."""
    return sentence(fact("operators.operands", operands=operand_facts(items, side)))


def given_inputs(ours: CallNode, theirs: CallNode, a: Run, b: Run) -> list[OtherInput]:
    """By how much each tensor operand of two calls differs, the largest first; equal ones are left
    out. For a pair that is right on both sides: what it is given then tells."""
    if len(ours.call.operands) != len(theirs.call.operands):
        return []
    names = argument_names(ours.call)
    inputs = []
    for number, (mine, other) in enumerate(
        zip(ours.call.operands, theirs.call.operands, strict=True)
    ):
        left, right = operand_record(ours, mine, a), operand_record(theirs, other, b)
        if left is None or right is None or mine.shape != other.shape or left.xxh3 == right.xxh3:
            continue
        difference = relative_difference(a.read(left), b.read(right))
        inputs.append(
            OtherInput(
                argument=names.get(number, str(number)),
                origin_in_reference=fact("operators.origin", name=_maker(mine)),
                origin_in_candidate=fact("operators.origin", name=_maker(other)),
                difference=difference,
            )
        )
    return worded(sorted(inputs, key=lambda item: -(item.difference or 0.0)))


def other_inputs(
    ours: CallNode, theirs: CallNode, a: Run, b: Run, *, partner: Callable[[str], str | None]
) -> list[OtherInput]:
    """Arguments of the reference's call ``ours`` and the candidate's ``theirs`` that do not come
    from the same place. ``partner``: the candidate's path of a reference's matched call."""
    if ours.name != theirs.name or len(ours.call.operands) != len(theirs.call.operands):
        return []
    inputs: list[OtherInput] = []
    names = argument_names(ours.call)
    for number, (mine, other) in enumerate(
        zip(ours.call.operands, theirs.call.operands, strict=True)
    ):
        if mine.weight is not None and other.weight is not None:
            if (mine.xxh3, mine.offset) == (other.xxh3, other.offset):
                continue
        elif _same_place(mine, other, partner):
            continue
        left, right = operand_record(ours, mine, a), operand_record(theirs, other, b)
        if left is not None and right is not None and left.xxh3 == right.xxh3:
            continue
        viewed = _same_maker(mine, other, partner) and mine.weight == other.weight
        origins = [_origin(operand) for operand in (mine, other)]
        if origins[0] == origins[1]:
            origins = [
                fact("operators.strided", origin=origins[0], strides=operand.stride or None)
                for operand in (mine, other)
            ]
        difference = None
        if left is not None and right is not None and mine.shape == other.shape:
            difference = relative_difference(a.read(left), b.read(right))
        inputs.append(
            OtherInput(
                argument=names.get(number, str(number)), origin_in_reference=origins[0],
                origin_in_candidate=origins[1], viewed=viewed and maker_of(mine) is not None,
                difference=difference,
            )
        )  # fmt: skip
    return inputs


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


def operand_record(node: CallNode, operand: Operand, run: Run) -> Record | None:
    """The record that holds an operand's value, as the operator saw it."""
    if operand.site is None:
        return None
    own = node.results[0]
    return run.find((own.pass_, own.sample, own.step, operand.site))


def argument_names(call: Call) -> dict[int, str]:
    names: dict[int, str] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, dict) and set(value) == {"tensor"}:
            names[value["tensor"]] = name
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(f"{name}[{index}]", item)

    for name, value in call.arguments.items():
        walk(name, value)
    return names


def _maker(operand: Operand) -> str | None:
    return operand.weight or maker_of(operand) or operand.origin or None


def _origin(operand: Operand) -> Fact:
    """Where it comes from."""
    return fact(
        "operators.origin", name=_maker(operand), via=list(operand.via),
        element=operand.offset or None,
    )  # fmt: skip

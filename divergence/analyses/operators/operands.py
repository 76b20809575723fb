"""Operators that do one job together, and what went into a matched one on both sides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from msgspec.structs import replace

from divergence.comparison.calls import (
    COPIES,
    CallNode,
    Forward,
    Match,
    Places,
    Source,
    is_copy,
    maker_of,
    reached,
)
from divergence.comparison.constants import MOST_ELEMENTS_OF_CONSTANT, TWICE_ROUNDED_ROUNDOFFS
from divergence.comparison.result import OtherInput, OtherOperand
from divergence.facts import Fact, fact, plain, sentence, worded
from divergence.numerics.floor import THRESHOLDS, floor_weights
from divergence.numerics.formats import format_named, format_of
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, Record, other_scalars, scalar_words

# What went into a matched operator on both sides: tensors, scalars and constants.
#
# Wrong code often computes nothing wrong: it hands the right numbers on in the wrong order, takes
# another result, another mask or another weight. Then the first operator that works on them
# gives something else, while everything before it is fine. So each tensor's provenance is
# compared: whose memory it lies in (``Operand.origin``, of matched operators), through which
# views, with which strides, and which weight it is. Layouts differ between healthy kernels too:
# other provenance counts only where the values that the operator saw differ by more than what their
# origins differ by (operators.measure).
#
# A scalar or keyword argument (an attention scale, an epsilon, a flag) is an operand too, and a
# difference in it is a fact, not a measurement: two calls with other numbers do other jobs. So are
# constants: small tensors, masks and integers made outside the recorded modules, and small buffers.
# Numbers are compared as they stand in the record (run.record.other_scalars); small floating-point
# constants may differ by 4 u of their dtype, two roundings of two values each within one ulp;
# integers and masks must be equal. Large tables (rotary angles) count as tensors, since correct
# code makes them differ by more.

_SHOWN = 4
"""Elements that are printed."""


def other_operands(
    node_a: CallNode, node_b: CallNode, a: Run, b: Run, *, measured: bool = False
) -> list[OtherOperand]:
    """Scalars and constants that differ between the reference's call and its partner.

    ``measured``: the model takes numbers out of tensors (``.item()``), so a scalar may be a result,
    which rounding moves: one that is off by less than four ulp of bfloat16 is told, and no fact.
    """
    if node_a.name != node_b.name:
        return []
    operands = []
    for item in other_scalars(node_a.call, node_b.call):
        difference = _relative(item.reference, item.candidate)
        ulps = TWICE_ROUNDED_ROUNDOFFS * torch.finfo(torch.bfloat16).eps
        near = measured and difference is not None and difference < ulps
        scalar = OtherOperand(
            argument=item.argument,
            kind="scalar",
            is_value=item.is_number and not near,
            reference_value=plain(scalar_words(item.reference)),
            candidate_value=plain(scalar_words(item.candidate)),
            difference=difference,
        )
        operands.append(scalar)
    operands += _tensors_for_numbers((node_a, a), (node_b, b))
    changes = node_a.call.operator.partition(".")[2].partition(".")[0].endswith("_")
    for name, operand, other in _paired_operands(node_a, node_b):
        # what it writes to may be memory that nothing was written to before
        written = name == "out" or (name == "self" and changes)
        if not written and maker_of(operand) is None and maker_of(other) is None:
            constant = _other_constant(name, (node_a, node_b), (operand, other), (a, b))
            operands += [] if constant is None else [constant]
    return operands


def _paired_operands(node_a: CallNode, node_b: CallNode) -> Iterator[tuple[str, Operand, Operand]]:
    """Each argument's name, and both operands."""
    names, both = argument_names(node_a.call), (node_a.call.operands, node_b.call.operands)
    for number, (operand, other) in enumerate(
        zip(*both, strict=True) if len(both[0]) == len(both[1]) else ()
    ):
        yield names.get(number, str(number)), operand, other


def _tensors_for_numbers(
    call_a: tuple[CallNode, Run], other: tuple[CallNode, Run]
) -> list[OtherOperand]:
    """Arguments that are a number on one side and a tensor of one number on the other (a buffer, a
    constant, or a copy of one), where the number is not the tensor's, rounded to its dtype."""
    operands = []
    tensors = [{n: k for k, n in argument_names(node.call).items()} for node, _ in (call_a, other)]
    for name in tensors[0].keys() ^ tensors[1].keys():
        numbers, units = [], []
        for (node, run), by_name in zip((call_a, other), tensors, strict=True):
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
        if difference is not None and difference > TWICE_ROUNDED_ROUNDOFFS * max(*units, 2.0**-24):
            operands.append(
                OtherOperand(
                    argument=name,
                    kind="constant",
                    reference_value=plain(f"{numbers[0]:.9g}"),
                    candidate_value=plain(f"{numbers[1]:.9g}"),
                    difference=difference,
                )
            )
    return operands


def _is_given(operand: Operand) -> bool:
    """Was it made outside the recorded modules, or is it a copy of what was?"""
    maker = maker_of(operand)
    return maker is None or maker.rpartition("/")[2].partition("#")[0] in COPIES


def region_operands(region: Region, a: Run, b: Run, *, measured: bool) -> list[OtherOperand]:
    """The same of a region whose sides call the same operators, each once, with other casts and
    layouts between them."""
    nodes_a, nodes_b = (computing(side) for side in (region.reference, region.candidate))
    names = [node.name for node in nodes_a]
    if names != [node.name for node in nodes_b] or len(set(names)) < len(names):
        return []
    return [
        replace(item, site=node_a.path)
        for node_a, other in zip(nodes_a, nodes_b, strict=True)
        for item in other_operands(node_a, other, a, b, measured=measured)
    ]


def _other_constant(
    name: str,
    calls: tuple[CallNode, CallNode],
    operands: tuple[Operand, Operand],
    runs: tuple[Run, Run],
) -> OtherOperand | None:
    if operands[0].shape != operands[1].shape or operands[0].dtype != operands[1].dtype:
        return None
    weights = [operand.weight is not None for operand in operands]
    num = math.prod(operands[0].shape)
    if any(weights) and (not all(weights) or num > MOST_ELEMENTS_OF_CONSTANT):
        return None  # a weight; a small buffer is a constant
    form = format_named(operands[0].dtype)
    read = _values(calls, operands, runs) if form.kind in ("int", "bool", "float") else None
    if read is None or {t.numel() for t in read} != {num}:
        return None
    x, y = read
    difference = relative_difference(x, y)
    if form.kind != "float":
        differs = bool((x.reshape(-1) != y.reshape(-1)).any())
    elif _is_mask(x) and _is_mask(y):
        differs = bool(difference)
    else:
        differs = (
            num <= MOST_ELEMENTS_OF_CONSTANT
            and (difference or 0.0) > TWICE_ROUNDED_ROUNDOFFS * form.unit_roundoff
        )
    return (
        None
        if not differs
        else OtherOperand(
            argument=name,
            kind="constant",
            reference_value=_value(x),
            candidate_value=_value(y),
            is_value=True,
            difference=difference,
        )
    )


def _values(
    calls: tuple[CallNode, CallNode], operands: tuple[Operand, Operand], runs: tuple[Run, Run]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both sides' values of an argument, as the calls saw them; None where they are equal bit for
    bit, or a side has not recorded its own."""
    records = [operand_record(*each) for each in zip(calls, operands, runs, strict=True)]
    x, y = records
    if x is None or y is None or x.xxh3 == y.xxh3:
        return None
    if not (runs[0].has_bytes(x) and runs[1].has_bytes(y)):
        return None
    return runs[0].read(x), runs[1].read(y)


def _is_mask(values: torch.Tensor) -> bool:
    """Nothing but zeros and numbers far below every score."""
    return values.is_floating_point() and bool(((values == 0) | (values < -1e4)).all())


def _value(tensor: torch.Tensor) -> Fact:
    """A tensor in a few words."""
    total, num_set = tensor.numel(), int((tensor != 0).sum())
    if total <= _SHOWN:
        numbers = [
            f"{v:.9g}" if isinstance(v, float) else str(v) for v in tensor.reshape(-1).tolist()
        ]
        return fact("operators.numbers", numbers=numbers, scalar=tensor.ndim == 0)
    if not tensor.is_floating_point():
        return fact("operators.num_set", num_set=num_set, total=total)
    if not num_set:
        return fact("operators.zeros", total=total)
    if _is_mask(tensor):
        return fact("operators.num_masked", num_set=num_set, total=total)
    return fact("operators.norm", total=total, norm=float(tensor.double().norm()))


def _relative(value: object, other: object) -> float | None:
    """Tell how far the candidate's number is off the reference's; None for what is none."""
    if isinstance(value, bool) or isinstance(other, bool):
        return None
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        return None
    return abs(other - value) / abs(value) if value else float("inf")


def operand_facts(items: list[OtherOperand], side: str = "candidate") -> list[Fact]:
    """``other=0.13125 (A 0.125)``: a side's own first."""
    return [
        fact(
            "operators.operand",
            argument=item.argument,
            side=side,
            reference=item.reference_value,
            candidate=item.candidate_value,
        )
        for item in items[:3]
    ]


def operands_text(items: list[OtherOperand], side: str) -> str:
    """The same in words, for a bug report."""
    return sentence(fact("operators.operands", operands=operand_facts(items, side)))


def given_inputs(node_a: CallNode, node_b: CallNode, a: Run, b: Run) -> list[OtherInput]:
    """Return by how much each tensor operand of two calls differs, the largest first; equal ones
    are left out. For a pair that is right on both sides: what it is given then tells."""
    inputs = []
    for name, operand, other in _paired_operands(node_a, node_b):
        read = (
            _values((node_a, node_b), (operand, other), (a, b))
            if operand.shape == other.shape
            else None
        )
        if read is not None:
            given = OtherInput(
                argument=name,
                origin_in_reference=fact("operators.origin", name=_maker(operand)),
                origin_in_candidate=fact("operators.origin", name=_maker(other)),
                difference=relative_difference(*read),
            )
            inputs.append(given)
    return worded(sorted(inputs, key=lambda item: -(item.difference or 0.0)))


def other_inputs(
    node_a: CallNode, node_b: CallNode, a: Run, b: Run, *, partner: Callable[[str], str | None]
) -> list[OtherInput]:
    """Arguments of the reference's call ``node_a`` and the candidate's ``node_b`` that do not come
    from the same place. ``partner``: the candidate's path of a reference's matched call."""
    inputs: list[OtherInput] = []
    if node_a.name != node_b.name:
        return inputs
    for name, own, other in _paired_operands(node_a, node_b):
        weights = own.weight is not None and other.weight is not None
        if weights and (own.xxh3, own.offset) == (other.xxh3, other.offset):
            continue
        made = maker_of(own), maker_of(other)
        same_maker = made[0] is made[1] and own.origin == other.origin
        if made[0] is not None and made[1] is not None:
            same_maker = partner(made[0]) == made[1]
        # what comes from outside is told by its value
        seen_alike = same_maker and own.via == other.via and own.stride == other.stride
        if not weights and made != (None, None) and seen_alike:
            continue
        x, y = operand_record(node_a, own, a), operand_record(node_b, other, b)
        if x is not None and y is not None and x.xxh3 == y.xxh3:
            continue
        origins = [
            fact(
                "operators.origin",
                name=_maker(operand),
                via=list(operand.via),
                element=operand.offset or None,
            )
            for operand in (own, other)
        ]
        if origins[0] == origins[1]:
            origins = [
                fact("operators.strided", origin=origins[0], strides=operand.stride or None)
                for operand in (own, other)
            ]
        read = _values((node_a, node_b), (own, other), (a, b)) if own.shape == other.shape else None
        difference = None if read is None else relative_difference(*read)
        elsewhere = OtherInput(
            argument=name,
            origin_in_reference=origins[0],
            origin_in_candidate=origins[1],
            viewed=same_maker and own.weight == other.weight and made[0] is not None,
            difference=difference,
        )
        inputs.append(elsewhere)
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


# A region of products and additions against an ideal product: how often is its result rounded?
#
# An ideal product adds up in float32 and rounds once, when its result is stored: 0.41 u relative,
# measured here as ‖round(R) - R‖. The same product in k equal parts that are stored in 16 bits and
# added up one after the other rounds each part (together once the result) and each running sum
# (j / k of the result's square): √(1 + (k + 1) / 2 - 1 / k) roundings of the result, 1.4 for two
# parts and for a product whose bias is added afterwards, 1.8 for four, 2.3 for eight, 3.1 for
# sixteen. Both sides' errors against the truth hide that, since they hold what came in too; so each
# side's region is computed again in float64 from its own recorded inputs, and only what the region
# itself adds is judged (Higham 2002, chapter 4; numerics.floor for one rounding).
#
# Only for regions of products, additions and copies with the weights' values recorded, and for
# results in 16 bits: a fused attention or norm rounds its intermediates by its own right, and in
# float32 the accumulator makes the error. Everything else abstains.

_PRODUCTS = (
    "aten.mm",
    "aten.bmm",
    "aten.mv",
    "aten.matmul",
    "aten.addmm",
    "aten.baddbmm",
    "aten.linear",
)
_SUMS = ("aten.add", "aten.sub", "aten.cat", "aten.stack", "aten.sum")
CONSTANTS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.full", "aten.full_like")
"""What sums begin with."""


@dataclass(slots=True)
class RegionError:
    """Says what a side's region itself adds, squared and summed over rows: ‖y - R‖² / ‖R‖² and, of
    an ideal product, ‖round(R) - R‖² / ‖R‖² (0.41 u where everything happens to be stored
    exactly)."""

    own: float = 0.0
    ideal: float = 0.0
    num_values: int = 0

    def add(self, other: RegionError) -> None:
        self.own += other.own
        self.ideal += other.ideal
        self.num_values += other.num_values

    @property
    def times(self) -> float:
        """The own error over an ideal product's; 1 where both are exact."""
        if self.ideal > 0:
            return math.sqrt(self.own / self.ideal)
        return 1.0 if self.own == 0 else math.inf


def operand_record(node: CallNode, operand: Operand, run: Run) -> Record | None:
    """The record that holds an operand's value, as the operator saw it."""
    own = node.results[0]
    site = operand.site
    return None if site is None else run.find((own.pass_, own.sample, own.step, site))


def is_product_region(nodes: Sequence[CallNode]) -> bool:
    """Products, additions and copies alone, a product among them, stored in 16 bits."""
    if not any(node.name in _PRODUCTS for node in nodes):
        return False
    if not all(node.name in _PRODUCTS + _SUMS + CONSTANTS or is_copy(node) for node in nodes):
        return False
    form = format_named(nodes[-1].results[0].dtype)
    return form.kind == "float" and form.itemsize == 2


def own_error(run: Run, nodes: Sequence[CallNode]) -> RegionError | None:
    """Compute the own error of the region ``nodes`` (in order, the last gives the result) in one
    forward; None where an input was not recorded or an operator cannot be computed here."""
    made: dict[str, torch.Tensor] = {}
    paths = {node.path for node in nodes}
    for node in nodes:
        if node.name in CONSTANTS:
            made[node.path] = run.read(node.results[0]).to(torch.float64)
            continue
        operands = [
            _operand_value(run, node, operand, made, paths) for operand in node.call.operands
        ]
        values = [value for value in operands if value is not None]
        if len(values) < len(operands):
            return None
        result = _computed(node, values)
        if result is None or result.numel() != node.results[0].numel:
            return None
        made[node.path] = result.reshape(node.results[0].shape)
    last = nodes[-1].results[0]
    columns = last.shape[-1] if last.shape else 1
    truth = made[nodes[-1].path].reshape(-1, columns)
    value = run.read(last)
    stored = truth.to(value.dtype).to(torch.float64)
    value = value.reshape(-1, columns).to(torch.float64)
    norm = truth.norm(dim=1)
    kept = (norm > 0) & value.isfinite().all(1) & stored.isfinite().all(1)
    if not bool(kept.any()):
        return None
    parts = [((out - truth)[kept].norm(dim=1) / norm[kept]).square() for out in (value, stored)]
    num_rows, form = int(kept.sum()), format_named(last.dtype)
    rounding = floor_weights(form, num_features=columns)[0] / math.sqrt(2)
    ideal = float(parts[1].sum()) or num_rows * rounding**2
    return RegionError(float(parts[0].sum()), ideal, num_rows * columns)


def _operand_value(
    run: Run, node: CallNode, operand: Operand, made: dict[str, torch.Tensor], paths: set[str]
) -> torch.Tensor | None:
    maker = maker_of(operand)
    if operand.weight is None and maker in paths:
        if maker not in made or operand.via or operand.stride is not None:
            return None
        value = made[maker]
        return value.reshape(operand.shape) if value.numel() == math.prod(operand.shape) else None
    record, size = operand_record(node, operand, run), math.prod(operand.shape)
    if record is None or not run.has_bytes(record):
        return None
    if operand.weight is not None:
        if record.xxh3 != operand.xxh3:
            return None
        flat = run.read(record).contiguous().reshape(-1)
        stride = operand.stride
        if stride is None:
            return flat[operand.offset :][:size].reshape(operand.shape).double()
        last = sum(
            max(size - 1, 0) * step for size, step in zip(operand.shape, stride, strict=False)
        )
        if len(stride) != len(operand.shape) or operand.offset + last >= flat.numel():
            return None
        return flat.as_strided(operand.shape, stride, operand.offset).double()
    if record.numel != math.prod(operand.shape):
        return None
    return run.read(record).reshape(operand.shape).to(torch.float64)


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _computed(node: CallNode, values: list[torch.Tensor]) -> torch.Tensor | None:
    """Compute the result in float64; None for what is no plain product or addition."""
    arguments, name = node.call.arguments, node.name
    alpha, beta = arguments.get("alpha", 1), arguments.get("beta", 1)
    if not (_is_number(alpha) and _is_number(beta)):
        return None
    try:
        if is_copy(node):
            return values[-1] if name == "aten.copy" else values[0]
        if name in ("aten.mm", "aten.bmm", "aten.mv", "aten.matmul") and len(values) == 2:
            return values[0] @ values[1]
        if name == "aten.linear":
            product = values[0] @ values[1].T
            return product + values[2] if len(values) == 3 else product
        if name in ("aten.addmm", "aten.baddbmm") and len(values) == 3:
            return beta * values[0] + alpha * (values[1] @ values[2])
        if name in ("aten.add", "aten.sub"):
            other = values[1] if len(values) == 2 else arguments.get("other")
            if not values or not isinstance(other, torch.Tensor | int | float):
                return None
            return values[0] + (alpha if name == "aten.add" else -alpha) * other
        if name in ("aten.cat", "aten.stack"):
            dim = arguments.get("dim", 0)
            join = torch.cat if name == "aten.cat" else torch.stack
            return join(values, dim) if type(dim) is int else None
        if name == "aten.sum" and len(values) == 1:
            dims = arguments.get("dim")
            if dims is None:
                return values[0].sum()
            if not (isinstance(dims, list) and all(type(dim) is int for dim in dims)):
                return None
            return values[0].sum(dims, keepdim=arguments.get("keepdim") is True)
    except (RuntimeError, IndexError):  # shapes that a stranger's run claims
        return None
    return None


# Rows of pads in a batch's results: what stands there is no result.
#
# A pad's query sees no key, and what attention makes of none is any kernel's own choice: a fused
# one gives zeros, products and a softmax the mean of all values. Behind it the pads' rows are as
# far apart as two numbers can be, on two correct machines. So they are cleared before anything is
# measured, where the axes tell which rows they are: (B, T, ...), (B, ..., T, ...), (B N, ..., T,
# ...) and (B T, ...), with T the padded length. Of scores both axes are cleared.
#
# Where the axes do not tell, a result is not judged once pads are apart (further than rounding
# takes numbers), and no operator is blamed to which such a result leads. Decode steps have no pads:
# what their keys and values hold of them comes from before attention.


class Pads:
    """Says where the pads of one forward are. ``rows``: (B T,) where the pads are, None where it
    has none; ``apart``: were pads seen that the sides do not share?"""

    def __init__(self, manifest: Manifest, forward: Forward) -> None:
        first, step = forward
        self.apart = False
        pads = None if step else manifest.tokens.pads(first)
        self._grid = None if pads is None else torch.from_numpy(pads)  # (B, T)

    @property
    def rows(self) -> torch.Tensor | None:
        return None if self._grid is None else self._grid.reshape(-1)

    def mask(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return where a result of this shape holds pads; None where its axes do not tell."""
        assert self._grid is not None
        batch, length = self._grid.shape
        leading = shape[0] if shape else 0
        axes = [axis for axis in range(1, len(shape)) if shape[axis] == length]
        if leading == batch * length and not axes:
            return self._grid.reshape(-1, *[1] * (len(shape) - 1))
        if not leading or leading % batch or not axes or leading == batch * length:
            return None
        where = torch.zeros([1] * len(shape), dtype=torch.bool)
        rows = self._grid.repeat_interleave(leading // batch, 0)
        for axis in axes:
            where = where | rows.reshape(
                [leading, *(length if axis == other else 1 for other in range(1, len(shape)))]
            )
        return where

    def blank(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result with its pads set to 0, where its axes tell which they are."""
        where = None if self._grid is None else self.mask(tuple(tensor.shape))
        return tensor if where is None else tensor.masked_fill(where, 0)

    def cleared(
        self, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """The reference's, the candidate's and the right result of the ``shape`` with pads set to
        0; None where they cannot be judged, as pads may be among them."""
        if self._grid is None:
            return a, b, truth
        where = self.mask(shape)
        if where is None:
            return None if self.apart else (a, b, truth)
        where = where.expand(shape)
        self.apart = self.apart or _are_apart(where, a, b)
        return (
            _without(where, a),
            _without(where, b),
            None if truth is None else _without(where, truth),
        )


def _without(where: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(where.shape).masked_fill(where, 0).reshape(tensor.shape)


def _are_apart(where: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do the pads' values differ by more than rounding? Codes do not tell."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return False
    x, y = (t.reshape(where.shape)[where].double() for t in (a, b))
    both = x.isfinite() & y.isfinite()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return True
    x, y = x[both], y[both]
    norm, gap = max(float(x.norm()), float(y.norm())), float((x - y).norm())
    form = max((format_of(t.dtype) for t in (a, b)), key=lambda form: form.unit_roundoff)
    floor = math.hypot(*floor_weights(form, num_features=where.shape[-1]))
    return gap > THRESHOLDS.typical * floor * norm


# Regions: where the sides compute one thing by other operators, as one step.
#
# A region reaches from the last inputs that both sides have to the first result that both have: a
# fused attention against its products and its softmax, one matrix product against eight of its
# parts, three projections against one. Its members are the calls without a partner that lead to the
# common result, and those that give it. The common result is a pair that was matched by its value
# or by dataflow, or what a paired call was given as the same argument (a part of a fused
# projection's result, say, which is no call's result by itself).
#
# A call of one side alone that both sides' values lead through (a cast, a copy, a plant) makes no
# region: what it feeds tells of it (``fed_by``).


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """``reference``, ``candidate``: the members in execution order; the last gives the common
    result. ``operands``: where that is an argument of a paired call, its operand on each side and
    the two calls (``consumer``). ``inputs``: the sources that both sides begin from."""

    reference: list[CallNode]
    candidate: list[CallNode]
    inputs: list[Source]
    consumer: Match | None = None
    number: int = 0
    """Of the operand among the consumer's."""

    def operands(self) -> tuple[Operand, Operand] | None:
        if self.consumer is None:
            return None
        calls = self.consumer.reference.call, self.consumer.candidate.call
        return calls[0].operands[self.number], calls[1].operands[self.number]

    @property
    def size(self) -> int:
        """Elements of the argument, and 1."""
        operands = self.operands()
        return 0 if operands is None else 1 + math.prod(operands[0].shape)

    @property
    def is_copied(self) -> bool:
        """Do both sides but copy there, in one dtype? That makes no error: what is copied does."""
        results = [result for node in (*self.reference, *self.candidate) for result in node.results]
        return all(map(is_copy, (*self.reference, *self.candidate))) and (
            len({result.dtype for result in results}) == 1
        )

    @property
    def replaced(self) -> Fact:
        """``8 products and 7 additions in place of one product``."""
        candidate, reference = counted(self.candidate), counted(self.reference)
        shapes = [side[-1].results[0].shape for side in (self.candidate, self.reference)]
        alike = candidate == reference  # then their shapes tell
        if alike and shapes[0] == shapes[1]:
            return fact("operators.other_layouts", calls=candidate)
        return fact(
            "operators.in_place_of",
            candidate=candidate,
            reference=reference,
            candidate_shape=shapes[0] if alike else None,
            reference_shape=shapes[1] if alike else None,
        )


@dataclass(slots=True)
class Regions:
    """Holds the regions of one forward. ``by_pair``: of a pair's reference path; ``of_operands``:
    those whose common result is an argument; ``unreached``: calls without a partner that lead to
    nothing that both sides have, on each side: what could not be compared."""

    by_pair: dict[str, Region] = field(default_factory=dict)
    of_operands: dict[tuple[str, str], Region] = field(default_factory=dict)
    unreached: tuple[list[CallNode], list[CallNode]] = field(default_factory=lambda: ([], []))
    members: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))


def regions_in(
    reference: Sequence[CallNode],
    candidate: Sequence[CallNode],
    matches: Sequence[Match],
    rename: Callable[[str], str] = lambda site: site,
) -> Regions:
    places = Places(reference, candidate, rename)
    for match in matches:
        places.pair(match.reference, match.candidate)
    regions = Regions()
    leading: tuple[set[str], set[str]] = (set(), set())
    for match in matches:
        nodes = match.reference, match.candidate
        before = [_before(places, side, nodes[side]) for side in (0, 1)]
        for side in (0, 1):
            leading[side].update(node.path for node in before[side])
        if match.method in ("value", "dataflow") or nodes[0].name != nodes[1].name:
            region = _region(places, [*before[0], nodes[0]], [*before[1], nodes[1]])
            regions.by_pair[match.reference.path] = region
            _hold(regions, region, places)
            continue
        sources = zip(places.sources(0, nodes[0]), places.sources(1, nodes[1]), strict=False)
        for number, (x, y) in enumerate(sources):  # operands that calls without a partner made
            if not (places.lone(0, x) and places.lone(1, y)):
                continue
            makers = places.nodes[0][x[1]], places.nodes[1][y[1]]
            chains = [[*_before(places, side, makers[side]), makers[side]] for side in (0, 1)]
            region = _region(places, *chains, consumer=match, number=number)
            # of one common result that several calls are given, the call that is given most of it
            key = makers[0].path, makers[1].path
            if region.size > getattr(regions.of_operands.get(key), "size", 0):
                regions.of_operands[key] = region
            _hold(regions, region, places)
    for side, calls in enumerate((reference, candidate)):
        regions.unreached[side].extend(
            node
            for node in calls
            if places.lone(side, ("made", node.path))
            and node.path not in leading[side]
            and not is_copy(node)
        )
    return regions


def _hold(regions: Regions, region: Region, places: Places) -> None:
    """Its members, and the copies of one side alone among them, are in a region."""
    for side, members in enumerate((region.reference, region.candidate)):
        nodes = places.nodes[side]

        def copies(call: CallNode) -> list[CallNode]:
            lone = [f for f in call.feeds if f in nodes and places.lone(side, ("made", f))]  # noqa: B023
            return [nodes[feed] for feed in lone if is_copy(nodes[feed])]  # noqa: B023

        regions.members[side].update(n.path for n in (*members, *reached(members, copies)))


def _before(places: Places, side: int, node: CallNode) -> list[CallNode]:
    """Calls without a partner that lead to it, in order; copies are looked through."""

    def lone(call: CallNode) -> list[CallNode]:
        names = [source[1] for source in places.sources(side, call) if places.lone(side, source)]
        return [places.nodes[side][name] for name in names if name != node.path]

    return sorted(reached([node], lone), key=lambda call: call.order)


def _region(
    places: Places,
    nodes: list[CallNode],
    nodes_b: list[CallNode],
    *,
    consumer: Match | None = None,
    number: int = 0,
) -> Region:
    own = {node.path for node in nodes}
    sources = (source for node in nodes for source in places.sources(0, node))
    begins = dict.fromkeys(source for source in sources if source[1] not in own)
    return Region(nodes, nodes_b, list(begins), consumer, number)


_WORDS = {
    "product": (
        "mm",
        "bmm",
        "matmul",
        "linear",
        "mv",
        "dot",
        "_scaled_mm",
        "_grouped_mm",
        "einsum",
        "convolution",
    ),
    "product_with_bias": ("addmm", "baddbmm", "addmv", "addbmm"),
    "addition": ("add", "sub", "rsub", "__iadd__"),
    "multiplication": ("mul", "__imul__"),
    "division": ("div",),
    "softmax": ("_softmax", "_safe_softmax", "_log_softmax"),
    "sum": ("sum", "cumsum"),
    "mean": ("mean",),
    "power": ("pow", "square"),
    "root": ("rsqrt", "sqrt"),
    "concatenation": ("cat", "stack"),
    "cast": ("_to_copy", "to"),
    "copy": ("clone", "copy", "contiguous"),
}
_NAMES = {name: word for word, names in _WORDS.items() for name in names}


def computing(nodes: Sequence[CallNode]) -> list[CallNode]:
    """Those that are no copies, casts or constants."""
    return [node for node in nodes if not is_copy(node) and node.name not in CONSTANTS]


def counted(nodes: Sequence[CallNode]) -> list[Fact]:
    """``8 products and 7 additions``; copies and casts only where nothing else is there."""
    counts = Counter(_kind(node) for node in computing(nodes) or nodes)
    calls = [fact("operators.calls", num=num, kind=kind) for kind, num in counts.items()]
    if len(calls) > 4:
        rest = sum(list(counts.values())[3:])
        calls = [*calls[:3], fact("operators.more_calls", num=rest)]
    return calls or [fact("operators.no_calls")]


def _kind(node: CallNode) -> str:
    name = node.name.partition(".")[2]
    if "attention" in name:
        return "fused_attention"
    if "norm" in name and name != "linalg_vector_norm":
        return "fused_norm"
    return _NAMES.get(name, name or node.name)

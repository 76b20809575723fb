"""A region of products and additions against an ideal product: how often is its result rounded?

An ideal product adds up in float32 and rounds once, when its result is stored: 0.41 u relative,
measured here as ‖round(R) - R‖. The same product in k equal parts that are stored in 16 bits and
added up one after the other rounds each part (together once the result) and each running sum
(j / k of the result's square): √(1 + (k + 1) / 2 - 1 / k) roundings of the result, 1.4 for two
parts and for a product whose bias is added afterwards, 1.8 for four, 2.3 for eight, 3.1 for
sixteen. Both sides' errors against the truth hide that, since they hold what came in too; so each
side's region is computed again in float64 from its own recorded inputs, and only what the region
itself adds is judged (Higham 2002, chapter 4; numerics.floor for one rounding).

Only for regions of products, additions and copies with the weights' values recorded, and for
results in 16 bits: a fused attention or norm rounds its intermediates by its own right, and in
float32 the accumulator makes the error. Everything else abstains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from divergence.comparison.calls.graph import CallNode, is_copy, maker_of
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.run.record import Operand, Record

__all__ = ["CONSTANTS", "RegionError", "is_product_region", "own_error"]

_PRODUCTS = ("aten.mm", "aten.bmm", "aten.mv", "aten.matmul", "aten.addmm", "aten.baddbmm",
             "aten.linear")  # fmt: skip
_ONE_ROUNDING = 0.41  # u, rms (numerics.floor)
_SUMS = ("aten.add", "aten.sub", "aten.cat", "aten.stack", "aten.sum")
CONSTANTS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.full", "aten.full_like")
"""What sums begin with."""


@dataclass(slots=True)
class RegionError:
    """What a side's region itself adds, squared and summed over rows: ‖y - R‖² / ‖R‖² and, of an
    ideal product, ‖round(R) - R‖² / ‖R‖² (0.41 u where everything happens to be stored exactly)."""

    own: float = 0.0
    ideal: float = 0.0
    num_rows: int = 0
    num_values: int = 0

    def add(self, other: RegionError) -> None:
        self.own += other.own
        self.ideal += other.ideal
        self.num_rows += other.num_rows
        self.num_values += other.num_values

    @property
    def times(self) -> float:
        """The own error over an ideal product's; 1 where both are exact."""
        if self.ideal > 0:
            return math.sqrt(self.own / self.ideal)
        return 1.0 if self.own == 0 else math.inf


def is_product_region(nodes: Sequence[CallNode]) -> bool:
    """Products, additions and copies alone, a product among them, stored in 16 bits."""
    if not any(node.name in _PRODUCTS for node in nodes):
        return False
    if not all(node.name in _PRODUCTS + _SUMS + CONSTANTS or is_copy(node) for node in nodes):
        return False
    form = format_named(nodes[-1].results[0].dtype)
    return form.kind == "float" and form.itemsize == 2


def own_error(run: Run, nodes: Sequence[CallNode]) -> RegionError | None:
    """Of the region ``nodes`` (in order, the last gives the result) in one forward; None where an
    input was not recorded or an operator cannot be computed here."""
    made: dict[str, torch.Tensor] = {}
    paths = {node.path for node in nodes}
    for node in nodes:
        if node.name in CONSTANTS:
            made[node.path] = run.read(node.results[0]).to(torch.float64)
            continue
        known = [_value(run, node, operand, made, paths) for operand in node.call.operands]
        values = [value for value in known if value is not None]
        if len(values) < len(known):
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
    num_rows, u = int(kept.sum()), format_named(last.dtype).unit_roundoff
    ideal = float(parts[1].sum()) or num_rows * (_ONE_ROUNDING * u) ** 2
    return RegionError(float(parts[0].sum()), ideal, num_rows, num_rows * columns)


def _value(
    run: Run, node: CallNode, operand: Operand, made: dict[str, torch.Tensor], paths: set[str]
) -> torch.Tensor | None:
    maker = maker_of(operand)
    if operand.weight is None and maker in paths:
        if maker not in made or operand.via or operand.stride is not None:
            return None
        value = made[maker]
        return value.reshape(operand.shape) if value.numel() == math.prod(operand.shape) else None
    own = node.results[0]
    record = operand.site and run.find((own.pass_, own.sample, own.step, operand.site))
    if not record or not run.has_bytes(record):
        return None
    if operand.weight is not None:
        return _part(run, record, operand)
    if record.numel != math.prod(operand.shape):
        return None
    return run.read(record).reshape(operand.shape).to(torch.float64)


def _part(run: Run, record: Record, operand: Operand) -> torch.Tensor | None:
    """A weight as the operator saw it."""
    if record.xxh3 != operand.xxh3:
        return None
    flat = run.read(record).contiguous().reshape(-1)
    stride = operand.stride
    if stride is None:
        return flat[operand.offset :][: math.prod(operand.shape)].reshape(operand.shape).double()
    last = sum(max(size - 1, 0) * step for size, step in zip(operand.shape, stride, strict=False))
    if len(stride) != len(operand.shape) or operand.offset + last >= flat.numel():
        return None
    return flat.as_strided(operand.shape, stride, operand.offset).double()


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _are_dims(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(dim) is int for dim in value)


def _computed(node: CallNode, values: list[torch.Tensor]) -> torch.Tensor | None:
    """In float64; None for what is no plain product or addition."""
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
            if not _are_dims(dims):
                return None
            return values[0].sum(dims, keepdim=arguments.get("keepdim") is True)
    except (RuntimeError, IndexError):  # shapes that a stranger's run claims
        return None
    return None

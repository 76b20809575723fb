"""Facts about the order of additions of the operators that models use.

Which operators, at which shapes, and what a finding says as a fact. Kernels are chosen by shape,
so a fact names it, and only facts of one shape are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash

from divergence.arithmetic.additions.accumulator import find_accumulator, input_bits
from divergence.arithmetic.additions.describe import describe
from divergence.arithmetic.additions.order import OperatorOrders, Order, find_order
from divergence.arithmetic.additions.summing import (
    Summing,
    attention,
    linear,
    matmul,
    sdpa,
    summing,
)
from divergence.arithmetic.notebook import Notebook
from divergence.numerics.formats import format_of

__all__ = ["note_finding", "operators", "probe_orders"]

FULL = ("sum", "linear", "linear 16", "matmul", "attention", "sdpa")
QUICK = ("sum", "linear", "linear 16", "attention")

_MAKERS: dict[str, Callable[[int, torch.dtype, str], Summing]] = {
    "sum": summing,
    "linear": linear,
    "linear 16": lambda terms, dtype, device: linear(terms, dtype, device, rows=16),
    "matmul": lambda terms, dtype, device: matmul(terms, dtype, device, rows=16),
    "attention": attention,
    "sdpa": sdpa,
}


def operators(names: tuple[str, ...], terms: int, dtype: torch.dtype, device: str) -> list[Summing]:
    """The named operators at ``terms`` terms."""
    return [_MAKERS[name](terms, dtype, device) for name in names]


def probe_orders(notebook: Notebook, wanted: list[Summing]) -> list[OperatorOrders]:
    """Find, note and keep the order of each operator."""
    findings = []
    for operator in wanted:
        finding = find_order(operator)
        note_finding(notebook, finding)
        findings.append(finding)
    return findings


def note_finding(notebook: Notebook, finding: OperatorOrders) -> None:
    """One fact on the order; for the widths that it allows to measure, more."""
    operator = finding.operator
    if not finding.orders:
        notebook.note(
            "order", operator.title, "not revealed", verified=False, evidence=finding.reason,
            numbers={} if finding.error is None else {"error": finding.error},
        )  # fmt: skip
    else:
        digest = xxhash.xxh3_128()
        for order in finding.orders:
            digest.update(order.tree.digest.encode())
            digest.update(order.cells.numpy().tobytes())
        first = finding.orders[0]
        notebook.note(
            "order", operator.title, _value(finding), verified=finding.verified,
            digest=digest.hexdigest(),
            numbers={"terms": operator.terms, "partials": _mean_partials(finding),
                     "depth": first.tree.depth, "widest": first.tree.widest,
                     "rounded_products": int(_rounds_products(operator, first)),
                     "error": finding.error or 0.0},
            evidence=_evidence(finding),
        )  # fmt: skip
        _note_widths(notebook, operator, first)
    for trial in finding.trials:
        ports = {"in": trial.leaves, "out": trial.output}
        if operator.products:
            ports["in_partner"] = trial.partner
        notebook.keep("order", f"{operator.title} {trial.name}", **ports)
    for number, order in enumerate(finding.orders):
        tree = torch.tensor(order.tree.parents(), dtype=torch.int32)
        ports = {"out_parents": tree, "out_cells": order.cells}
        notebook.keep("order", f"{operator.title} tree {number}", **ports)


def _note_widths(notebook: Notebook, operator: Summing, order: Order) -> None:
    row = int(order.cells.any(1).nonzero()[0])
    accumulator = find_accumulator(operator, order.tree, row=row)
    if accumulator.bits is not None or accumulator.fraction_bits is not None:
        cut = None if accumulator.rounding is None else int(accumulator.rounding == "cut off")
        numbers = {"bits": accumulator.bits, "fraction_bits": accumulator.fraction_bits, "cut": cut}
        notebook.note(
            "accumulator", operator.title, accumulator.value, verified=order.verified, unit="bits",
            numbers={name: value for name, value in numbers.items() if value is not None},
        )  # fmt: skip
    if operator.products and format_of(operator.dtype).name == "float32":
        bits = input_bits(operator)
        if bits is not None:
            notebook.note(
                "input bits", operator.title, bits.value, unit="bits",
                numbers={"weight": bits.leaves, "input": bits.partner, "cut": int(bits.cut)},
            )  # fmt: skip
    how = order.proof.arithmetic
    if operator.products and how is not None and format_of(operator.dtype).name == "float32":
        value = "rounded products" if how.fused is None else "fused"
        if how.fraction_bits is not None:
            value = "exact products, fused"
        notebook.note("fma", operator.title, value, verified=order.verified)


def _value(finding: OperatorOrders) -> str:
    if len(finding.orders) == 1 and finding.num_classes == 1:
        return describe(finding.orders[0].tree)
    texts = [
        f"{int(order.cells.sum())} outputs: {describe(order.tree)}" for order in finding.orders
    ]
    missing = finding.num_classes - len(finding.orders)
    if missing:
        texts.append(f"{missing} more groups of outputs")
    return "; ".join(texts)


def _evidence(finding: OperatorOrders) -> str:
    if finding.verified:
        ways = {order.proof.arithmetic.title for order in finding.orders if order.proof.arithmetic}
        num = sum(order.proof.outputs for order in finding.orders)
        return f"{num} outputs replayed bit by bit: {', '.join(sorted(ways))}"
    if finding.reason is not None:
        return finding.reason
    best = sum(order.proof.best for order in finding.orders)
    num = sum(order.proof.outputs for order in finding.orders)
    if best == num:
        return "hardly any replayed output holds a rounding error, so they tell nothing"
    return f"only {best} of {num} outputs are replayed bit by bit"


def _mean_partials(finding: OperatorOrders) -> float:
    cells = [int(order.cells.sum()) for order in finding.orders]
    sums = [order.tree.partials for order in finding.orders]
    return sum(c * s for c, s in zip(cells, sums, strict=True)) / sum(cells)


def _rounds_products(operator: Summing, order: Order) -> bool:
    """Is every product rounded before it is added? Products of 16-bit formats are exact."""
    how = order.proof.arithmetic
    return (
        operator.products
        and format_of(operator.dtype).name == "float32"
        and how is not None
        and how.fused is None
        and how.fraction_bits is None
    )

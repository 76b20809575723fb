"""In which order an operator adds: found from outside, then proven or marked unverified.

1. Equal terms in every row and column, values whose exact sum is 0: outputs that differ were added
   in different orders (the last columns of a kernel, the rows beyond its block). Outputs fall into
   classes of equal bits.
2. FPRev (divergence.arithmetic.additions.fprev) on the outputs of one class at a time.
3. Proof (divergence.arithmetic.additions.proof) on other values: bit for bit, or the tree is not
   claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from divergence.arithmetic.additions.fprev import (
    NotATreeError,
    TooManyError,
    find_encoding,
    num_portions,
    reveal,
    size_measure,
)
from divergence.arithmetic.additions.proof import Proof, Trial, prove, trials
from divergence.arithmetic.additions.summing import Summing, cancelling
from divergence.arithmetic.additions.trees import Tree
from divergence.errors import first_line
from divergence.numerics.formats import format_of

__all__ = [
    "MAX_CLASSES",
    "OperatorOrders",
    "Order",
    "find_order",
    "output_classes",
    "typical_error",
]

MAX_CLASSES = 4
"""Orders looked for within one operator; more are counted only."""
MAX_TERMS_READ = 2**30
"""Terms that the masks of one order may hold in all: some seconds of two cores."""
_ERROR_OUTPUTS = 256
_LOOKS = 4
"""Different values with which outputs are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One tree and the outputs that it is of: ``cells`` (M, S)."""

    tree: Tree
    cells: torch.Tensor
    proof: Proof

    @property
    def verified(self) -> bool:
        return self.proof.verified


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOrders:
    """What was found of one operator: its orders, that of most outputs first.

    ``num_classes``: groups of outputs that are added alike; ``reason``: why there is no order, or
    not of every class. ``trials``: the values of the proof, and the outputs. ``error``: see
    ``typical_error``.
    """

    operator: Summing
    orders: tuple[Order, ...] = ()
    num_classes: int = 0
    reason: str | None = None
    trials: tuple[Trial, ...] = ()
    error: float | None = None

    @property
    def verified(self) -> bool:
        """Every output's order is known and proven."""
        return (
            self.reason is None
            and len(self.orders) == self.num_classes > 0
            and all(order.verified for order in self.orders)
        )


def find_order(operator: Summing) -> OperatorOrders:
    """Reveal and prove the order of additions of every class of outputs.

    Whatever the operator raises is the reason of a finding without orders.
    """
    try:
        made = trials(operator)
        classes = output_classes(operator)
        error = typical_error(operator)
    except (RuntimeError, NotImplementedError) as refused:
        return OperatorOrders(operator=operator, reason=first_line(refused))
    try:
        encoding = find_encoding(operator)
    except NotATreeError as refusal:
        return OperatorOrders(operator=operator, reason=str(refusal), error=error)
    per_measurement = operator.terms * num_portions(operator, encoding)
    orders, reason = [], None
    for cells in classes[:MAX_CLASSES]:
        row = int(cells.any(1).nonzero()[0])
        columns = cells[row].nonzero()[:, 0].tolist()
        # columns that are not looked at are computed all the same
        cost = per_measurement * operator.columns // len(columns)
        measure = size_measure(operator, encoding, row=row, columns=columns)
        try:
            tree = reveal(measure, operator.terms, most=MAX_TERMS_READ // cost)
        except (NotATreeError, TooManyError) as refusal:
            reason = reason or str(refusal)
            continue
        orders.append(Order(tree=tree, cells=cells, proof=prove(operator, tree, made, cells)))
    if len(classes) > MAX_CLASSES:
        reason = reason or f"{len(classes)} groups of outputs are added in ways of their own"
    return OperatorOrders(
        operator=operator, orders=tuple(orders), num_classes=len(classes), reason=reason,
        trials=tuple(made), error=error,
    )  # fmt: skip


def typical_error(operator: Summing, *, seed: int = 31) -> float:
    """rms(output - exact) / rms(exact) over some hundred sums of values of either sign.

    What the order, the widths and the store come to together; the ratio of two machines' is W on
    these values, within a tenth or so.
    """
    wrong = total = 0.0
    calls = max(1, min(4, _ERROR_OUTPUTS // (operator.rows * operator.columns)))
    for number in range(calls):
        leaves, partner = operator.values(seed + 2 * number)
        exact = partner.double() @ leaves.double().T
        if operator.even:
            exact = exact / operator.terms
        wrong += float((operator.call(leaves, partner).double() - exact).square().sum())
        total += float(exact.square().sum())
    return float((wrong / total) ** 0.5)


def output_classes(operator: Summing, *, seed: int = 97) -> list[torch.Tensor]:
    """Masks (M, S) of outputs that are bitwise equal for equal terms, the largest first."""
    seen: dict[tuple[int, ...], list[int]] = {}
    columns = []
    for look in range(_LOOKS):
        leaves, partner = operator.values(seed + 2 * look, alike=True)
        if look:  # once as they are
            leaves, partner = cancelling(seed + look, leaves, partner)
        output = operator.call(leaves.repeat(operator.columns, 1), partner.repeat(operator.rows, 1))
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        columns.append(output.contiguous().view(whole[format_of(output.dtype).itemsize]).flatten())
    for cell, bits in enumerate(torch.stack(columns, dim=1).tolist()):
        seen.setdefault(tuple(bits), []).append(cell)
    masks = []
    for cells in sorted(seen.values(), key=lambda cells: (-len(cells), cells[0])):
        mask = torch.zeros(operator.rows * operator.columns, dtype=torch.bool)
        mask[cells] = True
        masks.append(mask.view(operator.rows, operator.columns))
    return masks

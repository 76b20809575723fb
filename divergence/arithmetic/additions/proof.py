"""A tree is claimed only if adding in its order gives the machine's bits, on values it never saw.

Two sets of exact bytes go through the operator: plain values, and values whose exact sums are 0,
so that the output is nothing but the rounding errors made on the way (a 16-bit output of plain
values would hide them). The same sums are then made here, node by node, under each arithmetic that
the operator may use:

* ``rounded products``: a term's product is rounded before it is added;
* ``fused``: a term that joins a partial sum does so by one fused multiply-add; of two terms that
  meet, the earlier (``fused, last first``: the later) is rounded;
* an operator that keeps fewer input bits than its dtype has (TF32): as many as were measured;
* each of these with results cut off instead of rounded;
* for nodes with more than two children: all aligned to the largest exponent, cut off after so
  many fraction bits (as many as were measured, or 23 to 25), summed exactly and then rounded or cut
  off to float32.

Replay is exact: a fused multiply-add is a float64 operation rounded to odd before it is rounded to
float32, so that rounding twice is harmless (Boldo and Melquiond, "Emulation of FMA and correctly
rounded sums", IEEE TC 57(4), 2008). A tree that no arithmetic replays bit by bit is unverified; so
is one whose data tell nothing because every output was exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from divergence.arithmetic.additions.accumulator import (
    InputBits,
    find_accumulator,
    input_bits,
    keep_bits,
)
from divergence.arithmetic.additions.summing import Summing, cancelling
from divergence.arithmetic.additions.trees import Tree
from divergence.numerics.formats import format_of

__all__ = ["Arithmetic", "Proof", "Trial", "candidates", "prove", "replay", "trials"]

MIN_TELLING = 4
"""Outputs with rounding errors in them that a proof needs. Each is a sum of many errors whose bits
another order does not give by chance; most proofs have a hundred."""
MAX_OUTPUTS = 1024
"""Outputs replayed at once: a tree of 4096 terms then takes 32 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How one node adds. ``fused``: None, ``first`` (of two terms that meet, the earlier one is
    rounded) or ``last``. ``stored``: the format of partial sums. ``cut``: results of
    two children are cut off, not rounded. ``fraction_bits``: of nodes with more children;
    ``cut_fused``: their results are cut off (sums of several units' results may still be rounded).
    """

    fused: str | None = None
    stored: str = "float32"
    fraction_bits: int | None = None
    cut: bool = False
    cut_fused: bool = False
    inputs: InputBits | None = None

    @property
    def title(self) -> str:
        words = {None: "rounded products", "first": "fused", "last": "fused, last first"}
        text = words[self.fused]
        if self.fraction_bits is not None:
            how = "cut off" if self.cut_fused else "rounded"
            text = f"{self.fraction_bits} fraction bits, results {how}"
        if self.cut:
            text += ", sums of two cut off"
        if self.inputs is not None:
            text += f", inputs of {self.inputs.value}"
        return text if self.stored == "float32" else f"{text}, {self.stored} partial sums"


def candidates(operator: Summing, tree: Tree, *, row: int = 0) -> list[Arithmetic]:
    """What to try, the usual first. ``row``: of an output that the tree is of."""
    name, inputs = format_of(operator.dtype).name, None
    if operator.products and name == "float32":
        inputs = input_bits(operator)
        inputs = None if inputs is None or min(inputs.leaves, inputs.partner) >= 23 else inputs
    if tree.widest > 2:
        measured = find_accumulator(operator, tree, row=row).fraction_bits
        known = [bits for bits in (23, 24, 25) if bits != measured]
        return [
            Arithmetic(fraction_bits=bits, cut_fused=cut_fused, cut=cut, inputs=inputs)
            for bits in ([] if measured is None else [measured]) + known
            for cut_fused in (True, False)
            for cut in (False, True)
        ]
    tries = [Arithmetic(inputs=inputs)]
    if operator.products:
        tries = [Arithmetic(fused=fused, inputs=inputs) for fused in ("first", "last", None)]
    if name in ("bfloat16", "float16"):  # products of 8 or 11 bits are exact in float32
        tries = [Arithmetic(), Arithmetic(stored=name)]
    return [*tries, *(dataclasses.replace(arithmetic, cut=True) for arithmetic in tries)]


@dataclass(frozen=True, slots=True)
class Trial:
    """One input and what the operator made of it: (S, n), (M, n) → (M, S)."""

    name: str
    leaves: torch.Tensor
    partner: torch.Tensor
    output: torch.Tensor


def trials(operator: Summing, *, seed: int = 2411) -> list[Trial]:
    """Plain and cancelling values, and the operator's answers."""
    plain = operator.values(seed)
    return [
        Trial(name, *pair, operator.call(*pair))
        for name, pair in (("plain", plain), ("zero", cancelling(seed, *plain)))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """``arithmetic``: the one that replays every output bit by bit, or None; then ``best`` is the
    largest number of the ``outputs`` that one of them replays. ``telling``: outputs that are not
    the correctly rounded exact sum, so that order shows in them."""

    arithmetic: Arithmetic | None
    best: int
    outputs: int
    telling: int

    @property
    def verified(self) -> bool:
        return self.arithmetic is not None and self.telling >= MIN_TELLING


def prove(
    operator: Summing, tree: Tree, made: list[Trial], cells: torch.Tensor | None = None
) -> Proof:
    """Replay all trials under each arithmetic in turn until one gives every bit.

    ``cells``: (M, S), the outputs that the tree is said to be of; all without.
    """
    if cells is None:
        cells = torch.ones(operator.rows, operator.columns, dtype=torch.bool)
    chosen = [_chosen(trial, cells) for trial in made]
    telling = sum(_num_inexact(operator, *choice) for choice in chosen)
    num_outputs, best = sum(int(mask.sum()) for *_, mask in chosen), 0
    row = int(cells.any(1).nonzero()[0])
    for arithmetic in candidates(operator, tree, row=row):
        equal = 0
        for leaves, partner, got, mask in chosen:
            again = replay(operator, tree, arithmetic, leaves, partner)
            equal += int(((again == got) & mask).sum())
        best = max(best, equal)
        if equal == num_outputs:
            return Proof(arithmetic=arithmetic, best=best, outputs=num_outputs, telling=telling)
    return Proof(arithmetic=None, best=best, outputs=num_outputs, telling=telling)


def _chosen(
    trial: Trial, cells: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(leaves, partner, outputs, which of them count): columns that have a cell, and of the rows
    that have one the first, the last and evenly spread ones."""
    columns = cells.any(0).nonzero()[:, 0]
    rows = cells.any(1).nonzero()[:, 0]
    number = max(1, min(len(rows), MAX_OUTPUTS // len(columns)))
    rows = rows[torch.linspace(0, len(rows) - 1, number).long()]
    both = torch.meshgrid(rows, columns, indexing="ij")
    return trial.leaves[columns], trial.partner[rows], trial.output[both], cells[both]


def _num_inexact(
    operator: Summing,
    leaves: torch.Tensor,
    partner: torch.Tensor,
    got: torch.Tensor,
    mask: torch.Tensor,
) -> int:
    # float64 is exact enough: all that is asked is whether any rounding shows
    exact = partner.double() @ leaves.double().T
    scale = operator.terms if operator.even else 1
    return int(((exact / scale).to(got.dtype).ne(got) & mask).sum())


def replay(
    operator: Summing,
    tree: Tree,
    arithmetic: Arithmetic,
    leaves: torch.Tensor,
    partner: torch.Tensor,
) -> torch.Tensor:
    """(M, S) in the operator's dtype: its sums in the order of ``tree``."""
    rows, columns, terms = len(partner), len(leaves), operator.terms
    a = np.ascontiguousarray(leaves.double().numpy().T)  # (n, S)
    b = np.ascontiguousarray(partner.double().numpy().T)  # (n, M)
    if (kept := arithmetic.inputs) is not None:
        a, b = keep_bits(a, kept.leaves, cut=kept.cut), keep_bits(b, kept.partner, cut=kept.cut)
    exact = (b[:, :, None] * a[:, None, :]).reshape(terms, rows * columns)  # exact: 48 bits
    with np.errstate(over="ignore", invalid="ignore"):
        root = _add_up(tree, arithmetic, exact)
    if operator.even:
        root = root / np.float32(operator.terms)
    return torch.from_numpy(root.reshape(rows, columns)).to(operator.dtype)


def _add_up(tree: Tree, how: Arithmetic, exact: np.ndarray) -> np.ndarray:
    """The root's value in float32. ``exact``: (leaves, outputs) in float64."""
    terms = tree.num_leaves
    values = np.empty((terms + len(tree.nodes), exact.shape[1]), dtype=np.float32)
    values[:terms] = _stored(_narrowed(exact, cut=how.cut), how)
    for wide, ids in _rounds(tree):
        kids = np.array([tree.nodes[k - terms] for k in ids])  # (nodes, wide)
        if wide > 2:
            parts = values[kids].astype(np.float64)
            leaf = kids < terms
            parts[leaf] = exact[kids[leaf]]
            made = _fused_sum(parts, how)
        elif how.fused is None:
            made = _add(values[kids[:, 0]], values[kids[:, 1]], how)
        else:
            made = _pair(values, exact, kids, terms, how)
        values[ids] = _stored(made, how)
    root: np.ndarray = values[-1]
    return root


def _rounds(tree: Tree) -> list[tuple[int, np.ndarray]]:
    """Nodes that can be made at once: by height, then by number of children."""
    heights = [0] * tree.num_leaves
    rounds: dict[tuple[int, int], list[int]] = {}
    for k, node in enumerate(tree.nodes):
        height = 1 + max(heights[child] for child in node)
        heights.append(height)
        rounds.setdefault((height, len(node)), []).append(tree.num_leaves + k)
    return [(wide, np.array(ids)) for (_, wide), ids in sorted(rounds.items())]


def _pair(
    values: np.ndarray, exact: np.ndarray, kids: np.ndarray, terms: int, how: Arithmetic
) -> np.ndarray:
    """Two children: a term joins by a fused multiply-add, two partial sums are added."""
    left, right = kids[:, 0], kids[:, 1]  # by smallest leaf: of two terms, the earlier is left
    swap = (left < terms) & ((right >= terms) | (how.fused == "last"))
    joins, other = np.where(swap, left, right), np.where(swap, right, left)
    is_term = joins < terms
    made = _add(values[other], values[joins], how)
    if is_term.any():
        made[is_term] = _fma(exact[joins[is_term]], values[other[is_term]], cut=how.cut)
    return made


def _add(augend: np.ndarray, addend: np.ndarray, how: Arithmetic) -> np.ndarray:
    return _fma(augend.astype(np.float64), addend, cut=True) if how.cut else augend + addend


def _fma(product: np.ndarray, addend: np.ndarray, *, cut: bool = False) -> np.ndarray:
    """product + addend in float32, rounded or cut off once. ``product`` exact in float64."""
    wide = addend.astype(np.float64)
    total = product + wide
    back = total - product  # the two-sum of Knuth: total + error is exact
    error = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    odd = (error != 0) & (bits & 1 == 0)
    # to odd: one step towards the exact value, whose bit then says that something was cut off
    step = np.where((error > 0) == (total > 0), 1, -1)
    return _narrowed(np.where(odd, (bits + step).view(np.float64), total), cut=cut)


def _narrowed(total: np.ndarray, *, cut: bool) -> np.ndarray:
    """float64 to float32, rounded to nearest or cut off."""
    near = total.astype(np.float32)
    if not cut:
        return near
    too_far = np.abs(near.astype(np.float64)) > np.abs(total)
    return np.where(too_far, np.nextafter(near, np.float32(0)), near)


def _fused_sum(parts: np.ndarray, how: Arithmetic) -> np.ndarray:
    """(nodes, children, outputs) → (nodes, outputs): aligned, cut off, summed, stored."""
    largest = np.abs(parts).max(axis=1, keepdims=True)
    _, exponent = np.frexp(np.where(largest == 0, 1.0, largest))  # 1 = 0.5 · 2^1
    quantum = np.ldexp(1.0, exponent - 1 - (how.fraction_bits or 0))
    total = (np.trunc(parts / quantum) * quantum).sum(axis=1)  # whole quanta: exact in float64
    return _narrowed(total, cut=how.cut_fused)


def _stored(values: np.ndarray, how: Arithmetic) -> np.ndarray:
    if how.stored == "float32":
        return values
    # 24 >= 2 · 11 + 2 bits: rounding float32's result again is rounding once
    narrow = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, how.stored))
    return narrow.float().numpy()

"""What a sum keeps: bits of its inputs, bits of its partial sums, and how those are rounded.

* Input bits: one product (1 + 2^-k) · 1, all other terms 0: the largest k that survives, for either
  factor. float32 keeps 23, TF32 10, bfloat16 7. Whether the rest is cut off or rounded shows in
  1 + 0.75 · 2^-bits.
* Partial sums: 2^t at i, 1 at j, -2^t at k, where i and j meet before k: the 1 is lost from the t
  on that is the width of the accumulator's significand: 24 for float32, 53 for float64, 8 for
  bfloat16. Which terms meet first is read off the revealed tree.
* Inside a fused node, i, j and k meet at once: the 1 is lost beyond the fraction bits to which
  the node aligns its terms.
* Rounding: 1 at i, 1.5 · 2^-p at j, -1 at k leaves 2^(1-p) where partial sums of p bits are rounded
  to nearest, 0 where they are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from divergence.arithmetic.additions.summing import Summing
from divergence.arithmetic.additions.trees import Tree
from divergence.numerics.formats import format_of

__all__ = ["Accumulator", "InputBits", "find_accumulator", "input_bits", "keep_bits"]


def keep_bits(values: np.ndarray, bits: int, *, cut: bool = True) -> np.ndarray:
    """Values with so many fraction bits, cut off or rounded to nearest even. Exact in float64."""
    significand, exponent = np.frexp(values)  # 0.5 <= |significand| < 1
    scaled = significand * 2.0 ** (bits + 1)
    kept: np.ndarray = np.ldexp((np.trunc if cut else np.rint)(scaled), exponent - bits - 1)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBits:
    """Fraction bits kept of the leaves and of the partner; ``cut``: the rest is cut off."""

    leaves: int
    partner: int
    cut: bool

    @property
    def value(self) -> str:
        names = {23: "float32", 10: "TF32", 7: "bfloat16"}
        if self.leaves != self.partner:
            return f"{self.partner} and {self.leaves} bits"
        how = "" if self.leaves >= 23 else f", {'cut off' if self.cut else 'rounded'}"
        name = names.get(self.leaves)
        return f"{self.leaves} bits{f' ({name})' if name else ''}{how}"


def input_bits(operator: Summing) -> InputBits | None:
    """Of an operator that multiplies float32; None where not even 1 · 1 comes out."""
    leaves = _kept(operator, "leaves")
    partner = _kept(operator, "partner")
    if leaves is None or partner is None:
        return None
    above = 1 + 0.75 * 2.0**-leaves
    return InputBits(leaves=leaves, partner=partner, cut=_one(operator, [above], "leaves")[0] == 1)


def _kept(operator: Summing, side: str) -> int | None:
    bits = format_of(operator.dtype).mantissa_bits
    given = [1.0, *(1 + 2.0**-k for k in range(1, bits + 1))]
    got = _one(operator, given, side)
    if got[0] != 1:
        return None
    return max((k for k in range(bits + 1) if got[k] == given[k]), default=0)


def _one(operator: Summing, values: list[float], side: str) -> list[float]:
    """Each value times 1, as the only product of its sum."""
    got: list[float] = []
    size = operator.columns if side == "leaves" else operator.rows
    for start in range(0, len(values), size):
        part = values[start : start + size]
        leaves = torch.zeros(operator.columns, operator.terms, dtype=operator.dtype)
        partner = torch.zeros(operator.rows, operator.terms, dtype=operator.dtype)
        leaves[:, 0] = partner[:, 0] = 1
        (leaves if side == "leaves" else partner)[: len(part), 0] = torch.tensor(
            part, dtype=torch.float64
        ).to(operator.dtype)
        output = operator.call(leaves, partner).double()
        got += (output[0] if side == "leaves" else output[:, 0])[: len(part)].tolist()
    return got


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """``bits``: significand of partial sums between nodes, None where none could be asked;
    ``rounding``: theirs. ``fraction_bits``: what a fused node aligns its terms to."""

    bits: int | None
    rounding: str | None
    fraction_bits: int | None

    @property
    def value(self) -> str:
        parts = []
        if self.bits is not None:
            names = {24: "float32", 53: "float64", 8: "bfloat16", 11: "float16"}
            name = names.get(self.bits)
            parts.append(f"{self.bits} bits{f' ({name})' if name else ''}")
        if self.rounding is not None:
            parts.append(self.rounding)
        if self.fraction_bits is not None:
            parts.append(f"fused terms aligned to {self.fraction_bits} fraction bits")
        return ", ".join(parts) or "no answer"


def find_accumulator(operator: Summing, tree: Tree, *, row: int = 0) -> Accumulator:
    """Width and rounding of the partial sums. ``tree``: that of the outputs of ``row``."""
    between, inside = _between(tree), _inside(tree)
    bits = None if between is None else _lost_from(operator, between, row)
    fraction = None if inside is None else _lost_from(operator, inside, row)
    rounding = None
    if bits is not None and between is not None:
        # float16 has no 2^-24 to spare: there everything is lifted
        scale = 2.0**10 if operator.dtype == torch.float16 else 1.0
        rest = _leftover(operator, between, scale, scale * 1.5 * 2.0**-bits, row) / scale
        rounding = {2.0 ** (1 - bits): "rounded to nearest", 0.0: "cut off"}.get(rest)
    return Accumulator(
        bits=bits, rounding=rounding, fraction_bits=None if fraction is None else fraction - 1
    )


def _between(tree: Tree) -> tuple[int, int, int] | None:
    """i and j that meet first, and a k that meets them later; two terms must round before k."""
    if len(tree.nodes) < 2:
        return None
    first = tree.nodes[0]  # in post-order the first node has leaves alone
    parents, below = tree.parents(), set(first)
    above = parents[tree.num_leaves]
    at = next(kid for kid in tree.nodes[above - tree.num_leaves] if kid != tree.num_leaves)
    while at >= tree.num_leaves:
        at = tree.nodes[at - tree.num_leaves][0]
    i, j = sorted(below)[:2]
    return i, j, at


def _inside(tree: Tree) -> tuple[int, int, int] | None:
    """Three leaves of one fused node."""
    for node in tree.nodes:
        leaves = [kid for kid in node if kid < tree.num_leaves]
        if len(node) > 2 and len(leaves) > 2:
            return leaves[0], leaves[1], leaves[2]
    return None


def _lost_from(operator: Summing, where: tuple[int, int, int], row: int) -> int | None:
    """The smallest t at which 1 is lost beside 2^t; None where it is never."""
    form = format_of(operator.dtype)
    top = 15 if form.name == "float16" else 60
    reach = 39 if form.name == "float16" else 60  # from 2^15 to the smallest subnormal number
    for start in range(1, reach, operator.columns):
        steps = range(start, min(start + operator.columns, reach))
        leaves = torch.zeros(operator.columns, operator.terms, dtype=torch.float64)
        small = [2.0 ** (top - t) for t in steps]
        i, j, k = where
        for column, unit in enumerate(small):
            leaves[column, i], leaves[column, j], leaves[column, k] = 2.0**top, unit, -(2.0**top)
        got = _call(operator, leaves)[row]
        for column, t in enumerate(steps):
            if got[column] != small[column]:
                return t
    return None


def _leftover(
    operator: Summing, where: tuple[int, int, int], big: float, small: float, row: int
) -> float:
    leaves = torch.zeros(operator.columns, operator.terms, dtype=torch.float64)
    i, j, k = where
    leaves[:, i], leaves[:, j], leaves[:, k] = big, small, -big
    return float(_call(operator, leaves)[row, 0])


def _call(operator: Summing, leaves: torch.Tensor) -> torch.Tensor:
    partner = torch.ones(operator.rows, operator.terms, dtype=operator.dtype)
    output = operator.call(leaves.to(operator.dtype), partner).double()
    return output * operator.terms if operator.even else output

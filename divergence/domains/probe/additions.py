"""The order in which a kernel adds, proved from its results (fprev), and what its partial sums are
kept in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from divergence.errors import first_line
from divergence.numerics.formats import format_of
from divergence.numerics.trees import NotATreeError, TooManyError, Tree, reveal
from divergence.output import write_output
from divergence.run.manifest import ArithmeticFact

# Operators that sum, as one kind of thing: so many terms, so many sums in one call.
#
# ``call(leaves, partner)``: leaves (S, n) are the terms of S sums, partner (M, n) what they are
# multiplied with; the answer is (M, S), [m, s] = Σ_k partner[m, k] · leaves[s, k]. A plain sum has
# no partner (M = 1). ``call`` brings the terms into the real operator's layout and the answer back,
# so that the probes see one form. Kernels are chosen by shape, so a finding names the shape.
#
# Values are the same bytes on every machine, made of the raw output of PCG64, which numpy
# guarantees for a seed (NEP 19), by shifts and exact scalings alone. Signs, significands and a few
# exponents are uniform: enough exponents that sums in float32 round at nearly every step, also of
# 16-bit terms.

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

COLUMNS = 64
"""Sums in one call: wide enough that no kernel for narrow matrices is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing:
    """One operator at one shape. ``rows``: M; ``columns``: S; ``products``: has a partner.
    ``even``: its terms are weighted by 1/n inside, which is exact for n a power of two."""

    name: str
    shape: str
    dtype: torch.dtype
    terms: int
    rows: int = 1
    columns: int = COLUMNS
    products: bool = True
    even: bool = False
    call: Call

    @property
    def title(self) -> str:
        """``linear M=1 K=512 N=64 bfloat16``."""
        return f"{self.name} {self.shape} {str(self.dtype).removeprefix('torch.')}"

    def values(self, seed: int, *, alike: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact (leaves, partner); the partner is 1 where there is none. ``alike``: one row of
        each, as if all sums had the same terms."""
        columns, rows = (1, 1) if alike else (self.columns, self.rows)
        leaves = exact_values(seed, (columns, self.terms), self.dtype)
        if self.products:
            return leaves, exact_values(seed + 1, (rows, self.terms), self.dtype)
        return leaves, torch.ones(rows, self.terms, dtype=self.dtype)


HEADS = 2
"""Of attention: the sums are its columns, head by head."""


def _linear(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """Weights (N, K) in the layout that models keep them in."""
    return torch.nn.functional.linear(partner, leaves)


def _matmul(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """(M, K) and (K, N), both row-major."""
    return torch.matmul(partner, leaves.T.contiguous())


def _attention(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """P @ V of eager attention, batched over heads: (H, T, n) and (H, n, D)."""
    v = leaves.unflatten(0, (HEADS, -1)).transpose(1, 2).contiguous()
    p = partner.expand(HEADS, -1, -1).contiguous()
    return torch.matmul(p, v).transpose(0, 1).reshape(len(partner), COLUMNS)


def _sdpa(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """scaled_dot_product_attention with queries of 0: every weight is exp(0) = 1, so V is summed.
    The terms are a power of two, so that the division by their sum is exact."""
    v = leaves.unflatten(0, (HEADS, -1)).transpose(1, 2).contiguous()[None]  # (1, H, n, D)
    q = v.new_zeros(1, HEADS, len(partner), v.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(q, torch.ones_like(v), v)
    return out[0].transpose(0, 1).reshape(len(partner), COLUMNS)


_HEADED = f"heads={HEADS} T={{rows}} n={{terms}} D={COLUMNS // HEADS}"
_OPERATORS: dict[str, tuple[str, str, int, Call]] = {
    "sum": ("sum", f"rows={COLUMNS} n={{terms}}", 1, lambda leaves, _: leaves.sum(-1)[None]),
    "linear": ("linear", f"M={{rows}} K={{terms}} N={COLUMNS}", 1, _linear),
    "linear 16": ("linear", f"M={{rows}} K={{terms}} N={COLUMNS}", 16, _linear),
    "matmul": ("matmul", f"M={{rows}} K={{terms}} N={COLUMNS}", 16, _matmul),
    "attention": ("attention P@V", _HEADED, 16, _attention),
    "sdpa": ("sdpa V", _HEADED, 1, _sdpa),
}
"""Those that models use: name, shape, rows, what is called on the device."""
FULL = tuple(_OPERATORS)
QUICK = ("sum", "linear", "linear 16", "attention")


def summing(which: str, terms: int, dtype: torch.dtype, device: str = "cpu") -> Summing:
    """One of ``FULL`` at ``terms`` terms."""
    name, shape, rows, called = _OPERATORS[which]

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        return called(leaves.to(device), partner.to(device)).cpu()

    return Summing(
        name=name,
        shape=shape.format(rows=rows, terms=terms),
        dtype=dtype,
        terms=terms,
        rows=rows,
        products=which not in ("sum", "sdpa"),
        even=which == "sdpa",
        call=call,
    )


_LOWEST = {"float16": -12, "bfloat16": -16, "float32": -4}
"""Exponents go from here to _HIGHEST: a product of two float16 stays normal."""
_HIGHEST = {"float16": 3, "bfloat16": 4, "float32": 0}


@functools.lru_cache(maxsize=16)  # the same values go through many operators; nobody writes to them
def exact_values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uniform signs, significands and exponents; never 0, subnormal or infinite."""
    form = format_of(dtype)
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    bits = form.mantissa_bits
    significand = 1 + (raw >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits
    low = _LOWEST.get(form.name, -4)
    span = np.uint64(_HIGHEST.get(form.name, 0) - low + 1)
    exponent = low + ((raw & np.uint64(0xFFFF)) % span).astype(np.int64)
    sign = np.where(raw >> np.uint64(16) & np.uint64(1), -1.0, 1.0)
    values = sign * np.ldexp(significand, exponent)
    return torch.from_numpy(values.reshape(shape)).to(dtype)  # exact: bits + 1 digits


def cancelling(
    seed: int, leaves: torch.Tensor, partner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(leaves, partner) changed so that every exact sum over the last axis is 0. Terms are paired
    off by a fixed shuffle, one being minus the other. What an operator then returns is its rounding
    errors alone, which a 16-bit output would otherwise hide."""
    shuffled = np.argsort(np.random.PCG64(seed).random_raw(leaves.shape[-1]), kind="stable")
    half = len(shuffled) // 2
    kept, other = shuffled[:half], shuffled[half : 2 * half]
    leaves, partner = leaves.clone(), partner.clone()
    leaves[..., other] = -leaves[..., kept]
    partner[..., other] = partner[..., kept]
    if len(shuffled) % 2:
        leaves[..., shuffled[-1]] = 0
    return leaves, partner


# FPRev (numerics.trees) asks an operator for sizes by M at term i and -M at term j. M must swallow
# all units: units · count <= M · 2^-26 for a float32 accumulator. float32 and
# bfloat16 have exponents to spare (M = 2^100, unit 1); float16 has 2^15 and 2^-24, a subnormal
# number; where those are flushed only 16 units may stand in a row at once. An output with few bits
# cannot count beyond 2^(mantissa + 1) either. So units are laid out in portions, one call each, and
# the counts added.


@dataclass(frozen=True, slots=True)
class Encoding:
    """``big`` and ``unit`` as leaves; every leaf is multiplied with ``partner``; at most ``most``
    units in one row."""

    big: float
    unit: float
    partner: float
    most: int


def _portions(terms: int, encoding: Encoding, dtype: torch.dtype) -> list[torch.Tensor]:
    """One row of units for each portion; zeros elsewhere."""
    rows = []
    for start in range(0, terms, encoding.most):
        row = torch.zeros(terms, dtype=dtype)
        row[start : start + encoding.most] = encoding.unit
        rows.append(row)
    return rows


def find_encoding(operator: Summing) -> Encoding:
    """The first encoding whose units are all counted and whose big terms cancel. Raises
    NotATreeError where there is none."""
    form = format_of(operator.dtype)
    most = 2 ** (form.mantissa_bits + 1)
    encodings = [Encoding(2.0**100, 1.0, 1.0, most)]
    if form.name == "float16" and operator.even:
        # one unit must remain a number after the division by n
        unit = 2.0**-24 * operator.terms
        encodings = [Encoding(2.0**15, unit, 1.0, max(1, int(2.0 ** (15 - 26) / unit)))]
    elif form.name == "float16":
        lifted = 2.0**10 if operator.products else 1.0
        encodings = [
            Encoding(2.0**15, 2.0**-24, lifted, most // 2),
            Encoding(2.0**15, 2.0**-14, 1.0, 16),
        ]
    for encoding in encodings:
        partner = torch.full((operator.rows, operator.terms), encoding.partner).to(operator.dtype)
        rows = _portions(operator.terms, encoding, operator.dtype)
        probes = [*rows]
        if operator.terms > 1:
            pair = torch.zeros(operator.terms, dtype=operator.dtype)
            pair[0], pair[-1] = encoding.big, -encoding.big
            probes.append(pair)
        wanted = [float((row != 0).sum()) for row in rows] + [0.0] * (len(probes) - len(rows))
        counts: list[float] = []
        for start in range(0, len(probes), operator.columns):
            leaves = torch.zeros(operator.columns, operator.terms, dtype=operator.dtype)
            part = probes[start : start + operator.columns]
            leaves[: len(part)] = torch.stack(part)
            counts += _counts(operator, operator.call(leaves, partner)[0], encoding)[: len(part)]
        if counts == wanted:
            return encoding
    raise NotATreeError("its units are not counted, or M - M is not 0")


def _counts(operator: Summing, output: torch.Tensor, encoding: Encoding) -> list[float]:
    scale = encoding.unit * encoding.partner / (operator.terms if operator.even else 1)
    return (output.double() / scale).tolist()


def size_measure(
    operator: Summing, encoding: Encoding, *, row: int = 0, columns: Sequence[int] | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(i, j) → leaves of the smallest subtree with both, for ``reveal``. ``row``,
    ``columns``: which outputs are looked at, where not all are made alike."""
    terms = operator.terms
    columns = range(operator.columns) if columns is None else columns
    partner = torch.full((operator.rows, terms), encoding.partner).to(operator.dtype)
    rows = _portions(terms, encoding, operator.dtype)
    laid_out = [units.repeat(operator.columns, 1) for units in rows]
    place = torch.tensor(list(columns))
    width = len(place)

    def measure(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        sizes = np.empty(len(i), dtype=np.int64)
        for start in range(0, len(i), width):
            i_part = torch.from_numpy(i[start : start + width])
            j_part = torch.from_numpy(j[start : start + width])
            at, counted = place[: len(i_part)], np.zeros(len(i_part))
            for units, leaves in zip(rows, laid_out, strict=True):
                leaves[at, i_part], leaves[at, j_part] = encoding.big, -encoding.big
                output = operator.call(leaves, partner)[row, at]
                leaves[at, i_part], leaves[at, j_part] = units[i_part], units[j_part]
                counted += np.array(_counts(operator, output, encoding))
            whole = np.rint(counted)
            if not np.array_equal(whole, counted):
                raise NotATreeError("an output is no count of units: M did not swallow them")
            sizes[start : start + len(i_part)] = terms - whole.astype(np.int64)
        return sizes

    return measure


# What a sum keeps: bits of its inputs, bits of its partial sums, and how those are rounded.
#
# * Input bits: one product (1 + 2^-k) · 1, all other terms 0: the largest k that survives, for
#   either factor. float32 keeps 23, TF32 10, bfloat16 7. Whether the rest is cut off or rounded
#   shows in 1 + 0.75 · 2^-bits.
# * Partial sums: 2^t at i, 1 at j, -2^t at k, where i and j meet before k: the 1 is lost from the t
#   on that is the width of the accumulator's significand: 24 for float32, 53 for float64, 8 for
#   bfloat16. Which terms meet first is read off the revealed tree.
# * Inside a fused node, i, j and k meet at once: the 1 is lost beyond the fraction bits to which
#   the node aligns its terms.
# * Rounding: 1 at i, 1.5 · 2^-p at j, -1 at k leaves 2^(1-p) where partial sums of p bits are
#   rounded to nearest, 0 where they are cut off.


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
    """Find the bits kept of float32 factors; None where not even 1 · 1 comes out."""
    bits = format_of(operator.dtype).mantissa_bits
    given = [1.0, *(1 + 2.0**-k for k in range(1, bits + 1))]
    kept = []
    for side in ("leaves", "partner"):
        got = _one(operator, given, side)
        if got[0] != 1:
            return None
        kept.append(max(k for k in range(bits + 1) if got[k] == given[k]))
    leaves, partner = kept
    above = 1 + 0.75 * 2.0**-leaves
    return InputBits(leaves=leaves, partner=partner, cut=_one(operator, [above], "leaves")[0] == 1)


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
    between = _between(tree)
    inside = None  # three leaves of one fused node
    for node in tree.nodes:
        leaves = [kid for kid in node if kid < tree.num_leaves]
        if inside is None and len(node) > 2 and len(leaves) > 2:
            inside = leaves[0], leaves[1], leaves[2]
    bits = None if between is None else _lost_from(operator, between, row)
    fraction = None if inside is None else _lost_from(operator, inside, row)
    rounding = None
    if bits is not None and between is not None:
        # float16 has no 2^-24 to spare: there everything is lifted
        scale = 2.0**10 if operator.dtype == torch.float16 else 1.0
        terms = torch.zeros(operator.columns, operator.terms, dtype=torch.float64)
        i, j, k = between
        terms[:, i], terms[:, j], terms[:, k] = scale, scale * 1.5 * 2.0**-bits, -scale
        rest = float(_call(operator, terms)[row, 0]) / scale
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


def _call(operator: Summing, leaves: torch.Tensor) -> torch.Tensor:
    partner = torch.ones(operator.rows, operator.terms, dtype=operator.dtype)
    output = operator.call(leaves.to(operator.dtype), partner).double()
    return output * operator.terms if operator.even else output


# A tree is claimed only if adding in its order gives the machine's bits, on values it never saw.
#
# Two sets of exact bytes go through the operator: plain values, and values whose exact sums are 0,
# so that the output is nothing but the rounding errors made on the way (a 16-bit output of plain
# values would hide them). The same sums are then made here, node by node, under each arithmetic
# that the operator may use:
#
# * ``rounded products``: a term's product is rounded before it is added;
# * ``fused``: a term that joins a partial sum does so by one fused multiply-add; of two terms that
#   meet, the earlier (``fused, last first``: the later) is rounded;
# * an operator that keeps fewer input bits than its dtype has (TF32): as many as were measured;
# * each of these with results cut off instead of rounded;
# * for nodes with more than two children: all aligned to the largest exponent, cut off after so
#   many fraction bits (as many as were measured, or 23 to 25), summed exactly and then rounded or
#   cut off to float32.
#
# Replay is exact: a fused multiply-add is a float64 operation rounded to odd before it is rounded
# to float32, so that rounding twice is harmless (Boldo and Melquiond, "Emulation of FMA and
# correctly rounded sums", IEEE TC 57(4), 2008). A tree that no arithmetic replays bit by bit is
# unverified; so is one whose data tell nothing because every output was exact.

MIN_TELLING = 4
"""Outputs with rounding errors in them that a proof needs. Each is a sum of many errors whose bits
another order does not give by chance; most proofs have a hundred."""
MAX_OUTPUTS = 1024
"""Outputs replayed at once: a tree of 4096 terms then takes 32 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Says how one node adds. ``fused``: None, ``first`` (of two terms that meet, the earlier one
    is rounded) or ``last``. ``stored``: the format of partial sums. ``cut``: results of two
    children are cut off, not rounded. ``fraction_bits``: of nodes with more children;
    ``cut_fused``: their results are cut off (sums of several units' results may still be
    rounded)."""

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
    """Return what to try, the usual first. ``row``: of an output that the tree is of."""
    name, inputs = format_of(operator.dtype).name, None
    if operator.products and name == "float32":
        inputs = input_bits(operator)
        inputs = None if inputs is None or min(inputs.leaves, inputs.partner) >= 23 else inputs
    if tree.widest > 2:
        measured = find_accumulator(operator, tree, row=row).fraction_bits
        widths = [bits for bits in (23, 24, 25) if bits != measured]
        return [
            Arithmetic(fraction_bits=bits, cut_fused=cut_fused, cut=cut, inputs=inputs)
            for bits in ([] if measured is None else [measured]) + widths
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


def trials(operator: Summing) -> list[Trial]:
    """Plain and cancelling values, and the operator's answers."""
    plain = operator.values(2411)
    return [
        Trial(name, *pair, operator.call(*pair))
        for name, pair in (("plain", plain), ("zero", cancelling(2411, *plain)))
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
    """Replay all trials under each arithmetic in turn until one gives every bit. ``cells``: (M, S),
    the outputs that the tree is said to be of; all without."""
    if cells is None:
        cells = torch.ones(operator.rows, operator.columns, dtype=torch.bool)
    chosen = [_chosen(trial, cells) for trial in made]
    telling = 0
    for leaves, partner, got, mask in chosen:
        # float64 is exact enough: all that is asked is whether any rounding shows
        exact = partner.double() @ leaves.double().T
        scale = operator.terms if operator.even else 1
        telling += int(((exact / scale).to(got.dtype).ne(got) & mask).sum())
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


# In which order an operator adds: found from outside, then proven or marked unverified.
#
# 1. Equal terms in every row and column, values whose exact sum is 0: outputs that differ were
#    added in different orders (the last columns of a kernel, the rows beyond its block). Outputs
#    fall into classes of equal bits.
# 2. FPRev on the outputs of one class at a time.
# 3. Proof on other values: bit for bit, or the tree is not claimed.

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
    """Says what was found of one operator: its orders, that of most outputs first.

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
    """Reveal and prove the order of additions of every class of outputs. Whatever the operator
    raises is the reason of a finding without orders."""
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
    per_measurement = operator.terms * (-(-operator.terms // encoding.most))
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
        operator=operator,
        orders=tuple(orders),
        num_classes=len(classes),
        reason=reason,
        trials=tuple(made),
        error=error,
    )


def typical_error(operator: Summing) -> float:
    """rms(output - exact) / rms(exact) over some hundred sums of values of either sign. What the
    order, the widths and the store come to together; the ratio of two machines' is W on these
    values, within a tenth or so."""
    wrong = total = 0.0
    calls = max(1, min(4, _ERROR_OUTPUTS // (operator.rows * operator.columns)))
    for number in range(calls):
        leaves, partner = operator.values(31 + 2 * number)
        exact = partner.double() @ leaves.double().T
        if operator.even:
            exact = exact / operator.terms
        wrong += float((operator.call(leaves, partner).double() - exact).square().sum())
        total += float(exact.square().sum())
    return float((wrong / total) ** 0.5)


def output_classes(operator: Summing) -> list[torch.Tensor]:
    """Masks (M, S) of outputs that are bitwise equal for equal terms, the largest first."""
    seen: dict[tuple[int, ...], list[int]] = {}
    columns = []
    for look in range(_LOOKS):
        leaves, partner = operator.values(97 + 2 * look, alike=True)
        if look:  # once as they are
            leaves, partner = cancelling(97 + look, leaves, partner)
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


# A tree in words, where runs of equal parts are written once; and a file with a drawing of each.
#
#     sequential 512                               ((x0 + x1) + x2) + …
#     pairwise 8, by 1                             x0+x1, x2+x3, … then those in pairs
#     pairwise 16, by 8 of (sequential 64, by 16)  16 lanes, lane k adds x[k], x[k+16], …
#     (fused 16) + 48 more in 3 fused              as matrix units do: 16, then 16 and the sum
#
# ``by d``: the first two things that are added stand d terms apart; left out where neighbours are
# next to each other. Parts of several kinds stand in the order in which they are added,
# ``(sequential 131) + (sequential 127, by 4)``. What is longer than a line is ``irregular n``, with
# its depth. The digest, not the text, says whether two trees are equal.

MAX_TEXT = 160
"""Characters; a longer description is cut to the tree's depth."""


def describe(tree: Tree) -> str:
    """One line."""
    if not tree.nodes:
        return "one term"
    text = _Describer(tree).text(tree.num_leaves + len(tree.nodes) - 1)
    if len(text) > MAX_TEXT:
        return f"irregular {tree.num_leaves}, depth {tree.depth}"
    return text


class _Describer:
    """Shapes of all subtrees, made once; texts are made from the root down."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.leaves = tree, tree.num_leaves
        self.first = list(range(self.leaves))
        self.size = tree.sizes()
        names: dict[tuple[int, ...], int] = {}
        self.shape = [0] * self.leaves
        for node in tree.nodes:
            self.first.append(min(self.first[child] for child in node))
            key = tuple(sorted(self.shape[child] for child in node))
            self.shape.append(names.setdefault(key, len(names) + 1))

    def kids(self, at: int) -> tuple[int, ...]:
        return self.tree.nodes[at - self.leaves]

    def text(self, at: int, depth: int = 0) -> str:
        """The subtree ``at``; without its brackets."""
        if at < self.leaves:
            return "1"
        if depth > 6:
            return f"irregular {self.size[at]}"
        for form in (self._pairwise, self._sequential):
            pattern = form(at)
            if pattern is not None:
                name, parts = pattern
                inner = self.text(parts[0], depth + 1)
                by = self.first[parts[1]] - self.first[parts[0]]
                fused = len(self.kids(at)) > 2
                step = f", by {by}" if by != self.size[parts[0]] and not fused else ""
                of = "" if inner == "1" else f" of ({inner})"
                return f"{name}{step}{of}"
        return self._uneven(at, depth)

    def _pairwise(self, at: int) -> tuple[str, list[int]] | None:
        """Count the levels of pairs of equal shapes: ``pairwise 2^d``."""
        row, levels = [at], 0
        while all(part >= self.leaves for part in row):
            below = [child for part in row for child in self.kids(part)]
            if len(below) != 2 * len(row) or len({self.shape[part] for part in below}) > 1:
                break
            row, levels = below, levels + 1
        return (f"pairwise {len(row)}", row) if levels else None

    def _chain(self, at: int) -> tuple[int, list[int]]:
        """(start, parts): ((start + part) + part) + …, parts of one shape, top-down reversed."""
        parts: list[int] = []
        kind = None
        while at >= self.leaves:
            kids = sorted(self.kids(at), key=lambda kid: (self.size[kid], -self.first[kid]))
            *items, spine = kids
            kinds = {(self.shape[item], len(items)) for item in items}
            if len(kinds) > 1 or (kind is not None and kinds != {kind}):
                break
            kind = kinds.pop()
            parts += reversed(items)
            at = spine
        return at, parts[::-1]

    def _sequential(self, at: int) -> tuple[str, list[int]] | None:
        """A chain all of whose parts have one shape; fused steps are named."""
        start, parts = self._chain(at)
        if not parts or self.shape[start] != self.shape[parts[0]]:
            return None
        wide = len(self.kids(at)) - 1
        whole = [start, *parts]
        if wide == 1:
            return f"sequential {len(whole)}", whole
        if len(whole) == wide + 1:
            return f"fused {len(whole)}", whole
        return f"sequential {len(whole)} by fused {wide + 1}", whole

    def _uneven(self, at: int, depth: int) -> str:
        """Parts of several kinds, in the order in which they are added; runs counted."""
        runs: list[tuple[int, int, int, int]] = []  # part, how many, joined so many at once
        whole = at
        while at >= self.leaves:
            if at != whole and (self._pairwise(at) or self._sequential(at)):
                break
            *items, spine = sorted(
                self.kids(at), key=lambda kid: (self.size[kid], -self.first[kid])
            )
            for item in items:
                key = (self.shape[item], len(items))
                if runs and key == (self.shape[runs[-1][0]], runs[-1][2]):
                    runs[-1] = (item, runs[-1][1] + 1, len(items), runs[-1][3] + (item == items[0]))
                else:
                    runs.append((item, 1, len(items), 1))
            at = spine
        texts = [self._bracketed(at, depth)]
        for item, count, wide, nodes in reversed(runs):
            text = self._bracketed(item, depth)
            if count > 1:
                text = f"{count} more" if text == "1" else f"{count} × {text}"
            if wide > 1:
                text += f" in {nodes} fused" if nodes > 1 else " fused"
            texts.append(text)
        return " + ".join(texts)

    def _bracketed(self, at: int, depth: int) -> str:
        text = self.text(at, depth + 1)
        return text if text == "1" else f"({text})"


def write_drawings(folder: Path, findings: list[OperatorOrders]) -> list[Path]:
    """One file a tree, named after its operator; unverified ones say so."""
    from divergence.report.page import picture_of_tree

    written = []
    for finding in findings:
        name = re.sub(r"[^\w.=-]+", "-", finding.operator.title)
        for number, order in enumerate(finding.orders):
            title = finding.operator.title + ("" if order.verified else " (unverified)")
            if len(finding.orders) > 1:
                title += f", {int(order.cells.sum())} outputs"
            path = folder / (f"{name}.svg" if number == 0 else f"{name}-{number}.svg")
            drawn = picture_of_tree(order.tree, title, describe(order.tree)).svg + "\n"
            written.append(write_output(drawn, path, what="drawing", make_folder=True))
    return written


# What probes write into: facts, and the exact tensors that they rest on. And the facts about the
# order of additions of the operators that models use.
#
# Which operators, at which shapes, and what a finding says as a fact. Kernels are chosen by shape,
# so a fact names it, and only facts of one shape are compared.


class Notebook:
    """Facts in the order in which they were found; ``tensors``: (site, tensor) of a probe run.
    ``keep_tensors`` false, as in the quick form, keeps facts alone."""

    def __init__(self, *, keep_tensors: bool = True) -> None:
        self.facts: list[ArithmeticFact] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._keep = keep_tensors

    def note(
        self, probe: str, subject: str, value: str, *, verified: bool = True, **how: Any
    ) -> None:
        """One fact. ``how``: the rest of an ``ArithmeticFact``."""
        name = f"{probe}: {subject}"
        self.facts.append(ArithmeticFact(name=name, value=value, verified=verified, **how))

    @contextlib.contextmanager
    def attempt(self, probe: str, subject: str) -> Iterator[None]:
        """A probe that this machine refuses is noted, never fatal."""
        try:
            yield
        except (RuntimeError, TypeError) as error:
            evidence = first_line(error)
            self.note(probe, subject, "no answer", verified=False, evidence=evidence)

    def keep(self, probe: str, subject: str, **ports: torch.Tensor) -> None:
        """Tensors of one probe by port; ``in_x`` becomes the port ``in.x``. The path is a module's:
        an operator's (with a slash) would stand for a call that can be run again."""
        if not self._keep:
            return
        path = f"probe.{probe}.{subject}".replace(" ", "-").replace("@", "").replace(":", "")
        for port, tensor in ports.items():
            self.tensors.append((f"{path}:{port.replace('_', '.', 1)}", tensor))


def note_finding(notebook: Notebook, finding: OperatorOrders) -> None:
    """One fact on the order; for the widths that it allows to measure, more."""
    operator = finding.operator
    if not finding.orders:
        notebook.note(
            "order",
            operator.title,
            "not revealed",
            verified=False,
            evidence=finding.reason,
            numbers={} if finding.error is None else {"error": finding.error},
        )
    else:
        digest = xxhash.xxh3_128()
        for order in finding.orders:
            digest.update(order.tree.digest.encode())
            digest.update(order.cells.numpy().tobytes())
        first = finding.orders[0]
        texts = [
            f"{int(order.cells.sum())} outputs: {describe(order.tree)}" for order in finding.orders
        ]
        if missing := finding.num_classes - len(finding.orders):
            texts.append(f"{missing} more groups of outputs")
        value = describe(first.tree) if len(texts) == 1 else "; ".join(texts)
        proofs = [order.proof for order in finding.orders]
        best, num = (sum(getattr(proof, n) for proof in proofs) for n in ("best", "outputs"))
        evidence = f"only {best} of {num} outputs are replayed bit by bit"
        if finding.verified:
            ways = {proof.arithmetic.title for proof in proofs if proof.arithmetic}
            evidence = f"{num} outputs replayed bit by bit: {', '.join(sorted(ways))}"
        elif finding.reason is not None:
            evidence = finding.reason
        elif best == num:
            evidence = "hardly any replayed output holds a rounding error, so they tell nothing"
        cells = [int(order.cells.sum()) for order in finding.orders]
        sums = [order.tree.partials for order in finding.orders]
        partials = sum(c * s for c, s in zip(cells, sums, strict=True)) / sum(cells)
        how = first.proof.arithmetic  # products of 16-bit formats are exact
        rounds = how is not None and how.fused is None and how.fraction_bits is None
        rounds = rounds and operator.products and format_of(operator.dtype).name == "float32"
        notebook.note(
            "order",
            operator.title,
            value,
            verified=finding.verified,
            digest=digest.hexdigest(),
            numbers={
                "terms": operator.terms,
                "partials": partials,
                "depth": first.tree.depth,
                "widest": first.tree.widest,
                "rounded_products": int(rounds),
                "error": finding.error or 0.0,
            },
            evidence=evidence,
        )
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
            "accumulator",
            operator.title,
            accumulator.value,
            verified=order.verified,
            unit="bits",
            numbers={name: value for name, value in numbers.items() if value is not None},
        )
    if operator.products and format_of(operator.dtype).name == "float32":
        bits = input_bits(operator)
        if bits is not None:
            notebook.note(
                "input bits",
                operator.title,
                bits.value,
                unit="bits",
                numbers={"weight": bits.leaves, "input": bits.partner, "cut": int(bits.cut)},
            )
    how = order.proof.arithmetic
    if operator.products and how is not None and format_of(operator.dtype).name == "float32":
        value = "rounded products" if how.fused is None else "fused"
        if how.fraction_bits is not None:
            value = "exact products, fused"
        notebook.note("fma", operator.title, value, verified=order.verified)

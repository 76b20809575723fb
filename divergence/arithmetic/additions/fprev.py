"""FPRev: the order of additions of a sum, from outside.

Peichen Xie et al., "FPRev: Revealing the Order of Floating-Point Summation" (USENIX ATC 2025,
arXiv 2411.00442). Put M at term i, -M at term j and the same small unit everywhere else, with M so
large that M + (all units) = M. Units that are added to ±M before the two meet are swallowed; those
outside the smallest subtree that holds i and j survive. So the output tells size(i, j), the
leaves of that subtree.

All sizes from one leaf give its path to the root, and which leaves hang off each step of the path;
those groups are treated alike. A node with more than two children shows as a group whose members
meet each other only at the node's own size. Cost: n - 1 measurements for a sequential sum,
n log n for a balanced one; the first leaf is tried first, then the last, then others, since a
chain that runs backwards would cost n²/2 from its first leaf. Measurements that do not depend on
each other are asked for together, so that they can be rows of one call.

A mask is a row of terms: M at i, -M at j, units elsewhere. M must not overflow, and must swallow
all units added to it: units · count <= M · 2^-26 for a float32 accumulator. float32 and bfloat16
have exponents to spare (M = 2^100, unit 1); float16 has 2^15 and 2^-24, so that its unit is a
subnormal number, or, where those are flushed, only 16 units may stand in a row at once. An output
with few bits cannot count beyond 2^(mantissa + 1) either. So units are laid out in portions, one
call for each, and the counts added: exact, at the price of more calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from divergence.arithmetic.additions.summing import Summing
from divergence.arithmetic.additions.trees import Tree
from divergence.numerics.formats import format_of

__all__ = [
    "Encoding", "NotATreeError", "TooManyError", "find_encoding", "num_portions", "reveal",
    "size_measure",
]  # fmt: skip

Measure = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(i, j) of equal lengths → size(i, j) of each pair."""


class NotATreeError(Exception):
    """The sizes belong to no tree: the operator is no fixed sum, or the units were not
    swallowed."""


class TooManyError(Exception):
    """More measurements than were allowed."""


@dataclass(slots=True)
class _Group:
    """Leaves that hang off one node of ``size`` leaves: one subtree, or several of its children.

    ``path``: for each ancestor of the pivot inside this group, its size and the group that joins
    it there. ``beside``: what meets the pivot only in the node above.
    """

    leaves: np.ndarray
    size: int
    turn: int = 0
    pivot: int = -1
    path: list[tuple[int, _Group]] = field(default_factory=list)
    beside: _Group | None = None


def reveal(measure: Measure, num_leaves: int, *, most: int | None = None) -> Tree:
    """The tree behind ``measure``.

    ``most``: measurements allowed. Raises NotATreeError and TooManyError.
    """
    top = _Group(np.arange(num_leaves), num_leaves)
    groups, frontier, asked = [top], [top], 0
    while frontier:
        open_ = [group for group in frontier if len(group.leaves) > 1]
        for group in frontier:
            group.pivot = _pivot(group)
        asked += sum(len(group.leaves) - 1 for group in open_)
        if most is not None and asked > most:
            raise TooManyError(f"more than {most} measurements")
        frontier = _split(open_, measure)
        groups += frontier
    return _assemble(groups, num_leaves)


def _pivot(group: _Group) -> int:
    if group.turn < 2:
        return int(group.leaves[0 if group.turn == 0 else -1])
    # any fixed rule that moves about; a real chain is never built against it
    return int(group.leaves[(group.turn * 2654435761) % len(group.leaves)])


def _split(groups: list[_Group], measure: Measure) -> list[_Group]:
    """Measure every group's pivot against its other leaves; the groups that this gives."""
    if not groups:
        return []
    others = [group.leaves[group.leaves != group.pivot] for group in groups]
    pivots = [np.full(len(rest), group.pivot) for group, rest in zip(groups, others, strict=True)]
    sizes = np.asarray(measure(np.concatenate(pivots), np.concatenate(others)))
    children: list[_Group] = []
    start = 0
    for group, rest in zip(groups, others, strict=True):
        mine = sizes[start : start + len(rest)]
        start += len(rest)
        here = 1  # leaves of the subtree that the path has reached
        for size in np.unique(mine):
            joined = rest[mine == size]
            poor = 2 * len(joined) > len(group.leaves)
            child = _Group(joined, int(size), group.turn + 1 if poor else 0)
            children.append(child)
            if size == group.size and here + len(joined) == len(group.leaves) != size:
                group.beside = child
            elif here + len(joined) == size <= len(group.leaves):
                group.path.append((int(size), child))
                here = int(size)
            else:
                raise NotATreeError(
                    f"{len(joined)} terms meet term {group.pivot} in a sum of {size}, "
                    f"beside {here} that do so earlier"
                )
    return children


def _assemble(groups: list[_Group], num_leaves: int) -> Tree:
    """Groups were made before those that hang off them: from the last to the first."""
    nodes: list[tuple[int, ...]] = []
    tops: dict[int, list[int]] = {}
    for group in reversed(groups):
        at = group.pivot
        for _, child in group.path:
            nodes.append((at, *tops.pop(id(child))))
            at = num_leaves + len(nodes) - 1
        tops[id(group)] = [at, *(tops.pop(id(group.beside)) if group.beside is not None else [])]
    if len(tops[id(groups[0])]) != 1:
        raise NotATreeError("the terms meet in no common sum")
    return Tree.of(num_leaves, nodes)


@dataclass(frozen=True, slots=True)
class Encoding:
    """``big`` and ``unit`` as leaves; every leaf is multiplied with ``partner``; at most ``most``
    units in one row."""

    big: float
    unit: float
    partner: float
    most: int


def _encodings(operator: Summing) -> list[Encoding]:
    form = format_of(operator.dtype)
    counts = 2 ** (form.mantissa_bits + 1)
    if form.name != "float16":
        return [Encoding(2.0**100, 1.0, 1.0, counts)]
    partner = 2.0**10 if operator.products else 1.0
    encodings = [
        Encoding(2.0**15, 2.0**-24, partner, counts // 2),
        Encoding(2.0**15, 2.0**-14, 1.0, 16),
    ]
    if operator.even:  # one unit must remain a number after the division by n
        unit = 2.0**-24 * operator.terms
        encodings = [Encoding(2.0**15, unit, 1.0, max(1, int(2.0 ** (15 - 26) / unit)))]
    return encodings


def _portions(terms: int, encoding: Encoding, dtype: torch.dtype) -> list[torch.Tensor]:
    """One row of units for each portion; zeros elsewhere."""
    rows = []
    for start in range(0, terms, encoding.most):
        row = torch.zeros(terms, dtype=dtype)
        row[start : start + encoding.most] = encoding.unit
        rows.append(row)
    return rows


def num_portions(operator: Summing, encoding: Encoding) -> int:
    """Calls that one measurement takes."""
    return -(-operator.terms // encoding.most)


def find_encoding(operator: Summing) -> Encoding:
    """The first encoding whose units are all counted and whose big terms cancel.

    Raises NotATreeError where there is none.
    """
    for encoding in _encodings(operator):
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
    """(i, j) → leaves of the smallest subtree with both, for ``fprev.reveal``.

    ``row``, ``columns``: which outputs are looked at, where not all are made alike.
    """
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

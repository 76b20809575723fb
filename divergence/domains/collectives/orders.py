"""The order in which a collective adds the ranks, found from outside.

FPRev (divergence.numerics.trees) with ranks for terms: rank i puts in M, rank j puts in
-M, all others 1, M so large that M + 1 = M. The ones that are added to ±M before the two meet are
swallowed, so the result tells how many ranks meet in the smallest sum that holds both.

Every element of a buffer is a sum of its own, so one call measures many pairs: element e asks for
pair (e + k) mod P of the P = n (n - 1) / 2 pairs, in call k. Libraries cut a buffer into chunks and
add each in another order (in a ring every chunk starts at another rank), so the order is found by
place: in small buffers P calls measure every pair at every element, in large ones one call measures
it in every window of P elements. ``decode`` cuts the buffer into stretches of one order each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import torch

from divergence.facts import fact, sentence
from divergence.numerics.formats import format_named
from divergence.numerics.trees import NotATreeError, Tree, reveal

MOST_CALLS = 32
"""More pairs than this are measured by windows."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Says what is put in. ``size``: elements of a rank's input."""

    num_ranks: int
    dtype: str
    size: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(combinations(range(self.num_ranks), 2))

    @property
    def num_calls(self) -> int:
        pairs = self.num_ranks * (self.num_ranks - 1) // 2
        return pairs if pairs <= MOST_CALLS and self.size <= 4096 else 1

    @property
    def fits(self) -> bool:
        """Can the dtype count so many ranks, and has the buffer room for all pairs?"""
        digits = format_named(self.dtype).mantissa_bits + 1
        counts = 16 if self.dtype == "float16" else 2**digits
        room = self.num_calls > 1 or self.size >= 4 * self.num_ranks * len(self.pairs)
        return 2 <= self.num_ranks <= counts and (room or len(self.pairs) == 1)

    @property
    def unit(self) -> float:
        """2^-14 is float16's smallest normal number, of which 2^15 swallows 16."""
        return 2.0**-14 if self.dtype == "float16" else 1.0

    def terms(self, rank: int, call: int) -> torch.Tensor:
        """(size,): what ``rank`` puts in."""
        big = 2.0**15 if self.dtype == "float16" else 2.0**100
        pair = (np.arange(self.size) + call) % len(self.pairs)
        first = np.array([lower for lower, _ in self.pairs])[pair]
        second = np.array([higher for _, higher in self.pairs])[pair]
        x = np.where(first == rank, big, np.where(second == rank, -big, self.unit))
        return torch.from_numpy(x).to(getattr(torch, self.dtype))

    def sizes(self, result: torch.Tensor) -> torch.Tensor:
        """A result → int16, ranks in the smallest sum that holds both of the pair; -1 where it is
        no count."""
        counted = result.double() / self.unit
        whole = counted.round()
        good = (whole == counted) & (whole >= 0) & (whole <= self.num_ranks - 2)
        return torch.where(good, self.num_ranks - whole, -1.0).to(torch.int16)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements ``start`` to ``stop`` - 1 are added by ``tree``; None where the sizes belong to no
    tree, or differ from window to window."""

    start: int
    stop: int
    tree: Tree | None


def decode(sizes: np.ndarray, num_ranks: int) -> list[Stretch]:
    """(calls, elements) of ``Masks.sizes`` → stretches of one order each, in order. Where windows
    lie across a change of order, the elements between are in no stretch."""
    num_pairs = num_ranks * (num_ranks - 1) // 2
    calls, size = sizes.shape
    if calls == num_pairs:
        places = (np.arange(size)[None] + np.arange(calls)[:, None]) % num_pairs
        rows = np.empty((size, num_pairs), dtype=np.int64)
        rows[np.arange(size)[None].repeat(calls, 0), places] = sizes
        starts, width = np.arange(size), 1
    else:
        starts = np.arange(0, size - num_pairs + 1, num_pairs)
        width = num_pairs
        rows = np.empty((len(starts), num_pairs), dtype=np.int64)
        for offset in range(num_pairs):
            rows[np.arange(len(starts)), (starts + offset) % num_pairs] = sizes[0, starts + offset]
    if len(rows) == 0:
        return []
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    trees = [_tree(row, num_ranks) for row in distinct]
    which = which.reshape(-1)
    edges = [0, *(np.flatnonzero(which[1:] != which[:-1]) + 1).tolist(), len(which)]
    stretches = [
        Stretch(int(starts[a]), int(starts[b - 1]) + width, trees[which[a]])
        for a, b in pairwise(edges)
    ]
    return _without_edges(stretches, width) if width > 1 else _merged(stretches)


def _merged(stretches: list[Stretch]) -> list[Stretch]:
    """Neighbours of one order together: elements of no order may differ in their sizes."""
    kept: list[Stretch] = []
    for stretch in stretches:
        if kept and kept[-1].tree == stretch.tree and kept[-1].stop == stretch.start:
            kept[-1] = Stretch(kept[-1].start, stretch.stop, stretch.tree)
        else:
            kept.append(stretch)
    return kept


def _without_edges(stretches: list[Stretch], width: int) -> list[Stretch]:
    """Leave out single windows that lie across the edge between two longer stretches."""
    size = [stretch.stop - stretch.start for stretch in stretches]
    kept = [
        stretch
        for number, stretch in enumerate(stretches)
        if not (
            0 < number < len(stretches) - 1
            and size[number] == width < min(size[number - 1], size[number + 1])
        )
    ]
    return _merged(kept)


def _tree(row: np.ndarray, num_ranks: int) -> Tree | None:
    table = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for (i, j), size in zip(combinations(range(num_ranks), 2), row.tolist(), strict=True):
        table[i, j] = table[j, i] = size

    def measure(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = table[i, j]
        return sizes

    try:
        tree = reveal(measure, num_ranks)
    except (NotATreeError, ValueError):
        return None
    return tree if np.array_equal(_sizes_of(tree), row) else None


def _sizes_of(tree: Tree) -> np.ndarray:
    """Count, for each pair, the leaves of the smallest subtree with both."""
    num, sizes = tree.num_leaves, tree.sizes()
    below: list[set[int]] = [{leaf} for leaf in range(num)]
    meet = np.zeros((num, num), dtype=np.int64)
    for k, node in enumerate(tree.nodes):
        for first, second in combinations(node, 2):
            for i in below[first]:
                for j in below[second]:
                    meet[i, j] = meet[j, i] = sizes[num + k]
        below.append(set().union(*(below[child] for child in node)))
    return np.array([meet[i, j] for i, j in combinations(range(num), 2)])


def chain_of(tree: Tree) -> list[int] | None:
    """The ranks of a sequential sum in the order in which they are added, of the first two the
    lower one first; None where the tree is no chain of single additions."""
    order: list[int] = []
    for number, node in enumerate(tree.nodes):
        leaves = [child for child in node if child < tree.num_leaves]
        if len(node) != 2 or len(leaves) != (2 if number == 0 else 1):
            return None
        order += sorted(leaves)
    return order


def name_order(stretches: list[Stretch], num_ranks: int) -> str:
    """``ring``, ``tree``, ``recursive halving``, ``flat``, or what can be said else.

    ring: a chain through all ranks, which starts at another rank in each chunk. flat: one chain,
    or one fused sum, for the whole buffer. recursive halving: ranks n/2 apart first, then n/4, …
    tree: anything else that branches and is the same everywhere; recursive doubling (neighbours
    first) adds in the order of a binomial tree, and no measurement from outside tells them apart.
    Two ranks have one order.
    """
    distinct = list(dict.fromkeys(part.tree for part in stretches if part.tree is not None))
    if not stretches or any(stretch.tree is None for stretch in stretches):
        return "not revealed"
    if num_ranks == 2:
        return "one addition"
    if any(tree.widest > 2 for tree in distinct):
        same = len(distinct) == 1
        return "flat" if same and len(distinct[0].nodes) == 1 else "fused"
    chains = [chain_of(tree) for tree in distinct]
    if all(chain is not None for chain in chains):
        return "flat" if len(distinct) == 1 else _ring([c for c in chains if c], num_ranks)
    if len(distinct) == 1 and distinct[0] == _halving(num_ranks):
        return "recursive halving"
    return "tree" if len(distinct) <= 2 else "mixed"


def _ring(chains: list[list[int]], num_ranks: int) -> str:
    """Are these stretches of one circle, or of several (a library's channels), each with chunks
    that begin at different ranks?"""
    left = list(chains)
    while left and num_ranks > 3:
        members = max(
            ([arc for arc in left if _walks(arc, after)] for after in _circles_of(left[0])), key=len
        )
        if len(members) < 2:
            return "mixed"
        left = [arc for arc in left if arc not in members]
    return "ring"


def _ways(chain: list[int]) -> tuple[list[int], list[int]]:
    """A chain's first two terms may be swapped."""
    return chain, [chain[1], chain[0], *chain[2:]]


def _circles_of(chain: list[int]) -> list[dict[int, int]]:
    """Rank → the next one, of the two circles that a chain may lie on."""
    return [dict(zip(way, [*way[1:], way[0]], strict=True)) for way in _ways(chain)]


def _walks(chain: list[int], after: dict[int, int]) -> bool:
    return any(all(after[a] == b for a, b in pairwise(way)) for way in _ways(chain))


def _halving(num_ranks: int) -> Tree | None:
    if num_ranks & (num_ranks - 1):
        return None
    nodes, level = [], list(range(num_ranks))
    while len(level) > 1:
        half = len(level) // 2
        made = []
        for lower, upper in zip(level[:half], level[half:], strict=True):
            nodes.append((lower, upper))
            made.append(num_ranks + len(nodes) - 1)
        level = made
    return Tree.of(num_ranks, nodes)


def stretches_text(stretches: list[Stretch], num_ranks: int) -> str:
    """The first chunk's order, and how many there are."""
    if not stretches or stretches[0].tree is None:
        return "-"
    tree = stretches[0].tree
    chain = chain_of(tree)
    if chain is not None:
        chains = [chain_of(stretch.tree) for stretch in stretches if stretch.tree is not None]
        # its first two terms as the circle that most chains walk has them
        votes = [sum(_walks(c, after) for c in chains if c) for after in _circles_of(chain)]
        text = " + ".join(map(str, _ways(chain)[votes[0] < votes[1]]))
    else:
        text = _bracketed(tree, tree.num_leaves + len(tree.nodes) - 1)
    text = text if len(text) <= 40 else f"{text[:37]}..."
    return sentence(fact("collectives.chunks", order=text, num_more=len(stretches) - 1 or None))


def _bracketed(tree: Tree, at: int) -> str:
    if at < tree.num_leaves:
        return str(at)
    parts = [_bracketed(tree, child) for child in tree.nodes[at - tree.num_leaves]]
    return f"({' + '.join(parts)})"

"""An order of additions, as a tree, and how it is found from outside: leaves are terms, a node is
one rounded addition.

A node with two children is an ordinary addition; a node with more is a fused one, which adds all
of them before it rounds once (matrix units: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior
of NVIDIA tensor cores", PeerJ Comput. Sci. 7:e330, 2021). Addition commutes, so the order of
children carries nothing: a tree is kept in one canonical form, children by their smallest leaf,
and equal orders have equal digests.

The rounding error of a sum of n independent terms of mean 0 and variance 1 (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., section 4.2): each node rounds a partial sum of the
size(node) terms below it, whose square is size(node) on average, so

    E[error²] = c² u² Σ over nodes of size(node),    c: rms of a rounding in units of u

and two trees over equally many terms differ by W = √(Σ_b / Σ_a) in their distance to the truth.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True)
class Tree:
    """Leaves are 0 … num_leaves-1; ``nodes[k]`` holds the children of node num_leaves + k. Children
    stand before their parents, the root is the last node. Make one with ``Tree.of``, which brings
    it into the canonical form; equal trees are then equal values."""

    num_leaves: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, num_leaves: int, nodes: Sequence[Iterable[int]]) -> Tree:
        """The canonical tree of ``nodes`` (in any order in which children stand before parents).
        Raises ValueError where that is no tree over all leaves."""
        children = [tuple(node) for node in nodes]
        used = sorted(child for node in children for child in node)
        whole = num_leaves + len(children)
        if num_leaves < 1 or used != list(range(whole - 1)) or any(len(c) < 2 for c in children):
            raise ValueError("not a tree: every leaf and node but the root has one parent")
        if any(child >= num_leaves + k for k, node in enumerate(children) for child in node):
            raise ValueError("not a tree: a child stands behind its parent")
        first = list(range(num_leaves))
        for node in children:
            first.append(min(first[child] for child in node))
        ordered = [sorted(node, key=first.__getitem__) for node in children]
        new: dict[int, int] = {}
        made: list[tuple[int, ...]] = []
        stack = [(whole - 1, False)]
        while stack:  # post-order, without recursion: a chain of 4096 terms is 4095 deep
            at, ready = stack.pop()
            if at < num_leaves:
                new[at] = at
            elif ready:
                new[at] = num_leaves + len(made)
                made.append(tuple(new[child] for child in ordered[at - num_leaves]))
            else:
                stack.append((at, True))
                stack += [(child, False) for child in reversed(ordered[at - num_leaves])]
        return cls(num_leaves, tuple(made))

    def sizes(self) -> list[int]:
        """Number of leaves below each leaf (1) and node, by id."""
        sizes = [1] * self.num_leaves
        for node in self.nodes:
            sizes.append(sum(sizes[child] for child in node))
        return sizes

    @property
    def partials(self) -> int:
        """Σ over nodes of the leaves below: E[error²] of a random sum in units of c² u²."""
        return sum(self.sizes()[self.num_leaves :])

    @property
    def depth(self) -> int:
        """Most additions that a term goes through."""
        heights = [0] * self.num_leaves
        for node in self.nodes:
            heights.append(1 + max(heights[child] for child in node))
        return heights[-1]

    @property
    def widest(self) -> int:
        """Most children of a node: 2 where no addition is fused."""
        return max(map(len, self.nodes), default=1)

    @property
    def digest(self) -> str:
        """32 hex digits: equal for equal trees."""
        state = xxhash.xxh3_128(struct.pack("<q", self.num_leaves))
        for node in self.nodes:
            state.update(struct.pack(f"<{len(node) + 1}q", len(node), *node))
        return state.hexdigest()

    def parents(self) -> list[int]:
        """Parent of each leaf and node, by id; -1 for the root: how a run stores a tree."""
        parents = [-1] * (self.num_leaves + len(self.nodes))
        for k, node in enumerate(self.nodes):
            for child in node:
                parents[child] = self.num_leaves + k
        return parents


# FPRev: the order of additions of a sum, from outside.
#
# Peichen Xie et al., "FPRev: Revealing the Order of Floating-Point Summation" (USENIX ATC 2025,
# arXiv 2411.00442). Put M at term i, -M at term j and the same small unit everywhere else, with M
# so large that M + (all units) = M. Units that are added to ±M before the two meet are swallowed,
# the others survive: the output tells size(i, j), the leaves of the smallest subtree with i and j.
#
# All sizes from one leaf give its path to the root, and which leaves hang off each step of the
# path; those groups are treated alike. A node with more than two children shows as a group whose
# members meet only at the node's own size. Cost: n - 1 measurements for a sequential sum, n log n
# for a balanced one; the first leaf is tried first, then the last, then others, since a chain that
# runs backwards would cost n²/2 from its first leaf. Independent measurements are rows of one call.

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
    ``path``: for each ancestor of the pivot inside this group, its size and the group that joins it
    there. ``beside``: what meets the pivot only in the node above."""

    leaves: np.ndarray
    size: int
    turn: int = 0
    pivot: int = -1
    path: list[tuple[int, _Group]] = field(default_factory=list)
    beside: _Group | None = None


def reveal(measure: Measure, num_leaves: int, *, most: int | None = None) -> Tree:
    """The tree behind ``measure``. ``most``: measurements allowed. Raises NotATreeError and
    TooManyError."""
    top = _Group(np.arange(num_leaves), num_leaves)
    groups, frontier, asked = [top], [top], 0
    while frontier:
        open_ = [group for group in frontier if len(group.leaves) > 1]
        for group in frontier:
            # its first leaf, then its last, then by any fixed rule that moves about: a real chain
            # is never built against it
            places = (0, -1, (group.turn * 2654435761) % len(group.leaves))
            group.pivot = int(group.leaves[places[min(group.turn, 2)]])
        asked += sum(len(group.leaves) - 1 for group in open_)
        if most is not None and asked > most:
            raise TooManyError(f"more than {most} measurements")
        frontier = _split(open_, measure)
        groups += frontier
    # groups were made before those that hang off them: from the last to the first
    nodes: list[tuple[int, ...]] = []
    tops: dict[int, list[int]] = {}
    for group in reversed(groups):
        at = group.pivot
        for _, child in group.path:
            nodes.append((at, *tops.pop(id(child))))
            at = num_leaves + len(nodes) - 1
        tops[id(group)] = [at, *(tops.pop(id(group.beside)) if group.beside is not None else [])]
    if len(tops[id(top)]) != 1:
        raise NotATreeError("the terms meet in no common sum")
    return Tree.of(num_leaves, nodes)


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
        sizes_of_rest = sizes[start : start + len(rest)]
        start += len(rest)
        here = 1  # leaves of the subtree that the path has reached
        for size in np.unique(sizes_of_rest):
            joined = rest[sizes_of_rest == size]
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

"""An order of additions, as a tree: leaves are terms, a node is one rounded addition.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Tree"]


@dataclass(frozen=True, slots=True)
class Tree:
    """Leaves are 0 … num_leaves-1; ``nodes[k]`` holds the children of node num_leaves + k.

    Children stand before their parents, the root is the last node. Make one with ``Tree.of``,
    which brings it into the canonical form; equal trees are then equal values.
    """

    num_leaves: int
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, num_leaves: int, nodes: Sequence[Iterable[int]]) -> Tree:
        """The canonical tree of ``nodes`` (in any order in which children stand before parents).

        Raises ValueError where that is no tree over all leaves.
        """
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
        import xxhash

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

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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from divergence.arithmetic.additions.trees import Tree

__all__ = ["NotATreeError", "TooManyError", "reveal"]

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
    found: list[_Group] = []
    start = 0
    for group, rest in zip(groups, others, strict=True):
        mine = sizes[start : start + len(rest)]
        start += len(rest)
        here = 1  # leaves of the subtree that the path has reached
        for size in np.unique(mine):
            joined = rest[mine == size]
            poor = 2 * len(joined) > len(group.leaves)
            child = _Group(joined, int(size), group.turn + 1 if poor else 0)
            found.append(child)
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
    return found


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

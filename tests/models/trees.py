"""Usual trees; and trees read back, from what a run stores and as FPRev measures them."""

from collections.abc import Sequence

from divergence.numerics.trees import Tree

__all__ = ["balanced", "sequential", "size_between", "tree_of_parents"]


def tree_of_parents(parents: Sequence[int]) -> Tree:
    """The inverse of ``Tree.parents``. Raises ValueError where that is no tree."""
    num_leaves = len(parents) - len({p for p in parents if p >= 0})
    nodes: list[list[int]] = [[] for _ in range(len(parents) - num_leaves)]
    for child, parent in enumerate(parents):
        if parent < 0 and child == len(parents) - 1:
            continue
        if not num_leaves <= parent < len(parents):
            raise ValueError(f"not a tree: the parent of {child} is {parent}")
        nodes[parent - num_leaves].append(child)
    return Tree.of(num_leaves, nodes)


def size_between(tree: Tree, i: int, j: int) -> int:
    """Leaves of the smallest subtree that holds leaves ``i`` and ``j``: what FPRev measures."""
    parents, sizes = tree.parents(), tree.sizes()
    above = {i}
    while parents[i] >= 0:
        i = parents[i]
        above.add(i)
    while j not in above:
        j = parents[j]
    return sizes[j]


def sequential(num_leaves: int) -> Tree:
    """((x0 + x1) + x2) + …"""
    nodes = [(k if k == 0 else num_leaves + k - 1, k + 1) for k in range(num_leaves - 1)]
    return Tree.of(num_leaves, nodes)


def balanced(num_leaves: int) -> Tree:
    """Neighbours first; an odd one out waits for the next round."""
    row, nodes = list(range(num_leaves)), []
    while len(row) > 1:
        paired = []
        for left in range(0, len(row) - 1, 2):
            nodes.append((row[left], row[left + 1]))
            paired.append(num_leaves + len(nodes) - 1)
        row = paired + row[len(row) - len(row) % 2 :]
    return Tree.of(num_leaves, nodes)

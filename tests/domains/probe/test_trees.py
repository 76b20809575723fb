"""Trees: one form for one order, and its numbers worked by hand."""

import pytest

from divergence.domains.probe.additions import describe
from divergence.numerics.trees import Tree
from tests.models.trees import balanced, sequential, size_between, tree_of_parents


def test_a_sequential_sum_of_four():
    """((0 + 1) + 2) + 3: nodes of 2, 3 and 4 leaves."""
    tree = sequential(4)
    assert tree.nodes == ((0, 1), (4, 2), (5, 3))
    assert tree.sizes() == [1, 1, 1, 1, 2, 3, 4]
    assert (tree.partials, tree.depth, tree.widest) == (9, 3, 2)
    assert tree.parents() == [4, 4, 5, 6, 5, 6, -1]


def test_a_pairwise_sum_of_five():
    """(0 + 1) + (2 + 3), then the odd one."""
    tree = balanced(5)
    assert tree.nodes == ((0, 1), (2, 3), (5, 6), (7, 4))
    assert (tree.partials, tree.depth) == (2 + 2 + 4 + 5, 3)
    assert [size_between(tree, 0, j) for j in range(1, 5)] == [2, 4, 4, 5]


def test_the_order_of_children_carries_nothing():
    """Addition commutes: (2 + (1 + 0)) is ((0 + 1) + 2)."""
    one = Tree.of(3, [(1, 0), (2, 3)])
    assert one == sequential(3)
    assert one.digest == sequential(3).digest


def test_other_terms_together_are_another_tree():
    """Same shape, other leaves: another digest."""
    halves = Tree.of(4, [(0, 2), (1, 3), (4, 5)])
    assert halves != balanced(4)
    assert halves.digest != balanced(4).digest
    assert halves.partials == balanced(4).partials


@pytest.mark.parametrize(
    "nodes",
    [
        [(0, 1)],  # 2 has no parent
        [(0, 1), (3, 1)],  # 1 has two
        [(0, 1, 2), (3,)],  # a node with one child
        [(0, 4), (1, 2)],  # a child behind its parent
    ],
)
def test_what_is_no_tree_is_refused(nodes):
    """Each leaf has one way to the root."""
    with pytest.raises(ValueError, match="not a tree"):
        Tree.of(3, nodes)


@pytest.mark.parametrize("fused", [False, True])
def test_parents_give_the_tree_back(random_tree, fused):
    """What a run stores is the tree."""
    for seed in range(50):
        tree = random_tree(seed, 1 + seed % 23, fused=fused)
        assert tree_of_parents(tree.parents()) == tree
    for bad in ([1, -1], [2, 2, 5], [3, 3, 3, -1, -1]):
        with pytest.raises(ValueError, match="not a tree"):
            tree_of_parents(bad)


def lanes(num_lanes: int, per_lane: int) -> Tree:
    """Lane k adds k, k + num_lanes, …; lanes are then added in halves."""
    terms, nodes, row = num_lanes * per_lane, [], []
    for lane in range(num_lanes):
        at = lane
        for step in range(1, per_lane):
            nodes.append((at, lane + step * num_lanes))
            at = terms + len(nodes) - 1
        row.append(at)
    while len(row) > 1:
        half = len(row) // 2
        pairs = list(zip(row[:half], row[half:], strict=True))
        nodes += pairs
        row = [terms + len(nodes) - half + k for k in range(half)]
    return Tree.of(terms, nodes)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (Tree.of(1, []), "one term"),
        (sequential(2), "pairwise 2"),
        (sequential(5), "sequential 5"),
        (balanced(8), "pairwise 8"),
        (balanced(7), "(pairwise 4) + (sequential 3)"),
        (lanes(16, 64), "pairwise 16, by 8 of (sequential 64, by 16)"),
        (Tree.of(4, [(0, 1, 2, 3)]), "fused 4"),
        (Tree.of(9, [(0, 1, 2), (9, 3, 4), (10, 5, 6), (11, 7, 8)]), "sequential 9 by fused 3"),
        (Tree.of(8, [(0, 1, 2, 3), (8, 4, 5, 6, 7)]), "(fused 4) + 4 more fused"),
    ],
)
def test_words_for_trees(tree, words):
    """Runs of equal parts are written once."""
    assert describe(tree) == words


def test_a_tree_without_a_form_is_said_to_have_none(random_tree):
    """Not a page of brackets."""
    assert describe(random_tree(1, 300)).startswith("irregular 300, depth ")

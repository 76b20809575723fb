"""FPRev on sizes alone: any tree comes back, and few measurements are needed."""

import numpy as np
import pytest

from divergence.numerics.trees import NotATreeError, TooManyError, Tree, reveal
from tests.models.trees import balanced, sequential, size_between


class Sizes:
    """Answers from a known tree, counted."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.count, self.calls = tree, 0, 0

    def __call__(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        self.count, self.calls = self.count + len(i), self.calls + 1
        pairs = zip(i.tolist(), j.tolist(), strict=True)
        return np.array([size_between(self.tree, a, b) for a, b in pairs])


@pytest.mark.parametrize("fused", [False, True])
def test_any_tree_comes_back(random_tree, fused):
    """Random trees of 1 to 40 leaves, with and without fused nodes."""
    for seed in range(200):
        tree = random_tree(seed, 1 + seed % 40, fused=fused)
        assert reveal(Sizes(tree), tree.num_leaves) == tree, seed


def test_by_hand_four_terms():
    """(0 + 2) + (1 + 3): 0 meets 2 in a sum of two, the others in the whole."""
    tree = Tree.of(4, [(0, 2), (1, 3), (4, 5)])
    assert [size_between(tree, 0, j) for j in (1, 2, 3)] == [4, 2, 4]
    assert reveal(Sizes(tree), 4) == tree


def test_a_chain_takes_one_measurement_a_term():
    """Forwards from its first term; backwards from its last, after one round."""
    forwards = Sizes(sequential(200))
    reveal(forwards, 200)
    assert (forwards.count, forwards.calls) == (199, 1)
    nodes = [(198, 199)] + [(197 - k, 200 + k) for k in range(198)]
    backwards = Sizes(Tree.of(200, nodes))
    assert reveal(backwards, 200) == backwards.tree
    assert backwards.count <= 3 * 200


def test_a_balanced_tree_takes_n_log_n():
    """And as many rounds as it is deep, since independent questions are asked together."""
    sizes = Sizes(balanced(256))
    reveal(sizes, 256)
    assert sizes.count <= 256 * 8
    assert sizes.calls <= 9


def test_too_many_measurements_stop():
    """Before they are made."""
    sizes = Sizes(balanced(64))
    with pytest.raises(TooManyError, match="more than 40"):
        reveal(sizes, 64, most=40)
    assert sizes.count == 0


@pytest.mark.parametrize("answer", [1, 2, 3, 99])
def test_sizes_of_no_tree_are_refused(answer):
    """One size for every pair fits no tree of five leaves but the fused one."""
    with pytest.raises(NotATreeError):
        reveal(lambda i, j: np.full(len(i), answer), 5)
    assert reveal(lambda i, j: np.full(len(i), 5), 5) == Tree.of(5, [(0, 1, 2, 3, 4)])

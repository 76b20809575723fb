"""Orders of addition from what masks give: simulated libraries are named, by place."""

import random

import numpy as np
import pytest
import torch

from divergence.domains.collectives.orders import Masks, decode, name_order, stretches_text


def ring(k: int, n: int) -> list[int]:
    return [(k - 1 - step) % n for step in range(n)]


def chain(order, terms):
    total = terms[order[0]]
    for rank in order[1:]:
        total = total + terms[rank]
    return total


def by_pairs(terms, distances):
    level = list(terms)
    for distance in distances:
        level = [level[k] + level[k + distance] for k in range(distance)]
    return level[0]


def gloo(terms):
    """Chunk k of a ring starts at rank k - 1."""
    n = len(terms)
    parts = [one.tensor_split(n) for one in terms]
    return torch.cat([chain(ring(k, n), [parts[r][k] for r in range(n)]) for k in range(n)])


def halving(terms):
    n = len(terms)
    return by_pairs(terms, [n >> k for k in range(1, n.bit_length())])


def tree(terms):
    """Neighbours first."""
    level = list(terms)
    while len(level) > 1:
        level = [sum(level[k : k + 2][1:], level[k]) for k in range(0, len(level), 2)]
    return level[0]


def flat(terms):
    return chain(range(len(terms)), terms)


def shuffled(terms):
    """Another order in each call."""
    order = random.Random(len(terms) + int(terms[0][0])).sample(range(len(terms)), len(terms))
    return chain(order, terms)


def measured(add, n: int, size: int, dtype: str = "float32"):
    masks = Masks(n, dtype, size)
    assert masks.fits
    rows = [
        masks.sizes(add([masks.terms(r, call) for r in range(n)]))
        for call in range(masks.num_calls)
    ]
    return decode(torch.stack(rows).to(torch.int64).numpy(), n)


@pytest.mark.parametrize("size", [1037, 40_000])
@pytest.mark.parametrize(
    ("add", "n", "name"),
    [
        (gloo, 3, "ring"),
        (gloo, 4, "ring"),
        (gloo, 5, "ring"),
        (gloo, 8, "ring"),
        (halving, 4, "recursive halving"),
        (halving, 8, "recursive halving"),
        (tree, 4, "tree"),
        (tree, 6, "tree"),
        (tree, 8, "tree"),
        (flat, 3, "flat"),
        (flat, 5, "flat"),
        (flat, 8, "flat"),
        (flat, 2, "one addition"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_orders_are_named(add, n, name, size, dtype):
    """Small buffers element by element, large ones by windows."""
    assert name_order(measured(add, n, size, dtype), n) == name


def test_chunks_are_found_to_the_element():
    """Where every pair is measured at every element."""
    found = measured(gloo, 4, 1037)
    assert [one.stop - one.start for one in found] == [260, 259, 259, 259]
    assert stretches_text(found, 4) == "3 + 2 + 1 + 0, and 3 more chunks"


def test_channels_with_other_circles_are_a_ring():
    """Half of the buffer walks one circle, half another."""
    circles = ([0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 3, 5])

    def channels(terms):
        halves = [one.tensor_split(2) for one in terms]
        found = []
        for number, circle in enumerate(circles):
            parts = [half[number].tensor_split(6) for half in halves]
            for k in range(6):
                order = [circle[(k + step) % 6] for step in range(6)]
                found.append(chain(order, [part[k] for part in parts]))
        return torch.cat(found)

    found = measured(channels, 6, 3001)
    assert (len(found), name_order(found, 6)) == (12, "ring")


def test_large_buffers_leave_out_the_edges_alone():
    """No more than a window at each change of order."""
    found = measured(gloo, 8, 40_000)
    assert len(found) == 8
    assert sum(one.stop - one.start for one in found) > 40_000 - 8 * 2 * 28


def test_a_wide_sum_is_fused():
    """All ranks added before one rounding: one node with all of them."""

    def at_once(terms):
        big = torch.stack(terms).double()
        swallows = (big.abs() > 1e6).any(0)
        return torch.where(swallows, 0.0, big.sum(0)).float()

    found = measured(at_once, 4, 1037)
    assert name_order(found, 4) == "flat"
    assert found[0].tree.widest == 4


def test_what_is_no_tree_is_not_named():
    """Sizes that contradict each other."""
    sizes = np.random.default_rng(0).integers(2, 5, size=(6, 200))
    assert name_order(decode(sizes, 4), 4) == "not revealed"
    assert name_order(measured(shuffled, 4, 1037), 4) in ("not revealed", "mixed")


def test_masks_say_where_they_do_not_fit():
    """float16 swallows 16 ranks at most; a small buffer has no room for the pairs of many."""
    assert not Masks(17, "float16", 10**6).fits
    assert not Masks(64, "float32", 4096).fits
    assert Masks(64, "float32", 2**20).fits

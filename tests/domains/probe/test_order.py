"""From a machine's outputs to a proven order: software machines of known orders."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from divergence.domains.probe.additions import (
    Arithmetic,
    Summing,
    _fma,
    find_order,
    output_classes,
    prove,
    trials,
)
from divergence.numerics.trees import Tree
from tests.models.trees import balanced, sequential, tree_of_parents

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("products", [True, False])
def test_random_orders_are_found_and_proven(machine, random_tree, dtype, products):
    """Trees of 24 to 75 terms, in float32 accumulators and 16-bit outputs."""
    for seed in range(4):
        tree = random_tree(seed, 24 + 17 * seed)
        finding = find_order(machine(tree, dtype, products=products))
        assert [order.tree for order in finding.orders] == [tree], finding.reason
        # 24 plain float16 numbers may add up exactly: then nothing is proven, and nothing claimed
        if dtype == torch.float32 or seed:
            assert finding.verified, finding


@pytest.mark.parametrize("terms", [4, 5, 6, 7, 8])
def test_small_orders_by_hand(machine, terms):
    """Sequential and pairwise sums of four to eight float32 terms."""
    for tree in (sequential(terms), balanced(terms)):
        finding = find_order(machine(tree, columns=32))
        assert finding.verified
        assert finding.orders[0].tree == tree


@pytest.mark.parametrize("fused", ["first", "last", None])
def test_multiply_adds_are_told_from_rounded_products(machine, fused):
    """The same order under three arithmetics gives three proofs."""
    finding = find_order(machine(sequential(32), arithmetic=Arithmetic(fused=fused)))
    assert finding.verified
    assert finding.orders[0].proof.arithmetic == Arithmetic(fused=fused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_accumulators_are_told(machine, dtype):
    """Partial sums stored in the 16-bit format itself."""
    name = str(dtype).removeprefix("torch.")
    finding = find_order(machine(balanced(16), dtype, Arithmetic(stored=name), products=False))
    if dtype == torch.float16:  # its unit beside 2^15 is far below 11 bits: found all the same
        assert finding.orders
    assert finding.verified, finding.reason
    assert finding.orders[0].proof.arithmetic == Arithmetic(stored=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_terms_exchanged_are_seen(machine, random_tree, dtype):
    """The nearest other trees: two leaves of different nodes change places."""
    for seed in range(12):
        tree = random_tree(seed, 40)
        operator = machine(tree, dtype, columns=64)
        made = trials(operator)
        parents = tree.parents()
        i, j = next((i, j) for i in range(seed, 40) for j in range(i) if parents[i] != parents[j])
        parents[i], parents[j] = parents[j], parents[i]
        assert prove(operator, tree, made).verified
        assert not prove(operator, tree_of_parents(parents), made).verified


def test_results_that_are_cut_off_are_told(machine):
    """Plain additions and multiply-adds toward 0."""
    for how in (Arithmetic(cut=True), Arithmetic(fused="first", cut=True)):
        finding = find_order(machine(sequential(32), arithmetic=how))
        assert finding.verified
        assert finding.orders[0].proof.arithmetic == how


def test_a_tree_that_does_not_replay_is_not_claimed(machine):
    """The right shape with other terms together, and a neighbour in depth."""
    operator = machine(balanced(16))
    made = trials(operator)
    assert prove(operator, balanced(16), made).verified
    halves = Tree.of(
        16,
        [(k, k + 8) for k in range(8)]
        + [(16 + k, 20 + k) for k in range(4)]
        + [(24, 26), (25, 27), (28, 29)],
    )
    for wrong in (sequential(16), halves):
        proof = prove(operator, wrong, made)
        assert not proof.verified
        assert proof.best < proof.outputs


def test_an_order_that_depends_on_the_values_is_unverified():
    """A sum by magnitude answers masks like a tree, but no tree replays it."""

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        order = leaves.abs().argsort(dim=-1, stable=True)
        total = torch.zeros(len(leaves))
        for k in range(leaves.shape[-1]):
            total = total + leaves.gather(1, order[:, k : k + 1])[:, 0]
        return total[None]

    operator = Summing(
        name="sorted",
        shape="n=32",
        dtype=torch.float32,
        terms=32,
        columns=16,
        products=False,
        call=call,
    )
    finding = find_order(operator)
    assert not finding.verified
    assert finding.reason or all(not order.verified for order in finding.orders)


def test_exact_outputs_prove_nothing():
    """A machine that never rounds cannot show an order."""

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        return (partner.double() @ leaves.double().T).float()

    operator = Summing(
        name="exact", shape="n=16", dtype=torch.float32, terms=16, columns=16, call=call
    )
    assert not find_order(operator).verified


def test_columns_with_an_order_of_their_own_are_found(machine):
    """The last four columns add pairwise: two classes, both proven, the larger first."""
    operator = machine(sequential(32), other=balanced(32))
    classes = output_classes(operator)
    assert [int(mask.sum()) for mask in classes] == [24, 8]
    finding = find_order(operator)
    assert finding.verified
    assert [order.tree for order in finding.orders] == [sequential(32), balanced(32)]
    assert finding.orders[1].cells[:, -4:].all()


def test_an_operator_that_refuses_is_a_reason():
    """Not an error: other operators are still looked at."""

    def call(leaves: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
        raise RuntimeError('"sum" not implemented for this device\nstack')

    operator = Summing(name="none", shape="n=8", dtype=torch.float32, terms=8, call=call)
    finding = find_order(operator)
    assert (finding.orders, finding.verified) == ((), False)
    assert finding.reason == '"sum" not implemented for this device'


def test_the_fused_multiply_add_rounds_once():
    """Against exact fractions, near ties too."""
    source = np.random.default_rng(3)
    a = source.integers(2**23, 2**24, 4000).astype(np.float64)
    b = source.integers(2**23, 2**24, 4000).astype(np.float64)
    c = (source.integers(-(2**24), 2**24, 4000) * 2.0 ** source.integers(-40, 30, 4000)).astype(
        np.float32
    )
    got = _fma(a * b, c)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(float(z))
        here = abs(Fraction(float(found)) - exact)
        for other in (
            np.nextafter(found, np.float32(-np.inf)),
            np.nextafter(found, np.float32(np.inf)),
        ):
            assert here <= abs(Fraction(float(other)) - exact)


def test_a_result_that_is_cut_off_is_the_next_one_toward_zero():
    """Against exact fractions."""
    source = np.random.default_rng(5)
    a = source.integers(2**23, 2**24, 2000).astype(np.float64)
    b = source.integers(-(2**24), 2**24, 2000).astype(np.float64)
    c = (source.integers(-(2**24), 2**24, 2000) * 2.0 ** source.integers(-40, 30, 2000)).astype(
        np.float32
    )
    for x, y, z, found in zip(a, b, c, _fma(a * b, c, cut=True), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(float(z))
        further = np.nextafter(found, np.float32(np.inf if exact > 0 else -np.inf))
        assert abs(Fraction(float(found))) <= abs(exact) < abs(Fraction(float(further)))

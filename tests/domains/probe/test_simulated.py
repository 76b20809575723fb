"""Matrix units of known width and precision are recognised by the probes that look at machines."""

import numpy as np
import pytest
import torch

from divergence.domains.probe.additions import (
    Notebook,
    find_accumulator,
    find_order,
    input_bits,
    keep_bits,
    note_finding,
)
from divergence.numerics.trees import Tree
from tests.domains.probe.matrix_unit import matrix_unit
from tests.models.trees import sequential


def blocks(terms: int, width: int) -> Tree:
    """The first block's terms at once, then each block's with the sum so far."""
    nodes = [tuple(range(width))]
    for start in range(width, terms, width):
        nodes.append((terms + len(nodes) - 1, *range(start, start + width)))
    return Tree.of(terms, nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [23, 24, 25])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_width_and_fraction_bits_are_recognised(width, bits, dtype):
    """Fused dot-add of 4, 8 and 16 terms that keeps 23 to 25 bits: the tree, the bits, the cut."""
    operator = matrix_unit(64, dtype, width=width, fraction_bits=bits)
    finding = find_order(operator)
    assert finding.verified, finding
    (order,) = finding.orders
    assert order.tree == blocks(64, width)
    assert order.proof.arithmetic.fraction_bits == bits
    assert order.proof.arithmetic.cut_fused
    found = find_accumulator(operator, order.tree)
    assert (found.bits, found.fraction_bits, found.rounding) == (24, bits, "cut off")


def test_a_unit_that_rounds_its_result_is_told_from_one_that_cuts():
    """The same width and bits, another end."""
    operator = matrix_unit(64, torch.bfloat16, width=8, fraction_bits=25, cut=False)
    (order,) = find_order(operator).orders
    assert order.verified
    assert not order.proof.arithmetic.cut_fused
    assert find_accumulator(operator, order.tree).rounding == "rounded to nearest"


def test_split_sums_that_are_rounded_are_told_from_cut_units():
    """Two halves on a unit that cuts off, added in float32 as usual."""
    operator = matrix_unit(64, torch.bfloat16, width=8, fraction_bits=24, splits=2)
    finding = find_order(operator)
    assert finding.verified, finding
    (order,) = finding.orders
    how = order.proof.arithmetic
    assert (how.fraction_bits, how.cut_fused, how.cut) == (24, True, False)
    assert len(order.tree.nodes[-1]) == 2
    assert order.tree.widest == 9


@pytest.mark.parametrize("bits", [20, 30])
def test_units_that_nobody_has_described_are_measured(bits):
    """Fraction bits are read off the machine, not off a list."""
    finding = find_order(matrix_unit(64, torch.float16, width=16, fraction_bits=bits))
    assert finding.verified, finding
    assert finding.orders[0].proof.arithmetic.fraction_bits == bits


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("bits", "name"), [(10, "TF32"), (7, "bfloat16")])
def test_lost_input_bits_are_counted(bits, name, cut):
    """A float32 product of TF32 or bfloat16 inputs, cut off or rounded."""
    operator = matrix_unit(
        32, torch.float32, width=8, fraction_bits=24, input_bits=bits, cut_inputs=cut, rows=3
    )
    found = input_bits(operator)
    assert (found.leaves, found.partner, found.cut) == (bits, bits, cut)
    assert found.value == f"{bits} bits ({name}), {'cut off' if cut else 'rounded'}"
    finding = find_order(operator)
    assert finding.verified, "inputs are known, so replay is exact"
    assert finding.orders[0].tree == blocks(32, 8)


def test_float32_keeps_all_its_bits(machine):
    """And says so."""
    assert input_bits(machine(sequential(8))).value == "23 bits (float32)"


def test_facts_of_a_unit():
    """What a run would hold of it, in words."""
    notebook = Notebook()
    operator = matrix_unit(
        64, torch.float32, width=16, fraction_bits=23, input_bits=10, cut_inputs=True
    )
    note_finding(notebook, find_order(operator))
    said = {fact.probe: fact.value for fact in notebook.facts}
    assert said == {
        "order": "(fused 16) + 48 more in 3 fused",
        "accumulator": "24 bits (float32), cut off, fused terms aligned to 23 fraction bits",
        "input bits": "10 bits (TF32), cut off",
        "fma": "exact products, fused",
    }
    assert all(fact.verified for fact in notebook.facts)


def test_keeping_bits_by_hand():
    """1 + 2^-3 + 2^-4 with 3 bits: cut to 1.125, rounded to even 1.25; signs alike."""
    values = np.array([1.1875, -1.1875, 1.0, 0.0])
    assert keep_bits(values, 3).tolist() == [1.125, -1.125, 1.0, 0.0]
    assert keep_bits(values, 3, cut=False).tolist() == [1.25, -1.25, 1.0, 0.0]

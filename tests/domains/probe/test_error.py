"""The measured error of an order, beside what the formula expects of it."""

import pytest
import torch

from divergence.comparison.arithmetic import expected_w
from divergence.domains.probe.additions import Notebook, find_order, note_finding, typical_error
from divergence.run.manifest import ArithmeticFact
from tests.domains.probe.matrix_unit import matrix_unit
from tests.models.trees import balanced, sequential


def order_fact(operator) -> ArithmeticFact:
    notebook = Notebook(keep_tensors=False)
    note_finding(notebook, find_order(operator))
    return next(fact for fact in notebook.facts if fact.probe == "order")


def test_the_formula_and_the_machine_agree(machine):
    """Sequential against pairwise sums of 128 products: W within a sixth."""
    facts = [order_fact(machine(tree(128), columns=64, rows=8)) for tree in (balanced, sequential)]
    assert all(fact.verified for fact in facts)
    measured = facts[1].numbers["error"] / facts[0].numbers["error"]
    assert measured > 1.5
    assert expected_w(*facts) == pytest.approx(measured, rel=1 / 6)


def test_a_unit_that_cuts_off_is_measured_and_not_guessed():
    """Its errors all point toward 0: farther off than its short tree would have it."""
    unit = order_fact(matrix_unit(128, torch.float32, width=16, fraction_bits=24, rows=4))
    plain = order_fact(
        matrix_unit(128, torch.float32, width=16, fraction_bits=40, cut=False, rows=4)
    )
    assert expected_w(plain, unit) is None
    assert unit.numbers["error"] > 3 * plain.numbers["error"]


def test_an_exact_operator_has_no_error(machine):
    """Two terms of few bits."""
    operator = machine(sequential(2), torch.float32, products=False)
    exact = matrix_unit(16, torch.float32, width=16, fraction_bits=60, cut=False)
    assert typical_error(operator) < 2.0**-24
    assert typical_error(exact) < 2.0**-24

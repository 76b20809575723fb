"""Beside the operator to blame stands what the arithmetic behind it does, and nothing else."""

import pytest

from divergence.analyses.operators.find import behind_operator
from divergence.comparison.arithmetic import Explained, subjects_of
from divergence.comparison.result import OperatorResult
from divergence.facts import sentence
from divergence.run.manifest import ArithmeticFact


def fact(name: str, value: str) -> ArithmeticFact:
    return ArithmeticFact(name=name, value=value, verified=True)


def operator(name: str, dtype: str = "float32") -> OperatorResult:
    return OperatorResult(
        site="m/x",
        candidate_site="m/x",
        match="exact",
        operator=name,
        candidate_operator=name,
        phase="prefill",
        order=0,
        shape=(1, 4),
        reference_dtype=dtype,
        candidate_dtype=dtype,
    )


TF32 = (
    fact("fma: linear M=1 K=64 N=64 float32", "fused"),
    fact("fma: linear M=1 K=64 N=64 float32", "rounded products"),
)
EXP = (fact("ulp: exp float32", "1 ulp"), fact("ulp: exp float32", "2 ulp"))


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("aten.addmm", ("linear", "matmul")),
        ("aten.exp", ("exp",)),
        ("aten._scaled_dot_product_flash_attention_for_cpu", ("sdpa", "attention", "exp")),
        ("custom", ("custom",)),
    ],
)
def test_operators_stand_on_probed_ones(operator, words):
    """By ATen's names, whatever the overload."""
    assert subjects_of(operator) == words


def test_a_difference_behind_the_operator_is_said():
    """Other facts are left out."""
    (told,) = behind_operator(operator("aten.mm"), Explained(differing=[EXP, TF32]))
    assert sentence(told).startswith("arithmetic behind aten.mm in float32: ")
    assert "fused multiply-adds in A" in sentence(told)


def test_equal_arithmetic_sends_the_reader_elsewhere():
    """Only where something about this operator was verified on both sides."""
    found = Explained(differing=[EXP], equal=[TF32[0]])
    (told,) = behind_operator(operator("aten.mm"), found)
    assert "is the same on both sides (fma): look at software" in sentence(told)
    assert behind_operator(operator("aten.mm", "bfloat16"), found) == []
    assert behind_operator(operator("aten.topk"), found) == []

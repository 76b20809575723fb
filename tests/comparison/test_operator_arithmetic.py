"""Beside the operator to blame stands what the arithmetic behind it does, and nothing else."""

from __future__ import annotations

import pytest

from divergence.analyses.operators.arithmetic import with_arithmetic
from divergence.comparison.facts import Explained
from divergence.comparison.result import Evidence, Verdict
from divergence.comparison.results.operators import OperatorResult, OperatorsResult
from divergence.run.schema.arithmetic import ArithmeticFact, subjects_of

VERDICT = Verdict(
    kind="localized", summary="the error is made at x", confidence="high",
    evidence=[Evidence(text="it is far off"), Evidence(text="and more")],
)  # fmt: skip


def fact(name: str, value: str) -> ArithmeticFact:
    return ArithmeticFact(name=name, value=value, verified=True)


def operators(name: str, dtype: str = "float32") -> OperatorsResult:
    result = OperatorResult(
        site="m/x", candidate_site="m/x", match="exact", operator=name, candidate_operator=name,
        phase="prefill", order=0, shape=(1, 4), reference_dtype=dtype, candidate_dtype=dtype,
    )  # fmt: skip
    return OperatorsResult(
        frame="block", judged="truth", num_matched=1, onset="m/x", results=[result]
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


def test_a_difference_behind_the_operator_is_said_second():
    """The measured error first, then its arithmetic; other facts are left out."""
    verdict = with_arithmetic(VERDICT, operators("aten.mm"), Explained(differing=[EXP, TF32]))
    assert [item.text.partition(":")[0] for item in verdict.evidence] == [
        "it is far off", "arithmetic behind aten.mm in float32", "and more",
    ]  # fmt: skip
    assert "fused multiply-adds in the reference" in verdict.evidence[1].text


def test_equal_arithmetic_sends_the_reader_elsewhere():
    """Only where something about this operator was verified on both sides."""
    found = Explained(differing=[EXP], equal=[TF32[0]])
    verdict = with_arithmetic(VERDICT, operators("aten.mm"), found)
    assert "is the same on both sides (fma): look at software" in verdict.evidence[1].text
    assert with_arithmetic(VERDICT, operators("aten.mm", "bfloat16"), found) == VERDICT
    assert with_arithmetic(VERDICT, operators("aten.topk"), found) == VERDICT
    assert with_arithmetic(VERDICT, None, found) == VERDICT

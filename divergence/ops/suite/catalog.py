"""Which operators there are, and which suites are made of them."""

from __future__ import annotations

from collections.abc import Iterator

from divergence.errors import UsageError
from divergence.ops.suite.definition import PREFIX, Case, Operator
from divergence.ops.suite.operators import (
    activations,
    attention,
    embedding,
    gating,
    gemm,
    norms,
    paged_attention,
    quantization,
    rope,
    softmax,
    sums,
)
from divergence.run.schema.site import near_names

__all__ = ["OPERATORS", "SUITES", "case_path", "cases_in", "find", "suite_named"]

_FAMILIES = (
    gemm, norms, rope, softmax, attention, paged_attention, activations, gating, embedding, sums,
    quantization,
)  # fmt: skip

OPERATORS: dict[str, Operator] = {
    operator.full_name: operator for family in _FAMILIES for operator in family.OPERATORS
}
"""By full name, in the order in which a suite runs them."""

SUITES = {
    "llm": "every operator, shape, dtype and distribution",
    "quick": "float32 and bfloat16, small shapes",
}


def find(name: str) -> Operator:
    """The operator called ``name`` (``suite.rms_norm``). Raises UsageError with near names."""
    operator = OPERATORS.get(name)
    if operator is None:
        near = near_names(name, OPERATORS)
        raise UsageError(
            f"no operator of a suite is called {name!r}",
            hint=f"did you mean {', '.join(near)}?" if near else f"one of {', '.join(OPERATORS)}",
        )
    return operator


def suite_named(name: str) -> str:
    """``name``, if there is such a suite. Raises UsageError with the known ones."""
    if name not in SUITES:
        known = ", ".join(f"suite:{known} ({what})" for known, what in SUITES.items())
        raise UsageError(f"no suite is called {name!r}", hint=f"there are {known}")
    return name


def cases_in(suite: str) -> Iterator[tuple[Operator, Case]]:
    """Every case of a suite, in order."""
    for operator in OPERATORS.values():
        for case in operator.cases():
            if suite == "llm" or case.quick:
                yield operator, case


def case_path(operator: Operator, case: Case) -> str:
    """What stands for a module's path in its sites: ``rms_norm.bfloat16.decode.outliers``."""
    return f"{operator.full_name.removeprefix(PREFIX)}.{case.name}"

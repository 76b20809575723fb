"""From the operator that is to blame to the arithmetic that it stands on.

The probes looked at operators of their own, at shapes of their own. A fact is shown beside an
operator where it is about the same operation in the same dtype: as an explanation where the sides
differ, and where all that was verified is equal, as a reason to look elsewhere than at the
hardware.
"""

from __future__ import annotations

import msgspec

from divergence.compare.arithmetic import Explained, sentences
from divergence.compare.operators_result import OperatorsResult
from divergence.compare.result import Evidence, Verdict
from divergence.run.arithmetic import ArithmeticFact

__all__ = ["subjects_of", "with_arithmetic"]

_PRODUCTS = ("linear", "matmul")
_SUMS = ("sum", "layer_norm")
_SUBJECTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mm", "addmm", "linear", "matmul", "mv", "addmv", "dot"), _PRODUCTS),
    **dict.fromkeys(("bmm", "baddbmm"), ("attention", "matmul")),
    **dict.fromkeys(("sum", "mean", "var", "var_mean", "cumsum", "norm"), _SUMS),
    **dict.fromkeys(
        ("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"), (*_SUMS, "rsqrt")
    ),
    **dict.fromkeys(
        ("_softmax", "softmax", "_log_softmax", "logsumexp"), ("softmax", "exp", "sum")
    ),
    **dict.fromkeys(("gelu",), ("erf", "tanh")),
    **dict.fromkeys(("add", "sub"), ("add",)),
    **dict.fromkeys(("mul", "mul_"), ("mul",)),
    **dict.fromkeys(("addcmul", "addcdiv"), ("addcmul",)),
    **dict.fromkeys(("silu", "swiglu"), ("silu", "sigmoid", "exp")),
    **dict.fromkeys(("pow", "sqrt"), ("sqrt",)),
    **dict.fromkeys(("_to_copy", "copy_", "to"), ("cast",)),
}
"""ATen's name → first words of the subjects that it stands on; else a function of the same name."""
_MOST = 3


def subjects_of(operator: str) -> tuple[str, ...]:
    """``aten.addmm`` → (``linear``, ``matmul``)."""
    name = operator.split(".")[1] if operator.count(".") else operator
    if "scaled_dot_product" in name or "flash" in name:
        return ("sdpa", "attention", "exp")
    return _SUBJECTS.get(name, (name,))


def with_arithmetic(
    verdict: Verdict, operators: OperatorsResult | None, found: Explained
) -> Verdict:
    """The verdict with what the arithmetic says of the operator at the onset, behind the first
    piece of evidence; unchanged where no operator is to blame or nothing was probed."""
    if operators is None or operators.onset is None:
        return verdict
    first = next((r for r in operators.results if r.site == operators.onset), None)
    if first is None:
        return verdict
    words = subjects_of(first.operator)
    dtypes = {first.reference_dtype, first.candidate_dtype}
    if first.operator.partition("softmax")[1]:
        dtypes.add("float32")  # it computes in float32 inside

    def about(fact: ArithmeticFact) -> bool:
        subject = fact.subject.split()
        return subject[0] in words and subject[-1] in dtypes

    differ = [pair for pair in found.differing if about(pair[0])]
    same = [fact for fact in found.equal if about(fact)]
    name = f"{first.operator} in {' and '.join(sorted(dtypes))}"
    if differ:
        said = sentences(differ, found)[:_MOST]
        evidence = [
            Evidence(text=f"arithmetic behind {name}: {item.text}", values=item.values)
            for item in said
        ]
        known = {item.text for item in said}
    elif same:
        probes = ", ".join(dict.fromkeys(fact.probe for fact in same))
        evidence = [
            Evidence(
                text=f"what was probed behind {name} is the same on both sides ({probes}): look at "
                "software and data first"
            )
        ]
        known = set()
    else:
        return verdict
    rest = [item for item in verdict.evidence[1:] if item.text not in known]
    return msgspec.structs.replace(verdict, evidence=[*verdict.evidence[:1], *evidence, *rest])

"""Facts about a machine's arithmetic, as a manifest holds them.

A fact is one probe's answer: in words, and where it is a number, as numbers. ``verified`` says that
the answer was checked against the machine itself; a comparison builds on no other.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

__all__ = ["ArithmeticFact", "is_about", "subjects_of"]

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


class ArithmeticFact(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One thing that a probe found out about a machine's arithmetic."""

    name: str
    """``probe: what it looked at``, with shape and dtype. Facts with equal names are compared."""
    value: str
    """The answer in words."""
    verified: bool
    """The answer was checked against the machine itself."""
    unit: str | None = None
    """Unit of ``numbers``."""
    numbers: dict[str, float] = {}
    """The answer in numbers, where there are any."""
    digest: str | None = None
    """Equal for equal answers. Set where the words do not hold all of the answer (a tree, a table
    of outputs)."""
    evidence: str | None = None
    """How the answer was checked, or why there is none."""

    @property
    def probe(self) -> str:
        """``order`` of ``order: sum …``."""
        return self.name.partition(": ")[0]

    @property
    def subject(self) -> str:
        """What follows the probe's name."""
        return self.name.partition(": ")[2]

    @property
    def answer(self) -> tuple[str, str | None]:
        """Equal for equal findings."""
        return (self.value, self.digest)


def subjects_of(operator: str) -> tuple[str, ...]:
    """``aten.addmm`` → (``linear``, ``matmul``)."""
    name = operator.split(".")[1] if operator.count(".") else operator
    if "scaled_dot_product" in name or "flash" in name:
        return ("sdpa", "attention", "exp")
    return _SUBJECTS.get(name, (name,))


def is_about(fact: ArithmeticFact, operator: str, dtypes: Collection[str]) -> bool:
    """Does the fact tell something of ``operator`` in one of these dtypes? The probes looked at
    operators of their own, at shapes of their own: the same operation in the same dtype."""
    known = set(dtypes)
    if "softmax" in operator:
        known.add("float32")  # it computes in float32 inside
    words = fact.subject.split()
    return bool(words) and words[0] in subjects_of(operator) and words[-1] in known

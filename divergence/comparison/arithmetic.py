"""Two machines' arithmetic: the facts that their runs hold, side by side, and what they explain.

Only facts of one name (probe, shape, dtype) are compared, and only verified ones are claimed; an
order of additions that was not proven is counted, never explained with.

Expected W of two orders (who is farther from the truth, on a sum of n independent terms of mean 0
and variance 1): with S = Σ over additions of the number of terms below them, as a partial sum of m
terms has mean square m (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.2),

    E[error²] = c² · (u_acc² · (S + p) + u_out² · n),     W = √(E_candidate / E_reference)

u_acc = 2^-bits of the accumulator; p = n where products are rounded first, else 0; u_out, where the
result is stored in a narrower format. c cancels. Additions that cut off err toward 0 each time, so
that errors add up instead of averaging out (1.5 to 2.3 was measured on simulated matrix units where
a formula of independent errors gives 0.5 to 1.0): for those, and for fused ones, nothing is
expected. Measured W: the ratio of the two operators' errors against exact sums, on values that are
the same bytes on both machines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from divergence.comparison.analysis import is_of_machine
from divergence.comparison.constants import COARSE_ULPS
from divergence.comparison.preflight import preflight
from divergence.comparison.result import PreflightLine
from divergence.facts import Fact, fact, sentence
from divergence.numerics.formats import FORMATS
from divergence.run.manifest import ArithmeticFact, Manifest
from divergence.run.reader import Run

_ORDER = (
    "input bits",
    "accumulator",
    "rounding",
    "subnormals",
    "order",
    "fma",
    "ulp",
    "rows",
    "batch",
    "lanes",
)
"""Probes, that which explains most first."""
_PRECISION = ("input bits", "accumulator", "rounding")
"""Differences here are more than another correct rounding."""
_MOST_LINES = 3

FactPair = tuple[ArithmeticFact, ArithmeticFact]
"""The reference's fact and the candidate's of one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Says what probes tell of two runs. ``lines``: for preflight, none where neither run was
    probed. ``evidence``: one fact a difference, what explains most first, or one that says there is
    none. ``precise``: probes of ``_PRECISION`` (and ``ulp``) that differ. ``differing``, ``equal``:
    verified facts that both sides hold; ``widths``: what both found of partial sums, by name,
    verified or not."""

    lines: Sequence[PreflightLine] = ()
    evidence: Sequence[Fact] = ()
    precise: Sequence[str] = ()
    differing: Sequence[FactPair] = ()
    equal: Sequence[ArithmeticFact] = ()
    widths: Mapping[str, FactPair] = field(default_factory=dict)

    @property
    def num_differ(self) -> int:
        return len(self.differing)

    def brief(self) -> list[Fact]:
        """A few lines, for a report on something else."""
        num_more = len(self.evidence) - _MOST_LINES
        more = [fact("more_arithmetic", num_more=num_more)] if num_more > 0 else []
        return [*self.evidence[:_MOST_LINES], *more]


_OF_MODELS = (
    "weights",
    "config",
    "quantization",
    "prompt ids",
    "media inputs",
    "tokenizer",
    "chat template",
    "generated ids",
    "attention",
    "batch shape",
    "dtype",
    "model class",
)


def facts_of_operators(a: Run, b: Run) -> tuple[list[PreflightLine], Explained]:
    """Preflight of two runs of operators alone, and their arithmetic. Lines about what is a
    model's are left out; nothing blocks, since cases are checked one by one."""
    arithmetic = explain_arithmetic(a.manifest, b.manifest)
    lines = [line for line in preflight(a, b) if line.check not in _OF_MODELS]
    return [*lines, *arithmetic.lines], arithmetic


def explain_arithmetic(a: Manifest, b: Manifest) -> Explained:
    """Hold the facts of two runs side by side. Facts on 16-bit formats that neither run
    computes in are left out, unless the runs are probes."""
    ref, cand = ({item.name: item for item in m.arithmetic} for m in (a, b))
    if not ref and not cand:
        return Explained()
    names = [name for name in ref if name in cand]
    if not names:
        reference, candidate = (
            sentence(fact("num_probed", num=len(probed))) for probed in (ref, cand)
        )
        line = PreflightLine(
            check="arithmetic",
            status="same",
            reference=reference,
            candidate=candidate,
            details=[fact("no_common_fact")],
        )
        return Explained(lines=[line])
    formats = (
        None if is_of_machine(a) and is_of_machine(b) else {a.model.dtype, b.model.dtype, "float32"}
    )
    names = [name for name in names if formats is None or _format(ref[name]) in formats]
    sure = [name for name in names if ref[name].verified and cand[name].verified]
    differ = [name for name in sure if ref[name].answer != cand[name].answer]
    unsure = len(names) - len(sure)
    explained = Explained(
        differing=[(ref[name], cand[name]) for name in differ],
        equal=[ref[name] for name in sure if name not in differ],
        widths={name: (ref[name], cand[name]) for name in names if name.startswith("accumulator")},
    )
    evidence = differences(explained.differing, explained)
    if not differ:
        evidence = [fact("arithmetic_is_same", num=len(sure), num_unsure=unsure or None)]
    probes = [ref[name].probe for name in differ]
    details = [fact("not_verified", num_unsure=unsure)] if unsure else []
    if any(probe in _ORDER for probe in probes):
        kinds = [
            fact("num_of_probe", probe=probe, num=probes.count(probe))
            for probe in _ORDER
            if probe in probes
        ]
        details = [fact("probes_differ", kinds=kinds, num_unsure=unsure or None)]
    precise = [name for name in differ if _is_precision(ref[name], cand[name])]
    agreement = fact("num_held", num=len(names), total=None if len(names) == len(ref) else len(ref))
    compared = fact("num_held", num=len(names), total=None)
    if differ:
        worst = differences([(ref[name], cand[name]) for name in precise], explained)
        compared = fact(
            "num_differ",
            num_differ=len(differ),
            num=len(names),
            num_precise=len(precise) or None,
            worst=worst[0]["most"] or worst[0]["what"] if worst else None,
        )
    line = PreflightLine(
        check="arithmetic",
        status="differs" if differ else "same",
        reference=sentence(agreement),
        candidate=sentence(compared),
        details=details,
    )
    return replace(explained, lines=[line], evidence=evidence, precise=precise)


def differences(pairs: Sequence[FactPair], explained: Explained) -> list[Fact]:
    """One fact a difference; those that say the same of several shapes are one. Of orders, those
    that change the error most come first."""

    def key(item: Fact) -> tuple[int, float]:
        probe, w = item["probe"], item["measured_w"] or item["expected_w"] or 1.0
        place = _ORDER.index(probe) if probe in _ORDER else len(_ORDER)
        return place, -abs(math.log(w))

    return sorted((_difference(group, explained.widths) for group in _grouped(pairs)), key=key)


def _format(item: ArithmeticFact) -> str:
    """The last word of a subject is its dtype."""
    return item.subject.rpartition(" ")[2]


def _is_precision(a: ArithmeticFact, b: ArithmeticFact) -> bool:
    if a.probe == "ulp":
        worst = sorted(item.numbers.get("worst", 0.0) for item in (a, b))
        return worst[1] > COARSE_ULPS >= worst[0]
    return a.probe in _PRECISION


def _grouped(pairs: Sequence[FactPair]) -> list[list[FactPair]]:
    """Pairs of one probe with the same two answers are one fact."""
    groups: dict[tuple[object, ...], list[FactPair]] = {}
    for pair in pairs:
        a, b = pair
        key: tuple[object, ...] = (a.probe, a.value, b.value)
        if a.probe == "ulp":  # every one has figures of its own
            key = (a.probe, _format(a), _is_precision(a, b))
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def _difference(pairs: list[FactPair], widths: Mapping[str, FactPair]) -> Fact:
    """Pairs of one probe with the same two answers."""
    a, b = pairs[0]
    if a.probe == "order":
        width = widths.get(a.name.replace("order: ", "accumulator: ", 1), (None, None))
        ws: dict[str, Any] = {
            "expected_w": expected_w(a, b, accumulators=width),
            "measured_w": _number(b, "error") / (_number(a, "error") or math.nan),
        }
        finite = {name: w for name, w in ws.items() if w is not None and math.isfinite(w)}
        narrow = bool(finite) and FORMATS[_format(a)].itemsize < 4
        return fact(
            "order_differs",
            probe=a.probe,
            where=[pair[0].subject for pair in pairs],
            reference=a.value,
            candidate=b.value,
            same=a.value == b.value,
            ws=[fact(name, w=w) for name, w in finite.items()],
            stored_in=_format(a) if narrow else None,
            **finite,
        )
    answers = (fact("answer", value=item.value) for item in (a, b))
    reference, candidate = answers
    what, most = fact("answers", probe=a.probe, reference=reference, candidate=candidate), None
    if a.probe == "input bits":
        sides = [("reference", a), ("candidate", b)]
        sides.sort(key=lambda side: min(_number(side[1], "input"), _number(side[1], "weight")))
        (coarse, low), (fine, high) = sides
        what = fact("keeps", coarse=coarse, low=low.value, fine=fine, high=high.value)
    if a.probe == "ulp":
        worst = max(pairs, key=lambda pair: max(item.numbers.get("worst", 0.0) for item in pair))
        numbers = [_number(item, "worst") for item in worst]
        most = fact("ulp_at_worst", reference_ulp=numbers[0], candidate_ulp=numbers[1])
        what = fact("other_bits", subject=worst[0].subject, most=most)
    where = [pair[0].subject for pair in pairs]
    return fact("arithmetic_differs", probe=a.probe, where=where, what=what, most=most)


def _number(item: ArithmeticFact, name: str) -> float:
    return item.numbers.get(name, math.nan)


def expected_w(
    a: ArithmeticFact,
    b: ArithmeticFact,
    *,
    accumulators: tuple[ArithmeticFact | None, ArithmeticFact | None] = (None, None),
) -> float | None:
    """W of two facts on order, as in the module's formula; None where a number is missing, and
    for fused or cut-off additions, which the formula does not describe.

    ``accumulators``: what was found of their partial sums; 24 bits rounded to nearest without.
    """
    out = FORMATS.get(_format(a))
    if out is None:
        return None
    errors = []
    for item, width in zip((a, b), accumulators, strict=True):
        terms, partials = _number(item, "terms"), _number(item, "partials")
        widths = width.numbers if width is not None and width.verified else {}
        if widths.get("cut", 0.0) or _number(item, "widest") > 2:
            return None
        bits = widths.get("bits", 24.0)
        rounded = terms if _number(item, "rounded_products") == 1 else 0.0
        error = 4.0**-bits * (partials + rounded)
        if out.mantissa_bits + 1 < bits:
            error += 4.0 ** -(out.mantissa_bits + 1) * terms
        errors.append(error)
    if not all(math.isfinite(error) and error > 0 for error in errors):
        return None
    return math.sqrt(errors[1] / errors[0])


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


def subjects_of(operator: str) -> tuple[str, ...]:
    """Names what an operator is called in probes: ``aten.addmm`` → (``linear``, ``matmul``)."""
    name = operator.split(".")[1] if operator.count(".") else operator
    if "scaled_dot_product" in name or "flash" in name:
        return ("sdpa", "attention", "exp")
    return _SUBJECTS.get(name, (name,))


def is_about(item: ArithmeticFact, operator: str, dtypes: Collection[str]) -> bool:
    """Does the fact tell something of ``operator`` in one of these dtypes? The probes looked at
    operators of their own, at shapes of their own: the same operation in the same dtype."""
    named = set(dtypes)
    if "softmax" in operator:
        named.add("float32")  # it computes in float32 inside
    words = item.subject.split()
    return bool(words) and words[0] in subjects_of(operator) and words[-1] in named

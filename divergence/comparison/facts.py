"""What two machines' arithmetic explains: the facts that their runs hold, side by side.

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

from divergence.comparison.analysis import is_probe
from divergence.comparison.preflight.lines import preflight
from divergence.comparison.results.findings import PreflightLine
from divergence.facts import Fact, plain
from divergence.numerics.formats import FORMATS
from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.provenance import ArithmeticFact
from divergence.words import figure, list_names

__all__ = [
    "Explained", "count_of", "expected_w", "explain_arithmetic", "facts_of_operators", "is_about",
    "sentences", "subjects_of",
]  # fmt: skip

_ORDER = (
    "input bits", "accumulator", "rounding", "subnormals", "order", "fma", "ulp", "rows", "batch",
    "lanes",
)  # fmt: skip
"""Probes, that which explains most first."""
_PRECISION = ("input bits", "accumulator", "rounding")
"""Differences here are more than another correct rounding."""
_POOR_ULP = 16.0
"""A function whose worst error passes this on one side alone is coarser, not rounded otherwise."""
_MOST_LINES = 3
_MOST_SUBJECTS = 2


FactPair = tuple[ArithmeticFact, ArithmeticFact]
"""The reference's fact and the candidate's of one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """``lines``: for preflight, none where neither run was probed. ``evidence``: one sentence a
    difference, what explains most first, or one that says there is none. ``precise``: probes of
    ``_PRECISION`` (and ``ulp``) that differ. ``differing``, ``equal``: verified facts that both
    sides hold; ``widths``: what both found of partial sums, by name, verified or not."""

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
        lines = list(self.evidence[:_MOST_LINES])
        rest = len(self.evidence) - _MOST_LINES
        if rest > 0:
            more = f"{rest} more differences of arithmetic; inspect -v lists a run's facts"
            lines.append(plain(more))
        return lines


_OF_MODELS = (
    "weights", "config", "quantization", "prompt ids", "tokenizer", "chat template",
    "generated ids", "attention", "batch shape", "dtype", "model class",
)  # fmt: skip


def facts_of_operators(a: Run, b: Run) -> tuple[list[PreflightLine], Explained]:
    """Preflight of two runs of operators alone, and their arithmetic. Lines about what is a
    model's are left out; nothing blocks, since cases are checked one by one."""
    arithmetic = explain_arithmetic(a.manifest, b.manifest)
    lines = [line for line in preflight(a, b) if line.check not in _OF_MODELS]
    return [*lines, *arithmetic.lines], arithmetic


def explain_arithmetic(a: Manifest, b: Manifest) -> Explained:
    """Hold the facts of two runs side by side. Facts on 16-bit formats that neither run
    computes in are left out, unless the runs are probes."""
    ref, cand = ({fact.name: fact for fact in m.arithmetic} for m in (a, b))
    if not ref and not cand:
        return Explained()
    names = [name for name in ref if name in cand]
    if not names:
        say = [count_of(len(facts), "fact") if facts else "not probed" for facts in (ref, cand)]
        line = PreflightLine(
            check="arithmetic", status="same", reference=say[0], candidate=say[1],
            detail="no fact that both runs hold",
        )  # fmt: skip
        return Explained(lines=[line])
    formats = None if is_probe(a) and is_probe(b) else {a.model.dtype, b.model.dtype, "float32"}
    names = [name for name in names if formats is None or _format(ref[name]) in formats]
    sure = [name for name in names if ref[name].verified and cand[name].verified]
    differ = [name for name in sure if ref[name].answer != cand[name].answer]
    unsure = len(names) - len(sure)
    explained = Explained(
        differing=[(ref[name], cand[name]) for name in differ],
        equal=[ref[name] for name in sure if name not in differ],
        widths={name: (ref[name], cand[name]) for name in names if name.startswith("accumulator")},
    )
    evidence = sentences(explained.differing, explained)
    if not differ:
        text = f"the probed arithmetic is the same on both sides ({count_of(len(sure), 'fact')}"
        text += f"; {unsure} more not verified)" if unsure else ")"
        evidence = [plain(text)]
    kinds = {probe: [n for n in differ if ref[n].probe == probe] for probe in _ORDER}
    told = ", ".join(f"{probe} ({len(kind)})" for probe, kind in kinds.items() if kind)
    precise = [name for name in differ if _is_precision(ref[name], cand[name])]
    weight = ", none in precision: harmless"
    if precise:
        first = sentences([(ref[name], cand[name]) for name in precise], explained)[0].text
        weight = f", {len(precise)} in precision: {first.rpartition(': ')[2]}"
    facts = count_of(len(names), "fact")
    line = PreflightLine(
        check="arithmetic",
        status="differs" if differ else "same",
        reference=facts if len(names) == len(ref) else f"{len(names)} of {len(ref)} facts",
        candidate=f"{len(differ)} of {facts} differ{weight}" if differ else facts,
        detail="; ".join(filter(None, (told, f"{unsure} not verified" if unsure else ""))) or None,
    )
    return replace(explained, lines=[line], evidence=evidence, precise=precise)


def sentences(pairs: Sequence[FactPair], explained: Explained) -> list[Fact]:
    """One a difference; those that say the same of several shapes are one. Of orders, those that
    change the error most come first."""
    told = [(group[0][0].probe, _evidence(group, explained.widths)) for group in _grouped(pairs)]
    place = {probe: number for number, probe in enumerate(_ORDER)}

    def key(item: tuple[str, Fact]) -> tuple[int, float]:
        values = item[1].values
        weight = abs(math.log(values.get("measured_w", values.get("expected_w", 1.0)) or 1.0))
        return place.get(item[0], len(place)), -weight

    return [evidence for _, evidence in sorted(told, key=key)]


def count_of(number: int, name: str) -> str:
    """``1 fact``, ``2 facts``."""
    return f"{number} {name}" + ("" if number == 1 else "s")


def _format(fact: ArithmeticFact) -> str:
    """The last word of a subject is its dtype."""
    return fact.subject.rpartition(" ")[2]


def _is_precision(a: ArithmeticFact, b: ArithmeticFact) -> bool:
    if a.probe == "ulp":
        worst = sorted(fact.numbers.get("worst", 0.0) for fact in (a, b))
        return worst[1] > _POOR_ULP >= worst[0]
    return a.probe in _PRECISION


def _grouped(pairs: Sequence[FactPair]) -> list[list[FactPair]]:
    """Pairs of one probe with the same two answers are one sentence."""
    groups: dict[tuple[object, ...], list[FactPair]] = {}
    for pair in pairs:
        a, b = pair
        key: tuple[object, ...] = (a.probe, a.value, b.value)
        if a.probe == "ulp":  # every one has figures of its own
            key = (a.probe, _format(a), _is_precision(a, b))
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def _evidence(pairs: list[FactPair], widths: Mapping[str, FactPair]) -> Fact:
    a, b = pairs[0]
    where = list_names([pair[0].subject for pair in pairs], _MOST_SUBJECTS)
    if a.probe == "order":
        return _order_evidence(a, b, where, widths)
    if a.probe == "input bits":
        return plain(f"{where}: {_kept(a, b)}")
    if a.probe == "ulp":
        worst = max(pairs, key=lambda pair: max(fact.numbers.get("worst", 0.0) for fact in pair))
        x, y = (_number(fact, "worst") for fact in worst)
        return plain(
            f"{where}: other bits; {worst[0].subject}: {x:.3g} ulp at worst in A, {y:.3g} in B",
            reference_ulp=x,
            candidate_ulp=y,
        )
    word_a, word_b = (_WORDS.get(fact.value, fact.value) for fact in (a, b))
    said = _SAYINGS.get(a.probe, "{}").format(word_a)
    return plain(f"{where}: {said} in A, {word_b} in B")


_SAYINGS = {
    "accumulator": "partial sums of {}",
    "subnormals": "subnormal numbers {}",
    "rounding": "rounding {}",
}
"""Probe → how its values are said in a sentence."""
_WORDS = {
    "fused": "fused multiply-adds",
    "rounded products": "products rounded before they are added",
    "exact products, fused": "exact products, several added at once",
}


def _kept(a: ArithmeticFact, b: ArithmeticFact) -> str:
    """Both sides' input bits, the coarser one first."""
    sides = [("A", a), ("B", b)]
    sides.sort(key=lambda side: min(_number(side[1], "input"), _number(side[1], "weight")))
    (coarse, low), (fine, high) = sides
    return f"{coarse} keeps {low.value} of its float32 inputs, {fine} {high.value}"


def _number(fact: ArithmeticFact, name: str) -> float:
    return fact.numbers.get(name, math.nan)


def _order_evidence(
    a: ArithmeticFact, b: ArithmeticFact, where: str, widths: Mapping[str, FactPair]
) -> Fact:
    width = widths.get(a.name.replace("order: ", "accumulator: ", 1), (None, None))
    ws = {
        "expected": expected_w(a, b, accumulators=width),
        "measured": _number(b, "error") / (_number(a, "error") or math.nan),
    }
    values = {f"{name}_w": w for name, w in ws.items() if w is not None and math.isfinite(w)}
    told = ", ".join(f"{name.replace('_w', ' W')} {figure(w, 2)}" for name, w in values.items())
    if told and FORMATS[_format(a)].itemsize < 4:
        told += f", most of it from storing in {_format(a)}"
    text = f"{where}: A adds {a.value}, B {b.value}"
    if a.value == b.value:
        text = f"{where}: both add as {a.value}, but other terms stand together"
    return plain(f"{text}: {told}" if told else text, **values)


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
    for fact, width in zip((a, b), accumulators, strict=True):
        terms, partials = _number(fact, "terms"), _number(fact, "partials")
        known = width.numbers if width is not None and width.verified else {}
        if known.get("cut", 0.0) or _number(fact, "widest") > 2:
            return None
        bits = known.get("bits", 24.0)
        rounded = terms if _number(fact, "rounded_products") == 1 else 0.0
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

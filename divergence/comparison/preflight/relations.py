"""How parameters that are not equal belong together: what two manifests tell of each pair.

Equal values in another dtype, and values rounded to a narrower one that is the parameter's own
dtype, are the same weights: what differs is the dtype. All else is another experiment, whose cause
is named as far as digests and twelve sums with signs tell it: of D = B - A each sum has the size of
D's norm, unless D's rows, or its columns, were only put in another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from divergence.comparison.results.findings import PreflightStatus
from divergence.numerics.formats import format_named
from divergence.run.schema.manifest import ModelIdentity
from divergence.run.schema.provenance import NUM_SUMS, ParameterNote
from divergence.run.schema.site import starred
from divergence.words import letter, list_names

__all__ = ["Relations", "related"]

_SAME = 1e-4
"""Of the norm: sums of equal numbers, added up in float32 in another order, are nearer."""
_SHORT = {name: format_named(name).unit_roundoff for name in ("bfloat16", "float16")}
"""Of the norm: rounding to it takes numbers no farther apart."""
_MOVED = 1e-2
"""Of the norm: sums that an order of rows changes are farther apart, and small changes nearer."""
_NEAR = 0.25
"""Of the norm: what coarse codes make of weights, and hardly anything else."""
_MOST_KINDS = 4


@dataclass(frozen=True, slots=True)
class Relations:
    """Of all parameters that differ: are they the same values but for their dtypes, and what
    relates them, by class of parameter, where anything does?"""

    only_dtypes: bool
    texts: list[str]

    @property
    def status(self) -> PreflightStatus:
        """Do they stop a comparison?"""
        return "differs" if self.only_dtypes else "blocking"

    @property
    def text(self) -> str:
        """The first few."""
        return list_names(self.texts, _MOST_KINDS, "; ")


def related(a: ModelIdentity, b: ModelIdentity, pairs: Mapping[str, str]) -> Relations | None:
    """What is known of each pair that differs; None where a manifest does not tell. ``pairs``:
    names that belong together, A's to B's."""
    kinds: dict[str, tuple[list[str], list[float]]] = {}
    only_dtypes = True
    for name, other in pairs.items():
        if a.digests[name] == b.digests[other]:
            continue
        text, same, near = _of_models(name, other, a, b), False, None
        if text is None:
            notes = a.parameters.get(name), b.parameters.get(other)
            if notes[0] is None or notes[1] is None:
                return None
            text, same, near = _relation(notes[0], notes[1], has_codes=a.quantization is not None)
        only_dtypes = only_dtypes and same
        names, apart = kinds.setdefault(text, ([], []))
        names.append(name)
        apart += [] if near is None else [near]
    texts = [
        f"{list_names(list(dict.fromkeys(map(starred, names))))}: {_apart(apart)}{text}"
        for text, (names, apart) in kinds.items()
        if text or apart
    ]
    return Relations(only_dtypes, texts)


def _of_models(name: str, other: str, a: ModelIdentity, b: ModelIdentity) -> str | None:
    """What the model says of one parameter: its checkpoint lacks it, or it is another one too."""
    sides: Sequence[tuple[str, ModelIdentity, str, ModelIdentity]] = (
        (letter("reference"), a, name, b), (letter("candidate"), b, other, a)
    )  # fmt: skip
    for side, model, path, _ in sides:
        if path in model.missing:
            return f"freshly initialised on {side}, whose checkpoint lacks it"
    for side, model, path, opposite in sides:
        digest = model.digests[path]
        note = model.parameters.get(path)
        if note is None or len(note.shape) < 2 or note.norm == 0:
            continue  # vectors of zeros or ones, as norms begin with, are equal by themselves
        equal = [key for key in model.digests if key != path and model.digests[key] == digest]
        for key in equal:
            if opposite.digests.get(key) not in (None, opposite.digests.get(path)):
                return f"the same values as {key} on {side} alone, as of tied weights"
    return None


def _relation(
    a: ParameterNote, b: ParameterNote, *, has_codes: bool
) -> tuple[str, bool, float | None]:
    """(in words, or nothing that is known; is it the dtype alone?; how far apart, where that is to
    be said). ``has_codes``: of a quantised model, where training is no cause."""
    if a.shape != b.shape:
        return f"{_shape(a)} / {_shape(b)}", False, None
    if a.values == b.values:
        return f"{a.dtype} / {b.dtype}, equal values", True, None
    for side, other, mine, theirs in (("B", "A", b, a), ("A", "B", a, b)):
        for form, digest in theirs.rounded.items():
            if digest == mine.values or digest == mine.rounded.get(form) == mine.values:
                narrower = mine.dtype == form != theirs.dtype
                return f"{side} = {other} rounded to {form}", narrower, None
    if not (0 < a.norm < math.inf and 0 < b.norm < math.inf):
        zeros = [side for side, note in (("A", a), ("B", b)) if note.norm == 0]
        return f"all zeros on {zeros[0]}" if zeros else "", False, None
    apart = [x - y for x, y in zip(b.sums, a.sums, strict=True)]
    near = _size(apart) / a.norm
    if {a.dtype, b.dtype} == {"bfloat16", "float16"} and near < _SHORT["bfloat16"]:
        return f"{a.dtype} / {b.dtype}, as far apart as their rounding", True, None
    by_column, by_row, _ = (
        _size(apart[start : start + NUM_SUMS]) / a.norm for start in range(0, len(apart), NUM_SUMS)
    )
    alike = abs(b.norm / a.norm - 1) < _SAME
    if alike and by_column < _SAME and by_row > _MOVED:
        return "the same rows in another order", False, None
    if alike and by_row < _SAME and by_column > _MOVED:
        return "the same columns in another order", False, None
    factor = math.copysign(b.norm / a.norm, sum(x * y for x, y in zip(a.sums, b.sums, strict=True)))
    rest = [y - factor * x for x, y in zip(a.sums, b.sums, strict=True)]
    if _size(rest) / b.norm < min(_SAME, near / 10):
        return f"B = {factor:.6g} x A", False, None
    codes = [f"{side}'s numbers are multiples of one step" for side, note in (("A", a), ("B", b))
             if note.levels]  # fmt: skip
    if near < _NEAR:
        cause = f", as after quantising ({', '.join(codes)})" if codes else ""
        if not (codes or has_codes):
            cause = ", as after training further"
            if a.dtype == b.dtype and a.dtype in _SHORT and near < _SHORT[a.dtype]:
                cause = (
                    f", no more than rounding to {a.dtype} makes: merged or rounded in another "
                    "order, or trained further"
                )
        return cause, False, near
    return "", False, None


def _apart(nears: Sequence[float]) -> str:
    """``about 5.6% to 13% apart``: of all parameters that are so related; nothing without any."""
    if not nears:
        return ""
    ends = dict.fromkeys(f"{100 * near:.2g}%" for near in (min(nears), max(nears)))
    return f"about {' to '.join(ends)} apart"


def _shape(note: ParameterNote) -> str:
    return " x ".join(map(str, note.shape)) or "one number"


def _size(sums: Sequence[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in sums) / len(sums))

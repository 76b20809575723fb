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

from divergence.comparison.results import PreflightStatus
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.manifest import NUM_SUMS, ModelIdentity, ParameterNote
from divergence.run.site import starred

__all__ = ["Relations", "related"]

_SAME = 1e-4
"""Of the norm: sums of equal numbers, added up in float32 in another order, are nearer."""
_SHORT = {name: format_named(name).unit_roundoff for name in ("bfloat16", "float16")}
"""Of the norm: rounding to it takes numbers no farther apart."""
_MOVED = 1e-2
"""Of the norm: sums that an order of rows changes are farther apart, and small changes nearer."""
_NEAR = 0.25
"""Of the norm: what coarse codes make of weights, and hardly anything else."""


@dataclass(frozen=True, slots=True)
class Relations:
    """Of all parameters that differ: are they the same values but for their dtypes, and what
    relates them, by class of parameter, where anything does?"""

    only_dtypes: bool
    facts: list[Fact]

    @property
    def status(self) -> PreflightStatus:
        """Do they stop a comparison?"""
        return "differs" if self.only_dtypes else "blocking"

    @property
    def details(self) -> list[Fact]:
        """The first few, as one fact; none where nothing is known."""
        return [fact("preflight.relations", relations=self.facts)] if self.facts else []


def related(a: ModelIdentity, b: ModelIdentity, pairs: Mapping[str, str]) -> Relations | None:
    """What is known of each pair that differs; None where a manifest does not tell. ``pairs``:
    names that belong together, A's to B's."""
    kinds: dict[Fact | None, tuple[list[str], list[float]]] = {}
    only_dtypes = True
    for name, other in pairs.items():
        if a.digests[name] == b.digests[other]:
            continue
        how, same, near = _of_models(name, other, a, b), False, None
        if how is None:
            notes = a.parameters.get(name), b.parameters.get(other)
            if notes[0] is None or notes[1] is None:
                return None
            how, same, near = _relation(notes[0], notes[1], has_codes=a.quantization is not None)
        only_dtypes = only_dtypes and same
        names, apart = kinds.setdefault(how, ([], []))
        names.append(name)
        apart += [] if near is None else [near]
    relations = [
        fact(
            "preflight.relation", names=list(dict.fromkeys(map(starred, names))), how=how,
            apart=_apart(apart),
        )
        for how, (names, apart) in kinds.items()
        if how or apart
    ]  # fmt: skip
    return Relations(only_dtypes, relations)


def _of_models(name: str, other: str, a: ModelIdentity, b: ModelIdentity) -> Fact | None:
    """What the model says of one parameter: its checkpoint lacks it, or it is another one too."""
    sides: Sequence[tuple[str, ModelIdentity, str, ModelIdentity]] = (
        ("reference", a, name, b), ("candidate", b, other, a)
    )  # fmt: skip
    for side, model, path, _ in sides:
        if path in model.missing:
            return fact("preflight.initialised", side=side)
    for side, model, path, opposite in sides:
        digest = model.digests[path]
        note = model.parameters.get(path)
        if note is None or len(note.shape) < 2 or note.norm == 0:
            continue  # vectors of zeros or ones, as norms begin with, are equal by themselves
        equal = [key for key in model.digests if key != path and model.digests[key] == digest]
        for key in equal:
            if opposite.digests.get(key) not in (None, opposite.digests.get(path)):
                return fact("preflight.tied_alone", key=key, side=side)
    return None


def _relation(
    a: ParameterNote, b: ParameterNote, *, has_codes: bool
) -> tuple[Fact | None, bool, float | None]:
    """(what relates them, or nothing that is known; is it the dtype alone?; how far apart, where
    that is to be said). ``has_codes``: of a quantised model, where training is no cause."""
    if a.shape != b.shape:
        return fact("preflight.shapes", reference=a.shape, candidate=b.shape), False, None
    dtypes = {"reference": a.dtype, "candidate": b.dtype}
    if a.values == b.values:
        return fact("preflight.values_in_dtypes", **dtypes), True, None
    for side, other, mine, theirs in (
        ("candidate", "reference", b, a), ("reference", "candidate", a, b)
    ):  # fmt: skip
        for form, digest in theirs.rounded.items():
            if digest == mine.values or digest == mine.rounded.get(form) == mine.values:
                narrower = mine.dtype == form != theirs.dtype
                how = fact("preflight.rounded_to", side=side, other=other, form=form)
                return how, narrower, None
    if not (0 < a.norm < math.inf and 0 < b.norm < math.inf):
        zeros = [side for side, note in (("reference", a), ("candidate", b)) if note.norm == 0]
        return fact("preflight.all_zeros", side=zeros[0]) if zeros else None, False, None
    apart = [x - y for x, y in zip(b.sums, a.sums, strict=True)]
    near = _size(apart) / a.norm
    if {a.dtype, b.dtype} == {"bfloat16", "float16"} and near < _SHORT["bfloat16"]:
        return fact("preflight.dtypes_apart", **dtypes), True, None
    by_column, by_row, _ = (
        _size(apart[start : start + NUM_SUMS]) / a.norm for start in range(0, len(apart), NUM_SUMS)
    )
    alike = abs(b.norm / a.norm - 1) < _SAME
    if alike and by_column < _SAME and by_row > _MOVED:
        return fact("preflight.rows_moved"), False, None
    if alike and by_row < _SAME and by_column > _MOVED:
        return fact("preflight.columns_moved"), False, None
    factor = math.copysign(b.norm / a.norm, sum(x * y for x, y in zip(a.sums, b.sums, strict=True)))
    rest = [y - factor * x for x, y in zip(a.sums, b.sums, strict=True)]
    if _size(rest) / b.norm < min(_SAME, near / 10):
        return fact("preflight.scaled", factor=factor), False, None
    steps = [
        fact("preflight.one_step", side=side)
        for side, note in (("reference", a), ("candidate", b))
        if note.levels
    ]
    if near < _NEAR:
        cause = fact("preflight.as_quantised", steps=steps) if steps else None
        if not (steps or has_codes):
            cause = fact("preflight.as_trained")
            if a.dtype == b.dtype and a.dtype in _SHORT and near < _SHORT[a.dtype]:
                cause = fact("preflight.as_merged", dtype=a.dtype)
        return cause, False, near
    return None, False, None


def _apart(nears: Sequence[float]) -> list[str] | None:
    """``5.6%``, ``13%``: the ends, of all parameters that are so related; None without any."""
    if not nears:
        return None
    return list(dict.fromkeys(f"{100 * near:.2g}%" for near in (min(nears), max(nears))))


def _size(sums: Sequence[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in sums) / len(sums))

"""Integers and bools: they do not round, so where two sides have other ones, one side is wrong.

Equality is the rule for what is given to the model and what is counted: masks, position numbers,
cache positions, token ids. A mask is compared where a real token looks: rows of padding may be
masked in one way or another.

A choice that is made of numbers (the experts of a token, an argmax) is another matter: rounding
may decide it. It is right where it follows from the side's own scores, recorded as a float output
of the same module: the k chosen are k largest, up to what is equal but for rounding. Where that
holds for every token of the reference, it must hold for the candidate (and the other way round);
what differs then is rounding in the scores, which are judged themselves. Where no scores were
recorded, or they do not decide (groups, added biases), it is only said how many tokens agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from divergence.comparison.align import Pair, Pieces, is_repeated, repeated
from divergence.comparison.analysis import Measured
from divergence.comparison.experts import logits_decide
from divergence.comparison.result import SiteResult
from divergence.numerics.arrays import wide
from divergence.numerics.formats import format_named
from divergence.run.contents import is_mask
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import is_codes, module_of
from divergence.words import Side

_GIVEN = ("mask", "position", "input_ids", "token_type", "seq_len", "cache")
"""In a port's name: what tells a module what to look at, and is not chosen by rounding."""

_OUTPUTS = ("out", "out.1", "out.2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """An integer or bool tensor that differs at ``num_different`` of ``num_compared`` elements (of
    a choice: tokens). ``choice``: made of numbers; then ``side`` chose what its own scores do not
    say, or is None where nothing more is known than that they differ (``judged`` False)."""

    result: SiteResult
    num_different: int
    num_compared: int
    reference: str
    candidate: str
    choice: bool
    judged: bool = True
    side: Side | None = None


def find_integers(measured: Measured) -> list[Integers]:
    """All that differ, in the order of the alignment: the anchored pass first."""
    a, b = measured.reference, measured.candidate
    truth = None if measured.truth is None else measured.truth.run
    results = {(s.pass_, s.sample, s.step, s.site): s for s in measured.sites}
    pieces = Pieces(a, b)
    integers: list[Integers] = []
    for pair in measured.alignment.pairs:
        ours, other = pair.reference.record, pair.candidate.record
        kinds = {format_named(record.dtype).kind for record in (ours, other)}
        if is_codes(ours.site):
            continue  # rounding may decide them: analyses/codes
        if kinds & {"float", "complex"} or not (a.has_bytes(ours) and b.has_bytes(other)):
            continue
        result = results.get((pair.pass_, pair.reference.sample, other.step, ours.site))
        if result is None or result.identical:
            continue
        if _is_choice(ours, a):
            difference = _choice(pair, result, a, b, pieces)
        else:
            difference = _given(pair, result, a, b, pieces, truth)
        if difference is not None:
            integers.append(difference)
    return integers


def _is_choice(record: Record, run: Run) -> bool:
    """Made of floating-point numbers, not given: an output beside a float one of the same module,
    or what a block that routes tokens hands to its experts. Bools are no choices."""
    site, manifest = record.site, run.manifest
    path, _, port = site.partition(":")
    if any(word in port for word in _GIVEN) or format_named(record.dtype).kind == "bool":
        return False
    if any(
        note.routed and module_of(site).startswith(block + ".")
        for block, note in manifest.plan.modules.items()
    ):
        return True
    beside = (
        run.find((record.pass_, record.sample, record.step, f"{path}:{other}"))
        for other in _OUTPUTS
        if port.startswith("out")
    )
    return any(other is not None and format_named(other.dtype).kind == "float" for other in beside)


def _given(
    pair: Pair, result: SiteResult, a: Run, b: Run, pieces: Pieces, truth: Run | None
) -> Integers | None:
    reference, candidate = pair.reference.record, pair.candidate.record
    x, y = pieces.array(a, pair.reference), pieces.array(b, pair.candidate)
    if x.shape != y.shape:
        if not is_repeated(pair.reference, pair.candidate):
            return None  # some positions of the other's
        x, y = repeated(x, y)
    other = x.astype(np.int64) != y.astype(np.int64)
    real = _real_tokens(pair, a.manifest, x.shape, mask=is_mask(reference.site))
    if real is not None:
        other = other & real
    if not other.any():
        return None
    first = tuple(int(index) for index in np.argwhere(other)[0])
    return Integers(
        result=result,
        num_different=int(other.sum()),
        num_compared=x.size if real is None else int(np.broadcast_to(real, other.shape).sum()),
        reference=str(x[first].item()),
        candidate=str(y[first].item()),
        choice=False,
        side=_side(reference, candidate, truth),
    )


def _side(reference: Record, candidate: Record, truth: Run | None) -> Side | None:
    """The side that the truth does not have the integers of."""
    if truth is None:
        return None
    for pass_ in dict.fromkeys((reference.pass_, candidate.pass_, "free", "anchored")):
        for record in (reference, candidate):
            true_record = truth.find((pass_, record.sample, record.step, record.site))
            if true_record is None or true_record.xxh3 is None:
                continue
            if true_record.xxh3 == reference.xxh3 != candidate.xxh3:
                return "candidate"
            if true_record.xxh3 == candidate.xxh3 != reference.xxh3:
                return "reference"
    return None


def _real_tokens(
    pair: Pair, manifest: Manifest, shape: Sequence[int], *, mask: bool
) -> np.ndarray | None:
    """True where a real token's row is; None where nothing is padded, or rows cannot be told."""
    piece = pair.reference
    pads = None
    if piece.row is None and piece.record.step == 0 and len(shape) > 1:
        pads = manifest.tokens.pads(piece.record.sample)  # (B, T)
    axis = len(shape) - 2 if mask and len(shape) >= 3 else 1
    if pads is None or pads.shape != (shape[0], shape[axis]):
        return None
    view = [1] * len(shape)
    view[0], view[axis] = pads.shape
    return ~pads.reshape(view)


def _choice(pair: Pair, result: SiteResult, a: Run, b: Run, pieces: Pieces) -> Integers | None:
    x, y = pieces.array(a, pair.reference), pieces.array(b, pair.candidate)
    if x.shape != y.shape or x.ndim < 1:
        return None
    sets = [np.sort(t.reshape(-1, t.shape[-1]).astype(np.int64)) for t in (x, y)]
    other = (sets[0] != sets[1]).any(axis=-1)
    real = pieces.row_mask(pair.reference, tuple(x.shape))
    if real is not None:
        other = other & real
    if not other.any():
        return None  # the same ones, in another order
    follows = [_follows(a, pair.reference.record, x), _follows(b, pair.candidate.record, y)]
    side: Side | None = None
    router = module_of(pair.reference.record.site)
    if set(follows) == {True, False} and logits_decide(a.manifest, router):
        side = "candidate" if follows[0] else "reference"
    first = int(other.argmax())
    return Integers(
        result=result,
        num_different=int(other.sum()),
        num_compared=len(other) if real is None else int(real.sum()),
        reference=str(sets[0][first].tolist()),
        candidate=str(sets[1][first].tolist()),
        choice=True,
        judged=side is not None,
        side=side,
    )


def _follows(run: Run, record: Record, chosen: np.ndarray) -> bool | None:
    """Are the chosen of every token the largest of the module's own scores? None where no float
    output of the same module has a row of more scores for each."""
    path, _, own = record.site.partition(":")
    if not own.startswith("out"):
        return None
    k = chosen.shape[-1]
    rows = chosen.reshape(-1, k).astype(np.int64)
    for port in _OUTPUTS:
        other = run.find((record.pass_, record.sample, record.step, f"{path}:{port}"))
        if other is None or format_named(other.dtype).kind != "float" or not run.has_bytes(other):
            continue
        if other.positions != record.positions or not other.shape or other.shape[-1] <= k:
            continue
        scores = wide(run.array(other)).reshape(-1, other.shape[-1])
        if len(scores) != len(rows) or int(rows.max()) >= scores.shape[-1] or int(rows.min()) < 0:
            continue
        if not np.isfinite(scores).all():
            continue
        behind = -np.partition(-scores, k - 1)[:, k - 1 : k] - np.take_along_axis(scores, rows, -1)
        # what is compared are often probabilities, rounded once more: those that lie closer than
        # two roundings, also where a sigmoid is flat, are equal
        with np.errstate(over="ignore"):
            slope = 1 / (1 + np.exp(np.abs(scores).max(axis=-1, keepdims=True)))
        unit = format_named(other.dtype).unit_roundoff
        distinct = (np.diff(np.sort(rows)) != 0).all()
        return bool((behind * slope <= 2 * unit).all()) and bool(distinct)
    return None

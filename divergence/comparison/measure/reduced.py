"""Pairs of which not both sides have their bytes: what can be known of them.

Equal digests are equal tensors. A digest that only one side has is computed from the other's bytes,
where it has them; of a tensor that ranks hold in parts, part by part. Where the digests differ,
floats are estimated from sketches (numerics.summaries.estimate); a side in full is projected like
the other, row by row of the same number. Where no sketch is left, the statistics say how far apart
the two are at least

    ‖a - b‖ >= |‖a‖ - ‖b‖|    and    ‖a - b‖ >= √n |mean(a) - mean(b)|,

and how many elements are no finite numbers; of digests alone nothing but that they differ.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from divergence.comparison.align.pairs import Alignment
from divergence.comparison.align.pieces import Pair, Piece, Pieces, is_repeated, why_no_pair
from divergence.comparison.results import Skipped
from divergence.facts import Fact, fact
from divergence.numerics.estimate import estimate_pair
from divergence.numerics.formats import format_named
from divergence.numerics.summaries import (
    Projections,
    SumDtype,
    fold_tensor,
    grid_of,
    rows_of,
    sketch_tensor,
)
from divergence.numerics.sums import Estimate, PairMetrics, RowMetrics
from divergence.run.contents import Digests
from divergence.run.manifest import digest_tensor
from divergence.run.reader import Run
from divergence.run.record import Record

if TYPE_CHECKING:
    import torch

__all__ = ["equal_contents", "look_reduced", "why_not_comparable", "without_unknowable"]

_SUMMARY_PRECISION = 2e-6
"""What two summaries may be off by, relative to the rms: 1e-6 each (numerics.summary)."""

Looked = tuple[PairMetrics, RowMetrics, Estimate | None, float | None, tuple[int, ...]]
"""Metrics, rows, how well they are known, the least relative L2, the shape compared."""


def equal_contents(a: Run, record_a: Record, b: Run, record_b: Record) -> bool | None:
    """Are the two tensors equal, bit for bit? None where no digest tells."""
    if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
        return False
    mine, theirs = _digests(a, record_a), _digests(b, record_b)
    if (kind := _common(mine, theirs)) is not None:
        return bool(getattr(mine, kind) == getattr(theirs, kind))
    for run, record, known in ((a, record_a, theirs), (b, record_b, mine)):
        kind = _first_kind(known)
        if kind is not None and run.has_bytes(record):
            tensor = run.read(record)
            parts = [tensor[cut].contiguous() for cut in known.cuts]
            return bool(tuple(map(_MAKERS[kind], parts)) == getattr(known, kind))
    return None


_MAKERS = {"xxh3": digest_tensor, "fold": fold_tensor}


def _digests(run: Run, record: Record) -> Digests:
    if run.manifest.mesh is None:
        return Digests.of([record])
    from divergence.run.ranks import digests_of

    return digests_of(run, record)


def _first_kind(known: Digests) -> str | None:
    return next((kind for kind in _MAKERS if getattr(known, kind) is not None), None)


def _common(mine: Digests, theirs: Digests) -> str | None:
    """The kind of digest that both have, of the same parts."""
    if mine.cuts != theirs.cuts:
        return None
    both = (kind for kind in _MAKERS if getattr(mine, kind) and getattr(theirs, kind))
    return next(both, None)


def why_not_comparable(a: Run, piece: Piece, b: Run, other: Piece) -> Fact | None:
    """Why nothing can be said of the two, or None. They have comparable shapes."""
    record_a, record_b = piece.record, other.record
    if a.has_bytes(record_a) and b.has_bytes(record_b):
        return None
    if is_repeated(piece, other):
        why = why_no_pair(piece, other, exactly=True)
        return fact("align.repeated_without_bytes", why=why)
    if _sketch_of(a, piece, other) is not None and _sketch_of(b, other, piece) is not None:
        return None
    whole = piece.row is None and other.row is None and record_a.positions == record_b.positions
    if not whole:
        return fact("align.rows_without_bytes")
    if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
        known = record_a.summary is not None and record_b.summary is not None
        return None if known else fact("align.other_digests")
    mine, theirs = _digests(a, record_a), _digests(b, record_b)
    told = _common(mine, theirs) is not None
    told = told or (_first_kind(mine) is not None and b.has_bytes(record_b))
    told = told or (_first_kind(theirs) is not None and a.has_bytes(record_a))
    if told or _proved_different(piece, other):
        return None
    if mine.cuts != theirs.cuts:
        return fact("align.parts_cut_otherwise")
    return fact("align.two_kinds_of_digests")


def _proved_different(piece: Piece, other: Piece) -> bool:
    """Do the statistics show that two tensors of one dtype and shape are not equal?"""
    summary_a, summary_b = piece.record.summary, other.record.summary
    if summary_a is None or summary_b is None:
        return False
    exact = ("num_nan", "num_posinf", "num_neginf", "num_zero", "min", "max")
    if any(getattr(summary_a, name) != getattr(summary_b, name) for name in exact):
        return True
    return (_least(piece, other) or 0.0) > 0.0


def without_unknowable(alignment: Alignment, a: Run, b: Run) -> Alignment:
    """Pairs of which nothing can be said are skipped, with the reason; never a pass."""
    pairs: list[Pair] = []
    skipped = list(alignment.skipped)
    for pair in alignment.pairs:
        reason = why_not_comparable(a, pair.reference, b, pair.candidate)
        if reason is None:
            pairs.append(pair)
            continue
        record = pair.reference.record
        skipped.append(
            Skipped(pass_=pair.pass_, sample=pair.reference.sample, step=record.step,
                    site=record.site, why=reason, side="both")
        )  # fmt: skip
    if len(pairs) == len(alignment.pairs):
        return alignment
    return replace(alignment, pairs=pairs, skipped=skipped)


def look_reduced(pieces: Pieces, pair: Pair, *, base: Record | None) -> Looked | None:
    """What is known of a pair; None where it is equal. ``base``: the record of the block's input
    in the reference."""
    ref, cand = pair.reference, pair.candidate
    runs = pieces.reference, pieces.candidate
    whole = ref.row is None and cand.row is None and ref.record.positions == cand.record.positions
    if whole and equal_contents(runs[0], ref.record, runs[1], cand.record):
        return None
    mine, theirs = _sketch_of(runs[0], ref, cand), _sketch_of(runs[1], cand, ref)
    shape = _compared_shape(ref, cand)
    if mine is None or theirs is None:
        return *_unmeasured(ref.record, cand.record, shape), _least(ref, cand), shape
    tensors = mine.read(), theirs.read()
    return *_estimated(pieces, pair, [mine, theirs], tensors, base, shape), None, shape


class _Sketched:
    """One side's sketch: read, or made of its bytes like the other side's, with ``num_pooled``."""

    def __init__(
        self, run: Run, piece: Piece, k: int, rows: np.ndarray, like: Piece, *,
        made: bool, num_pooled: int = 0,
    ) -> None:  # fmt: skip
        self.k, self.rows, self.made = k, rows, made
        self._run, self._piece, self._like, self._num_pooled = run, piece, like, num_pooled

    def read(self) -> Projections:
        record = self._piece.record
        if not self.made:
            whole = self._run.read_sketch(record)
            blocks = _whole_blocks(self.rows, record) or slice(0)
            rows = whole.rows if len(self.rows) == len(whole.rows) else whole.rows[self.rows]
            return Projections(rows, whole.pooled[blocks])
        tensor = _rows(self._run.read(record), self._piece, self._like)
        return sketch_tensor(tensor, self.k, num_pooled=self._num_pooled, row_numbers=self.rows)


def _whole_blocks(rows: np.ndarray, record: Record) -> slice | None:
    """Which of the record's blocks these are, where they are whole blocks one after another."""
    each = grid_of(record.shape)[1]
    if not len(rows) or rows[0] % each or len(rows) % each:
        return None
    start = int(rows[0])
    if not np.array_equal(rows, np.arange(start, start + len(rows))):
        return None
    return slice(start // each, (start + len(rows)) // each)


def _sketch_of(run: Run, piece: Piece, other: Piece) -> _Sketched | None:
    """The side's sketch of the rows that both have, or None where there is none such. Two stored
    ones must be of rows of equal numbers, since a row's signs go by its number."""
    mine, theirs = piece.record.sketch, other.record.sketch
    if len(piece.record.shape) < 2 and (piece.row is not None or other.row is not None):
        return None  # one row: no part of it can be told apart
    if mine is not None:
        rows = _row_numbers(piece, other)
        if theirs is not None and (
            mine.num_projections != theirs.num_projections
            or rows_of(piece.record.shape)[1] != rows_of(other.record.shape)[1]
            or not np.array_equal(rows, _row_numbers(other, piece))
        ):
            return None
        return _Sketched(run, piece, mine.num_projections, rows, other, made=False)
    if theirs is None:
        return None
    if not run.has_bytes(piece.record) or format_named(piece.record.dtype).kind != "float":
        return None
    rows, k = _row_numbers(other, piece), theirs.num_projections
    num_pooled = theirs.num_pooled
    if num_pooled % k or _whole_blocks(rows, other.record) is None:
        num_pooled = 0
    return _Sketched(run, piece, k, rows, other, made=True, num_pooled=num_pooled)


def _row_numbers(piece: Piece, other: Piece) -> np.ndarray:
    """The numbers, in the piece's record, of the rows that both sides have."""
    shape = piece.record.shape
    numbers = np.arange(rows_of(shape)[0])
    if len(shape) < 3:
        return numbers if piece.row is None else numbers[piece.row : piece.row + 1]
    grid = numbers.reshape(shape[:2])
    if piece.row is not None:
        grid = grid[piece.row : piece.row + 1, piece.left : piece.right]
    chosen = other.record.positions
    if piece.record.positions is None and chosen is not None and len(chosen) != grid.shape[1]:
        grid = grid[:, list(chosen)]
    return grid.reshape(-1)


def _rows(tensor: torch.Tensor, piece: Piece, other: Piece) -> torch.Tensor:
    """The rows that both sides have, of a record's whole tensor."""
    if piece.row is not None:
        if tensor.ndim < 3:
            return tensor[piece.row : piece.row + 1]
        tensor = tensor[piece.row : piece.row + 1, piece.left : piece.right]
    chosen = other.record.positions
    if (
        piece.record.positions is None
        and chosen is not None
        and tensor.ndim >= 3
        and len(chosen) != tensor.shape[1]
    ):
        tensor = tensor[:, list(chosen)]
    return tensor


def _compared_shape(reference: Piece, candidate: Piece) -> tuple[int, ...]:
    """The shape that both sides have in common."""
    shape = reference.record.shape
    if reference.row is not None:
        shape = (1, reference.right - reference.left, *shape[2:]) if len(shape) > 1 else (1,)
    chosen = candidate.record.positions
    if reference.record.positions is None and chosen is not None and len(shape) >= 2:
        shape = (shape[0], len(chosen), *shape[2:])
    return shape


def _estimated(
    pieces: Pieces,
    pair: Pair,
    sides: list[_Sketched],
    sketches: tuple[Projections, Projections],
    base: Record | None,
    shape: tuple[int, ...],
) -> tuple[PairMetrics, RowMetrics, Estimate]:
    run, piece = pieces.reference, pair.reference
    features = rows_of(shape)[1]
    known = [p.record.sketch for p in (pair.reference, pair.candidate) if p.record.sketch]
    sums: SumDtype = "float32" if any(sketch.sums == "float32" for sketch in known) else "float64"
    entering = None
    if base is not None:
        inner = Piece(base, piece.sample, piece.row, piece.left, piece.right, piece.pads)
        # with the signs of the side that was sketched, whichever that is
        same = base.sketch is not None and base.sketch.num_projections == sides[0].k
        if same and np.array_equal(_row_numbers(inner, pair.candidate), sides[0].rows):
            entering = _Sketched(run, inner, sides[0].k, sides[0].rows, pair.candidate, made=False)
        elif run.has_bytes(base):
            entering = _Sketched(run, inner, sides[0].k, sides[0].rows, pair.candidate, made=True)
    mask = pieces.row_mask(piece, (*shape[:2], 1)) if len(shape) >= 3 else None
    metrics, rows, estimate = estimate_pair(
        *sketches,
        num_features=features,
        sums=sums,
        row_mask=mask,
        base=None if entering is None else entering.read(),
    )
    return _with_counts(metrics, pair.reference, pair.candidate), rows, estimate


def _with_counts(metrics: PairMetrics, reference: Piece, candidate: Piece) -> PairMetrics:
    """With the non-finite elements that were counted when the tensors were recorded."""
    import msgspec

    first, second = reference.record.summary, candidate.record.summary
    if first is None or second is None or reference.row is not None or candidate.row is not None:
        return metrics
    if reference.record.positions != candidate.record.positions:
        return metrics
    more = [
        getattr(second, name) - getattr(first, name)
        for name in ("num_nan", "num_posinf", "num_neginf")
    ]
    return msgspec.structs.replace(
        metrics,
        reference_nan=first.num_nan,
        reference_inf=first.num_posinf + first.num_neginf,
        candidate_nan=second.num_nan,
        candidate_inf=second.num_posinf + second.num_neginf,
        reference_neginf=first.num_neginf,
        candidate_neginf=second.num_neginf,
        # the places are not known: the least that the counts tell
        nonfinite_differ=max(sum(max(0, x) for x in more), sum(max(0, -x) for x in more)),
        reference_alone=max(0, -sum(more)),
        candidate_alone=max(0, sum(more)),
    )


def _unmeasured(
    reference: Record, candidate: Record, shape: tuple[int, ...]
) -> tuple[PairMetrics, RowMetrics, None]:
    """Nothing but that they differ, the norms, and what is no finite number."""

    numel = math.prod(shape)
    metrics = PairMetrics(
        identical=False, numel=numel, num_finite=numel, num_rows=0, num_masked=0, rel_l2=None,
        cosine=None, one_minus_cosine=None, sqnr_db=None, max_abs=None, max_abs_index=None,
        max_abs_reference=None, max_abs_candidate=None, reference_norm=_norm(reference),
        candidate_norm=_norm(candidate), gain=None, gain_se=None, ulp_format=None,
        ulp_share_over_1=None, ulp_p99=None, ulp_max=None, token_rel_l2_median=None,
        token_rel_l2_p99=None, token_rel_l2_max=None, worst_row=None, channel_rel_l2_max=None,
        worst_channel=None, update_rel_l2=None, update_norm=None, num_sink_tokens=0,
        rel_l2_without_sinks=None, pad_rel_l2=None, reference_nan=0, reference_inf=0,
        candidate_nan=0, candidate_inf=0,
    )  # fmt: skip
    nothing = np.zeros(0)
    rows = RowMetrics(rel_l2=nothing, diff=nothing, norm=nothing, update_norm=None)
    return _with_counts(metrics, Piece(reference, 0), Piece(candidate, 0)), rows, None


def _norm(record: Record) -> float | None:
    summary = record.summary
    if summary is None:
        return None
    finite = record.numel - summary.num_nan - summary.num_posinf - summary.num_neginf
    return (summary.rms or 0.0) * math.sqrt(finite)


def _least(ref: Piece, cand: Piece) -> float | None:
    """The least relative L2 that the statistics allow, from norms and means."""
    first, second = ref.record.summary, cand.record.summary
    if first is None or second is None or not first.rms or second.rms is None:
        return None
    if ref.record.shape != cand.record.shape or ref.row is not None or cand.row is not None:
        return None
    if any(s.num_nan + s.num_posinf + s.num_neginf for s in (first, second)):
        return None
    apart = max(abs(first.rms - second.rms), abs((first.mean or 0.0) - (second.mean or 0.0)))
    return max(0.0, apart / first.rms - _SUMMARY_PRECISION)

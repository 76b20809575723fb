"""Pairs of which not both sides have their bytes: what can be known of them."""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from divergence.comparison.align import Alignment, Pair, Piece, Pieces, is_repeated, why_no_pair
from divergence.comparison.constants import CAST_ROUNDINGS, SUMMARY_PRECISION
from divergence.comparison.measure.rating import PairNumbers
from divergence.comparison.result import Skipped
from divergence.facts import Fact, fact
from divergence.numerics.arrays import as_tensor
from divergence.numerics.estimate import estimate_pair
from divergence.numerics.floor import norm_floor
from divergence.numerics.formats import format_named
from divergence.numerics.pairs import PairMetrics, RowMetrics
from divergence.numerics.sketches import (
    Projections,
    SumDtype,
    fold_array,
    grid_of,
    rows_of,
    sketch_tensor,
)
from divergence.numerics.sums import Estimate
from divergence.run.contents import Digests
from divergence.run.manifest import digest_array
from divergence.run.reader import Run
from divergence.run.record import Record

# Equal digests are equal tensors. A digest that only one side has is computed from the other's
# bytes, where it has them; of a tensor that ranks hold in parts, part by part. Where the digests
# differ, floats are estimated from sketches (numerics.estimate); a side in full is
# projected like the other, row by row of the same number. Where no sketch is left, the statistics
# say how far apart the two are at least
#
#     ‖a - b‖ >= |‖a‖ - ‖b‖|,    √n |mean(a) - mean(b)|,    |max(a) - max(b)|    and of min alike,
#
# and how many elements are no finite numbers; of digests alone nothing but that they differ. Of
# another tool's statistics without a digest not even that is known, where they agree.


_MAKERS: dict[str, Callable[[np.ndarray], str]] = {
    "xxh3": digest_array,
    "fold": fold_array,
    "crc32": lambda array: (
        f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"
    ),
}


def equal_contents(a: Run, record_a: Record, b: Run, record_b: Record) -> bool | None:
    """Are the two tensors equal, bit for bit? None where no digest tells."""
    if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
        return False
    tell = _digest_test(a, record_a, b, record_b)
    return None if tell is None else tell()


def _digest_test(a: Run, record_a: Record, b: Run, record_b: Record) -> Callable[[], bool] | None:
    """Return what tells by digests whether two tensors are equal; None where nothing does. A digest
    that one side alone has is made of the other's bytes."""
    of_a, of_b = a.digests(record_a), b.digests(record_b)
    for kind in _MAKERS if of_a.cuts == of_b.cuts else ():
        if getattr(of_a, kind) and getattr(of_b, kind):
            return functools.partial(operator.eq, getattr(of_a, kind), getattr(of_b, kind))
    for run, record, digests in ((a, record_a, of_b), (b, record_b, of_a)):
        for kind in _MAKERS:
            if getattr(digests, kind) is not None and run.has_bytes(record):
                return functools.partial(_has_digests, run, record, digests, kind)
    return None


def _has_digests(run: Run, record: Record, digests: Digests, kind: str) -> bool:
    array = run.array(record)
    parts = [array[cut] for cut in digests.cuts]
    return bool(tuple(map(_MAKERS[kind], parts)) == getattr(digests, kind))


def why_not_comparable(a: Run, piece: Piece, b: Run, other: Piece) -> Fact | None:
    """Say why nothing can be said of the two, or None. They have comparable shapes."""
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
        summarized = record_a.summary is not None and record_b.summary is not None
        return None if summarized else fact("align.other_digests")
    if _digest_test(a, record_a, b, record_b) is not None:
        return None
    if record_a.summary is not None and record_b.summary is not None:
        # do they show that the two are not equal?
        if not _agree(a, piece, b, other):
            return None
        if any(run.manifest.plan.statistics_off is not None for run in (a, b)):
            return None  # one-sided: they agree
    if record_a.checksum is not None and record_b.checksum is not None:
        return None
    if a.digests(record_a).cuts != b.digests(record_b).cuts:
        return fact("align.parts_cut_otherwise")
    return fact("align.two_kinds_of_digests")


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
            Skipped(
                pass_=pair.pass_,
                sample=pair.reference.sample,
                step=record.step,
                site=record.site,
                why=reason,
                side="both",
            )
        )
    if len(pairs) == len(alignment.pairs):
        return alignment
    return replace(alignment, pairs=pairs, skipped=skipped)


class _Sketched:
    """One side's sketch: read, or made of its bytes like the other side's, with ``num_pooled``."""

    def __init__(
        self,
        run: Run,
        piece: Piece,
        k: int,
        rows: np.ndarray,
        like: Piece,
        *,
        made: bool,
        num_pooled: int = 0,
    ) -> None:
        self.k, self.rows, self.made = k, rows, made
        self._run, self._piece, self._like, self._num_pooled = run, piece, like, num_pooled

    def read(self) -> Projections:
        record = self._piece.record
        if not self.made:
            whole = self._run.read_sketch(record)
            blocks = _whole_blocks(self.rows, record) or slice(0)
            rows = whole.rows if len(self.rows) == len(whole.rows) else whole.rows[self.rows]
            return Projections(rows, whole.pooled[blocks])
        tensor = as_tensor(_rows(self._run.array(record), self._piece, self._like))
        return sketch_tensor(tensor, self.k, num_pooled=self._num_pooled, row_numbers=self.rows)


def _whole_blocks(rows: np.ndarray, record: Record) -> slice | None:
    """Say which of the record's blocks these are, where they are whole blocks one after another."""
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
    sketch, other_sketch = piece.record.sketch, other.record.sketch
    if len(piece.record.shape) < 2 and (piece.row is not None or other.row is not None):
        return None  # one row: no part of it can be told apart
    if sketch is not None:
        rows = _row_numbers(piece, other)
        if other_sketch is not None and (
            sketch.num_projections != other_sketch.num_projections
            or rows_of(piece.record.shape)[1] != rows_of(other.record.shape)[1]
            or not np.array_equal(rows, _row_numbers(other, piece))
        ):
            return None
        return _Sketched(run, piece, sketch.num_projections, rows, other, made=False)
    if other_sketch is None:
        return None
    if not run.has_bytes(piece.record) or format_named(piece.record.dtype).kind != "float":
        return None
    rows, k = _row_numbers(other, piece), other_sketch.num_projections
    num_pooled = other_sketch.num_pooled
    if num_pooled % k or _whole_blocks(rows, other.record) is None:
        num_pooled = 0
    return _Sketched(run, piece, k, rows, other, made=True, num_pooled=num_pooled)


def _row_numbers(piece: Piece, other: Piece) -> np.ndarray:
    """The numbers, in the piece's record, of the rows that both sides have."""
    shape = piece.record.shape
    numbers = np.arange(rows_of(shape)[0])
    grid = numbers if len(shape) < 3 else numbers.reshape(shape[:2])
    return _rows(grid, piece, other).reshape(-1)


def _rows(whole: np.ndarray, piece: Piece, other: Piece) -> np.ndarray:
    """The rows that both sides have, of a record's array or of its rows' numbers."""
    of_tokens = len(piece.record.shape) >= 3
    if piece.row is not None:
        whole = whole[piece.row : piece.row + 1]
        whole = whole[:, piece.left : piece.right] if of_tokens else whole
    chosen = other.record.positions
    if of_tokens and piece.record.positions is None and chosen is not None:
        whole = whole if len(chosen) == whole.shape[1] else whole[:, list(chosen)]
    return whole


def _estimated(
    pieces: Pieces,
    pair: Pair,
    sketch: _Sketched,
    other: _Sketched,
    base: Record | None,
    shape: tuple[int, ...],
) -> tuple[PairMetrics, RowMetrics, Estimate]:
    run, piece = pieces.reference, pair.reference
    features = rows_of(shape)[1]
    notes = [p.record.sketch for p in (pair.reference, pair.candidate) if p.record.sketch]
    sums: SumDtype = "float32" if any(sketch.sums == "float32" for sketch in notes) else "float64"
    entering = None
    if base is not None:
        inner = Piece(base, piece.sample, piece.row, piece.left, piece.right, piece.pads)
        # with the signs of the side that was sketched, whichever that is
        same = base.sketch is not None and base.sketch.num_projections == sketch.k
        if same and np.array_equal(_row_numbers(inner, pair.candidate), sketch.rows):
            entering = _Sketched(run, inner, sketch.k, sketch.rows, pair.candidate, made=False)
        elif run.has_bytes(base):
            entering = _Sketched(run, inner, sketch.k, sketch.rows, pair.candidate, made=True)
    mask = pieces.row_mask(piece, (*shape[:2], 1)) if len(shape) >= 3 else None
    metrics, rows, estimate = estimate_pair(
        sketch.read(),
        other.read(),
        num_features=features,
        sums=sums,
        row_mask=mask,
        base=None if entering is None else entering.read(),
    )
    return _with_counts(metrics, pair.reference, pair.candidate), rows, estimate


def _with_counts(metrics: PairMetrics, reference: Piece, candidate: Piece) -> PairMetrics:
    """Adds the non-finite elements that were counted when the tensors were recorded."""
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


def _norm(record: Record) -> float | None:
    summary = record.summary
    if summary is None:
        return None
    finite = record.numel - summary.num_nan - summary.num_posinf - summary.num_neginf
    return (summary.rms or 0.0) * math.sqrt(finite)


def summary_precision(run: Run, record: Record) -> float:
    """Return what norm and mean may be off by, relative to the rms. Other tools add up in the
    tensor's own dtype, and round the sum to it."""
    off = run.manifest.plan.statistics_off
    if off is None:
        return SUMMARY_PRECISION / 2
    lanes = 8 if record.dtype in ("float32", "float64") else 1
    in_sums = CAST_ROUNDINGS * norm_floor(record.numel, lanes=lanes)
    return off + in_sums + format_named(record.dtype).unit_roundoff


def _least(a: Run, ref: Piece, b: Run, cand: Piece) -> float | None:
    """The least relative L2 that the statistics allow, from norms, means and extremes, and from the
    distance that a tool told of these two. Without a norm the largest magnitude stands in for the
    rms, which is no larger."""
    first, second = ref.record.summary, cand.record.summary
    if first is None or second is None or first.absmax is None or second.absmax is None:
        return None
    if ref.record.shape != cand.record.shape or ref.row is not None or cand.row is not None:
        return None
    if any(s.num_nan + s.num_posinf + s.num_neginf for s in (first, second)):
        return None
    size = first.absmax if first.rms is None else first.rms
    if not size:
        return math.inf if second.absmax else 0.0
    digits = sum(run.manifest.plan.statistics_off or 0.0 for run in (a, b))
    extremes_of_both = [
        (x, y)
        for x, y in ((first.min, second.min), (first.max, second.max))
        if x is not None and y is not None
    ]
    extremes = [abs(x - y) - digits * max(abs(x), abs(y)) for x, y in extremes_of_both]
    apart = max(0.0, *extremes) / math.sqrt(ref.record.numel) / size if extremes else 0.0
    sums = [(first.rms, second.rms), (first.mean, second.mean)]
    means = [abs(x - y) for x, y in sums if x is not None and y is not None]
    precision = summary_precision(a, ref.record) + summary_precision(b, cand.record)
    distances = [record.apart for record in (ref.record, cand.record) if record.apart is not None]
    if len(distances) == 2 and distances[0].compared == distances[1].compared:
        apart = max(apart, distances[0].least)
    return max(apart, max(means, default=0.0) / size - precision)


def _agree(a: Run, ref: Piece, b: Run, cand: Piece) -> bool:
    """Does nothing that was kept of the two show that they differ?"""
    record_a, record_b = ref.record, cand.record
    if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
        return False
    checksums = [(record.checksum or "").partition(":") for record in (record_a, record_b)]
    if checksums[0][0] == checksums[1][0] and checksums[0][2] != checksums[1][2]:
        return False
    if _digest_test(a, record_a, b, record_b) is not None:  # asked where that said no
        return False
    first, second = record_a.summary, record_b.summary
    if first is None or second is None:
        return True
    foreign = any(run.manifest.plan.statistics_off is not None for run in (a, b))
    exact = ("num_nan", "num_posinf", "num_neginf", *(() if foreign else ("num_zero",)))
    if any(getattr(first, name) != getattr(second, name) for name in exact):
        return False
    if not foreign and (first.min, first.max) != (second.min, second.max):
        return False
    return (_least(a, ref, b, cand) or 0.0) <= 0.0


def measure_reduced(pieces: Pieces, pair: Pair, *, is_block: bool) -> PairNumbers | None:
    """Return what can be known without the bytes of both sides; None where they are equal."""
    a, b, ref, cand = pieces.reference, pieces.candidate, pair.reference, pair.candidate
    positions = ref.record.positions, cand.record.positions
    whole = ref.row is None and cand.row is None and positions[0] == positions[1]
    if whole and equal_contents(a, ref.record, b, cand.record):
        return None
    shape = ref.shape  # what both sides have in common of it
    if positions[0] is None and positions[1] is not None and len(shape) >= 2:
        shape = (shape[0], len(positions[1]), *shape[2:])
    sketches = _sketch_of(a, ref, cand), _sketch_of(b, cand, ref)
    if sketches[0] is not None and sketches[1] is not None:
        base = pieces.base_record(pair) if is_block else None
        metrics, rows, estimate = _estimated(pieces, pair, sketches[0], sketches[1], base, shape)
        return PairNumbers(metrics, None, rows, shape, estimate=estimate)
    # nothing but that they differ, the norms, and what is no finite number
    numel, nothing = math.prod(shape), np.zeros(0)
    metrics = PairMetrics(
        identical=False,
        numel=numel,
        num_finite=numel,
        num_rows=0,
        reference_norm=_norm(ref.record),
        candidate_norm=_norm(cand.record),
    )
    return PairNumbers(
        _with_counts(metrics, Piece(ref.record, 0), Piece(cand.record, 0)),
        None,
        RowMetrics(rel_l2=nothing, diff=nothing, norm=nothing, update_norm=None),
        shape,
        least=_least(a, ref, b, cand),
        statistics_agree=_agree(a, ref, b, cand),
    )

"""Two runs measured: opened, aligned, and every pair read and measured once, in order."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec
import numpy as np

from divergence.comparison.advice import advise
from divergence.comparison.align.coverage import account, tokens_row
from divergence.comparison.align.pairs import (
    Alignment,
    NameMap,
    Pair,
    Piece,
    Pieces,
    align,
    is_repeated,
    piece_like,
    pieces_in,
    renaming,
    repeated,
    replayed_from,
    same_positions,
    why_no_pair,
    why_nothing,
)
from divergence.comparison.analysis import Measured, numbers_of, of_machine
from divergence.comparison.experts import Routes, Routing, routing_notes, unknown_blocks
from divergence.comparison.limits import CASTS, SUMMARY_PRECISION
from divergence.comparison.measure.judge import Judge, ModelFloor, PairNumbers, work_format
from divergence.comparison.measure.truth import SamplesBySite, Truth, inputs_of
from divergence.comparison.results import LogitsDiff, PreflightLine, SiteResult, Skipped
from divergence.errors import IncomparableError, RunFormatError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.arrays import as_tensor
from divergence.numerics.estimate import estimate_pair
from divergence.numerics.floor import THRESHOLDS, Thresholds, norm_floor
from divergence.numerics.formats import Format, format_named, format_of, is_float
from divergence.numerics.kernels import Kernel, kernel_for, set_device
from divergence.numerics.logits import measure_logits
from divergence.numerics.pairs import (
    MOST_NUMEL,
    NUMEL_AT_ONCE,
    AgainstTruth,
    against_many,
    measure_against,
    measure_many,
    measure_pair,
)
from divergence.numerics.summaries import (
    Projections,
    SumDtype,
    fold_array,
    grid_of,
    rows_of,
    sketch_tensor,
)
from divergence.numerics.sums import Estimate, PairMetrics, RowMetrics, num_threads
from divergence.run.contents import Digests
from divergence.run.manifest import digest_array
from divergence.run.reader import Run, floor_of, own_truth
from divergence.run.record import Record
from divergence.run.site import BACKWARD, OPTIMIZER, is_norm, is_operator_site, module_of
from divergence.words import Progress, Side, silent

if TYPE_CHECKING:
    import torch


# One pair of records measured, from bytes or from what is kept of them.


def _nothing_shared(site: str) -> float:
    return 0.0  # a function with a name: a measurer is sent to other processes


class SharedRounding:
    """By site, the error that all of an optimizer's input and moments have in common.

    Each clipped gradient is multiplied by limit / norm, so the rounding of that one number is in
    all that an optimizer gets and in all moments. It is no small one: some kernels add millions of
    squares one after the other in float32, and lose a share of them once the sum is large. The norm
    is judged as a site of its own; what follows from it is held to how far the norms are apart. A
    new value moves by no more than its step times that: a first step of AdamW is the rate at most,
    one of SGD the rate times what gradients are clipped to."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._rounding, norms = 0.0, []
        for run in runs:
            summaries = {}
            for record in run.records:
                if f"{OPTIMIZER}:in." in record.site:
                    lanes = 8 if record.dtype in ("float32", "float64") else 1
                    self._rounding = max(self._rounding, norm_floor(record.numel, lanes=lanes))
                if is_norm(record.site) and record.summary is not None:
                    summaries[record.pass_] = record.summary
            # the last pass, which is the anchored one where there is one
            summary = summaries.get("anchored", summaries.get("free"))
            if summary is not None and summary.rms is not None:
                norms.append(summary.rms)
        apart = max(norms) / min(norms) - 1 if norms and min(norms) > 0 else 0.0
        self._error = max(self._rounding, apart)
        training = runs[0].manifest.training
        self._clipped = any(run.manifest.training.clip_grad_norm is not None for run in runs)
        self._rate = (training.learning_rate or 0.0) * max(1.0, training.clip_grad_norm or 0.0)
        self._sizes = {
            record.site: record.summary.rms
            for record in runs[0].records
            if f"{OPTIMIZER}:out." in record.site and record.summary is not None
        }

    def __call__(self, site: str) -> float:
        path, _, port = site.partition(":")
        if not path.endswith(OPTIMIZER):
            return 0.0
        if is_norm(site):
            return self._rounding
        if not self._clipped:
            return 0.0
        if port[:3] == "out" and port.count(".") == 1:  # a new value: its step, in shares of it
            return self._error * self._rate / (self._sizes.get(site) or 1.0)
        return self._error * (2 if port.endswith("_sq") else 1)


# Pairs of which not both sides have their bytes: what can be known of them.
#
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


def _crc32(array: np.ndarray) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


_MAKERS: dict[str, Callable[[np.ndarray], str]] = {
    "xxh3": digest_array,
    "fold": fold_array,
    "crc32": _crc32,
}


def equal_contents(a: Run, record_a: Record, b: Run, record_b: Record) -> bool | None:
    """Are the two tensors equal, bit for bit? None where no digest tells."""
    if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
        return False
    tell = _teller(a, record_a, b, record_b)
    return None if tell is None else tell()


def _teller(a: Run, record_a: Record, b: Run, record_b: Record) -> Callable[[], bool] | None:
    """What tells by digests whether two tensors are equal; None where nothing does. A digest that
    one side alone has is made of the other's bytes."""
    mine, theirs = _digests(a, record_a), _digests(b, record_b)
    for kind in _MAKERS if mine.cuts == theirs.cuts else ():
        if getattr(mine, kind) and getattr(theirs, kind):
            return functools.partial(operator.eq, getattr(mine, kind), getattr(theirs, kind))
    for run, record, known in ((a, record_a, theirs), (b, record_b, mine)):
        for kind in _MAKERS:
            if getattr(known, kind) is not None and run.has_bytes(record):
                return functools.partial(_has_digests, run, record, known, kind)
    return None


def _has_digests(run: Run, record: Record, known: Digests, kind: str) -> bool:
    array = run.array(record)
    parts = [array[cut] for cut in known.cuts]
    return bool(tuple(map(_MAKERS[kind], parts)) == getattr(known, kind))


def _digests(run: Run, record: Record) -> Digests:
    if run.manifest.mesh is None:
        return Digests.of([record])
    from divergence.run.ranks import digests_of

    return digests_of(run, record)


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
    if _teller(a, record_a, b, record_b) is not None:
        return None
    if record_a.summary is not None and record_b.summary is not None:
        # do they show that the two are not equal?
        if not _agree(a, piece, b, other):
            return None
        if any(run.manifest.plan.statistics_off is not None for run in (a, b)):
            return None  # one-sided: they agree
    if record_a.checksum is not None and record_b.checksum is not None:
        return None
    if _digests(a, record_a).cuts != _digests(b, record_b).cuts:
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
    """What norm and mean may be off by, relative to the rms. Other tools add up in the tensor's own
    dtype, and round the sum to it."""
    off = run.manifest.plan.statistics_off
    if off is None:
        return SUMMARY_PRECISION / 2
    lanes = 8 if record.dtype in ("float32", "float64") else 1
    in_sums = CASTS * norm_floor(record.numel, lanes=lanes)
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
    known = [
        (mine, theirs)
        for mine, theirs in ((first.min, second.min), (first.max, second.max))
        if mine is not None and theirs is not None
    ]
    extremes = [abs(mine - theirs) - digits * max(abs(mine), abs(theirs)) for mine, theirs in known]
    apart = max(0.0, *extremes) / math.sqrt(ref.record.numel) / size if extremes else 0.0
    sums = [(first.rms, second.rms), (first.mean, second.mean)]
    means = [abs(mine - theirs) for mine, theirs in sums if mine is not None and theirs is not None]
    precision = summary_precision(a, ref.record) + summary_precision(b, cand.record)
    told = [record.apart for record in (ref.record, cand.record) if record.apart is not None]
    if len(told) == 2 and told[0].compared == told[1].compared:
        apart = max(apart, told[0].least)
    return max(apart, max(means, default=0.0) / size - precision)


def _agree(a: Run, ref: Piece, b: Run, cand: Piece) -> bool:
    """Does nothing that was kept of the two show that they differ?"""
    record_a, record_b = ref.record, cand.record
    if (record_a.dtype, record_a.shape) != (record_b.dtype, record_b.shape):
        return False
    checksums = [(record.checksum or "").partition(":") for record in (record_a, record_b)]
    if checksums[0][0] == checksums[1][0] and checksums[0][2] != checksums[1][2]:
        return False
    if _teller(a, record_a, b, record_b) is not None:  # asked where that said no
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


# Measuring the pairs: reads both tensors ahead and checks them, calls numerics.
#
# Equal checksums are equal tensors: their bytes are checked against them, not measured. A pair of
# tensors that occurs at several sites (one block's output is the next one's input) is measured
# once. Pads are masked by the samples' token counts, and rows are turned back into token positions.
# Small tensors of one shape are measured many at a time.

_REMEMBERED = 256  # recent pairs: an output returns as the next input soon, or not at all

_Key = tuple[object, ...]
BaseOf = Callable[[Pair], tuple[Run, Record] | None]


class Reading:
    """The bytes of two runs' pairs, and of the truth. ``base_of``: what a pair needs besides."""

    def __init__(
        self, reference: Run, candidate: Run, truth: Truth | None, base_of: BaseOf
    ) -> None:
        self._reference, self._candidate = reference, candidate
        self._truth, self._base_of = truth, base_of

    def read_ahead(self, pair: Pair) -> None:
        """Bring a pair's bytes into memory and check them; ``check`` says what is wrong."""
        with contextlib.suppress(RunFormatError):
            self.check(pair)

    def prefetch(self, pairs: Sequence[Pair]) -> None:
        """Say to runs that are far away what will be read of them, in which order."""
        if not any(run.far for run in (self._reference, self._candidate)):
            return
        wanted: dict[int, tuple[Run, list[Record]]] = {}
        for pair in pairs:
            in_truth = self._right(pair)
            if equal_by_record(pair) and in_truth is None:
                continue
            reference, candidate = pair.reference.record, pair.candidate.record
            parts = [(self._reference, reference), (self._candidate, candidate)]
            if in_truth is not None:
                parts.append(in_truth)
            base = self._base_of(pair)
            parts += [] if base is None else [base]
            for run, record in parts:
                wanted.setdefault(id(run), (run, []))[1].append(record)
        for run, records in wanted.values():
            run.expect(records)

    def check(self, pair: Pair) -> None:
        """Both sides' bytes are what their records say; each tensor is looked at once. Of a run
        that is far away, what is equal by its record is not fetched to be looked at."""
        sides = (self._reference, pair.reference.record), (self._candidate, pair.candidate.record)
        for run, record in sides:
            if run.far and equal_by_record(pair):
                continue
            run.check(record)

    def has_both(self, pair: Pair) -> bool:
        """Are the bytes of both sides at hand?"""
        return self._reference.has_bytes(pair.reference.record) and self._candidate.has_bytes(
            pair.candidate.record
        )

    def release(self, pairs: Sequence[Pair]) -> None:
        """What was read of the pairs may leave memory."""
        self._reference.release(sum(pair.reference.record.num_bytes for pair in pairs))
        self._candidate.release(sum(pair.candidate.record.num_bytes for pair in pairs))
        if self._truth is not None:
            self._truth.run.release(sum(8 * pair.reference.record.numel for pair in pairs))

    def _right(self, pair: Pair) -> tuple[Run, Record] | None:
        """What the truth has of a pair."""
        record = None if self._truth is None else self._truth.record(pair)
        return None if self._truth is None or record is None else (self._truth.run, record)


def equal_by_record(pair: Pair) -> bool:
    """Are the two equal bit for bit, by what was recorded of them?"""
    ref, cand = pair.reference.record, pair.candidate.record
    return (
        ref.xxh3 == cand.xxh3 is not None
        and ref.dtype == cand.dtype
        and ref.shape == cand.shape
        and ref.positions == cand.positions
        and pair.reference.row is None
        and pair.candidate.row is None
    )


class Measurer:
    """Measures pairs of two runs; keeps what repeats."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        floor: ModelFloor,
        *,
        inputs: Run | None = None,
        truth: Truth | None = None,
        own_floor: Run | None = None,
        work: Format | None = None,
    ) -> None:
        """``inputs``: the run whose inputs anchored the pairs. ``own_floor``: the side that carries
        one, where there is no truth. ``work``: what both sides computed in, where that is not
        their models' dtype."""
        self._reference, self._candidate = reference, candidate
        self._pieces = Pieces(reference, candidate, inputs)
        self._truth = truth
        self.reading = Reading(reference, candidate, truth, self._base_of)
        self.kernel: Kernel = "numpy"
        self.device: torch.device | None = None  # measure there, not by the kernel
        self._routing = Routing(reference, candidate)
        runs = [reference, candidate, *([] if truth is None else [truth.run])]
        stepped = any(run.manifest.training.optimizer is not None for run in runs)
        self.judge = Judge(
            reference,
            candidate,
            self._pieces,
            self._routing,
            floor,
            work or work_format(reference.manifest, candidate.manifest),
            SharedRounding(runs) if stepped else _nothing_shared,
            None if own_floor is None else floor_of(own_floor),
        )
        self._notes = reference.manifest.plan.modules
        self._logits_site = reference.manifest.plan.logits_site
        self._cache: dict[_Key, PairNumbers] = {}
        self._lock = threading.Lock()

    def measure(self, pair: Pair, *, threads: int = 1) -> PairNumbers | None:
        """Read and measure; None where the bytes are equal. Safe to call from several threads.

        ``threads``: to measure this pair with. Raises RunFormatError on bad bytes.
        """
        if not self.reading.has_both(pair):
            return self._reduced(pair)
        true_record = None if self._truth is None else self._truth.record(pair)
        is_block = self._is_block(pair)
        if equal_by_record(pair):
            self.reading.check(pair)  # true only if the bytes agree with what was recorded
            numbers = PairNumbers(None, None, None, pair.reference.record.shape)
            if true_record is None:
                return None
        else:
            numbers = self._numbers(pair, is_block, threads)
        if true_record is None or format_named(true_record.dtype).kind != "float":
            return numbers
        return msgspec.structs.replace(numbers, against=self._against(pair, true_record, is_block))

    def measure_small(self, pairs: Sequence[Pair]) -> list[PairNumbers | None]:
        """``measure`` of each, many at a time where their tensors are small and alike."""
        measured: list[PairNumbers | None] = [None] * len(pairs)
        alike: dict[_Key, list[tuple[int, _Operands]]] = {}
        for number, pair in enumerate(pairs):
            operands = self._operands(pair)
            if operands is None:
                measured[number] = self.measure(pair)
            elif operands.truth is None and operands.equal:
                self.reading.check(pair)
            else:
                alike.setdefault(operands.kind, []).append((number, operands))
        for group in alike.values():
            at_once = max(1, NUMEL_AT_ONCE // max(1, group[0][1].reference.numel))
            for first in range(0, len(group), at_once):
                part = group[first : first + at_once]
                results = self._measure_alike([(pairs[number], each) for number, each in part])
                for (number, _), result in zip(part, results, strict=True):
                    measured[number] = result or self.measure(pairs[number])
        return measured

    def _operands(self, pair: Pair) -> _Operands | None:
        """What a pair is measured with; None for one that is not measured beside others."""
        ref, cand = pair.reference.record, pair.candidate.record
        if (
            ref.numel > MOST_NUMEL
            or ref.shape != cand.shape
            or ref.positions != cand.positions
            or pair.reference.row is not None
            or pair.candidate.row is not None
            or self.device is not None
            or ref.site == self._logits_site
            or not self.reading.has_both(pair)
            or self._pieces.row_mask(pair.reference, ref.shape) is not None
        ):
            return None
        truth = None if self._truth is None else self._truth.record(pair)
        if truth is not None:
            assert self._truth is not None
            float_ = all(format_named(r.dtype).kind == "float" for r in (truth, ref))
            routed = self._routing.of(pair, math.prod(ref.shape[:-1]), (self._truth.run, truth))
            if not float_ or truth.shape != ref.shape or (routed and routed.kept is not None):
                return None
        base = self._pieces.base_source(pair) if self._is_block(pair) else None
        return _Operands(ref, cand, base, truth, equal_by_record(pair))

    def _measure_alike(self, pairs: Sequence[tuple[Pair, _Operands]]) -> list[PairNumbers | None]:
        """Pairs of one kind; None for one that must be measured by itself, also where its bytes
        are bad: measuring it says what is wrong."""
        first = pairs[0][1]
        base, truth = None, None
        try:
            a = self._reference.arrays([operands.reference for _, operands in pairs])
            if first.equal:
                b = a
                for pair, _ in pairs:
                    self.reading.check(pair)
            else:
                b = self._candidate.arrays([operands.candidate for _, operands in pairs])
            if first.base is not None:
                bases = [operands.base[1] for _, operands in pairs if operands.base is not None]
                base = first.base[0].arrays(bases)
            if first.truth is not None and self._truth is not None:
                records = [operands.truth for _, operands in pairs if operands.truth is not None]
                truth = self._truth.run.arrays(records)
        except RunFormatError:
            return [None] * len(pairs)
        against: Sequence[AgainstTruth | None] = [None] * len(pairs)
        if truth is not None:
            against = against_many(a, b, truth, base)
        shape = first.reference.shape
        if first.equal:
            return [
                None if errors is None else PairNumbers(None, None, None, shape, against=errors)
                for errors in against
            ]
        return [
            None
            if measured is None or (truth is not None and beside is None)
            else PairNumbers(measured[0], None, measured[1], shape, against=beside)
            for measured, beside in zip(measure_many(a, b, base=base), against, strict=True)
        ]

    def _reduced(self, pair: Pair) -> PairNumbers | None:
        """What can be known without the bytes of both sides; None where they are equal."""
        ref, cand = pair.reference, pair.candidate
        positions = ref.record.positions, cand.record.positions
        whole = ref.row is None and cand.row is None and positions[0] == positions[1]
        if whole and equal_contents(self._reference, ref.record, self._candidate, cand.record):
            self.reading.check(pair)
            return None
        shape = ref.shape  # what both sides have in common of it
        if positions[0] is None and positions[1] is not None and len(shape) >= 2:
            shape = (shape[0], len(positions[1]), *shape[2:])
        mine = _sketch_of(self._reference, ref, cand)
        theirs = _sketch_of(self._candidate, cand, ref)
        if mine is None or theirs is None:
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
            metrics = _with_counts(metrics, Piece(ref.record, 0), Piece(cand.record, 0))
            rows = RowMetrics(rel_l2=nothing, diff=nothing, norm=nothing, update_norm=None)
            estimate, least = None, _least(self._reference, ref, self._candidate, cand)
            unseen = _agree(self._reference, ref, self._candidate, cand)
        else:
            base = self._pieces.base_record(pair) if self._is_block(pair) else None
            metrics, rows, estimate = _estimated(
                self._pieces, pair, [mine, theirs], (mine.read(), theirs.read()), base, shape
            )
            least, unseen = None, False
        self.reading.check(pair)
        return PairNumbers(
            metrics, None, rows, shape, estimate=estimate, least=least, statistics_agree=unseen
        )

    def _base_of(self, pair: Pair) -> tuple[Run, Record] | None:
        """What a block's output needs beside the pair: its input."""
        return self._pieces.base_source(pair) if self._is_block(pair) else None

    def _is_block(self, pair: Pair) -> bool:
        """Is it a block's output?"""
        site = pair.reference.record.site
        note = self._notes.get(module_of(site))
        return note is not None and note.role == "block" and site.endswith(":out")

    def _against(self, pair: Pair, true_record: Record, is_block: bool) -> AgainstTruth | None:
        """Both sides against the truth, where all three can be laid side by side. Only a block adds
        to what it gets: of a dropout that hands its input on, nothing would be left."""
        assert self._truth is not None
        pieces, run = self._pieces, self._truth.run
        a = pieces.array(self._reference, pair.reference)
        b = pieces.array(self._candidate, pair.candidate)
        if is_repeated(pair.reference, pair.candidate):
            a, b = repeated(a, b)
        if not (is_float(format_of(a.dtype)) and a.shape == b.shape and a.size):
            return None
        truth = pieces.array(run, piece_like(true_record, pair))
        truth = truth if truth.shape == a.shape else repeated(truth, a)[0]
        base = pieces.base(pair) if is_block and true_record.site.endswith(":out") else None
        if base is not None and base.shape != a.shape:
            base = None
        mask = pieces.row_mask(pair.reference, tuple(a.shape))
        routed = self._routing.of(pair, math.prod(a.shape[:-1]), (run, true_record))
        if routed is not None and routed.kept is not None:
            mask = routed.kept if mask is None else mask & routed.kept
        return measure_against(
            a, b, truth, row_mask=mask, base=base, kernel=self.kernel, device=self.device
        )

    def _numbers(self, pair: Pair, is_block: bool, threads: int) -> PairNumbers:
        ref, cand = pair.reference.record, pair.candidate.record
        base = self._pieces.base(pair) if is_block and ref.site.endswith(":out") else None
        logits = ref.site == self._logits_site
        whole = pair.reference.row is None and pair.candidate.row is None
        # what has no digest (a tensor in parts) cannot be told from another like it
        whole = whole and None not in (ref.xxh3, cand.xxh3)
        key = (
            ref.xxh3,
            ref.dtype,
            cand.xxh3,
            cand.dtype,
            ref.shape,
            cand.shape,
            logits,
            ref.positions,
            cand.positions,
            base is not None,
            ref.step == 0,
        )
        known = self._cache.get(key) if whole else None
        if known is not None:
            self.reading.check(pair)  # the same contents may lie at several places
            return known
        a, b = (
            self._pieces.array(self._reference, pair.reference),
            self._pieces.array(self._candidate, pair.candidate),
        )
        if base is not None and ref.positions is None and cand.positions is not None:
            base = same_positions(base, ref, b, cand)[0]
        a, b = same_positions(a, ref, b, cand)
        if base is not None and base.shape != a.shape:
            base = repeated(base, a)[0]
        mask = self._pieces.row_mask(pair.reference, tuple(a.shape))
        metrics, rows = measure_pair(
            a, b, row_mask=mask, base=base, threads=threads, kernel=self.kernel, device=self.device
        )
        distance = None
        if logits and a.ndim >= 1 and a.size:
            values = measure_logits(a, b, row_mask=mask)
            if values.num_rows:  # else no row was finite enough to measure
                distance = LogitsDiff(
                    **{name: getattr(values, name) for name in LogitsDiff.__struct_fields__}
                )
        numbers = PairNumbers(metrics, distance, rows, tuple(a.shape))
        if whole:
            with self._lock:
                self._cache[key] = numbers
                if len(self._cache) > _REMEMBERED:
                    self._cache.pop(next(iter(self._cache)))
        return numbers


@dataclass(frozen=True, slots=True)
class _Operands:
    """The records that a small pair is measured with."""

    reference: Record
    candidate: Record
    base: tuple[Run, Record] | None
    truth: Record | None
    equal: bool

    @property
    def kind(self) -> _Key:
        """Equal for those that can be measured together."""
        return (
            self.equal,
            self.reference.shape,
            self.reference.dtype,
            self.candidate.dtype,
            None if self.base is None else (id(self.base[0]), self.base[1].dtype),
            None if self.truth is None else self.truth.dtype,
        )


# Measuring many pairs: read ahead, measured side by side, handed on and judged in order.
#
# Two halves, so that the first may run anywhere: ``measure_pairs`` looks at pairs and gives what
# was found of each (``PairNumbers`` can be pickled and sent), whatever process does it;
# ``results_of_pairs`` needs them all in the alignment's order, since in a free pass a module
# inherits what was judged before it.
#
# Two steps, one ahead of the other. One thread takes the pairs' checksums (at some 20 GB/s), which
# maps the bytes and brings them into the last cache; the others measure. What was measured is given
# back, and what is under way is bounded in bytes, so memory stays flat on dumps larger than it.
# Reading into buffers, past the cache, or into the system's cache hundreds of MB ahead, was no
# faster.

P = ParamSpec("P")
R = TypeVar("R")
_AHEAD_BYTES = 40 << 20
"""Pairs are started until so much is under way for each thread; one at least, however large."""
_ALONE_BYTES = 1 << 20
"""What is smaller comes with its neighbours, when one of them is read."""
_MOST_PAIRS = 512
"""In a batch of small ones."""
_JUDGED_AT_ONCE = 4096
"""Pairs whose numbers wait to be judged together."""
_HELD_BYTES = 32 << 20
"""Of columns, which pairs against a truth hold until they are judged."""
_READERS = 1
"""A disk serves two better than one; on two cores more get into one another's way."""
_LARGE_BYTES = 64 << 20
"""From here on the threads share a pair: few as large are under way side by side."""
_MEASURE: ContextVar[Callable[..., Generator[PairNumbers | None]] | None] = ContextVar(
    "measure", default=None
)
_DEVICE: ContextVar[torch.device | None] = ContextVar("device", default=None)


def measure_all(
    measurer: Measurer, pairs: Sequence[Pair], progress: Progress | None = None
) -> list[SiteResult]:
    """Measure and judge ``pairs``, in order; what was found of one is dropped once judged."""
    # decided over all pairs, so that every process that takes a part measures in the same way
    differing = (pair for pair in pairs if pair.reference.record.xxh3 != pair.candidate.record.xxh3)
    measurer.kernel = kernel_for(sum(map(_num_bytes, differing)))
    measurer.device = _DEVICE.get()
    measure = _MEASURE.get() or measure_pairs
    with contextlib.closing(measure(measurer, pairs, progress)) as measured:
        return results_of_pairs(measurer, pairs, measured)


@contextlib.contextmanager
def measured_on(device: str) -> Iterator[None]:
    """Within it, ``measure_all`` adds up on ``device``; UsageError where that cannot be."""
    there = None
    if device != "cpu":
        from divergence.numerics.on_device import open_device

        there = open_device(device)
    token = _DEVICE.set(there)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def measured_where_asked(compare: Callable[P, R]) -> Callable[P, R]:
    """``compare`` within ``measured_on`` the ``device`` that it is called with; the CPU, which is
    where nothing else is said, leaves an accelerator of the caller's as it is."""

    @functools.wraps(compare)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = str(kwargs.get("device", "cpu"))
        with contextlib.nullcontext() if device == "cpu" else measured_on(device):
            return compare(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def measured_by(measure: Callable[..., Generator[PairNumbers | None]]) -> Iterator[None]:
    """Within it, ``measure_all`` has ``measure`` do what ``measure_pairs`` does."""
    token = _MEASURE.set(measure)
    try:
        yield
    finally:
        _MEASURE.reset(token)


def results_of_pairs(
    measurer: Measurer, pairs: Sequence[Pair], measured: Iterable[PairNumbers | None]
) -> list[SiteResult]:
    """The results, from what ``measure_pairs`` gave for the same pairs in the same order."""
    results: list[SiteResult] = []
    waiting: list[tuple[Pair, PairNumbers | None]] = []
    held_bytes = 0
    for pair, numbers in zip(pairs, measured, strict=True):
        waiting.append((pair, numbers))
        if numbers is not None and numbers.against is not None:
            held_bytes += numbers.against.channels.nbytes
        if len(waiting) == _JUDGED_AT_ONCE or held_bytes >= _HELD_BYTES:
            results += measurer.judge.results(*zip(*waiting, strict=True))
            waiting.clear()
            held_bytes = 0
    if waiting:
        results += measurer.judge.results(*zip(*waiting, strict=True))
    return results


def measure_pairs(
    measurer: Measurer, pairs: Sequence[Pair], progress: Progress | None = None
) -> Generator[PairNumbers | None]:
    """What ``Measurer.measure`` gives of each pair, in order; None where the bytes are equal.

    ``pairs`` may be any part of an alignment. Lazy: nothing is read before the first is asked
    for, and a few pairs beyond the one asked for are under way. Raises RunFormatError on bad bytes.
    """
    measurer.reading.prefetch(pairs)
    batches = list(_batches(pairs))
    measuring = num_threads()
    reader = ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="divergence-read")
    pool = ThreadPoolExecutor(
        max_workers=measuring,
        thread_name_prefix="divergence-measure",
        initializer=set_device,
        initargs=(measurer.device,),
    )

    def measure(batch: _Batch, read: Future[None] | None) -> list[PairNumbers | None]:
        if read is not None:
            read.result()
        try:
            if not batch.is_large:
                return measurer.measure_small(batch.pairs)
            # whole pairs side by side; the threads of one that is large share it
            threads = measuring if batch.num_bytes >= _LARGE_BYTES else 1
            return [measurer.measure(pair, threads=threads) for pair in batch.pairs]
        finally:
            measurer.reading.release(batch.pairs)

    ahead: deque[Future[list[PairNumbers | None]]] = deque()
    started = under_way_bytes = 0
    number = 0
    try:
        for batch in batches:
            while started < len(batches) and (
                not ahead
                or (len(ahead) < 2 * measuring + 2 and under_way_bytes < measuring * _AHEAD_BYTES)
            ):
                coming = batches[started]
                read = None
                if coming.is_large:
                    read = reader.submit(measurer.reading.read_ahead, coming.pairs[0])
                ahead.append(pool.submit(measure, coming, read))
                under_way_bytes += coming.num_bytes
                started += 1
            (progress or silent)(
                "compare", number, len(pairs), batch.pairs[0].reference.record.site
            )
            yield from ahead.popleft().result()
            under_way_bytes -= batch.num_bytes
            number += len(batch.pairs)
    finally:
        for executor in (reader, pool):
            executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pairs that one thread looks at in one go: one that is large, or small neighbours."""

    pairs: list[Pair]
    num_bytes: int

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= _ALONE_BYTES


def _batches(pairs: Sequence[Pair]) -> Iterator[_Batch]:
    """Handing a pair from thread to thread takes as long as looking at a small one."""
    batch: list[Pair] = []
    total = 0
    for pair in pairs:
        num_bytes = _num_bytes(pair)
        if batch and (total + num_bytes >= _ALONE_BYTES or len(batch) == _MOST_PAIRS):
            yield _Batch(batch, total)
            batch, total = [], 0
        batch.append(pair)
        total += num_bytes
    if batch:
        yield _Batch(batch, total)


def _num_bytes(pair: Pair) -> int:
    """Of both sides."""
    records = pair.reference.record, pair.candidate.record
    return sum(record.numel * format_named(record.dtype).itemsize for record in records)


# Measuring escalated passes: both sides' float32 passes with each other, and against the truth.

ESCALATED = "escalated"


def compare_escalated(
    a: Run,
    b: Run,
    truth: Truth | None,
    thresholds: Thresholds,
    measure: Callable[..., list[SiteResult]],
    progress: Progress | None,
    *,
    routes: Routes | None = None,
) -> tuple[list[SiteResult], SamplesBySite]:
    """One result for each escalated record that has a partner, and the samples of their rows.

    Passes of equal inputs are compared with each other, and held against a truth of these inputs.
    Where they are not, or one side has none, each is held against the truth by itself (``of``).
    ``routes`` takes what was seen of experts.
    """
    inputs, samples = inputs_of(a, b), SamplesBySite()
    both: tuple[tuple[Side, Run], ...] = ("reference", a), ("candidate", b)
    having = [(side, run) for side, run in both if ESCALATED in run.manifest.plan.passes]
    # other weights were rounded otherwise: that is far beyond float32's floor
    judging = [
        (side, run)
        for side, run in having
        if truth is not None
        and truth.anchors
        and run.manifest.escalated_to == truth.run.manifest.plan.anchored_to
        and run.manifest.model.dtype == truth.run.manifest.model.dtype
    ]
    results: list[SiteResult] = []

    def measured(reference: Run, pass_: str, run: Run, of: Side | None, by: Truth | None) -> None:
        pairs = []
        split = reference.manifest.tokens.groups != run.manifest.tokens.groups
        theirs = pieces_in(reference, pass_, split=split)
        for key, piece in pieces_in(run, ESCALATED, split=split).items():
            other = theirs.get(key)
            if is_operator_site(piece.record.site) and BACKWARD in piece.record.site:
                continue  # sums of gradients are made in another order where casts are: see calls
            if format_named(piece.record.dtype).kind != "float":
                continue
            if other is None or why_no_pair(other, piece, exactly=True) is not None:
                continue
            pairs.append(Pair(reference=other, candidate=piece, pass_=ESCALATED, match="exact"))
        pairs.sort(
            key=lambda pair: (
                pair.reference.record.sample,
                pair.reference.record.step,
                pair.reference.record.order,
            )
        )
        measurer = Measurer(
            reference,
            run,
            ModelFloor(thresholds),
            inputs=inputs,
            truth=by,
            work=format_named("float32"),
        )
        for result in measure(measurer, pairs, progress):
            results.append(msgspec.structs.replace(result, of=of))
        if routes is not None:
            routes.take(measurer.judge.routes, of)
        samples.take(measurer.judge.samples)

    if (
        len(having) == 2
        and a.manifest.model.dtype == b.manifest.model.dtype
        and a.manifest.escalated_to == b.manifest.escalated_to
    ):
        measured(a, ESCALATED, b, None, truth if len(judging) == 2 else None)
    elif truth is not None:
        for side, run in judging:
            measured(truth.run, "anchored", run, side, None)
    return results, samples


# Measuring: two runs, aligned, with the numbers of every pair of tensors.


def opened(run: str | Path | Run) -> Run:
    """The run, its ranks' tensors put together."""
    run = run if isinstance(run, Run) else Run.open(run)
    if run.manifest.mesh is None:
        return run
    from divergence.run.ranks import unsharded

    return unsharded(run)


def opened_truth(run: str | Path | Run) -> Run:
    """The truth that ``run`` is, or else the one that it carries, its ranks' tensors put together.
    What it is no truth for is told by who judges by it."""
    run = opened(run)
    return run if run.manifest.settings.compute_dtype is not None else own_truth(run) or run


def aligned(a: Run, b: Run, names: NameMap | None) -> Alignment:
    """The pairs of which something can be known; the others are skipped, with the reason."""
    alignment = align(a, b, name_map=names)
    if all(
        a.has_bytes(pair.reference.record) and b.has_bytes(pair.candidate.record)
        for pair in alignment.pairs
    ):
        return alignment
    return without_unknowable(alignment, a, b)


def measure(
    a: Run,
    b: Run,
    lines: list[PreflightLine],
    *,
    names: NameMap | None = None,
    truth: str | Path | Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    progress: Progress | None = None,
) -> Measured:
    """Everything that two runs have in common: tensors, escalated passes, operators, tokens.

    ``lines``: preflight. ``truth``: by default the one that the run carries whose inputs anchored
    the comparison, or else, of free runs, the first that one of the two carries. Raises
    IncomparableError where nothing is, UsageError for a truth of other runs.
    """
    inputs, floor = inputs_of(a, b), None
    if truth is None and replayed_from(a.manifest, b.manifest) is None:
        # of whose inputs both sides got, its own truth did too
        free = [run for run in (a, b) if "truth_free" in run.manifest.plan.passes]
        for run in [inputs, *free]:
            if truth is None and run is not None and run.manifest.plan.truth is not None:
                truth = own_truth(run)
    if truth is None:  # the side that carries a floor for this comparison: the other repeats it
        side = inputs or (b if a.manifest.like == b.manifest.id else a)
        floor = side if "floor" in side.manifest.plan.passes else None
    against = None if truth is None else Truth(opened_truth(truth), a, b)
    alignment = aligned(a, b, names)
    rename = names or renaming(a, b, None)[0]
    measured = measure_tensors(
        a, b, alignment, truth=against, floor=floor, thresholds=thresholds, progress=progress
    )
    escalated: list[SiteResult] = []
    if any("escalated" in run.manifest.plan.passes for run in (a, b)):
        escalated, samples = compare_escalated(
            a, b, against, thresholds, measure_all, progress, routes=measured.routes
        )
        measured.samples.take(samples)
    sites = [*measured.sites, *escalated]
    measured = replace(measured, sites=sites, preflight=lines, rename=rename)
    measured = replace(measured, operators=numbers_of("operators", measured))
    if not alignment.pairs and measured.operators is None:
        raise IncomparableError(
            "nothing was compared: the two runs have no tensor in common "
            f"({len(a.records)} and {len(b.records)} records)",
            where=f"{a.path} and {b.path}",
            hint=sentence(why_nothing(alignment)),
        )
    if escalated:  # the records that these are of were compared after all
        used = {(r.sample, r.step, r.site) for r in escalated if r.of != "reference"}
        left = [
            item
            for item in alignment.only_candidate
            if item.pass_ != ESCALATED or (item.sample, item.step, item.site) not in used
        ]
        alignment = replace(alignment, only_candidate=left)
    alignment, covered = account(
        alignment, a, b, rename=rename, escalated=escalated, operators=measured.operators
    )
    tokens = numbers_of("tokens", measured)
    unmatched = [*alignment.only_reference, *alignment.only_candidate, *alignment.skipped]
    notes = run_notes(a, b, alignment)
    if sites and all(site.step > 0 for site in sites):
        notes.append(fact("measure.no_prefill"))
    if measured.experts:
        notes += routing_notes(sites, measured.routes)
    anchors = against is not None and against.anchors
    if against is not None and not against.run.manifest.complete:
        why = against.run.manifest.stopped_by or None
        notes.append(fact("measure.truth_incomplete", why=why))
    elif against is not None and not anchors:
        notes.append(fact("measure.truth_of_free_runs"))
    if against is not None and any(s.estimated or s.is_unmeasured for s in sites):
        notes.append(fact("measure.truth_judges_full"))
    return replace(
        measured,
        alignment=alignment,
        tokens=tokens,
        covered=[*covered, *tokens_row(tokens)],
        missing=len(unmatched) + (0 if tokens is None else tokens.num_missing),
        notes=notes,
        advice=advise(a, b, against.run if against is not None and anchors else None),
    )


def measure_tensors(
    a: Run,
    b: Run,
    alignment: Alignment,
    *,
    truth: Truth | None = None,
    floor: Run | None = None,
    inputs: Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    progress: Progress | None = None,
) -> Measured:
    """The numbers of the pairs of ``alignment`` alone. ``inputs``: the run whose inputs anchored
    the candidate; found where it is not given."""
    measurer = Measurer(
        a, b, ModelFloor(thresholds), inputs=inputs or inputs_of(a, b), truth=truth, own_floor=floor
    )
    sites = measure_all(measurer, alignment.pairs, progress)
    if of_machine(a.manifest) and of_machine(b.manifest):
        # their inputs cancel on purpose, and no model's floor fits
        nothing = dict.fromkeys(("floor", "ratio", "ratio_max", "ratio_sink"))
        sites = [msgspec.structs.replace(site, **nothing, prompts=[]) for site in sites]
    forms = [format_named(run.manifest.model.dtype) for run in (a, b)]
    routed: frozenset[str] = frozenset()
    experts = any(note.routed for note in a.manifest.plan.modules.values())
    if experts:
        routed = unknown_blocks(a.manifest, sites)
    return Measured(
        reference=a,
        candidate=b,
        truth=truth,
        floor=floor,
        alignment=alignment,
        sites=sites,
        thresholds=thresholds,
        advice=advise(a, b),
        routes=measurer.judge.routes,
        samples=measurer.judge.samples,
        anchored=alignment.anchored and any(s.pass_ == "anchored" for s in sites),
        routed=routed,
        experts=experts,
        narrow=any(form.kind == "float" and form.itemsize <= 2 for form in forms),
    )


def run_notes(a: Run, b: Run, alignment: Alignment) -> list[Fact]:
    """What to know of the runs themselves: names, cut off records, settings that were not met."""
    notes = list(alignment.notes)
    if alignment.prefix is not None:
        reference, candidate = (name or None for name in alignment.prefix)
        notes.append(fact("measure.prefix_read", reference=reference, candidate=candidate))
    for side, run in (("reference", a), ("candidate", b)):
        if run.torn_tail:
            notes.append(fact("measure.torn_tail", side=side))
        both = a.manifest.overrides if run is b else b.manifest.overrides
        for override in run.manifest.overrides:
            if override in both or override.name in ("sites", "model"):
                continue  # shared, or no influence on the numbers
            values = {"name": override.name, "used": override.used}
            notes.append(
                fact("measure.told_to_use", side=side, reference=override.reference, **values)
            )
        changed = run.manifest.plan.only_changed
        if changed is not None and not all(run.has_bytes(record) for record in run.records):
            notes.append(fact("measure.only_changed", side=side, run=changed))
    return notes

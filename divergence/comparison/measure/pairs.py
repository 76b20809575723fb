"""Measuring pairs: both tensors read and checked, numerics called, many pairs side by side; and
what all pairs of two runs show."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from divergence.comparison.advice import advise
from divergence.comparison.align import (
    Alignment,
    NameMap,
    Pair,
    Pieces,
    align,
    is_repeated,
    piece_like,
    pieces_in,
    repeated,
    same_positions,
    why_no_pair,
)
from divergence.comparison.analysis import Measured, is_of_machine
from divergence.comparison.constants import FEW_ROWS, FEWER_CHANNELS_TIMES
from divergence.comparison.experts import Routes, Routing, unknown_blocks
from divergence.comparison.measure.rating import (
    PairNumbers,
    Rater,
    SharedRounding,
    has_gates,
    work_format,
)
from divergence.comparison.measure.truth import SamplesBySite, Truth, inputs_of
from divergence.comparison.result import LogitsDiff, SiteResult
from divergence.errors import RunFormatError
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.numerics.formats import Format, format_named, format_of, is_float
from divergence.numerics.pairs import (
    MOST_NUMEL,
    NUMEL_AT_ONCE,
    AgainstTruth,
    against_many,
    measure_against,
    measure_in_units,
    measure_many,
    measure_pair,
)
from divergence.numerics.sums import Kernel, kernel_for, num_threads, set_device
from divergence.run.reader import Run, floor_of
from divergence.run.record import Record
from divergence.run.site import BACKWARD, is_operator_site, module_of
from divergence.words import Progress, Side, silent

if TYPE_CHECKING:
    import torch


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
        """Let what was read of the pairs leave memory."""
        self._reference.release(sum(pair.reference.record.num_bytes for pair in pairs))
        self._candidate.release(sum(pair.candidate.record.num_bytes for pair in pairs))
        if self._truth is not None:
            self._truth.run.release(sum(8 * pair.reference.record.numel for pair in pairs))

    def _right(self, pair: Pair) -> tuple[Run, Record] | None:
        """Return what the truth has of a pair."""
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
        thresholds: Thresholds = THRESHOLDS,
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
        work = work or work_format(reference.manifest, candidate.manifest)
        self.rater = Rater(
            reference,
            candidate,
            self._pieces,
            self._routing,
            thresholds,
            work,
            SharedRounding(runs, work),
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
            from divergence.comparison.measure.reduced import measure_reduced

            self.reading.check(pair)
            return measure_reduced(self._pieces, pair, is_block=self._is_block(pair))
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
        """Measures pairs, many at a time where their tensors are small and alike."""
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
        """Return what a pair is measured with; None for one that is not measured beside others."""
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
            if base is not None:
                against = [
                    None if errors is None else _with_units(errors, a[n], b[n], truth[n])
                    for n, errors in enumerate(against)
                ]
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

    def _base_of(self, pair: Pair) -> tuple[Run, Record] | None:
        """Return what a block's output needs beside the pair: its input."""
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
        against = measure_against(
            a, b, truth, row_mask=mask, base=base, kernel=self.kernel, device=self.device
        )
        return against if base is None else _with_units(against, a, b, truth)

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
        cached = self._cache.get(key) if whole else None
        if cached is not None:
            self.reading.check(pair)  # the same contents may lie at several places
            return cached
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
            from divergence.numerics.logits import measure_logits

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


def _with_units(
    against: AgainstTruth, a: np.ndarray, b: np.ndarray, truth: np.ndarray
) -> AgainstTruth:
    """The same, and in each channel's own unit where it hangs on few."""
    if not hangs_on_few(against):
        return against
    in_units = measure_in_units(against, a, b, truth)
    return msgspec.structs.replace(against, in_units=in_units)


def hangs_on_few(against: AgainstTruth) -> bool:
    """Do few channels hold the energy? Beside massive ones, whose rounding is as large as what the
    others hold, a row's error says nothing of those. Of few rows a channel's unit is not known."""
    energy = against.channels[3]
    few = FEWER_CHANNELS_TIMES * energy.sum() ** 2 < len(energy) * np.square(energy).sum()
    return against.num_rows >= FEW_ROWS and bool(few)


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


# Measuring many pairs: read ahead, measured side by side, handed on and rated in order.
#
# Two halves, so that the first may run anywhere: ``measure_pairs`` looks at pairs and gives what
# was found of each (``PairNumbers`` can be pickled and sent), whatever process does it;
# ``results_of_pairs`` needs them all in the alignment's order, since in a free pass a module
# inherits what was rated before it.
#
# Two steps, one ahead of the other. One thread takes the pairs' checksums (at some 20 GB/s), which
# maps the bytes and brings them into the last cache; the others measure. What was measured is given
# back, and what is under way is bounded in bytes, so memory stays flat on dumps larger than it.
# Reading into buffers, past the cache, or into the system's cache hundreds of MB ahead, was no
# faster.

_AHEAD_BYTES = 40 << 20
"""Pairs are started until so much is under way for each thread; one at least, however large."""
_ALONE_BYTES = 1 << 20
"""What is smaller comes with its neighbours, when one of them is read."""
_MOST_PAIRS = 512
"""In a batch of small ones."""
_RATED_AT_ONCE = 4096
"""Pairs whose numbers wait to be rated together."""
_HELD_BYTES = 32 << 20
"""Of columns, which pairs against a truth hold until they are rated."""
_READERS = 1
"""A disk serves two better than one; on two cores more get into one another's way."""
_LARGE_BYTES = 64 << 20
"""From here on the threads share a pair: few as large are under way side by side."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """Says how pairs are measured: on which device, by which processes, and who is told how far."""

    device: torch.device | None = None
    """Where pairs are added up; None is the CPU, by its own loops."""
    measure: Callable[..., Generator[PairNumbers | None]] | None = None
    """What does the work of ``measure_pairs``, where that is not done here."""
    progress: Progress | None = None


HERE = Measuring()
"""In this process, on the CPU."""


def measuring_on(device: str | Measuring, progress: Progress | None = None) -> Measuring:
    """Return how pairs are measured on ``device``. Raises UsageError where that cannot be."""
    if isinstance(device, Measuring):
        return replace(device, progress=progress)
    if device == "cpu":
        return Measuring(progress=progress)
    from divergence.numerics.on_device import open_device

    return Measuring(device=open_device(device), progress=progress)


def measure_all(
    measurer: Measurer, pairs: Sequence[Pair], measuring: Measuring = HERE
) -> list[SiteResult]:
    """Measures and rates ``pairs``, in order; what was found of one is dropped once rated."""
    # decided over all pairs, so that every process that takes a part measures in the same way
    differing = (pair for pair in pairs if pair.reference.record.xxh3 != pair.candidate.record.xxh3)
    measurer.kernel = kernel_for(sum(map(_num_bytes, differing)))
    measurer.device = measuring.device
    measure = measuring.measure or measure_pairs
    with contextlib.closing(measure(measurer, pairs, measuring.progress)) as measured:
        return results_of_pairs(measurer, pairs, measured)


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
        if len(waiting) == _RATED_AT_ONCE or held_bytes >= _HELD_BYTES:
            results += measurer.rater.results(*zip(*waiting, strict=True))
            waiting.clear()
            held_bytes = 0
    if waiting:
        results += measurer.rater.results(*zip(*waiting, strict=True))
    return results


def measure_pairs(
    measurer: Measurer, pairs: Sequence[Pair], progress: Progress | None = None
) -> Generator[PairNumbers | None]:
    """Yield what ``Measurer.measure`` gives of each pair, in order; None where bytes are equal.

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
    """The bytes of both sides."""
    records = pair.reference.record, pair.candidate.record
    return sum(record.numel * format_named(record.dtype).itemsize for record in records)


# What the pairs of two runs show, taken together: of the aligned passes, and of the escalated ones.

ESCALATED = "escalated"


def aligned(a: Run, b: Run, names: NameMap | None) -> Alignment:
    """The pairs of which something can be known; the others are skipped, with the reason."""
    alignment = align(a, b, name_map=names)
    if all(
        a.has_bytes(pair.reference.record) and b.has_bytes(pair.candidate.record)
        for pair in alignment.pairs
    ):
        return alignment
    from divergence.comparison.measure.reduced import without_unknowable

    return without_unknowable(alignment, a, b)


def measure_tensors(
    a: Run,
    b: Run,
    alignment: Alignment,
    *,
    truth: Truth | None = None,
    floor: Run | None = None,
    inputs: Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    measuring: Measuring = HERE,
) -> Measured:
    """The numbers of the pairs of ``alignment`` alone. ``inputs``: the run whose inputs anchored
    the candidate; found where it is not given."""
    measurer = Measurer(
        a, b, thresholds, inputs=inputs or inputs_of(a, b), truth=truth, own_floor=floor
    )
    sites = measure_all(measurer, alignment.pairs, measuring)
    if is_of_machine(a.manifest) and is_of_machine(b.manifest):
        # their inputs cancel on purpose, and no model's floor fits
        nothing = dict.fromkeys(("floor", "ratio", "ratio_max", "ratio_sink"))
        sites = [msgspec.structs.replace(site, **nothing, prompts=[]) for site in sites]
    forms = [format_named(run.manifest.model.dtype) for run in (a, b)]
    routed: frozenset[str] = frozenset()
    experts = any(note.routed for note in a.manifest.plan.modules.values())
    if experts:
        routed = unknown_blocks(a.manifest, sites)
    if has_gates(a.manifest):
        routed |= {BACKWARD}
    return Measured(
        reference=a,
        candidate=b,
        truth=truth,
        floor=floor,
        alignment=alignment,
        sites=sites,
        thresholds=thresholds,
        advice=advise(a, b),
        routes=measurer.rater.routes,
        samples=measurer.rater.samples,
        anchored=alignment.anchored and any(s.pass_ == "anchored" for s in sites),
        routed=routed,
        experts=experts,
        narrow=any(form.kind == "float" and form.itemsize <= 2 for form in forms),
    )


def compare_escalated(
    a: Run,
    b: Run,
    truth: Truth | None,
    thresholds: Thresholds,
    measuring: Measuring,
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
        partners = pieces_in(reference, pass_, split=split)
        for key, piece in pieces_in(run, ESCALATED, split=split).items():
            other = partners.get(key)
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
            thresholds,
            inputs=inputs,
            truth=by,
            work=format_named("float32"),
        )
        for result in measure_all(measurer, pairs, measuring):
            results.append(msgspec.structs.replace(result, of=of))
        if routes is not None:
            routes.take(measurer.rater.routes, of)
        samples.take(measurer.rater.samples)

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

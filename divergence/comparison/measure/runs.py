"""Two runs measured: opened, aligned, and every pair read and measured once, in order."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from divergence.comparison.advice import advise
from divergence.comparison.align.coverage import account, tokens_row
from divergence.comparison.align.pairs import (
    Alignment,
    NameMap,
    align,
    renaming,
    replayed_from,
    why_nothing,
)
from divergence.comparison.align.pieces import Pair, pieces_in, why_no_pair
from divergence.comparison.analysis import Measured, is_probe, numbers_of
from divergence.comparison.experts import Routes, routing_notes, unknown_blocks
from divergence.comparison.measure.floors import ModelFloor
from divergence.comparison.measure.judge import PairNumbers
from divergence.comparison.measure.measurer import Measurer, without_unknowable
from divergence.comparison.measure.truth import SamplesBySite, Truth, inputs_of
from divergence.comparison.results import PreflightLine, SiteResult
from divergence.errors import IncomparableError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.numerics.formats import format_named
from divergence.numerics.kernels import kernel_for, set_device
from divergence.run.reader import Run, own_truth
from divergence.run.site import BACKWARD, is_operator_site
from divergence.words import Progress, Side, silent

if TYPE_CHECKING:
    import torch


# Measuring many pairs: read ahead, measured side by side, handed on and judged in order.
#
# Two halves, so that the first may run anywhere: ``measure_pairs`` looks at pairs and gives what
# was found of each (``PairNumbers`` can be pickled and sent), whatever process does it;
# ``results_of_pairs`` needs them all in the alignment's order, since in a free pass a module
# inherits what was judged before it.
#
# Three steps, each ahead of the next. One thread asks the system to fetch what comes, into its own
# cache: hundreds of MB ahead, since that is nobody's memory, and so the disk works while compiled
# loops load. Two threads take the pairs' checksums (at some 20 GB/s), which maps the bytes and
# brings them into the last cache; the others measure. What was measured is given back, and what is
# under way is bounded in bytes, so memory stays flat on dumps larger than it. Reading into buffers,
# or past the cache, was no faster, and costs a copy.

P = ParamSpec("P")
R = TypeVar("R")
_MOST_THREADS = 8
_AHEAD_BYTES = 40 << 20
"""Pairs are started until so much is under way for each thread; one at least, however large."""
_FETCHED_BYTES = 512 << 20
"""Pairs are fetched into the system's cache until so much lies ahead of those that are started."""
_FETCHED_ALONE_BYTES = 1 << 20
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
    from divergence.numerics.on_device import open_device

    token = _DEVICE.set(None if device == "cpu" else open_device(device))
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


def num_threads() -> int:
    """That look at tensors side by side."""
    import torch

    return max(1, min(_MOST_THREADS, torch.get_num_threads()))


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
    fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="divergence-fetch")
    reader = ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="divergence-read")
    pool = ThreadPoolExecutor(
        max_workers=measuring, thread_name_prefix="divergence-measure",
        initializer=set_device, initargs=(measurer.device,),
    )  # fmt: skip

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
    fetched = fetched_bytes = 0
    number = 0
    try:
        for batch in batches:
            while fetched < len(batches) and fetched_bytes < _FETCHED_BYTES:
                coming = batches[fetched]
                if coming.is_large:
                    fetcher.submit(measurer.reading.fetch, coming.pairs[0])
                fetched_bytes += coming.num_bytes
                fetched += 1
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
                fetched_bytes -= coming.num_bytes
                started += 1
            (progress or silent)(
                "compare", number, len(pairs), batch.pairs[0].reference.record.site
            )
            yield from ahead.popleft().result()
            under_way_bytes -= batch.num_bytes
            number += len(batch.pairs)
    finally:
        for executor in (fetcher, reader, pool):
            executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pairs that one thread looks at in one go: one that is large, or small neighbours."""

    pairs: list[Pair]
    num_bytes: int

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= _FETCHED_ALONE_BYTES


def _batches(pairs: Sequence[Pair]) -> Iterator[_Batch]:
    """Handing a pair from thread to thread takes as long as looking at a small one."""
    batch: list[Pair] = []
    total = 0
    for pair in pairs:
        num_bytes = _num_bytes(pair)
        if batch and (total + num_bytes >= _FETCHED_ALONE_BYTES or len(batch) == _MOST_PAIRS):
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
    """One result for each escalated record that has a partner, and how far both sides are from the
    truth.

    Passes of equal inputs are compared with each other, and held against a truth of these inputs.
    Where they are not, or one side has none, each is held against the truth by itself (``of``).
    ``routes`` takes what was seen of experts.
    """
    inputs, samples = inputs_of(a, b), SamplesBySite()
    both: tuple[tuple[Side, Run], ...] = ("reference", a), ("candidate", b)
    having = [(side, run) for side, run in both if ESCALATED in run.manifest.plan.passes]
    # other weights were rounded otherwise: that is far beyond float32's floor
    judging = [
        (side, run) for side, run in having
        if truth is not None and truth.anchors
        and run.manifest.escalated_to == truth.run.manifest.plan.anchored_to
        and run.manifest.model.dtype == truth.run.manifest.model.dtype
    ]  # fmt: skip
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
        pairs.sort(key=lambda pair: (pair.reference.record.sample, pair.reference.record.step,
                                     pair.reference.record.order))  # fmt: skip
        measurer = Measurer(
            reference, run, ModelFloor(thresholds), inputs=inputs, truth=by,
            work=format_named("float32"),
        )  # fmt: skip
        for result in measure(measurer, pairs, progress):
            results.append(msgspec.structs.replace(result, of=of))
        if routes is not None:
            routes.take(measurer.judge.routes, of)
        samples.take(measurer.judge.truth_samples)

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
        if measured.truth_samples is not None:
            measured.truth_samples.take(samples)
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
    if is_probe(a.manifest) and is_probe(b.manifest):
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
        truth_samples=measurer.judge.truth_samples if truth or floor else None,
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

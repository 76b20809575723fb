"""Measuring many pairs: read ahead, measured side by side, handed on and judged in order.

Two halves, so that the first may run anywhere: ``measure_pairs`` looks at pairs and gives what
was found of each (``PairNumbers`` can be pickled and sent), whatever process does it;
``results_of_pairs`` needs them all in the alignment's order, since in a free pass a module inherits
what was judged before it.

Three steps, each ahead of the next. One thread asks the system to fetch what comes, into its own
cache: hundreds of MB ahead, since that is nobody's memory, and so the disk works while compiled
loops load. Two threads take the pairs' checksums (at some 20 GB/s), which maps the bytes and brings
them into the last cache; the others measure. What was measured is given back, and what is under way
is bounded in bytes, so memory stays flat on dumps larger than it. Reading into buffers, or past the
cache, was no faster, and costs a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from divergence.comparison.align.pieces import Pair
from divergence.comparison.measure.measurer import Measurer, PairNumbers
from divergence.comparison.results import SiteResult
from divergence.numerics.formats import format_named
from divergence.numerics.kernels import kernel_for, set_device
from divergence.words import Progress, silent

if TYPE_CHECKING:
    import torch

__all__ = [
    "measure_all",
    "measure_pairs",
    "measured_by",
    "measured_on",
    "measured_where_asked",
    "num_threads",
    "results_of_pairs",
]

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
    ref, cand = pair.reference.record, pair.candidate.record
    return ref.numel * _itemsize(ref.dtype) + cand.numel * _itemsize(cand.dtype)


@functools.cache
def _itemsize(dtype: str) -> int:
    return format_named(dtype).itemsize

"""Measuring many pairs: read ahead, measured side by side, handed on and judged in order.

Two halves, so that the first may run anywhere: ``measure_pairs`` looks at pairs and gives what
was found of each (``Found`` can be pickled and sent), whatever process does it; ``judge_pairs``
needs them all in the alignment's order, since in a free pass a module inherits what was judged
before it.

Three steps, each ahead of the next. One thread asks the system to fetch what comes, into its own
cache: hundreds of MB ahead, since that is nobody's memory, and so the disk works while compiled
loops load. Two threads take the pairs' checksums (at some 20 GB/s), which maps the bytes and brings
them into the last cache; the others measure. What was measured is given back, and what is under way
is bounded in bytes, so memory stays flat on dumps larger than it. Reading into buffers, or past the
cache, was no faster, and costs a copy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING

from divergence.compare.align import Pair
from divergence.compare.measure import Found, Measurer
from divergence.compare.result import SiteResult
from divergence.numerics.formats import format_named
from divergence.numerics.kernels import kernel_for
from divergence.run.own_thread import set_device

if TYPE_CHECKING:
    import torch

__all__ = ["Progress", "judge_pairs", "measure_all", "measure_pairs", "measured_by", "measured_on"]

Progress = Callable[..., None]
_MOST_THREADS = 8
_AHEAD_BYTES = 40 << 20
"""Pairs are started until so much is under way for each thread; one at least, however large."""
_FETCHED_BYTES = 512 << 20
"""Pairs are fetched into the system's cache until so much lies ahead of those that are started."""
_FETCHED_ALONE_BYTES = 1 << 20
"""What is smaller comes with its neighbours, when one of them is read."""
_READERS = 1
"""A disk serves two better than one; on two cores more get into one another's way."""
_LARGE_BYTES = 64 << 20
"""From here on the threads share a pair: few as large are under way side by side."""
_MEASURE: ContextVar[Callable[..., Generator[Found | None]] | None] = ContextVar(
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
    with contextlib.closing(measure(measurer, pairs, progress)) as found:
        return judge_pairs(measurer, pairs, found)


@contextlib.contextmanager
def measured_on(device: str) -> Iterator[None]:
    """Within it, ``measure_all`` adds up on ``device``; UsageError where that cannot be."""
    from divergence.numerics.on_device import open_device

    token = _DEVICE.set(None if device == "cpu" else open_device(device))
    try:
        yield
    finally:
        _DEVICE.reset(token)


@contextlib.contextmanager
def measured_by(measure: Callable[..., Generator[Found | None]]) -> Iterator[None]:
    """Within it, ``measure_all`` has ``measure`` do what ``measure_pairs`` does."""
    token = _MEASURE.set(measure)
    try:
        yield
    finally:
        _MEASURE.reset(token)


def judge_pairs(
    measurer: Measurer, pairs: Sequence[Pair], found: Iterable[Found | None]
) -> list[SiteResult]:
    """The results, from what ``measure_pairs`` gave for the same pairs in the same order."""
    return [measurer.judge(pair, one) for pair, one in zip(pairs, found, strict=True)]


def measure_pairs(
    measurer: Measurer, pairs: Sequence[Pair], progress: Progress | None = None
) -> Generator[Found | None]:
    """What ``Measurer.look`` finds of each pair, in order; None where the bytes are equal.

    ``pairs`` may be any part of an alignment. Lazy: nothing is read before the first is asked
    for, and a few pairs beyond the one asked for are under way. Raises RunFormatError on bad bytes.
    """
    import torch

    measurer.reading.announce(pairs)
    measuring = max(1, min(_MOST_THREADS, torch.get_num_threads()))
    fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="divergence-fetch")
    reader = ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="divergence-read")
    pool = ThreadPoolExecutor(
        max_workers=measuring, thread_name_prefix="divergence-measure",
        initializer=set_device, initargs=(measurer.device,),
    )  # fmt: skip

    def look(pair: Pair, read: Future[None]) -> Found | None:
        read.result()
        # whole pairs side by side; the threads of one that is large share it
        threads = measuring if _num_bytes(pair) >= _LARGE_BYTES else 1
        try:
            return measurer.look(pair, threads=threads)
        finally:
            for run, record in measurer.reading.reads(pair):
                run.release(record)

    ahead: deque[tuple[Future[Found | None], int]] = deque()
    started = under_way_bytes = 0
    fetched = fetched_bytes = 0
    try:
        for number, pair in enumerate(pairs):
            while fetched < len(pairs) and fetched_bytes < _FETCHED_BYTES:
                num_bytes = _num_bytes(pairs[fetched])
                if num_bytes >= _FETCHED_ALONE_BYTES:
                    fetcher.submit(measurer.reading.fetch, pairs[fetched])
                fetched_bytes += num_bytes
                fetched += 1
            while started < len(pairs) and (
                not ahead
                or (len(ahead) < 2 * measuring + 2 and under_way_bytes < measuring * _AHEAD_BYTES)
            ):
                coming = pairs[started]
                read = reader.submit(measurer.reading.read_ahead, coming)
                num_bytes = _num_bytes(coming)
                ahead.append((pool.submit(look, coming, read), num_bytes))
                under_way_bytes += num_bytes
                fetched_bytes -= num_bytes
                started += 1
            if progress is not None:
                progress("compare", number, len(pairs), pair.reference.record.site)
            future, num_bytes = ahead.popleft()
            found = future.result()
            under_way_bytes -= num_bytes
            yield found
    finally:
        for one in (fetcher, reader, pool):
            one.shutdown(wait=True, cancel_futures=True)


def _num_bytes(pair: Pair) -> int:
    """Of both sides."""
    return sum(
        piece.record.numel * format_named(piece.record.dtype).itemsize
        for piece in (pair.reference, pair.candidate)
    )

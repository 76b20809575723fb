"""Measuring many pairs: read ahead, measured side by side, handed on and judged in order.

Two halves, so that the first may run anywhere: ``measure_pairs`` looks at pairs and gives what
was found of each (``Found`` can be pickled and sent), whatever process does it; ``judge_pairs``
needs them all in the alignment's order, since in a free pass a module inherits what was judged
before it.

Reading and measuring overlap; one measuring thread for two cores, up to four.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar

from divergence.compare.align import Pair
from divergence.compare.measure import Found, Measurer
from divergence.compare.result import SiteResult

__all__ = ["Progress", "judge_pairs", "measure_all", "measure_pairs", "measured_by"]

Progress = Callable[..., None]
_MEASURE: ContextVar[Callable[..., Generator[Found | None]] | None] = ContextVar(
    "measure", default=None
)


def measure_all(
    measurer: Measurer, pairs: Sequence[Pair], progress: Progress | None = None
) -> list[SiteResult]:
    """Measure and judge ``pairs``, in order; what was found of one is dropped once judged."""
    measure = _MEASURE.get() or measure_pairs
    with contextlib.closing(measure(measurer, pairs, progress)) as found:
        return judge_pairs(measurer, pairs, found)


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

    measurer.announce(pairs)
    measuring = max(1, min(4, torch.get_num_threads() // 2))
    window = 2 * measuring + 2
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="divergence-read")
    pool = ThreadPoolExecutor(max_workers=measuring, thread_name_prefix="divergence-measure")

    def start(pair: Pair) -> Future[Found | None]:
        read = reader.submit(measurer.read_ahead, pair)
        return pool.submit(lambda: (read.result(), measurer.look(pair))[1])

    try:
        ahead = deque(start(pair) for pair in pairs[:window])
        for number, pair in enumerate(pairs):
            if progress is not None:
                progress("compare", number, len(pairs), pair.reference.record.site)
            found = ahead.popleft().result()
            if number + window < len(pairs):
                ahead.append(start(pairs[number + window]))
            yield found
    finally:
        for one in (reader, pool):
            one.shutdown(wait=True, cancel_futures=True)

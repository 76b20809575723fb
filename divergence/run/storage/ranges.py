"""Ranges of remote objects: only those that are needed, neighbours in one request, in parallel.

A request to an object store takes some 20 to 100 ms whatever its size, and one connection gives
some 50 to 100 MB/s; so ranges that lie within ``GAP_BYTES`` of each other cost less as one
request, and several requests run side by side. Whoever reads a run announces which records
it will read and in which order (``expect``); what was not announced is fetched on its own.

What was fetched is kept in memory up to a budget, least recently used first out. Tensors that are
views of a range keep it alive beyond that.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from divergence.errors import RunFormatError
from divergence.run.storage.blob import SPAN_BYTES

__all__ = ["Ranges", "coalesced"]

GAP_BYTES = 256 << 10
"""Bytes between two ranges that are read along rather than asked for twice: less than a request's
latency costs."""
BUDGET_BYTES = 256 << 20
"""What is kept of one store; half of it may be filled ahead of the reader."""
NUM_REQUESTS = 8

Range = tuple[str, int, int]
"""(object, begin, end)"""


@dataclass(slots=True)
class _Fetched:
    """A range that is fetched, or will be when its parts are done."""

    data: bytearray | mmap.mmap
    parts: list[Future[None]] = field(default_factory=list)

    def wait(self) -> bytearray | mmap.mmap:
        for part in self.parts:
            part.result()
        return self.data


class _Index:
    """Ranges by where they lie, to find the one that covers a stretch."""

    def __init__(self, spans: Iterable[Range] = ()) -> None:
        self._by_name: dict[str, list[Range]] = {}
        for span in sorted(spans):
            self._by_name.setdefault(span[0], []).append(span)

    def add(self, span: Range) -> None:
        bisect.insort(self._by_name.setdefault(span[0], []), span)

    def remove(self, span: Range) -> None:
        spans = self._by_name[span[0]]
        del spans[bisect.bisect_left(spans, span)]

    def covering(self, name: str, begin: int, end: int) -> Range | None:
        """One that covers it; not found where many overlap, which costs a request, no more."""
        spans = self._by_name.get(name, ())
        last = bisect.bisect_right(spans, (name, begin, float("inf")))
        for span in reversed(spans[max(0, last - 4) : last]):
            if span[1] <= begin and end <= span[2]:
                return span
        return None


class Ranges:
    """``fetch(object, begin, end) -> bytes`` behind a cache. Safe to use from several threads."""

    def __init__(
        self, fetch: Callable[[str, int, int], bytes], *, budget_bytes: int = BUDGET_BYTES
    ) -> None:
        self._fetch = fetch
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Range, _Fetched] = OrderedDict()
        self._kept_index = _Index()
        self._kept_bytes = 0
        self._expected: list[Range] = []
        self._expected_index = _Index()
        self._rank: dict[Range, int] = {}
        self._pool: ThreadPoolExecutor | None = None

    def get(self, name: str, begin: int, end: int) -> memoryview:
        """The bytes of a range; raises what fetching them raised."""
        if begin >= end:
            return memoryview(bytearray())
        with self._lock:
            wanted = self._covering(name, begin, end)
            fetched = self._submit(wanted)
            self._go_ahead(wanted)
        try:
            data = fetched.wait()
        except BaseException:
            with self._lock:  # fetched again next time
                if self._kept.get(wanted) is fetched:
                    self._forget(wanted)
            raise
        return memoryview(data)[begin - wanted[1] : end - wanted[1]]

    def expect(self, wanted: Iterable[Range]) -> None:
        """These will be read, in about this order; replaces what was expected before."""
        spans = coalesced(wanted)
        with self._lock:
            self._expected = spans
            self._expected_index = _Index(spans)
            self._rank = {span: number for number, span in enumerate(spans)}

    def close(self) -> None:
        """Stop fetching and forget what is kept."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._kept.clear()
            self._kept_index, self._kept_bytes = _Index(), 0
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    # With the lock held, from here on.

    def _covering(self, name: str, begin: int, end: int) -> Range:
        kept = self._kept_index.covering(name, begin, end)
        return kept or self._expected_index.covering(name, begin, end) or (name, begin, end)

    def _submit(self, span: Range) -> _Fetched:
        if span in self._kept:
            self._kept.move_to_end(span)
            return self._kept[span]
        name, begin, end = span
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="divergence-fetch")
        fetched = self._kept[span] = _Fetched(_room(end - begin))
        for first in range(begin, end, SPAN_BYTES):
            last = min(first + SPAN_BYTES, end)
            part = self._pool.submit(self._fill, fetched.data, name, begin, first, last)
            fetched.parts.append(part)
        self._kept_index.add(span)
        self._kept_bytes += end - begin
        while self._kept_bytes > self._budget_bytes and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))
        return fetched

    def _forget(self, span: Range) -> None:
        self._kept.pop(span)
        self._kept_index.remove(span)
        self._kept_bytes -= span[2] - span[1]

    def _go_ahead(self, span: Range) -> None:
        """Fetch what is expected after ``span``, up to half of the budget."""
        rank = self._rank.get(span)
        if rank is None:
            return
        ahead_bytes = 0
        for later in self._expected[rank + 1 :]:
            ahead_bytes += later[2] - later[1]
            if ahead_bytes > self._budget_bytes // 2:
                break
            if later not in self._kept:
                self._submit(later)

    def _fill(
        self, data: bytearray | mmap.mmap, name: str, base: int, begin: int, end: int
    ) -> None:
        data[begin - base : end - base] = self._fetch(name, begin, end)


def _room(num_bytes: int) -> bytearray | mmap.mmap:
    """Of much, only what has come takes memory: how much there is, is what a server says."""
    if num_bytes <= SPAN_BYTES:
        return bytearray(num_bytes)
    try:
        return mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise RunFormatError(
            f"{num_bytes:,} bytes are needed at once, more than this machine has memory for",
            hint="compare on a machine with more, or leave the site out (--sites)",
        ) from error


def coalesced(wanted: Iterable[Range]) -> list[Range]:
    """Ranges that neighbour each other, put together; in the order in which they are first needed.

    A range beyond SPAN_BYTES stays whole; several are put together only up to that.
    """
    first_use: dict[Range, int] = {}
    for number, span in enumerate(wanted):
        if span[1] < span[2]:
            first_use.setdefault(span, number)
    spans: list[tuple[int, Range]] = []
    for span, number in sorted(first_use.items()):
        name, begin, end = span
        if spans:
            before, (last_name, last_begin, last_end) = spans[-1]
            together = max(end, last_end) - last_begin
            fits = together <= SPAN_BYTES or end <= last_end
            if name == last_name and begin - last_end <= GAP_BYTES and fits:
                joined = (name, last_begin, max(end, last_end))
                spans[-1] = (min(before, number), joined)
                continue
        spans.append((number, span))
    return [span for _, span in sorted(spans)]

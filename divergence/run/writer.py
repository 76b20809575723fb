"""RunWriter: tensors in, a run on disk; a record never points at bytes that are not there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from divergence.errors import RunWriteError
from divergence.numerics.formats import format_named
from divergence.numerics.on_device import summaries_of
from divergence.numerics.sketches import (
    Projections,
    fold_many,
    folds_of,
    num_pooled,
    num_projections,
    sketch_many,
)
from divergence.numerics.summary import Summary, summarize_many
from divergence.numerics.sums import Kernel, set_device
from divergence.run.captured import (
    DEFAULT_BUFFER_BYTES,
    Buffer,
    BufferLimits,
    CapturedTensor,
    ShardEntry,
    Slot,
    piece_of,
    piece_of_item,
)
from divergence.run.command import command_line
from divergence.run.contents import Content, contents_of
from divergence.run.manifest import Manifest
from divergence.run.record import (
    INPUTS,
    Call,
    PassName,
    Place,
    Placement,
    Record,
    Sketch,
    records_name,
    shard_name,
)
from divergence.run.storage import Location, Url, location_of
from divergence.run.target import open_target

if TYPE_CHECKING:
    import torch

    from divergence.numerics.sketches import SumDtype
    from divergence.run.captured import Put, Reduced
    from divergence.run.manifest import Sizes, StoreMode
    from divergence.run.reader import Run
    from divergence.run.target import Target


# What is kept of a tensor in place of its bytes: digest, statistics and projections.
#
# On the writer's thread a ``Reducer`` completes the items of which no bytes are to be stored, by
# mode (``--store``) or because another run holds them (``--only-changed``), and returns the rest
# to the writer. In the mode
#
# ``full``    nothing is taken over but what ``held`` holds;
# ``sketch``  floats are sketched (numerics.sketches says which), other tensors stay whole;
# ``stats``   summary and digest; ``hash``: the digest alone.
#
# An item that a device has reduced already (``CapturedTensor.reduced``, recording.keeper) has
# its numbers on the device: they are fetched here, those of a batch in one transfer a kind.

StoreBytes = Callable[[str, ShardEntry], "Place"]

_REMEMBERED = 4096
"""Reduced tensors kept for recognition: an output comes by again as the next input, or not."""


def wants_fold(run: Run | None) -> bool:
    """Does ``run`` hold digests of the kind that accelerators make?"""
    return run is not None and any(record.fold is not None for record in run.records)


def reducer_for(
    store: StoreMode, *, like: Run | None, only_changed: bool, kernel: Kernel = "numpy"
) -> Reducer | None:
    """The reducer of a capture, or None where the writer keeps everything by itself."""
    fold = wants_fold(like) or store == "sketch"  # sketches are no proof that two are equal
    if store == "full" and not only_changed and not fold:
        return None
    records = like.records if only_changed and like is not None else ()
    contents = frozenset(content for record in records for content in contents_of(record))
    return Reducer(store, fold=fold, contents=contents, kernel=kernel)


class Reducer:
    """``take(items, store)`` completes items, and returns those whose bytes are to be stored.

    ``fold``: note the device digest as well. ``held``: contents whose bytes another run has.
    """

    def __init__(
        self,
        store: StoreMode,
        *,
        fold: bool = False,
        contents: frozenset[Content] = frozenset(),
        kernel: Kernel = "numpy",
    ) -> None:
        self._store_mode, self._fold, self._held, self._kernel = store, fold, contents, kernel
        self._known: dict[Content, tuple[Summary | None, Sketch | None]] = {}

    def take(self, items: Sequence[CapturedTensor], store: StoreBytes) -> list[CapturedTensor]:
        """``items``: each once. ``store(digest, piece)`` says where bytes will be."""
        by_device: dict[str, list[tuple[CapturedTensor, Reduced]]] = {}
        for item in items:
            if (there := item.reduced) is not None:
                by_device.setdefault(str(there.sums[0].device), []).append((item, there))
        for group in by_device.values():
            _fetch(group, store)
        whole: list[CapturedTensor] = []
        reduced: list[tuple[CapturedTensor, ShardEntry]] = []
        here = [(item, piece_of_item(item)) for item in items if item.has_bytes]
        if self._fold:
            folds = fold_many([piece.data for _, piece in here], kernel=self._kernel)
            for (item, _), fold in zip(here, folds, strict=True):
                item.fold = fold
        for item, piece in here:
            item.digest = piece.digest().hex()
            stays_whole = self._store_mode == "full"
            if self._store_mode == "sketch":
                stays_whole = num_projections(item.shape, format_named(item.dtype)) is None
            contents = [
                (digest or "", item.dtype, item.shape) for digest in (item.digest, item.fold)
            ]
            if stays_whole and self._held.isdisjoint(contents):
                whole.append(item)
                continue
            item.tensor = None
            reduced.append((item, piece))
        self._complete(reduced, store)
        return whole

    def _complete(self, items: list[tuple[CapturedTensor, ShardEntry]], store: StoreBytes) -> None:
        fresh: dict[Content, ShardEntry] = {}
        for item, piece in items:
            content = _content(item)
            if content not in self._known:
                fresh[content] = piece
        if self._store_mode == "hash":
            self._known |= dict.fromkeys(fresh, (None, None))
        else:
            tensors = [(piece.dtype, piece.data) for piece in fresh.values()]
            summaries = summarize_many(tensors, kernel=self._kernel)
            sketches = self._sketched(fresh, store) if self._store_mode == "sketch" else {}
            for content, summary in zip(fresh, summaries, strict=True):
                self._known[content] = (summary, sketches.get(content))
        for item, _ in items:
            item.summary, item.sketch = self._known[_content(item)]
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _sketched(
        self, pieces: Mapping[Content, ShardEntry], store: StoreBytes
    ) -> dict[Content, Sketch]:
        wanted = {
            content: k
            for content in pieces
            if (k := num_projections(content[2], format_named(content[1]))) is not None
        }
        tensors = [(content[1], pieces[content].data, content[2]) for content in wanted]
        pooled = [num_pooled(content[2], k) for content, k in wanted.items()]
        sketches = sketch_many(tensors, list(wanted.values()), pooled, kernel=self._kernel)
        return {
            content: stored_sketch(sketch, store, sums="float64")
            for content, sketch in zip(wanted, sketches, strict=True)
        }


def _fetch(items: list[tuple[CapturedTensor, Reduced]], store: StoreBytes) -> None:
    """Completes items whose numbers lie on one device: one transfer for each kind of number."""
    import torch

    folds = folds_of([reduced.sums for _, reduced in items])
    for (item, _), fold in zip(items, folds, strict=True):
        item.fold, item.reduced = fold, None
    counted = [(item, res.statistics) for item, res in items if res.statistics is not None]
    summaries = summaries_of([statistics for _, statistics in counted])
    for (item, _), summary in zip(counted, summaries, strict=True):
        item.summary = summary
    sketched = [
        (item, res.projections, res.sum_dtype) for item, res in items if res.projections is not None
    ]
    if not sketched:
        return
    joined = [projections.joined() for _, projections, _ in sketched]
    flat = torch.cat([tensor.reshape(-1) for tensor in joined]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in joined])
    for (item, there, sums), part in zip(sketched, parts, strict=True):
        k, num_pooled = there.rows.shape[1] - 2, there.pooled.shape[1]
        here = Projections.of(part.clone(), item.shape, k, num_pooled)
        item.sketch = stored_sketch(here, store, sums=sums)


def stored_sketch(projections: Projections, store: StoreBytes, *, sums: SumDtype) -> Sketch:
    """Queue a sketch's own bytes, and say where they will be."""
    piece = piece_of(projections.joined())
    digest = piece.digest().hex()
    return Sketch(
        place=store(digest, piece),
        xxh3=digest,
        num_projections=projections.rows.shape[1] - 2,
        sums=sums,
        num_pooled=projections.pooled.shape[1],
    )


def _content(item: CapturedTensor) -> Content:
    return (item.digest or item.fold or "", item.dtype, item.shape)


# The shard in the making, and what is in shards already.
#
# ``ShardBuilder``: tensors whose bytes are kept, and the lines that will point at them.
# ``DedupIndex``: by the digest of its bytes, where a stored tensor is and what it looks like.

_shard_name = lru_cache(maxsize=64)(shard_name)


_SHORT_BYTES = 1 << 14
_APART_BYTES = 1 << 20
"""The ring gives places back in their order: where most tensors leave no bytes, a few token ids
that wait for their shard would keep everything behind them. So many are copied out of it."""


class ShardBuilder:
    """Tensors by key, and encoded lines. ``shard``: the number of the shard that is built."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._encoder = msgspec.json.Encoder()
        self._hasher = xxhash.xxh3_128()
        self.shard = 0
        self._empty()

    def _empty(self) -> None:
        self._pieces: dict[str, ShardEntry] = {}
        self._lines: list[bytes] = []
        self._apart_bytes = 0
        self.num_bytes = self.num_records = self.line_bytes = self.seen_bytes = 0

    def add(self, digest: str, piece: ShardEntry) -> Place:
        """Add an item, and return where its bytes will be."""
        clash, key = 0, digest
        while key in self._pieces:
            clash += 1
            key = f"{digest}-{clash}"
        num_bytes = piece.data.nbytes
        if (
            num_bytes <= _SHORT_BYTES
            and self._apart_bytes + num_bytes <= _APART_BYTES
            and isinstance(piece.holder, Slot)
        ):
            piece = piece.apart()
            self._apart_bytes += num_bytes
        self._pieces[key] = piece
        self.num_bytes += num_bytes
        return Place(shard=_shard_name(self._rank, self.shard), key=key)

    def add_records(self, records: Sequence[Record], *, seen_bytes: int) -> None:
        """Adds their lines. ``seen_bytes``: of the tensors they describe, stored or not."""
        lines = self._encoder.encode_lines(records)
        self._lines.append(lines)
        self.num_records += len(records)
        self.line_bytes += len(lines)
        self.seen_bytes += seen_bytes

    def digest(self) -> str:
        """xxh3-128 of all lines that were written."""
        return self._hasher.hexdigest()

    def write(self, target: Target, sizes: Sizes) -> None:
        """Writes the shard, then the lines, and adds them to ``sizes``."""
        if not self._lines:
            return
        if self._pieces:
            target.write_shard(shard_name(self._rank, self.shard), self._pieces)
            self.shard += 1
        lines = b"".join(self._lines)
        target.append_records(lines)
        self._hasher.update(lines)
        sizes.num_records += self.num_records
        sizes.num_tensors += len(self._pieces)
        sizes.num_shards += bool(self._pieces)
        sizes.stored_bytes += self.num_bytes
        sizes.seen_bytes += self.seen_bytes
        self._empty()


_ENTRY_BYTES = 800
"""Of one remembered tensor: its content, place and summary, and their share of a dict."""


class DedupIndex:
    """Knows where a stored tensor is and what it looks like, by its content; ``max_bytes`` in all.

    Equal tensors are stored once, so the writer remembers each that it wrote, in bounded number,
    because a capture may make as many as it likes. When the memory is full the ones not met for
    longest go, and their bytes, should they come again, are stored again.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._half = max(1, max_bytes // _ENTRY_BYTES // 2)
        # Two halves instead of an order: a full young one becomes the old one, which is dropped.
        self._young: dict[Content, tuple[Place, Summary]] = {}
        self._old: dict[Content, tuple[Place, Summary]] = {}

    def find(self, content: Content) -> tuple[Place, Summary] | None:
        stored = self._young.get(content)
        if stored is None and (stored := self._old.pop(content, None)) is not None:
            self.add(content, *stored)
        return stored

    def add(self, content: Content, place: Place, summary: Summary) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[content] = place, summary


# Writing a run as it happens.
#
# The caller hands over finished CPU tensors; one background thread hashes them,
# shares equal ones, summarises and writes them, so that the model does not wait
# for the disk. A shard is written under a temporary name and renamed, and only
# then are its records appended: a record never points at bytes that are not
# there, and a killed capture leaves everything before the last shard readable.
# (A crash of the process is survived; a power failure is left to the file system.)

FIRST_SHARD_BYTES, SHARD_BYTES = 8 << 20, 64 << 20
"""Bytes gathered before a shard is written, a quarter of what is stored between these two: what is
gathered lies in the buffer, of which each page that is touched costs as much as it takes to write
it, and a large run has few files. Also bounds what a kill can lose."""
SHARD_SECONDS = 2.0
"""Seconds after which a smaller shard is written all the same."""
BATCH_ITEMS = 4096
"""Tensors taken at once: their summaries share what interpreting costs."""
WAKE_BYTES = 4 << 20
WAKE_SECONDS = 1.0
"""The writer works in batches: woken by this many waiting bytes (or an eighth of the buffer, or
half of the records that may wait), or after this time. So many are still in the processor's
caches; between batches it leaves Python's lock to the model."""


def new_run_id() -> str:
    """A fresh run id: 32 hex digits."""
    return uuid.uuid4().hex


class RunWriter:
    """Writes one rank's part of a run directory. Use as a context manager.

    Leaving the ``with`` block normally closes the run as complete; leaving it by an
    exception writes what was gathered and closes it as incomplete.

    ``rank``: the first one makes the directory (so it begins first) and writes the manifest; the
    others write their own records and shards beside, and nothing else. ``device``: where what is
    put was made, for whose copies the background thread waits.

    Raises RunExistsError if ``path`` holds anything and ``force`` is false, and
    RunWriteError when the disk refuses (also later, from ``put`` or ``close``).
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Url,
        manifest: Manifest,
        *,
        force: bool = False,
        rank: int = 0,
        reducer: Reducer | None = None,
        buffer: Buffer | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.path = location_of(path)  # as the reader does
        self.manifest = manifest
        self._rank, self._reducer, self._device = rank, reducer, device
        self._buffer = buffer
        self._limits = BufferLimits.of(DEFAULT_BUFFER_BYTES) if buffer is None else buffer.limits
        self._pending = ShardBuilder(rank=rank)
        self._stored = DedupIndex(max_bytes=self._limits.stored_bytes)
        self._last_flush = time.monotonic()
        self._queue: deque[Put] = deque()
        self._wake_bytes = min(WAKE_BYTES, self._limits.ring_bytes // 8)
        self._put_bytes = self._put_count = 0  # the caller's thread's alone, as the next two
        self._new_bytes, self._wake_count = 0, self._limits.num_queued // 2
        self._done_bytes = self._done_count = 0  # the background thread's
        self._wake, self._progress = threading.Event(), threading.Event()
        self._closing = self._flush_asked = False
        self._failure: BaseException | None = None
        try:
            self._target = open_target(self.path, force=force, rank=rank)
        except OSError as error:
            raise RunWriteError(
                f"nothing can be written there: {error.strerror or error}",
                where=str(self.path),
                hint=f"{_free_space(error)}choose another place with -o",
            ) from error
        try:
            self.update_manifest()
        except BaseException:
            self._target.close()
            raise
        self._thread = threading.Thread(target=self._work, name="divergence-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close(complete=True)
            return
        stopped_by = str(error)
        if isinstance(error, KeyboardInterrupt):
            stopped_by, error.args = "interrupted", (*error.args, self.path)
        with contextlib.suppress(RunWriteError):  # the first error is the one to report
            self.close(
                complete=False,
                stopped_by=stopped_by.splitlines()[0] if stopped_by else type(error).__name__,
            )

    def put(
        self,
        item: CapturedTensor,
        *,
        pass_: PassName,
        sample: int,
        step: int,
        site: str,
        order: int,
        positions: tuple[int, ...] | None = None,
        call: Call | None = None,
        placement: tuple[Placement, ...] | None = None,
    ) -> None:
        """Record ``item`` (which may have been put before) under these coordinates."""
        own_bytes = 0
        if item.slot is None and item.has_bytes:
            own_bytes = item.num_bytes
            self._put_bytes += own_bytes
        self._queue.append(
            (item, own_bytes, pass_, sample, step, site, order, positions, call, placement)
        )
        self._put_count += 1
        self._new_bytes += item.num_bytes
        if self._new_bytes > self._wake_bytes or self._put_count > self._wake_count:
            self._new_bytes = 0
            self._wake_count = self._put_count + self._limits.num_queued // 2
            self._wake.set()
        full = self._put_count - self._done_count > self._limits.num_queued
        if (own_bytes or full) and self._too_much():
            self._wait_until(lambda: not self._too_much())
        if self._failure is not None:
            raise self._failure

    def _too_much(self) -> bool:
        """Do more tensors or bytes wait than may? ``make_room`` bounds those in the ring."""
        waiting = self._put_bytes - self._done_bytes
        count = self._put_count - self._done_count
        return count > self._limits.num_queued or waiting > self._limits.ring_bytes

    def make_room(self, num_bytes: int) -> Slot | None:
        """Waits for a place in the buffer; None where all of it is held elsewhere."""
        assert self._buffer is not None
        while True:
            idle = self._done_count >= self._put_count and not self._pending.num_bytes
            slot = self._buffer.take(num_bytes)
            if slot is not None or idle:
                return slot
            self._flush_asked = True
            self._wait_until(lambda: not self._flush_asked)
            self._raise_failure()

    def drain(self) -> None:
        """Wait until everything put so far has been hashed (and most of it written)."""
        self._wait_until(lambda: self._done_count >= self._put_count)
        self._raise_failure()

    @property
    def record_digests(self) -> dict[str, str]:
        """Return, by name, the digest of the file of records that this writer has written. Asked
        for after ``flush`` where several ranks write one run: the first one's manifest names
        all."""
        return {records_name(self._rank): self._pending.digest()}

    def flush(self) -> Location:
        """Wait until everything put so far can be read; returns where, for ``Run.open``."""
        self.drain()
        self._flush_asked = True
        self._wait_until(lambda: not self._flush_asked)
        self._raise_failure()
        try:
            return self._target.flush()
        except OSError as error:
            raise self._refused(error) from error

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done() and self._failure is None and self._thread.is_alive():
            self._wake.set()
            self._progress.clear()
            self._progress.wait(0.05)

    def update_manifest(self) -> None:
        """Write manifest.json as it stands now, atomically. The first rank's alone."""
        if self._rank > 0:
            return
        try:
            text = self.manifest.encode()
        except UnicodeEncodeError:  # a file name or argument that is no UTF-8
            plain = _printable(msgspec.to_builtins(self.manifest))
            text = msgspec.convert(plain, Manifest).encode()
        try:
            self._target.replace_manifest(text, complete=self.manifest.complete)
        except OSError as error:
            raise self._refused(error) from error

    def close(self, *, complete: bool, stopped_by: str | None = None) -> None:
        """Finish the background work and the manifest. Raises the writer's own failure."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._try(self._target.flush)
        if self._failure is not None:
            complete, stopped_by = False, str(self._failure).splitlines()[0]
        self.manifest.complete = complete
        self.manifest.stopped_by = stopped_by
        # where writing failed a store may hold fewer lines; other ranks' are known of a whole run
        others = self.manifest.record_digests if complete else {}
        own = self.record_digests if self._failure is None else {}
        self.manifest.record_digests = others | own
        self._try(self.update_manifest)
        self._try(self._target.close)
        if self._buffer is not None:
            self._buffer.trim()
        self._raise_failure()

    def _try(self, step: Callable[[], object]) -> None:
        """Runs a step of closing and keeps the first failure."""
        try:
            step()
        except Exception as error:
            if self._failure is None:
                self._failure = self._refused(error) if isinstance(error, OSError) else error

    def _refused(self, error: OSError) -> RunWriteError:
        return RunWriteError(
            f"writing failed: {error.strerror or error}",
            where=str(self.path),
            hint=f"{_free_space(error)}choose another place with -o; what was finished before is "
            f"readable: {command_line('inspect', self._target.place)}",
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The background thread, from here on.

    def _work(self) -> None:
        import torch

        try:
            # torch's operators use this thread alone here. OpenMP gives each thread that runs a
            # parallel operator its own team, and two teams on the same cores cost the model more
            # than the work itself: a capture of sketches on two cores took 1.24 instead of 1.34
            # times the bare model's time. (``torch.set_num_threads`` would also tell MKL, which has
            # one number for all threads.)
            torch.get_num_threads()  # first: torch sets a new thread's number when it is needed
            with contextlib.suppress(AttributeError, OSError, TypeError):  # without OpenMP
                ctypes.CDLL(None).omp_set_num_threads(1)
            set_device(self._device)
        except Exception as error:
            self._failure = error
        while True:
            self._wake.wait(WAKE_SECONDS)
            self._wake.clear()
            closing = self._closing  # read before the queue: nothing is put after it is set
            try:
                self._take_all()
                late = time.monotonic() - self._last_flush > SHARD_SECONDS
                asked = self._flush_asked
                if self._failure is None and (closing or late or asked):
                    self._flush()
                if asked:
                    self._flush_asked = False
            except OSError as error:
                self._failure = self._refused(error)
            except Exception as error:
                self._failure = error
            self._progress.set()
            if closing:
                return

    def _take_all(self) -> None:
        """Everything that waits, in batches that leave room for a shard in between."""
        while self._queue:
            share = max(FIRST_SHARD_BYTES, self.manifest.sizes.stored_bytes // 4)
            shard_bytes = min(share, SHARD_BYTES, self._limits.shard_bytes)
            batch: list[Put] = []
            num_bytes = own_bytes = 0
            while self._queue and num_bytes < shard_bytes and len(batch) < BATCH_ITEMS:
                entry = self._queue.popleft()
                batch.append(entry)
                num_bytes += entry[0].num_bytes
                own_bytes += entry[1]
                del entry  # held by the batch alone
            num = len(batch)
            try:
                if self._failure is None:
                    self._take(batch, seen_bytes=num_bytes)
                    lines = self._pending.line_bytes
                    if self._pending.num_bytes >= shard_bytes or lines >= self._limits.line_bytes:
                        self._flush()
            finally:
                batch.clear()  # before it is said to be done: its places are free then
                self._done_bytes += own_bytes
                self._done_count += num
                self._progress.set()

    def _take(self, batch: list[Put], *, seen_bytes: int) -> None:
        items = list({id(entry[0]): entry[0] for entry in batch}.values())
        slots = [item.slot for item in items]  # held until all is done
        if self._reducer is not None:
            whole = {id(entry[0]) for entry in batch if entry[2] in ("floor", INPUTS)}
            sums = [item for item in items if id(item) in whole]  # kept as they are
            rest = [item for item in items if id(item) not in whole]
            # a sketch's own bytes are queued like those of a tensor
            items = [*self._reducer.take(rest, self._pending.add), *sums]
        self._complete(items)
        # Python passes more than 15 keywords in a dict of its own, which takes five times as long
        records = [
            Record(
                pass_=pass_,
                sample=sample,
                step=step,
                site=site,
                order=order,
                shape=item.shape,
                dtype=item.dtype,
                summary=item.summary,
                place=item.place,
                xxh3=item.digest,
                fold=item.fold,
                sketch=item.sketch,
                rank=self._rank,
                positions=positions,
                call=call,
            )
            for item, _, pass_, sample, step, site, order, positions, call, _ in batch
        ]
        for index, entry in enumerate(batch):
            if entry[-1] is not None:
                records[index] = msgspec.structs.replace(records[index], placement=entry[-1])
            if (checksum := entry[0].checksum) is not None:
                records[index] = msgspec.structs.replace(records[index], checksum=checksum)
            if (apart := entry[0].apart) is not None:
                records[index] = msgspec.structs.replace(records[index], apart=apart)
        self._pending.add_records(records, seen_bytes=seen_bytes)
        del slots

    def _complete(self, items: list[CapturedTensor]) -> None:
        """Digest, place and summary of items that hold their bytes, which are then let go."""
        fresh: dict[Content, tuple[CapturedTensor, ShardEntry]] = {}
        same: list[tuple[CapturedTensor, CapturedTensor]] = []
        for item in items:
            if not item.has_bytes:  # it was put before, or keeps none
                continue
            piece = piece_of_item(item)
            if item.digest is None:
                item.digest = piece.digest().hex()
            content = item.digest, item.dtype, item.shape
            if content in fresh:
                same.append((item, fresh[content][0]))
            elif (stored := self._stored.find(content)) is not None:
                item.place, item.summary = stored
            else:
                fresh[content] = (item, piece)
            item.tensor = None
        tensors = [(piece.dtype, piece.data) for _, piece in fresh.values()]
        summaries = summarize_many(tensors, kernel=self._limits.kernel)
        for (content, (item, piece)), summary in zip(fresh.items(), summaries, strict=True):
            item.place, item.summary = self._pending.add(content[0], piece), summary
            self._stored.add(content, item.place, summary)
        for item, other in same:
            item.place, item.summary = other.place, other.summary

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        self._pending.write(self._target, self.manifest.sizes)


def _printable(value: Any) -> Any:
    """The value with what UTF-8 cannot hold (undecodable bytes of a file name) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def _free_space(error: OSError) -> str:
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "free some space or " if error.errno in full else ""

"""Writing a run as it happens.

The caller hands over finished CPU tensors; one background thread hashes them,
shares equal ones, summarises and writes them, so that the model does not wait
for the disk. A shard is written under a temporary name and renamed, and only
then are its records appended: a record never points at bytes that are not
there, and a killed capture leaves everything before the last shard readable.
(A crash of the process is survived; a power failure is left to the file system.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.errors import RunWriteError
from divergence.numerics.kernels import set_device
from divergence.numerics.summaries.summary import summarize_many
from divergence.run.command import command_line
from divergence.run.process_tuning import disable_openmp
from divergence.run.schema.layout import records_name
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.record import Call, PassName, Place, Placement, Record
from divergence.run.storage.location import Location, Url, location_of
from divergence.run.storage.target import open_target
from divergence.run.writing.buffer import DEFAULT_BUFFER_BYTES, Buffer, BufferLimits, Slot
from divergence.run.writing.captured_tensor import (
    CapturedTensor,
    ShardEntry,
    piece_of_item,
)
from divergence.run.writing.reduction import Reducer
from divergence.run.writing.shard_builder import DedupIndex, ShardBuilder

if TYPE_CHECKING:
    import torch

    from divergence.run.writing.captured_tensor import Put

__all__ = ["CapturedTensor", "RunWriter", "new_run_id"]

SHARD_BYTES = 64 << 20
"""Bytes gathered before a shard is written: also bounds what a kill can lose."""
SHARD_SECONDS = 2.0
"""Seconds after which a smaller shard is written all the same."""
BATCH_ITEMS = 4096
"""Tensors taken at once: their summaries share what interpreting costs."""
WAKE_BYTES = 64 << 20
WAKE_SECONDS = 1.0
"""The writer works in batches: woken by this many waiting bytes (or an eighth of the buffer, or
half of the records that may wait), or after this time. Between batches it leaves the processor,
its caches and Python's lock to the model."""


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
        self._stored = DedupIndex(max_bytes=self._limits.stored_bytes, rank=rank)
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
        stopped_by = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
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
        """By name, the digest of the file of records that this writer has written. Asked for after
        ``flush`` where several ranks write one run: the first one's manifest names all."""
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
            self._target.replace_manifest(text)
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
        try:
            disable_openmp()
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
        shard_bytes = min(SHARD_BYTES, self._limits.shard_bytes)
        while self._queue:
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
            sums = [entry[0] for entry in batch if entry[2] == "floor"]  # small, kept as they are
            whole = {id(item) for item in sums}
            rest = [item for item in items if id(item) not in whole]
            items = [*self._reducer.take(rest, self._store), *sums]
        self._complete(items)
        # Python passes more than 15 keywords in a dict of its own, which takes five times as long
        records = [
            Record(
                pass_=pass_, sample=sample, step=step, site=site, order=order, shape=item.shape,
                dtype=item.dtype, summary=item.summary, place=item.place, xxh3=item.digest,
                fold=item.fold, sketch=item.sketch, rank=self._rank, positions=positions, call=call,
            )
            for item, _, pass_, sample, step, site, order, positions, call, _ in batch
        ]  # fmt: skip
        for index, entry in enumerate(batch):
            if entry[-1] is not None:
                records[index] = msgspec.structs.replace(records[index], placement=entry[-1])
        self._pending.add_records(records, seen_bytes=seen_bytes)
        del slots

    def _complete(self, items: list[CapturedTensor]) -> None:
        """Digest, place and summary of items that hold their bytes, which are then let go."""
        fresh: dict[bytes, tuple[CapturedTensor, ShardEntry]] = {}
        same: list[tuple[CapturedTensor, CapturedTensor]] = []
        for item in items:
            if not item.has_bytes:  # it was put before, or keeps none
                continue
            piece = piece_of_item(item)
            if item.digest is None:
                digest = piece.digest()
                item.digest = digest.hex()
            else:
                digest = bytes.fromhex(item.digest)
            key = self._stored.key(digest, (item.dtype, item.shape))
            if key in fresh:
                same.append((item, fresh[key][0]))
            elif (known := self._stored.find(key)) is not None:
                item.place, item.summary = known
            else:
                fresh[key] = (item, piece)
            item.tensor = None
        tensors = [(piece.dtype, piece.data) for _, piece in fresh.values()]
        summaries = summarize_many(tensors, kernel=self._limits.kernel)
        for (key, (item, piece)), summary in zip(fresh.items(), summaries, strict=True):
            shard = self._pending.shard
            item.place, clash = self._pending.add(item.digest or "", piece)
            item.summary = summary
            self._stored.add(key, shard=shard, clash=clash, summary=summary)
        for item, other in same:
            item.place, item.summary = other.place, other.summary

    def _store(self, digest: str, piece: ShardEntry) -> Place:
        """Queues bytes of the reducer's own (a sketch) and returns where they will be."""
        return self._pending.add(digest, piece)[0]

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

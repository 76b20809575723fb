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
import os
import threading
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.errors import RunWriteError
from divergence.numerics.summaries import summarize_many
from divergence.run.call import Call
from divergence.run.fingerprint import digest_tensor, plain_tensor
from divergence.run.item import Item
from divergence.run.layout import shard_name
from divergence.run.location import Location, Url, location_of
from divergence.run.manifest import Manifest
from divergence.run.record import PassName, Place, Record, Summary
from divergence.run.reduction import Reducer
from divergence.run.target import open_target

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Item", "RunWriter", "new_run_id"]

SHARD_BYTES = 64 << 20
"""Bytes gathered before a shard is written: also bounds what a kill can lose."""
SHARD_SECONDS = 2.0
"""Seconds after which a smaller shard is written all the same."""
QUEUE_BYTES = 256 << 20
"""Bytes that may wait for the writer before the model has to wait."""
WAKE_BYTES = 8 << 20
WAKE_SECONDS = 0.25
"""The writer works in batches: woken by this many waiting bytes, or after this time. Between
batches it leaves the processor (and Python's lock) to the model."""


def new_run_id() -> str:
    """A fresh run id: 32 hex digits."""
    return uuid.uuid4().hex


class RunWriter:
    """Writes one rank's part of a run directory. Use as a context manager.

    Leaving the ``with`` block normally closes the run as complete; leaving it by an
    exception writes what was gathered and closes it as incomplete.

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
    ) -> None:
        self.path = location_of(path)  # as the reader does
        self.manifest = manifest
        self._rank, self._reducer = rank, reducer
        self._shard = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._pending_records: list[Record] = []
        self._pending_seen_bytes = 0
        self._last_flush = time.monotonic()
        self._known: dict[tuple[str, str, tuple[int, ...]], tuple[Place, Summary]] = {}
        self._keys: set[str] = set()
        self._queue: deque[tuple[Item, dict]] = deque()
        self._put_bytes = self._put_count = 0  # written by the caller's thread alone
        self._done_bytes = self._done_count = 0  # written by the background thread alone
        self._wake, self._progress = threading.Event(), threading.Event()
        self._closing = self._flush_asked = False
        self._failure: BaseException | None = None
        self._closed = False
        try:
            self._target = open_target(self.path, force=force)
        except OSError as error:
            raise _refused(error, self.path) from error
        try:
            self.update_manifest()
        except BaseException:
            self._target.close()
            raise
        self._thread = threading.Thread(target=self._work, name="divergence-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object):
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
        item: Item,
        *,
        pass_: PassName,
        sample: int,
        step: int,
        site: str,
        order: int,
        positions: tuple[int, ...] | None = None,
        call: Call | None = None,
    ) -> None:
        """Record ``item`` (which may have been put before) under these coordinates."""
        if self._failure is not None:
            raise self._failure
        self._queue.append(
            (
                item,
                {
                    "pass_": pass_,
                    "sample": sample,
                    "step": step,
                    "site": site,
                    "order": order,
                    "positions": positions,
                    "call": call,
                },
            )
        )
        self._put_count += 1
        self._put_bytes += item.num_bytes
        waiting = self._put_bytes - self._done_bytes
        if waiting > WAKE_BYTES:
            self._wake.set()
            if waiting > QUEUE_BYTES:
                self._wait_until(lambda: self._put_bytes - self._done_bytes <= QUEUE_BYTES)

    def drain(self) -> None:
        """Wait until everything put so far has been hashed (and most of it written)."""
        self._wait_until(lambda: self._done_count >= self._put_count)
        self._raise_failure()

    def flush(self) -> Location:
        """Wait until everything put so far can be read; returns where, for ``Run.open``."""
        self.drain()
        self._flush_asked = True
        self._wait_until(lambda: not self._flush_asked)
        self._raise_failure()
        try:
            return self._target.flush()
        except OSError as error:
            raise _refused(error, self.path) from error

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done() and self._failure is None and self._thread.is_alive():
            self._wake.set()
            self._progress.clear()
            self._progress.wait(0.05)

    def update_manifest(self) -> None:
        """Write manifest.json as it stands now, atomically."""
        try:
            data = msgspec.json.encode(self.manifest)
        except UnicodeEncodeError:  # a file name or argument that is no UTF-8
            data = msgspec.json.encode(_printable(msgspec.to_builtins(self.manifest)))
        try:
            self._target.replace_manifest(msgspec.json.format(data, indent=1))
        except OSError as error:
            raise _refused(error, self.path) from error

    def close(self, *, complete: bool, stopped_by: str | None = None) -> None:
        """Finish the background work and the manifest. Raises the writer's own failure."""
        if self._closed:
            return
        self._closed = True
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._try(self._target.flush)
        if self._failure is not None:
            complete, stopped_by = False, str(self._failure).splitlines()[0]
        self.manifest.complete = complete
        self.manifest.stopped_by = stopped_by
        self._try(self.update_manifest)
        self._try(self._target.close)
        self._raise_failure()

    def _try(self, step: Callable[[], object]) -> None:
        """A step of closing, which goes on after it failed; the first failure is kept."""
        try:
            step()
        except Exception as error:
            if self._failure is None:
                failed = isinstance(error, OSError)
                self._failure = _refused(error, self.path) if failed else error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The background thread, from here on.

    def _work(self) -> None:
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
                self._failure = _refused(error, self.path)
            except Exception as error:
                self._failure = error
            self._progress.set()
            if closing:
                return

    def _take_all(self) -> None:
        """Everything that waits, in batches that leave room for a shard in between."""
        while self._queue:
            batch, num_bytes = [], 0
            while self._queue and num_bytes < SHARD_BYTES:
                batch.append(self._queue.popleft())
                num_bytes += batch[-1][0].num_bytes
            try:
                if self._failure is None:
                    self._take(batch)
            finally:
                self._done_bytes += num_bytes
                self._done_count += len(batch)
                self._progress.set()

    def _take(self, batch: list[tuple[Item, dict]]) -> None:
        items = [item for item, _ in batch]
        if self._reducer is not None:
            items = self._reducer.take(items, self._store)
        self._complete([item for item in items if item.tensor is not None])
        for item, coordinates in batch:
            self._pending_records.append(
                Record(
                    **coordinates,
                    rank=self._rank,
                    shape=item.shape,
                    dtype=item.dtype,
                    place=item.place,
                    xxh3=item.digest,
                    fold=item.fold,
                    sketch=item.sketch,
                    summary=item.summary,
                )
            )
            self._pending_seen_bytes += item.num_bytes
        if self._pending_bytes >= SHARD_BYTES:
            self._flush()

    def _complete(self, items: list[Item]) -> None:
        """Digest, place and summary of items that hold their bytes, which are then let go."""
        fresh: list[tuple[tuple, torch.Tensor]] = []
        for item in items:
            if item.tensor is None:  # twice in one batch
                continue
            tensor, item.tensor = plain_tensor(item.tensor), None
            item.digest = digest_tensor(tensor)
            identity = (item.digest, item.dtype, item.shape)
            if identity not in self._known:
                self._known[identity] = (self._store(item.digest, tensor, item.num_bytes), None)
                fresh.append((identity, tensor))
        summaries = summarize_many([tensor for _, tensor in fresh])
        for (identity, _), summary in zip(fresh, summaries, strict=True):
            self._known[identity] = (self._known[identity][0], summary)
        for item in items:
            item.place, item.summary = self._known[item.digest, item.dtype, item.shape]

    def _store(self, digest: str, tensor: torch.Tensor, num_bytes: int) -> Place:
        """Queue the bytes for the current shard, and say where they will be."""
        key, clash = digest, 0
        while key in self._keys:  # the same bytes under another dtype or shape
            clash += 1
            key = f"{digest}-{clash}"
        self._keys.add(key)
        self._pending[key] = tensor
        self._pending_bytes += num_bytes
        return Place(shard=shard_name(self._rank, self._shard), key=key)

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        if not self._pending_records:
            return
        if self._pending:
            self._target.write_shard(shard_name(self._rank, self._shard), self._pending)
            self._shard += 1
        encoder = msgspec.json.Encoder()
        lines = b"".join(encoder.encode(record) + b"\n" for record in self._pending_records)
        self._target.append_records(lines)
        sizes = self.manifest.sizes  # of what is on disk, also in a run that ends early
        sizes.num_records += len(self._pending_records)
        sizes.num_tensors += len(self._pending)
        sizes.num_shards += bool(self._pending)
        sizes.stored_bytes += self._pending_bytes
        sizes.seen_bytes += self._pending_seen_bytes
        self._pending, self._pending_bytes = {}, 0
        self._pending_records, self._pending_seen_bytes = [], 0


def _printable(value: Any) -> Any:
    """The value with what UTF-8 cannot hold (undecodable bytes of a file name) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def _refused(error: OSError, path: Location) -> RunWriteError:
    return RunWriteError(
        f"writing failed: {error.strerror or error}",
        where=str(path),
        hint="free some space or choose another disk with -o; "
        "what was finished before is readable (divergence inspect)",
    )

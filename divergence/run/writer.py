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
import queue
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.errors import RunExistsError, RunWriteError
from divergence.numerics.formats import format_of
from divergence.numerics.summary import summarize
from divergence.run.fingerprint import digest_tensor
from divergence.run.layout import MANIFEST, RECORDS, TENSORS, shard_name
from divergence.run.manifest import Manifest
from divergence.run.record import PassName, Place, Record, Summary

if TYPE_CHECKING:
    import torch

__all__ = ["Item", "RunWriter", "new_run_id"]

SHARD_BYTES = 64 << 20
"""Bytes gathered before a shard is written: also bounds what a kill can lose."""
SHARD_SECONDS = 2.0
"""Seconds after which a smaller shard is written all the same."""
QUEUE_BYTES = 256 << 20
"""Bytes that may wait for the writer before the model has to wait."""

_STORABLE = frozenset(
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 "
    "int64 int32 int16 int8 uint8 bool".split()
)
"""dtypes that every safetensors release in use stores under their own name."""


def new_run_id() -> str:
    """A fresh run id: 32 hex digits."""
    return uuid.uuid4().hex


class Item:
    """A tensor handed to the writer once, whatever number of sites it was seen at."""

    __slots__ = ("digest", "dtype", "num_bytes", "place", "shape", "summary", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until the writer has taken it
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.dtype = format_of(tensor.dtype).name
        self.shape = tuple(tensor.shape)
        self.digest: str | None = None
        self.summary: Summary | None = None
        self.place: Place | None = None


class RunWriter:
    """Writes one rank's part of a run directory. Use as a context manager.

    Leaving the ``with`` block normally closes the run as complete; leaving it by an
    exception writes what was gathered and closes it as incomplete.

    Raises RunExistsError if ``path`` holds anything and ``force`` is false, and
    RunWriteError when the disk refuses (also later, from ``put`` or ``close``).
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, force: bool = False, rank: int = 0
    ) -> None:
        self.path = Path(path)
        self.manifest = manifest
        self._rank = rank
        self._shard = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._pending_records: list[Record] = []
        self._last_flush = time.monotonic()
        self._known: dict[tuple[str, str, tuple[int, ...]], tuple[Place, Summary]] = {}
        self._keys: set[str] = set()
        self._queue: queue.SimpleQueue[tuple[Item, dict] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._unfinished = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._prepare(force)
        self._records = open(self.path / RECORDS, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self.update_manifest()
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
    ) -> None:
        """Record ``item`` (which may have been put before) under these coordinates."""
        self._raise_failure()
        coordinates = {
            "pass_": pass_,
            "sample": sample,
            "step": step,
            "site": site,
            "order": order,
            "positions": positions,
        }
        with self._room:
            while self._waiting_bytes > QUEUE_BYTES and self._failure is None:
                self._room.wait()
            self._waiting_bytes += item.num_bytes
            self._unfinished += 1
        self._queue.put((item, coordinates))

    def drain(self) -> None:
        """Wait until everything put so far has been hashed (and most of it written)."""
        with self._room:
            while self._unfinished and self._failure is None:
                self._room.wait()
        self._raise_failure()

    def update_manifest(self) -> None:
        """Write manifest.json as it stands now, atomically."""
        data = msgspec.json.format(msgspec.json.encode(self.manifest), indent=1)
        temporary = self.path / (MANIFEST + ".tmp")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self.path / MANIFEST)
        except OSError as error:
            raise _refused(error, self.path) from error

    def close(self, *, complete: bool, stopped_by: str | None = None) -> None:
        """Finish the background work and the manifest. Raises the writer's own failure."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._records.close()
        if self._failure is not None:
            complete, stopped_by = False, str(self._failure).splitlines()[0]
        self.manifest.complete = complete
        self.manifest.stopped_by = stopped_by
        try:
            self.update_manifest()
        except RunWriteError:
            if self._failure is None:
                raise
        self._raise_failure()

    def _prepare(self, force: bool) -> None:
        try:
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
                raise RunExistsError(f"{self.path} exists and is not a directory")
            if self.path.exists() and any(self.path.iterdir()):
                if not force:
                    raise RunExistsError(
                        f"{self.path} exists already",
                        hint="choose another directory with -o, or pass --force to replace it",
                    )
                if not (self.path / MANIFEST).is_file():
                    raise RunExistsError(
                        f"{self.path} exists and is not a run, so --force does not remove it",
                        hint="choose another directory with -o, or remove it yourself",
                    )
                shutil.rmtree(self.path)
            (self.path / TENSORS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(error, self.path) from error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The background thread, from here on.

    def _work(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=SHARD_SECONDS)
            except queue.Empty:
                job = ()
            try:
                if job is None:
                    self._flush()
                    return
                if job and self._failure is None:
                    self._take(*job)
                if time.monotonic() - self._last_flush > SHARD_SECONDS:
                    self._flush()
            except OSError as error:
                self._failure = _refused(error, self.path)
            except Exception as error:
                self._failure = error
            finally:
                if job:
                    with self._room:
                        self._waiting_bytes -= job[0].num_bytes
                        self._unfinished -= 1
                        self._room.notify_all()
            if job is None:
                return

    def _take(self, item: Item, coordinates: dict) -> None:
        if item.tensor is not None:
            tensor, item.tensor = item.tensor, None
            digest = digest_tensor(tensor)
            identity = (digest, item.dtype, item.shape)
            if identity not in self._known:
                place = self._store(digest, tensor, item.num_bytes)
                self._known[identity] = (place, summarize(tensor))
            item.place, item.summary = self._known[identity]
            item.digest = digest
        self._pending_records.append(
            Record(
                **coordinates,
                rank=self._rank,
                shape=item.shape,
                dtype=item.dtype,
                place=item.place,
                xxh3=item.digest,
                summary=item.summary,
            )
        )
        sizes = self.manifest.sizes
        sizes.num_records += 1
        sizes.seen_bytes += item.num_bytes
        if self._pending_bytes >= SHARD_BYTES:
            self._flush()

    def _store(self, digest: str, tensor: torch.Tensor, num_bytes: int) -> Place:
        """Queue the bytes for the current shard, and say where they will be."""
        key, clash = digest, 0
        while key in self._keys:  # the same bytes under another dtype or shape
            clash += 1
            key = f"{digest}-{clash}"
        self._keys.add(key)
        self._pending[key] = tensor
        self._pending_bytes += num_bytes
        sizes = self.manifest.sizes
        sizes.num_tensors += 1
        sizes.stored_bytes += num_bytes
        return Place(shard=shard_name(self._rank, self._shard), key=key)

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        if not self._pending_records:
            return
        if self._pending:
            final = self.path / shard_name(self._rank, self._shard)
            temporary = final.with_suffix(".tmp")
            try:
                _write_shard(temporary, self._pending)
                os.replace(temporary, final)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            self._shard += 1
            self.manifest.sizes.num_shards += 1
        encoder = msgspec.json.Encoder()
        lines = b"".join(encoder.encode(record) + b"\n" for record in self._pending_records)
        while lines:  # unbuffered, so that nothing half-written waits for a later retry
            lines = lines[self._records.write(lines) :]
        self._pending, self._pending_bytes, self._pending_records = {}, 0, []


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {
        # A dtype that safetensors lacks goes as raw bytes: the record knows dtype and shape.
        key: tensor
        if format_of(tensor.dtype).name in _STORABLE
        else tensor.reshape(-1).view(torch.uint8)
        for key, tensor in tensors.items()
    }
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library wraps the operating system's error
        raise OSError(None, str(error)) from error


def _refused(error: OSError, path: Path) -> RunWriteError:
    return RunWriteError(
        f"writing failed: {error.strerror or error}",
        where=str(path),
        hint="free some space or choose another disk with -o; "
        "what was finished before is readable (divergence inspect)",
    )

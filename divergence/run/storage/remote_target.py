"""A run written to an object store while it happens.

Objects are stored whole or not at all, and cannot be added to. So each shard goes as an object
of its own, in the background, as soon as it is finished, and its local copy is removed;
``records.jsonl`` is stored anew when it has grown by a fifth, after all shards that its lines
point at (altogether some six times its size is sent); the manifest says ``complete: false`` before
anything else, and ``complete: true`` after everything else was found to be there in full length.

What a kill can lose: the lines since the last fifth, and with them the tensors of those lines. The
shards may be there; without lines they do not count.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.errors import RunExistsError, RunWriteError
from divergence.run.schema.layout import (
    MANIFEST,
    SHARD_PATTERN,
    TENSORS,
    is_records_name,
    records_name,
)
from divergence.run.storage.location import Url
from divergence.run.storage.remote import Object, Remote
from divergence.run.storage.shard import write_shard

if TYPE_CHECKING:
    from divergence.run.writing.shard_entry import ShardEntry

__all__ = ["RemoteTarget", "check_remote"]

NUM_WAITING = 4
"""Finished shards that may lie here before the writer has to wait: bounds the local disk."""
GROWTH = 1.2
"""How much longer records.jsonl must be than what is stored before it is stored again."""


class _End(msgspec.Struct):
    complete: bool


class RemoteTarget:
    """The target for a URL. Of several ranks the first empties it, before the others begin."""

    def __init__(self, place: Url, *, force: bool, rank: int = 0) -> None:
        self.place = place
        self._remote = Remote(place, refused=RunWriteError)
        if rank == 0:
            replaced = _checked(self._remote, place, force=force)
            # the manifest goes first: what is left of a run without one is no run
            self._remote.remove(sorted(replaced, key=lambda name: name != MANIFEST))
        self._lines_name = records_name(rank)
        self._folder = Path(tempfile.mkdtemp(prefix="divergence-"))
        (self._folder / TENSORS).mkdir()
        self._records = open(self._folder / self._lines_name, "ab", buffering=0)  # noqa: SIM115 - see close()
        self._sizes: dict[str, int] = {}
        self._waiting_manifest: bytes | None = None
        self._manifest_lock = threading.Lock()
        self._num_lines_bytes = self._sent_lines_bytes = 0
        self._shards: list[Future[None]] = []
        self._lines: Future[None] | None = None
        self._room = threading.BoundedSemaphore(NUM_WAITING)
        self._pool = ThreadPoolExecutor(NUM_WAITING, thread_name_prefix="divergence-upload")
        self._lines_pool = ThreadPoolExecutor(1, thread_name_prefix="divergence-lines")

    def write_shard(self, name: str, pieces: Mapping[str, ShardEntry]) -> None:
        self._room.acquire()
        try:
            self._raise_failure()
            path = self._folder / name
            write_shard(path, pieces)
            self._sizes[name] = path.stat().st_size
            self._shards.append(self._pool.submit(self._send, name, path))
        except BaseException:
            self._room.release()
            raise

    def append_records(self, lines: bytes) -> None:
        self._raise_failure()
        self._num_lines_bytes += len(lines)
        while lines:
            lines = lines[self._records.write(lines) :]
        due = self._num_lines_bytes >= GROWTH * self._sent_lines_bytes
        if due and (self._lines is None or self._lines.done()):
            self._send_lines_soon()

    def replace_manifest(self, text: bytes) -> None:
        with self._manifest_lock:
            self._waiting_manifest = text
        if MANIFEST not in self._sizes or msgspec.json.decode(text, type=_End).complete:
            self._put_manifest()  # the first, and the last of a whole run; else with the next lines

    def flush(self) -> Url:
        if self._lines is not None:
            self._lines.result()
        if self._sent_lines_bytes < self._num_lines_bytes or self._lines_name not in self._sizes:
            self._send_lines_soon().result()
        for shard in self._shards:
            shard.result()
        self._put_manifest()
        self._check_all_there()
        return self.place

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._lines_pool.shutdown(cancel_futures=True)
        self._records.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._put_manifest()

    def _put_manifest(self) -> None:
        """Store the manifest that waits, if one does."""
        with self._manifest_lock:
            text, self._waiting_manifest = self._waiting_manifest, None
            if text is not None:
                self._remote.put(MANIFEST, text)
                self._sizes[MANIFEST] = len(text)

    def _send(self, name: str, path: Path) -> None:
        try:
            self._remote.put(name, path)
        finally:
            path.unlink(missing_ok=True)
            self._room.release()

    def _send_lines_soon(self) -> Future[None]:
        self._lines = self._lines_pool.submit(
            self._send_lines, self._num_lines_bytes, list(self._shards)
        )
        return self._lines

    def _send_lines(self, num_bytes: int, shards: list[Future[None]]) -> None:
        """Store the first ``num_bytes`` of lines, once the shards that they point at are there."""
        for shard in shards:
            shard.result()
        self._put_manifest()
        part = self._folder / "part"
        shutil.copyfile(self._folder / self._lines_name, part)
        os.truncate(part, num_bytes)  # more may have been added meanwhile
        self._remote.put(self._lines_name, part)
        self._sizes[self._lines_name] = self._sent_lines_bytes = num_bytes

    def _raise_failure(self) -> None:
        # looked at once: one that fails meanwhile must not be dropped unheard
        under_way = []
        for shard in self._shards:
            if shard.done():
                shard.result()
            else:
                under_way.append(shard)
        if self._lines is not None and self._lines.done():
            self._lines.result()
        self._shards = under_way

    def _check_all_there(self) -> None:
        there = self._remote.objects()
        for name, size in self._sizes.items():
            found = there.get(name)
            if found is None or found.size != size:
                what = "it is not there" if found is None else f"{found.size} bytes are there"
                raise RunWriteError(
                    f"of {name} {size} bytes were stored, but {what}",
                    where=str(self.place / name),
                    hint="does something else write to this place, or remove from it?",
                )


def check_remote(place: Url, *, force: bool) -> None:
    """Raise RunExistsError unless nothing is below ``place``, or (with ``force``) a run."""
    _checked(Remote(place, refused=RunWriteError), place, force=force)


def _checked(remote: Remote, place: Url, *, force: bool) -> dict[str, Object]:
    import re

    remote.check_bucket()
    there = remote.objects()
    if not there:
        return {}
    if "" in there:
        raise RunExistsError(f"{place} exists and is an object", hint="choose another -o")
    if not force:
        raise RunExistsError(
            f"{place} exists already",
            hint="choose another place with -o, or pass --force to replace it",
        )
    files = [name for name in there if name == MANIFEST or is_records_name(name)]
    other = [name for name in there if name not in files and not re.match(SHARD_PATTERN, name)]
    if other or not files:
        what = f"holds {min(other)}" if other else "is not a run"
        raise RunExistsError(
            f"{place} {what}, so --force does not remove it",
            hint="choose another place with -o, or remove it yourself",
        )
    return there

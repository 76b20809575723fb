"""Where a run is written: a directory, an archive or an object store.

The writer makes shards, lines and manifests; a target stores them. Whether a place may be written
to is checked twice: before the model is loaded, so that a refusal costs nothing, and when the
writer begins.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from divergence.errors import RunExistsError, RunWriteError
from divergence.run.reader import Run
from divergence.run.schema.layout import (
    MANIFEST,
    SHARD_PATTERN,
    TENSORS,
    checked_name,
    is_records_name,
    records_name,
)
from divergence.run.storage.directory_target import DirectoryTarget, check_directory
from divergence.run.storage.location import Location, Url, archive_kind
from divergence.run.storage.packing import check_archive, write_archive
from divergence.run.storage.remote import Object, Remote
from divergence.run.storage.shard import write_shard
from divergence.run.writing.captured_tensor import ShardEntry

__all__ = ["Target", "check_target", "open_target", "partial_of"]


class Target(Protocol):
    """What the writer needs of a place. Each method raises OSError or RunWriteError.

    Called from one thread at a time, but for replace_manifest. Shards come before the lines that
    point at them; the target keeps that order for concurrent readers.
    """

    @property
    def place(self) -> Location:
        """Where what is written lies meanwhile."""

    def write_shard(self, name: str, pieces: Mapping[str, ShardEntry]) -> None:
        """Store a shard: whole under its name, or not at all."""

    def append_records(self, lines: bytes) -> None:
        """Add whole lines to records.jsonl: all of them or none."""

    def replace_manifest(self, text: bytes) -> None:
        """Store manifest.json: a reader meets the old or the new one, never a part."""

    def flush(self) -> Location:
        """Wait until all of the above can be read; returns where (what Run.open takes)."""

    def close(self) -> None:
        """Closes what is open, after the last manifest. An archive is packed here."""


def open_target(place: Location, *, force: bool, rank: int = 0) -> Target:
    """The target for ``place``, checked, emptied and ready to write. Raises as check_target.

    ``rank``: of several that write one run, the first opens it before the others.
    """
    if archive_kind(place) is not None:
        if rank == 0:
            check_target(place, force=force)
        return ArchiveTarget(place, force=force, rank=rank)
    if isinstance(place, Url):
        return RemoteTarget(place, force=force, rank=rank)
    return DirectoryTarget(place, force=force, rank=rank)


def check_target(place: Location, *, force: bool) -> None:
    """Raise RunExistsError unless ``place`` is free, empty, or (with ``force``) a run.

    Raises OSError, or RunWriteError, where it cannot be looked at.
    """
    if archive_kind(place) is not None:
        check_archive(place, force=force)
        check_directory(partial_of(place), force=force)
    elif isinstance(place, Url):
        _checked(Remote(place, refused=RunWriteError), force=force)
    else:
        check_directory(place, force=force)


def partial_of(place: Location) -> Path:
    """The directory in which the archive ``place`` is gathered."""
    if isinstance(place, Url):
        # a fixed name for a URL, so that a repeated capture finds what the last one left
        plain = "".join(c if c.isalnum() or c in ".-_" else "_" for c in str(place))
        owner = os.getuid() if hasattr(os, "getuid") else 0
        return Path(tempfile.gettempdir(), f"divergence-{owner}", f"{plain}.partial")
    return place.with_name(place.name + ".partial")


class _End(msgspec.Struct):
    """What of a manifest says that it is the last one."""

    complete: bool


class ArchiveTarget(DirectoryTarget):
    """The target for a name that ends in .tar or .zip: gathered in a directory, packed at the end.

    An archive is always a whole run: a capture that is killed or stopped leaves the directory
    ``NAME.partial``, which is a readable run like any other, and no archive. Packing needs the
    space of the run a second time. For an archive at a URL the directory lies where temporary files
    do (TMPDIR).
    """

    def __init__(self, place: Location, *, force: bool, rank: int = 0) -> None:
        super().__init__(partial_of(place), force=force, rank=rank)
        self._archive, self._packs = place, rank == 0  # when all ranks have written
        self._complete = False

    def replace_manifest(self, text: bytes) -> None:
        super().replace_manifest(text)
        self._complete = msgspec.json.decode(text, type=_End).complete

    def close(self) -> None:
        super().close()
        if self._complete and self._packs:
            run = Run.open(self.place)
            write_archive(run, self._archive)
            run.close()
            shutil.rmtree(self.place)


NUM_WAITING = 4
"""Finished shards that may lie here before the writer has to wait: bounds the local disk."""
GROWTH = 1.2
"""How much longer records.jsonl must be than what is stored before it is stored again."""


class RemoteTarget:
    """The target for a URL. Of several ranks the first empties it, before the others begin.

    Objects are stored whole or not at all, and cannot be added to. So each shard goes as an object
    of its own, in the background, as soon as it is finished, and its local copy is removed;
    ``records.jsonl`` is stored anew when it has grown by a fifth, after all shards that its lines
    point at (altogether some six times its size is sent); the manifest says ``complete: false``
    before anything else, and ``complete: true`` after everything else was found to be there in full
    length.

    What a kill can lose: the lines since the last fifth, and with them the tensors of those lines.
    The shards may be there; without lines they do not count.
    """

    def __init__(self, place: Url, *, force: bool, rank: int = 0) -> None:
        self.place = place
        self._remote = Remote(place, refused=RunWriteError)
        if rank == 0:
            replaced = _checked(self._remote, force=force)
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
            path = self._folder / checked_name(name, where=str(self.place))
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
        """Stores the waiting manifest, if any."""
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
        """Stores the first ``num_bytes`` of lines after the shards that they point at."""
        for shard in shards:
            shard.result()
        self._put_manifest()
        part = self._folder / "part"
        shutil.copyfile(self._folder / self._lines_name, part)
        os.truncate(part, num_bytes)  # more may have been added meanwhile
        self._remote.put(self._lines_name, part)
        self._sizes[self._lines_name] = self._sent_lines_bytes = num_bytes

    def _raise_failure(self) -> None:
        under_way = []  # made in one pass: a shard that fails meanwhile must not be dropped unheard
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
            stored = there.get(name)
            if stored is None or stored.size != size:
                state = "it is not there" if stored is None else f"{stored.size} bytes are there"
                raise RunWriteError(
                    f"of {name} {size} bytes were stored, but {state}",
                    where=str(self.place / name),
                    hint="does something else write to this place, or remove from it?",
                )


def _checked(remote: Remote, *, force: bool) -> dict[str, Object]:
    """The objects of the run that is to be replaced. RunExistsError unless nothing is below the
    URL, or (with ``force``) a run."""
    place = remote.url
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

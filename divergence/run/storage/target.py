"""Where a run is written, and what is done with its files there.

The writer makes shards, lines and manifests; a target puts them where they belong, so that the
writer is the same for a directory, an archive and an object store. What may stand at a place is
asked twice with the same answer: before the model is loaded, so that a refusal costs nothing, and
when the writer begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from divergence.run.storage.archive_place import check_archive, partial_of
from divergence.run.storage.archive_target import ArchiveTarget
from divergence.run.storage.directory_target import DirectoryTarget, check_directory
from divergence.run.storage.location import Location, Url, archive_kind
from divergence.run.storage.remote_target import RemoteTarget, check_remote
from divergence.run.writing.shard_entry import ShardEntry

__all__ = ["Target", "check_target", "open_target"]


class Target(Protocol):
    """What the writer asks of a place. Each method raises OSError, or RunWriteError with more.

    Called from one thread at a time, but for replace_manifest. Shards come before the lines that
    point at them; the target keeps that order for whoever reads meanwhile.
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
        """Let go of what is open, after the last manifest. An archive is packed here."""


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
        check_remote(place, force=force)
    else:
        check_directory(place, force=force)

"""A run written to one file: gathered in a directory beside it, packed at the end.

An archive is always a whole run: a capture that is killed or stopped leaves the directory
``NAME.partial``, which is a readable run like any other, and no archive. Packing needs the space
of the run a second time. For an archive at a URL the directory lies where temporary files do
(TMPDIR).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.run.storage.archive_place import partial_of
from divergence.run.storage.directory_target import DirectoryTarget
from divergence.run.storage.location import Location

if TYPE_CHECKING:
    from divergence.run.writing.shard_entry import ShardEntry

__all__ = ["ArchiveTarget"]


class _End(msgspec.Struct):
    complete: bool


class ArchiveTarget:
    """The target for a name that ends in .tar or .zip."""

    def __init__(self, place: Location, *, force: bool, rank: int = 0) -> None:
        self._archive, self._packs = place, rank == 0  # when all ranks have written
        self.place = partial_of(place)
        self._staged = DirectoryTarget(self.place, force=force, rank=rank)
        self._complete = False

    def write_shard(self, name: str, pieces: Mapping[str, ShardEntry]) -> None:
        self._staged.write_shard(name, pieces)

    def append_records(self, lines: bytes) -> None:
        self._staged.append_records(lines)

    def replace_manifest(self, text: bytes) -> None:
        self._staged.replace_manifest(text)
        self._complete = msgspec.json.decode(text, type=_End).complete

    def flush(self) -> Path:
        return self._staged.flush()

    def close(self) -> None:
        self._staged.close()
        if self._complete and self._packs:
            from divergence.run.reader import Run
            from divergence.run.storage.packing import write_archive

            run = Run.open(self.place)
            write_archive(run, self._archive)
            run.close()
            shutil.rmtree(self.place)

"""A run written to one file: gathered in a directory beside it, packed at the end.

An archive is always a whole run: a capture that is killed or stopped leaves the directory
``NAME.partial``, which is a readable run like any other, and no archive. Packing needs the space
of the run a second time. For an archive at a URL the directory lies where temporary files do
(TMPDIR).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.errors import RunExistsError
from divergence.run.storage.directory_target import DirectoryTarget
from divergence.run.storage.location import Location, Url

if TYPE_CHECKING:
    from divergence.run.writing.piece import Piece

__all__ = ["ArchiveTarget", "check_archive", "partial_of"]


class _End(msgspec.Struct):
    complete: bool


class ArchiveTarget:
    """The target for a name that ends in .tar or .zip."""

    def __init__(self, place: Location, *, force: bool, rank: int = 0) -> None:
        self._archive, self._packs = place, rank == 0  # when all ranks have written
        self.place = partial_of(place)
        self._staged = DirectoryTarget(self.place, force=force, rank=rank)
        self._complete = False

    def write_shard(self, name: str, pieces: Mapping[str, Piece]) -> None:
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


def partial_of(place: Location) -> Path:
    """Where what becomes the archive ``place`` is gathered."""
    if isinstance(place, Url):
        # one a URL, so that a capture that is tried again finds what the last one left
        plain = "".join(c if c.isalnum() or c in ".-_" else "_" for c in str(place))
        owner = os.getuid() if hasattr(os, "getuid") else 0
        return Path(tempfile.gettempdir(), f"divergence-{owner}", f"{plain}.partial")
    return place.with_name(place.name + ".partial")


def check_archive(place: Location, *, force: bool) -> None:
    """Raise RunExistsError unless nothing is at ``place``, or (with ``force``) a packed run."""
    if _is_free(place):
        return
    if not force:
        raise RunExistsError(
            f"{place} exists already",
            hint="choose another name with -o, or pass --force to replace it",
        )
    from divergence.errors import RunFormatError
    from divergence.run.storage.store import open_store

    try:
        open_store(place).close()
    except RunFormatError as error:
        raise RunExistsError(
            f"{place} is not a run, so --force does not remove it: {error.message}",
            hint="choose another name with -o, or remove it yourself",
        ) from error


def _is_free(place: Location) -> bool:
    if isinstance(place, Url):
        from divergence.errors import RunWriteError
        from divergence.run.storage.remote import Remote

        remote = Remote(place, refused=RunWriteError)
        remote.check_bucket()
        return remote.look() is None
    if place.is_symlink() or (place.exists() and not place.is_file()):
        raise RunExistsError(
            f"{place} exists and is not a file, which a run of this name would be",
            hint="choose another name with -o; one without .tar or .zip becomes a directory",
        )
    return not place.exists()

"""Where a run's files are read from: a directory, an archive, or either of them far away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from divergence.errors import RunFormatError
from divergence.run.command import command_line
from divergence.run.schema.layout import MANIFEST, checked_file, checked_name
from divergence.run.storage.blob import Blob, LocalBlob, Store
from divergence.run.storage.location import Location, Url

__all__ = ["open_store"]


class _Directory(Store):
    """A directory of this machine."""

    def __init__(self, place: Path) -> None:
        self.place: Path = place
        self.folder = place

    def has(self, name: str) -> bool:
        return os.path.lexists(self.place / checked_name(name, where=str(self.place)))

    def where(self, name: str) -> str:
        return str(self.place / name)

    def blob(self, name: str) -> Blob:
        return LocalBlob(checked_file(self.place, name))

    def open(self, name: str) -> BinaryIO:
        return open(checked_file(self.place, name), "rb")

    def stamp(self, name: str) -> tuple[int, ...]:
        status = os.lstat(checked_file(self.place, name))
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def open_store(place: Location) -> Store:
    """The store of the run at ``place``. RunFormatError where there is none."""
    if isinstance(place, Url):
        from divergence.run.storage.indirect import open_url

        store = open_url(place)
    else:
        store = _open_path(place)
    if not store.has(MANIFEST):
        store.close()
        if not isinstance(place, Url) and (place / "config.json").is_file():
            raise RunFormatError(
                f"{place} is not a run but a model",
                hint=command_line("capture", str(place), o="RUN", note="makes a run of it"),
            )
        inside = [] if isinstance(place, Url) else _runs_in(place)
        if inside:
            raise RunFormatError(
                f"{place} is not a run: it has no {MANIFEST}", hint=f"it holds {', '.join(inside)}"
            )
        raise RunFormatError(
            f"{place} is not a run: it has no {MANIFEST}",
            hint="give what `divergence capture MODEL -o RUN` wrote: a directory, or a .tar or "
            ".zip of one, or its URL",
        )
    return store


def _runs_in(folder: Path) -> list[str]:
    """The first runs directly inside: the folder of a diff is often meant to be one of them."""
    try:
        runs = sorted(path for path in folder.iterdir() if (path / MANIFEST).is_file())
    except OSError:
        return []
    return [str(path) for path in runs[:4]]


def _open_path(place: Path) -> Store:
    if place.is_dir():
        return _Directory(place)
    if not place.is_file():
        why = "is neither a directory nor a file" if place.exists() else "does not exist"
        raise RunFormatError(
            f"{place} {why}",
            hint="a run is the directory that `divergence capture MODEL -o RUN` wrote",
        )
    from divergence.run.storage.indirect import open_archive

    return open_archive(place)

"""Where an archive is to be written: may it stand there, and where is it gathered?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from divergence.errors import RunExistsError
from divergence.run.storage.location import Location, Url

__all__ = ["check_archive", "partial_of"]


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

"""The columns of a large run, kept in the user's cache so that the next opening need not read its
lines.

An index is made by whoever opens a large complete run, after every line and every place has been
checked, and lies in the cache folder of this user alone: it is never read from a run, copied with
one or packed, since a run's sender may write anything into it. It is found by the run's id,
digest and place, and is good for as long as all files of the run have the size, times and number on
disk that they had when they were checked. A portion of lines is still read by its digest. The
folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from divergence._version import __version__
from divergence.errors import RunFormatError
from divergence.run.columns import Columns, Portion, PortionSource
from divergence.run.schema.layout import MANIFEST, records_name
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.parsing import record_check
from divergence.run.storage.blob import Store

__all__ = ["Index", "index_folder"]

Stamps = dict[str, tuple[int, ...]]
"""By file of the run: what changes whenever the file does."""

_FORMAT = 2
_MOST_FILES = 32
"""Indices that are kept; the one not written for longest goes first. One of a million records
takes some 40 MB."""
_KEPT = ("begin", "pass", "sample", "step", "rank", "site", "kind", "flags")
"""The columns that are asked for once places are checked."""
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, RunFormatError)
"""What an index that was cut off raises, or one of files that are gone."""
_PORTION = [("blob", "u4"), ("begin", "u8"), ("num_bytes", "u8"), ("digest", "u8"), ("first", "u8")]


class _Names(msgspec.Struct, forbid_unknown_fields=True):
    """What the columns' numbers mean."""

    format: int
    version: str
    stamps: Stamps
    num_rows: int
    sites: list[str]
    kinds: list[tuple[str, tuple[int, ...]]]
    passes: list[str]
    shards: list[str | None]


def index_folder() -> Path:
    """Where indices lie: ``divergence/indices`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Raises
    OSError where this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return cache / "divergence" / "indices"


class Index:
    """The index of the run in ``store``, a directory of this machine. Raises RunFormatError and
    OSError where the files it is made of are not there."""

    def __init__(self, store: Store, folder: Path, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        identity = f"{manifest.id}\n{manifest.digest}\n{folder.resolve()}"
        key = xxhash.xxh3_128_hexdigest(identity.encode("utf-8", "surrogatepass"))
        self._path = index_folder() / f"{key}.index"
        # taken before any line is read, so that a change during the read makes the index stale
        self._lines = self._stamps([MANIFEST, *map(records_name, range(manifest.num_ranks))])

    def _stamps(self, names: Iterable[str]) -> Stamps:
        return {name: self._store.stamp(name) for name in names}

    def save(self, columns: Columns, shards: Collection[str]) -> None:
        """Keeps checked columns; ``shards``: all that are in use. Where the cache cannot be written
        to, nothing is kept."""
        with contextlib.suppress(OSError, RunFormatError):
            names = _Names(
                format=_FORMAT, version=__version__, stamps=self._lines | self._stamps(shards),
                num_rows=columns.num_rows, sites=list(columns.sites), kinds=list(columns.kinds),
                passes=list(columns.passes), shards=list(columns.shards),
            )  # fmt: skip
            rows = [(*portion.source, *portion[1:]) for portion in columns.portions]
            arrays = {name: columns.col[name] for name in _KEPT} | {
                "names": np.frombuffer(msgspec.json.encode(names), np.uint8),
                "portions": np.array(rows, _PORTION),
                "nonfinite": np.array(list(columns.nonfinite.items()), np.int64).reshape(-1, 2),
            }
            folder = self._path.parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)
            try:
                with open(handle, "wb") as file:
                    np.savez(file, **arrays)
                os.replace(temporary, self._path)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            # a process that was killed leaves a .tmp, which goes in its turn
            files = [*folder.glob("*.index"), *folder.glob("*.tmp")]
            for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)[:-_MOST_FILES]:
                path.unlink(missing_ok=True)

    def load(self) -> Columns | None:
        """The columns that were kept; None where there are none, where another user could have
        written them, or where any file of the run has changed since."""
        try:
            with open(self._path, "rb") as file:
                if not _is_own(file.fileno()):
                    return None
                with np.load(file, allow_pickle=False) as arrays:
                    names = msgspec.json.decode(arrays["names"].tobytes(), type=_Names)
                    if not self._is_current(names):
                        return None
                    columns = Columns(record_check(self._manifest))
                    columns.num_rows = names.num_rows
                    columns.col = {name: arrays[name] for name in _KEPT}
                    for row in arrays["portions"].tolist():
                        columns.portions.append(Portion(PortionSource(*row[:2]), *row[2:]))
                    columns.nonfinite.update(map(tuple, arrays["nonfinite"].tolist()))
        except _DAMAGED:
            return None
        for numbering, things in (
            (columns.sites, names.sites), (columns.kinds, names.kinds),
            (columns.passes, names.passes), (columns.shards, names.shards),
        ):  # fmt: skip
            numbering.update(zip(things, range(len(things)), strict=True))
        fits = all(len(column) == columns.num_rows for column in columns.col.values())
        return columns if fits and columns.portions else None

    def _is_current(self, names: _Names) -> bool:
        shards = names.stamps.keys() - self._lines.keys()
        return (
            (names.format, names.version) == (_FORMAT, __version__)
            and names.num_rows == self._manifest.sizes.num_records
            and names.stamps == self._lines | self._stamps(shards)
        )

    def discard(self) -> None:
        """Removes the index, because the lines no longer match it."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def _is_own(file: int) -> bool:
    """Can nobody but this user have written the file?"""
    status = os.fstat(file)
    return not hasattr(os, "getuid") or (
        status.st_uid == os.getuid() and not status.st_mode & 0o022
    )

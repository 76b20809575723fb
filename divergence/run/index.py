"""The columns of a large run, kept beside its lines so that the next opening need not read these.

``records.index`` is a cache of one machine: whoever opens a large complete run and may write to its
directory makes it, after every line and every place has been checked. It is good for as long as all
files of the run have the size and the time of last change that they had then; a copy that did not
keep the times, or another version of this program, reads the lines again. A portion of lines is
still read by its digest. It is no part of the run: archives leave it out, and it may be deleted.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import numpy as np

from divergence._version import __version__
from divergence.errors import RunFormatError
from divergence.run.columns import Columns, Portion, PortionSource
from divergence.run.schema.layout import INDEX, MANIFEST, checked_shard_name, records_name
from divergence.run.schema.manifest import Manifest
from divergence.run.schema.parsing import record_check
from divergence.run.storage.blob import Store

__all__ = ["Index"]

Stamps = dict[str, tuple[int, int]]
"""By file of the run: its size, and when it was last changed (ns)."""

_FORMAT = 1
_KEPT = ("begin", "pass", "sample", "step", "rank", "site", "kind", "flags")
"""The columns that are asked for once places are checked."""
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, RunFormatError)
"""What a damaged index raises, or one of files that are gone."""
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


class Index:
    """The index of the run in ``store``, a directory of this machine. Raises RunFormatError and
    OSError where the files it is made of are not there."""

    def __init__(self, store: Store, folder: Path, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._path = folder / INDEX
        # taken before any line is read, so that a change during the read makes the index stale
        self._lines = self._stamps([MANIFEST, *map(records_name, range(manifest.num_ranks))])

    def _stamps(self, names: Iterable[str]) -> Stamps:
        return {name: self._store.stamp(name) for name in names}

    def save(self, columns: Columns, shards: Collection[str]) -> None:
        """Keeps checked columns; ``shards``: all that are in use. Where the directory cannot be
        written to, nothing is kept."""
        temporary = self._path.with_name(f"{INDEX}.{os.getpid()}.tmp")
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
            for left in self._path.parent.glob(f"{INDEX}.*.tmp"):  # by a process that was killed
                left.unlink()
            try:
                with open(temporary, "xb") as file:
                    np.savez(file, **arrays)
                os.replace(temporary, self._path)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def load(self) -> Columns | None:
        """The columns that were kept; None where there are none, or any file has changed since."""
        if self._path.is_symlink() or not self._path.is_file():
            return None
        try:
            with open(self._path, "rb") as file, np.load(file, allow_pickle=False) as held:
                names = msgspec.json.decode(held["names"].tobytes(), type=_Names)
                if not self._is_current(names):
                    return None
                columns = Columns(record_check(self._manifest))
                columns.num_rows = names.num_rows
                columns.col = {name: held[name] for name in _KEPT}
                for row in held["portions"].tolist():
                    columns.portions.append(Portion(PortionSource(*row[:2]), *row[2:]))
                columns.nonfinite.update(map(tuple, held["nonfinite"].tolist()))
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
        for name in shards:
            checked_shard_name(name, where=INDEX)
        return (
            (names.format, names.version) == (_FORMAT, __version__)
            and names.num_rows == self._manifest.sizes.num_records
            and names.stamps == self._lines | self._stamps(shards)
        )

    def discard(self) -> None:
        """Removes the index, because the lines no longer match it."""
        with contextlib.suppress(OSError):
            self._path.unlink()

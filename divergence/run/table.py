"""Records of a large run as columns, kept beside it so that it opens at once."""

from __future__ import annotations

import bisect
import contextlib
import math
import operator
import os
import tempfile
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import xxhash

from divergence._version import __version__
from divergence.errors import RunFormatError
from divergence.numerics.formats import format_named
from divergence.run.blobs import Blob, Store
from divergence.run.contents import (
    BROKEN_JSON,
    UNSOUND,
    SiteCounts,
    StoredRecords,
    call_passes,
    check_digest,
    check_part,
    count_passes,
    count_sites,
    each_of,
    num_kept,
    parts_of,
    portions,
    record_check,
    records_at,
    shards_of,
    site_names,
    sizes_of,
    with_nonfinite,
)
from divergence.run.manifest import Manifest, Sizes
from divergence.run.record import (
    MANIFEST,
    MAX_LINE_BYTES,
    SHARD_DTYPES,
    Checked,
    Coordinates,
    Numbering,
    PassName,
    Record,
    RecordCheck,
    UnsoundError,
    checked_shard_name,
    records_name,
)
from divergence.run.shards import Shard, has_header

# What is kept of every record of a large run: numbers, in columns.
#
# Some 25 bytes a record: what tells records apart (pass, sample, step, site, rank), their kind
# (dtype and shape), whether there is a call, bytes or a sketch, and where the line begins; until
# places are checked also the shard and the digest, which is the key in it.

Array = np.ndarray[Any, Any]

CALL, KEPT, SKETCH = 1, 2, 4
"""Bits of the column ``flags``: is there a call, is anything on disk, is there a sketch?"""


class PortionSource(NamedTuple):
    """Where a portion of lines begins: in which file, and at which byte."""

    blob: int
    begin: int


class Portion(NamedTuple):
    """Whole lines of one file, without the last line end."""

    source: PortionSource
    num_bytes: int
    digest: int
    first: int
    """Row of its first record."""


_key, _shard = operator.attrgetter("key"), operator.attrgetter("shard")


def _codes(codes: Numbering, things: Sequence[object]) -> Array:
    return _numbers(list(map(codes.__getitem__, things)))


def _numbers(numbers: Sequence[int]) -> Array:
    if numbers.count(numbers[0]) == len(numbers):  # as samples and ranks mostly are
        return np.full(len(numbers), numbers[0], np.min_scalar_type(numbers[0]))
    column = np.fromiter(numbers, np.int64, len(numbers))
    # the smallest type without sign that holds them
    return column.astype(np.min_scalar_type(int(column.max(initial=0))), copy=False)


class Columns:
    """What is kept of every record. ``add`` portions in order, then ``join``."""

    def __init__(self, check: RecordCheck) -> None:
        self.num_rows = 0
        self.portions: list[Portion] = []
        self.sites, self.kinds = check.sites, check.kinds
        self.passes, self.shards = Numbering(), Numbering()
        self.nonfinite: dict[int, int] = {}
        """By row, where there are any."""
        self.odd_keys: dict[int, str] = {}
        """By row: keys of places that are not the digest of the bytes."""
        self.col: dict[str, Array] = {}
        self._parts: defaultdict[str, list[Array]] = defaultdict(list)

    def add(self, checked: Checked, lines: memoryview, source: PortionSource) -> None:
        """Raises UnsoundError where there is not a line for each record."""
        (passes, samples, steps, _, _, _, _, summaries, places, xxh3s, _, sketches, ranks, _, calls,
         _) = checked.fields  # fmt: skip
        first, num = self.num_rows, len(passes)
        digest = xxhash.xxh3_64_intdigest(lines)
        ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == 10)
        begins = np.zeros(len(ends) + 1, np.uint32)
        begins[1:] = ends + 1
        longest = int(np.diff(begins, append=len(lines) + 1).max())
        if len(begins) != num or longest > MAX_LINE_BYTES:
            raise UnsoundError
        self.portions.append(Portion(source, len(lines), digest, first))
        self.num_rows += num
        if places.count(None):
            keys = [None if place is None else place.key for place in places]
            shards = [None if place is None else place.shard for place in places]
        else:
            keys, shards = list(map(_key, places)), list(map(_shard, places))
        kept = _codes(self.shards, shards)
        flags = KEPT * (kept != self.shards.get(None, -1)).astype(np.uint8)
        for bits, ones in ((CALL, calls), (KEPT | SKETCH, sketches)):
            if ones.count(None) < num:
                flags |= bits * np.array([value is not None for value in ones], np.uint8)
        for name, column in (
            ("begin", begins),
            ("pass", _codes(self.passes, passes)),
            ("sample", _numbers(samples)),
            ("step", _numbers(steps)),
            ("rank", _numbers(ranks)),
            ("site", _numbers(checked.sites)),
            ("kind", _numbers(checked.kinds)),
            ("shard", kept),
            ("xxh3", np.frombuffer(checked.xxh3, "V16")),
            ("flags", flags),
        ):
            self._parts[name].append(column)
        if keys != list(xxh3s):
            for row, (key, xxh3) in enumerate(zip(keys, xxh3s, strict=True), first):
                if key != xxh3 and key is not None:
                    self.odd_keys[row] = key
        if any([s and (s.num_nan or s.num_posinf or s.num_neginf) for s in summaries]):
            for row, s in enumerate(summaries, first):
                if s is not None and (number := s.num_nan + s.num_posinf + s.num_neginf):
                    self.nonfinite[row] = number

    def join(self) -> None:
        """Makes one column of the portions'. Raises UnsoundError where two records have the same
        coordinates, or where telling that would take more than 64 bits."""
        if not self.num_rows:
            raise UnsoundError  # or nothing is wrong: there are no columns of nothing
        for name in list(self._parts):
            self.col[name] = np.concatenate(self._parts.pop(name))
        identity, num = np.zeros(self.num_rows, np.int64), 1
        for name in ("rank", "pass", "sample", "step", "site"):
            size = int(self.col[name].max()) + 1
            num *= size
            if num >= 1 << 63:
                raise UnsoundError
            identity *= size
            identity += self.col[name].astype(np.int64)
        identity.sort()
        if (identity[1:] == identity[:-1]).any():
            raise UnsoundError

    def keys(self, rows: Array) -> list[str]:
        """The keys of the places of these rows, which all have one."""
        text = self.col["xxh3"][rows].tobytes().hex()
        keys = [text[at : at + 32] for at in range(0, len(text), 32)]
        if self.odd_keys:
            keys = [
                self.odd_keys.get(row, key) for row, key in zip(rows.tolist(), keys, strict=True)
            ]
        return keys


# The columns of a large run, kept in the user's cache so that the next opening need not read its
# lines.
#
# An index is made by whoever opens a large complete run, after every line and every place has been
# checked, and lies in the cache folder of this user alone: it is never read from a run, copied with
# one or packed, since a run's sender may write anything into it. It is found by the run's id,
# digest and place, and is good for as long as all files of the run have the size, times and number
# on disk that they had when they were checked. A portion of lines is still read by its digest. The
# folder may be deleted at any time.

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
                status = os.fstat(file.fileno())
                if hasattr(os, "getuid") and (
                    status.st_uid != os.getuid() or status.st_mode & 0o022
                ):
                    return None
                with np.load(file, allow_pickle=False) as arrays:
                    names = msgspec.json.decode(arrays["names"].tobytes(), type=_Names)
                    shards = names.stamps.keys() - self._lines.keys()
                    if (
                        (names.format, names.version) != (_FORMAT, __version__)
                        or names.num_rows != self._manifest.sizes.num_records
                        or names.stamps != self._lines | self._stamps(shards)
                    ):
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

    def discard(self) -> None:
        """Removes the index, because the lines no longer match it."""
        with contextlib.suppress(OSError):
            self._path.unlink()


# The records of a large run, decoded when they are asked for.
#
# Opening a run reads and checks every line. As objects, a million records take more than half a
# gigabyte and most are never asked for, so of a large run columns are kept (columns.py): what tells
# records apart, and where each line begins. A record is decoded again when it is asked for. The
# files are read in portions of whole lines; each must then still have the bytes that were checked,
# by a digest.
#
# Of very large runs the columns are kept for the next opening (index.py).

KEPT_BYTES = 64 << 20
"""Of lines: some 150,000 records. Smaller runs are read quickly, so no index is written."""


def read_table(store: Store, manifest: Manifest) -> tuple[RecordTable, bool] | None:
    """The records of all ranks, and whether a last line of an incomplete run was cut off. None
    where anything is wrong: reading line by line says what."""
    index = None
    if store.folder is not None and manifest.complete:
        index = Index(store, store.folder, manifest)
        kept = index.load()
        if kept is not None:
            names = map(records_name, range(manifest.num_ranks))
            return RecordTable(kept, list(map(store.blob, names)), index, known=True), False
    check, blobs, torn = record_check(manifest), list[Blob](), False
    columns, digests = Columns(check), dict[str, str]()
    decoder = msgspec.json.Decoder(Record)
    try:
        for rank in range(manifest.num_ranks):
            name = records_name(rank)
            if not manifest.complete and not store.has(name):
                continue
            blobs.append(store.blob(name))
            check.rank, begin = rank, 0
            hasher = xxhash.xxh3_128()
            for lines, ended in portions(store, name, hasher):
                try:
                    decoded = decoder.decode_lines(lines)
                except BROKEN_JSON:
                    if ended or manifest.complete:
                        return None
                    torn = True
                    break
                if not decoded:
                    return None
                columns.add(check.all(decoded), lines, PortionSource(len(blobs) - 1, begin))
                begin += len(lines) + 1
            digests[name] = hasher.hexdigest()
        columns.join()
    except (*UNSOUND, OverflowError):
        return None
    if manifest.complete and columns.num_rows != manifest.sizes.num_records:
        return None
    for name, digest in digests.items():
        check_digest(store, manifest, name, digest)
    return RecordTable(columns, blobs, index), torn


class RecordTable(StoredRecords):
    """``columns`` of the lines in ``blobs``, and the records that were asked for. ``index``:
    where the columns may be kept. ``known``: they come from there, checked."""

    def __init__(
        self, columns: Columns, blobs: Sequence[Blob], index: Index | None, *, known: bool = False
    ) -> None:
        self._columns, self._blobs = columns, blobs
        self._index, self._known = index, known
        self._col = columns.col
        self._decoder = msgspec.json.Decoder(Record)
        self._firsts = [portion.first for portion in columns.portions]
        self._held: dict[int, list[Record]] = {}
        """By portion."""
        self._single: dict[int, Record] = {}
        """By row: asked for alone."""
        self._rows_at: dict[int, Array] = {}
        """By the code of a site."""
        self._same: dict[Any, Any] = {}
        """Names and shapes that records share."""
        self._last: tuple[int, bytes] = (-1, b"")
        self._lock = threading.RLock()

    # -- a sequence ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._columns.num_rows

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self._at(row) for row in range(len(self))[index]]
        return self._at(range(len(self))[index])

    def __iter__(self) -> Iterator[Record]:
        for number in range(len(self._firsts)):
            yield from self._portion(number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(Record.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def each(self) -> Iterator[Record]:
        """All in order; none is kept."""
        for number in range(len(self._firsts)):
            yield from self._held.get(number) or self._decoder.decode_lines(self._lines(number))

    def _portion(self, number: int) -> list[Record]:
        with self._lock:
            records = self._held.get(number)
            if records is None:
                records = self._decoder.decode_lines(self._lines(number))
                for record in records:
                    self._share(record)
                first = self._firsts[number]
                if self._single:
                    records = [self._single.pop(row, rec) for row, rec in enumerate(records, first)]
                self._held[number] = records
            return records

    def _at(self, row: int) -> Record:
        number = bisect.bisect_right(self._firsts, row) - 1
        with self._lock:
            if number in self._held:
                return self._held[number][row - self._firsts[number]]
            record = self._single.get(row)
            if record is None:
                lines, begin = self._lines(number), int(self._col["begin"][row])
                end = lines.find(b"\n", begin)
                line = lines[begin : end if end >= 0 else None]
                record = self._single[row] = self._decoder.decode(line)
                self._share(record)
            return record

    def _lines(self, number: int) -> bytes:
        """A portion as it was checked. Raises RunFormatError where it is another one now."""
        with self._lock:
            if self._last[0] != number:
                portion = self._columns.portions[number]
                blob = self._blobs[portion.source.blob]
                try:
                    lines = blob.read(portion.source.begin, portion.num_bytes)
                except OSError as error:
                    raise RunFormatError(f"cannot be read: {error}", where=blob.name) from error
                if xxhash.xxh3_64_intdigest(lines) != portion.digest:
                    if self._index is not None and self._known:
                        self._index.discard()
                    raise RunFormatError(
                        "it was changed while it was read", where=blob.name,
                        hint="run the command again",
                    )  # fmt: skip
                self._last = number, lines
            return self._last[1]

    def _share(self, record: Record) -> None:
        """Puts one object in place of equal names and shapes."""
        same, put, place = self._same, msgspec.structs.force_setattr, record.place
        put(record, "site", same.setdefault(record.site, record.site))
        put(record, "dtype", same.setdefault(record.dtype, record.dtype))
        put(record, "shape", same.setdefault(record.shape, record.shape))
        if place is not None:
            put(place, "shard", same.setdefault(place.shard, place.shard))
            if place.key == record.xxh3:
                put(place, "key", record.xxh3)

    # -- what is asked of all --------------------------------------------------------------------

    def count_passes(self) -> dict[str, int]:
        counts, firsts = _tally(self._col["pass"], len(self._columns.passes))
        names = list(self._columns.passes)
        return {names[code]: int(counts[code]) for code in np.argsort(firsts, kind="stable")}

    def count_sites(self) -> list[SiteCounts]:
        passes, kinds = list(self._columns.passes), list(self._columns.kinds)
        num = len(passes)
        both = self._col["site"].astype(np.int64) * num + self._col["pass"]
        counts, firsts = _tally(both, num * len(self._columns.sites))
        bad: defaultdict[int, int] = defaultdict(int)
        for row, number in self._columns.nonfinite.items():
            bad[int(self._col["site"][row])] += number
        sites = []
        for code, site in enumerate(self._columns.sites):
            own, at = counts[code * num :][:num], firsts[code * num :][:num]
            held = {passes[n]: int(own[n]) for n in np.argsort(at, kind="stable") if own[n]}
            kind = kinds[self._col["kind"][at.min()]]
            sites.append(SiteCounts(site, kind[0], kind[1], held, bad[code]))
        return sites

    def site_names(self) -> set[str]:
        return set(self._columns.sites)

    def call_passes(self) -> set[PassName]:
        codes = np.unique(self._col["pass"][self._col["flags"] & CALL != 0])
        names = list(self._columns.passes)
        return {names[code] for code in codes}

    def records_at(self, sites: Collection[str]) -> list[Record]:
        known = self._columns.sites
        rows = [self._rows_of(known[site]) for site in set(sites) if site in known]
        return [self._at(row) for row in np.sort(np.concatenate(rows)).tolist()] if rows else []

    def nonfinite(self) -> list[Record]:
        return [self._at(row) for row in self._columns.nonfinite]

    def find(self, coordinates: Coordinates) -> Record | None:
        pass_, sample, step, site = coordinates
        code, at = self._columns.sites.get(site), self._columns.passes.get(pass_)
        if code is None or at is None:
            return None
        rows = self._rows_of(code)
        for name, wanted in (("step", step), ("sample", sample), ("pass", at)):
            rows = rows[self._col[name][rows] == wanted]
        return self._at(int(rows[-1])) if len(rows) else None

    def _rows_of(self, code: int) -> Array:
        rows = self._rows_at.get(code)
        if rows is None:
            rows = self._rows_at[code] = np.flatnonzero(self._col["site"] == code)
        return rows

    def shards(self) -> set[str]:
        names = {name for name in self._columns.shards if name is not None}
        return names | {part.place.shard for rec in self._sketched() for part in parts_of(rec)}

    def num_kept(self) -> int:
        return int(np.count_nonzero(self._col["flags"] & KEPT))

    def _sketched(self) -> list[Record]:
        return [self._at(row) for row in np.flatnonzero(self._col["flags"] & SKETCH).tolist()]

    # -- places ----------------------------------------------------------------------------------

    def places_are_sound(
        self, shard_of: Callable[[Record, str], Shard], blob_of: Callable[[str], Blob]
    ) -> bool:
        """Is in the shards what the records say? False where one is not sound: going through all
        records says which and why."""
        if self._known:
            return True
        try:
            shard = self._col["shard"]
            order = np.argsort(shard, kind="stable")
            bounds = np.searchsorted(shard[order], np.arange(len(self._columns.shards) + 1))
            for code, name in enumerate(self._columns.shards):
                if name is not None:
                    rows = order[bounds[code] : bounds[code + 1]]
                    checked_shard_name(name, where="")
                    kinds = self._col["kind"][rows].tolist()
                    pairs = list(dict.fromkeys(zip(self._columns.keys(rows), kinds, strict=True)))
                    usual = self._columns.odd_keys.keys().isdisjoint(rows.tolist())
                    # is its header, byte for byte, as it is written? That is sooner told than read
                    if not (usual and has_header(blob_of(name), pairs, list(self._columns.kinds))):
                        self._check_shard(shard_of(self._at(int(rows[0])), name), rows)
            for record in self._sketched():
                part = parts_of(record)[-1]
                check_part(shard_of(record, part.place.shard), part, where="")
        except (RunFormatError, KeyError, OSError, OverflowError):
            return False
        return True

    def _check_shard(self, shard: Shard, rows: Array) -> None:
        """Raises RunFormatError, or KeyError for a missing tensor."""
        entries = list(map(shard.entries.__getitem__, self._columns.keys(rows)))
        codes = {(SHARD_DTYPES.get(k[0]), k[1]): code for k, code in self._columns.kinds.items()}
        said = np.array([codes.get((entry.dtype, entry.shape), -1) for entry in entries])
        held = np.array([end - begin for begin, end in [entry.data_offsets for entry in entries]])
        kinds = self._col["kind"][rows]
        fits = (said == kinds) & (held == self._sizes()[kinds])
        for row in rows[~fits].tolist():
            check_part(shard, parts_of(self._at(row))[0], where="")

    def _sizes(self) -> Array:
        if "size" not in self._col:
            kinds = self._columns.kinds
            sizes = [math.prod(shape) * format_named(dtype).itemsize for dtype, shape in kinds]
            self._col["size"] = np.array(sizes, np.int64)
        return self._col["size"]

    def sizes(self) -> Sizes:
        if self._columns.odd_keys or "xxh3" not in self._col or (self._col["flags"] & SKETCH).any():
            return sizes_of(self.each())
        placed = np.flatnonzero(self._col["flags"] & KEPT)
        places = np.empty(len(placed), [("shard", np.uint32), ("xxh3", "V16")])
        places["shard"], places["xxh3"] = self._col["shard"][placed], self._col["xxh3"][placed]
        _, kept = np.unique(places.view(f"V{places.itemsize}"), return_index=True)
        sizes, kinds = self._sizes(), self._col["kind"]
        return Sizes(
            num_records=len(self),
            num_tensors=len(kept),
            num_shards=len(np.unique(places["shard"])),
            stored_bytes=sum(sizes[kinds[placed[kept]]].tolist()),
            seen_bytes=sum(sizes[kinds].tolist()),
        )

    def finish(self) -> None:
        for name in ("xxh3", "shard"):
            self._col.pop(name, None)
        self._columns.odd_keys.clear()
        is_large = sum(blob.size for blob in self._blobs) >= KEPT_BYTES
        if is_large and self._index is not None and not self._known:
            self._index.save(self._columns, self.shards())


each_of.register(RecordTable, RecordTable.each)
count_passes.register(RecordTable, RecordTable.count_passes)
count_sites.register(RecordTable, RecordTable.count_sites)
site_names.register(RecordTable, RecordTable.site_names)
call_passes.register(RecordTable, RecordTable.call_passes)
records_at.register(RecordTable, RecordTable.records_at)
num_kept.register(RecordTable, RecordTable.num_kept)
shards_of.register(RecordTable, RecordTable.shards)
sizes_of.register(RecordTable, RecordTable.sizes)
with_nonfinite.register(RecordTable, RecordTable.nonfinite)


def _tally(codes: Array, num: int) -> tuple[Array, Array]:
    """How often each of ``num`` codes appears, and where first (behind the end: nowhere)."""
    firsts = np.full(num, len(codes))
    firsts[codes[::-1]] = np.arange(len(codes))[::-1]
    return np.bincount(codes, minlength=num), firsts

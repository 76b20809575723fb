"""The records of a large run, decoded when they are asked for.

Opening a run reads and checks every line. As objects, a million records take more than half a
gigabyte and most are never asked for, so of a large run columns are kept (columns.py): what tells
records apart, and where each line begins. A record is decoded again when it is asked for. The files
are read in portions of whole lines; each must then still have the bytes that were checked, by a
digest.

Of very large runs the columns are kept for the next opening (index.py).
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
import xxhash

from divergence.errors import RunFormatError
from divergence.numerics.formats import format_named
from divergence.run.columns import CALL, KEPT, SKETCH, Array, Columns, PortionSource
from divergence.run.index import Index
from divergence.run.schema.contents import (
    SiteCounts,
    StoredRecords,
    check_part,
    parts_of,
    sizes_counted,
)
from divergence.run.schema.layout import SHARD_DTYPES, checked_shard_name, records_name
from divergence.run.schema.manifest import Manifest, Sizes
from divergence.run.schema.parsing import BROKEN_JSON, UNSOUND, check_digest, portions, record_check
from divergence.run.schema.record import Coordinates, PassName, Record
from divergence.run.storage.blob import Blob, Store
from divergence.run.storage.shard import Shard, has_header

__all__ = ["KEPT_BYTES", "RecordTable", "read_table"]

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
        for number in range(len(self._firsts)):
            yield from self._held.get(number) or self._decoder.decode_lines(self._lines(number))

    def _portion(self, number: int) -> list[Record]:
        """The records of a portion, which are kept from now on."""
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
                    if not self._is_as_written(blob_of(name), rows):
                        self._check_shard(shard_of(self._at(int(rows[0])), name), rows)
            for record in self._sketched():
                part = parts_of(record)[-1]
                check_part(shard_of(record, part.place.shard), part, where="")
        except (RunFormatError, KeyError, OSError, OverflowError):
            return False
        return True

    def _is_as_written(self, blob: Blob, rows: Array) -> bool:
        """Has the shard, byte for byte, the header that ``write_shard`` makes of these records?
        That is sooner told than read."""
        if not self._columns.odd_keys.keys().isdisjoint(rows.tolist()):
            return False
        kinds = self._col["kind"][rows].tolist()
        pairs = list(dict.fromkeys(zip(self._columns.keys(rows), kinds, strict=True)))
        return has_header(blob, pairs, list(self._columns.kinds))

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
        """Bytes of a tensor, by kind."""
        if "size" not in self._col:
            kinds = self._columns.kinds
            sizes = [math.prod(shape) * format_named(dtype).itemsize for dtype, shape in kinds]
            self._col["size"] = np.array(sizes, np.int64)
        return self._col["size"]

    def sizes(self) -> Sizes:
        if self._columns.odd_keys or "xxh3" not in self._col or (self._col["flags"] & SKETCH).any():
            return sizes_counted(self.each())
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


def _tally(codes: Array, num: int) -> tuple[Array, Array]:
    """How often each of ``num`` codes appears, and where first (behind the end: nowhere)."""
    firsts = np.full(num, len(codes))
    firsts[codes[::-1]] = np.arange(len(codes))[::-1]
    return np.bincount(codes, minlength=num), firsts

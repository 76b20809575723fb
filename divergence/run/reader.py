"""Reading a run, strictly: what is damaged is named, never guessed around.

Opening reads the manifest, every record line and every shard's header, so that a
record without bytes is found before any number is printed. Tensors are views of
memory maps, or of ranges fetched from a URL; each is checked against its checksum the
first time it is read.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from divergence.errors import RunFormatError, UsageError
from divergence.numerics.formats import FORMATS, format_named
from divergence.run.contents import (
    Content,
    Part,
    check_part,
    find_content,
    parts_of,
    records_by_content,
    verify_run,
    why_no_bytes,
)
from divergence.run.fingerprint import digest_tensor
from divergence.run.layout import (
    MANIFEST,
    MAX_LINE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_NUMEL,
    RECORDS,
    checked_shard_name,
)
from divergence.run.location import Location, Url, location_of
from divergence.run.manifest import SCHEMA_VERSION, Manifest
from divergence.run.ranges import SPAN_BYTES
from divergence.run.record import Coordinates, Record
from divergence.run.shard import Shard
from divergence.run.site import natural_key, near_names
from divergence.run.store import Store, open_store

if TYPE_CHECKING:
    import torch

__all__ = ["Run"]


_BROKEN_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Version(msgspec.Struct):
    schema_version: int


class Run:
    """One recorded execution. ``Run.open(path)``; then ``manifest``, ``records``, ``read``.

    ``torn_tail``: the last record line of an incomplete run was cut off and left out.
    """

    def __init__(
        self, path: Location, manifest: Manifest, records: list[Record], *,
        torn_tail: bool = False, store: Store | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._store = store
        self.manifest = manifest
        self.records = records
        self.torn_tail = torn_tail
        self._shards: dict[str, Shard] = {}
        self._digests: dict[tuple[str, str], str] = {}
        self._by_coordinates: dict[Coordinates, Record] = {}
        self._by_content: dict[Content, Record] = {}
        self._lender: Run | None = None

    def __repr__(self) -> str:
        state = "complete" if self.manifest.complete else "incomplete"
        return f"<Run {self.path} {state}, {len(self.records)} records>"

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Url) -> Run:
        """Open the run at ``path``: a directory, a tar or zip of one, or the URL of either.

        Raises RunFormatError for anything that breaks docs/dump-format.md: no such
        place, no manifest, a newer schema, an unknown key, a broken line, a
        truncated or missing shard, a path or link that leaves the directory.
        """
        place = location_of(path)
        with contextlib.ExitStack() as stack:
            try:
                store = open_store(place)
                stack.callback(store.close)
                manifest = _read_manifest(store)
                run = cls(place, manifest, [], store=store)
                run.records, run.torn_tail = _read_records(store, manifest)
                run._check_places()
            except OSError as error:
                raise RunFormatError(
                    f"cannot be read: {error.strerror or error}",
                    where=str(error.filename or place),
                ) from error
            stack.pop_all()
        return run

    @property
    def far(self) -> bool:
        """Are its bytes brought here over a network? Then only those are read that must be."""
        return self._store is not None and self._store.far

    def expect(self, records: Iterable[Record]) -> None:
        """Say what will be read, in about which order: from a URL it is then fetched ahead, in few
        requests. Anything may be read all the same."""
        if self.far:
            self._store.expect(
                (place.shard, entry.begin, entry.begin + entry.num_bytes)
                for record in records
                for place in (part.place for part in parts_of(record))
                if (entry := self._shard(record, place.shard).entries.get(place.key)) is not None
            )

    def files(self) -> dict[str, int]:
        """The files that make the run, with their sizes: manifest, lines, the shards in use."""
        shards = {part.place.shard for record in self.records for part in parts_of(record)}
        names = [MANIFEST, *([RECORDS] if self._store.has(RECORDS) else []), *sorted(shards)]
        return {name: self._store.size(name) for name in names}

    def open_files(self) -> Iterator[tuple[str, int, BinaryIO]]:
        """(name, bytes, open file) of each of ``files``, one after the other."""
        sizes = self.files()
        self._store.expect(
            (name, begin, min(begin + SPAN_BYTES, size))
            for name, size in sizes.items()
            for begin in range(0, size, SPAN_BYTES)
        )
        for name, size in sizes.items():
            with self._store.open(name) as file:
                yield name, size, file

    def close(self) -> None:
        """Release memory maps and connections."""
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()
        if self._store is not None:
            self._store.close()

    def find(self, coordinates: Coordinates) -> Record | None:
        """The record at (pass, sample, step, site), or None."""
        if not self._by_coordinates:
            self._by_coordinates = {record.coordinates: record for record in self.records}
        return self._by_coordinates.get(coordinates)

    def borrow_from(self, other: Run | None) -> None:
        """Read what this run keeps no bytes of from ``other``, if it is the run that holds them
        (``capture --only-changed``); else nothing changes."""
        if other is not None and self.manifest.plan.only_changed == other.manifest.id:
            self._lender = other

    def has_bytes(self, record: Record) -> bool:
        """Can the record's tensor be read, here or from the run that was borrowed from?"""
        return record.place is not None or self._lent(record) is not None

    def _lent(self, record: Record) -> Record | None:
        return None if self._lender is None else self._lender.holding(record)

    def holding(self, other: Record) -> Record | None:
        """A record of this run that has the bytes of ``other``, of any run; or None."""
        if not self._by_content:
            self._by_content = records_by_content(self.records)
        return find_content(self._by_content, other)

    def read(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's tensor, bit-exact, as a read-only view. Never write to it.

        Raises RunFormatError naming file and record when the bytes do not have the
        recorded checksum, and UsageError where the run keeps no bytes of it.
        """
        if record.place is None:
            lent = self._lent(record)
            if lent is not None:
                return self._lender.read(lent, verify=verify)
            raise UsageError(
                f"no bytes of this tensor are at hand: {why_no_bytes(self.manifest)}",
                where=f"{self.path}, {_name(record)}",
                hint=f"capture it in full: divergence capture --like {self.path} -o RUN "
                f"--store full --sites '{record.site}'",
            )
        return self._view(record, parts_of(record)[0], verify=verify)

    def read_sketch(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's sketch, float32 (rows, num_projections + 2). Errors: as ``read``."""
        return self._view(record, parts_of(record)[-1], verify=verify)

    def _view(self, record: Record, part: Part, *, verify: bool) -> torch.Tensor:
        place, form = part.place, format_named(part.dtype)
        shard = self._shard(record, place.shard)
        tensor = shard.view(place.key, dtype=form.torch_dtype, shape=part.shape)
        if verify:
            found = self._digests.get((place.shard, place.key))
            if found is None:
                found = digest_tensor(tensor)
                self._digests[place.shard, place.key] = found
            if found != part.xxh3:
                changed = self.far and self._store.has_changed(place.shard)
                raise RunFormatError(
                    f"wrong checksum: recorded {part.xxh3}, the bytes give {found}",
                    where=f"{shard.name}, {_name(record)}",
                    hint="it was replaced while it was read; run the command again"
                    if changed
                    else "the file was changed or damaged; copy it again, or capture again",
                )
        return tensor

    def sites(self) -> list[str]:
        """Every recorded site, in natural order."""
        return sorted({record.site for record in self.records}, key=natural_key)

    def at_site(self, site: str) -> list[Record]:
        """All records of one site. Raises UsageError with near names if there are none."""
        found = [record for record in self.records if record.site == site]
        if not found:
            near = near_names(site, self.sites())
            raise UsageError(
                f"no site {site!r} in {self.path}",
                hint=f"did you mean {', '.join(near)}?"
                if near
                else f"`divergence inspect {self.path}` lists the sites",
            )
        return found

    def verify(self, progress: Callable[[str, int, int | None, str], None] | None = None):
        """Check every checksum; returns the problems found, one line each."""
        return verify_run(self, progress)

    def _shard(self, record: Record, name: str | None = None) -> Shard:
        name = record.place.shard if name is None else name
        if name not in self._shards:
            checked_shard_name(name, where=_name(record))
            store = self._store or open_store(self.path)
            self._shards[name] = Shard(store.blob(name))
        return self._shards[name]

    def _check_places(self) -> None:
        for record in self.records:
            for part in parts_of(record):
                check_part(self._shard(record, part.place.shard), part, where=_name(record))


def _name(record: Record) -> str:
    return (
        f"{record.site} (pass {record.pass_}, sample {record.sample}, step {record.step}, "
        f"rank {record.rank})"
    )


def _read_manifest(store: Store) -> Manifest:
    where = store.where(MANIFEST)
    with store.open(MANIFEST) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise RunFormatError(
            f"{MANIFEST} has over {MAX_MANIFEST_BYTES} bytes, which no run needs", where=where
        )
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
    except _BROKEN_JSON as error:
        raise RunFormatError(
            f"{MANIFEST} is damaged: {error}" if data else f"{MANIFEST} is empty",
            where=where,
            hint="copy it again; without it the run cannot be read",
        ) from error
    if version > SCHEMA_VERSION:
        raise RunFormatError(
            f"the run has schema version {version}, this divergence reads up to {SCHEMA_VERSION}",
            where=where,
            hint="upgrade: pip install -U divergence-debug",
        )
    if version < 1:
        raise RunFormatError(f"schema version {version} does not exist", where=where)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except _BROKEN_JSON as error:
        raise RunFormatError(
            f"{MANIFEST} breaks the format: {error}",
            where=where,
            hint="docs/dump-format.md describes every key",
        ) from error
    problem = _broken_groups(manifest)
    if problem is None and manifest.model.dtype not in FORMATS:
        problem = f"no dtype is called {manifest.model.dtype!r} - at `$.model.dtype`"
    if problem is not None:
        raise RunFormatError(
            f"{MANIFEST} breaks the format: {problem}",
            where=where,
            hint="docs/dump-format.md describes every key",
        )
    return manifest


def _broken_groups(manifest: Manifest) -> str | None:
    """Why the groups are no division of the samples into batches, or None."""
    samples, groups = manifest.tokens.samples, manifest.tokens.groups
    at = " - at `$.tokens.groups`"
    if [number for group in groups for number in group] != list(range(len(samples))):
        return f"the groups must hold the samples 0 to {len(samples) - 1} once each, in order{at}"
    for group in groups:
        members = [samples[number] for number in group]
        if not members:
            return f"a group is empty{at}"
        if len({s.num_left_pad + len(s.prompt_ids) + s.num_right_pad for s in members}) > 1:
            return f"samples {group} ran together but are not equally long with their padding{at}"
        if len({len(s.generated_ids) for s in members}) > 1:
            return f"samples {group} ran together but have not equally many generated ids{at}"
    return None


def _lines(store: Store) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their ends; never holds more than the limit of one line."""
    with store.open(RECORDS) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise RunFormatError(
                    f"line {number} is longer than {MAX_LINE_BYTES} bytes",
                    where=store.where(RECORDS),
                    hint="a record takes some 500 bytes; the file is damaged",
                )
            yield number, line


def _read_records(store: Store, manifest: Manifest) -> tuple[list[Record], bool]:
    if not manifest.complete and not store.has(RECORDS):
        return [], False
    first_samples = {group[0] for group in manifest.tokens.groups}
    decoder = msgspec.json.Decoder(Record)
    records: list[Record] = []
    seen: dict[tuple, int] = {}
    for number, line in _lines(store):
        where = f"{store.where(RECORDS)}, line {number}"
        try:
            record = decoder.decode(line)
        except _BROKEN_JSON as error:
            if not line.endswith(b"\n") and not manifest.complete:
                return records, True  # killed while appending: the line never counted
            raise RunFormatError(
                f"broken record: {error}",
                where=where,
                hint="copy records.jsonl again; docs/dump-format.md describes every key",
            ) from error
        problem = _broken_record(record, first_samples)
        if problem is not None:
            raise RunFormatError(f"broken record: {problem}", where=where)
        identity = (*record.coordinates, record.rank)
        if identity in seen:
            raise RunFormatError(
                f"line {number} repeats line {seen[identity]}: {_name(record)}", where=where
            )
        seen[identity] = number
        records.append(record)
    if manifest.complete and len(records) != manifest.sizes.num_records:
        raise RunFormatError(
            f"{len(records)} records in a complete run of {manifest.sizes.num_records}",
            where=store.where(RECORDS),
            hint="lines were lost or added; copy records.jsonl again",
        )
    return records, False


def _broken_record(record: Record, first_samples: set[int]) -> str | None:
    """What a record breaks that its type cannot say, or None."""
    if record.dtype not in FORMATS:
        near = near_names(record.dtype, FORMATS)
        return f"no dtype is called {record.dtype!r}" + (f", only {near[0]}" if near else "")
    if record.sample not in first_samples:
        return f"sample {record.sample} is not the first of any group in {MANIFEST}"
    if math.prod(size for size in record.shape if size) > MAX_NUMEL:
        return f"shape {list(record.shape)} is larger than any memory"
    if record.place is not None and record.xxh3 is None:
        return "bytes in `place` without their `xxh3`"
    positions = record.positions
    if positions is not None:
        if len(record.shape) < 2 or record.shape[1] != len(positions):
            return f"{len(positions)} positions for shape {list(record.shape)}"
        if any(a >= b for a, b in itertools.pairwise(positions)):
            return "positions do not ascend"
    return None

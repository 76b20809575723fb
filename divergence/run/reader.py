"""Run: a recorded execution, opened for reading."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from divergence.errors import RunFormatError, UsageError
from divergence.numerics.arrays import as_array, as_tensor, from_bytes, joined, wide
from divergence.numerics.formats import format_named, format_of
from divergence.run.command import command_line
from divergence.run.contents import (
    Content,
    Digests,
    Part,
    check_parts,
    contents_of,
    count_passes,
    name_of,
    parts_of,
    read_manifest,
    read_records,
    records_at,
    site_names,
    sizes_of,
    why_no_bytes,
)
from divergence.run.manifest import Manifest, digest_array
from divergence.run.record import (
    MANIFEST,
    OWN_TRUTH,
    Coordinates,
    Record,
    checked_shard_name,
    records_name,
)
from divergence.run.site import did_you_mean, natural_key
from divergence.run.storage import (
    SPAN_BYTES,
    Archive,
    Bytes,
    Directory,
    Headers,
    LocalBlob,
    Location,
    Shard,
    Store,
    Url,
    archive_kind_of,
    location_of,
)
from divergence.words import Progress, silent, size

if TYPE_CHECKING:
    import torch

    from divergence.numerics.arrays import Tensor
    from divergence.numerics.sketches import Projections


# Reading a run, strictly: what is damaged is named, never guessed around.
#
# Opening reads the manifest, every record and every shard's header, so that a record without bytes
# is found before any number is printed. Tensors are views of memory maps, or of ranges fetched
# from a URL; each is checked against its checksum when it is first read.

_RELEASED_BYTES = 16 << 20
"""What was read is released in portions of so much."""


def open_store(place: Location) -> Store:
    """The store of the run at ``place``. RunFormatError where there is none."""
    store: Store
    if isinstance(place, Url):
        from divergence.run.remote import open_url

        store = open_url(place)
    elif place.is_dir():
        store = Directory(place)
    elif place.is_file():
        archive = LocalBlob(place)
        kind = archive_kind_of(archive)
        if kind is None:
            raise RunFormatError(
                f"{place} is not a directory, and no tar or zip archive either",
                hint="a run is what `divergence capture MODEL -o RUN` wrote",
            )
        store = Archive(place, archive, kind)
    else:
        why = "is neither a directory nor a file" if place.exists() else "does not exist"
        raise RunFormatError(
            f"{place} {why}",
            hint="a run is the directory that `divergence capture MODEL -o RUN` wrote",
        )
    if not store.has(MANIFEST):
        store.close()
        if not isinstance(place, Url) and (place / "config.json").is_file():
            raise RunFormatError(
                f"{place} is not a run but a model",
                hint=command_line("capture", str(place), o="RUN", note="makes a run of it"),
            )
        hint = (
            "give what `divergence capture MODEL -o RUN` wrote: a directory, or a .tar or .zip of "
            "one, or its URL"
        )
        # the folder of a diff is often meant to be one of the runs inside
        with contextlib.suppress(OSError):
            inside = [] if isinstance(place, Url) else sorted(place.iterdir())
            runs = [str(path) for path in inside if (path / MANIFEST).is_file()]
            hint = f"it holds {', '.join(runs[:4])}" if runs else hint
        raise RunFormatError(f"{place} is not a run: it has no {MANIFEST}", hint=hint)
    return store


class Run:
    """One recorded execution. ``Run.open(path)``; then ``manifest``, ``records``, ``read``.

    ``torn_tail``: the last record line of an incomplete run was cut off and left out.
    """

    def __init__(
        self,
        path: Location,
        manifest: Manifest,
        records: Sequence[Record],
        *,
        torn_tail: bool = False,
        store: Store | None = None,
    ) -> None:
        self.path = path
        self._store = store
        self.manifest = manifest
        self.records = records
        self.torn_tail = torn_tail
        self.unmade: dict[Coordinates, str] = {}
        """Tensors that the run's ranks hold in parts which make none (run.ranks), with the reason.
        """
        self._shards: dict[str, Shard] = {}
        self._headers = None if store is None or store.far else Headers()
        self._read_bytes = 0
        self._digests: dict[tuple[str, str], str] = {}
        self._by_coordinates: dict[Coordinates, Record] = {}
        self._by_content: dict[Content, Record] = {}
        self._fallback: Run | None = None
        self._indexing = threading.Lock()

    def __repr__(self) -> str:
        state = "complete" if self.manifest.complete else "incomplete"
        return f"<Run {self.path} {state}, {len(self.records)} records>"

    def _repr_html_(self) -> str:
        """Show what ran, where, and whether it finished."""
        from divergence.html.parts import small_table

        manifest = self.manifest
        model, machine = manifest.model, manifest.environment
        ended = f", stopped by {manifest.stopped_by}" if manifest.stopped_by else ""
        return small_table(
            f"Run {self.path}",
            [
                ("model", model.source),
                ("computed", f"{model.dtype} on {machine.device_type}: {machine.device_name}"),
                ("machine", machine.label),
                ("state", "complete" if manifest.complete else f"incomplete{ended}"),
                ("passes", ", ".join(count_passes(self.records))),
                ("prompts", f"{len(manifest.tokens.samples):,}"),
                ("records", f"{len(self.records):,}, {size(manifest.sizes.stored_bytes)}"),
                ("planted faults", ", ".join(manifest.plan.plants)),
            ],
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Url | Run) -> Run:
        """Open the run at ``path``: a directory, a tar or zip of one, or the URL of either. A run
        that is open already is returned as it is.

        Raises RunFormatError for anything that breaks docs/dump-format.md: no such
        place, no manifest, a newer schema, an unknown key, a broken line, a
        truncated or missing shard, a path or link that leaves the directory.
        """
        if isinstance(path, Run):
            return path
        place = location_of(path)
        with contextlib.ExitStack() as stack:
            try:
                store = open_store(place)
                stack.callback(store.close)
                manifest = read_manifest(store)
                run = cls(place, manifest, [], store=store)
                run.records, run.torn_tail = read_records(store, manifest)
                check_parts(run.records, run._shard)
                if not manifest.complete:  # a killed capture's says what was there long before
                    manifest.sizes = sizes_of(run.records)
            except OSError as error:
                raise RunFormatError(
                    f"cannot be read: {error.strerror or error}", where=str(error.filename or place)
                ) from error
            stack.pop_all()
        return run

    @classmethod
    def open_manifest(cls, path: str | os.PathLike[str]) -> Run:
        """The run at ``path`` without its records. Raises RunFormatError, and OSError."""
        place = location_of(path)
        store = open_store(place)
        try:
            return cls(place, read_manifest(store), [])
        finally:
            store.close()

    @property
    def far(self) -> bool:
        """Do its bytes come over a network? Then only those are read that must be."""
        return self._store is not None and self._store.far

    def expect(self, records: Iterable[Record]) -> None:
        """Announces what will be read, in about this order: from a URL it is then fetched ahead, in
        few requests. Other records may be read all the same."""
        if self._store is not None and self._store.far:
            self._store.expect(
                (place.shard, *span)
                for record in records
                for place in (part.place for part in parts_of(record))
                if (span := self._shard(record, place.shard).span(place.key)) is not None
            )

    def files(self) -> dict[str, int]:
        """The files that make the run, with their sizes: manifest, lines, the shards in use."""
        shards = {part.place.shard for record in self.records for part in parts_of(record)}
        lines = map(records_name, range(self.manifest.num_ranks))
        store = self._opened()
        names = [MANIFEST, *filter(store.has, lines), *sorted(shards)]
        return {name: store.size(name) for name in names}

    def whole_files(self) -> Iterator[tuple[str, int, Iterator[Bytes]]]:
        """(name, bytes, its pieces in order) of each of ``files``, one after the other."""
        sizes, store = self.files(), self._opened()
        store.expect(
            (name, begin, min(begin + SPAN_BYTES, length))
            for name, length in sizes.items()
            for begin in range(0, length, SPAN_BYTES)
        )
        for name, length in sizes.items():
            yield name, length, store.whole(name)

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
            with self._indexing:  # of several threads that ask, one makes it
                if not self._by_coordinates:
                    self._by_coordinates = {record.coordinates: record for record in self.records}
        return self._by_coordinates.get(coordinates)

    def set_fallback(self, other: Run | None) -> None:
        """Read what this run keeps no bytes of from ``other``, if it is the run that holds them
        (``capture --only-changed``); else nothing changes."""
        if other is not None and self.manifest.plan.only_changed == other.manifest.id:
            self._fallback = other

    @property
    def fallback(self) -> Run | None:
        """The run that is read from where this one keeps no bytes."""
        return self._fallback

    def has_bytes(self, record: Record) -> bool:
        """Can the record's tensor be read, here or from the fallback?"""
        return record.place is not None or self._lent(record) is not None

    def _lent(self, record: Record) -> tuple[Run, Record] | None:
        if self._fallback is None:
            return None
        partner = self._fallback.holding(record)
        return None if partner is None else (self._fallback, partner)

    def digests(self, record: Record) -> Digests:
        """The recorded digests of a tensor."""
        return Digests.of([record])

    def holding(self, other: Record) -> Record | None:
        """A record of this run that has the bytes of ``other``, of any run; or None."""
        with self._indexing:
            if not self._by_content:
                self._by_content = {
                    content: record
                    for record in self.records
                    if record.place is not None
                    for content in contents_of(record)
                }
        return next(filter(None, map(self._by_content.get, contents_of(other))), None)

    def read(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's tensor, bit-exact, as a read-only view. Never write to it.

        Raises RunFormatError naming file and record when the bytes do not have the
        recorded checksum, and UsageError where the run keeps no bytes of it.
        """
        return as_tensor(self.array(record, verify=verify))

    def array(self, record: Record, *, verify: bool = True) -> np.ndarray:
        """``read``, as an array (numerics.arrays): it needs no torch."""
        if record.place is None:
            lent = self._lent(record)
            if lent is not None:
                fallback, its_own = lent
                return fallback.array(its_own, verify=verify)
            raise UsageError(
                f"no bytes of this tensor are at hand: {why_no_bytes(self.manifest)}",
                where=f"{self.path}, {name_of(record)}",
                hint="capture it in full: "
                + command_line("capture", like=self.path, o="RUN", store="full", sites=record.site),
            )
        data = self._stretch(record, parts_of(record)[0], verify=verify)
        return from_bytes(data, format_named(record.dtype), record.shape)

    def arrays(self, records: Sequence[Record]) -> np.ndarray:
        """The arrays of records of one dtype and shape, stacked, (N, …): a copy. Raises as
        ``read`` does."""
        parts = [
            self.array(record).reshape(-1).view(np.uint8).data
            if record.place is None
            else self._stretch(record, parts_of(record)[0], verify=True)
            for record in records
        ]
        first = records[0]
        shape = len(records), *first.shape
        return from_bytes(bytearray().join(parts), format_named(first.dtype), shape)

    def read_sketch(self, record: Record, *, verify: bool = True) -> Projections:
        """The record's sketch. Errors: as ``read``."""
        from divergence.numerics.sketches import Projections

        sketch = record.sketch
        assert sketch is not None
        part = parts_of(record)[-1]
        data = self._stretch(record, part, verify=verify)
        stored = from_bytes(data, format_named(part.dtype), part.shape)
        return Projections.of(stored, record.shape, sketch.num_projections, sketch.num_pooled)

    def check(self, record: Record) -> None:
        """Checks the checksum of what is kept of the record, its bytes or else its sketch, without
        making a tensor. Raises RunFormatError."""
        lent = self._lent(record) if record.place is None else None
        if lent is not None:
            fallback, its_own = lent
            return fallback.check(its_own)
        for part in parts_of(record)[:1]:
            self._hold(self._shard(record, part.place.shard), record, part)

    def _stretch(self, record: Record, part: Part, *, verify: bool) -> Bytes:
        """The part's bytes."""
        shard = self._shard(record, part.place.shard)
        data = shard.stretch(part.place.key, part.num_bytes)
        if verify:
            self._hold(shard, record, part, data)
        return data

    def _hold(self, shard: Shard, record: Record, part: Part, data: Bytes | None = None) -> None:
        """Raises RunFormatError where the part's bytes do not have its checksum. Bytes are hashed
        once; they are ``data``, where that was read."""
        place = part.place
        digest = self._digests.get((place.shard, place.key))
        if digest is None:
            data = shard.stretch(place.key, part.num_bytes) if data is None else data
            digest = xxhash.xxh3_128_hexdigest(data)
            if digest == part.xxh3:
                digest = part.xxh3  # an object that is there
            self._digests[place.shard, place.key] = digest
        if digest == part.xxh3:
            return
        changed = self.far and self._opened().has_changed(place.shard)
        raise RunFormatError(
            f"wrong checksum: recorded {part.xxh3}, the bytes give {digest}",
            where=f"{shard.name}, {name_of(record)}",
            hint="it was replaced while it was read; run the command again"
            if changed
            else "the file was changed or damaged; copy it again, or capture again",
        )

    def release(self, num_bytes: int) -> None:
        """Lets what was read leave memory for now, in portions; views of it stay good.
        ``num_bytes``: about as many as were read since the last time."""
        self._read_bytes += num_bytes
        if self._read_bytes >= _RELEASED_BYTES:
            self._read_bytes = 0
            for shard in list(self._shards.values()):  # other threads may open more
                shard.release()

    def sites(self) -> list[str]:
        """Every recorded site, in natural order."""
        return sorted(site_names(self.records), key=natural_key)

    def at_site(self, site: str) -> list[Record]:
        """All records of one site. Raises UsageError with near names if there are none."""
        records = records_at(self.records, [site])
        if not records:
            raise UsageError(
                f"no site {site!r} in {self.path}",
                hint=did_you_mean(site, self.sites())
                or f"`{command_line('inspect', self.path)}` lists the sites",
            )
        return records

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Check every checksum; returns the problems found, one line each."""
        problems: list[str] = []
        seen: set[tuple[str, str, str | None]] = set()
        self.expect(self.records)
        for number, record in enumerate(self.records):
            (progress or silent)("verify", number, len(self.records), record.site)
            for part in parts_of(record):
                identity = (part.place.shard, part.place.key, part.xxh3)
                if identity in seen:
                    continue
                seen.add(identity)
                try:
                    self._hold(self._shard(record, part.place.shard), record, part)
                except RunFormatError as error:
                    problems.append(f"{error.message} ({error.where})")
        return problems

    def _opened(self) -> Store:
        return self._store or open_store(self.path)

    def _shard(self, record: Record, name: str) -> Shard:
        if name not in self._shards:
            checked_shard_name(name, where=name_of(record))
            self._shards[name] = Shard(self._opened().blob(name), self._headers)
        return self._shards[name]


# The floor that a run carries: sums of its own error e = a - R, R its own float64 pass.
#
# The pass ``floor`` holds them of every output of a block, and of the modules outside blocks, that
# is a float tensor of rows. By site and group of prompts, step 0 is one tensor (rows, 4), the rows
# of the free pass's forwards one after the other, by step, as far as the float64 pass came. Of a
# block's output, step 1 is one tensor (2, D), over all forwards of all prompts, filed under the
# first group.
#
# Roots are stored, in bfloat16: it has float32's range, and 8 bits are ample for statistics.

COLUMNS = ("error", "size", "update", "fourth")
"""By row: ‖e‖, ‖a‖, ‖a - x‖ (x what entered the block; elsewhere ‖a‖), (Σe⁴)^¼. Older runs hold
more of them, which are not read."""

_Key = tuple[int, str]
"""(first sample of the group, site)."""


def floor_of(run: Run) -> OwnFloor | None:
    """The floor that ``run`` carries; None where it carries none."""
    return OwnFloor(run) if "floor" in run.manifest.plan.passes else None


class OwnFloor:
    """Reads the rows of one run's floor, forward by forward."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._records: dict[_Key, Record] = {}
        self.channels: dict[str, Record] = {}
        """By site: ‖e‖ and ‖a‖ of each channel, (2, D)."""
        for record in run.records:
            if record.pass_ == "floor" and record.step == 0:
                self._records[record.sample, record.site] = record
            elif record.pass_ == "floor":
                self.channels[record.site] = record
        self._steps: dict[_Key, dict[int, int]] = defaultdict(dict)
        """By step, the number of rows."""
        for record in run.records:
            key = record.sample, record.site
            if record.pass_ == "free" and key in self._records and record.shape:
                self._steps[key][record.step] = record.numel // max(1, record.shape[-1])
        self._read: tuple[_Key, np.ndarray] | None = None

    def rows(self, own: Record) -> np.ndarray | None:
        """``COLUMNS`` of each row (T, 4) of a record of the run's free pass; None where the floor
        does not hold it."""
        key = own.sample, own.site
        record = self._records.get(key)
        if record is None or len(record.shape) != 2 or record.shape[1] < len(COLUMNS):
            return None
        if not self.run.has_bytes(record):
            return None
        if self._read is None or self._read[0] != key:
            self._read = key, wide(self.run.array(record)[:, : len(COLUMNS)])
        steps = self._steps[key]
        start = sum(num for step, num in steps.items() if step < own.step)
        stop = start + steps.get(own.step, 0)
        return self._read[1][start:stop] if start < stop <= record.shape[0] else None


# A run without some of its passes, to be copied: the other records, and the shards they need; and
# the truth that a run carries, as a run of its own.
#
# Shards are copied whole. A capture writes one pass after the other, so at most one shard holds
# bytes of a pass that was left out.


def own_truth(run: Run) -> Run | None:
    """The truth that ``run`` carries, as a truth that was made apart would be: a float64 run that
    repeats it, anchored to it, and free where that was made. None where it carries none."""
    manifest = run.manifest
    passes = [OWN_TRUTH[name] for name in OWN_TRUTH if name in manifest.plan.passes]
    if not passes:
        return None
    replaced, note = msgspec.structs.replace, manifest.plan.truth
    stopped_by = manifest.stopped_by
    if note is not None:
        forwards = [
            max(1, len(manifest.tokens.samples[group[0]].generated_ids))
            for group in manifest.tokens.groups
        ]
        fewer = any(made < num for made, num in zip(note.num_steps, forwards, strict=False))
        stopped_by = note.stopped_by or ("the time it was given" if fewer else stopped_by)
    records = [
        replaced(record, pass_=OWN_TRUTH[record.pass_])
        for record in run.records
        if record.pass_ in OWN_TRUTH
    ]
    return Run(
        run.path,
        replaced(
            manifest,
            id=f"{manifest.id} (its own truth)",
            like=manifest.id,
            complete=manifest.complete and stopped_by is None,
            stopped_by=stopped_by,
            settings=replaced(manifest.settings, compute_dtype="float64"),
            plan=replaced(
                manifest.plan,
                passes=passes[::-1],  # free first
                anchored_to=manifest.id if "anchored" in passes else None,
                plants=[],
                substitutes=[],
                truth=None,
            ),
        ),
        records,
        store=run._opened(),
    )


def without_passes(run: Run, passes: Collection[str]) -> Run:
    """``run`` as it would be without ``passes``; itself where it has none of them. It reads from
    the same files."""
    if not any(record.pass_ in passes for record in run.records):
        return run
    records = [record for record in run.records if record.pass_ not in passes]
    manifest = copy.deepcopy(run.manifest)
    manifest.plan.passes = [name for name in manifest.plan.passes if name not in passes]
    if OWN_TRUTH.keys() <= set(passes) and manifest.plan.truth is not None:
        floor = msgspec.structs.replace(manifest.plan.truth, mode="floor")
        manifest.plan.truth = floor if "floor" in manifest.plan.passes else None
    manifest.sizes = sizes_of(records)
    return _Partial(run.path, manifest, records, store=run._opened())


class _Partial(Run):
    """Its manifest and lines are its own; its shards are those of the run that it is a part of."""

    def _own(self) -> dict[str, bytes]:
        encoder = msgspec.json.Encoder()
        own: dict[str, bytes] = {}
        for rank in range(self.manifest.num_ranks):
            lines = [record for record in self.records if record.rank == rank]
            own[records_name(rank)] = encoder.encode_lines(lines)
        digests = {name: xxhash.xxh3_128_hexdigest(data) for name, data in own.items()}
        self.manifest.record_digests = digests
        return {MANIFEST: self.manifest.encode()} | own

    def files(self) -> dict[str, int]:
        return super().files() | {name: len(data) for name, data in self._own().items()}

    def whole_files(self) -> Iterator[tuple[str, int, Iterator[Bytes]]]:
        own = self._own()
        for name, length in self.files().items():
            pieces = iter([own[name]]) if name in own else self._opened().whole(name)
            yield name, length, pieces


# A run whose records stand for those of another.


class View(Run):
    """Records that ``run`` reads: what is asked of their bytes is asked of its own records."""

    def __init__(self, run: Run, records: Sequence[Record]) -> None:
        super().__init__(run.path, run.manifest, records, torn_tail=run.torn_tail)
        self.run = run

    def stored(self, record: Record) -> Iterable[Record]:
        """The records of ``run`` that make this one."""
        raise NotImplementedError

    def arrays(self, records: Sequence[Record]) -> np.ndarray:
        return joined([self.array(record)[None] for record in records], 0)

    @property
    def far(self) -> bool:
        return self.run.far

    @property
    def fallback(self) -> Run | None:
        return self.run.fallback

    def set_fallback(self, other: Run | None) -> None:
        self.run.set_fallback(other)

    def has_bytes(self, record: Record) -> bool:
        return all(map(self.run.has_bytes, self.stored(record)))

    def check(self, record: Record) -> None:
        for part in self.stored(record):
            self.run.check(part)

    def expect(self, records: Iterable[Record]) -> None:
        self.run.expect(part for record in records for part in self.stored(record))

    def release(self, num_bytes: int) -> None:
        self.run.release(num_bytes)


class Overlay(View):
    """``run`` with other tensors at some of its records. ``records`` lists the changed ones alone,
    or with ``whole`` all; ``find`` and ``read`` know all."""

    def __init__(
        self, run: Run, changed: Iterable[tuple[Record, Tensor]], *, whole: bool = False
    ) -> None:
        self._changed: dict[Coordinates, np.ndarray] = {}
        records: dict[Coordinates, Record] = {}
        for record, tensor in changed:
            array = self._changed[record.coordinates] = as_array(tensor)
            records[record.coordinates] = msgspec.structs.replace(
                record,
                xxh3=digest_array(array),
                shape=array.shape,
                dtype=format_of(array.dtype).name,
            )
        together = list(records.values())
        if whole:
            together = [records.get(record.coordinates, record) for record in run.records]
        super().__init__(run, together)

    def stored(self, record: Record) -> Iterable[Record]:
        """The record, unless it lies in memory: what does has no checksum either."""
        return () if record.coordinates in self._changed else (record,)

    def find(self, coordinates: Coordinates) -> Record | None:
        """The record at (pass, sample, step, site): the changed one where there is one."""
        return super().find(coordinates) or self.run.find(coordinates)

    def array(self, record: Record, *, verify: bool = True) -> np.ndarray:
        """The record's array as it is here."""
        array = self._changed.get(record.coordinates)
        return self.run.array(record, verify=verify) if array is None else array

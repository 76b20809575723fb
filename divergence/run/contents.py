"""The contents of a run's files, read strictly: records by pass, step and site, and every name and
size checked."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from divergence._version import __version__
from divergence.errors import RunFormatError
from divergence.numerics.formats import FORMATS, format_named
from divergence.run.manifest import NO_LABEL, SCHEMA_VERSION, Manifest, SampleTokens, Sizes, Tokens
from divergence.run.record import (
    MANIFEST,
    MAX_FORWARD_TOKENS,
    MAX_LINE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_NEW_TOKENS,
    MAX_RANKS,
    SHARD_DTYPES,
    PassName,
    Place,
    Record,
    RecordCheck,
    StrictRecord,
    UnsoundError,
    records_name,
)
from divergence.run.site import is_operator_site, module_of
from divergence.run.storage import Shard, Store
from divergence.words import first_apart

if TYPE_CHECKING:
    from divergence.run.storage import Entry


# What a run holds: by content, what of it is on disk, and where nan and inf begin.
#
# Tensors of equal digest, dtype and shape are one tensor wherever they lie, so that a run may leave
# out bytes that another one has (``capture --only-changed``).

Content = tuple[str, str, tuple[int, ...]]
"""(digest of either kind, dtype, shape)."""


class Part(NamedTuple):
    """One tensor on disk that is kept of a record: its bytes, or its sketch."""

    place: Place
    xxh3: str | None
    """Digest of that tensor's bytes, where known."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * format_named(self.dtype).itemsize


def parts_of(record: Record) -> list[Part]:
    """The record's bytes and its sketch, in this order, as far as they are kept."""
    parts: list[Part] = []
    if record.place is not None:
        parts.append(Part(record.place, record.xxh3, record.dtype, record.shape))
    if (sketch := record.sketch) is not None:
        from divergence.numerics.sketches import grid_of, rows_of

        # what is stored: numerics.sketches.Projections.joined
        num_rows, num_cols = rows_of(record.shape)[0], sketch.num_projections + 2
        shape: tuple[int, ...] = num_rows, num_cols
        if sketch.num_pooled:
            shape = (num_rows * num_cols + grid_of(record.shape)[0] * sketch.num_pooled,)
        parts.append(Part(sketch.place, sketch.xxh3, "float32", shape))
    return parts


def check_part(shard: Shard, part: Part, *, where: str) -> None:
    """Raise RunFormatError where the shard does not hold what the record says."""
    where = f"{shard.name}, {where}"
    entry = shard.entries.get(part.place.key)
    if entry is None:
        raise RunFormatError(
            f"record without bytes: shard has no tensor {part.place.key}",
            where=where,
            hint="the shard belongs to another run, or was cut; copy the run again",
        )
    if entry.num_bytes != part.num_bytes:
        raise RunFormatError(
            f"record needs {part.num_bytes} bytes, its tensor holds {entry.num_bytes}", where=where
        )
    if entry.dtype == "U8" and part.dtype != "uint8":
        return  # raw bytes: the record alone says what they are
    if (entry.dtype, entry.shape) != (SHARD_DTYPES.get(part.dtype), part.shape):
        raise RunFormatError(
            f"record says {part.dtype} {list(part.shape)}, "
            f"the shard's header says {entry.dtype} {list(entry.shape)}",
            where=where,
        )


def contents_of(record: Record) -> list[Content]:
    """The record's content by each digest that it has."""
    digests = filter(None, (record.xxh3, record.fold))
    return [(digest, record.dtype, record.shape) for digest in digests]


class SiteCounts(NamedTuple):
    """Counts what there is of one site."""

    site: str
    dtype: str
    """Of its first record."""
    shape: tuple[int, ...]
    """Of its first record."""
    passes: dict[str, int]
    """Number of records by pass, in the order of first appearance."""
    num_nonfinite: int
    """nan and inf in all of its records, as far as statistics were kept."""


def count_passes(records: Sequence[Record]) -> dict[str, int]:
    """Number of records by pass, in the order of first appearance."""
    return dict(Counter(record.pass_ for record in records))


def count_sites(records: Sequence[Record]) -> list[SiteCounts]:
    """Count what there is of each site, in the order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.site, []).append(record)
    return [
        SiteCounts(
            site, group[0].dtype, group[0].shape, count_passes(group), sum(map(_nonfinite, group))
        )
        for site, group in groups.items()
    ]


def _nonfinite(record: Record) -> int:
    summary = record.summary
    return 0 if summary is None else summary.num_nan + summary.num_posinf + summary.num_neginf


def site_names(records: Sequence[Record]) -> set[str]:
    """Return the names of all sites that there are records of."""
    return {record.site for record in records}


def call_passes(records: Sequence[Record]) -> set[PassName]:
    """The passes that hold operators' calls."""
    return {record.pass_ for record in records if record.call is not None}


def records_at(records: Sequence[Record], sites: Collection[str]) -> list[Record]:
    """The records of these sites, in order."""
    return [record for record in records if record.site in sites]


def num_kept(records: Sequence[Record]) -> int:
    """Number of records of which anything is on disk."""
    return sum(bool(parts_of(record)) for record in records)


def sizes_of(records: Iterable[Record]) -> Sizes:
    """Sizes counted over a run's records: the manifest that a crash left behind has older ones."""
    tensors: dict[Place, int] = {}
    num_records = seen_bytes = 0
    for record in records:
        num_records += 1
        seen_bytes += record.num_bytes
        tensors.update((part.place, part.num_bytes) for part in parts_of(record))
    return Sizes(
        num_records=num_records,
        num_tensors=len(tensors),
        num_shards=len({place.shard for place in tensors}),
        stored_bytes=sum(tensors.values()),
        seen_bytes=seen_bytes,
    )


def why_no_bytes(manifest: Manifest) -> str:
    """Return where the bytes are that a run does not have."""
    plan = manifest.plan
    if plan.only_changed is not None:
        return f"what did not change is in run {plan.only_changed}, which is not at hand"
    return f"the run was captured with --store {plan.store}"


def is_mask(site: str) -> bool:
    """Does its name say that it tells attention what to look at? T5 adds its mask to a bias."""
    path, _, port = site.partition(":")
    words = (port, path.rpartition(".")[2])
    return any(word in part for word in ("mask", "bias") for part in words)


def first_nonfinite(manifest: Manifest, records: Sequence[Record]) -> Record | None:
    """The first record, in execution order of the free pass, with nan or inf that is no mask's.

    From statistics alone, which every run holds but those of ``--store hash``. -inf is left to
    masks, to logits and to what lies inside a block; rows of padding, which the statistics count
    too, are passed over.
    """
    bad = [
        record
        for record in records
        if record.pass_ == "free" and _counts(record) and not _may_be_padding(record, manifest)
    ]
    return min(bad, key=lambda record: (record.sample, record.step, record.order), default=None)


def nonfinite_text(record: Record) -> str:
    """``model.layers.1:out (sample 0, step 0) holds 64 nan and 0 inf among 64 elements``"""
    assert record.summary is not None
    num_inf = record.summary.num_posinf + record.summary.num_neginf
    return (
        f"{record.site} (sample {record.sample}, step {record.step}) holds "
        f"{record.summary.num_nan} nan and {num_inf} inf among {record.numel} elements"
    )


def _counts(record: Record) -> int:
    summary = record.summary
    if summary is None or is_operator_site(record.site):
        return 0
    return summary.num_nan + (0 if is_mask(record.site) else summary.num_posinf)


def _may_be_padding(record: Record, manifest: Manifest) -> bool:
    """Are there rows of padding, or is it inside a block, where they may be anything?"""
    note = manifest.plan.modules.get(module_of(record.site))
    if note is None or note.role == "inner":
        return True
    if record.step > 0 or record.positions is not None:
        return False
    return manifest.tokens.pads(record.sample) is not None


@dataclass(frozen=True, slots=True)
class Digests:
    """A tensor's digests, one for each of the parts that ``cuts`` cut out of it; a single cut may
    take all of it. None for a kind that not every part has."""

    cuts: tuple[tuple[slice, ...], ...]
    xxh3: tuple[str, ...] | None
    fold: tuple[str, ...] | None
    crc32: tuple[str, ...] | None = None

    @classmethod
    def of(cls, records: Sequence[Record], cuts: tuple[tuple[slice, ...], ...] = ((),)) -> Digests:
        """Collect the digests of the records of all parts. None for terms of a sum, whose cuts are
        the same: others may add up to as much."""
        if any(cut in cuts[:number] for number, cut in enumerate(cuts)):
            return cls(cuts, None, None)
        checksums = [r.checksum or "" for r in records]
        return cls(
            cuts,
            _all(r.xxh3 for r in records),
            _all(r.fold for r in records),
            _all(text[6:] if text.startswith("crc32:") else None for text in checksums),
        )


def _all(digests: Iterable[str | None]) -> tuple[str, ...] | None:
    every = tuple(digests)
    present = tuple(digest for digest in every if digest is not None)
    return present if len(present) == len(every) else None


def num_labels(sample: SampleTokens) -> int:
    """Count the tokens that are to be predicted: all but the first that have a label."""
    return sum(label != NO_LABEL for label in sample.used_labels)


def labels_text(tokens: Tokens) -> str:
    """``19 of 35 tokens``: how many are to be predicted, of those that something predicts; empty
    where each is its own label."""
    if all(sample.labels is None for sample in tokens.samples):
        return ""
    num_used = sum(len(sample.used_labels) for sample in tokens.samples)
    return f"{sum(map(num_labels, tokens.samples))} of {num_used} tokens"


# manifest.json and records.jsonl as they lie on disk, parsed strictly.
#
# What breaks docs/dump-format.md is named with its file and line, never guessed around.

_RAW = re.compile(r"[/:#\s\x00-\x1f\x7f-\x9f]")
"""What a module's path never holds: it is escaped."""
BROKEN_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Version(msgspec.Struct):
    schema_version: int
    tool_version: str = "?"


_SHARED = 12
"""Characters that texts must share at an end for it to be left out of their names."""


def prompt_names(samples: Sequence[SampleTokens]) -> list[str]:
    """Each prompt by what sets its text apart from the others': without the template and the system
    text that all of them begin with, and what all end with."""
    texts = [sample.text for sample in samples if sample.text is not None]
    start = end = 0
    if len(set(texts)) > 1:
        start = first_apart(min(texts), max(texts))
        start = max(texts[0].rfind(space, 0, start) + 1 for space in " \n")
        ends = [text[start:][::-1] for text in texts]
        end = first_apart(min(ends), max(ends))
    start, end = (num if num >= _SHARED else 0 for num in (start, end))
    names = []
    for sample in samples:
        if sample.text is None:
            names.append(f"{len(sample.prompt_ids)} ids")
            continue
        own = sample.text[start : len(sample.text) - end]
        left_out = "…" * bool(start), "…" * bool(end)
        names.append(f"{left_out[0]}{own!r}{left_out[1]}")
    return names


def name_of(record: Record) -> str:
    """Return how an error calls a record."""
    return (
        f"{record.site} (pass {record.pass_}, sample {record.sample}, step {record.step}, "
        f"rank {record.rank})"
    )


def read_manifest(store: Store) -> Manifest:
    """manifest.json. Raises RunFormatError."""
    where = store.where(MANIFEST)
    if (size := store.size(MANIFEST)) > MAX_MANIFEST_BYTES:
        raise RunFormatError(
            f"{MANIFEST} has over {MAX_MANIFEST_BYTES} bytes, which no run needs", where=where
        )
    with store.open(MANIFEST) as file:
        data = file.read(size + 1)
    try:
        written = msgspec.json.decode(data, type=_Version)
    except BROKEN_JSON as error:
        raise RunFormatError(
            f"{MANIFEST} is damaged: {error}" if data else f"{MANIFEST} is empty",
            where=where,
            hint="copy it again; without it the run cannot be read",
        ) from error
    version = written.schema_version
    if version > SCHEMA_VERSION:
        raise RunFormatError(
            f"the run has schema version {version}, this divergence reads up to {SCHEMA_VERSION}",
            where=where,
            hint=f"read it with divergence {written.tool_version}, which wrote it, or a later one; "
            f"this is {__version__}",
        )
    if version < 1:
        raise RunFormatError(f"schema version {version} does not exist", where=where)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        problem = _broken_manifest(manifest)
        if problem is not None:
            raise msgspec.ValidationError(problem)
    except BROKEN_JSON as error:
        raise RunFormatError(
            f"{MANIFEST} breaks the format: {error}",
            where=where,
            hint="docs/dump-format.md describes every key",
        ) from error
    if manifest.digest is not None and not manifest.is_closed_by(data):
        raise _changed(MANIFEST, where)
    raw = next(filter(_RAW.search, manifest.plan.modules), None)
    if raw is not None:
        raise RunFormatError(
            f"the module {raw!r} is not written as the sites of runs write it",
            where=where,
            hint="the first versions of divergence wrote such names as they are, and a site of "
            "them may mean two things: capture again",
        )
    return manifest


def _changed(name: str, where: str) -> RunFormatError:
    return RunFormatError(
        f"{name} is not as it was when the run was written: its digest does not fit",
        where=where,
        hint=(
            "copy it again: some of its bytes were damaged or changed",
            "or, if it was edited on purpose, take digest and record_digests out of manifest.json",
        ),
    )


def _broken_manifest(manifest: Manifest) -> str | None:
    """Say what a manifest breaks that its type cannot say, or None: above all, the groups must
    divide the samples into batches."""
    samples, groups = manifest.tokens.samples, manifest.tokens.groups
    at = " - at `$.tokens.groups`"
    if sorted(number for group in groups for number in group) != list(range(len(samples))):
        return f"the groups must hold the samples 0 to {len(samples) - 1} once each{at}"
    for number, sample in enumerate(samples):
        if sample.labels is not None and len(sample.labels) != len(sample.prompt_ids):
            return f"one label for each prompt id - at `$.tokens.samples[{number}].labels`"
    for group in groups:
        members = [samples[number] for number in group]
        if not members:
            return f"a group is empty{at}"
        lengths = {sample.num_padded for sample in members}
        if max(lengths) * len(members) > MAX_FORWARD_TOKENS:
            return f"samples {group[:9]} are padded to {max(lengths)} tokens, beyond any batch{at}"
        if len(lengths) > 1:
            return f"samples {group} ran together but are not equally long with their padding{at}"
        if len({len(s.generated_ids) for s in members}) > 1:
            return f"samples {group} ran together but have not equally many generated ids{at}"
    if manifest.settings.max_new_tokens > MAX_NEW_TOKENS:
        return f"more than {MAX_NEW_TOKENS} new tokens - at `$.settings.max_new_tokens`"
    if manifest.num_ranks > MAX_RANKS:
        return f"a mesh of more than {MAX_RANKS} ranks - at `$.mesh`"
    if manifest.model.dtype not in FORMATS:
        return f"no dtype is called {manifest.model.dtype!r} - at `$.model.dtype`"
    return None


def read_records(store: Store, manifest: Manifest) -> tuple[list[Record], bool]:
    """The records of all ranks, rank by rank; whether a last line of an incomplete run was cut off.

    Raises RunFormatError."""
    records: list[Record] = []
    torn = False
    number = manifest.num_ranks
    empty = []
    for rank in range(number):
        own, cut = _read_rank(store, manifest, rank)
        records += own
        torn |= cut
        empty += [] if own else [records_name(rank)]
    if manifest.complete and len(records) != manifest.sizes.num_records:
        # how many each rank wrote is noted nowhere; a file without any is the likely one
        name = empty[0] if empty else records_name(0)
        at_one = bool(empty) or number == 1
        raise RunFormatError(
            f"{len(records)} records in a complete run of {manifest.sizes.num_records}",
            where=store.where(name) if at_one else str(store.place),
            hint="lines were lost or added; copy "
            + (f"{name} again" if at_one else f"the records of all {number} ranks again"),
        )
    return records, torn


def _read_rank(store: Store, manifest: Manifest, rank: int) -> tuple[list[Record], bool]:
    name = records_name(rank)
    if not manifest.complete and not store.has(name):
        return [], False
    num_axes = None if manifest.mesh is None else len(manifest.mesh.axes)
    check = RecordCheck({group[0] for group in manifest.tokens.groups}, num_axes, rank)
    hasher = xxhash.xxh3_128()
    records = _sound_records(store, name, check, hasher)
    if records is None:  # line by line, to say what is wrong
        hasher = xxhash.xxh3_128()
        records, torn = _checked_records(store, name, manifest, check, hasher)
        if torn:
            return records, True
    if manifest.record_digests.get(name) not in (None, hasher.hexdigest()):
        raise _changed(name, store.where(name))
    return records, False


def _checked_records(
    store: Store, name: str, manifest: Manifest, check: RecordCheck, hasher: xxhash.xxh3_128
) -> tuple[list[Record], bool]:
    """All records of a file, and whether the last line was cut off. Raises RunFormatError for the
    first line that is not sound. ``hasher`` is fed with the file."""
    decoder, strict = msgspec.json.Decoder(Record), msgspec.json.Decoder(StrictRecord)
    records: list[Record] = []
    seen: dict[tuple[str, int, int, str, int], int] = {}
    with store.open(name) as file:
        lines = iter(partial(file.readline, MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            where = f"{store.where(name)}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise RunFormatError(
                    f"line {number} is longer than {MAX_LINE_BYTES} bytes",
                    where=store.where(name),
                    hint="a record takes some 500 bytes; the file is damaged",
                )
            hasher.update(line)
            try:
                strict.decode(line)
                record = decoder.decode(line)
            except BROKEN_JSON as error:
                # killed while appending: the line never counted
                is_open = not manifest.complete and name not in manifest.record_digests
                if is_open and not line.endswith(b"\n"):
                    return records, True
                raise RunFormatError(
                    f"broken record: {error}",
                    where=where,
                    hint=f"copy {name} again; docs/dump-format.md describes every key",
                ) from error
            problem = check.broken(record) or check.misplaced(record)
            if problem is not None:
                raise RunFormatError(f"broken record: {problem}", where=where)
            identity = (*record.coordinates, record.rank)
            if identity in seen:
                raise RunFormatError(
                    f"line {number} repeats line {seen[identity]}: {name_of(record)}", where=where
                )
            seen[identity] = number
            records.append(record)
    return records, False


def _sound_records(
    store: Store, name: str, check: RecordCheck, hasher: xxhash.xxh3_128
) -> list[Record] | None:
    """All records of a file, many lines at a time; None where anything is wrong with one: reading
    line by line says what. ``hasher`` is fed with the file. Equal names and shapes are one object,
    which takes a third of the memory away."""
    records: list[Record] = []
    decoder = msgspec.json.Decoder(Record)
    same: dict[object, Any] = {}
    put = msgspec.structs.force_setattr
    try:
        for lines in portions(store, name, hasher):
            decoded = decoder.decode_lines(lines)
            lengths = [len(line) for line in lines.split(b"\n")]
            if len(decoded) != len(lengths) or max(lengths) >= MAX_LINE_BYTES:
                return None
            check.all(decoded)
            for record in decoded:
                for field in ("site", "dtype", "shape"):
                    value = getattr(record, field)
                    put(record, field, same.setdefault(value, value))
                if (place := record.place) is not None:
                    put(place, "shard", same.setdefault(place.shard, place.shard))
                    if place.key == record.xxh3:
                        put(place, "key", record.xxh3)
            records += decoded
    except (*BROKEN_JSON, UnsoundError):
        return None
    identities = {(*record.coordinates, record.rank) for record in records}
    return records if len(identities) == len(records) else None


def portions(store: Store, name: str, hasher: xxhash.xxh3_128) -> Iterator[bytes]:
    """A file's lines in portions, without the last line end. ``hasher`` is fed with the file.
    Raises UnsoundError for a line beyond the limit, some time after it."""
    rest = b""
    with store.open(name) as file:
        while data := file.read(_PORTION_BYTES):
            hasher.update(data)
            lines, end, last = data.rpartition(b"\n")
            if end:
                yield rest + lines
            rest = last if end else rest + data
            if len(rest) > MAX_LINE_BYTES:
                raise UnsoundError
    if rest:
        yield rest


_PORTION_BYTES = 1 << 18
"""Some 500 records: few enough to stay in a core's cache."""


def check_parts(records: Sequence[Record], shard_of: Callable[[Record, str], Shard]) -> None:
    """``check_part`` of all that the records keep. Raises RunFormatError."""
    name = ""
    entries: dict[str, Entry] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for record in records:
        place, kind = record.place, (record.dtype, record.shape)
        if place is not None and record.sketch is None:
            if place.shard != name:
                name, entries = place.shard, shard_of(record, place.shard).entries
            entry = entries.get(place.key)
            if kind not in sizes:
                sizes[kind] = record.num_bytes
            wanted = SHARD_DTYPES.get(record.dtype), record.shape, sizes[kind]
            if entry is not None and (entry.dtype, entry.shape, entry.num_bytes) == wanted:
                continue  # as nearly all are
        for part in parts_of(record):
            check_part(shard_of(record, part.place.shard), part, where=name_of(record))

"""What a run's files say, read strictly: records by pass, step and site, and every name and size
checked; those of a large run as columns, kept beside it so that it opens at once."""

from __future__ import annotations

import bisect
import math
import operator
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec
import numpy as np
import xxhash

from divergence._version import __version__
from divergence.errors import RunFormatError
from divergence.numerics.formats import FORMATS, format_named
from divergence.run.blobs import Blob, Store
from divergence.run.manifest import NO_LABEL, SCHEMA_VERSION, Manifest, SampleTokens, Sizes, Tokens
from divergence.run.record import (
    MANIFEST,
    MAX_FORWARD_TOKENS,
    MAX_LINE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_NEW_TOKENS,
    MAX_RANKS,
    SHARD_DTYPES,
    Checked,
    Coordinates,
    Numbering,
    Operand,
    PassName,
    Place,
    Record,
    RecordCheck,
    StrictRecord,
    UnsoundError,
    checked_shard_name,
    records_name,
)
from divergence.run.shards import Shard
from divergence.run.site import escape_path, is_operator_site, module_of, unescape_path

if TYPE_CHECKING:
    from divergence.run.shards import Entry, Shard


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
        from divergence.numerics.summaries import grid_of, rows_of

        # what is stored: numerics.summaries.Projections.joined
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


def records_by_content(records: Iterable[Record]) -> dict[Content, Record]:
    """Of the records that have bytes."""
    return {
        content: record
        for record in records
        if record.place is not None
        for content in contents_of(record)
    }


def find_content(known: dict[Content, Record], record: Record) -> Record | None:
    """One of ``known`` with the bytes of ``record``."""
    return next((known[content] for content in contents_of(record) if content in known), None)


class SiteCounts(NamedTuple):
    """What there is of one site."""

    site: str
    dtype: str
    """Of its first record."""
    shape: tuple[int, ...]
    """Of its first record."""
    passes: dict[str, int]
    """Number of records by pass, in the order of first appearance."""
    num_nonfinite: int
    """nan and inf in all of its records, as far as statistics were kept."""


def each_of(records: Sequence[Record]) -> Iterable[Record]:
    """All in order, once; none stays in memory that was not there before."""
    if isinstance(records, RecordTable):
        return records.each()
    return records


def count_passes(records: Sequence[Record]) -> dict[str, int]:
    """Number of records by pass, in the order of first appearance."""
    if isinstance(records, RecordTable):
        return records.count_passes()
    return dict(Counter(record.pass_ for record in records))


def count_sites(records: Sequence[Record]) -> list[SiteCounts]:
    """What there is of each site, in the order of first appearance."""
    if isinstance(records, RecordTable):
        return records.count_sites()
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
    """Of all sites that there are records of."""
    if isinstance(records, RecordTable):
        return records.site_names()
    return {record.site for record in records}


def call_passes(records: Sequence[Record]) -> set[PassName]:
    """The passes that hold operators' calls."""
    if isinstance(records, RecordTable):
        return records.call_passes()
    return {record.pass_ for record in records if record.call is not None}


def records_at(records: Sequence[Record], sites: Collection[str]) -> list[Record]:
    """The records of these sites, in order."""
    if isinstance(records, RecordTable):
        return records.records_at(sites)
    return [record for record in records if record.site in sites]


def num_kept(records: Sequence[Record]) -> int:
    """Number of records of which anything is on disk."""
    if isinstance(records, RecordTable):
        return records.num_kept()
    return sum(bool(parts_of(record)) for record in records)


def shards_of(records: Sequence[Record]) -> set[str]:
    """The names of all shards in use."""
    if isinstance(records, RecordTable):
        return records.shards()
    return {part.place.shard for record in records for part in parts_of(record)}


def sizes_of(records: Iterable[Record]) -> Sizes:
    """Sizes counted over a run's records: the manifest that a crash left behind has older ones."""
    if isinstance(records, RecordTable):
        return records.sizes()
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
    """Where the bytes are that a run does not have."""
    plan = manifest.plan
    if plan.only_changed is not None:
        return f"what did not change is in run {plan.only_changed}, which is not at hand"
    return f"the run was captured with --store {plan.store}"


def is_mask(site: str) -> bool:
    """Does its name say that it tells attention what to look at? T5 adds its mask to a bias."""
    path, _, port = site.partition(":")
    words = (port, path.rpartition(".")[2])
    return any(word in part for word in ("mask", "bias") for part in words)


def with_nonfinite(records: Sequence[Record]) -> Iterable[Record]:
    """The records with nan or inf, as far as statistics were kept; of a list more."""
    if isinstance(records, RecordTable):
        return records.nonfinite()
    return records


def first_nonfinite(manifest: Manifest, records: Sequence[Record]) -> Record | None:
    """The first record, in execution order of the free pass, with nan or inf that is no mask's.

    From statistics alone, which every run holds but those of ``--store hash``. -inf is left to
    masks, to logits and to what lies inside a block; rows of padding, which the statistics count
    too, are passed over.
    """
    bad = [
        record
        for record in with_nonfinite(records)
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
    group = next((g for g in manifest.tokens.groups if g and g[0] == record.sample), [])
    samples = [manifest.tokens.samples[number] for number in group]
    return any(sample.num_left_pad or sample.num_right_pad for sample in samples)


@dataclass(frozen=True, slots=True)
class Digests:
    """A tensor's digests, one for each of the parts that ``cuts`` cut out of it; a single cut may
    take all of it. None for a kind that not every part has."""

    cuts: tuple[tuple[slice, ...], ...]
    xxh3: tuple[str, ...] | None
    fold: tuple[str, ...] | None

    @classmethod
    def of(cls, records: Sequence[Record], cuts: tuple[tuple[slice, ...], ...] = ((),)) -> Digests:
        """Of the records of all parts. None for terms of a sum, whose cuts are the same: others may
        add up to as much."""
        if any(cut in cuts[:number] for number, cut in enumerate(cuts)):
            return cls(cuts, None, None)
        return cls(cuts, _all(r.xxh3 for r in records), _all(r.fold for r in records))


def _all(digests: Iterable[str | None]) -> tuple[str, ...] | None:
    every = tuple(digests)
    known = tuple(digest for digest in every if digest is not None)
    return known if len(known) == len(every) else None


def num_labels(sample: SampleTokens) -> int:
    """How many of its tokens are to be predicted: all but the first that have a label."""
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

BROKEN_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Version(msgspec.Struct):
    schema_version: int
    tool_version: str = "?"


def name_of(record: Record) -> str:
    """How an error calls a record."""
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
    modules = manifest.plan.modules  # by today's paths
    if any(map(_RAW.search, modules)):
        manifest.plan.modules = {
            escape_path(path) if _RAW.search(path) else path: note for path, note in modules.items()
        }
    return manifest


def _changed(name: str, where: str) -> RunFormatError:
    return RunFormatError(
        f"{name} is not as it was when the run was written: its digest does not fit", where=where,
        hint=(
            "copy it again: some of its bytes were damaged or changed",
            "or, if it was edited on purpose, take digest and record_digests out of manifest.json",
        ),
    )  # fmt: skip


def check_digest(store: Store, manifest: Manifest, name: str, digest: str | None = None) -> None:
    """Holds a file of records against the digest that the run was closed with. ``digest``: its own,
    where it was read already. Raises RunFormatError."""
    wanted = manifest.record_digests.get(name)
    if wanted is None:
        return
    if digest is None:
        hasher = xxhash.xxh3_128()
        for _ in portions(store, name, hasher):
            pass
        digest = hasher.hexdigest()
    if digest != wanted:
        raise _changed(name, store.where(name))


def _broken_manifest(manifest: Manifest) -> str | None:
    """What a manifest breaks that its type cannot say, or None: above all, the groups must divide
    the samples into batches."""
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


def _lines(store: Store, name: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their ends; never holds more than the limit of one line."""
    with store.open(name) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise RunFormatError(
                    f"line {number} is longer than {MAX_LINE_BYTES} bytes",
                    where=store.where(name),
                    hint="a record takes some 500 bytes; the file is damaged",
                )
            yield number, line


LARGE_BYTES = 8 << 20
"""Of lines: some 16,000 records. Fewer are soon decoded, and take no more than numpy's code."""


def is_large(store: Store, manifest: Manifest) -> bool:
    """Is it a run that is better read by columns: of many lines, in files that can be read again in
    parts?"""
    if store.far or _Renaming(manifest):
        return False
    names = filter(store.has, map(records_name, range(manifest.num_ranks)))
    try:
        return sum(store.blob(name).size for name in names) >= LARGE_BYTES
    except (RunFormatError, OSError):  # compressed, or no file: opening it says what
        return False


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
        if not own:
            empty.append(records_name(rank))
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
    renaming = _Renaming(manifest)
    if not renaming:
        hasher = xxhash.xxh3_128()
        sound = _sound_records(store, name, manifest, rank, hasher)
        if sound is not None:
            check_digest(store, manifest, name, hasher.hexdigest())
            return sound, False
    check = record_check(manifest)
    check.rank = rank
    decoder, strict = msgspec.json.Decoder(Record), msgspec.json.Decoder(StrictRecord)
    records: list[Record] = []
    seen: dict[tuple[str, int, int, str, int], int] = {}
    for number, line in _lines(store, name):
        where = f"{store.where(name)}, line {number}"
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
        if renaming:
            record = renaming(record)
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
    check_digest(store, manifest, name)
    return records, False


def record_check(manifest: Manifest) -> RecordCheck:
    """The check of the run's records; set its ``rank`` before each file."""
    mesh = manifest.mesh
    first_samples = {group[0] for group in manifest.tokens.groups}
    return RecordCheck(first_samples, None if mesh is None else len(mesh.axes))


def _sound_records(
    store: Store, name: str, manifest: Manifest, rank: int, hasher: xxhash.xxh3_128
) -> list[Record] | None:
    """All records of a file, many lines at a time; None where anything is wrong with one: reading
    line by line says what. ``hasher`` is fed with the file."""
    records: list[Record] = []
    check = record_check(manifest)
    check.rank = rank
    decoder = msgspec.json.Decoder(Record)
    try:
        for lines, _ in portions(store, name, hasher):
            decoded = decoder.decode_lines(lines)
            lengths = [len(line) for line in bytes(lines).split(b"\n")]
            if len(decoded) != len(lengths) or max(lengths) >= MAX_LINE_BYTES:
                return None
            check.all(decoded)
            records += decoded
    except UNSOUND:
        return None
    identities = {(*record.coordinates, record.rank) for record in records}
    return records if len(identities) == len(records) else None


def portions(store: Store, name: str, hasher: xxhash.xxh3_128) -> Iterator[tuple[memoryview, bool]]:
    """A file's lines in portions, without the last line end; whether it was there. A portion is
    good until the next one is asked for. ``hasher`` is fed with the file. Raises UnsoundError for a
    line beyond the limit, some time after it."""
    held, memory = 0, bytearray(_PORTION_BYTES)
    buffer = memoryview(memory)
    with store.open(name) as file:
        while num := file.readinto(buffer[held:]):  # type: ignore[attr-defined]
            hasher.update(buffer[held : held + num])
            last = memory.rfind(b"\n", held, held + num)
            held += num
            if last >= 0:
                yield buffer[:last], True
                rest = bytes(buffer[last + 1 : held])
                held = len(rest)
                buffer[:held] = rest
            elif held > MAX_LINE_BYTES:
                raise UnsoundError
            elif held == len(buffer):
                memory = memory + bytes(held)
                buffer = memoryview(memory)
    if held:
        yield buffer[:held], False


_PORTION_BYTES = 1 << 18
"""Some 500 records: few enough to stay in a core's cache."""
UNSOUND = (*BROKEN_JSON, UnsoundError)


def check_parts(records: Sequence[Record], shard_of: Callable[[Record, str], Shard]) -> None:
    """``check_part`` of all that the records keep. Raises RunFormatError."""
    entries: dict[str, dict[str, Entry]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for record in each_of(records):
        place, kind = record.place, (record.dtype, record.shape)
        if place is not None and record.sketch is None:
            if place.shard not in entries:
                entries[place.shard] = shard_of(record, place.shard).entries
            entry = entries[place.shard].get(place.key)
            if kind not in sizes:
                sizes[kind] = record.num_bytes
            wanted = SHARD_DTYPES.get(record.dtype), record.shape, sizes[kind]
            if entry is not None and (entry.dtype, entry.shape, entry.num_bytes) == wanted:
                continue  # as nearly all are
        for part in parts_of(record):
            check_part(shard_of(record, part.place.shard), part, where=name_of(record))


_RAW = re.compile(r"[/:#\s\x00-\x1f\x7f-\x9f]")


class _Renaming:
    """A record's sites in today's form. False where no module of the run has such a name.

    In runs of earlier versions the name of a module stands in a site as torch has it. A ``/`` or
    ``#`` in it then reads like an operator or a repeated call; the manifest's modules tell which
    sites are meant.
    """

    def __init__(self, manifest: Manifest) -> None:
        names = {unescape_path(path): path for path in manifest.plan.modules if "%" in path}
        self._paths = {name: path for name, path in names.items() if name != path}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def __call__(self, record: Record) -> Record:
        call = record.call
        if call is not None:
            operands = tuple(map(self._operand, call.operands))
            if operands != call.operands:
                call = msgspec.structs.replace(call, operands=operands)
        return msgspec.structs.replace(record, site=self._site(record.site), call=call)

    def _operand(self, operand: Operand) -> Operand:
        site, origin = (place and self._site(place) for place in (operand.site, operand.origin))
        return msgspec.structs.replace(operand, site=site, origin=origin)

    def _site(self, site: str) -> str:
        path, colon, port = site.rpartition(":")
        renamed = self._module(path)
        if renamed is None:  # an operator has no slash in its own name
            owner, slash, operator = path.rpartition("/")
            module = self._module(owner) if slash else None
            renamed = None if module is None else f"{module}/{operator}"
        return site if renamed is None else f"{renamed}{colon}{port}"

    def _module(self, path: str) -> str | None:
        """The path with its call (``#2``, ``#word``, ``#word#2``), or None for another module."""
        call = ""
        for _ in range(3):
            if path in self._paths:
                return self._paths[path] + call
            path, mark, last = path.rpartition("#")
            if not mark:
                return None
            call = f"#{last}{call}"
        return None


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


# The records of a large run, decoded when they are asked for.
#
# Opening a run reads and checks every line. As objects, a million records take more than half a
# gigabyte and most are never asked for, so of a large run columns are kept: what tells records
# apart, and where each line begins. A record is decoded again when it is asked for. The files are
# read in portions of whole lines; each must then still have the bytes that were checked, by a
# digest.


def read_table(store: Store, manifest: Manifest) -> tuple[RecordTable, bool] | None:
    """The records of all ranks, and whether a last line of an incomplete run was cut off. None
    where anything is wrong: reading line by line says what."""
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
    return RecordTable(columns, blobs), torn


class RecordTable(Sequence[Record]):
    """``columns`` of the lines in ``blobs``, and the records that were asked for."""

    def __init__(self, columns: Columns, blobs: Sequence[Blob]) -> None:
        self._columns, self._blobs = columns, blobs
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

    def places_are_sound(self, shard_of: Callable[[Record, str], Shard]) -> bool:
        """Is in the shards what the records say? False where one is not sound: going through all
        records says which and why."""
        try:
            shard = self._col["shard"]
            order = np.argsort(shard, kind="stable")
            bounds = np.searchsorted(shard[order], np.arange(len(self._columns.shards) + 1))
            for code, name in enumerate(self._columns.shards):
                if name is not None:
                    rows = order[bounds[code] : bounds[code + 1]]
                    checked_shard_name(name, where="")
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


def _tally(codes: Array, num: int) -> tuple[Array, Array]:
    """How often each of ``num`` codes appears, and where first (behind the end: nowhere)."""
    firsts = np.full(num, len(codes))
    firsts[codes[::-1]] = np.arange(len(codes))[::-1]
    return np.bincount(codes, minlength=num), firsts

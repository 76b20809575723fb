"""manifest.json and records.jsonl as they lie on disk, parsed strictly.

What breaks docs/dump-format.md is named with its file and line, never guessed around.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import msgspec

from divergence.errors import RunFormatError
from divergence.numerics.formats import FORMATS
from divergence.run.schema.layout import (
    MANIFEST,
    MAX_FORWARD_TOKENS,
    MAX_LINE_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_NUMEL,
    MAX_RANKS,
    records_name,
)
from divergence.run.schema.manifest import SCHEMA_VERSION, Manifest
from divergence.run.schema.record import Operand, Record
from divergence.run.schema.site import escape_path, near_names, unescape_path
from divergence.run.storage.store import Store

__all__ = [
    "name_of",
    "read_manifest",
    "read_records",
]

_BROKEN_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Version(msgspec.Struct):
    schema_version: int


def name_of(record: Record) -> str:
    """How an error calls a record."""
    return (
        f"{record.site} (pass {record.pass_}, sample {record.sample}, step {record.step}, "
        f"rank {record.rank})"
    )


def read_manifest(store: Store) -> Manifest:
    """manifest.json. Raises RunFormatError."""
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
        problem = _broken_manifest(manifest)
        if problem is not None:
            raise msgspec.ValidationError(problem)
    except _BROKEN_JSON as error:
        raise RunFormatError(
            f"{MANIFEST} breaks the format: {error}",
            where=where,
            hint="docs/dump-format.md describes every key",
        ) from error
    return _with_escaped_modules(manifest)


def _broken_manifest(manifest: Manifest) -> str | None:
    """What a manifest breaks that its type cannot say, or None: above all, the groups must divide
    the samples into batches."""
    samples, groups = manifest.tokens.samples, manifest.tokens.groups
    at = " - at `$.tokens.groups`"
    if [number for group in groups for number in group] != list(range(len(samples))):
        return f"the groups must hold the samples 0 to {len(samples) - 1} once each, in order{at}"
    for group in groups:
        members = [samples[number] for number in group]
        if not members:
            return f"a group is empty{at}"
        lengths = {s.num_left_pad + len(s.prompt_ids) + s.num_right_pad for s in members}
        if max(lengths) * len(members) > MAX_FORWARD_TOKENS:
            return f"samples {group[:9]} are padded to {max(lengths)} tokens, beyond any batch{at}"
        if len(lengths) > 1:
            return f"samples {group} ran together but are not equally long with their padding{at}"
        if len({len(s.generated_ids) for s in members}) > 1:
            return f"samples {group} ran together but have not equally many generated ids{at}"
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
    first_samples = {group[0] for group in manifest.tokens.groups}
    decoder = msgspec.json.Decoder(Record)
    renaming = _Renaming(manifest)
    if not renaming:
        sound = _sound_records(store, name, decoder, manifest, rank, first_samples)
        if sound is not None:
            return sound, False
    records: list[Record] = []
    seen: dict[tuple[str, int, int, str, int], int] = {}
    for number, line in _lines(store, name):
        where = f"{store.where(name)}, line {number}"
        try:
            record = decoder.decode(line)
        except _BROKEN_JSON as error:
            if not line.endswith(b"\n") and not manifest.complete:
                return records, True  # killed while appending: the line never counted
            raise RunFormatError(
                f"broken record: {error}",
                where=where,
                hint=f"copy {name} again; docs/dump-format.md describes every key",
            ) from error
        if renaming:
            record = renaming(record)
        problem = _broken_record(record, first_samples) or _misplaced(record, rank, manifest)
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
    store: Store,
    name: str,
    decoder: msgspec.json.Decoder[Record],
    manifest: Manifest,
    rank: int,
    first_samples: set[int],
) -> list[Record] | None:
    """All records of a file, many lines at a time; None where anything is wrong with one: reading
    line by line says what."""
    records: list[Record] = []
    rest = b""
    try:
        with store.open(name) as file:
            while chunk := file.read(_CHUNK_BYTES):
                lines, newline, rest = (rest + chunk).rpartition(b"\n")
                if not newline:
                    if len(rest) > MAX_LINE_BYTES:
                        return None
                    continue
                decoded = decoder.decode_lines(lines)
                lengths = [len(line) for line in lines.split(b"\n")]
                if len(decoded) != len(lengths) or max(lengths) >= MAX_LINE_BYTES:
                    return None
                records += decoded
        if rest:
            records.append(decoder.decode(rest))
    except _BROKEN_JSON:
        return None
    known: set[tuple[object, ...]] = set()
    for record in records:
        # what makes a record broken, but for its sample
        kind = (
            record.dtype,
            record.shape,
            record.positions,
            record.place is None,
            record.xxh3 is None,
        )
        if kind not in known:
            if _broken_record(record, {record.sample}) is not None:
                return None
            known.add(kind)
        if record.sample not in first_samples or _misplaced(record, rank, manifest) is not None:
            return None
    identities = {(*record.coordinates, record.rank) for record in records}
    return records if len(identities) == len(records) else None


def _misplaced(record: Record, rank: int, manifest: Manifest) -> str | None:
    """Why a record does not fit the mesh or this file, or None."""
    if manifest.mesh is None:
        return "a placement in a run without a mesh" if record.placement is not None else None
    if record.rank != rank:
        return f"a record of rank {record.rank} in {records_name(rank)}"
    if record.placement is not None and len(record.placement) != len(manifest.mesh.axes):
        return (
            f"a placement on {len(record.placement)} axes; the mesh has {len(manifest.mesh.axes)}"
        )
    return None


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


_CHUNK_BYTES = 1 << 20

_RAW = re.compile(r"[/:#\s\x00-\x1f\x7f-\x9f]")


def _with_escaped_modules(manifest: Manifest) -> Manifest:
    """The manifest with today's module paths; the same object where nothing changes."""
    modules = manifest.plan.modules
    if any(map(_RAW.search, modules)):
        manifest.plan.modules = {
            escape_path(path) if _RAW.search(path) else path: note for path, note in modules.items()
        }
    return manifest


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

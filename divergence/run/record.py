"""One recorded tensor: where it was seen, its shape and place on disk, and what is kept of it."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from divergence.errors import RunFormatError
from divergence.numerics.formats import FORMATS, format_named
from divergence.numerics.summary import Summary
from divergence.outside import inside
from divergence.run.site import near_names

# Names and limits of the files of a run, in one place for the writer and the reader.
#
# Nothing in a run may point outside its directory: shard names are matched against
# a narrow pattern, and symbolic links are refused wherever they stand.

MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
_INDEX = re.compile(r"records\.index(\.[0-9]+\.tmp)?")
"""A cache that earlier versions kept beside the lines. Nothing reads it."""
TENSORS = "tensors"
_RUN_NAMES = frozenset({MANIFEST, MANIFEST + ".tmp", RECORDS, TENSORS})
"""All that lies in the directory of a run of one process; see ``is_run_name``."""
_RANK_RECORDS = re.compile(r"records-r[0-9]{5}\.jsonl")

MAX_LINE_BYTES = 1 << 20
"""A record takes some 500 bytes; a line beyond 1 MiB is damage, not data."""
MAX_MANIFEST_BYTES = 1 << 30
"""Digests take some 100 bytes a parameter tensor; 1 GiB is beyond any model."""
MAX_RANKS = 100_000
"""The names of their records have five digits."""
MAX_NEW_TOKENS = 1 << 24
"""Beyond any context: a step for each is counted."""
MAX_FORWARD_TOKENS = 1 << 28
"""Of all prompts of a batch with their padding: far beyond what any device runs at once."""
MAX_NUMEL = (1 << 59) - 1
"""Elements of the largest tensor (and of an empty one's other axes): its bytes fit 64 bits."""

COMMON_SHARD_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What every safetensors release in use knows; other dtypes are written as raw bytes (U8)."""
SHARD_DTYPES = COMMON_SHARD_DTYPES | {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "complex64": "C64",
}
"""A record's dtype → the name that a safetensors header gives it."""

SHARD_PATTERN = r"^tensors/[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors$"


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` replaced; as it is where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def records_name(rank: int) -> str:
    """Name the file of a rank's records: ``records.jsonl`` of the first,
    ``records-r00003.jsonl``."""
    return RECORDS if rank == 0 else f"records-r{rank:05d}.jsonl"


def is_records_name(name: str) -> bool:
    """Are the records of some rank under this name?"""
    return name == RECORDS or _RANK_RECORDS.fullmatch(name) is not None


def is_run_name(name: str) -> bool:
    """Is this the name of something that lies in a run's directory?"""
    return name in _RUN_NAMES or is_records_name(name) or _INDEX.fullmatch(name) is not None


def shard_name(rank: int, number: int) -> str:
    """``(0, 3)`` → ``"tensors/r00000-000003.safetensors"``."""
    return f"{TENSORS}/r{rank:05d}-{number:06d}.safetensors"


def checked_shard_name(name: str, *, where: str) -> str:
    """The name as it is; RunFormatError where it leads out of the run."""
    if re.match(SHARD_PATTERN, name) is None or name.endswith("\n"):
        raise RunFormatError(
            f"shard name {name!r} is not allowed",
            where=where,
            hint="a shard is named tensors/NAME.safetensors, inside the run's own directory",
        )
    return name


def checked_name(name: str, *, where: str) -> str:
    """The name of a file that makes a run, as it is: RunFormatError for any other. Every name is
    checked by this before it is joined to a place, whoever gave it."""
    if name == MANIFEST or is_records_name(name):
        return name
    return checked_shard_name(name, where=where)


def checked_file(root: Path, name: str) -> Path:
    """``root/name`` if it is a regular file reached through no symbolic link inside the run."""
    return inside(
        root,
        checked_name(name, where=str(root)),
        error=RunFormatError,
        hint="copy the whole run directory; a run is not complete without it",
    )


# One line of records.jsonl: what was seen at one site in one forward.
#
# A record names its tensor three times over: by coordinates (pass, sample, step, site), by place
# (shard and key; equal tensors share both) and by value (a digest of its bytes, and a summary that
# needs no bytes). Shapes are those of the tensor as the module returned it; nothing is converted on
# the way to disk. A call, on the record of an operator's first result, is one operator with all
# that running it again alone needs; docs/dump-format.md has how its arguments are written.

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, a size or an index: what torch holds in 64 bits."""

DIGEST_PATTERN = "^[0-9a-f]{32}$"
Digest = Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN)]
_SAID = "plain JSON, or an object of one key that stands for what JSON has no word for"
Json = Annotated[object, msgspec.Meta(extra_json_schema={"description": _SAID})]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A part of a line, strict. (No cycles, so nothing for the garbage collector.)"""


class Operand(_Line, frozen=True, kw_only=True):
    """One tensor argument of a call."""

    site: str | None = None
    """The record that holds the value. None for a weight without a record."""
    weight: str | None = None
    """Name of the weight that the operand is, or is a view of."""
    xxh3: Digest | None = None
    """Digest of the whole weight's bytes. The operand is that weight viewed with ``shape`` and
    ``stride`` from element ``offset`` on."""
    shape: tuple[Count, ...]
    dtype: str
    stride: tuple[Count, ...] | None = None
    """In elements; set where the tensor was not contiguous. Kernels are chosen by layout."""
    misalignment_bytes: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0
    """How far beyond a multiple of 64 bytes the first element lay. Vector kernels begin there, so
    the order of their additions depends on it: a float32 matrix-vector product gives four results
    by the weight's address (benchmarks/alignment.py). Weights that are mapped from a safetensors
    file are not aligned."""
    offset: Count = 0
    """First element of the view, in elements."""
    origin: str | None = None
    """The site whose memory the value lies in."""
    via: tuple[str, ...] = ()
    """The views that were taken of the origin, in order."""


class Call(_Line, frozen=True, kw_only=True):
    """One operator as it was run, with its arguments."""

    operator: str
    """torch's name with its overload (``aten.mm.default``), or a suite's name."""
    arguments: dict[str, Json]
    operands: tuple[Operand, ...] = ()
    source: str | None = None
    """File name, line and function of the Python code that called it. Of a backward that torch has
    itself: of the code that called ``backward_of``."""
    backward_of: str | None = None
    """In a training step's backward: the forward operator, or the torch.autograd.Function, whose
    backward called it."""
    note: str | None = None
    """Why running it again cannot give the same result (``draws random numbers``)."""


def operand_indices(call: Call, name: str) -> list[int]:
    """Numbers of the operands in the argument ``name``, in order; empty for a scalar."""
    indices: list[int] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict) and set(value) == {"tensor"}:
            indices.append(value["tensor"])
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(call.arguments.get(name))
    return indices


SITE_PATTERN = r"^[^\x00-\x1f\x7f-\x9f]+:(in|out)(\.[^\x00-\x1f\x7f-\x9f]+)?$"
"""No control characters: a site is printed as it stands, also in terminals."""
SiteName = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": SITE_PATTERN})]
_AT_END = r"(?!\n)"
"""Python's ``$`` is also before a last line feed."""
_ExactDigest = Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN + _AT_END)]
RecordDigest = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": DIGEST_PATTERN})]
DtypeName = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(FORMATS)})]
Checksum = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{1,16}:[0-9a-f]{1,64}$")]
ShardName = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": SHARD_PATTERN})]

PassName = Literal[
    "free", "anchored", "escalated", "whole", "truth", "truth_free", "floor", "replayed", "inputs"
]

INPUTS: Final = "inputs"
"""The pass of what a model's processor made of pictures and sound, by prompt, at step 0: no result
of the model, and kept in full however little else is."""

OWN_TRUTH: Mapping[PassName, PassName] = {"truth": "anchored", "truth_free": "free"}
"""The passes of the truth that a run carries, and their names in one that is made apart."""

Coordinates = tuple[str, int, int, str]
"""(pass, sample, step, site): unique within a run and rank."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Says where the bytes are: a safetensors shard (relative to the run) and a key in it."""

    shard: ShardName
    key: str


class Sketch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Stands for a tensor whose bytes were not kept: random projections and norms, row by row.
    divergence.numerics.sketches defines the matrix and the rows."""

    place: Place
    """A float32 tensor (rows, ``num_projections`` + 2). The last two columns hold each row's norm
    as high and low part. Where rows are pooled, all of it on one axis, and behind it the pooled
    sums, (blocks, ``num_pooled``)."""
    xxh3: Digest
    """Digest of that tensor's bytes."""
    num_projections: Count
    sums: Literal["float64", "float32"] = "float64"
    """The precision that the projections were added up in."""
    num_pooled: Count = 0
    """How many sums there are of all rows of a block together."""


Placement = Annotated[
    str, msgspec.Meta(pattern=r"^(replicate|single|shard:[0-9]{1,2}|partial:(sum|mean|max|min))$")
]
"""What a rank holds of a tensor along one axis of the mesh, as torch.distributed.tensor has it:
an equal copy, its part along a dimension, or a term; ``single`` where one place of the axis alone
holds the tensor at all (a prompt that one data-parallel rank ran, a block of one pipeline stage).
Two axes that divide the same dimension divide it one within the other, the first axis outermost."""


class Apart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A distance that another tool told of two tensors, whose records both hold it."""

    compared: Digest
    """Of what it wrote of the two: equal in the records of one comparison."""
    least: Annotated[float, msgspec.Meta(ge=0)]
    """Relative to the first tensor's norm, less what its digits leave open."""


class Record(_Line, frozen=True, kw_only=True):
    """One captured tensor.

    At least one of ``xxh3`` and ``fold`` is set, but where another tool kept statistics alone.
    """

    # The patterns of site and digests are checked many at a time (RecordCheck): one by one they
    # cost as much as all the rest.

    pass_: PassName = msgspec.field(name="pass")
    sample: Count
    step: Count
    site: SiteName
    order: Count
    """Execution order within the forward."""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    """The tensor's shape; in a run of several ranks, of the part that this rank holds."""
    dtype: DtypeName
    summary: Summary | None = None
    """Statistics. None where digests alone are kept."""
    place: Place | None = None
    """Where the bytes are. None where no bytes are kept."""
    xxh3: RecordDigest | None = None
    """Digest of the bytes."""
    fold: RecordDigest | None = None
    """Digest of the bytes by numerics.sketches, for devices that xxh3 does not run on."""
    sketch: Sketch | None = None
    """What is kept in place of the bytes, with ``--store sketch``."""
    rank: Count = 0
    positions: tuple[Count, ...] | None = None
    """Token index of each row of the token axis. None where the rows are simply every token of this
    forward; set for ``--positions``, or for logits of the deciding positions only."""
    call: Call | None = None
    """How the operator was called. On the record of an operator's first result only."""
    placement: tuple[Placement, ...] | None = None
    """In a run of several ranks: what of the tensor this record holds, for each axis of the
    manifest's mesh."""
    checksum: Checksum | None = None
    """What another tool made of the bytes: ``crc32:`` or its own name for it, then hexadecimal
    digits."""
    apart: Apart | None = None
    """What another tool said when it compared the tensor with another one."""

    @property
    def coordinates(self) -> Coordinates:
        return (self.pass_, self.sample, self.step, self.site)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor, kept or not."""
        return self.numel * format_named(self.dtype).itemsize


class StrictRecord(Record, frozen=True, kw_only=True):
    """A record with its patterns, for the message that says which one a line breaks."""

    site: Annotated[str, msgspec.Meta(pattern=SITE_PATTERN + _AT_END)]
    xxh3: _ExactDigest | None = None
    fold: _ExactDigest | None = None


class UnsoundError(Exception):
    """Something is wrong with a record; which and what, reading line by line says."""


class RecordCheck:
    """Checks what the types of records do not, one by one or many at a time.

    ``first_samples``: of each group; ``num_axes``: of the mesh, or None without one. ``rank``:
    whose file it is. That no two records have the same coordinates is left to whoever has them all.
    """

    def __init__(self, first_samples: set[int], num_axes: int | None, rank: int) -> None:
        self._first_samples, self._num_axes, self._rank = first_samples, num_axes, rank
        self._sites: set[str] = set()
        self._kinds: set[tuple[str, tuple[int, ...]]] = set()

    def all(self, records: Sequence[Record]) -> None:
        """Checks records, at least one. Raises UnsoundError where one is not sound."""
        # by columns: record by record it takes as long as decoding them
        columns = zip(*map(msgspec.structs.astuple, records), strict=True)
        by_name = dict(zip(Record.__struct_fields__, columns, strict=True))
        placements, positions = by_name["placement"], by_name["positions"]
        new_sites = set(by_name["site"]) - self._sites
        new_kinds = set(zip(by_name["dtype"], by_name["shape"], strict=True)) - self._kinds
        kept = zip(by_name["xxh3"], by_name["place"], strict=True)
        sound = (
            self._first_samples.issuperset(by_name["sample"])
            and _are_digests(by_name["xxh3"])
            and _are_digests(by_name["fold"])
            and all(place is None for digest, place in kept if digest is None)
            and all(map(_SITE.fullmatch, new_sites))
        )
        if self._num_axes is not None or placements.count(None) < len(placements):
            sound = sound and not any(map(self.misplaced, records))
        if new_kinds or positions.count(None) < len(positions):
            sound = sound and not any(map(self.broken, records))
        if not sound:
            raise UnsoundError
        self._sites |= new_sites
        self._kinds |= new_kinds

    def broken(self, record: Record) -> str | None:
        """Say what a record breaks that its type cannot say, or None."""
        if record.dtype not in FORMATS:
            near = near_names(record.dtype, FORMATS)
            return f"no dtype is called {record.dtype!r}" + (f", only {near[0]}" if near else "")
        if record.sample not in self._first_samples:
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

    def misplaced(self, record: Record) -> str | None:
        """Say why a record does not fit the mesh or this file, or None."""
        if self._num_axes is None:
            return None if record.placement is None else "a placement in a run without a mesh"
        if record.rank != self._rank:
            return f"a record of rank {record.rank} in {records_name(self._rank)}"
        if record.placement is not None and len(record.placement) != self._num_axes:
            return f"a placement on {len(record.placement)} axes; the mesh has {self._num_axes}"
        return None


_SITE = re.compile(SITE_PATTERN)


def _are_digests(texts: Sequence[str | None]) -> bool:
    """Is each 32 hexadecimal digits, where it is there?"""
    given = [text for text in texts if text is not None]
    joined = "".join(given)
    try:
        same = bytes.fromhex(joined).hex() == joined
    except ValueError:
        return False
    return same and all(len(text) == 32 for text in given)


# Scalar arguments of two calls of one operator: which differ, and how they are said.
#
# Everything that is no tensor is a scalar here: numbers, flags, dims, dtypes. An argument that one
# side leaves out has the default of torch's own schema. Where the values lie in memory (device,
# layout, memory format, pinned) is no operand: it changes no number. Two Python floats that are
# equal but for 2 u32 are the same: they are two ways of writing one number (``head_dim ** -0.5``
# and ``1 / math.sqrt(head_dim)``). So are two fillings of a mask that are both far below every
# score (-inf, finfo.min), and an axis counted from the front and from the end.

_NOT_OPERANDS = frozenset(
    {"device", "layout", "memory_format", "pin_memory", "non_blocking", "generator", "copy"}
)
_SAME_NUMBER = 2 * 2.0**-24
_AXES = frozenset({"dim", "dims", "dim0", "dim1"})
_FILLINGS = frozenset({"value", "other", "fill_value"})
_INTEGERS = frozenset(
    {"other", "alpha", "beta", "exponent", "value", "fill_value", "self", "scale", "min", "max"}
)
"""Arguments whose integers enter the arithmetic; others are sizes, axes and counts."""
_BELOW = -1e4
"""Far below every score; finfo.min of float16 is -65504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherScalar:
    """A scalar argument whose value differs between two calls."""

    argument: str
    reference: Any
    """The reference's value, as JSON has it."""
    candidate: Any
    """The candidate's value, as JSON has it."""
    is_number: bool
    """Both values are numbers that enter the arithmetic, not dims, sizes or flags."""


def other_scalars(reference: Call, candidate: Call) -> list[OtherScalar]:
    """Scalar arguments whose values differ, by the operator's schema. Calls of two operators (or
    two overloads with other names) have nothing in common to compare: an empty list."""
    if _base(reference.operator) != _base(candidate.operator):
        return []
    differing = []
    for name in dict.fromkeys((*reference.arguments, *candidate.arguments)):
        if name in _NOT_OPERANDS:
            continue
        if operand_indices(reference, name) or operand_indices(candidate, name):
            continue
        own, other = _value(reference, name), _value(candidate, name)
        if name in _FILLINGS and _masks(own) and _masks(other):
            continue
        if _same(_from_front(name, own, reference), _from_front(name, other, candidate)):
            continue
        is_number = all(
            name in _INTEGERS
            if type(value) is int
            else type(value) is float or (isinstance(value, dict) and set(value) == {"float"})
            for value in (own, other)
        )
        differing.append(
            OtherScalar(argument=name, reference=own, candidate=other, is_number=is_number)
        )
    return differing


def _from_front(name: str, value: Any, call: Call) -> Any:
    """An axis counted from the front."""
    if name not in _AXES or not call.operands:
        return value
    rank = len(call.operands[0].shape)
    if isinstance(value, list):
        return [_from_front(name, item, call) for item in value]
    return value + rank if type(value) is int and value < 0 else value


def _masks(value: Any) -> bool:
    return value == {"float": "-inf"} or (type(value) in (int, float) and value < _BELOW)


def scalar_words(value: Any) -> str:
    """Write a value for people: numbers and names."""
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    if isinstance(value, list):
        return "[" + ", ".join(scalar_words(item) for item in value) + "]"
    return str(value)[:80]


def _base(operator: str) -> str:
    """Strip the overload and the mark of an operator that writes in place."""
    name = ".".join(operator.split(".")[:2])
    return name if name.endswith("__") else name.rstrip("_")


def _value(call: Call, name: str) -> Any:
    if name in call.arguments:
        return call.arguments[name]
    return _defaults(call.operator).get(name)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    both = [v for v in (value, other) if type(v) in (int, float)]
    if len(both) == 2:
        least = min(abs(value), abs(other))
        return bool(value == other or abs(value - other) <= _SAME_NUMBER * least)
    return type(value) is type(other) and value == other


@functools.cache
def _defaults(operator: str) -> dict[str, Any]:
    """Defaults of the operator's schema, if this torch has it; of aten alone, since asking for
    another package's operator may import it."""
    import torch

    parts = operator.split(".")
    if len(parts) < 2 or parts[0] != "aten" or not all(p.isidentifier() for p in parts):
        return {}
    try:
        packet = getattr(torch.ops.aten, parts[1])
        schema = getattr(packet, parts[2] if len(parts) > 2 else "default")._schema
    except (AttributeError, RuntimeError):
        return {}
    defaults = {}
    for argument in schema.arguments:
        if argument.has_default_value():
            value = argument.default_value
            if isinstance(value, float) and not math.isfinite(value):
                value = {"float": str(value)}
            defaults[argument.name] = value
    return defaults

"""What a run holds of its records: by content, and what of it is on disk.

Tensors of equal digest, dtype and shape are one tensor wherever they lie, so that a run may leave
out bytes that another one has (``capture --only-changed``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.errors import RunFormatError
from divergence.numerics.formats import format_named
from divergence.numerics.summaries.sketch import rows_of
from divergence.run.schema.layout import SHARD_DTYPES
from divergence.run.schema.manifest import Manifest, Sizes
from divergence.run.schema.record import Place, Record

if TYPE_CHECKING:
    from divergence.run.storage.shard import Shard

__all__ = [
    "Content",
    "Part",
    "check_part",
    "contents_of",
    "find_content",
    "parts_of",
    "records_by_content",
    "sizes_of",
    "why_no_bytes",
]

Content = tuple[str, str, tuple[int, ...]]
"""(digest of either kind, dtype, shape)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor on disk that is kept of a record: its bytes, or its sketch."""

    place: Place
    xxh3: str | None
    """Digest of that tensor's bytes, where known."""
    dtype: str
    shape: tuple[int, ...]


def parts_of(record: Record) -> list[Part]:
    """The record's bytes and its sketch, in this order, as far as they are kept."""
    found: list[Part] = []
    if record.place is not None:
        found.append(Part(record.place, record.xxh3, record.dtype, record.shape))
    sketch = record.sketch
    if sketch is not None:
        shape = rows_of(record.shape)[0], sketch.num_projections + 2
        found.append(Part(sketch.place, sketch.xxh3, "float32", shape))
    return found


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
    wanted = math.prod(part.shape) * format_named(part.dtype).itemsize
    if entry.num_bytes != wanted:
        raise RunFormatError(
            f"record needs {wanted} bytes, its tensor holds {entry.num_bytes}", where=where
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
    return [
        (digest, record.dtype, record.shape)
        for digest in (record.xxh3, record.fold)
        if digest is not None
    ]


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
    return next((known[one] for one in contents_of(record) if one in known), None)


def sizes_of(records: Sequence[Record]) -> Sizes:
    """What a run holds, by its records: a manifest that a crash left behind says less."""
    tensors: dict[Place, int] = {}
    for record in records:
        for part in parts_of(record):
            num_bytes = math.prod(part.shape) * format_named(part.dtype).itemsize
            tensors[part.place] = num_bytes
    return Sizes(
        num_records=len(records),
        num_tensors=len(tensors),
        num_shards=len({place.shard for place in tensors}),
        stored_bytes=sum(tensors.values()),
        seen_bytes=sum(r.numel * format_named(r.dtype).itemsize for r in records),
    )


def why_no_bytes(manifest: Manifest) -> str:
    """Where the bytes are that a run does not have."""
    plan = manifest.plan
    if plan.only_changed is not None:
        return f"what did not change is in run {plan.only_changed}, which is not at hand"
    return f"the run was captured with --store {plan.store}"

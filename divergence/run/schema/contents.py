"""What a run holds: by content, what of it is on disk, and where nan and inf begin.

Tensors of equal digest, dtype and shape are one tensor wherever they lie, so that a run may leave
out bytes that another one has (``capture --only-changed``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from divergence.errors import RunFormatError
from divergence.numerics.formats import format_named
from divergence.run.schema.layout import SHARD_DTYPES
from divergence.run.schema.manifest import NO_LABEL, Manifest, SampleTokens, Sizes, Tokens
from divergence.run.schema.record import Coordinates, PassName, Place, Record, Sketch
from divergence.run.schema.site import is_operator_site, module_of

if TYPE_CHECKING:
    from divergence.run.storage.blob import Blob
    from divergence.run.storage.shard import Shard

__all__ = [
    "Content", "Digests", "Part", "SiteCounts", "StoredRecords", "call_passes", "check_part",
    "contents_of", "count_passes", "count_sites", "each_of", "find_content", "first_nonfinite",
    "is_mask", "labels_text", "nonfinite_text", "num_kept", "num_labels", "parts_of",
    "records_at", "records_by_content", "shards_of", "site_names", "sizes_counted",
    "sizes_of", "why_no_bytes",
]  # fmt: skip

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
        parts.append(Part(sketch.place, sketch.xxh3, "float32", _shape_of(sketch, record.shape)))
    return parts


def _shape_of(sketch: Sketch, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of what is stored: numerics.summaries.sketch.Projections.joined."""
    from divergence.numerics.summaries.sketch import grid_of, rows_of

    num_rows, num_cols = rows_of(shape)[0], sketch.num_projections + 2
    if not sketch.num_pooled:
        return num_rows, num_cols
    return (num_rows * num_cols + grid_of(shape)[0] * sketch.num_pooled,)


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


class StoredRecords(Sequence[Record]):
    """The records of a large run, which lie in its files until they are asked for.

    What most often is asked of all of them is known without (run/table.py); a list answers the same
    by the functions below. Going through all of them keeps them, but for ``each``.
    """

    @abstractmethod
    def each(self) -> Iterator[Record]:
        """All in order; none is kept."""

    @abstractmethod
    def count_passes(self) -> dict[str, int]:
        """Number of records by pass, in the order of first appearance."""

    @abstractmethod
    def count_sites(self) -> list[SiteCounts]:
        """What there is of each site, in the order of first appearance."""

    @abstractmethod
    def call_passes(self) -> set[PassName]:
        """The passes that hold operators' calls."""

    @abstractmethod
    def records_at(self, sites: Collection[str]) -> list[Record]:
        """The records of these sites, in order."""

    @abstractmethod
    def nonfinite(self) -> list[Record]:
        """The records with nan or inf, as far as statistics were kept."""

    @abstractmethod
    def find(self, coordinates: Coordinates) -> Record | None:
        """The last record there, or None."""

    @abstractmethod
    def shards(self) -> set[str]:
        """The names of all shards in use."""

    @abstractmethod
    def num_kept(self) -> int:
        """Number of records of which anything is on disk."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """As ``sizes_of``."""

    @abstractmethod
    def places_are_sound(
        self, shard_of: Callable[[Record, str], Shard], blob_of: Callable[[str], Blob]
    ) -> bool:
        """Is in the shards what the records say? False where one is not sound: going through all
        records says which and why."""

    @abstractmethod
    def finish(self) -> None:
        """Every place was checked, and sizes were counted: lets go of what only that needs."""


def each_of(records: Sequence[Record]) -> Iterable[Record]:
    """All in order, once; none stays in memory that was not there before."""
    return records.each() if isinstance(records, StoredRecords) else records


def count_passes(records: Sequence[Record]) -> dict[str, int]:
    """As StoredRecords.count_passes."""
    if isinstance(records, StoredRecords):
        return records.count_passes()
    return dict(Counter(record.pass_ for record in records))


def count_sites(records: Sequence[Record]) -> list[SiteCounts]:
    """As StoredRecords.count_sites."""
    if isinstance(records, StoredRecords):
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
    if isinstance(records, StoredRecords):
        return {held.site for held in records.count_sites()}
    return {record.site for record in records}


def call_passes(records: Sequence[Record]) -> set[PassName]:
    """As StoredRecords.call_passes."""
    if isinstance(records, StoredRecords):
        return records.call_passes()
    return {record.pass_ for record in records if record.call is not None}


def records_at(records: Sequence[Record], sites: Collection[str]) -> list[Record]:
    """As StoredRecords.records_at."""
    if isinstance(records, StoredRecords):
        return records.records_at(sites)
    return [record for record in records if record.site in sites]


def num_kept(records: Sequence[Record]) -> int:
    """As StoredRecords.num_kept."""
    if isinstance(records, StoredRecords):
        return records.num_kept()
    return sum(bool(parts_of(record)) for record in records)


def shards_of(records: Sequence[Record]) -> set[str]:
    """The shards in use."""
    if isinstance(records, StoredRecords):
        return records.shards()
    return {part.place.shard for record in records for part in parts_of(record)}


def sizes_of(records: Sequence[Record]) -> Sizes:
    """Sizes counted over a run's records: the manifest that a crash left behind has older ones."""
    if isinstance(records, StoredRecords):
        return records.sizes()
    return sizes_counted(records)


def sizes_counted(records: Iterable[Record]) -> Sizes:
    """As ``sizes_of``, going through the records once."""
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


def first_nonfinite(manifest: Manifest, records: Sequence[Record]) -> Record | None:
    """The first record, in execution order of the free pass, with nan or inf that is no mask's.

    From statistics alone, which every run holds but those of ``--store hash``. -inf is left to
    masks, to logits and to what lies inside a block; rows of padding, which the statistics count
    too, are passed over.
    """
    bad = [
        record
        for record in (records.nonfinite() if isinstance(records, StoredRecords) else records)
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
    """The digests; None where one is missing."""
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

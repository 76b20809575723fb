"""A run of several ranks as one: shards joined to the tensors that they divide."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np

from divergence.errors import RunFormatError
from divergence.numerics.arrays import joined, rounded, wide
from divergence.numerics.formats import format_of
from divergence.numerics.summary import Summary, summarize
from divergence.run.contents import Digests
from divergence.run.reader import Run, View
from divergence.run.record import Coordinates, PassName, Record

if TYPE_CHECKING:
    from divergence.numerics.sketches import Projections
    from divergence.run.storage import Bytes
    from divergence.words import Progress


# The parts that ranks hold of one tensor, as a tree: laid side by side, or added.
#
# Built axis by axis from the innermost of the mesh, so that two axes that divide the same dimension
# divide it one within the other. What cannot be put together says why.


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts laid side by side along ``dim``, or added (``dim`` None), in the order of an axis."""

    parts: tuple[Joined | Record, ...]
    dim: int | None
    how: str = "sum"


@dataclass(frozen=True, slots=True)
class Share:
    """Says what one rank holds of a whole tensor: ``index`` cuts it out of that."""

    rank: int
    record: Record
    index: tuple[slice, ...]


class NotWholeError(Exception):
    """The parts make no tensor, and this says why."""


def along(column: dict[int, Joined | Record], word: str, axis: str, size: int) -> Joined | Record:
    """The parts at the places of one axis, joined. ``word``: their placement on it."""
    if word == "replicate":
        return column[min(column)]
    if word == "single":
        if len(column) > 1:
            raise NotWholeError(f"{len(column)} places of {axis} each say that they alone hold it")
        return next(iter(column.values()))
    num_missing = size - len(column)
    if num_missing:
        first = next(place for place in range(size) if place not in column)
        raise NotWholeError(
            f"the part of place {first} of {axis}"
            + (f" and {num_missing - 1} more" if num_missing > 1 else "")
            + " was not recorded"
        )
    parts = tuple(column[place] for place in range(size))
    kind, _, rest = word.partition(":")
    if kind == "partial":
        if len({shape_of(part) for part in parts}) > 1:
            raise NotWholeError(f"the terms along {axis} are of different shapes")
        return Joined(parts, None, rest) if size > 1 else parts[0]
    dim = int(rest)
    shapes = [shape_of(part) for part in parts]
    if (
        any(dim >= len(shape) for shape in shapes)
        or len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1
    ):
        raise NotWholeError(f"the parts along {axis} do not fit: {', '.join(map(str, shapes[:4]))}")
    return Joined(parts, dim) if size > 1 else parts[0]


def leaves_of(whole: Joined | Record) -> Iterable[Record]:
    if isinstance(whole, Record):
        yield whole
        return
    for part in whole.parts:
        yield from leaves_of(part)


def adds(whole: Joined | Record) -> bool:
    if isinstance(whole, Record):
        return False
    return whole.dim is None or any(adds(part) for part in whole.parts)


def shape_of(whole: Joined | Record) -> tuple[int, ...]:
    if isinstance(whole, Record):
        return whole.shape
    shapes = [shape_of(part) for part in whole.parts]
    if whole.dim is None:
        return shapes[0]
    length = sum(shape[whole.dim] for shape in shapes)
    return (*shapes[0][: whole.dim], length, *shapes[0][whole.dim + 1 :])


def shares_of(whole: Joined | Record, index: tuple[slice, ...]) -> Iterator[Share]:
    """Every leaf with the part of the whole tensor that it is (of terms: all of it)."""
    if isinstance(whole, Record):
        yield Share(whole.rank, whole, index)
        return
    start = 0 if whole.dim is None else index[whole.dim].start or 0
    for part in whole.parts:
        inner = index
        if whole.dim is not None:
            length = shape_of(part)[whole.dim]
            cut = slice(start, start + length)
            inner = (*index[: whole.dim], cut, *index[whole.dim + 1 :])
            start += length
        yield from shares_of(part, inner)


def combined(terms: Iterable[np.ndarray], how: str) -> np.ndarray:
    """Terms as one tensor: sums and means in float64 (float32 of what is narrower would round in
    some order of its own), rounded once to the terms' dtype."""
    terms = iter(terms)
    first = next(terms)
    form = format_of(first.dtype)
    choose = {"max": np.maximum, "min": np.minimum}.get(how, np.add)
    if form.kind != "float":
        if how == "mean":
            raise RunFormatError("whole numbers have no mean of their own dtype")
        return functools.reduce(choose, terms, first)
    total, count = wide(first), 1
    for term in terms:
        total, count = choose(total, wide(term)), count + 1
    return rounded(total / count if how == "mean" else total, form)


def merged(summaries: Sequence[Summary], numels: Sequence[int]) -> Summary:
    """The summary of parts laid side by side: extremes and counts as they are, mean and rms
    weighted by the number of finite elements."""
    counts = {
        name: sum(getattr(s, name) for s in summaries)
        for name in ("num_nan", "num_posinf", "num_neginf", "num_zero")
    }
    finite = [
        (s.min, s.max, s.mean, s.rms, s.absmax, numel - s.num_nan - s.num_posinf - s.num_neginf)
        for s, numel in zip(summaries, numels, strict=True)
        if s.min is not None
        and s.max is not None
        and s.mean is not None
        and s.rms is not None
        and s.absmax is not None
    ]
    total = sum(count for *_, count in finite)
    if not total:
        return Summary(min=None, max=None, mean=None, rms=None, absmax=None, **counts)
    lows, highs, means, all_rms, absmaxs, sizes = zip(*finite, strict=True)
    shares = [size / total for size in sizes]
    top = max(all_rms)  # scaled by it, squares stay in range
    squares = [(rms / top) ** 2 * share for rms, share in zip(all_rms, shares, strict=True) if top]
    return Summary(
        min=min(lows),
        max=max(highs),
        mean=math.fsum(mean * share for mean, share in zip(means, shares, strict=True)),
        rms=top * math.sqrt(sum(squares)),
        absmax=max(absmaxs),
        **counts,
    )


# A run of several ranks, seen as a run of one: shards joined, terms added, replicas held together.
#
# What a model computes does not depend on how it is divided, so two runs are compared by their
# whole tensors, whatever mesh made each of them. ``unsharded(run)`` is a view: its records are
# whole tensors, and reading one joins its parts, so that no more than a tensor is ever held.
#
# * ``unmade``: tensors whose parts are not all there or state no placement, with the reason;
# * ``disagreements``: replicas that are not equal bit for bit, though each is the same operators on
#   the same numbers. The version of most ranks (of the lowest, where none has most) is then used;
# * ``shares``: the part of each rank, to find which one differs.
#
# A joined tensor has no digest, since its bytes are nowhere in one piece. It is compared by its
# values; where its parts' bytes were not kept, by their digests (``digests``), with a run that
# is divided alike or that has the bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDisagreement:
    """Ranks that should hold the same tensor and do not.

    ``ranks``: those whose version is not that of ``peers``. ``records``: one of each version, that
    of ``peers`` first.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    records: tuple[Record, ...]


def unsharded(run: Run) -> Run:
    """The run as it would look from one process; the run itself where one made it."""
    if run.manifest.mesh is None or isinstance(run, UnshardedRun):
        return run
    return UnshardedRun(run)


class UnshardedRun(View):
    """Whole tensors of a run of several ranks. ``run``: the run as it lies on disk."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, [])
        self.disagreements: list[RankDisagreement] = []
        self._whole: dict[Coordinates, Joined | Record] = {}
        self._records: dict[Coordinates, Record] = {}
        groups: dict[Coordinates, list[Record]] = {}
        for record in run.records:
            groups.setdefault(record.coordinates, []).append(record)
        for coordinates, members in groups.items():
            try:
                whole = self._join(members)
                record = self._record(members, whole)
            except NotWholeError as reason:
                self.unmade[coordinates] = str(reason)
                continue
            self._whole[coordinates] = whole
            self._records[coordinates] = record
        # forward by forward: ranks wrote side by side
        self.records = sorted(
            self._records.values(),
            key=lambda record: (_PASSES[record.pass_], record.sample, record.step, record.order),
        )

    def find(self, coordinates: Coordinates) -> Record | None:
        return self._records.get(coordinates)

    def array(self, record: Record, *, verify: bool = True) -> np.ndarray:
        """Read as a run of one process is read; a tensor in parts is joined, which makes a copy."""
        whole = self._whole.get(record.coordinates)
        if not isinstance(whole, Joined) or not self._is_whole(record):
            return self.run.array(record, verify=verify)
        return self._read(whole, verify)

    def shares(self, record: Record) -> list[Share]:
        """The parts of a tensor that ranks hold pieces of; empty where each rank holds all."""
        whole = self._whole.get(record.coordinates, record)
        if isinstance(whole, Record):
            return []
        return list(shares_of(whole, (slice(None),) * len(record.shape)))

    def digests(self, record: Record) -> Digests:
        """Those of each part, where it is in parts."""
        parts = self.shares(record)
        if not parts:
            return super().digests(record)
        return Digests.of([part.record for part in parts], tuple(part.index for part in parts))

    def files(self) -> dict[str, int]:
        return self.run.files()

    def whole_files(self) -> Iterator[tuple[str, int, Iterator[Bytes]]]:
        return self.run.whole_files()

    def holding(self, other: Record) -> Record | None:
        return self.run.holding(other)

    def read_sketch(self, record: Record, *, verify: bool = True) -> Projections:
        return self.run.read_sketch(record, verify=verify)

    def verify(self, progress: Progress | None = None) -> list[str]:
        return self.run.verify(progress)

    def close(self) -> None:
        self.run.close()

    def _is_whole(self, record: Record) -> bool:
        """Is it of this view? By value: a record may have been sent by another process."""
        return self._records.get(record.coordinates) == record

    def stored(self, record: Record) -> Iterable[Record]:
        """The records on disk that make it."""
        if not self._is_whole(record):
            return (record,)
        return leaves_of(self._whole[record.coordinates])

    def _read(self, whole: Joined | Record, verify: bool) -> np.ndarray:
        if isinstance(whole, Record):
            return self.run.array(whole, verify=verify)
        if whole.dim is not None:
            return joined([self._read(part, verify) for part in whole.parts], whole.dim)
        return combined((self._read(part, verify) for part in whole.parts), whole.how)

    def _join(self, members: Sequence[Record]) -> Joined | Record:
        """One tensor of what the ranks hold, axis by axis from the innermost."""
        mesh = self.manifest.mesh
        first = members[0]
        silent = [record.rank for record in members if record.placement is None]
        if silent:
            raise NotWholeError(
                f"what of it each rank holds is not known (rank {silent[0]} has "
                f"{list(next(r for r in members if r.rank == silent[0]).shape)})"
            )
        if any(record.placement != first.placement for record in members):
            raise NotWholeError(
                "its ranks state different placements: "
                + " and ".join(sorted({", ".join(r.placement or ()) for r in members}))
            )
        if any(record.dtype != first.dtype for record in members):
            raise NotWholeError("its ranks hold it in different dtypes")
        if any(record.positions != first.positions for record in members):
            raise NotWholeError("its ranks hold different token positions of it")
        assert mesh is not None and first.placement is not None  # a run of one process is whole
        level: dict[tuple[int, ...], Joined | Record] = dict(self._agreed(members))
        for axis in reversed(range(len(mesh.axes))):
            word = first.placement[axis]
            columns: dict[tuple[int, ...], dict[int, Joined | Record]] = {}
            for place, part in level.items():
                columns.setdefault(place[:axis], {})[place[axis]] = part
            level = {
                place: along(column, word, mesh.axes[axis].name, mesh.axes[axis].size)
                for place, column in columns.items()
            }
        return level[()]

    def _agreed(self, members: Sequence[Record]) -> dict[tuple[int, ...], Record]:
        """The agreed version, by place with 0 on the axes that replicate.

        Records that differ only in their place on such axes must be equal; where they are not, the
        disagreement is noted.
        """
        mesh = self.manifest.mesh
        placement = members[0].placement
        assert mesh is not None and placement is not None  # _join saw to it
        copies = [word == "replicate" for word in placement]
        groups: dict[tuple[int, ...], list[Record]] = {}
        for record in members:
            places = mesh.places_of(record.rank)
            key = tuple(0 if copied else p for p, copied in zip(places, copies, strict=True))
            groups.setdefault(key, []).append(record)
        if not any(copies):
            return {place: group[0] for place, group in groups.items()}
        agreed: dict[tuple[int, ...], Record] = {}
        for place, group in groups.items():
            kind = next((k for k in ("xxh3", "fold") if all(getattr(r, k) for r in group)), None)
            if kind is None:
                raise NotWholeError("its ranks hold digests of two kinds, which cannot be compared")
            versions: dict[tuple[tuple[int, ...], str], list[Record]] = {}
            for record in sorted(group, key=lambda record: record.rank):
                versions.setdefault((record.shape, getattr(record, kind)), []).append(record)
            best = max(versions.values(), key=len)  # of equally many, the lowest rank's
            agreed[place] = best[0]
            if len(versions) > 1:
                odd = [v for v in versions.values() if v is not best]
                self.disagreements.append(
                    RankDisagreement(
                        ranks=tuple(sorted(record.rank for v in odd for record in v)),
                        peers=tuple(record.rank for record in best),
                        records=(best[0], *(v[0] for v in odd)),
                    )
                )
        return agreed

    def _record(self, members: Sequence[Record], whole: Joined | Record) -> Record:
        if isinstance(whole, Record):
            return whole
        leaves = list(leaves_of(whole))
        kept = all(leaf.place is not None for leaf in leaves)
        added = adds(whole)
        if added and not kept:
            raise NotWholeError("its ranks hold terms of a sum, of which no bytes are kept")
        if added:
            summary: Summary | None = summarize(self._read(whole, True))
        else:
            summaries = [leaf.summary for leaf in leaves if leaf.summary is not None]
            numels = [leaf.numel for leaf in leaves]
            # None where digests alone were kept
            summary = merged(summaries, numels) if len(summaries) == len(leaves) else None
        return msgspec.structs.replace(
            leaves[0],
            shape=shape_of(whole),
            summary=summary,
            place=leaves[0].place if kept else None,
            xxh3=None,
            fold=None,
            sketch=None,
            rank=min(record.rank for record in members),
            order=min(record.order for record in members),
        )


_PASSES = {name: number for number, name in enumerate(get_args(PassName))}

"""The parts that ranks hold of one tensor, as a tree: laid side by side, or added.

Built axis by axis from the innermost of the mesh, so that two axes that divide the same dimension
divide it one within the other. What cannot be put together says why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.errors import RunFormatError
from divergence.numerics.formats import format_named
from divergence.numerics.summaries.summary import Summary
from divergence.run.schema.record import Record

if TYPE_CHECKING:
    import torch

__all__ = [
    "Joined", "NotWholeError", "Share", "adds", "along", "combined", "leaves_of", "merged",
    "shape_of", "shares_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts laid side by side along ``dim``, or added (``dim`` None), in the order of an axis."""

    parts: tuple[Joined | Record, ...]
    dim: int | None
    how: str = "sum"


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a whole tensor: ``index`` cuts it out of that."""

    rank: int
    record: Record
    index: tuple[slice, ...]


class NotWholeError(Exception):
    """Why the parts make no tensor."""


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


def shares_of(whole: Joined | Record, num_dims: int) -> list[Share]:
    """What each rank holds of a tensor; empty where one rank holds all."""
    if isinstance(whole, Record):
        return []
    return list(_cut(whole, (slice(None),) * num_dims))


def _cut(whole: Joined | Record, index: tuple[slice, ...]) -> Iterator[Share]:
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
        yield from _cut(part, inner)


def combined(terms: Iterable[torch.Tensor], how: str) -> torch.Tensor:
    """Terms as one tensor: sums and means in float64 (float32 of what is narrower would round in
    some order of its own), rounded once to the terms' dtype."""
    import torch

    terms = iter(terms)
    first = next(terms)
    dtype = first.dtype
    if how in ("max", "min"):
        choose = torch.maximum if how == "max" else torch.minimum
        return functools.reduce(choose, terms, first)
    if format_named(str(dtype).removeprefix("torch.")).kind != "float":
        if how == "mean":
            raise RunFormatError("whole numbers have no mean of their own dtype")
        return functools.reduce(torch.add, terms, first)
    total, count = first.double(), 1
    for term in terms:
        total, count = total + term.double(), count + 1
    return (total / count if how == "mean" else total).to(dtype)


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
        if s.min is not None and s.max is not None and s.mean is not None
        and s.rms is not None and s.absmax is not None
    ]  # fmt: skip
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

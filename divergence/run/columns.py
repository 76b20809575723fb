"""What is kept of every record of a large run: numbers, in columns.

Some 25 bytes a record: what tells records apart (pass, sample, step, site, rank), their kind (dtype
and shape), whether there is a call, bytes or a sketch, and where the line begins; until places are
checked also the shard and the digest, which is the key in it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from divergence.run.schema.layout import MAX_LINE_BYTES
from divergence.run.schema.record import Checked, Numbering, RecordCheck, UnsoundError

__all__ = ["CALL", "KEPT", "SKETCH", "Array", "Columns", "PortionSource"]

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
    return _narrowed(np.fromiter(numbers, np.int64, len(numbers)))


def _narrowed(numbers: Array) -> Array:
    """As the smallest type without sign that holds them."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))), copy=False)


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
            ("begin", _begins(lines, num)),
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


def _begins(lines: memoryview, num: int) -> Array:
    """Where each of ``num`` lines begins. Raises UnsoundError."""
    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == 10)
    begins = np.zeros(len(ends) + 1, np.uint32)
    begins[1:] = ends + 1
    longest = int(np.diff(begins, append=len(lines) + 1).max())
    if len(begins) != num or longest > MAX_LINE_BYTES:
        raise UnsoundError
    return begins

"""The shard in the making, and what is in shards already.

``ShardBuilder``: tensors whose bytes are kept, and the lines that will point at them.
``DedupIndex``: by the digest of its bytes, where a stored tensor is and what it looks like.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import xxhash

from divergence.numerics.summaries.summary import Summary
from divergence.run.schema.layout import shard_name
from divergence.run.schema.record import Place
from divergence.run.writing.buffer import Slot

if TYPE_CHECKING:
    from divergence.run.schema.manifest import Sizes
    from divergence.run.schema.record import Record
    from divergence.run.storage.target import Target
    from divergence.run.writing.captured_tensor import ShardEntry

__all__ = ["DedupIndex", "ShardBuilder"]


_shard_name = lru_cache(maxsize=64)(shard_name)


def _key(digest: str, clash: int) -> str:
    """``clash``: how many tensors of these bytes, but of another kind, the shard held before."""
    return f"{digest}-{clash}" if clash else digest


_SHORT_BYTES = 1 << 14
_APART_BYTES = 1 << 20
"""The ring gives places back in their order: where most tensors leave no bytes, a few token ids
that wait for their shard would keep everything behind them. So many are copied out of it."""


class ShardBuilder:
    """Tensors by key, and encoded lines. ``shard``: the number of the shard that is built."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._encoder = msgspec.json.Encoder()
        self._hasher = xxhash.xxh3_128()
        self.shard = 0
        self._empty()

    def _empty(self) -> None:
        self._pieces: dict[str, ShardEntry] = {}
        self._lines: list[bytes] = []
        self._apart_bytes = 0
        self.num_bytes = self.num_records = self.line_bytes = self.seen_bytes = 0

    def add(self, digest: str, piece: ShardEntry) -> tuple[Place, int]:
        """Where its bytes will be, and how many equal ones of another dtype or shape are there."""
        clash, key = 0, digest
        while key in self._pieces:
            clash += 1
            key = _key(digest, clash)
        num_bytes = piece.data.nbytes
        if (
            num_bytes <= _SHORT_BYTES
            and self._apart_bytes + num_bytes <= _APART_BYTES
            and isinstance(piece.holder, Slot)
        ):
            piece = piece.apart()
            self._apart_bytes += num_bytes
        self._pieces[key] = piece
        self.num_bytes += num_bytes
        return Place(shard=_shard_name(self._rank, self.shard), key=key), clash

    def add_records(self, records: Sequence[Record], *, seen_bytes: int) -> None:
        """Adds their lines. ``seen_bytes``: of the tensors they describe, stored or not."""
        lines = self._encoder.encode_lines(records)
        self._lines.append(lines)
        self.num_records += len(records)
        self.line_bytes += len(lines)
        self.seen_bytes += seen_bytes

    def digest(self) -> str:
        """xxh3-128 of all lines that were written."""
        return self._hasher.hexdigest()

    def write(self, target: Target, sizes: Sizes) -> None:
        """Writes the shard, then the lines, and adds them to ``sizes``."""
        if not self._lines:
            return
        if self._pieces:
            target.write_shard(shard_name(self._rank, self.shard), self._pieces)
            self.shard += 1
        lines = b"".join(self._lines)
        target.append_records(lines)
        self._hasher.update(lines)
        sizes.num_records += self.num_records
        sizes.num_tensors += len(self._pieces)
        sizes.num_shards += bool(self._pieces)
        sizes.stored_bytes += self.num_bytes
        sizes.seen_bytes += self.seen_bytes
        self._empty()


ENTRY_BYTES = 320
"""Of one remembered tensor: its key, its packed value and their places in a dict."""

_PACKED = struct.Struct("<IIB5d4Q")
_DIGEST_BYTES = 16
_NUM_STATISTICS = 5
"""Shard, clash, are there no statistics, then Summary's fields: five statistics, four counts."""

_Kind = tuple[str, tuple[int, ...]]
"""dtype and shape: equal bytes of another kind are another tensor."""


class DedupIndex:
    """``find`` and ``add`` by the ``key`` of (digest, dtype, shape); at most ``max_bytes`` in all.

    Equal tensors are stored once, so the writer remembers each that it wrote: packed, some 300
    bytes a tensor, and of bounded number, because a capture may make as many as it likes. When the
    memory is full the ones not met for longest go, and their bytes, should they come again, are
    stored again.
    """

    def __init__(self, *, max_bytes: int, rank: int) -> None:
        self._rank = rank
        self._half = max(1, max_bytes // ENTRY_BYTES // 2)
        self._kinds: dict[_Kind, bytes] = {}
        # Two halves instead of an order: a full young one becomes the old one, which is dropped.
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def find(self, key: bytes) -> tuple[Place, Summary] | None:
        packed = self._young.get(key)
        if packed is None:
            packed = self._old.pop(key, None)
            if packed is None:
                return None
            self._insert(key, packed)
        shard, clash, empty, *values = _PACKED.unpack(packed)
        if empty:
            values[:_NUM_STATISTICS] = [None] * _NUM_STATISTICS
        digest = key[:_DIGEST_BYTES].hex()
        place = Place(shard=_shard_name(self._rank, shard), key=_key(digest, clash))
        return place, Summary(**dict(zip(Summary.__struct_fields__, values, strict=True)))

    def add(self, key: bytes, *, shard: int, clash: int, summary: Summary) -> None:
        values = msgspec.structs.astuple(summary)
        empty = summary.min is None
        if empty:
            values = (0.0,) * _NUM_STATISTICS + values[_NUM_STATISTICS:]
        self._insert(key, _PACKED.pack(shard, clash, empty, *values))

    def _insert(self, key: bytes, packed: bytes) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = packed

    def key(self, digest: bytes, kind: _Kind) -> bytes:
        """The digest, and a number for its kind."""
        number = self._kinds.get(kind)
        if number is None:
            number = self._kinds[kind] = len(self._kinds).to_bytes(4, "little")
        return digest + number

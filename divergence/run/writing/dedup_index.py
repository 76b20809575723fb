"""What a run holds already: by the digest of its bytes, where they are and what they look like.

Equal tensors are stored once, so the writer remembers each that it wrote: packed, some 300 bytes
a tensor, and of bounded number, because a capture may make as many as it likes. When the memory
is full the ones not met for longest go, and their bytes, should they come again, are stored again.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from msgspec.structs import astuple

from divergence.numerics.summaries.summary import Summary
from divergence.run.schema.layout import shard_name
from divergence.run.schema.record import Place

__all__ = ["DedupIndex", "Kind"]

ENTRY_BYTES = 320
"""Of one remembered tensor: its key, its packed value and their places in a dict."""

_PACKED = struct.Struct("<IIB5d4Q")
_NUM_STATISTICS = 5
"""Shard, clash, are there no statistics, then Summary's fields: five statistics, four counts."""

Kind = tuple[str, tuple[int, ...]]
"""dtype and shape: equal bytes of another kind are another tensor."""


class DedupIndex:
    """``find`` and ``add`` by (digest, dtype, shape); at most ``max_bytes`` in all."""

    def __init__(self, *, max_bytes: int, rank: int) -> None:
        self._rank = rank
        self._half = max(1, max_bytes // ENTRY_BYTES // 2)
        self._kinds: dict[Kind, bytes] = {}
        # Two halves instead of an order: a full young one becomes the old one, which is dropped.
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def find(self, digest: bytes, kind: Kind) -> tuple[Place, Summary] | None:
        key = self._key(digest, kind)
        packed = self._young.get(key)
        if packed is None:
            packed = self._old.pop(key, None)
            if packed is None:
                return None
            self._insert(key, packed)
        shard, clash, empty, *values = _PACKED.unpack(packed)
        if empty:
            values[:_NUM_STATISTICS] = [None] * _NUM_STATISTICS
        return place_of(digest, clash, rank=self._rank, shard=shard), Summary(
            **dict(zip(Summary.__struct_fields__, values, strict=True))
        )

    def add(self, digest: bytes, kind: Kind, *, shard: int, clash: int, summary: Summary) -> None:
        values = astuple(summary)
        empty = summary.min is None
        if empty:
            values = (0.0,) * _NUM_STATISTICS + values[_NUM_STATISTICS:]
        self._insert(self._key(digest, kind), _PACKED.pack(shard, clash, empty, *values))

    def _insert(self, key: bytes, packed: bytes) -> None:
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = packed

    def _key(self, digest: bytes, kind: Kind) -> bytes:
        number = self._kinds.get(kind)
        if number is None:
            number = self._kinds[kind] = len(self._kinds).to_bytes(4, "little")
        return digest + number


def place_of(digest: bytes, clash: int, *, rank: int, shard: int) -> Place:
    """``clash``: how many tensors of these bytes, but of another kind, the shard held before."""
    key = digest.hex()
    return Place(shard=_shard_name(rank, shard), key=f"{key}-{clash}" if clash else key)


_shard_name = lru_cache(maxsize=64)(shard_name)

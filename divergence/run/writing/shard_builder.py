"""The shard in the making: tensors whose bytes are kept, and the lines that will point at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from divergence.run.schema.layout import shard_name
from divergence.run.schema.record import Place
from divergence.run.writing.buffer import Slot
from divergence.run.writing.dedup_index import place_of

if TYPE_CHECKING:
    from divergence.run.schema.manifest import Sizes
    from divergence.run.schema.record import Record
    from divergence.run.storage.target import Target
    from divergence.run.writing.shard_entry import ShardEntry

__all__ = ["ShardBuilder"]

_SHORT_BYTES = 1 << 14
_APART_BYTES = 1 << 20
"""The ring gives places back in their order: where most tensors leave no bytes, a few token ids
that wait for their shard would keep everything behind them. So many are copied out of it."""


class ShardBuilder:
    """Tensors by key, and encoded lines. ``shard``: the number of the shard they will make."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._encoder = msgspec.json.Encoder()
        self.shard = 0
        self._empty()

    def _empty(self) -> None:
        self._pieces: dict[str, ShardEntry] = {}
        self._lines: list[bytes] = []
        self._apart_bytes = 0
        self.num_bytes = self.num_records = self.line_bytes = self.seen_bytes = 0

    def add(self, digest: bytes, piece: ShardEntry) -> tuple[Place, int]:
        """Where its bytes will be, and how many equal ones of another dtype or shape are there."""
        clash = 0
        place = place_of(digest, clash, rank=self._rank, shard=self.shard)
        while place.key in self._pieces:
            clash += 1
            place = place_of(digest, clash, rank=self._rank, shard=self.shard)
        num_bytes = piece.data.nbytes
        if (
            isinstance(piece.holder, Slot)
            and num_bytes <= _SHORT_BYTES
            and self._apart_bytes + num_bytes <= _APART_BYTES
        ):
            piece = piece.apart()
            self._apart_bytes += num_bytes
        self._pieces[place.key] = piece
        self.num_bytes += num_bytes
        return place, clash

    def add_records(self, records: Sequence[Record], *, seen_bytes: int) -> None:
        """Their lines; ``seen_bytes``: of the tensors they are about, stored or not."""
        lines = self._encoder.encode_lines(records)
        self._lines.append(lines)
        self.num_records += len(records)
        self.line_bytes += len(lines)
        self.seen_bytes += seen_bytes

    def write(self, target: Target, sizes: Sizes) -> None:
        """First the shard, then the lines; ``sizes`` are of what is on disk."""
        if not self._lines:
            return
        if self._pieces:
            target.write_shard(shard_name(self._rank, self.shard), self._pieces)
            self.shard += 1
        target.append_records(b"".join(self._lines))
        sizes.num_records += self.num_records
        sizes.num_tensors += len(self._pieces)
        sizes.num_shards += bool(self._pieces)
        sizes.stored_bytes += self.num_bytes
        sizes.seen_bytes += self.seen_bytes
        self._empty()

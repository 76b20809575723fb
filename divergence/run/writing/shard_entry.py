"""One tensor's bytes on their way into a shard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from divergence.numerics.formats import FORMATS
from divergence.run.schema.fingerprint import plain_tensor, tensor_bytes
from divergence.run.writing.buffer import Slot

if TYPE_CHECKING:
    import torch

    from divergence.run.writing.captured_tensor import CapturedTensor

__all__ = ["ShardEntry", "flat_parts", "piece_of", "piece_of_item"]


class ShardEntry(NamedTuple):
    """dtype (as records name it), shape and bytes. ``holder`` keeps the bytes what they are."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    holder: torch.Tensor | Slot

    def digest(self) -> bytes:
        """xxh3-128 of the bytes."""
        return xxhash.xxh3_128_digest(self.data)

    def flat(self) -> torch.Tensor:
        """The elements on one axis, without a copy."""
        if isinstance(self.holder, Slot):
            return self.holder.tensor(FORMATS[self.dtype].torch_dtype, (math.prod(self.shape),))
        return self.holder.reshape(-1)

    def apart(self) -> ShardEntry:
        """A copy in memory of its own."""
        return piece_of(self.flat().clone().view(self.shape))


def piece_of(tensor: torch.Tensor) -> ShardEntry:
    """A contiguous CPU tensor as a piece, without a copy."""
    name = str(tensor.dtype).removeprefix("torch.")
    return ShardEntry(name, tuple(tensor.shape), tensor_bytes(tensor), tensor)


_FEW_BYTES = 1 << 15
_COPIED_BYTES = 1 << 20


def flat_parts(pieces: Iterable[ShardEntry]) -> Iterator[list[torch.Tensor]]:
    """``[piece.flat() for piece in pieces]``, in parts. The short ones are copied together: a
    decode step leaves thousands, and a view of each costs more than its bytes."""
    part: list[ShardEntry] = []
    copied = 0
    for piece in pieces:
        part.append(piece)
        if piece.data.nbytes <= _FEW_BYTES:
            copied += piece.data.nbytes
        if copied >= _COPIED_BYTES:
            yield _flat(part)
            part, copied = [], 0
    if part:
        yield _flat(part)


def _flat(pieces: list[ShardEntry]) -> list[torch.Tensor]:
    import torch

    found: list[torch.Tensor | None] = [None] * len(pieces)
    alike: dict[tuple[str, int], list[int]] = {}
    for index, piece in enumerate(pieces):
        num_bytes = piece.data.nbytes
        if 0 < num_bytes <= _FEW_BYTES:
            alike.setdefault((piece.dtype, num_bytes), []).append(index)
        else:
            found[index] = piece.flat()
    for (dtype, _), indices in alike.items():
        together = bytearray().join([pieces[index].data for index in indices])
        rows = torch.frombuffer(together, dtype=FORMATS[dtype].torch_dtype)
        for index, row in zip(indices, rows.view(len(indices), -1).unbind(), strict=True):
            found[index] = row
    return [one for one in found if one is not None]


def piece_of_item(item: CapturedTensor) -> ShardEntry:
    """What an item holds, complete."""
    if item.slot is not None:
        return ShardEntry(item.dtype, item.shape, item.slot.bytes(), item.slot)
    assert item.tensor is not None
    return piece_of(plain_tensor(item.tensor))

"""A tensor on its way into a run: what was captured, and its bytes as they go into a shard.

A ``CapturedTensor`` is handed over once whatever number of sites it was seen at. A keeper
(recording.keeper) makes it; the writer completes it: what the keeper left open (digest, summary,
place) is found from its bytes, which are then let go. An item without bytes stores none: its keeper
has filled in all that its records will say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

from divergence.numerics.formats import FORMATS, format_of
from divergence.run.schema.fingerprint import plain_tensor, tensor_bytes
from divergence.run.writing.buffer import Slot

if TYPE_CHECKING:
    import torch

    from divergence.numerics.summaries.sketch import Projections, SumDtype
    from divergence.run.schema.record import Call, PassName, Place, Placement, Sketch, Summary

__all__ = ["CapturedTensor", "Reduced", "ShardEntry", "flat_parts", "piece_of", "piece_of_item"]


class CapturedTensor:
    """``tensor``: a host tensor that nobody writes to any more, or the shape of one whose bytes
    are copied into ``slot``. ``num_bytes``, ``dtype`` and ``shape`` stay when the bytes go."""

    __slots__ = ("_tensor", "digest", "dtype", "fold", "num_bytes", "place", "placement", "reduced",
                 "shape", "sketch", "slot", "summary")  # fmt: skip

    def __init__(self, tensor: torch.Tensor, slot: Slot | None = None) -> None:
        self.slot = slot
        if slot is None:
            self._tensor: torch.Tensor | None = tensor
            self.num_bytes = tensor.numel() * tensor.element_size()
        else:
            self._tensor, self.num_bytes = None, slot.num_bytes
        self.dtype = _NAMES.get(tensor.dtype) or _named(tensor.dtype)
        self.shape = tuple(tensor.shape)
        self.digest: str | None = None
        self.fold: str | None = None
        self.summary: Summary | None = None
        self.sketch: Sketch | None = None
        self.place: Place | None = None
        self.reduced: Reduced | None = None
        self.placement: dict[str, str] | None = None  # of a DTensor, by axis of its mesh

    @property
    def tensor(self) -> torch.Tensor | None:
        """The bytes as a tensor, complete; None where there are none (any more)."""
        if self.slot is None:
            return self._tensor
        self.slot.bytes()
        return self.slot.tensor(FORMATS[self.dtype].torch_dtype, self.shape)

    @tensor.setter
    def tensor(self, tensor: torch.Tensor | None) -> None:
        """None: let the bytes go. A place in the ring is another's once nobody holds its Slot."""
        self._tensor, self.slot = tensor, None

    @property
    def has_bytes(self) -> bool:
        return self.slot is not None or self._tensor is not None


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a device made of a tensor, still there: ``sums`` of the fold digest, ``statistics`` and
    ``projections`` where they are wanted."""

    sums: tuple[torch.Tensor, int]
    statistics: tuple[torch.Tensor, torch.Tensor] | None = None
    projections: Projections | None = None
    sum_dtype: SumDtype = "float64"


if TYPE_CHECKING:
    Put = tuple[
        CapturedTensor, int, PassName, int, int, str, int, tuple[int, ...] | None, Call | None,
        tuple[Placement, ...] | None,
    ]  # fmt: skip
    """What the writer was given: a tensor, the bytes of its own, and the fields of its record."""

_NAMES: dict[torch.dtype, str] = {}
"""Looked up for every tensor: filled as dtypes are met."""


def _named(dtype: torch.dtype) -> str:
    name = _NAMES[dtype] = format_of(dtype).name
    return name


class ShardEntry(msgspec.Struct, frozen=True):
    """dtype (as records name it), shape and bytes. ``holder`` keeps the bytes what they are."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    holder: torch.Tensor | Slot | bytes

    def digest(self) -> bytes:
        """xxh3-128 of the bytes."""
        return xxhash.xxh3_128_digest(self.data)

    def flat(self) -> torch.Tensor:
        """The elements on one axis, without a copy."""
        if isinstance(self.holder, Slot):
            return self.holder.tensor(FORMATS[self.dtype].torch_dtype, (math.prod(self.shape),))
        assert not isinstance(self.holder, bytes)  # it waits for its shard, and is summarised
        return self.holder.reshape(-1)

    def apart(self) -> ShardEntry:
        """A copy in memory of its own."""
        data = bytes(self.data)
        return ShardEntry(self.dtype, self.shape, memoryview(data), data)


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

    flat: list[torch.Tensor | None] = [None] * len(pieces)
    alike: dict[tuple[str, int], list[int]] = {}
    for index, piece in enumerate(pieces):
        num_bytes = piece.data.nbytes
        if 0 < num_bytes <= _FEW_BYTES:
            alike.setdefault((piece.dtype, num_bytes), []).append(index)
        else:
            flat[index] = piece.flat()
    for (dtype, _), indices in alike.items():
        together = bytearray().join([pieces[index].data for index in indices])
        rows = torch.frombuffer(together, dtype=FORMATS[dtype].torch_dtype)
        for index, row in zip(indices, rows.view(len(indices), -1).unbind(), strict=True):
            flat[index] = row
    return [tensor for tensor in flat if tensor is not None]


def piece_of_item(item: CapturedTensor) -> ShardEntry:
    """What an item holds, complete."""
    if item.slot is not None:
        return ShardEntry(item.dtype, item.shape, item.slot.bytes(), item.slot)
    assert item.tensor is not None
    return piece_of(plain_tensor(item.tensor))

"""A tensor on its way to disk, and the memory that it waits in."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

from divergence.errors import UsageError
from divergence.numerics.formats import FORMATS, format_of
from divergence.numerics.sums import RESIDENT_BYTES, Kernel
from divergence.run.manifest import plain_tensor, tensor_bytes

if TYPE_CHECKING:
    import torch

    from divergence.numerics.sketches import Projections, SumDtype
    from divergence.numerics.summary import Summary
    from divergence.run.record import Apart, Call, PassName, Place, Placement, Sketch


# Host memory that captured tensors wait in: one ring of stated size, used again and again.
#
# A hook copies a tensor into the ring and goes on; the writer's thread reads it there and gives the
# place back. So a capture takes no more memory than the ring, whatever the model and however many
# steps; and pages are touched once, not once a tensor (a fresh allocation of 8 MB costs five
# times its copy, in page faults). For an accelerator the ring is page-locked, which copies that do
# not wait for the device need.
#
# Places are taken in the order of memory by one thread. A place is given back when nobody holds its
# Slot any more: that only marks it, so that any thread may and no lock is needed.

DEFAULT_BUFFER_BYTES = 512 << 20
MIN_BUFFER_BYTES = 16 << 20
"""Below this the bookkeeping of a few thousand waiting records would not fit."""

_ALIGNMENT_BYTES = 16  # of the widest element, complex128


def buffer_bytes(size: int | str) -> int:
    """Bytes: a number, or one with a unit (``512MiB``, ``2GB``). Raises UsageError for what is no
    size, or below the least that works."""
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise UsageError(f"--buffer {size!r} is no number of bytes", hint=_EXAMPLE)
    number, unit = match.groups()
    num_bytes = int(float(number) * _UNITS[(unit or "b").lower()])
    if num_bytes < MIN_BUFFER_BYTES:
        raise UsageError(
            f"--buffer {size}: at least {MIN_BUFFER_BYTES >> 20}MiB is needed", hint=_EXAMPLE
        )
    return num_bytes


_EXAMPLE = f"for example --buffer {DEFAULT_BUFFER_BYTES >> 20}MiB"
_UNITS = {"b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Shares out a buffer of a stated size: an eighth to what is known of tensors that wait, of
    lines not yet written and of tensors stored already; a fixed part to what is worked with
    (summaries, headers, what the memory allocator keeps); the rest to the ring."""

    ring_bytes: int
    shard_bytes: int
    """A shard is gathered in the ring: several must have room."""
    line_bytes: int
    stored_bytes: int
    num_queued: int
    kernel: Kernel = "numpy"
    """The loops that digest what is in the buffer; compiled ones take memory of their own."""

    @classmethod
    def of(cls, num_bytes: int, *, kernel: Kernel = "numpy") -> BufferLimits:
        rest = num_bytes // 8
        ring = num_bytes - rest - _WORK_BYTES - (RESIDENT_BYTES if kernel == "compiled" else 0)
        return cls(
            ring_bytes=ring,
            shard_bytes=ring // 4,
            line_bytes=rest // 8,
            stored_bytes=rest // 2,
            num_queued=rest // 4 // _QUEUED_BYTES,
            kernel=kernel,
        )


_WORK_BYTES = 6 << 20
_QUEUED_BYTES = 1024
"""Of Python objects beside a waiting tensor's bytes."""


_Region = list[int]
"""[begin, given back?]"""


class Slot:
    """A place in the ring, the holder's as long as the Slot lives (views of it do not count).

    ``ready``: waits until a copy under way has arrived, where one is.
    """

    __slots__ = ("_region", "_ring", "begin", "num_bytes", "ready")

    def __init__(self, ring: Buffer, region: _Region, num_bytes: int) -> None:
        self._ring, self._region, self.num_bytes = ring, region, num_bytes
        self.begin = region[0]
        self.ready: Callable[[], object] | None = None

    def __del__(self) -> None:
        try:
            ready, region = self.ready, self._region
        except AttributeError:  # Ctrl-C came before it was made
            return
        if ready is not None:  # nobody wanted it, and it arrives all the same
            ready()
        region[1] = True

    def fill(self, address: int) -> None:
        """Copy the slot's bytes from host memory at ``address``."""
        ctypes.memmove(self._ring.address + self.begin, address, self.num_bytes)

    def bytes(self) -> memoryview:
        """Return what lies here, complete."""
        if self.ready is not None:
            self.ready()
            self.ready = None
        return self._ring.memory[self.begin : self.begin + self.num_bytes]

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The same memory as a tensor, whether or not its bytes are there yet (``ready``).

        A slice of the ring's own tensor: page-locked memory is recognised by where its storage
        begins (an older CANN knows no address within it).
        """
        import torch

        # not an operator of the model's: no mode above may widen it
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            place = self._ring.tensor[self.begin : self.begin + self.num_bytes]
            return place.view(dtype).view(shape)


class Buffer:
    """The ring in a buffer of ``limits``. ``pinned``: page-locked, for copies from a device."""

    def __init__(self, limits: BufferLimits, *, pinned: bool = False) -> None:
        import torch

        self.limits = limits
        num_bytes = self.num_bytes = limits.ring_bytes
        self._map: mmap.mmap | None = None
        if pinned:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            # Anonymous and private: no page is taken before it is written to.
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory, self.address = memoryview(self.tensor.numpy().data), self.tensor.data_ptr()
        self._regions: deque[_Region] = deque()
        self._head = self._touched = 0

    def take(self, num_bytes: int) -> Slot | None:
        """A place for ``num_bytes``; None while there is no room."""
        regions = self._regions
        while regions and regions[0][1]:
            regions.popleft()
        size = (num_bytes + _ALIGNMENT_BYTES - 1) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        size = size or _ALIGNMENT_BYTES
        if not regions:
            begin, room = 0, self.num_bytes  # the lowest addresses are in the caches
        else:
            begin, tail = self._head, regions[0][0]
            if regions[-1][0] < tail:  # gone round already
                room = tail - begin
            elif begin + size > self._touched and size <= tail:
                begin, room = 0, tail  # pages that are there before new ones
            else:
                room = self.num_bytes - begin
        if size > room:
            return None
        region = [begin, False]
        slot = Slot(self, region, num_bytes)
        # In this order: wherever Ctrl-C comes between, no place is lost or given out twice.
        self._head = head = begin + size
        if head > self._touched:
            self._touched = head
        regions.append(region)
        return slot

    @property
    def empty(self) -> bool:
        """Has every place been given back?"""
        return all(free for _, free in self._regions)

    def trim(self) -> None:
        """Give the pages of an empty ring back to the system, until they are used again."""
        if self._map is not None and self.empty and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched = 0


# A tensor on its way into a run: what was captured, and its bytes as they go into a shard.
#
# A ``CapturedTensor`` is handed over once whatever number of sites it was seen at. A keeper
# (recording.keeper) makes it; the writer completes it: what the keeper left open (digest, summary,
# place) is found from its bytes, which are then let go. An item without bytes stores none: its
# keeper has filled in all that its records will say.


class CapturedTensor:
    """``tensor``: a host tensor that nobody writes to any more, or the shape of one whose bytes
    are copied into ``slot``. ``num_bytes``, ``dtype`` and ``shape`` stay when the bytes go."""

    # What the writer fills in is seen on the class until then: an object is made for every tensor.
    digest: str | None = None
    fold: str | None = None
    summary: Summary | None = None
    sketch: Sketch | None = None
    checksum: str | None = None
    apart: Apart | None = None
    """Another tool's, both."""
    place: Place | None = None
    reduced: Reduced | None = None
    placement: dict[str, str] | None = None
    """Of a DTensor, by axis of its mesh."""

    def __init__(self, tensor: torch.Tensor, slot: Slot | None = None) -> None:
        self.slot = slot
        if slot is None:
            self._tensor: torch.Tensor | None = tensor
            self.num_bytes = tensor.numel() * tensor.element_size()
        else:
            self._tensor, self.num_bytes = None, slot.num_bytes
        self.dtype = _NAMES.get(tensor.dtype) or _named(tensor.dtype)
        self.shape = tuple(tensor.shape)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The bytes as a tensor, complete; None where there are none (any more)."""
        slot = self.slot  # once: the writer's thread may let go of it meanwhile
        if slot is None:
            return self._tensor
        slot.bytes()
        return slot.tensor(FORMATS[self.dtype].torch_dtype, self.shape)

    @tensor.setter
    def tensor(self, tensor: torch.Tensor | None) -> None:
        """None: let the bytes go. A place in the ring is another's once nobody holds its Slot."""
        self._tensor, self.slot = tensor, None

    @property
    def has_bytes(self) -> bool:
        return self.slot is not None or self._tensor is not None


@dataclass(frozen=True, slots=True)
class Reduced:
    """Holds what a device made of a tensor, still there: ``sums`` of the fold digest,
    ``statistics`` and ``projections`` where they are wanted."""

    sums: tuple[torch.Tensor, int]
    statistics: tuple[torch.Tensor, torch.Tensor] | None = None
    projections: Projections | None = None
    sum_dtype: SumDtype = "float64"


if TYPE_CHECKING:
    Put = tuple[
        CapturedTensor,
        int,
        PassName,
        int,
        int,
        str,
        int,
        tuple[int, ...] | None,
        Call | None,
        tuple[Placement, ...] | None,
    ]
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

    def apart(self) -> ShardEntry:
        """A copy in memory of its own."""
        data = bytes(self.data)
        return ShardEntry(self.dtype, self.shape, memoryview(data), data)


def piece_of(tensor: torch.Tensor) -> ShardEntry:
    """A contiguous CPU tensor as a piece, without a copy."""
    name = str(tensor.dtype).removeprefix("torch.")
    return ShardEntry(name, tuple(tensor.shape), tensor_bytes(tensor), tensor)


def piece_of_item(item: CapturedTensor) -> ShardEntry:
    """Return what an item holds, complete."""
    if item.slot is not None:
        return ShardEntry(item.dtype, item.shape, item.slot.bytes(), item.slot)
    assert item.tensor is not None
    return piece_of(plain_tensor(item.tensor))

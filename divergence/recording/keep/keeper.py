"""What is kept of a tensor that a hook sees: one object decides.

A keeper is called in the hook, on the model's thread, while the tensor still holds what the
site saw: before it returns, whatever is kept must have been taken (later operators may write
to the tensor in place). A tensor that passes unchanged from one module to the next is kept
once: it is recognised by identity and by torch's version counter, which every in-place write
of torch's own operators advances.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from divergence.recording.keep.device_copy import DeviceCopies, Stream, side_stream
from divergence.run.writing.buffer import Buffer, Slot
from divergence.run.writing.captured_tensor import CapturedTensor
from divergence.run.writing.writer import RunWriter

__all__ = ["BufferKeeper", "CopyKeeper", "Keeper", "Recent", "ShapeKeeper"]

_REMEMBERED = 16
"""Tensors kept for recognition; a block hands its input to at most a few readers."""


class Keeper(Protocol):
    """``keep(tensor)``: any tensor of the model, on any device, as the module holds it."""

    def keep(self, tensor: torch.Tensor) -> CapturedTensor: ...


class CopyKeeper:
    """Keeps every byte: a contiguous host copy that nobody else writes to."""

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        return CapturedTensor(self.copy(tensor))

    @staticmethod
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.device.type != "cpu":
            return tensor.to("cpu").contiguous()
        return tensor.clone(memory_format=torch.contiguous_format)


class BufferKeeper:
    """Keeps every byte, in the writer's buffer: no memory beside it, and no page touched twice.

    A tensor for which the buffer has no place, however long one waits, gets memory of its own, and
    the emptied buffer's goes back to the system meanwhile. ``streams``: see device_copy.
    """

    def __init__(
        self,
        writer: RunWriter,
        buffer: Buffer,
        *,
        streams: Callable[[torch.device], Stream | None] = side_stream,
    ) -> None:
        self._buffer, self._writer, self._streams = buffer, writer, streams
        self._copies: dict[torch.device, DeviceCopies | None] = {}

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        if not tensor.is_cpu:
            copies = self._copies_of(tensor.device)
            if copies is not None:
                return self._keep_later(tensor, copies)
        if not _plain(tensor):
            tensor = CopyKeeper.copy(tensor)
        slot = self._place(tensor.nbytes)
        if slot is None:
            return CapturedTensor(CopyKeeper.copy(tensor))
        slot.fill(tensor.data_ptr())
        return CapturedTensor(tensor, slot)

    def _keep_later(self, tensor: torch.Tensor, copies: DeviceCopies) -> CapturedTensor:
        """What lies on a device: its bytes arrive in the slot beside the model's work."""
        clone = copies.clone(tensor)
        slot = self._place(clone.nbytes)
        if slot is None:
            return CapturedTensor(CopyKeeper.copy(clone))
        copies.start(clone, slot)
        return CapturedTensor(clone, slot)

    def _copies_of(self, device: torch.device) -> DeviceCopies | None:
        if device not in self._copies:
            stream = self._streams(device)
            limit = self._buffer.num_bytes // 4
            self._copies[device] = None if stream is None else DeviceCopies(stream, max_bytes=limit)
        return self._copies[device]

    def _place(self, num_bytes: int) -> Slot | None:
        slot = self._buffer.take(num_bytes) or self._writer.make_room(num_bytes)
        if slot is None:
            self._buffer.trim()
        return slot


def _plain(tensor: torch.Tensor) -> bool:
    """Are its bytes in host memory as they are stored? And is no mode above that would widen them:
    a copy of the tensor is made under it then."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not torch._C._len_torch_dispatch_stack()
    )


class ShapeKeeper:
    """Keeps no byte: for counting what a capture would write, on the meta device."""

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        return CapturedTensor(tensor.detach())


class Recent:
    """Items of the tensors that came by last. Holds no tensor alive."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[torch.Tensor], int, CapturedTensor]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Perhaps: did a tensor come by at this address?"""
        return id(tensor) in self._items

    def find(self, tensor: torch.Tensor) -> CapturedTensor | None:
        """The item made of this very tensor, if nothing has been written to it since."""
        known = self._items.get(id(tensor))
        # the reference is gone with its tensor, so that the id cannot be another's
        if known is None or known[0]() is not tensor or known[1] != _version(tensor):
            return None
        return known[2]

    def add(self, tensor: torch.Tensor, item: CapturedTensor) -> None:
        version = _version(tensor)
        if version is None:
            return
        self._items.pop(id(tensor), None)
        self._items[id(tensor)] = (weakref.ref(tensor), version, item)
        if len(self._items) > _REMEMBERED:
            del self._items[next(iter(self._items))]

    def forget(self, tensor: torch.Tensor) -> None:
        self._items.pop(id(tensor), None)

    def clear(self) -> None:
        self._items.clear()


def _version(tensor: torch.Tensor) -> int | None:
    """torch's in-place write counter; None where it is not kept (inference mode)."""
    try:
        return tensor._version
    except RuntimeError:
        return None

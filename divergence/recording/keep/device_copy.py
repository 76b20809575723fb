"""Copies from an accelerator into the writer's buffer, beside the model's own work.

The hook starts a copy and goes on; nothing on the compute stream waits for it:

1. a clone on the compute stream, in order with the operators around the hook, so that a later
   write in place does not reach what was seen;
2. on a stream of its own, behind that clone, the copy from the clone into page-locked memory;
3. an event behind the copy, for which the writer's thread waits before it reads.

The clone stays alive until that event: so its memory goes to no other operator meanwhile, and
torch's allocator needs not be told of the second stream. Clones wait in at most ``max_bytes`` of
device memory; beyond that the hook waits for the oldest copy. Tests run this on a simulated
accelerator whose kernels and copies are late (tests/device); it has not run on a real one yet.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

from divergence.run.writing.buffer import Slot

__all__ = ["DeviceCopies", "Event", "SideStream", "Stream", "can_pin", "side_stream"]


class Event(Protocol):
    """Of torch.cuda, torch.xpu, torch_npu and others."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Where copies run."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Start copying, behind all that the compute stream was given; the event is behind it."""


class SideStream:
    """A stream of ``device`` beside the one that the model computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            made = self._module.Event()
            made.record(self._stream)
        event: Event = made
        return event


def side_stream(device: torch.device) -> Stream | None:
    """None where the device has no streams (or none that torch knows): then copies are waited
    for."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not all(hasattr(module, name) for name in ("Stream", "stream")):
        return None
    return SideStream(device)


def can_pin(device: torch.device) -> bool:
    """Whether host memory can be page-locked for copies from ``device``."""
    if device.type == "cpu" or side_stream(device) is None:
        return False
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no such thing there: copies are slower, and still right
        return False
    return True


class DeviceCopies:
    """Copies of one device under way. Used from the model's thread alone."""

    def __init__(self, stream: Stream, *, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self._under_way: deque[tuple[Event, torch.Tensor]] = deque()
        self.num_bytes = 0
        """Of clones that wait."""

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, when there is room for it."""
        num_bytes = tensor.numel() * tensor.element_size()
        while self._under_way:
            event, clone = self._under_way[0]
            if not event.query():
                if self.num_bytes + num_bytes <= self._max_bytes:
                    break
                event.synchronize()
            self.num_bytes -= clone.nbytes
            self._under_way.popleft()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return (
            tensor.detach()
            .clone(memory_format=torch.contiguous_format)
            .resolve_conj()
            .resolve_neg()
        )

    def start(self, clone: torch.Tensor, slot: Slot) -> None:
        """Copy ``clone`` into ``slot``, which waits for it before it is read or given back."""
        event = self._stream.copy(slot.tensor(clone.dtype, tuple(clone.shape)), clone)
        slot.ready = event.synchronize
        self._under_way.append((event, clone))
        self.num_bytes += clone.nbytes

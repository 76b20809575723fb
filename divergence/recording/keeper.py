"""One object decides what is kept of a tensor that a hook sees.

A keeper is called in the hook, on the model's thread, and takes what it keeps before it returns:
later operators may write to the tensor in place. A tensor that passes unchanged from one module to
the next is kept once. It is recognised by identity and by torch's version counter, which every
in-place write of torch's own operators advances.

Tensors on an accelerator are copied into the writer's buffer beside the model's own work. The hook
starts a copy and goes on; nothing on the compute stream waits for it:

1. a clone on the compute stream, in order with the operators around the hook, so that a later
   write in place does not reach what was seen;
2. on a stream of its own, behind that clone, the copy from the clone into page-locked memory;
3. an event behind the copy, for which the writer's thread waits before it reads.

The clone stays alive until that event, so its memory goes to no other operator meanwhile, and
torch's allocator needs not know of the second stream. Clones wait in at most ``max_bytes`` of
device memory; beyond that the hook waits for the oldest copy. Tests run this on a simulated
accelerator whose kernels and copies are late (tests/device); captures have run on an NVIDIA H100
(docs/devices.md).

Digests, statistics and projections are computed on the tensor's device and stream, without a copy
or a wait in the hook. The writer's thread fetches them in batches (run.writer.Reducer).
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from xxhash import xxh3_128_hexdigest

from divergence.errors import first_line
from divergence.numerics.formats import format_of
from divergence.numerics.on_device import statistics_on_device
from divergence.numerics.sketches import (
    fold_sums,
    is_exact_on,
    num_pooled,
    num_projections,
    sketch_tensor,
    sum_dtype_name,
)
from divergence.run.captured import Buffer, CapturedTensor, Reduced, Slot
from divergence.run.manifest import StoreMode
from divergence.run.writer import RunWriter


class SideStream:
    """A stream of ``device`` (torch's, of CUDA, XPU, torch_npu and others) beside the one that the
    model computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start copying, behind all that the compute stream was given; the event is behind it."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return event


def side_stream(device: torch.device) -> SideStream | None:
    """None where torch knows no streams of the device: then copies are waited for."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not all(hasattr(module, name) for name in ("Stream", "stream")):
        return None
    return SideStream(device)


def can_pin(device: torch.device) -> bool:
    """Say whether host memory can be page-locked for copies from ``device``."""
    if device.type == "cpu" or side_stream(device) is None:
        return False
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no such thing there: copies are slower, and still right
        return False
    return True


class DeviceCopies:
    """Copies of one device under way. Used from the model's thread alone."""

    def __init__(self, stream: SideStream, *, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
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
        clone = tensor.detach().clone(memory_format=torch.contiguous_format)
        return clone.resolve_conj().resolve_neg()

    def start(self, clone: torch.Tensor, slot: Slot) -> None:
        """Copy ``clone`` into ``slot``, which waits for it before it is read or given back."""
        event = self._stream.copy(slot.tensor(clone.dtype, tuple(clone.shape)), clone)
        slot.ready = event.synchronize
        self._under_way.append((event, clone))
        self.num_bytes += clone.nbytes


_REMEMBERED = 64
"""Tensors remembered for recognition; a block hands its input to at most a few readers."""


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
    """Keeps every byte in the writer's buffer: no memory beside it, and no page touched twice. A
    tensor that the buffer can never hold gets memory of its own, and the emptied buffer's goes back
    to the system meanwhile. ``streams``: tests give others."""

    def __init__(
        self,
        writer: RunWriter,
        buffer: Buffer,
        *,
        streams: Callable[[torch.device], SideStream | None] = side_stream,
    ) -> None:
        self._buffer, self._writer, self._streams = buffer, writer, streams
        self._copies: dict[torch.device, DeviceCopies | None] = {}

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        if not _plain(tensor):
            device = tensor.device
            if not tensor.is_cpu and device not in self._copies:
                stream, limit = self._streams(device), self._buffer.num_bytes // 4
                self._copies[device] = (
                    None if stream is None else DeviceCopies(stream, max_bytes=limit)
                )
            copies = self._copies.get(device)
            if copies is not None:  # its bytes arrive in the slot beside the model's work
                clone = copies.clone(tensor)
                slot = self._place(clone.nbytes)
                if slot is None:
                    return CapturedTensor(CopyKeeper.copy(clone))
                copies.start(clone, slot)
                return CapturedTensor(clone, slot)
            tensor = CopyKeeper.copy(tensor)
        num_bytes = tensor.nbytes
        slot = self._buffer.take(num_bytes) or self._place(num_bytes)
        if slot is None:
            return CapturedTensor(CopyKeeper.copy(tensor))
        slot.fill(tensor.data_ptr())
        return CapturedTensor(tensor, slot)

    def _place(self, num_bytes: int) -> Slot | None:
        slot = self._buffer.take(num_bytes) or self._writer.make_room(num_bytes)
        if slot is None:
            self._buffer.trim()
        return slot


class DigestKeeper:
    """Digests of tensors in host memory, made in the hook: where nothing else is kept of them, what
    reads them once copies nothing. ``inner`` keeps the others."""

    def __init__(self, inner: Keeper) -> None:
        self.inner = inner

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        if not _plain(tensor) or not tensor.numel():
            return self.inner.keep(tensor)
        item = CapturedTensor(tensor)
        item.digest = xxh3_128_hexdigest(_memory(tensor.data_ptr(), item.num_bytes, _READ))
        item.tensor = None
        return item


_READ = 0x100  # CPython's PyBUF_READ
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

_REAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64})


def _plain(tensor: torch.Tensor) -> bool:
    """Are its bytes in host memory as stored, with no mode active that would widen them?"""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and (tensor.dtype in _REAL or not tensor.is_conj())
        and not torch._C._len_torch_dispatch_stack()
    )


class ShapeKeeper:
    """Keeps no byte: for counting what a capture would write, on the meta device."""

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        return CapturedTensor(tensor.detach())


class Recent:
    """Items of the tensors that came by last. Holds no tensor alive."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[weakref.ref[torch.Tensor], int, CapturedTensor]] = {}
        """By id of the tensor, which may be another's by now: (reference, version, item)."""

    def kept(
        self, tensor: torch.Tensor, keep: Callable[[torch.Tensor], CapturedTensor]
    ) -> CapturedTensor:
        """The item made of this very tensor, if nothing has been written to it since; else what
        ``keep`` makes of it now."""
        try:
            version = tensor._version  # torch's count of writes in place
        except RuntimeError:  # it is not counted (inference mode)
            return keep(tensor)
        items, key = self.items, id(tensor)
        if key in items:
            reference, version_then, item = items[key]
            # the reference is gone with its tensor, so that the id cannot be another's
            if version_then == version and reference() is tensor:
                return item
        elif len(items) >= _REMEMBERED:
            items.clear()
        item = keep(tensor)
        items[key] = (weakref.ref(tensor), version, item)
        return item


class ReducedKeeper:
    """``inner`` keeps what must stay whole. ``hosts``: reduce host tensors in the hook as well.
    ``note``: told of a device whose tensors go to the host, and why."""

    def __init__(
        self,
        store: StoreMode,
        inner: Keeper,
        *,
        hosts: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.inner = inner
        self._store, self._hosts, self._note = store, hosts, note
        self._lacking: set[torch.device] = set()

    def keep(self, tensor: torch.Tensor) -> CapturedTensor:
        device = tensor.device
        if device in self._lacking or (device.type == "cpu" and not self._hosts):
            return self.inner.keep(tensor)
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        k = None
        if self._store == "sketch":
            k = num_projections(tensor.shape, format_of(tensor.dtype))
            if k is None:
                return self.inner.keep(tensor)
        item = CapturedTensor(tensor)
        try:
            if not is_exact_on(str(device)):
                raise RuntimeError("its 64-bit integer arithmetic is wrong")
            item.reduced = Reduced(
                sums=fold_sums(tensor),
                statistics=None if self._store == "hash" else statistics_on_device(tensor),
                projections=None
                if k is None
                else sketch_tensor(tensor, k, num_pooled=num_pooled(tensor.shape, k)),
                sum_dtype=sum_dtype_name(str(device)),
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # no fault of the model's
            self._lacking.add(device)
            self._note(
                f"{device} cannot compute what --store {self._store} keeps; its tensors are copied "
                f"to the host and reduced there, which is slower: {first_line(error)}"
            )
            return self.inner.keep(tensor)
        item.tensor = None
        return item

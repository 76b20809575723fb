"""Tensors in files of other programs, each as a memory map: opening one reads its header alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from divergence.errors import DumpError, RunFormatError
from divergence.numerics.arrays import as_tensor, from_bytes
from divergence.numerics.formats import FORMATS
from divergence.outside import (
    MAX_VALUES,
    Budget,
    check_value,
    disk_bytes,
    read_as,
)
from divergence.run.record import MAX_NUMEL, SHARD_DTYPES
from divergence.run.storage import Blob, Shard
from divergence.run.torch_file import load_torch

# ``.pt``           by ``load_torch``
# ``.safetensors``  the reader of the project's own shards (run.storage)
# ``.npy``          by its header, of which numpy would make Python's syntax
#
# A file that says more than it holds, or spreads out to more than ``budget`` allows, is refused.

_FORMS = {".npy": "numpy.save", ".safetensors": "safetensors"}  # torch.save's are many
_HALF_WRITTEN = "it may be half written: dump again"
_MAX_HEADER_BYTES = 10_000
_HEADER = re.compile(
    rb"\{(?:(?:(['\"])descr\1:(['\"])(?P<descr>[<>|=]?[a-zA-Z][0-9]{1,2})\2"
    rb"|(['\"])fortran_order\4:(?P<fortran>True|False)"
    rb"|(['\"])shape\6:\((?P<shape>[0-9L,]*)\)),?){3}\}"
)


def tensors_of(path: Path, budget: Budget) -> Any:
    """Return what a file holds: a tensor, or tensors and plain values by key. Raises DumpError."""
    where, readers = str(path), {".npy": _npy, ".safetensors": _safetensors}
    with read_as(_FORMS.get(path.suffix, "torch.save"), where=where, hint=_HALF_WRITTEN):
        disk = disk_bytes(path)
        budget.expand(path.stat().st_size, disk=disk, where=where)  # less is there: it has holes
        value = readers.get(path.suffix, load_torch)(_Mapped.of(path))
        # each value takes a byte of a file that does not repeat them
        check_value(value, where=where, most=min(MAX_VALUES, path.stat().st_size))
        num_bytes, parts = 0, [value]
        while parts:
            part = parts.pop()
            if isinstance(part, torch.Tensor):
                num_bytes += part.numel() * part.element_size()
                if math.prod(max(size, 1) for size in part.shape) > MAX_NUMEL:
                    raise DumpError(f"a tensor has the shape {list(part.shape)}", where=where)
            elif isinstance(part, dict):
                parts += part.values()
            elif isinstance(part, list | tuple):
                parts += part
        budget.expand(num_bytes, disk=disk, where=where)
        return value


class _Mapped(Blob):
    """A file as a private map. Python's own maps each keep the file open, and a dump may have more
    files than a process may open."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data, self.name, self.size = data, name, len(data)

    @classmethod
    def of(cls, path: Path) -> _Mapped:
        size = path.stat().st_size
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return cls(data.numpy().data, str(path))

    def read(self, begin: int, num_bytes: int) -> bytes:
        return bytes(self.view(begin, num_bytes))

    def view(self, begin: int, num_bytes: int) -> memoryview:
        return self._data[begin : begin + max(num_bytes, 0)]

    def part(self, begin: int, num_bytes: int, name: str) -> _Mapped:
        return _Mapped(self.view(begin, num_bytes), name)


def _npy(blob: Blob) -> torch.Tensor:
    head = blob.read(0, 12)
    begin = 10 if head[6:7] == b"\1" else 12
    length = int.from_bytes(head[8:begin], "little")
    text = blob.read(begin, min(length, _MAX_HEADER_BYTES))
    match = _HEADER.fullmatch(b"".join(text.split()))
    if head[:6] != b"\x93NUMPY" or match is None or None in match.groups()[2::2]:
        raise DumpError(
            "the file cannot be read as one array of numbers",
            where=blob.name,
            hint="it may be half written, an archive of several arrays, or hold objects",
        )
    shape = tuple(int(size.rstrip(b"L")) for size in match["shape"].split(b",") if size)
    dtype = numpy.dtype(match["descr"].decode())
    num_bytes = math.prod(shape) * dtype.itemsize
    if dtype.kind not in "biufc" or begin + length + num_bytes > blob.size:
        raise DumpError(
            f"the file cannot be read as one array of {dtype}: it is to hold {num_bytes:,} bytes",
            where=blob.name,
            hint=_HALF_WRITTEN,
        )
    order: Literal["F", "C"] = "F" if match["fortran"] == b"True" else "C"
    array: numpy.ndarray = numpy.frombuffer(blob.view(begin + length, num_bytes), dtype)
    array = array.reshape(shape, order=order)
    is_plain = array.flags.aligned and dtype.isnative
    return torch.from_numpy(array if is_plain else array.astype(dtype.newbyteorder("=")))


def _safetensors(blob: Blob) -> dict[str, torch.Tensor]:
    names = {code: name for name, code in SHARD_DTYPES.items()}
    try:
        shard = Shard(blob)
        tensors = {}
        for key, entry in shard.entries.items():
            if entry.dtype not in names or min(entry.shape, default=0) < 0:
                raise DumpError(
                    f"tensor {key} is of dtype {entry.dtype} and shape {list(entry.shape)}, which "
                    "is not known",
                    where=blob.name,
                )
            form = FORMATS[names[entry.dtype]]
            if entry.num_bytes != math.prod(entry.shape) * form.itemsize:
                raise DumpError(
                    f"tensor {key} has {entry.num_bytes} bytes for a shape of {list(entry.shape)}",
                    where=blob.name,
                )
            tensors[key] = as_tensor(
                from_bytes(shard.stretch(key, entry.num_bytes), form, entry.shape)
            )
        return tensors
    except RunFormatError as error:
        raise DumpError(
            error.message.replace("shard", "the file", 1), where=blob.name, hint=_HALF_WRITTEN
        ) from error

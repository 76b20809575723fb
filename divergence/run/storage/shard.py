"""One safetensors shard: read without copying, written without the library's per-tensor cost.

The header is parsed here because a damaged shard must be named precisely (which
tensor, how many bytes are missing) and because tensors are handed out as views of a
private memory map, so that a comparison can stream through dumps larger than memory.
It is written here because a decode step records many small tensors, for which the
library's checks take longer than the bytes, and because it does not store every dtype.
The files are plain safetensors; tests read them with the library.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.errors import RunFormatError
from divergence.numerics.formats import FORMATS
from divergence.run.process_tuning import DIRECT_BYTES, DirectFiles
from divergence.run.schema.layout import COMMON_SHARD_DTYPES
from divergence.run.storage.blob import Blob, Bytes

if TYPE_CHECKING:
    import torch

    from divergence.run.writing.captured_tensor import ShardEntry

__all__ = ["Shard", "write_shard"]

HEADER_BYTES = 64 << 10
"""What is read before the header's length is known: room for some 500 tensors, and the whole of a
small shard."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself


class Entry(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies in the file."""

    begin: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


class _HeaderEntry(msgspec.Struct):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Shard:
    """An open shard. ``entries`` by key; ``view`` gives a tensor over its bytes."""

    def __init__(self, blob: Blob) -> None:
        self.name = blob.name
        self.entries = _read_header(blob)
        self._blob = blob

    def view(self, key: str, *, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor at ``key`` as a view (never write to it). Raises RunFormatError."""
        import torch

        wanted = math.prod(shape) * dtype.itemsize
        buffer = self.stretch(key, wanted)
        if wanted == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # an unaligned writer or archive: view() below needs alignment
        return raw.view(dtype).view(shape) if shape else raw.view(dtype)[0]

    def stretch(self, key: str, wanted: int) -> Bytes:
        """The bytes at ``key``, which are ``wanted``. Raises RunFormatError."""
        entry = self.entries[key]
        if entry.num_bytes != wanted:
            raise RunFormatError(
                f"tensor {key} holds {entry.num_bytes} bytes, its record needs {wanted}",
                where=self.name,
            )
        if wanted == 0:
            return b""
        try:
            buffer = self._blob.view(entry.begin, wanted)
        except OSError as error:  # removed or emptied since it was opened
            raise RunFormatError(f"shard cannot be read: {error}", where=self.name) from error
        if len(buffer) < wanted:
            raise RunFormatError("shard was cut off while it was read", where=self.name)
        return buffer

    def will_need(self, key: str) -> None:
        """The tensor at ``key`` will be viewed soon. Raises OSError."""
        entry = self.entries.get(key)
        if entry is not None:
            self._blob.will_need(entry.begin, entry.num_bytes)

    def release(self) -> None:
        """Let what was viewed leave memory; views stay good."""
        self._blob.release()

    def close(self) -> None:
        """Drop the map; views that are still alive keep it open."""
        self._blob.close()


def write_shard(
    path: Path, pieces: Mapping[str, ShardEntry], *, direct: DirectFiles | None = None
) -> None:
    """Write ``pieces`` by key as a safetensors file, a large one with ``direct``. Raises OSError.

    Wide elements come first, so that each tensor is aligned to its own element size; a
    dtype that the format does not name goes as raw bytes (the record knows what it is).
    """
    sizes = {name: -FORMATS[name].itemsize for name in {piece.dtype for piece in pieces.values()}}
    ordered = sorted(pieces.items(), key=lambda pair: sizes[pair[1].dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, piece in ordered:
        num_bytes = piece.data.nbytes
        code = COMMON_SHARD_DTYPES.get(piece.dtype)
        header[key] = {
            "dtype": code or "U8",
            "shape": piece.shape if code else (num_bytes,),
            "data_offsets": (offset, offset + num_bytes),
        }
        offset += num_bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    parts = [memoryview(struct.pack("<Q", len(text)) + text)]
    parts += _joined([piece.data for _, piece in ordered])
    if direct is not None and offset >= DIRECT_BYTES and direct.write(path, parts):
        return
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), parts)


def _joined(parts: list[memoryview]) -> Iterator[memoryview]:
    """The parts in order, neighbours that are short joined: each costs more than its bytes."""
    short: list[memoryview] = []
    num_bytes = 0
    for part in parts:
        if part.nbytes <= _SHORT_BYTES:
            short.append(part)
            num_bytes += part.nbytes
        if short and (part.nbytes > _SHORT_BYTES or num_bytes >= _JOINED_BYTES):
            yield memoryview(b"".join(short))
            short, num_bytes = [], 0
        if part.nbytes > _SHORT_BYTES:
            yield part
    if num_bytes:
        yield memoryview(b"".join(short))


_SHORT_BYTES = 1 << 15
_JOINED_BYTES = 1 << 19


def _write_all(file: int, parts: list[memoryview]) -> None:
    """All parts one after another, many in one call to the system."""
    start = 0
    while start < len(parts):
        if hasattr(os, "writev"):
            written = os.writev(file, parts[start : start + _PARTS_AT_ONCE])
        else:
            written = os.write(file, parts[start])
        # less than all is written where it is a lot, or where the disk has just filled up
        while start < len(parts) and written >= parts[start].nbytes:
            written -= parts[start].nbytes
            start += 1
        if written:
            parts[start] = parts[start][written:]


_PARTS_AT_ONCE = 512
"""Systems take at least 1024."""


def _read_header(blob: Blob) -> dict[str, Entry]:
    where, size = blob.name, blob.size

    def damaged(what: str) -> RunFormatError:
        return RunFormatError(
            f"shard is damaged: {what}",
            where=where,
            hint="copy it again from the machine that wrote it (divergence inspect RUN --verify)",
        )

    try:
        head = blob.read(0, HEADER_BYTES)
        if len(head) < 8:
            raise damaged(f"{len(head)} bytes, too short for a header")
        (length,) = struct.unpack_from("<Q", head)
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise damaged(f"header of {length} bytes in a file of {size}")
        text = head[8 : 8 + length]
        if len(text) < length:
            text += blob.read(len(head), 8 + length - len(head))
        header = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise damaged(f"header is not JSON ({error})") from error
    except OSError as error:
        raise damaged(f"cannot be read ({error.strerror or error})") from error
    if not isinstance(header, dict):
        raise damaged("header is not a JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    try:
        stated = msgspec.convert(header, dict[str, _HeaderEntry])
    except msgspec.ValidationError:
        stated = {key: _header_entry(key, value, damaged) for key, value in header.items()}
    for key, its in stated.items():
        begin, end = its.data_offsets
        entry = Entry(8 + length + begin, end - begin, its.dtype, its.shape)
        if entry.num_bytes < 0 or begin < 0:
            raise damaged(f"entry {key!r} has negative offsets")
        if entry.begin + entry.num_bytes > size:
            missing = entry.begin + entry.num_bytes - size
            raise damaged(f"tensor {key} is cut off, {missing} bytes are missing (truncated file)")
        entries[key] = entry
    _refuse_overlap(entries, damaged)
    return entries


def _header_entry(
    key: str, value: object, damaged: Callable[[str], RunFormatError]
) -> _HeaderEntry:
    try:
        return msgspec.convert(value, _HeaderEntry)
    except msgspec.ValidationError as error:
        raise damaged(f"entry {key!r} is malformed: {error}") from error


def _refuse_overlap(entries: dict[str, Entry], damaged: Callable[[str], RunFormatError]) -> None:
    last_end, last_key = 0, ""
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.num_bytes == 0:
            continue
        if entry.begin < last_end:
            raise damaged(f"tensors {last_key} and {key} overlap")
        last_end, last_key = entry.begin + entry.num_bytes, key

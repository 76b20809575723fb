"""One safetensors shard: read without copying, written without the library's per-tensor cost.

The header is parsed here because a damaged shard must be named precisely (which
tensor, how many bytes are missing) and because tensors are handed out as views of a
private memory map, so that a comparison can stream through dumps larger than memory.
It is written here because a decode step records many small tensors, for which the
library's checks take longer than the bytes, and because it does not store every dtype.
The files are plain safetensors; tests read them with the library.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from divergence.errors import DumpError, RunFormatError
from divergence.numerics.formats import FORMATS
from divergence.run.process_tuning import DIRECT_BYTES, DirectFiles
from divergence.run.schema.layout import COMMON_SHARD_DTYPES
from divergence.run.storage.blob import Blob, Bytes

if TYPE_CHECKING:
    import torch

    from divergence.run.writing.captured_tensor import ShardEntry

__all__ = ["Entry", "Headers", "Shard", "TouchedShards", "has_header", "write_shard"]

HEADER_BYTES = 64 << 10
"""What is read before the header's length is known: room for some 500 tensors, and the whole of a
small shard."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself


class Entry(msgspec.Struct, gc=False):
    """Where one tensor lies in the file, as the header says it."""

    dtype: str = ""
    shape: tuple[int, ...] = (-1,)
    data_offsets: tuple[int, int] = (-1, -1)
    """Of its first byte and of the byte behind it, counted from the end of the header."""

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


_UNSAID = Entry()


class _HeaderEntry(msgspec.Struct):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Headers:
    """Of the headers that were read, those of few tensors or of the last shard alone are kept."""

    def __init__(self, max_entries: int = 1 << 17) -> None:
        self._max_entries, self._num_entries = max_entries, 0
        self._shards: list[Shard] = []

    def keep(self, shard: Shard, num_entries: int) -> None:
        """``shard`` was just read."""
        self._num_entries += num_entries
        if self._num_entries > self._max_entries:
            for other in self._shards:
                other.forget()
            self._shards, self._num_entries = [], num_entries
        self._shards.append(shard)


class Shard:
    """An open shard. ``entries`` by key; ``view`` gives a tensor over its bytes.

    ``headers``: forgets entries, which are then read again when they are wanted.
    """

    def __init__(self, blob: Blob, headers: Headers | None = None) -> None:
        self.name = blob.name
        self._blob, self._headers = blob, headers
        self._entries: dict[str, Entry] | None = None
        self._data_begin = 0
        self.entries  # noqa: B018 - a damaged header is found now

    @property
    def entries(self) -> dict[str, Entry]:
        """What the header says of each tensor. Raises RunFormatError."""
        entries = self._entries
        if entries is None:
            entries, self._data_begin = _read_header(self._blob)
            self._entries = entries
            if self._headers is not None:
                self._headers.keep(self, len(entries))  # another thread's may forget these
        return entries

    def forget(self) -> None:
        """Lets the entries leave memory."""
        self._entries = None

    def span(self, key: str) -> tuple[int, int] | None:
        """Where in the file the tensor at ``key`` begins and ends; None if it has none."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        begin, end = entry.data_offsets
        return self._data_begin + begin, self._data_begin + end

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
        begin = self._begin(key, wanted)
        if wanted == 0:
            return b""
        return self._checked(lambda: [self._blob.view(begin, wanted)], wanted)[0]

    def stretches(self, keys: Sequence[str], wanted: int) -> Sequence[Bytes]:
        """The bytes at each of ``keys``, which are ``wanted`` each. Raises RunFormatError."""
        begins = [self._begin(key, wanted) for key in keys]
        if wanted == 0:
            return [b""] * len(keys)
        return self._checked(lambda: self._blob.read_many(begins, wanted), wanted)

    def _begin(self, key: str, wanted: int) -> int:
        begin, end = self.span(key) or (0, -1)
        if end - begin != wanted:
            holds = "is gone" if end < 0 else f"holds {end - begin} bytes"
            raise RunFormatError(
                f"tensor {key} {holds}, its record needs {wanted} bytes", where=self.name
            )
        return begin

    def _checked(self, read: Callable[[], Sequence[Bytes]], wanted: int) -> Sequence[Bytes]:
        """What ``read`` gives, stretches of ``wanted`` bytes. Raises RunFormatError."""
        try:
            buffers = read()
        except OSError as error:  # removed or emptied since it was opened
            raise RunFormatError(f"shard cannot be read: {error}", where=self.name) from error
        if any(len(buffer) < wanted for buffer in buffers):
            raise RunFormatError("shard was cut off while it was read", where=self.name)
        return buffers

    def will_need(self, key: str) -> None:
        """The tensor at ``key`` will be viewed soon. Raises OSError."""
        span = self.span(key)
        if span is not None:
            self._blob.will_need(span[0], span[1] - span[0])

    def release(self) -> None:
        """Let what was viewed leave memory; views stay good."""
        self._blob.release()

    def close(self) -> None:
        """Drop the map; views that are still alive keep it open."""
        self._blob.close()


class TouchedShards(dict[str, Shard]):
    """Shards whose pages may be in memory, by name; any thread may add to them or release them."""

    _held_bytes = 0

    def add(self, name: str, shard: Shard) -> Shard:
        """Notes that the shard is read."""
        self[name] = shard
        return shard

    def release(self, num_bytes: int) -> None:
        """So much more is done with: of ``_RELEASE_BYTES`` the pages of all are released."""
        self._held_bytes += num_bytes
        if self._held_bytes >= _RELEASE_BYTES:
            self._held_bytes = 0
            while self:
                with contextlib.suppress(KeyError):  # another thread took the last
                    self.popitem()[1].release()


_RELEASE_BYTES = 16 << 20


def write_shard(
    path: Path, pieces: Mapping[str, ShardEntry], *, direct: DirectFiles | None = None
) -> None:
    """Write ``pieces`` by key as a safetensors file, a large one with ``direct``. Raises OSError.

    Wide elements come first, so that each tensor is aligned to its own element size; a
    dtype that the format does not name goes as raw bytes (the record knows what it is).
    """
    sizes = {name: -FORMATS[name].itemsize for name in {piece.dtype for piece in pieces.values()}}
    ordered = sorted(pieces.items(), key=lambda pair: sizes[pair[1].dtype])
    offset, entries = 0, []
    for key, piece in ordered:
        num_bytes = piece.data.nbytes
        said = _said(piece.dtype, piece.shape, num_bytes)
        entries.append(f'"{key}"{said}[{offset},{offset + num_bytes}]}}')
        offset += num_bytes
    text = _header_text(entries)
    parts = [memoryview(struct.pack("<Q", len(text)) + text)]
    parts += [piece.data for _, piece in ordered if piece.data.nbytes]
    if direct is not None and offset >= DIRECT_BYTES and direct.write(path, parts):
        return
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), parts)


def _said(dtype: str, shape: tuple[int, ...], num_bytes: int) -> str:
    """What a header says of a tensor's kind, between its key and its offsets."""
    code = COMMON_SHARD_DTYPES.get(dtype)
    sizes = ",".join(map(str, shape if code else (num_bytes,)))
    return f':{{"dtype":"{code or "U8"}","shape":[{sizes}],"data_offsets":'


def _header_text(entries: Sequence[str]) -> bytes:
    text = ",".join(['{"__metadata__":{"format":"pt"}', *entries]).encode() + b"}"
    return text + b" " * (-len(text) % 8)


def has_header(
    blob: Blob, tensors: Sequence[tuple[str, int]], kinds: Sequence[tuple[str, tuple[int, ...]]]
) -> bool:
    """Is the header, byte for byte, what ``write_shard`` writes of these tensors in this order, and
    are their bytes there? ``tensors``: key (plain letters and digits) and number in ``kinds``
    (dtype, shape). Raises OSError."""
    if not tensors:
        return False
    keys, codes = zip(*tensors, strict=True)
    if len({FORMATS[kinds[code][0]].itemsize for code in set(codes)}) > 1:
        widths = [FORMATS[dtype].itemsize for dtype, _ in kinds]
        tensors = sorted(tensors, key=lambda tensor: -widths[tensor[1]])
        keys, codes = zip(*tensors, strict=True)
    said_of = _said_of if len(codes) <= _MOST_SAID else _said_of.__wrapped__
    said, num_bytes = said_of(codes, tuple(kinds))
    text = _header_text(list(map("".join, zip(itertools.repeat('"'), keys, said))))
    head = struct.pack("<Q", len(text)) + text
    return blob.size >= len(head) + num_bytes and blob.read(0, len(head)) == head


_MOST_SAID = 1 << 16
"""Tensors of a shard whose part of the header is held for the next shard."""


@functools.lru_cache(maxsize=1)
def _said_of(
    codes: tuple[int, ...], kinds: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[list[str], int]:
    """What a header says behind the key of each tensor, and the bytes of all: shards of decode
    steps mostly hold the same kinds in the same order."""
    sizes = [math.prod(shape) * FORMATS[dtype].itemsize for dtype, shape in kinds]
    said = [f'"{_said(*kind, size)}[' for kind, size in zip(kinds, sizes, strict=True)]
    ends = list(itertools.accumulate(map(sizes.__getitem__, codes)))
    entries = zip(codes, [0, *ends], ends, strict=False)
    return [f"{said[code]}{begin},{end}]}}" for code, begin, end in entries], ends[-1]


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


def _read_header(blob: Blob) -> tuple[dict[str, Entry], int]:
    """The entries, and where the header ends. Raises RunFormatError."""
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
    except OSError as error:
        raise damaged(f"cannot be read ({error.strerror or error})") from error
    entries = _quick_entries(text, size - 8 - length)
    return entries or _entries(text, size - 8 - length, damaged), 8 + length


def _quick_entries(text: bytes, num_bytes: int) -> dict[str, Entry]:
    """The entries of a sound header whose tensors lie in the order in which it names them. Empty
    for any other."""
    try:
        entries = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    entries.pop("__metadata__", None)
    every = entries.values()
    offsets = [offset for entry in every for offset in entry.data_offsets]
    sound = (
        all(map(operator.le, offsets, offsets[1:]))  # so that none overlap
        and all([entry.dtype and entry.shape is not _UNSAID.shape for entry in every])
        and (not offsets or (offsets[0] >= 0 and offsets[-1] <= num_bytes))
    )
    return entries if sound else {}


_DECODER = msgspec.json.Decoder(dict[str, Entry])
"""What is not said of an entry takes its default."""


def _entries(
    text: bytes, num_bytes: int, damaged: Callable[[str], RunFormatError]
) -> dict[str, Entry]:
    """The entries one by one: what is wrong with one is named."""
    from divergence.outside import json_value  # of a damaged header alone

    try:
        header = json_value(text, where="header")
    except DumpError as error:
        raise damaged(f"header is not JSON ({error.message})") from error
    if not isinstance(header, dict):
        raise damaged("header is not a JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    for key, value in header.items():
        try:
            its = msgspec.convert(value, _HeaderEntry)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise damaged(f"entry {key!r} is malformed: {error}") from error
        entry = Entry(its.dtype, its.shape, its.data_offsets)
        begin, end = its.data_offsets
        if entry.num_bytes < 0 or begin < 0:
            raise damaged(f"entry {key!r} has negative offsets")
        if end > num_bytes:
            missing = end - num_bytes
            raise damaged(f"tensor {key} is cut off, {missing} bytes are missing (truncated file)")
        entries[key] = entry
    _refuse_overlap(entries, damaged)
    return entries


def _refuse_overlap(entries: dict[str, Entry], damaged: Callable[[str], RunFormatError]) -> None:
    last_end, last_key = 0, ""
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin == end:
            continue
        if begin < last_end:
            raise damaged(f"tensors {last_key} and {key} overlap")
        last_end, last_key = end, key

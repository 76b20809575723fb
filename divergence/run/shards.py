"""Tensors' bytes in shards, read where they are needed and checked against their digests."""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from divergence.errors import DumpError, RunFormatError
from divergence.numerics.formats import FORMATS
from divergence.run.blobs import (
    SPAN_BYTES,
    Blob,
    Bytes,
    LocalBlob,
    Member,
    Store,
    archive_kind_of,
    members_of,
)
from divergence.run.command import command_line
from divergence.run.location import Location, Url, archive_kind
from divergence.run.record import (
    COMMON_SHARD_DTYPES,
    MANIFEST,
    SHARD_PATTERN,
    checked_file,
    checked_name,
    is_records_name,
)

if TYPE_CHECKING:
    from divergence.run.captured import ShardEntry
    from divergence.run.remote import Object, Remote


# Ranges of remote objects: only those that are needed, neighbours in one request, in parallel.
#
# A request to an object store takes some 20 to 100 ms whatever its size, and one connection gives
# some 50 to 100 MB/s; so ranges that lie within ``GAP_BYTES`` of each other cost less as one
# request, and several requests run side by side. Whoever reads a run announces which records
# it will read and in which order (``expect``); what was not announced is fetched on its own.
#
# What was fetched is kept in memory up to a budget, least recently used first out. Tensors that are
# views of a range keep it alive beyond that.

GAP_BYTES = 256 << 10
"""Bytes between two ranges that are read along rather than asked for twice: less than a request's
latency costs."""
BUDGET_BYTES = 256 << 20
"""What is kept of one store; half of it may be filled ahead of the reader."""
NUM_REQUESTS = 8

Range = tuple[str, int, int]
"""(object, begin, end)"""


@dataclass(slots=True)
class _Fetched:
    """A range that is fetched, or will be when its parts are done."""

    data: bytearray | mmap.mmap
    parts: list[Future[None]] = field(default_factory=list)

    def wait(self) -> bytearray | mmap.mmap:
        for part in self.parts:
            part.result()
        return self.data


class Ranges:
    """``fetch(object, begin, end) -> bytes`` behind a cache. Safe to use from several threads."""

    def __init__(
        self, fetch: Callable[[str, int, int], bytes], *, budget_bytes: int = BUDGET_BYTES
    ) -> None:
        self._fetch, self._budget_bytes = fetch, budget_bytes
        self._lock = threading.Lock()
        self._expected: list[Range] = []
        self._kept: dict[Range, _Fetched] = {}
        """In the order of last use."""
        self._pool: ThreadPoolExecutor | None = None

    def get(self, name: str, begin: int, end: int) -> memoryview:
        """The bytes of a range; raises what fetching them raised."""
        if begin >= end:
            return memoryview(bytearray())
        with self._lock:
            wanted = name, begin, end
            for span in (*self._kept, *self._expected):
                if span[0] == name and span[1] <= begin and end <= span[2]:
                    wanted = span
                    break
            fetched = self._submit(wanted)
            # what is expected after it, up to half of the budget
            if wanted in self._expected:
                ahead_bytes = 0
                for later in self._expected[self._expected.index(wanted) + 1 :]:
                    ahead_bytes += later[2] - later[1]
                    if ahead_bytes > self._budget_bytes // 2:
                        break
                    if later not in self._kept:
                        self._submit(later)
        try:
            data = fetched.wait()
        except BaseException:
            with self._lock:  # fetched again next time
                if self._kept.get(wanted) is fetched:
                    del self._kept[wanted]
            raise
        return memoryview(data)[begin - wanted[1] : end - wanted[1]]

    def expect(self, wanted: Iterable[Range]) -> None:
        """These will be read, in about this order; replaces what was expected before."""
        spans = coalesced(wanted)
        with self._lock:
            self._expected = spans

    def close(self) -> None:
        """Stop fetching and forget what is kept."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._kept.clear()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, span: Range) -> _Fetched:
        """With the lock held."""
        fetched = self._kept.pop(span, None)
        if fetched is None:
            name, begin, end = span
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="divergence-fetch")
            fetched = _Fetched(_room(end - begin))
            for first in range(begin, end, SPAN_BYTES):
                last = min(first + SPAN_BYTES, end)
                part = self._pool.submit(self._fill, fetched.data, name, begin, first, last)
                fetched.parts.append(part)
        self._kept[span] = fetched
        while len(self._kept) > 1 and self.num_bytes > self._budget_bytes:
            del self._kept[next(iter(self._kept))]
        return fetched

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return sum(end - begin for _, begin, end in self._kept)

    def _fill(
        self, data: bytearray | mmap.mmap, name: str, base: int, begin: int, end: int
    ) -> None:
        data[begin - base : end - base] = self._fetch(name, begin, end)


def _room(num_bytes: int) -> bytearray | mmap.mmap:
    """Of much, only what has come takes memory: how much there is, is what a server says."""
    if num_bytes <= SPAN_BYTES:
        return bytearray(num_bytes)
    try:
        return mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise RunFormatError(
            f"{num_bytes:,} bytes are needed at once, more than this machine has memory for",
            hint="compare on a machine with more, or leave the site out (--sites)",
        ) from error


def coalesced(wanted: Iterable[Range]) -> list[Range]:
    """Ranges that neighbour each other, put together; in the order in which they are first needed.

    A range beyond SPAN_BYTES stays whole; several are put together only up to that.
    """
    first_use: dict[Range, int] = {}
    for number, span in enumerate(wanted):
        if span[1] < span[2]:
            first_use.setdefault(span, number)
    spans: list[tuple[int, Range]] = []
    for span, number in sorted(first_use.items()):
        name, begin, end = span
        if spans:
            before, (last_name, last_begin, last_end) = spans[-1]
            together = max(end, last_end) - last_begin
            fits = together <= SPAN_BYTES or end <= last_end
            if name == last_name and begin - last_end <= GAP_BYTES and fits:
                joined = (name, last_begin, max(end, last_end))
                spans[-1] = (min(before, number), joined)
                continue
        spans.append((number, span))
    return [span for _, span in sorted(spans)]


# One safetensors shard: read without copying, written without the library's per-tensor cost.
#
# The header is parsed here because a damaged shard must be named precisely (which
# tensor, how many bytes are missing) and because tensors are handed out as views of a
# private memory map, so that a comparison can stream through dumps larger than memory.
# It is written here because a decode step records many small tensors, for which the
# library's checks take longer than the bytes, and because it does not store every dtype.
# The files are plain safetensors; tests read them with the library.

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

    def stretch(self, key: str, wanted: int) -> Bytes:
        """The bytes at ``key``, which are ``wanted``. Raises RunFormatError."""
        begin, end = self.span(key) or (0, -1)
        if end - begin != wanted:
            holds = "is gone" if end < 0 else f"holds {end - begin} bytes"
            raise RunFormatError(
                f"tensor {key} {holds}, its record needs {wanted} bytes", where=self.name
            )
        if wanted == 0:
            return b""
        try:
            stored = self._blob.view(begin, wanted)
        except OSError as error:  # removed or emptied since it was opened
            raise RunFormatError(f"shard cannot be read: {error}", where=self.name) from error
        if len(stored) < wanted:
            raise RunFormatError("shard was cut off while it was read", where=self.name)
        return stored

    def release(self) -> None:
        """Let what was viewed leave memory; views stay good."""
        self._blob.release()

    def close(self) -> None:
        """Drop the map; views that are still alive keep it open."""
        self._blob.close()


def write_shard(path: Path, pieces: Mapping[str, ShardEntry]) -> None:
    """Write ``pieces`` by key as a safetensors file. Raises OSError.

    Wide elements come first, so that each tensor is aligned to its own element size; a
    dtype that the format does not name goes as raw bytes (the record knows what it is).
    """
    ordered = sorted(pieces.items(), key=lambda pair: -FORMATS[pair[1].dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, piece in ordered:
        code, end = COMMON_SHARD_DTYPES.get(piece.dtype), offset + piece.data.nbytes
        shape = piece.shape if code else (piece.data.nbytes,)
        header[key] = _HeaderEntry(code or "U8", shape, (offset, end))
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=_BUFFER_BYTES) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(piece.data for _, piece in ordered)


_BUFFER_BYTES = 1 << 20
"""Small tensors are written many at a time."""


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
    if not sound:
        return {}
    same: dict[object, Any] = {}
    for entry in every:  # equal ones are one object: a third of what an entry takes
        entry.dtype = same.setdefault(entry.dtype, entry.dtype)
        entry.shape = same.setdefault(entry.shape, entry.shape)
    return entries


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
    last_end, last_key = 0, ""
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin < end and begin < last_end:
            raise damaged(f"tensors {last_key} and {key} overlap")
        if begin < end:
            last_end, last_key = end, key
    return entries


# Stores that are no directory: an archive's members, objects below a URL, an archive there.


class _Archive(Store):
    """One file that holds the run's files."""

    def __init__(
        self,
        place: Location,
        archive: Blob,
        kind: str,
        *,
        ranges: Ranges | None = None,
        remote: Remote | None = None,
        found: Object | None = None,
    ) -> None:
        self.place = place
        self.far = ranges is not None
        self._archive, self._ranges = archive, ranges
        self._remote, self._found = remote, found
        self._members: dict[str, Member] = members_of(archive, kind)

    @property
    def sizes(self) -> dict[str, int]:
        """Of all that the archive holds, the run's or not."""
        return {name: member.size for name, member in self._members.items()}

    def has(self, name: str) -> bool:
        return name in self._members

    def where(self, name: str) -> str:
        return f"{self.place}: {name}"

    def blob(self, name: str) -> Blob:
        return self._member(name).part(self._archive, name)

    def open(self, name: str) -> BinaryIO:
        return self._member(name).open(self._archive, name)

    def size(self, name: str) -> int:
        return self._member(name).size

    def whole(self, name: str) -> Iterator[Bytes]:
        if not self._member(name).deflated:
            return super().whole(name)
        return iter(partial(self.open(name).read, SPAN_BYTES), b"")

    def has_changed(self, name: str) -> bool:
        return self._remote is not None and self._remote.look() != self._found

    def expect(self, stretches: Iterable[tuple[str, int, int]]) -> None:
        if self._ranges is None:
            return
        wanted = []
        for name, begin, end in stretches:
            member = self._members.get(name)
            if member is not None:  # of a zip member the header lies before, some 100 bytes
                if member.deflated:  # from end to end
                    begin, end = 0, member.packed_bytes
                first = member.begin + begin
                wanted.append(("", first, min(member.begin + end + 1024, self._archive.size)))
        self._ranges.expect(wanted)

    def close(self) -> None:
        self._archive.close()
        if self._ranges is not None:
            self._ranges.close()

    def _member(self, name: str) -> Member:
        if checked_name(name, where=str(self.place)) not in self._members:
            raise RunFormatError(
                f"{name} is missing",
                where=str(self.place),
                hint="pack the whole run; a run is not complete without it",
            )
        return self._members[name]


class _Objects(Store):
    """Objects below a URL."""

    far = True

    def __init__(self, place: Url, remote: Remote, objects: dict[str, Object]) -> None:
        self.place = place
        self._remote, self._objects = remote, objects
        self._ranges = Ranges(remote.fetch)

    def has(self, name: str) -> bool:
        return name in self._objects

    def where(self, name: str) -> str:
        return str(self.place / name)

    def blob(self, name: str) -> Blob:
        if checked_name(name, where=str(self.place)) not in self._objects:
            raise RunFormatError(
                f"{name} is missing",
                where=str(self.place),
                hint="copy the whole run; a run is not complete without it",
            )
        size = self._objects[name].size
        return _RemoteBlob(self._ranges, name, size=size, shown=self.where(name))

    def has_changed(self, name: str) -> bool:
        return self._remote.look(name) != self._objects.get(name)

    def expect(self, stretches: Iterable[tuple[str, int, int]]) -> None:
        self._ranges.expect(
            (name, begin, min(end, self._objects[name].size))
            for name, begin, end in stretches
            if name in self._objects
        )

    def close(self) -> None:
        self._ranges.close()


class _RemoteBlob(Blob):
    """A stretch of a remote object. What will be viewed soon is said by ``Store.expect``."""

    def __init__(self, ranges: Ranges, key: str, *, size: int, shown: str, offset: int = 0) -> None:
        self.name, self.size = shown, size
        self._ranges, self._key, self._offset = ranges, key, offset

    def read(self, begin: int, num_bytes: int) -> bytes:
        return bytes(self.view(begin, num_bytes))

    def view(self, begin: int, num_bytes: int) -> memoryview:
        end = min(begin + num_bytes, self.size)
        return self._ranges.get(self._key, self._offset + begin, self._offset + end)

    def part(self, begin: int, num_bytes: int, name: str) -> _RemoteBlob:
        return _RemoteBlob(
            self._ranges, self._key, size=num_bytes, shown=name, offset=self._offset + begin
        )


def open_url(place: Url) -> Store:
    """A folder of objects, or one that is an archive."""
    from divergence.run.remote import Remote

    remote = Remote(place, refused=RunFormatError)
    objects: dict[str, Object] = {}
    if archive_kind(place) is None:
        objects = remote.objects()
        if not objects:
            raise RunFormatError(
                f"there is nothing at {place}",
                hint="is the bucket's name right, and the path in it?",
            )
        if "" not in objects:
            folder = _Objects(place, remote, objects)
            folder.expect(_needed_to_open({name: there.size for name, there in objects.items()}))
            return folder
    archived = objects[""] if objects else remote.look()
    if archived is None:
        raise RunFormatError(f"there is nothing at {place}", hint="is the URL right?")
    if not archived.size:
        raise RunFormatError(f"{place} is empty", hint="copy it again")
    ranges = Ranges(remote.fetch)
    # where a tar begins and a zip has its directory
    size = archived.size
    ranges.expect([("", 0, min(HEADER_BYTES, size)), ("", max(0, size - HEADER_BYTES), size)])
    archive = _RemoteBlob(ranges, "", size=size, shown=str(place))
    kind = archive_kind_of(archive)
    if kind is None:
        raise RunFormatError(f"{place} is neither a tar nor a zip archive")
    store = _Archive(place, archive, kind, ranges=ranges, remote=remote, found=archived)
    store.expect(_needed_to_open(store.sizes))
    return store


_MOST_AHEAD_BYTES = 1 << 34


def _needed_to_open(sizes: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    for name in (MANIFEST, *sorted(filter(is_records_name, sizes))):
        for begin in range(0, sizes.get(name, 0), SPAN_BYTES):
            if begin > _MOST_AHEAD_BYTES:
                break  # a hint; the size is what a server says
            yield name, begin, min(begin + SPAN_BYTES, sizes[name])
    for name in sorted(sizes):
        if re.match(SHARD_PATTERN, name):
            yield name, 0, min(HEADER_BYTES, sizes[name])


# Where a run's files are read from: a directory, an archive, or either of them far away.


class _Directory(Store):
    """A directory of this machine."""

    def __init__(self, place: Path) -> None:
        self.place: Path = place

    def has(self, name: str) -> bool:
        return os.path.lexists(self.place / checked_name(name, where=str(self.place)))

    def where(self, name: str) -> str:
        return str(self.place / name)

    def blob(self, name: str) -> Blob:
        return LocalBlob(checked_file(self.place, name))

    def open(self, name: str) -> BinaryIO:
        return open(checked_file(self.place, name), "rb")


def open_store(place: Location) -> Store:
    """The store of the run at ``place``. RunFormatError where there is none."""
    if isinstance(place, Url):
        store = open_url(place)
    elif place.is_dir():
        store = _Directory(place)
    elif place.is_file():
        archive = LocalBlob(place)
        kind = archive_kind_of(archive)
        if kind is None:
            raise RunFormatError(
                f"{place} is not a directory, and no tar or zip archive either",
                hint="a run is what `divergence capture MODEL -o RUN` wrote",
            )
        store = _Archive(place, archive, kind)
    else:
        why = "is neither a directory nor a file" if place.exists() else "does not exist"
        raise RunFormatError(
            f"{place} {why}",
            hint="a run is the directory that `divergence capture MODEL -o RUN` wrote",
        )
    if not store.has(MANIFEST):
        store.close()
        if not isinstance(place, Url) and (place / "config.json").is_file():
            raise RunFormatError(
                f"{place} is not a run but a model",
                hint=command_line("capture", str(place), o="RUN", note="makes a run of it"),
            )
        hint = (
            "give what `divergence capture MODEL -o RUN` wrote: a directory, or a .tar or .zip of "
            "one, or its URL"
        )
        # the folder of a diff is often meant to be one of the runs inside
        with contextlib.suppress(OSError):
            inside = [] if isinstance(place, Url) else sorted(place.iterdir())
            runs = [str(path) for path in inside if (path / MANIFEST).is_file()]
            hint = f"it holds {', '.join(runs[:4])}" if runs else hint
        raise RunFormatError(f"{place} is not a run: it has no {MANIFEST}", hint=hint)
    return store

"""Stretches of files: of a local file, of a member of an archive, or of a remote object.

Local ones are views of a private memory map (also inside a tar, or a zip whose members are stored),
so a comparison streams through dumps larger than memory without a copy; remote ones are ranges that
were fetched. A store maps a run's names to blobs: a directory's entries, an archive's members, an
object store's objects.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from divergence.run.process_tuning import release_pages
from divergence.run.storage.location import Location

__all__ = ["SPAN_BYTES", "Blob", "BlobFile", "Bytes", "LocalBlob", "Store", "reader"]

Bytes = bytes | memoryview

SPAN_BYTES = 8 << 20
"""The most that is read at a time: ranges are put together to it, and larger ones are fetched in
parts of it."""
_SPARSE = 4
"""Parts that lie close together are read with what lies between them, up to so many times the bytes
of one."""
_SCRATCH_BYTES = 1 << 20
"""Stays in a core's cache."""


class Blob:
    """``size`` bytes under a printable ``name``. Methods raise OSError."""

    name: str
    size: int

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Copies a part; shorter at the end."""
        raise NotImplementedError

    def view(self, begin: int, num_bytes: int) -> memoryview:
        """A part as a writable buffer that must not be written to; shorter where it was cut."""
        raise NotImplementedError

    def read_many(self, begins: Sequence[int], num_bytes: int) -> list[memoryview]:
        """Many parts of one size, which must not be written to; shorter where it was cut."""
        return [self.view(begin, num_bytes) for begin in begins]

    def part(self, begin: int, num_bytes: int, name: str) -> Blob:
        """A part as a blob of its own."""
        raise NotImplementedError

    def will_need(self, begin: int, num_bytes: int) -> None:
        """Fetches a part that will be viewed soon, where that takes none of this thread's time."""

    def release(self) -> None:
        """Lets what was viewed leave memory for now. Views stay good."""

    def close(self) -> None:
        """Releases maps; views that are still alive keep theirs."""


def _neighbours(numbers: Sequence[int], near: int) -> Iterator[list[int]]:
    """Ascending numbers, of which none in a part is ``near`` or more from the one before it."""
    part = [numbers[0]]
    for number in numbers[1:]:
        if number - part[-1] >= near:
            yield part
            part = []
        part.append(number)
    yield part


class LocalBlob(Blob):
    """A stretch of a local file. ``offset``: where in the file it begins."""

    def __init__(
        self, path: Path, *, offset: int = 0, size: int | None = None, name: str | None = None,
        mapped: _Map | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.offset = offset
        self.size = os.stat(path).st_size if size is None else size
        self.name = str(path) if name is None else name
        self._owns = mapped is None
        self._map = mapped or _Map(path)

    def read(self, begin: int, num_bytes: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset + begin)
            return file.read(max(0, min(num_bytes, self.size - begin)))

    def view(self, begin: int, num_bytes: int) -> memoryview:
        first = self.offset + begin
        end = first + min(num_bytes, self.size - begin)
        mapped = self._map.open()
        if mapped.size() < end:
            # touching what the file lost since it was mapped would end the process (SIGBUS)
            raise OSError("the file has become shorter while it was read")
        return memoryview(mapped)[first:end]

    def read_many(self, begins: Sequence[int], num_bytes: int) -> list[memoryview]:
        # few calls to the system: each, and each page fault, would hold up the other threads
        if not begins:
            return []
        parts: dict[int, memoryview] = {}
        near = (1 + _SPARSE) * num_bytes
        with open(self.path, "rb") as file:
            for together in _neighbours(sorted(set(begins)), near):
                first = together[0]
                file.seek(self.offset + first)
                end = min(together[-1] + num_bytes, self.size)
                whole = memoryview(file.read(max(0, end - first)))
                parts |= {at: whole[at - first : at - first + num_bytes] for at in together}
        return [parts[begin] for begin in begins]

    def part(self, begin: int, num_bytes: int, name: str) -> LocalBlob:
        offset = self.offset + begin  # one map for all members of an archive
        return LocalBlob(self.path, offset=offset, size=num_bytes, name=name, mapped=self._map)

    def will_need(self, begin: int, num_bytes: int) -> None:
        if not hasattr(os, "preadv") or num_bytes <= 0:
            return
        first = self.offset + begin
        end = first + num_bytes
        with open(self.path, "rb", buffering=0) as file:
            number = file.fileno()
            if _is_cached(number, first) and _is_cached(number, end - 1):
                return
            # in order, so that the system reads ahead as it does for a copy; posix_fadvise would
            # cut the request to one read-ahead each time
            scratch = bytearray(min(_SCRATCH_BYTES, num_bytes))
            for start in range(first, end, len(scratch)):
                os.preadv(number, [memoryview(scratch)[: end - start]], start)

    def release(self) -> None:
        self._map.release()

    def close(self) -> None:
        if self._owns:
            self._map.close()


def _is_cached(file: int, at: int) -> bool:
    """Is the byte known to be in the system's cache?"""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # it would have to wait, or cannot tell
        return False


class _Map:
    """The memory map of a file, opened on first use.

    Pages that were touched count as this process's memory until they are released; touched again,
    they come from the page cache.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def open(self) -> mmap.mmap:
        if self._map is None:
            with open(self._path, "rb") as file:
                # Private copy-on-write: torch wants a writable buffer, the file stays as it is.
                try:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except ValueError as error:  # emptied since it was looked at
                    raise OSError(str(error)) from error
        return self._map

    def release(self) -> None:
        """Releases all pages at once: those still in use come back at little cost."""
        if self._map is not None:
            release_pages(self._map)  # the private map was never written to: nothing is lost

    def close(self) -> None:
        self._map = None


class BlobFile(io.RawIOBase):
    """A blob as an unbuffered file."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io gives
        data = self._blob.read(self._at, min(len(buffer), max(0, self._blob.size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def reader(blob: Blob, *, ahead_bytes: int) -> BinaryIO:
    """The blob as a file that reads ``ahead_bytes`` at a time."""
    return io.BufferedReader(BlobFile(blob), ahead_bytes)


class Store:
    """The files of one run. Methods raise RunFormatError, or OSError of this machine's files.

    ``far``: bytes cost time and money to fetch, so only those are read that must be.
    """

    place: Location
    far = False
    folder: Path | None = None
    """The directory of this machine that it is, if it is one."""

    def has(self, name: str) -> bool:
        """Is there anything under this name?"""
        raise NotImplementedError

    def where(self, name: str) -> str:
        """What to call a file of the run in messages."""
        raise NotImplementedError

    def blob(self, name: str) -> Blob:
        """A file's bytes; RunFormatError where it is missing, a link, or no regular file."""
        raise NotImplementedError

    def open(self, name: str) -> BinaryIO:
        """A file from end to end."""
        return reader(self.blob(name), ahead_bytes=SPAN_BYTES)

    def size(self, name: str) -> int:
        """Bytes of what ``open`` gives."""
        return self.blob(name).size

    def stamp(self, name: str) -> tuple[int, ...]:
        """What changes whenever a file of ``folder`` does: size, times, its number on disk."""
        raise NotImplementedError

    def whole(self, name: str) -> Iterator[Bytes]:
        """A file from end to end, in pieces, without a copy where it lies here as it is."""
        blob = self.blob(name)
        for begin in range(0, blob.size, SPAN_BYTES):
            yield blob.view(begin, SPAN_BYTES)
        blob.close()

    def has_changed(self, name: str) -> bool:
        """Is a file another one now than when the store was opened?"""
        return False

    def expect(self, stretches: Iterable[tuple[str, int, int]]) -> None:
        """(name, begin, end) of what will be read, in about this order."""

    def close(self) -> None:
        """Releases maps and connections."""

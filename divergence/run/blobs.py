"""Bytes by name: of a folder, or of an archive's members."""

from __future__ import annotations

import io
import mmap
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from divergence.errors import RunFormatError
from divergence.run.location import Location
from divergence.run.record import MANIFEST

# Stretches of files: of a local file, of a member of an archive, or of a remote object.
#
# Local ones are views of a private memory map (also inside a tar, or a zip whose members are
# stored), so a comparison streams through dumps larger than memory without a copy; remote ones are
# ranges that were fetched. A store maps a run's names to blobs: a directory's entries, an
# archive's members, an object store's objects.

Bytes = bytes | memoryview

SPAN_BYTES = 8 << 20
"""The most that is read at a time: ranges are put together to it, and larger ones are fetched in
parts of it."""


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

    def part(self, begin: int, num_bytes: int, name: str) -> Blob:
        """A part as a blob of its own."""
        raise NotImplementedError

    def release(self) -> None:
        """Lets what was viewed leave memory for now. Views stay good."""

    def close(self) -> None:
        """Releases maps; views that are still alive keep theirs."""


class LocalBlob(Blob):
    """A stretch of a local file. ``offset``: where in the file it begins."""

    def __init__(
        self,
        path: Path,
        *,
        offset: int = 0,
        size: int | None = None,
        name: str | None = None,
        mapped: _Map | None = None,
    ) -> None:
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

    def part(self, begin: int, num_bytes: int, name: str) -> LocalBlob:
        offset = self.offset + begin  # one map for all members of an archive
        return LocalBlob(self.path, offset=offset, size=num_bytes, name=name, mapped=self._map)

    def release(self) -> None:
        self._map.release()

    def close(self) -> None:
        if self._owns:
            self._map.close()


class _Inflated(Blob):
    """A member that was compressed, in memory."""

    def __init__(self, name: str, data: bytearray) -> None:
        self.name, self.size = name, len(data)
        self._data = data

    def read(self, begin: int, num_bytes: int) -> bytes:
        return bytes(self.view(begin, num_bytes))

    def view(self, begin: int, num_bytes: int) -> memoryview:
        return memoryview(self._data)[begin : begin + num_bytes]


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
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # never written to: nothing is lost

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


# Runs in one file: where the members of a tar or zip lie in it.
#
# An archive is never unpacked to be read: a member that is stored as it is (any in a tar, those of
# method 0 in a zip) is a stretch of the archive, mapped or fetched like a file of its own. A zip's
# members may be deflated: manifest and lines are read from end to end anyway, and shards of no more
# than MAX_DEFLATED_BYTES, as of a golden, are inflated into memory.
#
# An archive is as little trusted as a directory. Names that lead out of it, links, devices, names
# given twice, overlapping members, sizes that the file does not have and encryption are refused;
# what the index of an archive may take of memory is bounded before it is read.
# Formats: POSIX.1-2017 pax (ustar), PKWARE APPNOTE 6.3.10.

MAX_MEMBERS = 200_000
MAX_INDEX_READ_BYTES = 256 << 20
"""The most that is read at once of an archive's own structure: a directory of a million members
takes some 100 MiB."""
MAX_RATIO, MAX_FREE_BYTES = 200, 16 << 20
"""How many times smaller a deflated manifest or lines may be (20 is usual, 1,032 the most that the
method can), unless they are small anyway."""
MAX_DEFLATED_BYTES = 1 << 30
"""A deflated shard takes as much memory as it holds."""
_AHEAD_BYTES = 1 << 16
"""What is fetched at a time of an archive's own structure."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7-Zip",
    b"Rar!": "RAR",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file of the run in an archive. ``begin``: of its bytes, or of its zip header.

    ``deflated``: its bytes are compressed (``packed_bytes`` of them).
    """

    begin: int
    size: int
    in_zip: bool = False
    deflated: bool = False
    packed_bytes: int = 0

    def part(self, archive: Blob, name: str) -> Blob:
        """The member as a blob. Raises RunFormatError for a large one that is compressed."""
        shown = f"{archive.name}: {name}"
        if self.deflated and self.size <= MAX_DEFLATED_BYTES:
            data = bytearray()
            with self.open(archive, name) as member:
                while piece := member.read(SPAN_BYTES):
                    data += piece
            return _Inflated(shown, data)
        if self.deflated:
            raise RunFormatError(
                f"{name} is compressed in the archive, {self.size >> 30} GiB of it",
                where=archive.name,
                hint="unzip it (the directory is a run), or zip without compression: zip -0 -r, or "
                "divergence pack",
            )
        return archive.part(self._data(archive, name), self.size, shown)

    def open(self, archive: Blob, name: str) -> BinaryIO:
        """The member's bytes from end to end, inflated where need be."""
        if not self.deflated:
            return reader(self.part(archive, name), ahead_bytes=1 << 20)
        begin = self._data(archive, name)
        packed = reader(archive.part(begin, self.packed_bytes, name), ahead_bytes=1 << 20)
        return io.BufferedReader(_Inflating(packed, self.size, f"{archive.name}: {name}"), 1 << 20)

    def _data(self, archive: Blob, name: str) -> int:
        """Where the bytes begin: behind the member's own header, in a zip."""
        if not self.in_zip:
            return self.begin
        header = archive.read(self.begin, _LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise _damaged(archive, f"{name} has no header of its own")
        name_bytes: int
        extra_bytes: int
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        begin = self.begin + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if begin + self.packed_bytes > archive.size:
            raise _damaged(archive, f"{name} is cut off")
        return begin


def archive_kind_of(blob: Blob) -> str | None:
    """``tar`` or ``zip`` by the first bytes, None for neither; RunFormatError for compressed."""
    head = blob.read(0, 512)
    for magic, called in _COMPRESSED.items():
        if head.startswith(magic):
            raise RunFormatError(
                f"{blob.name} is compressed ({called}), and a run is read in place",
                hint="unpack it first; the directory, or an uncompressed .tar, is a run",
            )
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "zip"
    return "tar" if head[257:262] == b"ustar" else None


def members_of(archive: Blob, kind: str) -> dict[str, Member]:
    """The run's files by their names in it, also where the archive holds them in one folder."""
    named: dict[str, Member] = {}
    for raw, member in _tar_members(archive) if kind == "tar" else _zip_members(archive):
        name = re.sub(r"^(\./)+", "", raw)
        odd = {"..", ""} & {*name.split("/")} or name.startswith("/")
        if odd or "\\" in name or "\0" in name:
            raise _damaged(archive, f"it holds {raw[:80]!r}, a name that no run has")
        if name in named:
            raise _damaged(archive, f"it holds {name!r} twice")
        if len(named) >= MAX_MEMBERS:
            raise _too_many(archive)
        named[name] = member
    if MANIFEST not in named:
        folders = [
            n.partition("/")[0] for n in named if n.count("/") == 1 and n.endswith("/" + MANIFEST)
        ]
        if len(folders) == 1:  # `tar cf run.tar run`
            prefix = folders[0] + "/"
            return {
                name.removeprefix(prefix): member
                for name, member in named.items()
                if name.startswith(prefix)
            }
    return named


def _too_many(archive: Blob) -> RunFormatError:
    return RunFormatError(
        f"the archive holds more than {MAX_MEMBERS:,} files",
        where=archive.name,
        hint="it is no run: a run's tensors lie many to a file (`divergence pack RUN` makes one)",
    )


def _tar_members(archive: Blob) -> Iterator[tuple[str, Member]]:
    try:
        with tarfile.TarFile(fileobj=_Guarded(BlobFile(archive), _AHEAD_BYTES), mode="r") as tar:
            num_folders = 0
            while (entry := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # kept by tarfile for look-ups that nobody makes here
                if entry.isdir():
                    num_folders += 1
                    if num_folders > MAX_MEMBERS:
                        raise _too_many(archive)
                    continue
                if entry.issym() or entry.islnk():
                    raise _link(archive, entry.name)
                if not entry.isreg() or entry.issparse():
                    raise _damaged(archive, f"{entry.name!r} is not a regular file")
                if entry.offset_data + entry.size > archive.size:
                    raise _damaged(archive, f"{entry.name!r} is cut off")
                yield entry.name, Member(begin=entry.offset_data, size=entry.size)
            # tarfile also ends quietly at a damaged header, and at the end of a file cut off there
            if archive.read(tar.offset, tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                what = "cut off" if tar.offset >= archive.size else "damaged"
                raise _damaged(archive, f"it is {what} at byte {tar.offset}")
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise _damaged(archive, str(error)) from error


def _zip_members(archive: Blob) -> Iterator[tuple[str, Member]]:
    try:
        with zipfile.ZipFile(_Guarded(BlobFile(archive), _AHEAD_BYTES)) as folder:
            entries, end = folder.infolist(), folder.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise _damaged(archive, f"{error} (cut off?)") from error
    before = 0
    for entry in sorted(entries, key=lambda zip_info: zip_info.header_offset):
        name = entry.orig_filename
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise _link(archive, name)
        if entry.flag_bits & 0x1:
            raise _damaged(archive, f"{name!r} is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _damaged(archive, f"{name!r} is compressed by method {entry.compress_type}")
        deflated = entry.compress_type == zipfile.ZIP_DEFLATED
        if deflated and entry.file_size > max(MAX_FREE_BYTES, MAX_RATIO * entry.compress_size):
            raise _damaged(archive, f"{name!r} would unpack to {entry.file_size} bytes")
        if not deflated and entry.compress_size != entry.file_size:
            raise _damaged(archive, f"{name!r} has two sizes")
        if entry.header_offset < before:
            raise _damaged(archive, f"{name!r} overlaps another file")
        before = entry.header_offset + _LOCAL_HEADER.size + entry.compress_size
        if before > end:
            raise _damaged(archive, f"{name!r} is cut off")
        if name.endswith("/"):
            continue
        member = Member(
            begin=entry.header_offset,
            size=entry.file_size,
            in_zip=True,
            deflated=deflated,
            packed_bytes=entry.compress_size,
        )
        yield name, member


class _Guarded(io.BufferedReader):
    """The archive as a file that refuses huge reads: tar and zip state how long their own
    structures are, and whoever made the file may state anything."""

    def read(self, size: int | None = -1) -> bytes:
        size = -1 if size is None else size
        if size > MAX_INDEX_READ_BYTES:
            raise ValueError(f"a header of {size} bytes")
        if size < 0:
            begin = self.tell()
            size = min(MAX_INDEX_READ_BYTES, self.seek(0, io.SEEK_END) - begin)
            self.seek(begin)
        return super().read(size)


class _Inflating(io.RawIOBase):
    """A deflated member from end to end; never more than it declares."""

    def __init__(self, packed: BinaryIO, size: int, shown: str) -> None:
        self._packed, self._left, self._shown = packed, size, shown
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io gives
        data = b""
        try:
            while not data and not self._inflate.eof:
                chunk = self._inflate.unconsumed_tail or self._packed.read(1 << 16)
                data = self._inflate.decompress(chunk, len(buffer))
                if not chunk and not data:
                    break
        except zlib.error as error:
            raise RunFormatError(f"damaged: {error}", where=self._shown) from error
        self._left -= len(data)
        if self._left < 0 or (not data and self._left):
            raise RunFormatError("it has not the size that it declares", where=self._shown)
        buffer[: len(data)] = data
        return len(data)


def _damaged(archive: Blob, what: str) -> RunFormatError:
    return RunFormatError(
        f"the archive cannot be read: {what}",
        where=archive.name,
        hint="copy it again; `divergence pack RUN` makes one that can",
    )


def _link(archive: Blob, name: str) -> RunFormatError:
    return RunFormatError(
        f"{name[:80]!r} is a link, which a run may not contain",
        where=archive.name,
        hint="pack it with links resolved, for example: tar -h",
    )

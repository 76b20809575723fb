"""Where a run lies: a place by its name, its files, in a folder or an archive, and its tensors by
key in a shard."""

from __future__ import annotations

import io
import mmap
import operator
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

import msgspec

from divergence.errors import DumpError, RunFormatError, UsageError
from divergence.numerics.formats import FORMATS
from divergence.run.record import (
    COMMON_SHARD_DTYPES,
    MANIFEST,
    checked_file,
    checked_name,
    expanded,
)

if TYPE_CHECKING:
    from divergence.run.captured import ShardEntry


# Names of places where runs are: a path of this machine, or a URL of an object store.
#
# A place prints as it was given and parses back from what it prints, so that a command shown to
# the user works when it is pasted. ``file://`` is a path. Chained URLs (``zip://...::s3://...``)
# are not taken: archives are opened here, by their contents.

ARCHIVES = (".tar", ".zip")
"""What a name ends in that is written as one file."""
_COMPRESSED_SUFFIXES = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
WITH_BUCKETS = ("s3", "s3a", "gs", "gcs")
"""Schemes whose URLs begin with the name of a bucket."""
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Url:
    """A place outside this machine's file system, for example ``s3://bucket/runs/a``."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str | os.PathLike[str]) -> Url:
        return Url(f"{self.text}/{os.fspath(name)}")

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part, as of a path."""
        return self.text.partition("://")[2].rpartition("/")[2]


Location = Path | Url


def location_of(given: str | os.PathLike[str] | Url) -> Location:
    """The place that ``given`` names. UsageError for a URL that cannot be one."""
    if isinstance(given, Url):
        return given
    text = os.fspath(given)
    match = _SCHEME.match(text)
    if match is None:
        collapsed = re.match(r"^([A-Za-z][A-Za-z0-9+.-]+):/[^/]", text)
        if isinstance(given, Path) and collapsed and not given.exists():
            raise UsageError(
                f"{text} looks like a URL made into a pathlib.Path, which merges its slashes",
                hint="give the URL as text",
            )
        return expanded(given)
    if "::" in text:
        raise UsageError(
            f"{text} is a chain of URLs",
            hint="name the object itself: archives (.tar, .zip) are opened without a chain",
        )
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme in ("file", "local"):
        return expanded("/" + unquote(rest.removeprefix("localhost/")).lstrip("/"))
    if not rest.strip("/"):
        raise UsageError(f"{text} names no bucket or path", hint="for example s3://bucket/runs/a")
    if ".." in rest.split("/"):
        raise UsageError(f"{text} holds '..', which means nothing in a store")
    if scheme in WITH_BUCKETS and rest.startswith("/"):
        raise UsageError(f"{text} names no bucket", hint="for example s3://bucket/runs/a")
    if scheme in WITH_BUCKETS and "//" in rest.rstrip("/"):
        # an object of such a name can be stored, but listings and packages lose one of the slashes
        merged = re.sub("/+", "/", rest.rstrip("/"))
        raise UsageError(
            f"{text} holds '//', an empty name", hint=f"did you mean {scheme}://{merged}?"
        )
    return Url(f"{scheme}://{rest.rstrip('/')}")


def folder_of(given: str | os.PathLike[str]) -> Path:
    """The directory of this machine that ``given`` names. UsageError for a URL."""
    place = location_of(given)
    if isinstance(place, Url):
        raise UsageError(
            f"{place} is a URL, and what is written here are plain files",
            hint="give a directory of this machine",
        )
    return place


def archive_kind(place: Location) -> str | None:
    """``tar`` or ``zip`` where a run written to ``place`` becomes one file, else None.

    UsageError for a compressed one: its bytes could not be read in place.
    """
    suffix = os.path.splitext(place.name)[1].lower()
    if suffix in _COMPRESSED_SUFFIXES:
        raise UsageError(
            f"{place} is the name of a compressed archive, whose tensors cannot be read in place",
            hint="give one that ends in .tar or .zip; compress and uncompress it yourself",
        )
    return suffix[1:] if suffix in ARCHIVES else None


def same_location(a: Location, b: Location) -> bool:
    """Do both names mean the same file, directory or object?"""
    if isinstance(a, Url) or isinstance(b, Url):
        return a == b
    return a.exists() and a.resolve() == b.resolve()


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
        return bytes(self.view(begin, num_bytes))

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


class MemoryBlob(Blob):
    """Bytes that lie in memory, or in a map that somebody else has made."""

    def __init__(self, name: str, data: memoryview) -> None:
        self.name, self.size = name, len(data)
        self._data = data

    def view(self, begin: int, num_bytes: int) -> memoryview:
        return self._data[begin : begin + max(num_bytes, 0)]

    def part(self, begin: int, num_bytes: int, name: str) -> MemoryBlob:
        return MemoryBlob(name, self.view(begin, num_bytes))


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
        """Return what to call a file of the run in messages."""
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
            return MemoryBlob(shown, memoryview(data))
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
        """Find where the bytes begin: behind the member's own header, in a zip."""
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


# Where a run's files are read from on this machine: a directory, or an archive.


class Directory(Store):
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


class Archive(Store):
    """One file that holds the run's files."""

    def __init__(self, place: Location, archive: Blob, kind: str) -> None:
        self.place, self.archive = place, archive
        self.members: dict[str, Member] = members_of(archive, kind)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of all that the archive holds, the run's or not."""
        return {name: member.size for name, member in self.members.items()}

    def has(self, name: str) -> bool:
        return name in self.members

    def where(self, name: str) -> str:
        return f"{self.place}: {name}"

    def blob(self, name: str) -> Blob:
        return self._member(name).part(self.archive, name)

    def open(self, name: str) -> BinaryIO:
        return self._member(name).open(self.archive, name)

    def size(self, name: str) -> int:
        return self._member(name).size

    def whole(self, name: str) -> Iterator[Bytes]:
        if not self._member(name).deflated:
            return super().whole(name)
        return iter(partial(self.open(name).read, SPAN_BYTES), b"")

    def close(self) -> None:
        self.archive.close()

    def _member(self, name: str) -> Member:
        if checked_name(name, where=str(self.place)) not in self.members:
            raise RunFormatError(
                f"{name} is missing",
                where=str(self.place),
                hint="pack the whole run; a run is not complete without it",
            )
        return self.members[name]


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
    """Says where one tensor lies in the file, as the header says it."""

    dtype: str = ""
    shape: tuple[int, ...] = (-1,)
    data_offsets: tuple[int, int] = (-1, -1)
    """Of its first byte and of the byte behind it, counted from the end of the header."""

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


_HEADER = msgspec.json.Decoder(dict[str, Entry])
"""What is not said of an entry takes its default."""


class Headers:
    """Keeps, of the headers that were read, those of few tensors or of the last shard alone."""

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
        """Return what the header says of each tensor. Raises RunFormatError."""
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
        """Return where in the file the tensor at ``key`` begins and ends; None if it has none."""
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
        header[key] = Entry(code or "U8", shape, (offset, end))
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
    return _entries(text, size - 8 - length, damaged), 8 + length


def _entries(
    text: bytes, num_bytes: int, damaged: Callable[[str], RunFormatError]
) -> dict[str, Entry]:
    """The entries of a header: all lie in ``num_bytes``, and none over another."""
    from divergence.outside import json_value  # of an odd header alone

    try:
        try:
            entries = _HEADER.decode(text)
        except msgspec.ValidationError:  # other writers note anything in __metadata__
            header = json_value(text, where="header")
            if not isinstance(header, dict):
                raise damaged("header is not a JSON object") from None
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, Entry])
    except DumpError as error:
        raise damaged(f"header is not JSON ({error.message})") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise damaged(f"header is malformed: {error}") from error
    entries.pop("__metadata__", None)
    offsets = [offset for entry in entries.values() for offset in entry.data_offsets]
    in_order = all(map(operator.le, offsets, offsets[1:]))  # as nearly always
    if not in_order or (offsets and not 0 <= offsets[0] <= offsets[-1] <= num_bytes):
        last_end, last_key = 0, ""
        for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            if not 0 <= begin <= end:
                raise damaged(f"entry {key!r} has negative offsets")
            if end > num_bytes:
                what = f"tensor {key} is cut off, {end - num_bytes} bytes are missing"
                raise damaged(f"{what} (truncated file)")
            if begin < min(end, last_end):
                raise damaged(f"tensors {last_key} and {key} overlap")
            if begin < end:
                last_end, last_key = end, key
    same: dict[object, Any] = {}
    for key, entry in entries.items():
        if not entry.dtype or entry.shape == (-1,):
            raise damaged(f"entry {key!r} is malformed")
        # equal ones are one object: a third of what an entry takes
        entry.dtype = same.setdefault(entry.dtype, entry.dtype)
        entry.shape = same.setdefault(entry.shape, entry.shape)
    return entries

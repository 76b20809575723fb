"""Runs in one file: where the members of a tar or zip lie in it.

An archive is never unpacked to be read: a member that is stored as it is (any in a tar, those of
method 0 in a zip) is a stretch of the archive, mapped or fetched like a file of its own. A zip's
manifest and lines may be deflated, they are read from end to end anyway; its tensors may not.

An archive is as little trusted as a directory. Names that lead out of it, links, devices, names
given twice, overlapping members, sizes that the file does not have and encryption are refused;
what the index of an archive may take of memory is bounded before it is read.
Formats: POSIX.1-2017 pax (ustar), PKWARE APPNOTE 6.3.10.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from divergence.errors import RunFormatError
from divergence.run.schema.layout import MANIFEST
from divergence.run.storage.blob import Blob, BlobFile, reader

__all__ = ["Member", "archive_kind_of", "members_of"]

MAX_MEMBERS = 200_000
MAX_INDEX_READ_BYTES = 256 << 20
"""The most that is read at once of an archive's own structure: a directory of a million members
takes some 100 MiB."""
MAX_RATIO, MAX_FREE_BYTES = 200, 16 << 20
"""How many times smaller a deflated manifest or lines may be (20 is usual, 1,032 the most that the
method can), unless they are small anyway."""
_AHEAD_BYTES = 1 << 16
"""What is fetched at a time of an archive's own structure."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bzip2", b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7-Zip", b"Rar!": "RAR",
}  # fmt: skip


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
        """The member as a blob. Raises RunFormatError for one that is compressed."""
        shown = f"{archive.name}: {name}"
        if self.deflated:
            raise RunFormatError(
                f"{name} is compressed in the archive, so it cannot be read in place",
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
    for raw, member in _of_tar(archive) if kind == "tar" else _of_zip(archive):
        name = _checked_name(archive, raw)
        if name in named:
            raise _damaged(archive, f"it holds {name!r} twice")
        if len(named) >= MAX_MEMBERS:
            raise _too_many(archive)
        named[name] = member
    if MANIFEST not in named:
        folders = [n.partition("/")[0] for n in named if n.count("/") == 1
                   and n.endswith("/" + MANIFEST)]  # fmt: skip
        if len(folders) == 1:  # `tar cf run.tar run`
            prefix = folders[0] + "/"
            return {
                name.removeprefix(prefix): member for name, member in named.items()
                if name.startswith(prefix)
            }  # fmt: skip
    return named


def _too_many(archive: Blob) -> RunFormatError:
    return RunFormatError(
        f"the archive holds more than {MAX_MEMBERS:,} files", where=archive.name,
        hint="it is no run: a run's tensors lie many to a file (`divergence pack RUN` makes one)",
    )  # fmt: skip


def _checked_name(archive: Blob, raw: str) -> str:
    name = re.sub(r"^(\./)+", "", raw)
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or "" in parts:
        raise _damaged(archive, f"it holds {raw[:80]!r}, a name that no run has")
    return name


def _of_tar(archive: Blob) -> Iterator[tuple[str, Member]]:
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


def _of_zip(archive: Blob) -> Iterator[tuple[str, Member]]:
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
            begin=entry.header_offset, size=entry.file_size, in_zip=True, deflated=deflated,
            packed_bytes=entry.compress_size,
        )  # fmt: skip
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
        f"the archive cannot be read: {what}", where=archive.name,
        hint="copy it again; `divergence pack RUN` makes one that can",
    )  # fmt: skip


def _link(archive: Blob, name: str) -> RunFormatError:
    return RunFormatError(
        f"{name[:80]!r} is a link, which a run may not contain", where=archive.name,
        hint="pack it with links resolved, for example: tar -h",
    )  # fmt: skip

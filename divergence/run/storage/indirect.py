"""Stores that are no directory: an archive's members, objects below a URL, an archive there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from divergence.errors import RunFormatError
from divergence.run.schema.layout import MANIFEST, SHARD_PATTERN, checked_name, is_records_name
from divergence.run.storage.archive import Member, archive_kind_of, members_of
from divergence.run.storage.blob import SPAN_BYTES, Blob, Bytes, LocalBlob, Store
from divergence.run.storage.location import Location, Url, archive_kind
from divergence.run.storage.ranges import Ranges
from divergence.run.storage.remote import Object, Remote
from divergence.run.storage.shard import HEADER_BYTES

__all__ = ["open_archive", "open_url"]


class _Archive(Store):
    """One file that holds the run's files."""

    def __init__(
        self, place: Location, archive: Blob, kind: str, *, ranges: Ranges | None = None,
        remote: Remote | None = None, found: Object | None = None,
    ) -> None:  # fmt: skip
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
                f"{name} is missing", where=str(self.place),
                hint="pack the whole run; a run is not complete without it",
            )  # fmt: skip
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
                f"{name} is missing", where=str(self.place),
                hint="copy the whole run; a run is not complete without it",
            )  # fmt: skip
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


def open_archive(place: Path) -> Store:
    """A tar or zip of this machine."""
    archive = LocalBlob(place)
    kind = archive_kind_of(archive)
    if kind is None:
        raise RunFormatError(
            f"{place} is not a directory, and no tar or zip archive either",
            hint="a run is what `divergence capture MODEL -o RUN` wrote",
        )
    return _Archive(place, archive, kind)


def open_url(place: Url) -> Store:
    """A folder of objects, or one that is an archive."""
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
    """Manifest, lines, and the beginning of each shard."""
    for name in (MANIFEST, *sorted(filter(is_records_name, sizes))):
        for begin in range(0, sizes.get(name, 0), SPAN_BYTES):
            if begin > _MOST_AHEAD_BYTES:
                break  # a hint; the size is what a server says
            yield name, begin, min(begin + SPAN_BYTES, sizes[name])
    for name in sorted(sizes):
        if re.match(SHARD_PATTERN, name):
            yield name, 0, min(HEADER_BYTES, sizes[name])

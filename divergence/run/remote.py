"""Object stores, through fsspec: whatever scheme it has a package for.

A request that breaks is tried again with growing pauses, and then ends in one error that names the
URL; a web server has limits of its own (web.py), so have the stores' packages. A refusal (no
credentials, no permission, no bucket) is not tried again.

Settings are those of the store's own package: environment variables (AWS_PROFILE,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN) and fsspec's configuration files.
"""

from __future__ import annotations

import contextlib
import functools
import html
import ipaddress
import mmap
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from divergence.errors import DivergenceError, RunError, RunFormatError, UsageError
from divergence.run.record import MANIFEST, SHARD_PATTERN, TENSORS, checked_name, is_records_name
from divergence.run.storage import (
    HEADER_BYTES,
    SPAN_BYTES,
    WITH_BUCKETS,
    Archive,
    Blob,
    Store,
    Url,
    archive_kind,
    archive_kind_of,
)

# A run below ``http://``: any machine may stand behind a URL, so what it may answer is bounded.
#
# What is asked for lies below the URL, by the names that files of a run have: of a server's pages
# of links only these count. A redirect is followed, but never into a network that is nearer to this
# machine than the URL's own host: neither to its loopback nor to the service of a cloud that gives
# away credentials. Addresses are checked where connections are made, so no name hides one.

SILENCE_S = 30
"""Without a byte, or a connection."""
REQUEST_S = 300
"""For one request, however steadily it trickles; at most 8 MiB are asked for at once."""
MAX_BODY_BYTES = 256 << 20
"""Of one answer: a server that knows no ranges sends all of a file each time, or never ends."""
MAX_PAGE_BYTES = 16 << 20
"""Of a page of links."""

_LINK = re.compile(rb"""href\s{0,9}=\s{0,9}["']([^"'<>\s]{1,2000})["']""", re.IGNORECASE)


def linked(page: bytes, url: str, base: str) -> set[str]:
    """The files of a run below ``base`` that the page at ``url`` links to, by name."""
    names = set()
    for link in _LINK.findall(page):
        try:
            target = urljoin(url, html.unescape(link.decode(errors="replace")))
        except ValueError:  # no address, as of brackets that do not close
            continue
        name = target.removeprefix(base)
        if name != target and (
            name == MANIFEST or is_records_name(name) or re.fullmatch(SHARD_PATTERN, name)
        ):
            names.add(name)
    return names


def web_options(url: str, *, refused: type[RunError]) -> dict[str, Any]:
    """Return the options of fsspec's http://. ``refused``: what is raised where a redirect leads to
    a place that it may not. ImportError where its package is not installed."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                most = MAX_PAGE_BYTES if self.content_type == "text/html" else MAX_BODY_BYTES
                parts, size = [], 0
                async for part in self.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        self.close()
                        raise ValueError(
                            f"the server answers with over {most >> 20} MiB to one request; it "
                            "must know ranges (HTTP 206)"
                        )
                self._body = b"".join(parts)
            return self._body

    nearest = 0
    with contextlib.suppress(OSError, UnicodeError):  # connecting says so
        places = socket.getaddrinfo(urlsplit(url).hostname, None)
        nearest = max((_nearness(str(place[4][0])) for place in places), default=0)

    def connecting(info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, address = info
        if _nearness(address[0]) > nearest:
            raise refused(
                f"the server sends on to {address[0]}, which is nearer to this machine than itself",
                where=url,
                hint="if that is meant: give the URL that it sends to",
            )
        return socket.socket(family, kind, protocol)

    async def client(**_: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=connecting),
            timeout=aiohttp.ClientTimeout(
                total=REQUEST_S, sock_connect=SILENCE_S, sock_read=SILENCE_S
            ),
            headers={"Accept-Encoding": "identity"},
            response_class=Bounded,
        )

    return {"get_client": client, "skip_instance_cache": True}


def _nearness(address: str) -> int:
    """0 the internet, 1 a private network, 2 this machine, 3 what is no host's (link-local)."""
    place = ipaddress.ip_address(address)
    place = getattr(place, "ipv4_mapped", None) or place
    if place.is_loopback:
        return 2
    if place.is_link_local or place.is_unspecified or place.is_multicast:
        return 3
    return 0 if place.is_global else 1


NUM_TRIES = 3
FIRST_PAUSE_S = 0.3
"""Then three times as long: 0.3, 0.9 s. Packages such as s3fs try each of these several times."""

_WEB = ("http", "https")
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "mtime", "created")
"""What packages call that which changes with an object's bytes, the surest first."""

MAX_LINKED = 10_000
"""Files of a run that a web server's pages may name: each is asked for its size."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """Holds what a store says of an object. ``version``: its etag or the like; changes with its
    bytes."""

    size: int
    version: str | None


class Remote:
    """The objects under one URL, by their names below it (``""`` is the object itself).

    ``refused``: the class of the errors that are raised: RunFormatError where runs are read,
    RunWriteError where they are written.
    """

    def __init__(self, url: Url, *, refused: type[RunError]) -> None:
        self.url = url
        self._refused = refused
        self._fs, self._root = _open(url, refused)

    def objects(self) -> dict[str, Object]:
        """All objects below the URL, or the one at it (name ``""``); empty where there is none."""
        if self.url.scheme in _WEB:
            return self._linked()

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            entries: dict[str, Any] = self._fs.find(self._root, detail=True)
            return entries

        try:
            entries = self._try(find, "listing")
        except FileNotFoundError:
            return {}
        root = self._root.rstrip("/")
        return {
            path[len(root) + 1 :]: _object(entry)
            for path, entry in entries.items()
            if entry.get("type") != "directory" and (path == root or path.startswith(root + "/"))
        }

    def _linked(self) -> dict[str, Object]:
        """List what a web server's pages link to, that of the run and that of its tensors."""
        base, names, objects = f"{self._root.rstrip('/')}/", set[str](), {}
        deadline = time.monotonic() + REQUEST_S
        for folder in ("", TENSORS):
            entry = self._info(folder)
            if entry is None or entry.get("mimetype") != "text/html":
                break
            path = self._path(folder)
            page = self._try(functools.partial(self._fs.cat_file, path), "listing", folder)
            names |= linked(page, f"{path.rstrip('/')}/", base)
        if len(names) > MAX_LINKED:
            raise self._refused(
                f"the server lists over {MAX_LINKED:,} files of a run",
                where=str(self.url),
                hint="pack the run: divergence pack",
            )
        for name in sorted(names) or [""]:
            if time.monotonic() > deadline:
                raise self._refused(
                    f"the server takes over {REQUEST_S} s to say how large its files are",
                    where=str(self.url),
                    hint="pack the run: divergence pack",
                )
            if (there := self.look(name)) is not None:
                objects[name] = there
        return objects

    def check_bucket(self) -> None:
        """Raises where the store has buckets and this one does not exist."""
        bucket = self._root.strip("/").partition("/")[0]
        if self.url.scheme in WITH_BUCKETS:
            try:
                self._try(lambda: self._fs.info(bucket), "looking at the bucket")
            except FileNotFoundError as error:
                raise self._refused(
                    f"there is no bucket {bucket!r}",
                    where=str(self.url),
                    hint="is its name right? divergence makes none",
                ) from error

    def look(self, name: str = "") -> Object | None:
        """Look at what is at ``name`` now; None where nothing is."""
        entry = self._info(name)
        return None if entry is None or entry.get("type") == "directory" else _object(entry)

    def _info(self, name: str) -> dict[str, Any] | None:
        """Ask the store's package about ``name``; None where nothing is."""

        def info() -> dict[str, Any]:
            self._fs.invalidate_cache()
            entry: dict[str, Any] = self._fs.info(self._path(name))
            return entry

        try:
            return self._try(info, "looking at", name)
        except FileNotFoundError:
            return None

    def fetch(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of an object, all of them."""

        def once() -> bytes:
            data: bytes = self._fs.cat_file(self._path(name), start=begin, end=end)
            if len(data) != end - begin:
                raise OSError(f"{len(data)} of {end - begin} bytes came")
            return data

        try:
            return self._try(once, "reading", name)
        except FileNotFoundError as error:
            raise self._refused(
                "the object is gone, or its store is",
                where=str(self._shown(name)),
                hint="was it removed while it was read?",
            ) from error

    def put(self, name: str, source: bytes | Path) -> None:
        """Store an object: whole, or not at all."""

        action = functools.partial(self._fs.pipe_file, self._path(name), source)
        if isinstance(source, Path):
            action = functools.partial(self._fs.put_file, str(source), self._path(name))
        try:
            self._try(action, "writing", name)
        except FileNotFoundError as error:
            raise self._refused(
                f"nothing can be stored there: {_text(error)}",
                where=str(self._shown(name)),
                hint="is the bucket's name right, and does it exist?",
            ) from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone already do not matter."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._try(functools.partial(self._fs.rm_file, self._path(name)), "removing", name)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _shown(self, name: str) -> Url:
        return self.url / name if name else self.url

    def _try(self, action: Callable[[], _T], doing: str, name: str = "") -> _T:
        """Return what ``action`` gives; FileNotFoundError as it is, all else as a refusal."""
        where, began = str(self._shown(name)), time.monotonic()
        for attempt in range(1, NUM_TRIES + 1):
            try:
                return action()
            except DivergenceError:
                raise
            # Each store's package has exceptions of its own, many of them no OSError.
            except Exception as failure:
                error = _meant(failure) if self.url.scheme in _WEB else failure
                if isinstance(error, FileNotFoundError | DivergenceError):
                    raise error from failure
                refusal = _known_refusal(error)
                if refusal is not None:
                    message, hint = refusal
                    raise self._refused(message, where=where, hint=hint) from error
                if attempt == NUM_TRIES or time.monotonic() - began > REQUEST_S:
                    times = f"{attempt} times, the last time" if attempt > 1 else "once"
                    raise self._refused(
                        f"{doing} failed {times} with: {_text(error)}",
                        where=where,
                        hint="is the store reachable from here? The same command can be run again",
                    ) from error
                time.sleep(FIRST_PAUSE_S * 3 ** (attempt - 1))
        raise AssertionError("unreachable")


def _open(url: Url, refused: type[RunError]) -> tuple[Any, str]:
    import fsspec

    try:
        # Listings are asked for when they are needed: another machine may have written meanwhile.
        options = web_options(str(url), refused=refused) if url.scheme in _WEB else {}
        system, path = fsspec.core.url_to_fs(str(url), use_listings_cache=False, **options)
        return system, path
    except ImportError as error:
        extra = "pip install 'divergence-debug[remote]'"
        raise UsageError(
            f"{url.scheme}:// needs a package that is not installed: {_text(error)}",
            where=str(url),
            hint=extra if url.scheme in WITH_BUCKETS else "install the package that is named",
        ) from error
    # a scheme that is unknown, or one that takes more than a URL: each package says it its own way
    except Exception as error:
        schemes = ", ".join(f"{scheme}://" for scheme in ("s3", "gs", "hf", "abfs", "https"))
        raise UsageError(
            f"{url} is no place that can be read: {_text(error)}",
            hint=f"a directory, a .tar or .zip, or a URL that fsspec knows ({schemes}, ...)",
        ) from error


def _object(entry: dict[str, Any]) -> Object:
    version = next((entry[key] for key in _VERSIONS if entry.get(key)), None)
    if isinstance(version, datetime):  # some calls of a package give seconds instead
        version = version.timestamp()
    size = int(entry.get("size") or 0)
    return Object(size=size, version=None if version is None else str(version))


def _known_refusal(error: Exception) -> tuple[str, str] | None:
    """(message, hint) for what no second try changes. Named by class: the packages are optional."""
    name = type(error).__name__
    if "Credential" in name or "TokenRetrieval" in name or "RefreshError" in name:
        return (
            f"there are no credentials for this store: {_text(error)}",
            "set those of its own tools (AWS_PROFILE or AWS_ACCESS_KEY_ID, "
            "GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN)",
        )
    if "Profile" in name or "Config" in name:
        return (
            f"the store's own settings cannot be used: {_text(error)}",
            "look at AWS_PROFILE and at the configuration files of the store's tools",
        )
    if "Redirect" in name:
        return (f"the server's redirects lead nowhere: {_text(error)}", "give the URL at their end")
    if isinstance(error, PermissionError):
        return (
            f"the store refuses: {_text(error)}",
            "the credentials in use may not do this; ask for the right to list, read and write",
        )
    if isinstance(error, NotImplementedError):
        return (f"this store cannot do that: {_text(error)}", "use a directory or s3://, gs://")
    if "ParamValidation" in name or isinstance(error, IsADirectoryError | ValueError):
        return (_text(error), "is the URL right? For example s3://bucket/runs/a")
    return None


def _meant(error: Exception) -> Exception:
    """The error behind fsspec's http://, which reports most as a missing file and keeps the reason
    as the cause: a response that is an error, or no response."""
    reason, cause = error, error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        reason = cause
    status = getattr(reason, "status", None)
    if status in (401, 403):
        return PermissionError(f"HTTP {status} {getattr(reason, 'message', '')}".strip())
    return error if status in (404, 410) else reason


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


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
        """Start to fetch a range; called with the lock held."""
        fetched = self._kept.pop(span, None)
        if fetched is None:
            _, begin, end = span
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="divergence-fetch")
            fetched = _Fetched(_room(end - begin))
            for first in range(begin, end, SPAN_BYTES):
                last = min(first + SPAN_BYTES, end)
                fetched.parts.append(self._pool.submit(self._fill, fetched.data, span, first, last))
        self._kept[span] = fetched
        while len(self._kept) > 1 and self.num_bytes > self._budget_bytes:
            del self._kept[next(iter(self._kept))]
        return fetched

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all that is kept."""
        return sum(end - begin for _, begin, end in self._kept)

    def _fill(self, data: bytearray | mmap.mmap, span: Range, begin: int, end: int) -> None:
        data[begin - span[1] : end - span[1]] = self._fetch(span[0], begin, end)


def _room(num_bytes: int) -> bytearray | mmap.mmap:
    """Make room for bytes of which only those that have come take memory: a server says how many
    there are."""
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


# Stores far away: objects below a URL, or an archive there.


class Objects(Store):
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

    def view(self, begin: int, num_bytes: int) -> memoryview:
        end = min(begin + num_bytes, self.size)
        return self._ranges.get(self._key, self._offset + begin, self._offset + end)

    def part(self, begin: int, num_bytes: int, name: str) -> _RemoteBlob:
        return _RemoteBlob(
            self._ranges, self._key, size=num_bytes, shown=name, offset=self._offset + begin
        )


class FarArchive(Archive):
    """An archive there: its members are ranges of the object."""

    far = True

    def __init__(self, place: Url, remote: Remote, there: Object) -> None:
        self._remote, self._there = remote, there
        self._ranges = Ranges(remote.fetch)
        # where a tar begins and a zip has its directory
        size = there.size
        ends = [("", 0, min(HEADER_BYTES, size)), ("", max(0, size - HEADER_BYTES), size)]
        self._ranges.expect(ends)
        archive = _RemoteBlob(self._ranges, "", size=size, shown=str(place))
        kind = archive_kind_of(archive)
        if kind is None:
            raise RunFormatError(f"{place} is neither a tar nor a zip archive")
        super().__init__(place, archive, kind)

    def has_changed(self, name: str) -> bool:
        return self._remote.look() != self._there

    def expect(self, stretches: Iterable[tuple[str, int, int]]) -> None:
        wanted = []
        for name, begin, end in stretches:
            member = self.members.get(name)
            if member is not None:  # of a zip member the header lies before, some 100 bytes
                if member.deflated:  # from end to end
                    begin, end = 0, member.packed_bytes
                first = member.begin + begin
                wanted.append(("", first, min(member.begin + end + 1024, self.archive.size)))
        self._ranges.expect(wanted)

    def close(self) -> None:
        super().close()
        self._ranges.close()


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
            folder = Objects(place, remote, objects)
            folder.expect(_needed_to_open({name: there.size for name, there in objects.items()}))
            return folder
    archived = objects[""] if objects else remote.look()
    if archived is None:
        raise RunFormatError(f"there is nothing at {place}", hint="is the URL right?")
    if not archived.size:
        raise RunFormatError(f"{place} is empty", hint="copy it again")
    store = FarArchive(place, remote, archived)
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

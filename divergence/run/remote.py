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
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from divergence.errors import DivergenceError, RunError, UsageError
from divergence.run.location import WITH_BUCKETS, Url
from divergence.run.record import MANIFEST, SHARD_PATTERN, TENSORS, is_records_name

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
    """What fsspec's http:// is told. ``refused``: what is raised where a redirect leads to a place
    that it may not. ImportError where its package is not installed."""
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
    """What a store says of an object. ``version``: its etag or the like; changes with its bytes."""

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
        """What a web server's pages link to, that of the run and that of its tensors."""
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
        """What is at ``name`` now; None where nothing is."""
        entry = self._info(name)
        return None if entry is None or entry.get("type") == "directory" else _object(entry)

    def _info(self, name: str) -> dict[str, Any] | None:
        """As the store's package tells it; None where nothing is."""

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
                raise _Short(f"{len(data)} of {end - begin} bytes came")
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
        """What ``action`` gives; FileNotFoundError as it is, all else as a refusal."""
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


class _Short(OSError):
    """Fewer bytes than were asked for."""


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

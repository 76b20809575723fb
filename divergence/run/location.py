"""Names of places where runs are: a path of this machine, or a URL of an object store.

A place prints as it was given and parses back from what it prints, so that a command shown to
the user works when it is pasted. ``file://`` is a path. Chained URLs (``zip://...::s3://...``)
are not taken: archives are opened here, by their contents.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from divergence.errors import UsageError
from divergence.run.record import expanded

ARCHIVES = (".tar", ".zip")
"""What a name ends in that is written as one file."""
_COMPRESSED = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
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
    if suffix in _COMPRESSED:
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

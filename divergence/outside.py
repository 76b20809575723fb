"""What came from elsewhere: every name, size and count of it passes through here.

A run, a dump, a log or a server's answer may be made to harm whoever reads it. Six things are
asked of it, each by one function, so that no reader has an answer of its own:

``inside``       a name may lead to a regular file below its folder and nowhere else
``opened``       what is read is a regular file: a pipe that nobody fills is not waited for
``json_value``   a document may be no deeper and hold no more values than memory bears
``check_value``  the same of what another reader made (YAML, ``.pt``), where parts may be shared
``Budget``       what is unpacked or spread out may be so much larger than what lies on disk
``read_as``      whatever else its form breaks is an error that names the file, never a crash

The limits are stated in docs/security.md. They bound memory and time; they say nothing about
whether what a file says is true.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from divergence.errors import DivergenceError, DumpError, first_line

__all__ = [
    "FREE_BYTES", "MAX_DEPTH", "MAX_LINE_BYTES", "MAX_RATIO", "MAX_TEXT_BYTES", "MAX_VALUES",
    "Budget", "check_value", "disk_bytes", "inside", "is_plain", "json_value", "lines", "opened",
    "read_as", "read_bytes",
]  # fmt: skip

MAX_TEXT_BYTES = 1 << 30
"""Of a file that is read as a whole: JSON, CSV, prompts."""
MAX_LINE_BYTES = 1 << 28
"""Of one line of a file that is read line by line."""
MAX_VALUES = 10_000_000
"""Values of one document: as Python's objects some 100 bytes each, so about 1 GiB."""
MAX_DEPTH = 100
"""Lists and tables within each other; logs of chats with tools have some 20."""
FREE_BYTES, MAX_RATIO = 1 << 30, 200
"""All that one folder or archive unpacks or spreads out to may take so many bytes, or so many
times what lies on disk. Text packs 5 to 20 times, repeated prompts more; deflate can reach 1,032,
zstandard and views of one number have no bound."""

Failure = type[DivergenceError]

_FORM_BROKEN = (
    ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, SyntaxError,
    TypeError, ValueError, struct.error, zlib.error,
)  # fmt: skip
"""What readers raise at bytes that nobody's writer makes. RuntimeError has RecursionError and
NotImplementedError below it. No MemoryError: what would take too much is refused before."""


# -- names ---------------------------------------------------------------------------------------


def is_plain(name: str) -> bool:
    """Is it a relative path of plain names, with slashes, that stays below where it begins?"""
    parts = name.split("/")
    return not ({"", ".", ".."} & {*parts} or re.search(r"[\\\0]", name) or Path(name).drive)


def inside(root: Path, name: str, *, error: Failure = DumpError, hint: str | None = None) -> Path:
    """``root/name``, a regular file that is reached through no link. Raises ``error``."""
    if not is_plain(name):
        raise error(f"{name[:80]!r} is a name that leads out of its folder", where=str(root))
    path, mode = root, 0
    for part in name.split("/"):
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError) as failure:
            raise error(f"{name} is missing", where=str(root), hint=hint) from failure
        except OSError as failure:
            raise error(f"{name} cannot be read: {failure.strerror}", where=str(root)) from failure
        if stat.S_ISLNK(mode):
            raise error(
                f"{name} is a symbolic link, which may not stand there", where=str(path),
                hint="copy it with links resolved, for example: cp -rL",
            )  # fmt: skip
    if not stat.S_ISREG(mode):
        raise error(f"{name} is {_kind(mode)}, not a regular file", where=str(path))
    return path


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something else")


# -- files ---------------------------------------------------------------------------------------


def opened(
    path: str | os.PathLike[str], *, error: Failure = DumpError, hint: str | None = None
) -> BinaryIO:
    """A regular file, opened for reading: a pipe or a device is refused, never waited for. A link
    is followed: the path is the user's. Raises ``error``."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as failure:  # ValueError: a name with NUL
        what = getattr(failure, "strerror", None) or first_line(failure)
        raise error(f"cannot be read: {what}", where=os.fspath(path), hint=hint) from failure
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        raise error(
            f"this is {_kind(mode)}, not a regular file", where=os.fspath(path),
            hint=hint or "write what it gives to a file, and name that",
        )  # fmt: skip
    return open(number, "rb")


def disk_bytes(path: str | os.PathLike[str]) -> int:
    """What a file takes on disk: less than its size where it has holes. Raises OSError."""
    status = os.stat(path)
    return min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512)


def read_bytes(
    path: str | os.PathLike[str], *, most: int = MAX_TEXT_BYTES, error: Failure = DumpError,
    hint: str | None = None,
) -> bytes:  # fmt: skip
    """A whole regular file of at most so many bytes. Raises ``error``."""
    with opened(path, error=error, hint=hint) as file:
        if os.fstat(file.fileno()).st_size <= most:
            try:
                data = file.read(most + 1)
            except OSError as failure:
                raise error(f"cannot be read: {failure.strerror}", where=os.fspath(path),
                            hint=hint) from failure  # fmt: skip
            if len(data) <= most:  # it may grow meanwhile
                return data
    raise error(f"the file has over {most:,} bytes, more than is read as a whole",
                where=os.fspath(path))  # fmt: skip


def lines(
    path: str | os.PathLike[str], *, most: int = MAX_LINE_BYTES, error: Failure = DumpError,
    hint: str | None = None,
) -> Iterator[bytes]:  # fmt: skip
    """The lines of a regular file, with their ends; none longer than ``most``. Raises ``error``."""
    with opened(path, error=error, hint=hint) as file:
        while line := file.readline(most + 1):
            if len(line) > most:
                raise error(f"a line is longer than {most:,} bytes", where=os.fspath(path))
            yield line


# -- documents -----------------------------------------------------------------------------------


def json_value(data: bytes, *, where: str, error: Failure = DumpError,
               hint: str | None = None) -> Any:  # fmt: skip
    """JSON as Python writes it (NaN included), bounded before anything is made of it. Raises
    ``error``."""
    # each value but the first begins behind one of these, so there are no more than that
    opening = data.count(b"[") + data.count(b"{")
    if opening + data.count(b",") > MAX_VALUES:
        bare = _STRING.sub(b"", data)
        if sum(map(bare.count, (b"[", b"{", b","))) >= MAX_VALUES:
            raise error(f"it holds more than {MAX_VALUES:,} values", where=where)
        del bare
    if opening > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise error(f"it is nested more than {MAX_DEPTH} deep", where=where)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as failure:
        raise error(f"it is no JSON, or was cut off: {first_line(failure)}", where=where,
                    hint=hint) from failure  # fmt: skip


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(data: bytes) -> int:
    """Of a JSON text, by its brackets outside strings."""
    import numpy as np

    marks = np.frombuffer(_STRING.sub(b"", data).translate(None, _OTHERS), np.uint8)
    steps = np.isin(marks, list(b"[{")).astype(np.int8) * 2 - 1
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def check_value(value: Any, *, where: str, error: Failure = DumpError) -> None:
    """Refuses lists and tables that hold themselves, are nested too deep, or would be too many if
    parts that stand in several places were written out: whoever goes through them meets each part
    as often as it stands there. Raises ``error``."""
    sizes: dict[int, int] = {}
    """By object: values in it, written out."""
    open_: set[int] = set()
    stack: list[tuple[Any, bool]] = [(value, False)]
    while stack:
        part, is_done = stack.pop()
        inner = _inner(part)
        if inner is None or (id(part) in sizes and not is_done):
            continue
        if is_done:
            open_.discard(id(part))
            sizes[id(part)] = 1 + len(inner) + sum(sizes.get(id(item), 0) for item in inner)
            if sizes[id(part)] > MAX_VALUES:
                raise error(f"it holds more than {MAX_VALUES:,} values", where=where)
            continue
        if id(part) in open_:
            raise error("a list or table in it holds itself", where=where)
        open_.add(id(part))
        if len(open_) > MAX_DEPTH:
            raise error(f"it is nested more than {MAX_DEPTH} deep", where=where)
        stack.append((part, True))
        stack += [(item, False) for item in inner]


def _inner(value: Any) -> list[Any] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else None


class Budget:
    """What all files of one folder or archive may unpack or spread out to, together. Files are
    counted once, however often they are read."""

    def __init__(self, *, error: Failure = DumpError) -> None:
        self._error = error
        self._spread: dict[str, tuple[int, int]] = {}

    def expand(self, num_bytes: int, *, disk: int, where: str) -> None:
        """``where``, of ``disk`` bytes as it lies, becomes ``num_bytes``. Raises ``error``."""
        self._spread[where] = num_bytes, disk
        total = sum(spread for spread, _ in self._spread.values())
        held = sum(disk for _, disk in self._spread.values())
        most = max(FREE_BYTES, MAX_RATIO * held)
        if total > most:
            raise self._error(
                f"{held:,} bytes would become {total:,}, more than is unpacked ({most:,})",
                where=where,
            )


@contextlib.contextmanager
def read_as(
    form: str, *, where: str, error: Failure = DumpError, hint: str | None = None
) -> Iterator[None]:
    """Whatever a reader raises inside becomes ``error``: the file is not as ``form`` writes it."""
    try:
        yield
    except DivergenceError:
        raise
    except _FORM_BROKEN as failure:
        name = type(failure).__name__
        raise error(
            f"it is not as {form} writes it: {name}: {first_line(failure)}", where=where, hint=hint
        ) from failure

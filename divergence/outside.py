"""Files from elsewhere: every name, size and count of them passes through here.

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
import csv
import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from divergence.errors import DivergenceError, DumpError, first_line

MAX_TEXT_BYTES = 1 << 30
"""Of a file that is read as a whole: JSON, CSV, prompts."""
MAX_LINE_BYTES = 1 << 28
"""Of one line of a file that is read line by line."""
MAX_ROW_BYTES = 1 << 24
"""Of one row of a table, which may go over several lines."""
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
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What readers raise at bytes that nobody's writer makes. RuntimeError has RecursionError and
NotImplementedError below it. No MemoryError: what would take too much is refused before."""


# -- names ---------------------------------------------------------------------------------------


def is_plain(name: str) -> bool:
    """Is it a relative path of plain names, with slashes, that stays below where it begins?"""
    parts = name.split("/")
    return not ({"", ".", ".."} & {*parts} or re.search(r"[\\\0]", name) or Path(name).drive)


def inside(root: Path, name: str, *, error: Failure = DumpError, hint: str | None = None) -> Path:
    """Returns ``root/name`` if it is a regular file that is reached through no link. Raises
    ``error``."""
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
                f"{name} is a symbolic link, which may not stand there",
                where=str(path),
                hint="copy it with links resolved, for example: cp -rL",
            )
    if not stat.S_ISREG(mode):
        raise error(f"{name} is {_kind(mode)}, not a regular file", where=str(path))
    return path


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


# -- files ---------------------------------------------------------------------------------------


def opened(
    path: str | os.PathLike[str], *, error: Failure = DumpError, hint: str | None = None
) -> BinaryIO:
    """Opens a regular file for reading. A pipe or a device is refused, never waited for; a link is
    followed, since the path is the user's. Raises ``error``."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as failure:  # ValueError: a name with NUL
        what = getattr(failure, "strerror", None) or first_line(failure)
        raise error(f"cannot be read: {what}", where=os.fspath(path), hint=hint) from failure
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        raise error(
            f"this is {_kind(mode)}, not a regular file",
            where=os.fspath(path),
            hint=hint or "write what it gives to a file, and name that",
        )
    return open(number, "rb")


def disk_bytes(path: str | os.PathLike[str]) -> int:
    """Returns the bytes that a file takes on disk: fewer than its size where it has holes. Raises
    OSError."""
    status = os.stat(path)
    return min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512)


def read_bytes(
    path: str | os.PathLike[str],
    *,
    most: int = MAX_TEXT_BYTES,
    error: Failure = DumpError,
    hint: str | None = None,
) -> bytes:
    """Reads a whole regular file of at most ``most`` bytes. Raises ``error``."""
    with opened(path, error=error, hint=hint) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            try:
                data = file.read(size + 1)  # all that may be asked for would take memory at once
            except OSError as failure:
                raise error(
                    f"cannot be read: {failure.strerror}", where=os.fspath(path), hint=hint
                ) from failure
            if len(data) <= size:  # it may grow meanwhile
                return data
    raise error(
        f"the file has over {most:,} bytes, more than is read as a whole", where=os.fspath(path)
    )


def lines(
    path: str | os.PathLike[str],
    *,
    most: int = MAX_LINE_BYTES,
    error: Failure = DumpError,
    hint: str | None = None,
) -> Iterator[bytes]:
    """Yields the lines of a regular file, with their ends; none may be longer than ``most`` bytes.
    Raises ``error``."""
    with opened(path, error=error, hint=hint) as file:
        while line := file.readline(most + 1):
            if len(line) > most:
                raise error(f"a line is longer than {most:,} bytes", where=os.fspath(path))
            yield line


# -- documents -----------------------------------------------------------------------------------


def json_value(
    data: bytes, *, where: str, error: Failure = DumpError, hint: str | None = None
) -> Any:
    """Decodes JSON as Python writes it (NaN included). The number of values and the depth are
    checked before any object is made. Raises ``error``."""
    try:
        if 0 in data[:4] or data[:1] > b"~":  # brackets are counted as bytes
            data = data.decode(json.detect_encoding(data)).encode()
        if len(data) > MAX_VALUES or data.count(b"[") + data.count(b"{") > MAX_DEPTH:
            num_values, depth = _structure(data)
            if num_values > MAX_VALUES:
                raise error(f"it holds more than {MAX_VALUES:,} values", where=where)
            if depth > MAX_DEPTH:
                raise error(f"it is nested more than {MAX_DEPTH} deep", where=where)
        with contextlib.suppress(ValueError, RecursionError):
            return msgspec.json.decode(data)  # thrice as fast; knows no NaN, no half of a pair
        return json.loads(data.decode())  # of bytes the encoding would be guessed again
    except (ValueError, RecursionError) as failure:
        raise error(
            f"it is no JSON, or was cut off: {first_line(failure)}", where=where, hint=hint
        ) from failure


_PIECE_BYTES = 1 << 20


def _structure(data: bytes) -> tuple[int, int]:
    """(values, how deep) of a JSON text by its brackets and commas outside strings. It is gone
    through piece by piece: a text of brackets alone would take many times its size."""
    import numpy as np

    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that quotes are those of strings
    num_values, depth, level, num_quotes = 1, 0, 0, 0
    for begin in range(0, len(data), _PIECE_BYTES):
        piece = np.frombuffer(data[begin : begin + _PIECE_BYTES], np.uint8)
        quotes = num_quotes + np.cumsum(piece == ord('"'))
        num_quotes = int(quotes[-1])
        marks = piece[quotes % 2 == 0]
        begins, ends = np.isin(marks, list(b"[{")), np.isin(marks, list(b"]}"))
        levels = level + np.cumsum(begins.astype(np.int64) - ends)
        num_values += int(begins.sum() + (marks == ord(",")).sum())
        depth = max(depth, int(levels.max(initial=0)))
        level = int(levels[-1]) if len(levels) else level
    return num_values, depth


def check_value(
    value: Any, *, where: str, error: Failure = DumpError, most: int = MAX_VALUES
) -> None:
    """Refuses lists and tables that hold themselves, are nested too deep, or would be too many if
    parts that stand in several places were written out: whoever goes through them meets each part
    as often as it stands there. A text counts once more for each 100 letters. Raises ``error``."""
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
            sizes[id(part)] = (
                1
                + len(inner)
                + sum(
                    len(item) // 100 if isinstance(item, str | bytes) else sizes.get(id(item), 0)
                    for item in inner
                )
            )
            if sizes[id(part)] > most:
                raise error(f"it holds more than {most:,} values", where=where)
            continue
        if id(part) in open_:
            raise error("a list or table in it holds itself", where=where)
        open_.add(id(part))
        if len(open_) > MAX_DEPTH:
            raise error(f"it is nested more than {MAX_DEPTH} deep", where=where)
        stack.append((part, True))
        stack += [(item, False) for item in inner]


def _inner(value: Any) -> list[Any] | None:
    """Return what a container holds; None for what is none."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else None


def csv_rows(
    lines: Iterable[bytes],
    *,
    delimiter: str = ",",
    where: str,
    whole: bool = True,
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by the first row's names) of each row that is not empty. A row may go over
    several lines, and is bounded as a whole. ``whole``: it must be UTF-8, with as many cells as
    the first one. Raises DumpError."""
    num_bytes = 0

    def text() -> Iterator[str]:
        nonlocal num_bytes
        for number, line in enumerate(lines):
            num_bytes += len(line)
            if num_bytes > MAX_ROW_BYTES:
                raise DumpError(f"a row is longer than {MAX_ROW_BYTES:,} bytes", where=where)
            yield line.decode("utf-8" if number else "utf-8-sig", "strict" if whole else "replace")

    reader = csv.reader(text(), delimiter=delimiter)
    try:
        names = next(reader, [])
        for cells in reader:
            num_bytes = 0
            if whole and cells and len(cells) != len(names):
                raise DumpError(
                    "the row has not as many cells as the first one",
                    where=f"{where}, line {reader.line_num}",
                    hint="it may be half written",
                )
            if cells:
                yield reader.line_num, dict(zip(names, cells, strict=False))
    except (csv.Error, UnicodeDecodeError) as failure:
        raise DumpError(
            f"the file is no table: {first_line(failure)}", where=f"{where}, line {reader.line_num}"
        ) from failure


class Budget:
    """Bounds what all files of one folder or archive may unpack or spread out to, together. Files
    are counted once, however often they are read."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        self._total = self._disk = 0

    def expand(self, num_bytes: int, *, disk: int, where: str) -> None:
        """``where``, of ``disk`` bytes as it lies, becomes ``num_bytes``. Raises DumpError."""
        earlier = self._sizes.get(where, (0, 0))
        self._sizes[where] = num_bytes, disk
        self._total += num_bytes - earlier[0]
        self._disk += disk - earlier[1]
        most = max(FREE_BYTES, MAX_RATIO * self._disk)
        if self._total > most:
            raise DumpError(
                f"{self._disk:,} bytes would become {self._total:,}, more than is unpacked "
                f"({most:,})",
                where=where,
            )


@contextlib.contextmanager
def read_as(
    form: str,
    *,
    where: str | Callable[[], str],
    error: Failure = DumpError,
    hint: str | None = None,
) -> Iterator[None]:
    """Whatever a reader raises inside becomes ``error``: the file is not as ``form`` writes it. An
    error that names no place gets this one.
    ``where``: may be asked for when that happens, since a reader may open many files."""
    try:
        yield
    except DivergenceError as failure:
        if failure.where is None:
            failure.where = where if isinstance(where, str) else where()
        raise
    except _FORM_BROKEN as failure:
        name = type(failure).__name__
        raise error(
            f"it is not as {form} writes it: {name}: {first_line(failure)}",
            where=where if isinstance(where, str) else where(),
            hint=hint,
        ) from failure

"""Files that the user named as outputs: whole or not at all, and never in the place of something
else.

A regular file is replaced by a finished one, so that a reader never meets half of it; a link is
followed, since it says where the file is to lie. What is no regular file (``/dev/null``, a pipe)
stays what it is and is written to, as is what this process's own output goes to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from divergence.errors import DivergenceError, UsageError

_NO_RENAME = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EROFS)
"""A folder that may not be written to, or a file that is a mount point: the file itself may be."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_Path = str | os.PathLike[str]


def write_output(
    content: bytes | str,
    path: _Path,
    *,
    what: str,
    error: type[DivergenceError] = UsageError,
    make_folder: bool = False,
) -> Path:
    """Writes ``content`` to ``path``. ``what``: what to call it where it cannot be written, as in
    ``cannot write the page``. Text becomes UTF-8. Raises ``error``."""
    with _failures(path, what, error):
        data = _encoded(content)
        if make_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        target, status = _looked_up(path)
        stream = _stream_to(status)
        if stream is not None:
            _write(stream, data)
        elif target is None:
            _write_in_place(path, data)
        else:
            _replace(target, data, status)
    return Path(path)


def append_output(text: str, path: _Path, *, what: str) -> None:
    """Adds ``text`` to a file that others write to as well. Raises UsageError."""
    with _failures(path, what, UsageError), open(path, "ab", buffering=0) as file:
        _write(file.fileno(), _encoded(text))


def output_folder(path: _Path, *, what: str = "folder of the runs") -> Path:
    """The folder ``path``, made where there is none. Raises UsageError."""
    with _failures(path, what, UsageError):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_output(
    path: _Path | None,
    *,
    what: str,
    error: type[DivergenceError] = UsageError,
    make_folder: bool = False,
) -> None:
    """Refuses before the work what could not be written behind it: no such folder, a folder of this
    name, a place that is not to be written to. None is no output. Raises ``error``."""
    if path is None:
        return
    with _failures(path, what, error):
        target, status = _looked_up(path)
        if status is not None and os.access(path, os.W_OK):
            return
        folder = None if target is None else target.parent
        if make_folder and folder is not None and not folder.exists():
            return
        if folder is not None and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"there is no folder {Path(path).parent}")
        if folder is None or not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _failures(path: _Path, what: str, error: type[DivergenceError]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as failure:  # ValueError: a name with NUL
        number = getattr(failure, "errno", None)
        why = getattr(failure, "strerror", None) or failure
        hint = "give another place, in a folder that exists and can be written"
        if number in _FULL:
            hint = "free some space, or give a place on another disk"
        raise error(f"cannot write the {what}: {why}", where=str(path), hint=hint) from failure


def _looked_up(path: _Path) -> tuple[Path | None, os.stat_result | None]:
    """(the regular file that is to be written, or None where something else stands there; what
    stands there). A pipe of the shell (/dev/fd/63) has no path but the one given."""
    target = Path(os.path.realpath(path))
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return target, None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    return target if stat.S_ISREG(status.st_mode) and target.exists() else None, status


def _stream_to(status: os.stat_result | None) -> int | None:
    """stdout or stderr, where it goes to this file: a finished one in its place would take what
    is still to be printed out of sight."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            if status is not None and os.path.samestat(status, os.fstat(number)):
                if stream is not None:
                    stream.flush()
                return number
    return None


def _replace(target: Path, data: bytes, status: os.stat_result | None) -> None:
    temporary = target.with_name(f".{target.name[:40]}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            if status is not None:
                with contextlib.suppress(AttributeError, OSError):  # another's stays theirs
                    os.chown(temporary, status.st_uid, status.st_gid)
                os.chmod(temporary, stat.S_IMODE(status.st_mode))
            _write(file.fileno(), data)
        os.replace(temporary, target)
    except OSError as failure:
        if status is None or failure.errno not in _NO_RENAME:
            raise
        _write_in_place(target, data)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write_in_place(path: _Path, data: bytes) -> None:
    """Write into what is there. A new file is never made: only what was looked at is written to."""
    with open(os.open(path, os.O_WRONLY), "wb", buffering=0) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(0)
        _write(file.fileno(), data)


def _write(number: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(number, rest) :]


def _encoded(content: bytes | str) -> bytes:
    return content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content

"""Files that the user named as outputs: whole or not at all, and never in the place of something
else.

A regular file is replaced by a finished one, so that a reader never meets half of it; a link is
followed, since it says where the file is to lie. What is no regular file (``/dev/null``, a pipe)
stays what it is and is written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from divergence.errors import DivergenceError, UsageError

__all__ = ["append_output", "write_output"]

_HINT = "give a file in a folder that exists and can be written"
_NO_RENAME = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EROFS)
"""A folder that may not be written to, or a file that is a mount point: the file itself may be."""


def write_output(
    content: bytes | str, path: str | os.PathLike[str], *, what: str,
    error: type[DivergenceError] = UsageError,
) -> Path:  # fmt: skip
    """Writes ``content`` to ``path``. ``what``: what to call it where it cannot be written, as in
    ``cannot write the page``. Text becomes UTF-8. Raises ``error``."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if mode is not None and not stat.S_ISREG(mode):
            _write_in_place(target, data)
        else:
            _replace(target, data, mode)
    except (OSError, ValueError) as failure:  # ValueError: a name with NUL
        why = getattr(failure, "strerror", None) or failure
        raise error(f"cannot write the {what}: {why}", where=str(path), hint=_HINT) from failure
    return Path(path)


def append_output(
    text: str, path: str | os.PathLike[str], *, what: str,
    error: type[DivergenceError] = UsageError,
) -> None:  # fmt: skip
    """Adds ``text`` to a file that others write to as well. Raises ``error``."""
    try:
        with open(path, "ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except (OSError, ValueError) as failure:
        why = getattr(failure, "strerror", None) or failure
        raise error(f"cannot write the {what}: {why}", where=str(path), hint=_HINT) from failure


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
    except OSError as failure:
        if mode is None or failure.errno not in _NO_RENAME:
            raise
        return _write_in_place(target, data)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
        try:
            os.replace(name, target)
        except OSError as failure:
            if mode is None or failure.errno not in _NO_RENAME:
                raise
            _write_in_place(target, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _write_in_place(target: Path, data: bytes) -> None:
    """Into what is there. A new file is never made: only what was looked at is written to."""
    flags = os.O_WRONLY | (os.O_TRUNC if target.is_file() else 0)
    with open(os.open(target, flags), "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

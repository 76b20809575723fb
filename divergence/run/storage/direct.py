"""Writing large files past the system's cache (O_DIRECT).

A capture writes more than anybody reads back at once. Through the cache each byte takes a fresh
page, which costs the processor several times the copy, evicts what other programs read, and on
two cores is time the model does not have; the device fetches these bytes from memory itself. The
device wants whole, aligned blocks, so bytes pass through one small aligned buffer, which stays in
the processor's cache. What does not know the flag (tmpfs of older kernels, some network file
systems), and a device too slow to keep up with, is written through the cache as ever.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["DIRECT_BYTES", "DirectFiles"]

DIRECT_BYTES = 8 << 20
"""Smaller files go through the cache: they are read back soon, and cost little."""
_STAGING_BYTES = 1 << 20
_BLOCK_BYTES = 4096  # of every device in use; the last block of a file is cut to length
_SLOW = 200e6
"""Bytes a second below which the system's cache is the better place to wait in."""
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class DirectFiles:
    """Writes files of one directory. ``usable`` turns False where that is refused, or slow."""

    def __init__(self) -> None:
        self.usable = hasattr(os, "O_DIRECT")
        self._staging: mmap.mmap | None = None

    def write(self, path: Path, parts: Sequence[memoryview]) -> bool:
        """The parts one after another; False (and nothing of use at ``path``) where this file
        system refuses. Raises OSError for anything else, a full disk above all."""
        if not self.usable:
            return False
        num_bytes = sum(part.nbytes for part in parts)
        started = time.monotonic()
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
            try:
                self._write(file, parts)
                os.ftruncate(file, num_bytes)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.usable = False
            return False
        if num_bytes < _SLOW * (time.monotonic() - started):
            self.usable = False  # from the next one on
        return True

    def _write(self, file: int, parts: Sequence[memoryview]) -> None:
        if self._staging is None:
            self._staging = mmap.mmap(-1, _STAGING_BYTES)  # aligned to a page
        staging = memoryview(self._staging)
        filled = 0
        for part in parts:
            part = part.cast("B")
            while part.nbytes:
                taken = min(part.nbytes, _STAGING_BYTES - filled)
                staging[filled : filled + taken] = part[:taken]
                part, filled = part[taken:], filled + taken
                if filled == _STAGING_BYTES:
                    _write_whole(file, staging)
                    filled = 0
        if filled:
            whole = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
            staging[filled:whole] = bytes(whole - filled)
            _write_whole(file, staging[:whole])


def _write_whole(file: int, block: memoryview) -> None:
    while block.nbytes:
        written = os.write(file, block)
        if written % _BLOCK_BYTES:  # what is left could not be written in whole blocks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        block = block[written:]

"""Process tuning: every place where divergence changes how its own process runs, for speed alone.

A capture shares its process with the model that it measures. What is done here makes the two share
it better: Python's thread switches and garbage collector, OpenMP's threads, the kernel's pages and
its file cache. None of it touches a value, so a run has the same bits without it.

``DIVERGENCE_PROCESS_TUNING=0`` switches all of it off. Use it to find out whether the tuning takes
part in what you see: a race that goes away, a crash below Python, a file system that misbehaves.
A capture may be slower then, and memory is given back later.

Not here: determinism switches and the seed, which change results and are recorded in the run, and
page-locked memory, which asynchronous copies from a device require.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from divergence.errors import ConfigError

VARIABLE = "DIVERGENCE_PROCESS_TUNING"


def enabled() -> bool:
    """Is the process tuned? Yes, unless the environment says ``DIVERGENCE_PROCESS_TUNING=0``.

    Raises ConfigError where the variable is neither true nor false.
    """
    text = os.environ.get(VARIABLE, "")
    if text.lower() in ("", "1", "true"):
        return True
    if text.lower() in ("0", "false"):
        return False
    raise ConfigError(f"{text!r} is neither true nor false", where=VARIABLE, hint="write 0 or 1")


# --- Python's threads ---------------------------------------------------------------------------

_SWITCH_S = 0.0003
"""The time of some operators of a decode step. Python's default is 5 ms; a step has a few of it."""


@contextlib.contextmanager
def quick_thread_switches() -> Iterator[None]:
    """Lets a waiting thread ask for Python's lock after 0.3 ms (``sys.setswitchinterval``).

    Why: an operator that returns while the writer's thread holds the lock would else wait for it
    longer than it ran. Off: Python's default of 5 ms stays.
    """
    if not enabled():
        yield
        return
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


_holding_memmove = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


def short_copy() -> Callable[[int, int, int], object]:
    """A ``memmove`` (destination, source, bytes) for short copies, which holds Python's lock.

    Why: ``ctypes.memmove`` gives the lock up. For a few KB, getting it back costs more than the
    copy. Off: ``ctypes.memmove`` itself.
    """
    return _holding_memmove if enabled() else ctypes.memmove


# --- Python's garbage collector -----------------------------------------------------------------

_RARELY_OBJECTS = 100_000
"""New objects until the garbage collector runs; Python's default is some hundreds."""
_lock = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []
"""The thresholds to restore, once for each block that is entered."""


@contextlib.contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Raises the garbage collector's threshold to 100,000 objects (``gc.set_threshold``).

    A block, or a decorator. Where several overlap, in whatever threads, the last one restores.
    Why: a large run has many records, and a pass makes many that wait for the writer; they form no
    cycles, and the collector would walk through them, and the model, over and over. Off: Python's
    own threshold stays.
    """
    if not enabled():
        yield
        return
    with _lock:
        before = gc.get_threshold()
        _thresholds.append(_thresholds[0] if _thresholds else before)
        if 0 < before[0] < _RARELY_OBJECTS:  # 0: it is switched off
            gc.set_threshold(_RARELY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        with _lock:
            before = _thresholds.pop()
            if not _thresholds:
                gc.set_threshold(*before)


# --- OpenMP -------------------------------------------------------------------------------------


def disable_openmp() -> None:
    """torch's operators on the calling thread use that thread alone; other threads are unchanged.

    Why: OpenMP gives each thread that runs a parallel operator its own team. Two teams on the same
    cores cost the model more than the work itself: a thread that waits for a core holds up its
    team, and with more threads than cores GNU's runtime puts the team to sleep between operators.
    Without a team, a capture of sketches on two cores took 1.24 instead of 1.34 times the bare
    model's time. (``torch.set_num_threads`` would also tell MKL, which has one number for all
    threads.)

    Off, or where the process has no OpenMP to call, nothing is done.
    """
    if not enabled():
        return
    import torch

    torch.get_num_threads()  # first: torch sets a new thread's number when it is first needed
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


# --- Pages of memory ----------------------------------------------------------------------------


def request_huge_pages(memory: mmap.mmap) -> None:
    """Asks for pages of 2 MiB instead of 4 KiB (``MADV_HUGEPAGE``), where the system has them.

    Why: one page fault for 2 MiB, not 512. The first touch of a page is expensive, on virtual
    machines above all. Off: pages of the usual size.
    """
    if enabled() and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)


def release_pages(memory: mmap.mmap) -> bool:
    """Gives the pages of a private map back to the system (``MADV_DONTNEED``); False if it did not.

    Their content is lost (anonymous memory) or read again from the file. Why: memory stays flat on
    runs larger than it. Off: pages count as this process's memory until the map is closed, so the
    buffer's bound leaves out a tensor that is larger than the ring.
    """
    if not enabled() or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    memory.madvise(mmap.MADV_DONTNEED)
    return True


# --- The file cache -----------------------------------------------------------------------------

DIRECT_BYTES = 8 << 20
"""Smaller files go through the cache: they are read back soon, and cost little."""
_STAGING_BYTES = 1 << 20
_BLOCK_BYTES = 4096  # of every device in use; the last block of a file is cut to length
_SLOW = 200e6
"""Bytes a second below which the system's cache is the better place to wait in."""
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class DirectFiles:
    """Writes large files of one directory past the system's file cache (``O_DIRECT``).

    Why: a capture writes more than anybody reads back at once. In the cache each byte takes a fresh
    page, which costs the processor several times the copy and evicts what other programs read. The
    device reads from memory itself. It takes whole, aligned blocks, so bytes pass through one small
    aligned buffer, which stays in the processor's cache.

    ``usable`` turns False where the file system refuses the flag (older tmpfs, some network file
    systems) or the device is slow. Off, it is False from the start: files go through the cache.
    """

    def __init__(self) -> None:
        self.usable = enabled() and hasattr(os, "O_DIRECT")
        self._staging: mmap.mmap | None = None

    def write(self, path: Path, parts: Sequence[memoryview]) -> bool:
        """Writes the parts one after another. Returns False (and leaves nothing of use at ``path``)
        where this file system refuses. Raises OSError for anything else, a full disk above all."""
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
        for part in _joined(parts):
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


def _joined(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """The parts in order, neighbours that are short joined, up to 512 KiB at a time: to stage each
    alone costs more than its bytes."""
    short: list[memoryview] = []
    num_bytes = 0
    for part in parts:
        if part.nbytes <= _SHORT_BYTES:
            short.append(part)
            num_bytes += part.nbytes
        if short and (part.nbytes > _SHORT_BYTES or num_bytes >= _JOINED_BYTES):
            yield memoryview(b"".join(short))
            short, num_bytes = [], 0
        if part.nbytes > _SHORT_BYTES:
            yield part
    if num_bytes:
        yield memoryview(b"".join(short))


_SHORT_BYTES = 1 << 15
_JOINED_BYTES = 1 << 19


def _write_whole(file: int, block: memoryview) -> None:
    while block.nbytes:
        written = os.write(file, block)
        if written % _BLOCK_BYTES:  # what is left could not be written in whole blocks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        block = block[written:]

"""stdout and stderr as a command may find them: closed, full, or with nobody who reads.

The answer is what a command is run for: where it cannot be written the exit code is 2, never 0 or
1, which are answers, and never 3, which is a fault of the tool. What goes to stderr is for people:
where that cannot be written, nothing changes.

Of the processes that torchrun starts, rank 0 alone prints. All were given the same command line, so
what is wrong with it is said once. A fault of another rank, and whatever rank 0 did not stop for,
still goes to that rank's own stderr.

Ctrl-C ends a command with 130, SIGTERM with 143, whatever a library makes of it: an import that is
interrupted may end as an error of the library's own ("could not import ..."), so it is noted when
it comes.

OpenBLAS and OpenMP call C's ``exit(1)`` where they get no memory or no threads, past all of Python.
The C library calls a guard then, which ends the process with 3.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from divergence.errors import UsageError

PATIENCE_S = 10.0
"""How long a rank that failed first waits for rank 0 to say so."""

Result = TypeVar("Result")


def open_streams() -> None:
    """Replaces this process's streams by ones that fail as described above. The descriptors of
    closed streams are taken first: else the next file that is opened would get one of them, and
    with it what libraries print."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
    sys.stdout = _Closed() if sys.stdout is None else _rewrapped(sys.stdout, _Answer)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    else:
        sys.stderr = _rewrapped(sys.stderr, _ForPeople)


def nowhere() -> None:
    """Discards what is still written to stdout."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    with contextlib.suppress(OSError):  # what is buffered is written once more at exit
        os.dup2(sys.stdout.fileno(), 1)


def _lost(reason: str) -> UsageError:
    nowhere()
    return UsageError(
        f"cannot write the answer: {reason}", hint="give stdout a place: > FILE, or > /dev/null"
    )


def _rewrapped(stream: Any, kind: Callable[..., Any]) -> Any:
    if type(stream) is not io.TextIOWrapper:
        return stream  # a test's, a notebook's
    return kind(
        stream.buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Answer(io.TextIOWrapper):
    """stdout."""

    def write(self, text: str) -> int:
        return self._lost_or(partial(super().write, text))

    def flush(self) -> None:
        self._lost_or(super().flush)

    def _lost_or(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _lost(error.strerror or str(error)) from error


class _ForPeople(io.TextIOWrapper):
    """stderr."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


class _Closed(io.StringIO):
    """stdout that was closed from the start."""

    def write(self, text: str) -> int:
        raise _lost(os.strerror(errno.EBADF)) if text else OSError(errno.EBADF)


def other_rank() -> int | None:
    """This process's rank, unless it is rank 0 or the only process."""
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return rank if count > 1 and rank > 0 else None


@contextlib.contextmanager
def rank0_output() -> Iterator[None]:
    """Discards the other ranks' stdout and holds back their stderr.

    torchrun ends all ranks as soon as one has failed. So another rank that fails waits, which lets
    rank 0 report what is wrong with both and end the job. If the rank still runs after that, the
    fault is its own, and it prints what was held back. After Ctrl-C nobody waits.
    """
    if other_rank() is None:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(io.StringIO()) as redirected,
    ):
        try:
            yield
        except SystemExit as ended:
            if ended.code and ended.code != stop_code():
                time.sleep(PATIENCE_S)
                if redirected.getvalue() and sys.__stderr__ is not None:
                    sys.__stderr__.write(f"rank {other_rank()}: {redirected.getvalue()}")
            raise


FAULT_CODE = 3
_came: list[int] = []
"""The signals that came, in their order."""


def watch() -> None:
    """Notes Ctrl-C from now on, and what batch systems and terminals that close send; each raises
    KeyboardInterrupt, so that what is being written is closed."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _note)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # another C library
        if os.confstr("CS_GNU_LIBC_VERSION") and not _guarded:
            library = ctypes.CDLL(None)
            library.__cxa_atexit(_GUARD, None, _HANDLE)
            _guarded.append(library)


def unwatch() -> None:
    """Let such a signal end the process at once from now on: its end is all that is left to do."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_DFL)
    while _guarded:
        _guarded.pop().__cxa_finalize(_HANDLE)  # calls the guard, and takes it off C's list


def interrupted() -> bool:
    """Has Ctrl-C come since ``watch``, or another signal to stop?"""
    return bool(_came)


def stop_code() -> int:
    """The exit code of a command that a signal stopped, as shells have it: 130 for Ctrl-C."""
    return 128 + (_came[0] if _came else signal.SIGINT)


def _note(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt


_guarded: list[ctypes.CDLL] = []
_HANDLE = ctypes.create_string_buffer(1)
"""Its address tells the guard from what others registered."""


def _ended_by_library(_: int | None) -> None:
    if _guarded:
        os.write(2, b"error: a library ended this process, most often for lack of memory\n")
        os._exit(FAULT_CODE)


_GUARD = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_ended_by_library)

"""How a process ends that a command does not end itself: by a signal, or by a library.

Ctrl-C ends a command with 130, SIGTERM with 143, whatever a library makes of it: an import that is
interrupted may end as an error of the library's own ("could not import ..."), so it is noted when
it comes.

OpenBLAS and OpenMP call C's ``exit(1)`` where they get no memory or no threads, past all of Python.
The C library calls a guard then, which ends the process with 3.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from types import FrameType

__all__ = ["FAULT_CODE", "interrupted", "stop_code", "unwatch", "watch"]

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
    """From now on such a signal ends the process at once: its end is all that is left to do."""
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

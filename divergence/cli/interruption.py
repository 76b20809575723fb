"""Ctrl-C ends a command with 130, whatever a library makes of it.

An import that is interrupted may end as an error of the library's own ("could not import ...", or a
half-imported module without its names). So Ctrl-C is noted when it comes.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["INTERRUPTED_CODE", "interrupted", "watch"]

INTERRUPTED_CODE = 130
_came = threading.Event()


def watch() -> None:
    """Notes Ctrl-C from now on; it raises KeyboardInterrupt as before."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def interrupted() -> bool:
    """Has Ctrl-C come since ``watch``?"""
    return _came.is_set()


def _note(number: int, frame: FrameType | None) -> None:
    _came.set()
    raise KeyboardInterrupt

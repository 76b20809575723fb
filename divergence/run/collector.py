"""Python's collector of cycles, kept from walking through a large run's records over and over."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["rarely_collecting"]

_OBJECTS = 100_000
"""New ones until the collector looks at them; Python's own number is some hundreds."""
_lock = threading.Lock()
_inside: list[tuple[int, int, int]] = []
"""What the numbers were, once for each block that is entered."""


@contextlib.contextmanager
def rarely_collecting() -> Iterator[None]:
    """Within it the collector seldom runs: records and results are many, and form no cycles.

    A block, or a decorator. Of several at a time, in whatever threads, the last one restores.
    """
    with _lock:
        before = gc.get_threshold()
        _inside.append(_inside[0] if _inside else before)
        if 0 < before[0] < _OBJECTS:  # 0: it is switched off
            gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                gc.set_threshold(*before)

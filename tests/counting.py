"""Counts the work of a piece of code, which no other load on the machine changes."""

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Lines:
    """``count``: the lines of Python that ran, each as often as it did."""

    count = 0


@contextlib.contextmanager
def lines_of_python(most: int = 50_000_000) -> Iterator[Lines]:
    """What runs in this thread is counted; beyond ``most`` it is stopped by an AssertionError."""
    lines = Lines()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        lines.count += event == "line"
        assert lines.count <= most, f"more than {most} lines of Python"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)

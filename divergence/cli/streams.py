"""stdout and stderr as a command may find them: closed, full, or with nobody who reads.

The answer is what a command is run for: where it cannot be written the exit code is 2, never 0 or
1, which are answers, and never 3, which is a fault of the tool. What goes to stderr is for people:
where that cannot be written, nothing changes.

Of the processes that torchrun starts, rank 0 alone prints. All were given the same command line, so
what is wrong with it is said once. A fault of another rank, and whatever rank 0 did not stop for,
still goes to that rank's own stderr.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from divergence.cli.ends import stop_code
from divergence.errors import UsageError

__all__ = [
    "nowhere", "open_streams", "other_rank", "rank0_output",
]  # fmt: skip

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
        stream.buffer, encoding=stream.encoding, errors=stream.errors,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


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
        contextlib.redirect_stderr(io.StringIO()) as held,
    ):
        try:
            yield
        except SystemExit as ended:
            if ended.code and ended.code != stop_code():
                time.sleep(PATIENCE_S)
                if held.getvalue() and sys.__stderr__ is not None:
                    sys.__stderr__.write(f"rank {other_rank()}: {held.getvalue()}")
            raise

"""One voice: of the processes that torchrun starts, rank 0 alone prints.

All were given the same command line, so what is wrong with it is said once. What rank 0 cannot
know, a fault of another rank, still goes to that rank's own stderr.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

__all__ = ["one_voice", "other_rank"]

PATIENCE_S = 10.0


def other_rank() -> int | None:
    """This process's rank, where it is not the one that speaks."""
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return rank if count > 1 and rank > 0 else None


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """Within it, the other ranks' stdout and stderr lead nowhere; ``sys.__stderr__`` stays.

    torchrun ends all ranks as soon as one has failed, so another rank that fails waits until rank
    0, which has the same to say, has said it.
    """
    if other_rank() is None:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            yield
        except SystemExit as ended:
            if ended.code not in (None, 0):
                time.sleep(PATIENCE_S)
            raise

"""One voice: of the processes that torchrun starts, rank 0 alone prints.

All were given the same command line, so what is wrong with it is said once. A fault of another
rank, and whatever rank 0 did not stop for, still goes to that rank's own stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator

from divergence.cli.shell.interruption import INTERRUPTED_CODE

__all__ = ["other_rank", "rank0_output"]

PATIENCE_S = 10.0


def other_rank() -> int | None:
    """This process's rank, where it is not the one that speaks."""
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return rank if count > 1 and rank > 0 else None


@contextlib.contextmanager
def rank0_output() -> Iterator[None]:
    """Within it, the other ranks' stdout leads nowhere, and their stderr is held back.

    torchrun ends all ranks as soon as one has failed. So another rank that fails first leaves rank
    0 the time to say what both have to say, and to be the one that ends all. Where it is still
    there afterwards, the trouble was its own, and it speaks. Ctrl-C is no trouble of anybody's:
    rank 0 says it, and nobody waits.
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
            if ended.code not in (None, 0, INTERRUPTED_CODE):
                time.sleep(PATIENCE_S)
                if held.getvalue() and sys.__stderr__ is not None:
                    sys.__stderr__.write(f"rank {other_rank()}: {held.getvalue()}")
            raise

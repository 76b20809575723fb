"""``--ranks N``: N processes on this machine, in place of torchrun.

They are started by multiprocessing's fork server, which loads torch once and forks the ranks from
it. What the first rank says of its progress, and the error of the rank that failed first, come back
to the process that started them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from divergence.errors import DivergenceError, UsageError, check_process
from divergence.options.commands import CaptureOptions
from divergence.recording.processes import PeerStoppedError
from divergence.run.reader import Run
from divergence.words import Progress, silent

_PRELOADED = ["divergence.collectives.running", "torch._inductor"]
"""Loaded once, not by every rank: torch's deterministic mode imports its compiler (seconds)."""


def start(
    capture: Callable[..., Run],
    num_ranks: int,
    *,
    out: str | Path,
    like: Run | None,
    options: CaptureOptions,
    force: bool,
    command: str | None,
    progress: Progress | None,
) -> Run:
    """Call ``capture`` with the rest in ``num_ranks`` processes; the run, opened. Raises what the
    ranks raise."""
    if "RANK" in os.environ:
        raise UsageError(
            "--ranks starts processes, and torchrun has started them already", hint="leave it out"
        )
    if num_ranks < 2:
        raise UsageError(f"{num_ranks} ranks have nothing to communicate", hint="--ranks 2 or more")
    if sys.platform == "win32":
        raise UsageError("--ranks needs a system that forks", hint="torchrun --nproc-per-node N")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = _free_port()
    asked = {"out": str(out), "like": None if like is None else str(like.path), "options": options,
             "force": force, "command": command}  # fmt: skip
    ends: list[Connection] = []
    processes = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(capture, rank, num_ranks, port, theirs, asked), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        failed = _listen(ends, progress or silent)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    if failed is not None:
        raise failed
    if any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        check_process(min(map(int, filter(None, codes))), "a rank")
        raise DivergenceError(f"a rank ended without a word: exit codes {codes}")
    return Run.open(out)


def _listen(ends: list[Connection], progress: Progress) -> Exception | None:
    """Hands on what ranks say until all have ended; the first error."""
    open_ends, failed = list(ends), None
    while open_ends:
        for end in wait(open_ends):
            assert isinstance(end, Connection)
            try:
                kind, what = end.recv()
            except (EOFError, OSError):
                open_ends.remove(end)
                continue
            if kind == "progress":
                progress(*what)
            elif failed is None or isinstance(failed, PeerStoppedError):
                failed = what
    return failed


def _rank(
    capture: Callable[..., Run], rank: int, num_ranks: int, port: int, end: Connection,
    asked: dict[str, Any],
) -> None:  # fmt: skip
    """One process: its environment as torchrun makes it, then the capture."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    like = asked.pop("like")
    say: Progress | None = None if rank else lambda *what: end.send(("progress", what))
    code = 0
    try:
        capture(like=None if like is None else Run.open(like), progress=say, **asked)
    except Exception as error:
        code = 1
        with contextlib.suppress(Exception):
            end.send(("error", _sendable(error)))
    end.close()
    if torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
    os._exit(code)


def _sendable(error: Exception) -> Exception:
    """An error that can be made again in the other process."""
    if isinstance(error, DivergenceError):
        return error
    return DivergenceError(f"{type(error).__name__}: {error}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

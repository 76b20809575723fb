"""Comparing on several processes: torchrun starts them, torch.distributed carries what they find.

    torchrun --nproc-per-node 8 -m divergence compare A B

Rank 0 does what one process does alone, in the same order, and so gives the same report. Only
the looking at pairs is shared: reading, checking and measuring, which is nearly all of the work.
Rank 0 gives every rank its pairs, by bytes, and takes what was found of them as it judges in the
alignment's order. All metrics of a pair are made by one process, as they are alone: so they are
equal bit for bit, whatever the number of ranks (given as many threads each).

A pair is never split. Its metrics are sums over rows, so it could be, but what the ranks finish
together is bounded by the largest tensor alone, which in a capture is a small part of one rank's
share (docs/scale.md has the figures).

What is sent: to a rank, its pairs and what measures them, with each run by its path, so every
rank must be able to read the runs; back, batch by batch, what was found: some numbers a row. A
rank goes on only when its batch was taken: nothing piles up in rank 0. An error that a rank meets
is raised in rank 0, where the pair's turn comes, as it would be in one process.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from divergence.comparison.align import Pair
from divergence.comparison.measure.pairs import Measurer, Measuring, measure_pairs, measuring_on
from divergence.comparison.measure.rating import PairNumbers
from divergence.errors import DivergenceError, FaultError, UsageError, first_line
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.words import Progress, silent

TIMEOUT = timedelta(days=7)
"""For a rank that is still at work. One that is gone breaks its connection, which is seen at
once."""
BATCH_PAIRS = 64
BATCH_BYTES = 256 << 20
"""What a rank looks at between two messages, at most."""


def num_processes() -> int:
    """Return how many processes torchrun, or anything that sets what it sets, started for this; 1
    where nothing did."""
    named = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return int(os.environ.get("WORLD_SIZE", "1")) if named else 1


@contextlib.contextmanager
def shared_with_ranks(device: str = "cpu") -> Iterator[Measuring | None]:
    """Measure so that the other processes, if there are any, share the work.

    None on those others, once they have nothing more to do. Raises UsageError where they cannot be
    joined, or the device cannot measure, and FaultError where one is lost.
    """
    if num_processes() == 1:
        yield measuring_on(device)
        return
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        if not dist.is_available():
            raise UsageError(
                "this torch was built without torch.distributed", hint="compare in one process"
            )
        try:
            dist.init_process_group("gloo", timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"the processes cannot be connected: {first_line(error)}",
                hint="start them by torchrun --nproc-per-node N -m divergence compare A B",
            ) from error
    try:
        ranks = _Ranks(dist)
        if dist.get_rank() != 0:
            with contextlib.suppress(_GoneError):  # rank 0 has said why
                ranks.serve()
            yield None
            return
        try:
            yield replace(measuring_on(device), measure=ranks.measure_pairs)
        finally:
            ranks.dismiss()
    finally:
        if own:
            dist.destroy_process_group()


def share_out(pairs: Sequence[Pair], num_ranks: int) -> list[int]:
    """The rank of each pair, so that all have about equally many bytes at any time.

    In order, each to the rank that has least so far. Pairs of the same two tensors stay together:
    they are measured once.
    """
    load = [0] * num_ranks
    ranks: dict[tuple[object, ...], int] = {}
    owners = []
    for pair in pairs:
        reference, candidate = pair.reference.record, pair.candidate.record
        key = (reference.xxh3, candidate.xxh3) if reference.xxh3 and candidate.xxh3 else (id(pair),)
        if key not in ranks:
            ranks[key] = load.index(min(load))
            load[ranks[key]] += _num_bytes(pair)
        owners.append(ranks[key])
    return owners


def _num_bytes(pair: Pair) -> int:
    num_bytes = 0
    for piece in (pair.reference, pair.candidate):
        record = piece.record
        whole = record.numel * format_named(record.dtype).itemsize
        part = piece.row is not None and record.shape
        num_bytes += whole // max(1, record.shape[0]) if part else whole
    return num_bytes


class _GoneError(FaultError):
    """A rank that does not answer any more."""


class _Ranks:
    """The processes of one comparison. Messages go between rank 0 and one other at a time."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._size = dist.get_world_size()
        self._busy: set[int] = set()

    # --- rank 0 ---------------------------------------------------------------------------------

    def measure_pairs(
        self, measurer: Measurer, pairs: Sequence[Pair], progress: Progress | None = None
    ) -> Generator[PairNumbers | None]:
        """Return what ``pairs.measure_pairs`` gives, with the other ranks' help."""
        owners = share_out(pairs, self._size)
        shares: list[list[Pair]] = [[] for _ in range(self._size)]
        for pair, owner in zip(pairs, owners, strict=True):
            shares[owner].append(pair)
        for rank in range(1, self._size):
            if shares[rank]:
                self._send(_packed((measurer, shares[rank])), rank)
                self._busy.add(rank)
        sources = [iter(measure_pairs(measurer, shares[0]))]
        sources += [self._found_by(rank) for rank in range(1, self._size)]
        try:
            for number, (pair, owner) in enumerate(zip(pairs, owners, strict=True)):
                (progress or silent)("compare", number, len(pairs), pair.reference.record.site)
                yield next(sources[owner])
        finally:
            sources[0].close()
            self._stop()

    def _found_by(self, rank: int) -> Generator[PairNumbers | None]:
        while True:
            numbers, error, more = self._receive(rank)
            if not more:
                self._busy.discard(rank)
            else:
                self._send(True, rank)
            yield from numbers
            if error is not None:
                raise error
            if not more:
                return

    def _stop(self) -> None:
        """Ranks that are still at it are told not to go on."""
        for rank in sorted(self._busy):
            if self._receive(rank)[2]:
                self._send(False, rank)
        self._busy.clear()

    def dismiss(self) -> None:
        """Nothing more to do for anyone."""
        for rank in range(1, self._size):
            with contextlib.suppress(_GoneError):  # it went before: that has been said
                self._send(None, rank)

    # --- the others -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Look at what rank 0 gives, until it gives nothing more."""
        runs: dict[tuple[object, ...], Run] = {}
        while (job := self._receive(0)) is not None:
            for message in _batches(job, runs, self._dist.get_rank()):
                self._send(message, 0)
                if not message[2] or not self._receive(0):
                    break

    # --- between them ---------------------------------------------------------------------------

    def _send(self, message: Any, rank: int) -> None:
        try:
            self._dist.send_object_list([message], dst=rank)
        except RuntimeError as error:
            raise _lost(rank, error) from error

    def _receive(self, rank: int) -> Any:
        box = [None]
        try:
            self._dist.recv_object_list(box, src=rank)
        except RuntimeError as error:
            raise _lost(rank, error) from error
        return box[0]


def _batches(
    job: bytes, runs: dict[tuple[object, ...], Run], rank: int
) -> Iterator[tuple[list[PairNumbers | None], DivergenceError | None, bool]]:
    """Yields (numbers, what went wrong after these, whether more follows), in the pairs' order."""
    batch: list[PairNumbers | None] = []
    try:
        try:
            measurer, pairs = _unpacked(job, runs)
        except DivergenceError as error:
            raise type(error)(
                error.message,
                where=error.where,
                hint="every rank must be able to read the runs: a shared file system, or a URL",
            ) from error
        with contextlib.closing(measure_pairs(measurer, pairs)) as measured:
            num_bytes = 0
            for pair, numbers in zip(pairs, measured, strict=True):
                batch.append(numbers)
                num_bytes += _num_bytes(pair)
                if len(batch) >= BATCH_PAIRS or num_bytes >= BATCH_BYTES:
                    yield batch, None, True
                    batch, num_bytes = [], 0
    except DivergenceError as error:
        yield batch, error, False
    except Exception as error:
        fault = FaultError(f"rank {rank}: {type(error).__name__}: {first_line(error)}")
        fault.add_note(traceback.format_exc())  # -v shows it
        yield batch, fault, False
    else:
        yield batch, None, False


class _Pickler(pickle.Pickler):
    """Runs go by path, locks are made anew."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Run):
            return "run", type(value), value.path, value.fallback and value.fallback.path
        return ("lock",) if isinstance(value, type(threading.Lock())) else None


class _Unpickler(pickle.Unpickler):
    """Opens the runs that it does not know yet; a path is one object."""

    def __init__(self, file: io.BytesIO, runs: dict[tuple[object, ...], Run]) -> None:
        super().__init__(file)
        self._runs = runs

    def persistent_load(self, named: Any) -> Any:
        if named[0] == "lock":
            return threading.Lock()
        _, kind, path, fallback = named
        if named not in self._runs:
            run = Run.open(path)
            if fallback is not None:
                run.set_fallback(self.persistent_load(("run", Run, fallback, None)))
            self._runs[named] = run if kind is Run else kind(run)
        return self._runs[named]


def _packed(job: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(job)
    return file.getvalue()


def _unpacked(data: bytes, runs: dict[tuple[object, ...], Run]) -> Any:
    return _Unpickler(io.BytesIO(data), runs).load()


def _lost(rank: int, error: Exception) -> _GoneError:
    return _GoneError(
        f"rank {rank} is gone: {first_line(error)}",
        hint="its own last words, or torchrun's, say why; a killed process had too little memory",
    )

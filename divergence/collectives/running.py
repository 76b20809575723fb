"""Captures ``suite:collectives``: every case on the process group that is there, by every rank.

Each rank draws what it puts in (the same bytes on any machine), calls the collective, and records
both; then again, to see whether the group repeats itself. After the cases the orders of addition
are measured, then the times. Nothing is judged here: whoever reads the run does that, from the
recorded inputs (divergence.analyses.collectives).

Sites of a case: ``PATH/collective.NAME:in.x``, ``:out``, and ``:out.run2``, ``:out.run3`` of the
repetitions. ``order.…/collective.order:out`` holds what collectives.orders measured,
``bandwidth.…/collective.seconds:out`` the seconds of single calls.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from divergence.collectives.cases import (
    ADDING,
    COLLECTIVES,
    NOT_SUPPORTED,
    PREFIX,
    ROOT_RANK,
    Collective,
    CollectiveCase,
    draw,
)
from divergence.collectives.chosen import Call, ChosenCollectives
from divergence.collectives.orders import Masks
from divergence.errors import DivergenceError, UsageError, first_line
from divergence.facts import fact, sentence
from divergence.numerics.formats import format_of
from divergence.ops.suite.capturing import CaseWriter
from divergence.recording.processes import TIMEOUT, Ranks
from divergence.run.manifest import Repeatability, digest_tensor
from divergence.run.record import Call as RecordedCall
from divergence.run.record import Operand
from divergence.run.site import join_site, operator_path
from divergence.words import Progress

# How fast a collective is: algbw and busbw, as nccl-tests defines them.
#
# algbw = S / t, where S is the size of the whole buffer in bytes and t the time of one call. busbw
# is what of it goes over each link, so that it can be held against a link's rate whatever the
# number of ranks n (NVIDIA/nccl-tests, doc/PERFORMANCE.md):
#
#     all_reduce                                    busbw = algbw · 2 (n - 1) / n
#     reduce_scatter, all_gather, all_to_all        busbw = algbw · (n - 1) / n
#     broadcast, reduce, send_recv                  busbw = algbw
#
# S is the size of what a rank puts in, or of what it gets where that is more (all_gather).

TIMED: tuple[Collective, ...] = tuple(name for name in COLLECTIVES if name != "rs_ag")
_CPU_BYTES = (4 << 10, 256 << 10, 4 << 20)
_DEVICE_BYTES = (4 << 10, 1 << 20, 256 << 20)
_MOST_CALLS, _LEAST_CALLS, _SECONDS = 20, 3, 0.3


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw."""
    share = (num_ranks - 1) / num_ranks
    if collective in ("all_reduce", "rs_ag"):
        return 2 * share
    return share if collective in ("reduce_scatter", "all_gather", "all_to_all") else 1.0


def timed_bytes(device: str) -> Sequence[int]:
    """S, from small to large."""
    return _CPU_BYTES if device.partition(":")[0] == "cpu" else _DEVICE_BYTES


def timed_elements(collective: Collective, num_bytes: int, num_ranks: int) -> int:
    """float32 elements of a rank's input, so that S is about ``num_bytes``."""
    each = max(1, num_bytes // 4 // num_ranks)
    return each if collective == "all_gather" else each * num_ranks


def seconds_of_one(call: Call, x: torch.Tensor, ranks: Ranks) -> list[float]:
    """Seconds of single calls, of the slowest rank each; the first, which sets up connections, is
    left out. All ranks make equally many."""
    call(x)
    first = max(ranks.gather(_timed(call, x)))
    count = int(min(_MOST_CALLS, max(_LEAST_CALLS, _SECONDS / max(first, 1e-6))))
    mine = []
    for _ in range(count):
        ranks.gather(None)  # start together
        mine.append(_timed(call, x))
    return [max(times) for times in zip(*ranks.gather(mine), strict=True)]


def _timed(call: Call, x: torch.Tensor) -> float:
    _wait(x)
    begun = time.perf_counter()
    call(x)
    _wait(x)
    return time.perf_counter() - begun


def _wait(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        getattr(torch, x.device.type).synchronize(x.device)


LEAST_RUNS = 3
"""Times that each case is run: an order that depends on who comes first shows in few."""
ORDER, SECONDS = f"{PREFIX}order", f"{PREFIX}seconds"
_PATIENCE = datetime.timedelta(seconds=60)
"""What a rank that was refused waits for the others to be refused as well."""
_REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError)
"""What torch raises for a dtype that a backend has not."""


@dataclass(frozen=True, slots=True)
class CollectiveWork:
    """What is run, in order: cases, then orders, then times."""

    cases: Sequence[CollectiveCase]
    orders: Sequence[CollectiveCase]
    timed: Sequence[Collective]


@dataclass(slots=True)
class RankRecorder:
    """One rank's part of the run."""

    cases: CaseWriter
    ranks: Ranks
    chosen: ChosenCollectives
    num_runs: int
    link_rate: float | None
    progress: Progress
    skipped: dict[str, int] = field(default_factory=dict)
    repeated: Repeatability = field(default_factory=Repeatability)


def record_all(recorder: RankRecorder, work: CollectiveWork) -> None:
    """Run and record all of it. Raises UsageError where nothing can be run."""
    recorder.repeated.num_runs = recorder.num_runs
    total = len(work.cases) + len(work.orders) + len(work.timed)
    lacking = _unsupported(recorder, [*work.cases, *work.orders])
    num_done = 0

    def tell(path: str) -> None:
        nonlocal num_done
        recorder.progress("collectives", num_done, total, path)
        num_done += 1

    for case in work.cases:
        tell(case.path)
        why = lacking.get((case.collective, case.dtype))
        if why is None:
            _record_case(recorder, case)
        else:
            reason = f"{case.collective} of {case.dtype}{NOT_SUPPORTED}{why}"
            recorder.skipped[reason] = recorder.skipped.get(reason, 0) + 1
    for case in work.orders:
        tell(f"order.{case.path}")
        if (case.collective, case.dtype) not in lacking:
            _record_order(recorder, case)
    for collective in work.timed:
        tell(f"bandwidth.{collective}")
        if (collective, "float32") not in lacking:
            _record_times(recorder, collective)
    if not any(recorder.ranks.gather(recorder.cases.order)):  # orders and times: one rank's alone
        raise UsageError(
            "nothing was recorded: no collective could be run here",
            where=next(iter(recorder.skipped), None),
        )


def _unsupported(
    recorder: RankRecorder, cases: Sequence[CollectiveCase]
) -> dict[tuple[str, str], str]:
    """(collective, dtype) → why this group cannot do it. All ranks try each once, and agree."""
    reasons: dict[tuple[str, str], str] = {}
    for collective, dtype in dict.fromkeys((case.collective, case.dtype) for case in cases):
        size = recorder.ranks.size
        x = torch.zeros(size, dtype=getattr(torch, dtype), device=recorder.ranks.device)
        why = None
        try:
            recorder.chosen.call(collective)(x)
        except _REFUSED as error:
            why = first_line(error, most=120)
        _meet(recorder.ranks, f"{collective} of {dtype}", why)
        whys = [reason for reason in recorder.ranks.gather(why) if reason]
        if whys:
            reasons[(collective, dtype)] = whys[0]
    return reasons


def _meet(ranks: Ranks, what: str, why: str | None) -> None:
    """All ranks leave the first call together. One that alone was refused would wait for ever for
    others, which wait for it in the call."""
    try:
        ranks.meet(_PATIENCE if why else TIMEOUT)
    except RuntimeError as error:
        if why is None:
            raise
        raise DivergenceError(
            f"{what} fails on rank {ranks.rank} alone: {why}",
            hint="the other ranks are still in the call",
        ) from error


def _record_case(recorder: RankRecorder, case: CollectiveCase) -> None:
    ranks = recorder.ranks
    x = draw(
        case.values, case.dtype, case.elements(ranks.size), rank=ranks.rank, num_ranks=ranks.size,
        adds=case.adds,
    )  # fmt: skip
    there = x.to(ranks.device)
    call = recorder.chosen.call(case.collective)
    results = []
    for _ in range(recorder.num_runs):
        results.append(call(there.clone()).cpu())
    name = f"{PREFIX}{case.collective}"
    place, (taken, given) = operator_path(case.path, name, 1), case.placements
    site = join_site(place, "in.x")
    if case.collective != "broadcast" or ranks.rank == ROOT_RANK:
        recorder.cases.put(site, x, placement=taken)
    if case.collective == "reduce" and ranks.rank != ROOT_RANK:
        return
    operand = Operand(site=site, shape=tuple(x.shape), dtype=format_of(x.dtype).name)
    facts: dict[str, Any] = {"x": {"tensor": 0}, "ranks": ranks.size}
    call_of_all = RecordedCall(operator=name, arguments=facts, operands=(operand,))
    recorder.cases.put(join_site(place, "out"), results[0], call_of_all, placement=given)
    first = digest_tensor(results[0])
    for number, again in enumerate(results[1:], 2):
        recorder.cases.put(join_site(place, f"out.run{number}"), again, placement=given)
        recorder.repeated.num_compared += 1
        if digest_tensor(again) != first:
            recorder.repeated.num_different += 1
            where = f"{case.path} on rank {ranks.rank}"
            recorder.repeated.first_difference = recorder.repeated.first_difference or where


def _record_order(recorder: RankRecorder, case: CollectiveCase) -> None:
    """What masks give, of a result that every rank has by rank 0 alone."""
    ranks = recorder.ranks
    size = case.elements(ranks.size)
    masks = Masks(ranks.size, case.dtype, size)
    if not masks.fits:
        reason = sentence(
            fact("collectives.too_many_ranks", collective=case.collective, dtype=case.dtype)
        )
        recorder.skipped[reason] = recorder.skipped.get(reason, 0) + 1
        return
    call, rows = recorder.chosen.call(case.collective), []
    for number in range(masks.num_calls):
        result = call(masks.terms(ranks.rank, number).to(ranks.device)).cpu()
        rows.append(masks.sizes(result))
    shared = case.collective == "reduce_scatter"
    if ranks.rank == ROOT_RANK or shared:
        path = f"order.{case.collective}.{case.dtype}.{case.size}"
        facts = {"collective": case.collective, "dtype": case.dtype, "size": case.size,
                 "elements": size, "ranks": ranks.size}  # fmt: skip
        recorder.cases.put(
            join_site(operator_path(path, ORDER, 1), "out"), torch.stack(rows),
            RecordedCall(operator=ORDER, arguments=facts),
            placement="shard:1" if shared else "single",
        )  # fmt: skip


def _record_times(recorder: RankRecorder, collective: Collective) -> None:
    ranks, call = recorder.ranks, recorder.chosen.call(collective)
    for num_bytes in timed_bytes(ranks.device):
        size = timed_elements(collective, num_bytes, ranks.size)
        x = torch.ones(size, dtype=torch.float32, device=ranks.device)
        seconds = seconds_of_one(call, x, ranks)
        if ranks.rank != ROOT_RANK:
            continue
        whole = 4 * size * (ranks.size if collective == "all_gather" else 1)
        facts: dict[str, Any] = {"collective": collective, "bytes": whole, "ranks": ranks.size}
        if recorder.link_rate is not None:
            facts["link_bytes_per_s"] = recorder.link_rate
        place = operator_path(f"bandwidth.{collective}.{num_bytes}", SECONDS, 1)
        recorder.cases.put(
            join_site(place, "out"), torch.tensor(seconds, dtype=torch.float64),
            RecordedCall(operator=SECONDS, arguments=facts), placement="single",
        )  # fmt: skip


def chosen_work(
    cases: Sequence[CollectiveCase],
    orders: Sequence[CollectiveCase],
    matches: Callable[[str], bool],
) -> CollectiveWork:
    """What of all a selection of paths leaves."""
    return CollectiveWork(
        [case for case in cases if matches(f"{case.path}:out")],
        [
            order
            for order in orders
            if order.collective in ADDING
            and matches(f"order.{order.collective}.{order.dtype}.{order.size}:out")
        ],
        [collective for collective in TIMED if matches(f"bandwidth.{collective}:out")],
    )

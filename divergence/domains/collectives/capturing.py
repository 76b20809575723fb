"""``capture suite:collectives``: every case on the process group that is there, by every rank; all
of them write one run.

The ranks are started by torchrun, or by ``--ranks N`` on this machine alone. Each draws what it
puts in (the same bytes on any machine), calls the collective, and records both; then again, to see
whether the group repeats itself. After the cases the orders of addition are measured, then the
times. Nothing is judged here: whoever reads the run does that, from the recorded inputs
(divergence.domains.collectives).

Sites of a case: ``PATH/collective.NAME:in.x``, ``:out``, and ``:out.run2``, ``:out.run3`` of the
repetitions. ``order.…/collective.order:out`` holds what collectives.orders measured,
``bandwidth.…/collective.seconds:out`` the seconds of single calls.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from divergence.domains.collectives import SOURCE
from divergence.domains.collectives.cases import (
    COLLECTIVES,
    NOT_SUPPORTED,
    PREFIX,
    ROOT_RANK,
    Collective,
    CollectiveCase,
    all_cases,
    draw,
    order_cases,
)
from divergence.domains.collectives.chosen import (
    Call,
    ChosenCollectives,
    backend_name,
    choose,
    join,
    parse_fault,
)
from divergence.domains.collectives.orders import Masks
from divergence.errors import DivergenceError, UsageError, check_process, first_line
from divergence.facts import fact, sentence
from divergence.numerics.formats import format_named, format_of
from divergence.options.commands import link_rate
from divergence.recording.cases import CaseRequest, CaseWriter
from divergence.recording.machine import resolve_device
from divergence.recording.new_run import PlannedSite
from divergence.recording.processes import TIMEOUT, PeerStoppedError, Ranks, closed
from divergence.run.command import command_line, quoted
from divergence.run.contents import site_names
from divergence.run.manifest import ModuleNote, Plan
from divergence.run.reader import Run
from divergence.run.record import Call as RecordedCall
from divergence.run.record import Operand
from divergence.run.site import join_site, operator_path
from divergence.words import Progress, silent

# ``--ranks N``: N processes on this machine, in place of torchrun.
#
# They are started by multiprocessing's fork server, which loads torch once and forks the ranks from
# it. What the first rank says of its progress, and the error of the rank that failed first, come
# back to the process that started them.

_PRELOADED = ["divergence.domains.collectives.capturing", "torch._inductor"]
"""Loaded once, not by every rank: torch's deterministic mode imports its compiler (seconds)."""


def start(num_ranks: int, request: CaseRequest) -> Run:
    """Capture in ``num_ranks`` processes; the run, opened. Raises what the ranks raise."""
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
    with socket.socket() as probe:  # a port that is free
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    like = None if request.like is None else str(request.like.path)
    sent = replace(request, like=None, progress=silent)
    ends: list[Connection] = []
    processes = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, num_ranks, port, sender, sent, like), daemon=True
        )
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        failed = _listen(ends, request.progress)
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
    return Run.open(request.out)


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
    rank: int, num_ranks: int, port: int, end: Connection, request: CaseRequest, like: str | None
) -> None:
    """One process: its environment as torchrun makes it, then the capture."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    say: Progress = silent if rank else lambda *what: end.send(("progress", what))
    code = 0
    try:
        capture("", replace(request, like=None if like is None else Run.open(like), progress=say))
    except Exception as error:
        code = 1
        with contextlib.suppress(Exception):
            if not isinstance(error, DivergenceError):  # it could not be made again over there
                error = DivergenceError(f"{type(error).__name__}: {error}")
            end.send(("error", error))
    end.close()
    if torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
    os._exit(code)


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
# S, from small to large
_CPU_BYTES = (4 << 10, 256 << 10, 4 << 20)
_DEVICE_BYTES = (4 << 10, 1 << 20, 256 << 20)
_MOST_CALLS, _LEAST_CALLS, _SECONDS = 20, 3, 0.3


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw."""
    share = (num_ranks - 1) / num_ranks
    if collective in ("all_reduce", "rs_ag"):
        return 2 * share
    return share if collective in ("reduce_scatter", "all_gather", "all_to_all") else 1.0


def seconds_of_one(call: Call, x: torch.Tensor, ranks: Ranks) -> list[float]:
    """Seconds of single calls, of the slowest rank each; the first, which sets up connections, is
    left out. All ranks make equally many."""

    def wait() -> None:
        if x.device.type != "cpu":
            getattr(torch, x.device.type).synchronize(x.device)

    def timed() -> float:
        wait()
        begun = time.perf_counter()
        call(x)
        wait()
        return time.perf_counter() - begun

    call(x)
    first = max(ranks.gather(timed()))
    timings = []
    for _ in range(int(min(_MOST_CALLS, max(_LEAST_CALLS, _SECONDS / max(first, 1e-6))))):
        ranks.gather(None)  # start together
        timings.append(timed())
    return [max(times) for times in zip(*ranks.gather(timings), strict=True)]


LEAST_RUNS = 3
"""Times that each case is run: an order that depends on who comes first shows in few."""
ORDER, SECONDS = f"{PREFIX}order", f"{PREFIX}seconds"
_PATIENCE = datetime.timedelta(seconds=60)
"""What a rank that was refused waits for the others to be refused as well."""
_REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError)
"""What torch raises for a dtype that a backend has not."""


@dataclass(frozen=True, slots=True)
class CollectiveWork:
    """Says what is run, in order: cases, then orders, then times."""

    cases: Sequence[CollectiveCase]
    orders: Sequence[CollectiveCase]
    timed: Sequence[Collective]


@dataclass(slots=True)
class RankRecorder:
    """One rank's part of the run."""

    cases: CaseWriter
    ranks: Ranks
    chosen: ChosenCollectives
    link_rate: float | None
    progress: Progress


def record_all(recorder: RankRecorder, work: CollectiveWork) -> None:
    """Run and record all of it. Raises UsageError where nothing can be run."""
    total = len(work.cases) + len(work.orders) + len(work.timed)
    lacking = _unsupported(recorder, [*work.cases, *work.orders])
    number = itertools.count()

    def tell(path: str) -> None:
        recorder.progress("collectives", next(number), total, path)

    for case in work.cases:
        tell(case.path)
        why = lacking.get((case.collective, case.dtype))
        if why is None:
            _record_case(recorder, case)
        else:
            recorder.cases.skip(f"{case.collective} of {case.dtype}{NOT_SUPPORTED}{why}")
    for case in work.orders:
        tell(f"order.{case.path}")
        if (case.collective, case.dtype) not in lacking:
            _record_order(recorder, case)
    for collective in work.timed:
        tell(f"bandwidth.{collective}")
        if (collective, "float32") not in lacking:
            _record_times(recorder, collective)
    # orders and times are one rank's alone
    num_written = sum(recorder.ranks.gather(recorder.cases.order))
    recorder.cases.done(recorder.progress, num_written=num_written, what="collective")


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
        # All ranks leave the first call together. One that alone was refused would wait for ever
        # for others, which wait for it in the call.
        try:
            recorder.ranks.meet(_PATIENCE if why else TIMEOUT)
        except RuntimeError as error:
            if why is None:
                raise
            raise DivergenceError(
                f"{collective} of {dtype} fails on rank {recorder.ranks.rank} alone: {why}",
                hint="the other ranks are still in the call",
            ) from error
        whys = [reason for reason in recorder.ranks.gather(why) if reason]
        if whys:
            reasons[(collective, dtype)] = whys[0]
    return reasons


def _record_case(recorder: RankRecorder, case: CollectiveCase) -> None:
    ranks = recorder.ranks
    x = draw(
        case.values,
        case.dtype,
        case.elements(ranks.size),
        rank=ranks.rank,
        num_ranks=ranks.size,
        adds=case.adds,
    )
    there = x.to(ranks.device)
    call = recorder.chosen.call(case.collective)
    num_runs = recorder.cases.manifest.repeatability.num_runs
    results = [call(there.clone()).cpu() for _ in range(num_runs)]
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
    for number, again in enumerate(results[1:], 2):
        recorder.cases.put(join_site(place, f"out.run{number}"), again, placement=given)
        recorder.cases.repeated(results[0], again, f"{case.path} on rank {ranks.rank}")


def _record_order(recorder: RankRecorder, case: CollectiveCase) -> None:
    """Return what masks give, of a result that every rank has by rank 0 alone."""
    ranks = recorder.ranks
    size = case.elements(ranks.size)
    masks = Masks(ranks.size, case.dtype, size)
    if not masks.fits:
        too_many = {"collective": case.collective, "dtype": case.dtype}
        recorder.cases.skip(sentence(fact("collectives.too_many_ranks", **too_many)))
        return
    call, rows = recorder.chosen.call(case.collective), []
    for number in range(masks.num_calls):
        result = call(masks.terms(ranks.rank, number).to(ranks.device)).cpu()
        rows.append(masks.sizes(result))
    shared = case.collective == "reduce_scatter"
    if ranks.rank == ROOT_RANK or shared:
        facts = {
            "collective": case.collective,
            "dtype": case.dtype,
            "size": case.size,
            "elements": size,
            "ranks": ranks.size,
        }
        recorder.cases.put(
            join_site(operator_path(case.order_path, ORDER, 1), "out"),
            torch.stack(rows),
            RecordedCall(operator=ORDER, arguments=facts),
            placement="shard:1" if shared else "single",
        )


def _record_times(recorder: RankRecorder, collective: Collective) -> None:
    ranks, call = recorder.ranks, recorder.chosen.call(collective)
    on_cpu = ranks.device.partition(":")[0] == "cpu"
    for num_bytes in _CPU_BYTES if on_cpu else _DEVICE_BYTES:
        each = max(1, num_bytes // 4 // ranks.size)  # float32 elements, so that S is about that
        size = each if collective == "all_gather" else each * ranks.size
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
            join_site(place, "out"),
            torch.tensor(seconds, dtype=torch.float64),
            RecordedCall(operator=SECONDS, arguments=facts),
            placement="single",
        )


# The capture itself.


def capture(name: str, request: CaseRequest) -> Run:
    """Run the collectives here, or those of the run that is repeated, and record them. Every rank
    calls this. Raises UsageError without ranks, and for what ``--impl``, ``--plant``, ``--sites``
    and ``--link-rate`` cannot mean; RunExistsError and RunWriteError."""
    options, like = request.options, request.like
    chosen = choose(options.impl, [parse_fault(str(text)) for text in options.plants])
    stated = None if options.link_rate is None else link_rate(options.link_rate)
    work = _work(request)
    if options.ranks is not None:
        return start(options.ranks, replace(request, options=replace(options, ranks=None)))
    num_ranks = _started_ranks(like)
    device = resolve_device(options.device)
    ranks = join(num_ranks, device, chosen.backend)
    chosen.rank = ranks.rank
    for fault in chosen.faults:
        if fault.rank >= num_ranks:
            raise UsageError(f"there is no rank {fault.rank}: there are {num_ranks}")
    speaks = request.progress if ranks.is_first else silent
    backend = backend_name(ranks.device)
    run_here = {case.path: case for case in work.cases}
    run_here |= {case.order_path: case for case in work.orders}
    plan = Plan(
        passes=["free"],
        sites=list(options.sites) or (["*"] if like is None else like.manifest.plan.sites),
        plants=[str(text) for text in options.plants],
        modules={
            path: ModuleNote(kind=chosen.name_of(case.collective, backend), role="inner")
            for path, case in run_here.items()
        },
    )
    with ranks.watched():
        with request.recording(
            plan,
            device=ranks.device,
            source=SOURCE,
            kind=backend,
            ranks=ranks,
            num_runs=max(LEAST_RUNS, options.repeat),
        ) as cases:
            record_all(RankRecorder(cases, ranks, chosen, stated, speaks), work)
            manifest, total = cases.manifest, cases.manifest.repeatability
            cases.writer.flush()
            # all ranks' sizes, what they found of their own repeatability, their records' digests
            summary = (manifest.sizes, total, cases.writer.record_digests)
            for rank, (sizes, repeated, digests) in enumerate(ranks.gather(summary)):
                manifest.record_digests |= digests
                if rank == ranks.rank:
                    continue
                for field in sizes.__struct_fields__:
                    size = getattr(manifest.sizes, field) + getattr(sizes, field)
                    setattr(manifest.sizes, field, size)
                total.num_compared += repeated.num_compared
                total.num_different += repeated.num_different
                total.first_difference = total.first_difference or repeated.first_difference
        return closed(ranks, manifest, request.out, lambda text: speaks("note", 0, None, text))


NO_TRUTH = "each collective is held to its definition"


def plan(name: str, request: CaseRequest) -> list[PlannedSite]:
    """The cases that would be run: by the ranks of ``like``, of ``--ranks`` or of torchrun; two
    where nothing says how many."""
    num_ranks = request.options.ranks or int(os.environ.get("WORLD_SIZE", "2"))
    if request.like is not None:
        num_ranks = request.like.manifest.num_ranks
    planned = []
    for case in _work(request).cases:
        size = case.elements(num_ranks)
        num_bytes = size * format_named(case.dtype).itemsize * num_ranks
        planned.append(
            PlannedSite.of_case(case.path, case.collective, (size,), case.dtype, num_bytes)
        )
    return planned


def _started_ranks(like: Run | None) -> int:
    """Count the ranks. Raises UsageError for one alone, and for others than recorded."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or num_ranks < 2:
        wanted = "N" if like is None else str(like.manifest.num_ranks)
        words: dict[str, Any] = {"o": "RUN"} if like is None else {"like": like.path, "o": "RUN"}
        what = (SOURCE,) if like is None else ()
        raise UsageError(
            f"{SOURCE} needs two ranks at least, and this is one process alone",
            hint=(
                f"torchrun --nproc-per-node {quoted(wanted)} -m "
                f"{command_line('capture', *what, **words)}",
                f"{command_line('capture', *what, **words)} --ranks {quoted(wanted)}    "
                "(on this machine alone)",
            ),
        )
    if like is not None and like.manifest.num_ranks != num_ranks:
        raise UsageError(
            f"{like.path} was made by {like.manifest.num_ranks} ranks, and there are {num_ranks}: "
            "they would add other numbers",
            hint=f"start {like.manifest.num_ranks} processes, or capture {SOURCE} anew",
        )
    return num_ranks


def _work(request: CaseRequest) -> CollectiveWork:
    """Return what is run. Raises UsageError where --sites leaves nothing."""
    like, options = request.like, request.options
    if like is not None and not options.sites:
        patterns = like.manifest.plan.sites
        if any(pattern.startswith("re:") for pattern in patterns):
            # a run's regular expressions may be anything: they stand for what it holds
            cases = {site.partition("/")[0] for site in site_names(like.records)}
            cases |= {path.rpartition(".")[0] for path in cases if path.startswith("bandwidth.")}
            patterns = [p for p in patterns if not p.startswith("re:")] + [f"{c}:*" for c in cases]
        request = replace(request, options=replace(options, sites=patterns))
    work = CollectiveWork(
        request.chosen({case.path: case for case in all_cases()}),
        request.chosen({case.order_path: case for case in order_cases()}),
        request.chosen({f"bandwidth.{collective}": collective for collective in TIMED}),
    )
    if not (work.cases or work.orders or work.timed):
        raise request.nothing_chosen(
            f"{command_line('capture', SOURCE, dry_run=True)} lists them: 'all_reduce.*', "
            "'order.*', 'bandwidth.*'"
        )
    return work

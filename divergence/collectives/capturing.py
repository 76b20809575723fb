"""``capture suite:collectives``: one run, written by every rank of the process group.

The ranks are started by torchrun, or by ``--ranks N`` on this machine alone
(collectives.processes).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from divergence.collectives.cases import all_cases, order_cases
from divergence.collectives.chosen import ChosenCollectives, backend_name, choose, join, parse_fault
from divergence.collectives.running import (
    LEAST_RUNS,
    CollectiveWork,
    RankRecorder,
    chosen_work,
    record_all,
)
from divergence.errors import UsageError
from divergence.numerics.formats import format_named
from divergence.ops.suite.capturing import CaseWriter
from divergence.options.commands import CaptureOptions, link_rate
from divergence.recording.machine import Determinism, deterministic_settings, resolve_device
from divergence.recording.new_run import PlannedCase, operators_manifest
from divergence.recording.processes import Ranks, closed, started
from divergence.run.command import command_line, quoted
from divergence.run.manifest import COLLECTIVES, Manifest, ModuleNote, Plan
from divergence.run.reader import Run
from divergence.run.site import compile_patterns
from divergence.run.trust import recorded_seed
from divergence.run.writer import RunWriter
from divergence.words import Progress, silent

SOURCE = COLLECTIVES


def capture_collectives(
    *,
    out: str | Path,
    like: Run | None,
    options: CaptureOptions,
    force: bool,
    command: str | None,
    progress: Progress | None,
) -> Run:
    """Run the collectives here, or those in ``like`` again, and record them in ``out``.

    Every rank calls this. Raises UsageError without ranks, and for what ``--impl``, ``--plant``,
    ``--sites`` and ``--link-rate`` cannot mean; RunExistsError and RunWriteError.
    """
    chosen = choose(options.impl, [parse_fault(str(text)) for text in options.plants])
    stated = None if options.link_rate is None else link_rate(options.link_rate)
    work = _work(like, options)
    if options.ranks is not None:
        from divergence.collectives.processes import start

        return start(
            capture_collectives, options.ranks, out=out, like=like,
            options=dataclasses.replace(options, ranks=None), force=force, command=command,
            progress=progress,
        )  # fmt: skip
    num_ranks = _started_ranks(like)
    device = resolve_device(options.device)
    ranks = join(num_ranks, device, chosen.backend)
    chosen.rank = ranks.rank
    _check_faults(chosen, num_ranks)
    speaks = (progress or silent) if ranks.is_first else silent
    seed = (
        options.seed if options.seed is not None or like is None else recorded_seed(like.manifest)
    )
    enabled = True if options.deterministic is None else options.deterministic
    with (
        ranks.watched(),
        deterministic_settings(
            device.partition(":")[0], seed=seed or 0, enabled=enabled
        ) as determinism,
    ):
        manifest = _manifest(
            ranks, chosen, work, like, options, determinism=determinism, seed=seed or 0,
            enabled=enabled, command=command,
        )  # fmt: skip
        if options.probe and ranks.is_first:
            from divergence.arithmetic.quick import quick_facts

            manifest.arithmetic = quick_facts(ranks.device)
        with started(
            ranks, lambda: RunWriter(out, manifest, force=force, rank=ranks.rank)
        ) as writer:
            recorder = RankRecorder(
                CaseWriter(writer, "free"),
                ranks,
                chosen,
                max(LEAST_RUNS, options.repeat),
                stated,
                speaks,
            )
            record_all(recorder, work)
            manifest.plan.skipped_operators = recorder.skipped
            determinism.note_in(manifest.settings)
            writer.flush()
            _count(ranks, recorder, manifest, writer.record_digests)
        for reason, count in recorder.skipped.items():
            speaks("note", 0, None, f"{count} left out: {reason}")
        return closed(ranks, manifest, out, lambda text: speaks("note", 0, None, text))


def plan_collectives(like: Run | None, options: CaptureOptions) -> list[PlannedCase]:
    """The cases that would be run: by the ranks of ``like``, of ``--ranks`` or of torchrun; two
    where nothing says how many."""
    num_ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "2"))
    if like is not None:
        num_ranks = like.manifest.num_ranks
    planned = []
    for case in _work(like, options).cases:
        size = case.elements(num_ranks)
        num_bytes = size * format_named(case.dtype).itemsize * num_ranks
        planned.append(PlannedCase(case.path, case.collective, (size,), case.dtype, num_bytes))
    return planned


def _started_ranks(like: Run | None) -> int:
    """How many ranks there are. Raises UsageError for one alone, and for others than recorded."""
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


def _work(like: Run | None, options: CaptureOptions) -> CollectiveWork:
    """What is run. Raises UsageError where --sites leaves nothing."""
    patterns = list(options.sites) or (["*"] if like is None else like.manifest.plan.sites)
    work = chosen_work(list(all_cases()), list(order_cases()), compile_patterns(patterns))
    if not (work.cases or work.orders or work.timed):
        raise UsageError(
            f"--sites {' '.join(patterns)} matches no case",
            hint=f"{command_line('capture', SOURCE, dry_run=True)} lists them: 'all_reduce.*', "
            "'order.*', 'bandwidth.*'",
        )
    return work


def _check_faults(chosen: ChosenCollectives, num_ranks: int) -> None:
    for fault in chosen.faults:
        if fault.rank >= num_ranks:
            raise UsageError(f"there is no rank {fault.rank}: there are {num_ranks}")


def _manifest(
    ranks: Ranks,
    chosen: ChosenCollectives,
    work: CollectiveWork,
    like: Run | None,
    options: CaptureOptions,
    *,
    determinism: Determinism,
    seed: int,
    enabled: bool,
    command: str | None,
) -> Manifest:
    recorded = None if like is None else like.manifest
    backend = backend_name(ranks.device)
    modules = {
        case.path: ModuleNote(kind=chosen.name_of(case.collective, backend), role="inner")
        for case in work.cases
    }
    for case in work.orders:
        path = f"order.{case.collective}.{case.dtype}.{case.size}"
        modules[path] = ModuleNote(kind=chosen.name_of(case.collective, backend), role="inner")
    plan = Plan(
        passes=["free"],
        sites=list(options.sites) or (["*"] if recorded is None else recorded.plan.sites),
        plants=[str(text) for text in options.plants],
        modules=modules,
    )
    manifest = operators_manifest(
        ranks.device, plan, source=SOURCE, kind=backend, deterministic=enabled, seed=seed,
        switches=determinism.switches, label=options.label, command=command, like=recorded,
    )  # fmt: skip
    manifest.mesh = ranks.mesh_of(manifest.environment)
    return manifest


def _count(
    ranks: Ranks, recorder: RankRecorder, manifest: Manifest, record_digests: dict[str, str]
) -> None:
    """Adds up all ranks' sizes, and what they found of their own repeatability; gathers the digests
    of their files of records."""
    mine = (manifest.sizes, recorder.repeated, record_digests)
    manifest.repeatability = recorder.repeated
    for rank, (sizes, repeated, digests) in enumerate(ranks.gather(mine)):
        manifest.record_digests |= digests
        if rank == ranks.rank:
            continue
        for name in sizes.__struct_fields__:
            setattr(manifest.sizes, name, getattr(manifest.sizes, name) + getattr(sizes, name))
        total = manifest.repeatability
        total.num_compared += repeated.num_compared
        total.num_different += repeated.num_different
        total.first_difference = total.first_difference or repeated.first_difference

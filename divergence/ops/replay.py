"""replay(): each recorded operator of a run, run again alone on its recorded inputs.

No model is needed, and no error is inherited: any difference was made by that operator on this
machine. With ``truth`` the operators run in float64. The result is a run of the pass ``replayed``
at the same sites, without the inputs. What cannot be run again alone (it draws random numbers, its
weight was not stored, this machine has no such operator) is counted by reason in
``plan.skipped_operators``.

On the same machine under the same settings a replay gives the recorded bits, which shows that the
recording is complete.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from divergence.arithmetic.quick import quick_facts
from divergence.errors import UsageError
from divergence.ops.allowed import Refusal, asked_for
from divergence.ops.calls import RecordedCall, operand_values, recorded_calls, replayable_pass
from divergence.ops.execute import execute_ports
from divergence.recording.engines.checkpoint import Weights
from divergence.recording.machine.determinism import Determinism, deterministic_settings
from divergence.recording.machine.environment import resolve_device
from divergence.recording.new_run import check_output, provenance
from divergence.recording.request import taken_from
from divergence.recording.widening import Widening
from divergence.recording.wishes import plain_wishes
from divergence.run.reader import Run
from divergence.run.schema.manifest import Manifest, Plan
from divergence.run.storage.location import location_of
from divergence.run.trust import recorded_seed
from divergence.run.writing.writer import CapturedTensor, RunWriter
from divergence.words import Progress, silent

__all__ = ["replay"]

_SHOWN = 3  # particulars named behind a reason


def replay(
    run: str | Path | Run,
    *,
    out: str | Path,
    sites: Sequence[str] = (),
    device: str = "auto",
    model: str | Path | None = None,
    truth: bool = False,
    replayed_pass: str | None = None,
    trust_remote_code: bool = False,
    operators: Sequence[str] = (),
    label: str | None = None,
    force: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run the recorded operators of ``run`` again and record them in the directory ``out``.

    ``sites``: patterns of operator sites; all without. ``model``: where this machine has the
    model, for weights that were recorded by digest alone. ``truth``: in float64, on the CPU
    unless a device is named. ``replayed_pass``: the pass whose operators are run; the anchored one
    where it holds any, else the free one. ``operators``: namespaces of operators that may be run
    beside torch's, transformers' and the device's own.

    Raises UsageError for a run without operators and for sites that it does not hold,
    RunFormatError, ModelError (of ``model``), RunExistsError and RunWriteError. Whatever
    interrupts it, a readable run is left behind.
    """
    given = plain_wishes(
        sites=sites, device=device, trust_remote_code=trust_remote_code, label=label, force=force,
        command=command,
    )  # fmt: skip
    sites, device = given["sites"], given["device"]
    source = Run.open(run)
    if source.manifest.settings.compute_dtype is not None:
        raise UsageError(
            f"{source.path} was computed in {source.manifest.settings.compute_dtype} itself",
            hint="give the run that was captured in the model's own dtype",
        )
    pass_ = replayable_pass(source, replayed_pass)
    calls = recorded_calls(source, pass_, sites)
    device = resolve_device("cpu" if truth and device == "auto" else device)
    place = location_of(out)
    check_output(place, force=force, like=source)
    weights = None
    if model is not None:
        weights = Weights(str(model), source.manifest, trust_remote_code=trust_remote_code)
    settings = source.manifest.settings
    on_progress: Progress = progress or silent
    seed = recorded_seed(source.manifest)
    said = [f"{len(calls)} operators with their recorded inputs", f"seed {seed}"]
    on_progress("taken", 0, None, taken_from(source.path, said))
    with deterministic_settings(
        device.partition(":")[0], seed=seed, enabled=settings.deterministic
    ) as determinism:
        manifest = _manifest(
            source, pass_, sites, device, determinism,
            truth=truth, label=label, command=command,
        )  # fmt: skip
        with RunWriter(place, manifest, force=force) as writer:
            skipped = manifest.plan.skipped_operators
            details: dict[str, list[str]] = defaultdict(list)
            for number, call in enumerate(calls):
                on_progress("replay", number, len(calls), call.path)
                try:
                    _run_one(
                        source, call, weights, writer, device, asked_for(operators, device),
                        truth=truth,
                    )  # fmt: skip
                except Refusal as refusal:
                    skipped[refusal.reason] = skipped.get(refusal.reason, 0) + 1
                    details[refusal.reason] += (
                        [refusal.detail] if refusal.detail is not None else []
                    )
            determinism.note_in(manifest.settings)
            lines = _skipped_lines(skipped, details)
            for text in lines:
                on_progress("note", 0, None, text)
            if sum(skipped.values()) == len(calls):
                raise UsageError(
                    f"none of the {len(calls)} operators could be run again",
                    where=lines[0],
                    hint="give --model PATH, or another --device",
                )
            on_progress("replay", len(calls), len(calls), "")
    return Run.open(place)


def _skipped_lines(counts: Mapping[str, int], details: Mapping[str, Sequence[str]]) -> list[str]:
    """What was left out: one line a reason, with the first few particulars."""
    lines = []
    for reason, num in counts.items():
        named = list(dict.fromkeys(details[reason]))
        text = f": {', '.join(named[:_SHOWN])}" if named else ""
        if len(named) > _SHOWN:
            text += f" and {len(named) - _SHOWN} more"
        calls = "operator call was" if num == 1 else "operator calls were"
        lines.append(f"{num} {calls} not run again: {reason}{text}")
    return lines


def _run_one(
    source: Run,
    call: RecordedCall,
    weights: Weights | None,
    writer: RunWriter,
    device: str,
    namespaces: frozenset[str],
    *,
    truth: bool,
) -> None:
    """One operator: its results go to the writer, and nothing of it is kept."""
    if call.first.rank:
        raise Refusal("it was recorded by another process of a distributed run")
    wide = call.first.pass_ == "escalated" and not truth  # as that pass ran it
    with Widening(torch.float32) if wide else contextlib.nullcontext():
        results = execute_ports(
            call.call,
            operand_values(source, call, weights),
            device=device,
            compute_dtype=torch.float64 if truth else None,
            aligned=source.manifest.environment.device_type != device.partition(":")[0],
            namespaces=namespaces,
        )
    missing = sorted(set(call.results) - set(results))
    if missing:
        raise Refusal("it returned other results than were recorded", detail=call.path)
    for port, record in call.results.items():
        writer.put(
            CapturedTensor(results[port]),
            pass_="replayed",
            sample=record.sample,
            step=record.step,
            site=record.site,
            order=record.order,
            positions=record.positions,
            call=record.call,
        )


def _manifest(
    source: Run,
    pass_: str,
    sites: Sequence[str],
    device: str,
    determinism: Determinism,
    *,
    truth: bool,
    label: str | None,
    command: str | None,
) -> Manifest:
    """The source's model and tokens; this machine's environment and switches."""
    theirs = source.manifest
    settings: dict[str, Any] = {
        "device": device,
        "device_map": None,
        "switches": determinism.switches,
        "nondeterministic_warnings": [],
        "cpu_fallbacks": [],
        "compute_dtype": "float64" if truth else None,
    }
    return Manifest(
        **provenance(
            device, command=command, like=theirs,
            label=label or ("float64 truth" if truth else None),
        ),
        model=theirs.model,
        tokens=theirs.tokens,
        settings=msgspec.structs.replace(theirs.settings, **settings),
        arithmetic=[] if truth else quick_facts(device),
        plan=Plan(
            passes=["replayed"],
            sites=list(sites) or theirs.plan.sites,
            steps=theirs.plan.steps,
            positions=theirs.plan.positions,
            anchored_to=theirs.id,
            replayed_pass=pass_,
            modules=theirs.plan.modules,
        ),
    )  # fmt: skip

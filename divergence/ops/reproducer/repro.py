"""repro(): one recorded operator as a folder that runs anywhere, for a vendor's bug tracker.

    repro.py               runs it and prints how far the result is off: torch and safetensors alone
    inputs.safetensors     its inputs, bit by bit
    expected.safetensors   what the run recorded
    truth.safetensors      the same in float64
    report.md              the text of a bug report

The script lays the inputs out in memory as they lay, sets the switches that the run's machine
took, and needs neither this package nor the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from divergence.errors import RunExistsError, RunWriteError, UsageError
from divergence.ops.allowed import Refusal, Unsafe, asked_for
from divergence.ops.calls import RecordedCall, operand_values, recorded_calls, replayable_pass
from divergence.ops.execute import RANDOM, UNINITIALISED, execute_ports
from divergence.ops.reproducer.bug_report import RunSide, code_span, report_text, title_of
from divergence.ops.reproducer.differences import Difference, difference, store_error, what_differs
from divergence.ops.reproducer.script import operand_names, portable, portable_truth, script_text
from divergence.output import write_output
from divergence.recording.engines.checkpoint import Weights
from divergence.recording.machine.environment import resolve_device
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.schema.record import Record
from divergence.run.schema.site import did_you_mean, is_operator_site, module_of, natural_key
from divergence.run.storage.location import folder_of
from divergence.words import Progress, silent

__all__ = ["FILES", "Reproducer", "repro"]

FILES = ("repro.py", "inputs.safetensors", "expected.safetensors", "truth.safetensors", "report.md")
"""All that a reproducer's folder holds."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducer:
    """What was written. ``from_truth`` and ``against``: by port, of this run's result from the
    truth, and of the other run's from this one's; ``against`` is empty without another run."""

    path: Path
    title: str
    site: str
    operator: str
    sample: int
    step: int
    files: tuple[str, ...]
    from_truth: dict[str, Difference | None]
    against: dict[str, Difference | None]
    notes: tuple[str, ...] = ()


def repro(
    run: str | Path | Run,
    *,
    site: str,
    out: str | Path,
    truth: str | Path | Run | None = None,
    against: str | Path | Run | None = None,
    sample: int | None = None,
    step: int | None = None,
    model: str | Path | None = None,
    trust_remote_code: bool = False,
    operators: Sequence[str] = (),
    called: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> Reproducer:
    """Write the operator at ``site`` of ``run`` as a reproducer into the directory ``out``.

    ``against``: a run of the other machine, best a replay of ``run``; its figures stand beside
    this run's. ``truth``: a float64 replay of ``run``; else it is computed here. ``sample``,
    ``step``: which call; by default the one that differs most from ``against``, else the first.
    ``model``, ``operators``: as in ``replay``. ``called``: for the title, what the call is given
    that the other side's is not, where that is the fault.

    Raises UsageError for a site that is no operator's or not there, for operators that cannot run
    alone, for runs that do not belong together and where ``against`` was given other inputs or
    scalars, RunFormatError, ModelError, RunExistsError and
    RunWriteError.
    """
    source, other, true_run = (
        None if given is None else Run.open(given) for given in (run, against, truth)
    )
    assert source is not None
    pass_ = replayable_pass(source)
    calls = _calls_at(source, pass_, site, sample=sample, step=step)
    if true_run is not None:
        _check_truth(true_run, source, pass_)
    out = folder_of(out)
    _check_folder(out, force=force)
    call = calls[0] if other is None else _worst(source, other, calls)
    weights = None
    if model is not None:
        weights = Weights(str(model), source.manifest, trust_remote_code=trust_remote_code)
    (progress or silent)("repro", 0, None, call.path)
    notes: list[str] = []
    asked = asked_for(operators, resolve_device("auto"))
    try:
        operands = operand_values(source, call, weights)
        expected = {port: source.read(record) for port, record in call.results.items()}
        true, made_by = _truth(true_run, call, operands, notes, asked)
        sides = [_side(source, expected, true, expected)]
        if other is not None:
            sides.append(_other_side(source, other, call, operands, expected, true))
        sides = _told_apart(sides, source, other)
        stores = {port: store_error(true[port], expected[port].dtype) for port in true}
        title = title_of(call.call, sides, stores, called=called)
        device = (other or source).manifest.environment.device_type
        text = script_text(
            call.call, source.manifest, expected,
            site=call.first.site, title=title, device=device, has_truth=bool(true),
        )  # fmt: skip
    except Refusal as refusal:
        raise UsageError(
            f"{call.path} cannot be run alone: {refusal.reason}",
            where=refusal.detail,
            hint="choose another operator, or give --model PATH for its weights",
        ) from refusal
    report = report_text(
        call.call, sides, stores,
        site=call.first.site,
        where=f"{pass_} pass, sample {call.first.sample}, step {call.first.step}",
        truth=made_by, called=called,
    )  # fmt: skip
    inputs = dict(zip(operand_names(call.call), operands, strict=True))
    files = _write(out, text, report, inputs, expected, true)
    return Reproducer(
        path=out, title=title, site=call.first.site, operator=call.call.operator,
        sample=call.first.sample, step=call.first.step, files=files,
        from_truth=dict(sides[0].from_truth),
        against=dict(sides[1].from_first) if other is not None else {},
        notes=tuple(notes),
    )  # fmt: skip


def _calls_at(
    run: Run, pass_: str, site: str, *, sample: int | None, step: int | None
) -> list[RecordedCall]:
    """The calls of one site, in the order of capture. Raises UsageError with what is there."""
    calls = recorded_calls(run, pass_)
    path = site.partition(":")[0]
    at_site = [call for call in calls if call.path == path]
    if not at_site:
        raise _no_operator(run, site, calls)
    chosen = [
        call
        for call in at_site
        if sample in (None, call.first.sample) and step in (None, call.first.step)
    ]
    if not chosen:
        there = ", ".join(f"{call.first.sample}/{call.first.step}" for call in at_site[:8])
        raise UsageError(
            f"{path} was not recorded in sample {sample}, step {step}"
            if None not in (sample, step)
            else f"{path} was not recorded there",
            hint=f"sample/step with it: {there}",
        )
    return chosen


def _no_operator(run: Run, site: str, calls: list[RecordedCall]) -> UsageError:
    paths = sorted({call.path for call in calls}, key=natural_key)
    if not is_operator_site(site):
        module = module_of(site)
        inside = [p for p in paths if module_of(p) == module]
        inside = inside or [p for p in paths if module_of(p).startswith(module + ".")]
        if inside:
            return UsageError(
                f"{site} is a module, not an operator",
                hint=f"its operators are {', '.join(f'{p}:out' for p in inside[:6])}"
                + (f" and {len(inside) - 6} more" if len(inside) > 6 else ""),
            )
    return UsageError(
        f"no operator at {site} in {run.path}",
        hint=did_you_mean(site, [f"{path}:out" for path in paths])
        or f"`{command_line('inspect', run.path, v=True)}` lists the sites",
    )


def _check_truth(truth: Run, source: Run, pass_: str) -> None:
    plan = truth.manifest.plan
    belongs = plan.anchored_to == source.manifest.id and plan.replayed_pass == pass_
    if truth.manifest.settings.compute_dtype != "float64" or not belongs:
        raise UsageError(
            f"{truth.path} is no float64 replay of {source.path}",
            hint=command_line("replay", source.path, o="TRUTH", truth=True)
            + "; or leave it out, and it is computed here",
        )


def _check_folder(out: Path, *, force: bool) -> None:
    """Only an empty or absent directory is written to, or with ``force`` a reproducer's."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunExistsError(f"{out} exists and is not a directory")
    try:
        names = {entry.name for entry in out.iterdir()} if out.exists() else set()
    except OSError as error:
        raise RunWriteError(f"{out} cannot be used: {error.strerror}") from error
    if names and not (force and names <= set(FILES)):
        other = sorted(names - set(FILES))
        raise RunExistsError(
            f"{out} exists already" if not (force and other) else f"{out} holds {other[0]}",
            hint="choose another directory with -o"
            + ("" if force else ", or pass --force to replace a reproducer"),
        )


def _truth(
    true_run: Run | None, call_alone: RecordedCall, operands: list[torch.Tensor],
    notes: list[str], asked: frozenset[str],
) -> tuple[dict[str, torch.Tensor], str | None]:  # fmt: skip
    """The right results by port and what computed them; empty where that cannot be had.

    The operator is run here in any case: what is not safe to run comes into no script.
    """
    try:
        results = execute_ports(
            call_alone.call, operands, device="cpu", compute_dtype=torch.float64, namespaces=asked
        )
    except Refusal as refusal:
        if isinstance(refusal, Unsafe) or refusal.reason in (
            RANDOM,
            UNINITIALISED,
            call_alone.call.note,
        ):
            raise  # no machine's result would be the right one
        results, why = None, refusal.reason
    if true_run is not None:
        records = {
            port: _find(true_run, "replayed", record) for port, record in call_alone.results.items()
        }
        held = {
            port: true_run.read(record) for port, record in records.items() if record is not None
        }
        if held:
            return (
                held,
                "computed by divergence "
                f"{code_span(true_run.manifest.tool_version)}, in a run of its own",
            )
        notes.append(f"{true_run.path} does not hold this operator: the truth was computed here")
    if results is None:
        notes.append(f"no truth: {why}")
        return {}, None
    kept = {port: results[port] for port in call_alone.results if port in results}
    return kept, f"computed with torch {torch.__version__} on a CPU"


def _find(run: Run, pass_: str, record: Record) -> Record | None:
    return run.find((pass_, record.sample, record.step, record.site))


def _pass_of(other: Run, source: Run, pass_: str) -> str:
    """The pass of the other run that holds the partner's records."""
    plan = other.manifest.plan
    if plan.anchored_to == source.manifest.id:
        return "replayed" if plan.replayed_pass is not None else "anchored"
    return "replayed" if plan.replayed_pass is not None else pass_


def _worst(source: Run, other: Run, calls: list[RecordedCall]) -> RecordedCall:
    """The call whose first result differs most between the two runs."""
    pass_ = _pass_of(other, source, calls[0].first.pass_)
    best: tuple[float, RecordedCall] | None = None
    for call in calls:
        record = _find(other, pass_, call.first)
        if record is None:
            continue
        apart = difference(other.read(record), source.read(call.first))
        size = float("inf") if apart is None else apart.rel_l2
        size = float("inf") if size != size else size
        if best is None or size > best[0]:
            best = size, call
    if best is None:
        paths = {r.site.partition(":")[0] for r in other.records if r.pass_ == pass_}
        raise UsageError(
            f"{other.path} does not hold {calls[0].path}",
            hint=did_you_mean(calls[0].path, paths)
            or f"{command_line('replay', source.path, o='OTHER')}, on the other machine",
        )
    return best[1]


def _side(source: Run, results: Tensors, true: Tensors, first: Tensors) -> RunSide:
    return RunSide(
        label=source.manifest.environment.label,
        manifest=source.manifest,
        from_truth={
            port: difference(tensor, true[port]) if port in true else None
            for port, tensor in results.items()
        },
        from_first={port: difference(tensor, first[port]) for port, tensor in results.items()},
    )


def _told_apart(sides: list[RunSide], *runs: Run | None) -> list[RunSide]:
    """Two machines of one name are told apart by the names of their runs."""
    if len({side.label for side in sides}) == len(sides):
        return sides
    names = [run.path.name for run in runs if run is not None]
    return [
        replace(side, label=f"{side.label} [{name}]")
        for side, name in zip(sides, names, strict=True)
    ]


def _other_side(
    source: Run, other: Run, call: RecordedCall, operands: list[torch.Tensor], expected: Tensors,
    true: Tensors,
) -> RunSide:  # fmt: skip
    """The other run's results at the same call, given the same. Raises UsageError otherwise."""
    pass_ = _pass_of(other, source, call.first.pass_)
    results: dict[str, Any] = {}
    for port, record in call.results.items():
        other_record = _find(other, pass_, record)
        if other_record is not None:
            results[port] = other.read(other_record)
    if other.manifest.plan.anchored_to != source.manifest.id or pass_ != "replayed":
        _check_inputs(source, other, pass_, call, operands)
    return _side(other, results, true, expected)


def _check_inputs(
    source: Run, other: Run, pass_: str, call: RecordedCall, operands: list[torch.Tensor]
) -> None:
    """Refuse a pair whose inputs or scalars are not shown to be equal: of other inputs the other
    machine's result is no fault of its operator."""
    first = call.first
    theirs = [c for c in recorded_calls(other, pass_) if c.path == call.path
              and (c.first.sample, c.first.step) == (first.sample, first.step)]  # fmt: skip
    differs = "its call was not recorded there"
    if theirs:
        difference = what_differs(call, operands, other, theirs[0])
        if difference is None:
            return
        differs = difference
    raise UsageError(
        f"inputs differ at {call.path}: this reproducer would blame the operator for what it was "
        "given",
        where=f"{other.path}, {pass_} pass, sample {first.sample}, step {first.step}: {differs}",
        hint=f"{command_line('replay', source.path, o='OTHER')}, on the other machine, "
        "gives its operator these inputs; then --against OTHER",
    )


def _write(
    out: Path, script: str, report: str, inputs: Tensors, expected: Tensors, true: Tensors
) -> tuple[str, ...]:
    from safetensors.torch import save

    saved = {
        "inputs.safetensors": {name: portable(tensor) for name, tensor in inputs.items()},
        "expected.safetensors": {port: portable(tensor) for port, tensor in expected.items()},
        "truth.safetensors": {port: portable_truth(tensor) for port, tensor in true.items()},
    }
    files: dict[str, bytes | str] = {
        name: save(tensors)
        for name, tensors in saved.items()
        if tensors or name != "truth.safetensors"
    }
    files |= {"repro.py": script, "report.md": report}
    for name in FILES:
        with contextlib.suppress(OSError):
            (out / name).unlink()
    for name, content in files.items():
        write_output(content, out / name, what="reproducer", error=RunWriteError, make_folder=True)
    return tuple(name for name in FILES if name in files)

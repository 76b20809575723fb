"""`capture` and `truth` of an operator suite: what they take, and who does it.

A suite is run like a model, ``divergence capture suite:llm -o RUN``, and repeated like one. It has
no tokens, no weights and no modules, so the options about those are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from divergence.errors import UsageError
from divergence.recording.target import check_output
from divergence.run.reader import Run
from divergence.run.schema.manifest import SUITE
from divergence.run.storage.location import location_of
from divergence.run.writing.buffer import DEFAULT_BUFFER_BYTES

if TYPE_CHECKING:
    from divergence.recording.planned import DryRun

__all__ = ["capture_suite", "opened", "plan_suite", "truth_of_suite", "wants_suite"]


_MEANT_FOR_MODELS: dict[str, Any] = {
    "task": "auto", "revision": None, "dtype": None, "device_map": None,
    "attn_implementation": None, "trust_remote_code": False, "prompts": (), "prompts_file": None,
    "chat": False, "batch": None, "max_new_tokens": None, "steps": None, "positions": None,
    "anchor": True, "escalate": False, "whole": False, "weights": False, "substitutes": None,
    "plants": (), "store": None, "only_changed": False, "mesh": None,
    "buffer": DEFAULT_BUFFER_BYTES, "prepare": None,
}  # fmt: skip


def opened(run: str | Path | Run | None) -> Run | None:
    """The run to be repeated, opened once."""
    return run if run is None or isinstance(run, Run) else Run.open(run)


def wants_suite(model: str | Path | None, like: Run | None, impl: Any = ()) -> bool:
    """Is a suite meant? Raises UsageError for ``impl`` with a model, and for another model with
    ``like`` of a suite."""
    recorded = like is not None and _is_suite(like)
    if like is not None and recorded and model is not None:
        raise UsageError(
            f"{like.path} was made of {like.manifest.model.source}, which needs no model",
            hint="leave out --model",
        )
    suite = recorded or (like is None and str(model or "").startswith(SUITE))
    if impl and not suite:
        raise UsageError(
            "--impl chooses implementations of a suite's operators",
            hint="divergence capture suite:llm -o RUN --impl NAME",
        )
    return suite


def capture_suite(
    model: str | Path | None, *, like: Run | None, impl: Any, out: str | Path, **options: Any
) -> Run:
    """Capture a suite. ``options``: those of ``capture``."""
    from divergence.ops.suite import capturing

    _refuse(options)
    check_output(location_of(out), force=options["force"], like=like)
    kept = {name: value for name, value in options.items() if name not in _MEANT_FOR_MODELS}
    suite = None if model is None else str(model).removeprefix(SUITE)
    return capturing.capture_suite(suite, like=like, impl=impl, out=out, **kept)


def truth_of_suite(run: Run, *, out: str | Path, device: str, **options: Any) -> Run:
    """The truth of a suite's run."""
    from divergence.ops.suite import capturing

    sites = options.pop("sites")
    model = options.pop("model")
    _refuse({**options, "model": model, "sites": tuple(sites)})
    if device != "cpu":
        raise UsageError(
            f"--device {device}: a suite's truth is computed on the CPU", hint="leave it out"
        )
    check_output(location_of(out), force=options["force"], like=run)
    kept = {name: value for name, value in options.items() if name not in _MEANT_FOR_MODELS}
    return capturing.truth_of_suite(run, out=out, **kept)


def plan_suite(model: str | Path | None, *, like: Run | None, **options: Any) -> DryRun:
    """The cases that a capture would run, with the bytes of their inputs."""
    from divergence.ops.suite import capturing
    from divergence.recording.planned import DryRun, PlannedSite

    _refuse(options)
    suite = None if model is None else str(model).removeprefix(SUITE)
    rows = [
        PlannedSite(
            site=case.path, role=case.operator, shape=case.shape, dtype=case.dtype,
            bytes_prefill=case.num_bytes, bytes_per_step=0, num_steps=1, bytes=case.num_bytes,
        )
        for case in capturing.plan_cases(suite, like=like, sites=options.get("sites") or ())
    ]  # fmt: skip
    return DryRun(
        model=str(model or ("" if like is None else like.manifest.model.source)),
        rows=rows,
        num_sites=len(rows),
        num_prompts=0,
        num_prompt_tokens=0,
        num_steps=1,
        passes=["free" if like is None else "replayed"],
        total_bytes=sum(row.bytes for row in rows),
        notes=["shapes and sizes are of the inputs; equal ones are stored once"],
    )


def _is_suite(run: Run) -> bool:
    model = run.manifest.model
    return model.task == "operators" and model.source.startswith(SUITE)


def _refuse(options: dict[str, Any]) -> None:
    """Options that mean something to a model only. ``sites`` choose cases, but not of a truth,
    which has ``model`` among its options."""
    usual = {**_MEANT_FOR_MODELS, "model": None}
    if "model" in options:
        usual["sites"] = ()
    for name, value in options.items():
        nothing: tuple[object, ...] = (usual.get(name), None, (), [], {})
        if name not in usual or value in nothing or (value is False and name != "anchor"):
            continue
        given = "--no-anchor" if name == "anchor" else f"--{name.replace('_', '-')}"
        raise UsageError(
            f"{given} means nothing to a suite of operators",
            hint="--impl, --sites, --device, --repeat and --label do",
        )

"""`capture` and `truth` of an operator suite: what they take, and who does it.

A suite is run like a model, ``divergence capture suite:llm -o RUN``, and repeated like one. It has
no tokens, no weights and no modules, so the options about those are refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from divergence.errors import UsageError
from divergence.options.commands import CaptureOptions, Options, TruthOptions, given_fields
from divergence.recording.new_run import SuiteRequest, check_output
from divergence.run.command import command_line
from divergence.run.location import location_of
from divergence.run.manifest import COLLECTIVES, SUITE
from divergence.run.reader import Run
from divergence.words import Progress, silent

_OF_COLLECTIVES = ("--plant", "--ranks", "--link-rate")
"""Options of a suite that mean something to collectives alone."""


def of_collectives(model: str | Path | None, like: Run | None) -> bool:
    """Is the suite the one of collectives, which several processes run?"""
    return (str(model) if like is None else like.manifest.model.source) == COLLECTIVES


def wants_suite(model: str | Path | None, like: Run | None, impl: Any = ()) -> bool:
    """Is a suite meant? Raises UsageError for ``impl`` with a model, and for another model with
    ``like`` of a suite."""
    if like is None:
        suite = str(model or "").startswith(SUITE)
    else:
        recorded = like.manifest.model
        suite = recorded.task == "operators" and recorded.source.startswith(SUITE)
        if suite and model is not None:
            raise UsageError(
                f"{like.path} was made of {recorded.source}, which needs no model",
                hint="leave out --model",
            )
    if impl and not suite:
        raise UsageError(
            "--impl chooses implementations of a suite's operators",
            hint="divergence capture suite:llm -o RUN --impl NAME",
        )
    return suite


def capture_suite(model: str | Path | None, request: SuiteRequest, prepare: object = None) -> Run:
    """Capture a suite."""
    like = request.like
    collectives = of_collectives(model, like)
    refuse_options(request.options, collectives=collectives)
    if prepare is not None:
        raise _meaningless("prepare")
    # of ranks the others find what the first has made
    if not collectives or os.environ.get("RANK", "0") == "0":
        check_output(location_of(request.out), force=request.force, like=like)
    if collectives:
        from divergence.collectives.capturing import capture_collectives

        return capture_collectives(request)
    from divergence.ops.suite import capturing

    return capturing.capture_suite(str(model).removeprefix(SUITE), request)


def truth_of_suite(
    run: Run, *, options: TruthOptions, out: str | Path, force: bool, command: str | None,
    progress: Progress | None,
) -> Run:  # fmt: skip
    """The truth of a suite's run."""
    from divergence.ops.suite import capturing

    refuse_options(options)
    if of_collectives(None, run):
        raise UsageError(
            f"{run.path} needs no truth: each collective is held to its definition",
            hint=command_line("compare", run.path),
        )
    if options.device != "cpu":
        raise UsageError(
            f"--device {options.device}: a suite's truth is computed on the CPU",
            hint="leave it out",
        )
    check_output(location_of(out), force=force, like=run)
    label = options.label or "float64 truth"
    chosen = CaptureOptions(label=label, seed=0, deterministic=True)
    return capturing.truth_of_suite(run, SuiteRequest(
        out=out, like=run, options=chosen, force=force, command=command,
        progress=progress or silent,
    ))  # fmt: skip


def refuse_options(options: Options, *, collectives: bool = False) -> None:
    """Raise UsageError for an option that means something to a model only, or to ``collectives``
    only."""
    for field in given_fields(options):
        name = field.option.names[0]
        if not field.option.suite or (name in _OF_COLLECTIVES and not collectives):
            raise _meaningless(name)


def refuse_of_collectives(options: CaptureOptions, *, planned: bool = False) -> None:
    """Raise UsageError for what only the suite of collectives can be told. ``planned``: the traffic
    of a training step is planned, for which a link has a rate, too."""
    for name, value in (("--ranks", options.ranks), ("--link-rate", options.link_rate)):
        if value is not None and not (planned and name == "--link-rate"):
            raise UsageError(
                f"{name} belongs to {COLLECTIVES}",
                hint="of a model: torchrun --nproc-per-node N -m divergence capture MODEL --mesh tp"
                if name == "--ranks"
                else "leave it out",
            )


def _meaningless(name: str) -> UsageError:
    also = f"; it belongs to {COLLECTIVES}" if name in _OF_COLLECTIVES else ""
    return UsageError(
        f"{name} means nothing to a suite of operators{also}",
        hint="--impl, --sites, --device, --repeat and --label do",
    )

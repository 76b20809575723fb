"""`divergence capture` and `truth`: runs of a model."""

from __future__ import annotations

from typing import Annotated, Any

from divergence.cli.answers import answer_json, progress_bars, show_captured, show_document
from divergence.cli.signature import Added, settings
from divergence.domain import sources
from divergence.errors import UsageError
from divergence.options.commands import (
    FORCE,
    OUT,
    RECORDED,
    REPEATING,
    CaptureOptions,
    Output,
    TruthOptions,
)
from divergence.options.option import fields_of, option
from divergence.run.command import quoted
from divergence.run.manifest import SUITE


def capture(
    *,
    model: str | None = option("MODEL", "Model, or suite:NAME; not with --like."),
    out: str | None = OUT,
    options: Annotated[dict[str, Any], CaptureOptions],
    added: Added,
    dry_run: bool = option(
        "--dry-run",
        "List sites, shapes and bytes; write nothing.",
        RECORDED,
        after="whole",
        default=False,
    ),
    like: str | None = option(
        "--like RUN",
        "Do again what RUN did: its tokens, sites and settings, on this machine.",
        REPEATING,
        after="max_new_tokens",
    ),
    model_copy: str | None = option(
        "--model PATH",
        "With --like: where this machine has the model. Of what is asked in its place: its name.",
        REPEATING,
        after="like",
    ),
    force: bool = FORCE,
    output: Output,
    command: str | None,
) -> None:
    """Makes a run: a directory that another machine can do again with --like, and that
    compare, check and inspect read without the model.

    Examples:
    divergence capture Qwen/Qwen3-0.6B -o a --prompt "The capital of France is"
    divergence capture --like a -o b                            # the other machine
    divergence capture ./model -o a --sites attention --steps 0-4
    divergence capture ./model -o a --sites 'model.layers.*.mlp:*' --dry-run
    divergence capture ./model -o a --sites modules --store sketch     # 1-2% of the bytes
    divergence capture ./model -o a --whole                     # then: divergence compare a
    divergence capture ./model -o a --truth full                # float64 of every forward
    divergence capture ./model --dry-run --train --mesh fsdp=8,tp=2 --link-rate 50GB/s   # memory
    divergence capture --like a -o b-ops --sites ops@model.layers.17   # one block's operators
    torchrun --nproc-per-node 2 -m divergence capture ./model -o a --mesh tp   # on two devices
    divergence capture --like a -o planted --plant 'model.layers.3.mlp:out=scale:1.05'
    """
    sourced = any(options.get(source.option) is not None for source in sources())
    if sourced and dry_run:
        raise UsageError("--dry-run lists a model's sites, and no model runs here")
    if sourced:
        model, model_copy = None, model if model_copy is None else model_copy
    elif like is None and model is None:
        raise UsageError(
            "there is no MODEL", hint="divergence capture MODEL -o RUN, or --like RUN -o OTHER"
        )
    if like is not None and model is not None:
        raise UsageError(
            "with --like the model is the recorded one",
            hint=f"if this machine has it elsewhere: --model {quoted(model)}",
        )
    if like is None:
        if model_copy and not sourced:
            raise UsageError("--model needs --like", hint="name the model as the argument")
        for field in fields_of(CaptureOptions):  # what repeats something, where nothing is repeated
            for way in field.options if field.name in options else ():
                if way.needs_like and options[field.name] == way.turns_on:
                    raise UsageError(
                        f"{way.names[0]} needs --like",
                        hint="divergence capture --like RUN -o OTHER",
                    )
    plan_options = {name: value for given in added.values() for name, value in given.items()}
    if plan_options and not dry_run:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in plan_options)
        raise UsageError(f"{words}: nothing is planned here", hint="--dry-run")
    if out is None and not dry_run:
        raise UsageError("there is no directory to write to", hint="-o RUN, or --dry-run")

    machine_alone = like is not None or (model is not None and model.startswith(SUITE))
    values = {**settings("capture", machine_alone=machine_alone), **options}
    if sourced:  # what a file says of models is not meant
        values = {key: values[key] for key in ("label", "seed") if key in values} | options
    values |= {"out": out, "like": like, "command": command}
    if force:
        values["force"] = True

    from divergence.recording.api import make_run
    from divergence.recording.dry_run import plan_capture

    place = model_copy if sourced or like is not None else model
    with progress_bars(quiet=output.silent) as progress:
        if dry_run:
            plan = plan_capture(place, progress=progress, **values, **plan_options)
        else:
            run = make_run(place, progress=progress, **values)
    if not dry_run:
        show_captured(run, output, like=like)
        return
    import msgspec

    from divergence.report.capturing import plan_document

    built = msgspec.to_builtins(plan)
    built |= built.pop("parts")
    show_document(plan_document(built), output, json=lambda: answer_json(dry_run=built))


def truth(
    *,
    run: str = option("RUN", "The run to repeat.", default=...),
    out: str | None = option("--out -o TRUTH", "Directory, archive or URL; needed."),
    options: Annotated[dict[str, Any], TruthOptions],
    force: bool = FORCE,
    output: Output,
    command: str | None,
) -> None:
    """Makes a run of its own, the truth, for compare --truth: of more forwards than the run carries
    itself (capture --truth), of its free run too, or of an older run. No accelerator is needed.

    Examples:
    divergence truth a -o truth
    divergence compare a b --truth truth                # which side is wrong, and by how much
    divergence truth a -o truth --model /data/llama # where this machine has the model

    Every operator is computed in float64, the float32 casts inside models included. Weights
    are rounded to the run's dtype first. Memory beside the model: about one operator's weights.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o TRUTH")

    from divergence.recording.api import truth as call

    with progress_bars(quiet=output.silent) as progress:
        result = call(run, out=out, force=force, command=command, progress=progress, **options)
    show_captured(result, output, like=run)

"""`divergence capture`: make a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from divergence.cli.chosen import capture_defaults, chosen_substitutes, only_with_like
from divergence.cli.made import show_plan, show_run
from divergence.cli.options import (
    ARGUMENTS,
    Buffer,
    DryRun,
    Force,
    Json,
    Label,
    Mesh,
    NoBatch,
    NoProbe,
    OnlyChanged,
    Quiet,
    Store,
    TaskName,
    Verbose,
    Weights,
    Whole,
)
from divergence.cli.progress import progress_bars
from divergence.errors import UsageError
from divergence.run.untrusted.command import quoted, quoted_words

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence capture Qwen/Qwen3-0.6B -o a --prompt "The capital of France is"

  divergence capture --like a -o b                            # the other machine

  divergence capture ./model -o a --sites attention --steps 0-4

  divergence capture ./model -o a --sites 'model.layers.*.mlp:*' --dry-run

  divergence capture ./model -o a --sites modules --store sketch     # 1-2% of the bytes

  divergence capture ./model -o a --whole                     # then: divergence compare a

  divergence capture suite:llm -o a                           # the operators alone, no model

  divergence capture --like a -o b-ops --sites ops@model.layers.17   # one block's operators

  torchrun --nproc-per-node 2 -m divergence capture ./model -o a --mesh tp   # on two devices

  divergence capture --like a -o planted --plant 'model.layers.3.mlp:out=scale:1.05'
"""

MODEL, PROMPTS, RECORDED = "Model", "Prompts", "What is recorded"
REPEATING = "Repeating a run"


def command(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Model, or suite:llm; not with --like.", show_default=False
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="RUN", help="Directory, archive or URL; needed."),
    ] = None,
    task: Annotated[
        TaskName | None,
        typer.Option(
            "--task",
            metavar="TASK",
            help="auto, causal-lm, encoder or encoder-decoder.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REV",
            help="Branch, tag or commit on the hub.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="float32, bfloat16, float16. Default: auto, as the checkpoint says.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="auto, cpu, cuda:0, npu:0, xpu, mps.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            "--device-map",
            metavar="MAP",
            help="Spread the model over devices and disk: auto, balanced, or a JSON file of "
            "module to device (0, cpu, disk).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            "--attn-implementation",
            metavar="NAME",
            help="eager, sdpa, flash_attention_2. Default: eager, or the recorded one.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            metavar="",
            help="Run code that comes with the model.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="A prompt; repeatable.", rich_help_panel=PROMPTS
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="A file of prompts: .txt (one a line), .jsonl or .json.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            metavar="",
            help="Put prompts through the chat template.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch",
            metavar="",
            help="Run all prompts in one padded batch; with --like also those that ran singly.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
    no_batch: NoBatch = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=0,
            help="Tokens to generate: prefill and N - 1 decode steps. Default: 16, or as recorded.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites",
            metavar="SITES",
            help="blocks, modules, a preset (attention, mlp, norms), a glob, re:REGEX, or "
            "ops@MODULE for every operator inside it; repeatable.",
            rich_help_panel=RECORDED,
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="STEPS",
            help="Forwards to record: 0,4-8 or prefill or decode; 0 is the prefill. Default: all.",
            rich_help_panel=RECORDED,
        ),
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            "--positions",
            metavar="TOKENS",
            help="Token positions to record: 0,4-8 or -1 or last:16. Default: all.",
            rich_help_panel=RECORDED,
        ),
    ] = None,
    weights: Weights = False,
    store: Store = None,
    only_changed: OnlyChanged = False,
    substitutes: Annotated[
        list[str] | None,
        typer.Option(
            "--substitute",
            metavar="SITE=RUN",
            help="Put RUN's recorded result in the place of this operator's; repeatable.",
            rich_help_panel=REPEATING,
        ),
    ] = None,
    whole: Whole = False,
    dry_run: DryRun = False,
    no_deterministic: Annotated[
        bool,
        typer.Option(
            "--no-deterministic",
            metavar="",
            help="Leave the determinism switches alone.",
            rich_help_panel=REPEATING,
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of every generator. Default: 0.",
            rich_help_panel=REPEATING,
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            metavar="K",
            min=1,
            help="Run K times and say whether this machine repeats itself. Default: 1.",
            rich_help_panel=REPEATING,
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="Do again what RUN did: its tokens, sites and settings, on this machine.",
            rich_help_panel=REPEATING,
        ),
    ] = None,
    model_copy: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="With --like: where this machine has the model.",
            rich_help_panel=REPEATING,
        ),
    ] = None,
    no_anchor: Annotated[
        bool,
        typer.Option(
            "--no-anchor",
            metavar="",
            help="With --like: leave out the anchored pass.",
            rich_help_panel=REPEATING,
        ),
    ] = False,
    escalate: Annotated[
        bool,
        typer.Option(
            "--escalate",
            metavar="",
            help="With --like: a third pass, anchored and in float32, that sees faults of formula "
            "and data below a 16-bit floor.",
            rich_help_panel=REPEATING,
        ),
    ] = False,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            metavar="[OP=]NAME",
            help="Of a suite: which implementation runs, flash_attn or rms_norm=MODULE:FUNCTION; "
            "repeatable.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    plants: Annotated[
        list[str] | None,
        typer.Option(
            "--plant",
            metavar="SITE=FAULT",
            help="Plant a fault, to see that it is found; repeatable. @sample=2,step=5 behind it: "
            "in that prompt's step alone.",
            rich_help_panel=REPEATING,
        ),
    ] = None,
    label: Label = None,
    mesh: Mesh = None,
    buffer: Buffer = None,
    no_probe: NoProbe = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a model and record what happens at chosen sites.

    Makes a run: a directory that another machine can do again with --like, and that
    compare, check and inspect read without the model.
    """
    if like is None and model is None:
        raise UsageError(
            "there is no MODEL", hint="divergence capture MODEL -o RUN, or --like RUN -o OTHER"
        )
    if like is not None and model is not None:
        raise UsageError(
            "with --like the model is the recorded one",
            hint=f"if this machine has it elsewhere: --model {quoted(model)}",
        )
    if like is None:
        only_with_like({
            "--model": model_copy, "--no-anchor": no_anchor, "--escalate": escalate,
            "--only-changed": only_changed, "--no-batch": no_batch,
        })  # fmt: skip
    if batch and no_batch:
        raise UsageError("--batch and --no-batch cannot be combined", hint="give one of them")
    if out is None and not dry_run:
        raise UsageError("there is no directory to write to", hint="-o RUN, or --dry-run")

    chosen: dict[str, Any] = {
        "task": None if task is None else task.value,
        "revision": revision,
        "dtype": None if dtype == "auto" else dtype,
        "device": device,
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code or None,
        "prompts": prompts or None,
        "prompts_file": prompts_file,
        "chat": chat or None,
        "batch": True if batch else False if no_batch else None,
        "max_new_tokens": max_new_tokens,
        "sites": sites or None,
        "steps": steps,
        "positions": positions,
        "deterministic": False if no_deterministic else None,
        "seed": seed,
        "repeat": repeat,
        "anchor": False if no_anchor else None,
        "escalate": escalate or None,
        "whole": whole or None,
        "weights": weights or None,
        "store": None if store is None else store.value,
        "only_changed": only_changed or None,
        "substitutes": chosen_substitutes(substitutes or []) or None,
        "probe": False if no_probe else None,
        "buffer": buffer,
        "plants": plants or None,
        "impl": impl or None,
        "label": label,
        "mesh": mesh,
        "force": force or None,
    }
    # what is not given is left to the function's own default
    values = {name: value for name, value in chosen.items() if value is not None}
    values = {**capture_defaults(like, model), **values}
    values["out"] = out
    values["like"] = like
    arguments = ctx.meta.get(ARGUMENTS)
    if arguments:
        values["command"] = quoted_words(["divergence", *arguments])

    if dry_run:
        from divergence.recording.api import plan_capture as call
    else:
        from divergence.recording.api import capture as call

    with progress_bars(quiet=quiet or json) as progress:
        result = call(model if like is None else model_copy, progress=progress, **values)
    if dry_run:
        show_plan(result, json=json)
    else:
        show_run(result, like=like, json=json, quiet=quiet)

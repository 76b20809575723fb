"""Options that several commands share, and what they leave in the context."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from divergence.printable import printable_lines

__all__ = [
    "ARGUMENTS",
    "VERBOSE",
    "Buffer",
    "Device",
    "DryRun",
    "FloorRuns",
    "Force",
    "Json",
    "Label",
    "Mesh",
    "Model",
    "ModelOfWeights",
    "NameMap",
    "NoBatch",
    "NoProbe",
    "OnlyChanged",
    "Operators",
    "Quiet",
    "Store",
    "StoreName",
    "TaskName",
    "TrustRemoteCode",
    "Truth",
    "Verbose",
    "Weights",
    "Whole",
    "settings",
    "show",
]

ARGUMENTS = "divergence.arguments"
"""Context key: the command line as it was given."""
VERBOSE = "divergence.verbose"
"""Context key: whether errors print their traceback."""

OUTPUT_PANEL = "Output"
RECORDED_PANEL = "What is recorded"
REPEATING_PANEL = "Repeating a run"


def _note_verbose(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[VERBOSE] = value
    return value


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Print the answer as JSON: stable, versioned, nan and inf as strings.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        metavar="",
        help="Print the answer alone, no progress.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=_note_verbose,
        metavar="",
        help="Print more, and tracebacks with errors.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Replace an existing run.")]
NoBatch = Annotated[
    bool,
    typer.Option(
        "--no-batch",
        metavar="",
        help="With --like: run each prompt by itself, whatever batch it ran in.",
        rich_help_panel=REPEATING_PANEL,
    ),
]
NoProbe = Annotated[
    bool,
    typer.Option(
        "--no-probe",
        metavar="",
        help="Leave out the probe of this machine's arithmetic (a second).",
    ),
]
NameMap = Annotated[
    Path | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help="Name map (TOML) from the first run's module paths to the second's.",
    ),
]
Label = Annotated[
    str | None,
    typer.Option(
        "--label",
        metavar="TEXT",
        help="What to call this machine.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="Under torchrun, how its processes divide the work: tp, fsdp, dp, pp, or several with "
        "their sizes: dp=2,tp=4.",
        rich_help_panel="Model",
    ),
]


class TaskName(enum.StrEnum):
    """What the model is run as."""

    AUTO = "auto"
    CAUSAL_LM = "causal-lm"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"


class StoreName(enum.StrEnum):
    """What is kept of a tensor."""

    FULL = "full"
    SKETCH = "sketch"
    STATS = "stats"
    HASH = "hash"


Store = Annotated[
    StoreName | None,
    typer.Option(
        "--store",
        metavar="MODE",
        help="full: every byte; sketch: 1-2% of them, differences are estimated; stats: "
        "statistics; hash: digests. Default: full, or as recorded.",
        rich_help_panel=RECORDED_PANEL,
    ),
]
Buffer = Annotated[
    str | None,
    typer.Option(
        "--buffer",
        metavar="SIZE",
        help="Host memory that the capture may take beside the model: 64MiB, 2GiB. "
        "Default: 512MiB.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Whole = Annotated[
    bool,
    typer.Option(
        "--whole",
        metavar="",
        help="One more pass: prompt and generated tokens in one forward, to hold the decode "
        "steps against (divergence compare RUN).",
        rich_help_panel=RECORDED_PANEL,
    ),
]
Weights = Annotated[
    bool,
    typer.Option(
        "--weights",
        metavar="",
        help="Store the weights that recorded operators use, so that replay needs no model.",
        rich_help_panel=RECORDED_PANEL,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar="",
        help="List sites, shapes and bytes; write nothing.",
        rich_help_panel=RECORDED_PANEL,
    ),
]
OnlyChanged = Annotated[
    bool,
    typer.Option(
        "--only-changed",
        metavar="",
        help="With --like: store no bytes of tensors that RUN holds bit for bit.",
        rich_help_panel=REPEATING_PANEL,
    ),
]

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help="Where this machine has the model."),
]
ModelOfWeights = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="Where this machine has the model, for weights that the run does not hold.",
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda:0, npu:0, xpu, mps."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", metavar="", help="Run code that comes with the model."),
]
Operators = Annotated[
    list[str] | None,
    typer.Option(
        "--operators",
        metavar="NAMESPACE",
        help="Also run a package's own operators (vllm, flash_attn), on inputs that RUN chose; "
        "repeatable. Default: torch's, transformers' and the device's.",
    ),
]
Truth = Annotated[
    str | None,
    typer.Option(
        "--truth",
        metavar="TRUTH",
        help="The float64 run of `divergence truth`: tells which side is wrong.",
    ),
]
FloorRuns = Annotated[
    list[str] | None,
    typer.Option(
        "--floor",
        metavar="RUN",
        help="A trusted run like the first: what it shows widens the limits; repeatable.",
    ),
]


def settings(section: str) -> Any:
    """One section of the settings; variables that mean nothing are warned about."""
    from divergence.config import ignored_variables, load_settings

    for variable in ignored_variables():
        typer.echo(f"warning: {variable} is no setting of divergence; it is ignored", err=True)
    return getattr(load_settings(), section)


def show(text: str) -> None:
    """One answer in text form, to stdout."""
    from divergence.layout.terminal import write_text

    write_text(printable_lines(text.removesuffix("\n")) + "\n")

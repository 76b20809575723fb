"""`divergence truth`: the truth of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from divergence.cli.made import show_run
from divergence.cli.options import ARGUMENTS, Force, Json, Model, Quiet, TrustRemoteCode, Verbose
from divergence.cli.progress import progress_bars
from divergence.errors import UsageError
from divergence.run.untrusted.command import quoted_words

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence truth a -o truth

  divergence compare a b --truth truth                # which side is wrong, and by how much

  divergence truth a -o truth --model /data/llama # where this machine has the model

Every operator is computed in float64, the float32 casts inside models included. Weights
are rounded to the run's dtype first. Memory beside the model: about one operator's weights.
"""


def command(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run to repeat.")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="TRUTH", help="Directory, archive or URL; needed."),
    ] = None,
    model: Model = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites",
            metavar="SITES",
            help="What is recorded, as in capture; repeatable. Default: what the run recorded.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", metavar="N", help="Fewer forwards. Default: as many as the run has."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="cpu, or a device that has float64."),
    ] = "cpu",
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            "--attn-implementation",
            metavar="NAME",
            help="eager or sdpa. Default: as recorded; eager for fused kernels.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            metavar="TEXT",
            help="What to call it. Default: float64 truth.",
            rich_help_panel="Output",
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Repeat a run in float64: what is right, and how wide rounding is.

    Makes a run of its own, the truth, for compare --truth. No accelerator is needed.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o TRUTH")
    arguments = ctx.meta.get(ARGUMENTS)
    values: dict[str, Any] = {"out": out, "model": model, "device": device, "label": label,
                              "attn_implementation": attn_implementation, "force": force,
                              "sites": sites or (), "max_new_tokens": max_new_tokens,
                              "trust_remote_code": trust_remote_code}  # fmt: skip
    if arguments:
        values["command"] = quoted_words(["divergence", *arguments])

    from divergence.recording.api import truth as call

    with progress_bars(quiet=quiet or json) as progress:
        result = call(run, progress=progress, **values)
    show_run(result, like=run, json=json, quiet=quiet)

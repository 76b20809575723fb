"""`divergence localize`: from the bad block to the bad operator."""

from __future__ import annotations

from typing import Annotated

import typer

from divergence.cli.shell.options import show
from divergence.cli.shell.progress import progress_bars
from divergence.errors import UsageError
from divergence.options.option import Option
from divergence.options.shared import (
    Device,
    Json,
    Model,
    Operators,
    Quiet,
    TrustRemoteCode,
    Verbose,
)

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence localize a b --truth truth -o a-b        # on a machine that has the model

  divergence localize a b -o a-b --model /data/llama  # makes the truth too

  divergence localize a b -o a-b --block model.layers.17

What another machine must make is printed as a command: run it there with DIR copied, or run the
same localize there. It goes on where the other one stopped. The truth is made on A's machine alone.
Exit code 2 if what was captured again does not have the bits of the run it repeats.
"""


def command(
    reference: Annotated[str, Option("A", "The reference run.")],
    candidate: Annotated[str, Option("B", "The candidate run.")],
    out: Annotated[
        str | None, Option("--out -o DIR", "Directory for the runs that are made; needed.")
    ] = None,
    truth: Annotated[
        str | None,
        Option(
            "--truth TRUTH",
            "The float64 run of `divergence truth`, made on A's machine. Default: made in "
            "DIR, there.",
        ),
    ] = None,
    block: Annotated[
        str | None, Option("--block PATH", "Go into this block, whatever the comparison says.")
    ] = None,
    model: Model = None,
    device: Device = "auto",
    here: Annotated[
        str,
        Option(
            "--here SIDE",
            "Whose machine this is: reference, candidate, both, none; auto asks the runs. "
            "What is made must have that run's bits.",
            choices=("auto", "reference", "candidate", "both", "none"),
        ),
    ] = "auto",
    force: Annotated[
        bool, Option("--force", "Replace what DIR holds of another pair of runs.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    operators: Operators = (),
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Go from the block to the operator, and prove it; captures what is missing.

    Compares the runs, captures the block's operators on both sides from equal inputs and in
    float64, names the first operator that is to blame, puts the healthy side's result in its
    place to see that the rest is fine then, and writes a reproducer if it is wrong by itself.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o DIR")
    from divergence.experiments.localization.localize import localize
    from divergence.layout.terminal import print_lines
    from divergence.report.localization import localization_lines

    with progress_bars(quiet=quiet or json) as progress:
        result = localize(
            reference,
            candidate,
            out=out,
            truth=truth,
            block=block,
            model=model,
            device=device,
            here=here,
            force=force,
            trust_remote_code=trust_remote_code,
            operators=operators,
            progress=progress,
        )
    if json:
        show(result.to_json(indent=2))
    else:
        print_lines(localization_lines(result, answer_only=quiet, verbose=verbose))
    # as compare ends; and what does not belong to these runs was not compared
    if result.refused or result.levels[0].verdict == "incomparable":
        raise typer.Exit(2)

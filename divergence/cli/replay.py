"""`divergence replay`: the recorded operators of a run, each alone."""

from __future__ import annotations

from typing import Annotated, Any

from divergence.cli.shell.made import show_run
from divergence.cli.shell.progress import progress_bars
from divergence.errors import UsageError
from divergence.options.option import Option
from divergence.options.replay import ReplayOptions
from divergence.options.shared import Force, Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence replay a -o a2                       # on the other machine; the model is not needed

  divergence replay a -o truth --truth            # each operator in float64: what is right

  divergence compare a a2 --truth truth           # which operator is wrong here

  divergence replay a -o a3 --site 'model.layers.3.mlp/*' --device cuda

The run holds operators where it was captured with --sites ops@MODULE, and their weights with
--weights. What cannot be run alone is left out, counted and said.
"""


def command(
    *,
    run: Annotated[str, Option("RUN", "A run that holds operators.")],
    out: Annotated[
        str | None, Option("--out -o RUN2", "Directory, archive or URL; needed.")
    ] = None,
    options: Annotated[dict[str, Any], ReplayOptions],
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    command: str | None,
) -> None:
    """Run each recorded operator again, alone, on its recorded inputs.

    Makes a run that compare reads like any other. No error is inherited from one operator to the
    next, and no model is needed where the weights were stored.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o RUN2")

    from divergence.ops.replay import replay as call

    with progress_bars(quiet=quiet or json) as progress:
        result = call(run, out=out, force=force, command=command, progress=progress, **options)
    show_run(result, like=run, json=json, quiet=quiet)

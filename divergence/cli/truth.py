"""`divergence truth`: the truth of a run."""

from __future__ import annotations

from typing import Annotated, Any

from divergence.cli.shell.made import show_run
from divergence.cli.shell.progress import progress_bars
from divergence.errors import UsageError
from divergence.options.option import Option
from divergence.options.shared import Force, Json, Quiet, Verbose
from divergence.options.truth import TruthOptions

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
    *,
    run: Annotated[str, Option("RUN", "The run to repeat.")],
    out: Annotated[
        str | None, Option("--out -o TRUTH", "Directory, archive or URL; needed.")
    ] = None,
    options: Annotated[dict[str, Any], TruthOptions],
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    command: str | None,
) -> None:
    """Repeat a run in float64: what is right, and how wide rounding is.

    Makes a run of its own, the truth, for compare --truth. No accelerator is needed.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o TRUTH")

    from divergence.recording.api import truth as call

    with progress_bars(quiet=quiet or json) as progress:
        result = call(run, out=out, force=force, command=command, progress=progress, **options)
    show_run(result, like=run, json=json, quiet=quiet)

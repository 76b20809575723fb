"""`divergence probe`: what this machine's arithmetic does."""

from __future__ import annotations

from typing import Annotated, Any

from divergence.cli.shell.options import show
from divergence.cli.shell.progress import progress_bars
from divergence.errors import UsageError
from divergence.options.probe import ProbeOptions
from divergence.options.shared import Force, Json, Out, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence probe -o here

  divergence probe -o here --quick                    # seconds: what each capture notes

  divergence probe -o here --terms 1024 --svg trees   # the trees as drawings

  divergence compare here there                       # facts that differ, then outputs

Each order of additions is proven by replaying it bit by bit, or marked unverified.
"""


def command(
    *,
    out: Out = None,
    options: Annotated[dict[str, Any], ProbeOptions],
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    command: str | None,
) -> None:
    """Find out from outside what this machine's arithmetic does.

    Makes a run of facts with the inputs and outputs that they rest on: order of additions, width
    of sums, rounding, subnormals, elementary functions, rows alone and in batches.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o RUN")

    import msgspec

    from divergence.arithmetic.api import probe as call
    from divergence.layout.terminal import print_lines
    from divergence.report.arithmetic import probed_lines
    from divergence.report.machine import strict_json

    with progress_bars(quiet=quiet or json) as progress:
        run = call(out=out, force=force, command=command, progress=progress, **options)
    if json:
        manifest = msgspec.to_builtins(run.manifest)
        show(strict_json({"schema_version": 1, "path": str(run.path), "manifest": manifest}))
    elif quiet:
        show(str(run.path))
    else:
        print_lines(probed_lines(str(run.path), run.manifest, verbose=verbose))

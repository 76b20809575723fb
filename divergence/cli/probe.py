"""`divergence probe`: what this machine's arithmetic does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from divergence.cli.options import show
from divergence.cli.progress import progress_bars
from divergence.errors import UsageError
from divergence.options.option import Option
from divergence.options.shared import OUTPUT, Device, Force, Json, Label, Out, Quiet, Verbose

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
    device: Device = "auto",
    quick: Annotated[bool, Option("--quick", "The short form, as every capture makes it.")] = False,
    terms: Annotated[
        list[int] | None,
        Option(
            "--terms N",
            "Length of the sums whose order is looked for, a power of two up to 4096; "
            "repeatable. Default: 64, 1024 and 4096; with --quick 512.",
        ),
    ] = None,
    no_deterministic: Annotated[
        bool,
        Option(
            "--no-deterministic",
            "Probe the machine as it stands; else under the switches that a capture sets.",
        ),
    ] = False,
    svg: Annotated[Path | None, Option("--svg DIR", "Draw each tree there.", OUTPUT)] = None,
    label: Label = None,
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
    from divergence.report.arithmetic import probed_lines
    from divergence.report.machine import strict_json
    from divergence.report.terminal import print_lines

    with progress_bars(quiet=quiet or json) as progress:
        run = call(
            out=out, device=device, quick=quick, terms=terms or (),
            deterministic=not no_deterministic, svg=svg, label=label, force=force,
            command=command, progress=progress,
        )  # fmt: skip
    if json:
        manifest = msgspec.to_builtins(run.manifest)
        show(strict_json({"schema_version": 1, "path": str(run.path), "manifest": manifest}))
    elif quiet:
        show(str(run.path))
    else:
        print_lines(probed_lines(run.path, run.manifest, verbose=verbose))

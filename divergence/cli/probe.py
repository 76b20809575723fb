"""`divergence probe`: what this machine's arithmetic does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from divergence.cli.options import ARGUMENTS, Device, Force, Json, Quiet, Verbose, show
from divergence.cli.progress import progress_bars
from divergence.errors import UsageError
from divergence.run.untrusted.command import quoted_words

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
    ctx: typer.Context,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="RUN", help="Directory, archive or URL; needed."),
    ] = None,
    device: Device = "auto",
    quick: Annotated[
        bool,
        typer.Option("--quick", metavar="", help="The short form, as every capture makes it."),
    ] = False,
    terms: Annotated[
        list[int] | None,
        typer.Option(
            "--terms",
            metavar="N",
            help="Length of the sums whose order is looked for, a power of two up to 4096; "
            "repeatable. Default: 64, 1024 and 4096; with --quick 512.",
        ),
    ] = None,
    no_deterministic: Annotated[
        bool,
        typer.Option(
            "--no-deterministic",
            metavar="",
            help="Probe the machine as it stands; else under the switches that a capture sets.",
        ),
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="DIR", help="Draw each tree there.", rich_help_panel="Output"
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label", metavar="TEXT", help="What to call this machine.", rich_help_panel="Output"
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find out from outside what this machine's arithmetic does.

    Makes a run of facts with the inputs and outputs that they rest on: order of additions, width
    of sums, rounding, subnormals, elementary functions, rows alone and in batches.
    """
    if out is None:
        raise UsageError("there is no directory to write to", hint="-o RUN")
    values: dict[str, Any] = {"device": device, "quick": quick, "terms": terms or (),
                              "deterministic": not no_deterministic, "svg": svg,
                              "label": label, "force": force}  # fmt: skip
    arguments = ctx.meta.get(ARGUMENTS)
    if arguments:
        values["command"] = quoted_words(["divergence", *arguments])

    import msgspec

    from divergence.arithmetic.api import probe as call
    from divergence.report.arithmetic import probed_lines
    from divergence.report.machine import strict_json
    from divergence.report.terminal import print_lines

    with progress_bars(quiet=quiet or json) as progress:
        run = call(out=out, progress=progress, **values)
    if json:
        manifest = msgspec.to_builtins(run.manifest)
        show(strict_json({"schema_version": 1, "path": str(run.path), "manifest": manifest}))
    elif quiet:
        show(str(run.path))
    else:
        print_lines(probed_lines(str(run.path), run.manifest, verbose=verbose))

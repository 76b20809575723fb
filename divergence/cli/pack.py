"""`divergence pack`: a run as one file."""

from __future__ import annotations

from typing import Annotated

import typer

from divergence.cli.made import show_copy
from divergence.cli.options import Force, Json, Quiet, Verbose
from divergence.cli.progress import progress_bars

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence pack a

  divergence pack a -o a.zip

  divergence pack a -o s3://bucket/runs/a.tar
"""


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run to pack: directory, archive or URL.")
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="A .tar or .zip to write, here or at a URL. Default: RUN.tar.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Put a run into one file: a .tar or .zip that is read as it is, without unpacking.

    One run always gives the same file, bit for bit. It appears whole or not at all.
    """
    from divergence.run.storage.packing import pack

    with progress_bars(quiet=quiet or json) as progress:
        made = pack(run, out=out, force=force, progress=progress)
    show_copy("packed", made, json=json, quiet=quiet)

"""`divergence pack`: a run as one file."""

from __future__ import annotations

from typing import Annotated

from divergence.cli.shell.made import show_copy
from divergence.cli.shell.progress import progress_bars
from divergence.options.option import Option
from divergence.options.shared import Force, Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence pack a

  divergence pack a -o a.zip

  divergence pack a -o s3://bucket/runs/a.tar
"""


def command(
    run: Annotated[str, Option("RUN", "The run to pack: directory, archive or URL.")],
    out: Annotated[
        str | None,
        Option("--out -o FILE", "A .tar or .zip to write, here or at a URL. Default: RUN.tar."),
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

"""`divergence unpack`: a run as a directory."""

from __future__ import annotations

from typing import Annotated

from divergence.cli.shell.made import show_copy
from divergence.cli.shell.progress import progress_bars
from divergence.options.option import Option
from divergence.options.shared import Force, Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence unpack a.tar

  divergence unpack a.tar -o elsewhere

  divergence unpack s3://bucket/runs/a -o a
"""


def command(
    run: Annotated[str, Option("RUN", "The run to unpack: archive, URL or directory.")],
    out: Annotated[
        str | None, Option("--out -o DIR", "Directory to write. Default: RUN without .tar or .zip.")
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Put a run into a directory: out of an archive, or from a URL with all its bytes.

    Needed only to read often what is far away: all commands take archives and URLs as they
    are. The directory appears whole or not at all.
    """
    from divergence.run.storage.packing import unpack

    with progress_bars(quiet=quiet or json) as progress:
        made = unpack(run, out=out, force=force, progress=progress)
    show_copy("unpacked", made, json=json, quiet=quiet)

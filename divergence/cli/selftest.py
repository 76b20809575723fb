"""`divergence selftest`: does everything work on this device?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from divergence.cli.shell.options import show
from divergence.cli.shell.progress import progress_bars
from divergence.errors import RunExistsError, RunWriteError
from divergence.options.option import Option
from divergence.options.shared import Device, Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence selftest --device npu                  # some ten minutes; writes selftest-npu.json

  divergence selftest --device cuda:1 --quick -o mine.json --keep runs

Exit code 0 once all steps were tried, whatever they found; with --exit-code 1 where one failed.
"""


def command(
    out: Annotated[
        Path | None, Option("-o --out FILE", "The answer as JSON. Default: selftest-DEVICE.json.")
    ] = None,
    device: Device = "auto",
    quick: Annotated[bool, Option("--quick", "Leave out the suite of operators.")] = False,
    keep: Annotated[
        Path | None, Option("--keep DIR", "Keep the runs there; else they are removed.")
    ] = None,
    force: Annotated[bool, Option("--force", "Replace FILE where it exists.")] = False,
    exit_code: Annotated[bool, Option("--exit-code", "Exit with 1 where a step failed.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Try every path that touches a device, against this machine's CPU; write one file to send.

    Needs no model and no network. The file holds what `divergence env` shows, the switches, and
    what each step saw: no host name, no user, no path.
    """
    from divergence.experiments.selftest import selftest
    from divergence.layout.terminal import print_lines
    from divergence.recording.machine.environment import resolve_device
    from divergence.report.selftest import answer_lines, selftest_lines

    name = resolve_device(device)
    file = out or Path(f"selftest-{name.replace(':', '-')}.json")
    if file.exists() and not force:
        raise RunExistsError(f"{file} exists", hint="choose another -o, or --force")
    try:
        with progress_bars(quiet=quiet or json) as progress:
            result = selftest(name, quick=quick, keep=keep, progress=progress)
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            _write(file, interrupt.args[0].to_json(indent=2))
        raise
    _write(file, result.to_json(indent=2))
    if json:
        show(result.to_json(indent=2))
    else:
        print_lines(answer_lines(result) if quiet else selftest_lines(result, verbose=verbose))
        if not quiet:
            show(f"written to {file}")
    if exit_code and result.failed:
        raise typer.Exit(1)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise RunWriteError(f"{file} cannot be written: {error.strerror}",
                            hint="choose another -o") from error  # fmt: skip

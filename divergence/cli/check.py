"""`divergence check`: hold a run against a golden and a policy, for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from divergence.cli.shell.options import settings, show
from divergence.cli.shell.progress import progress_bars
from divergence.errors import IncomparableError
from divergence.options.compare import CheckOptions
from divergence.options.option import Option
from divergence.options.shared import Json, Quiet, Verbose

__all__ = ["EPILOG", "command"]

EPILOG = """
Examples:

  divergence check golden new

  divergence check golden new --policy strict

  divergence check golden new --policy ./policies/nightly.toml --json > check.json

  divergence check golden new --bless      # new becomes the golden; the old one is kept

Exit codes: 0 the policy is met; 1 it is not; 2 the runs cannot be compared.
"""


def command(
    *,
    golden: Annotated[str, Option("GOLDEN", "The run kept as right.")],
    new: Annotated[str, Option("NEW", "The run to check.")],
    options: Annotated[dict[str, Any], CheckOptions],
    bless: Annotated[
        bool,
        Option(
            "--bless",
            "Store NEW as the golden and say what changes; keep the old as GOLDEN.previous.",
        ),
    ] = False,
    allow_nonfinite: Annotated[
        bool,
        Option(
            "--allow-nonfinite",
            "With --bless: also a run in which a block or the logits hold nan or inf.",
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check a run against a golden under a policy.

    The policy says which verdicts pass, how many tokens must agree and how much must
    have been compared.
    """
    options = {**settings("check"), **options}
    if bless:
        name_map = options.get("name_map")
        _bless(golden, new, name_map, allow_nonfinite=allow_nonfinite, json=json, quiet=quiet)
        return

    from divergence.cli.compare import show_report
    from divergence.gate.check import check
    from divergence.layout.terminal import print_lines
    from divergence.report.machine import check_json
    from divergence.report.outcome import check_lines

    try:
        with progress_bars(quiet=quiet or json) as progress:
            result = check(golden, new, progress=progress, **options)
    except IncomparableError as error:
        report = getattr(error, "report", None)
        if report is not None:
            show_report(report, json=json, quiet=quiet, verbose=verbose)
        raise
    if json:
        show(check_json(result))
    else:
        print_lines(check_lines(result, verbose=verbose, brief=quiet))
    if not result.passed:
        raise typer.Exit(1)


def _bless(
    golden: str,
    new: str,
    name_map: str | Path | None,
    *,
    allow_nonfinite: bool,
    json: bool,
    quiet: bool,
) -> None:
    from divergence.gate.golden import bless
    from divergence.layout.terminal import print_lines
    from divergence.report.machine import blessing_json
    from divergence.report.outcome import blessing_lines

    with progress_bars(quiet=quiet or json) as progress:
        blessing = bless(
            golden, new, name_map=name_map, allow_nonfinite=allow_nonfinite, progress=progress
        )
    if json:
        show(blessing_json(blessing))
    elif not quiet:
        print_lines(blessing_lines(blessing))

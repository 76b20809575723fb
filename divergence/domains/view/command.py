"""`divergence view`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from divergence.cli.answers import progress_bars
from divergence.cli.signature import settings
from divergence.errors import UsageError
from divergence.options.commands import LIMITS, QUIET, VERBOSE, CompareOptions
from divergence.options.option import but, fields_of, option
from divergence.run.command import command_line


def view(
    *,
    reference: str = option("A", "Run A, or a report.json.", default=...),
    candidate: str | None = option("B", "Run B."),
    options: Annotated[dict[str, Any], CompareOptions],
    policy: str | None = but(LIMITS, after="floor"),
    quiet: bool = QUIET,
    verbose: bool = VERBOSE,
) -> None:
    """Arrow keys choose a row, Enter goes deeper, Escape back, ? shows all keys, q quits. Opens
    a report that `compare --json` wrote too. Needs the extra tui.

    Examples:
    divergence view a b --truth truth
    divergence view report.json
    """
    try:
        from divergence.domains.view.app import Browser
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise UsageError(
            "the browser is made with textual, which is not installed",
            hint=('pip install "divergence-debug[tui]"', "or print it: divergence compare A B -v"),
        ) from error
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        hint = f"to print it: {command_line('compare', reference, candidate or 'B', v=True)}"
        raise UsageError("view needs a terminal, and this is a pipe or a file", hint=hint)

    from divergence.comparison.api import compare
    from divergence.comparison.result import Report
    from divergence.gate.policy import load_policy

    if Path(reference).suffix == ".json":
        asked = any(field.is_given(options.get(field.name)) for field in fields_of(CompareOptions))
        if candidate is not None or policy is not None or asked:
            hint = f"divergence view {reference}"
            raise UsageError("a stored report is shown as it is, without B and options", hint=hint)
        report = Report.load(reference)
    else:
        if candidate is not None:
            options = {**settings("compare"), **options}
        options["thresholds"] = load_policy(policy).thresholds
        with progress_bars(quiet=quiet) as progress:
            report = compare(reference, candidate, progress=progress, **options)
    Browser(report).run()

"""`divergence doctor`: the checklist and the ladder of causes of two runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from divergence.cli.answers import exit_with, progress_bars, show, show_document
from divergence.cli.compare import EXIT_CODES
from divergence.cli.signature import settings
from divergence.errors import UsageError
from divergence.options.commands import OUTPUT, EvidenceOptions, Output
from divergence.options.option import option


def doctor(
    *,
    reference: str = option("A", "Run A.", default=...),
    candidate: str = option("B", "Run B.", default=...),
    options: Annotated[dict[str, Any], EvidenceOptions],
    exit_code: bool = option("--exit-code", "Exit as compare --exit-code does.", default=False),
    markdown: bool = option(
        "--markdown", "Print tables to paste into an issue.", OUTPUT, default=False
    ),
    output: Output,
) -> None:
    """Eight points make a comparison fair; seven rungs are the causes, from the tokens to
    the ranks. Each passes, fails or is not known. The ladder stops at the first rung that
    explains the rest. Nothing is measured that compare does not measure, and the verdict
    is compare's.

    Examples:
    divergence doctor a b
    divergence doctor a b --truth truth         # also which side is wrong
    divergence doctor a b --markdown > issue.md
    divergence doctor a b --json > checkup.json
    divergence doctor a b --quiet --exit-code || echo "not the same"

    Exit codes: 0 done, whatever was found; 2 a run cannot be read. With --exit-code those
    of compare --exit-code: 1 where the runs diverge, 2 where none can tell.
    """
    if output.json and markdown:
        raise UsageError("--json and --markdown both want stdout", hint="leave one out")
    from divergence.domains.doctor.doctor import doctor as examine
    from divergence.domains.doctor.show import checkup_document

    options = {**settings("compare"), **options}
    with progress_bars(quiet=output.silent or markdown) as progress:
        checkup = examine(reference, candidate, progress=progress, **options)
    if markdown:
        show(checkup.to_markdown())
    else:
        document = checkup_document(checkup, brief=output.quiet, verbose=output.verbose)
        show_document(document, output, json=partial(checkup.to_json, indent=2))
    if exit_code:
        exit_with(2 if checkup.verdict is None else EXIT_CODES[checkup.verdict.kind])

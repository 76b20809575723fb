"""`divergence check`: whether a policy allows what differs from a golden."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from divergence.cli.answers import answer_json, exit_with, progress_bars, show, show_document
from divergence.cli.compare import HTML, show_report
from divergence.cli.signature import settings
from divergence.errors import DivergenceError, UsageError
from divergence.options.commands import OUTPUT, CheckOptions, Output
from divergence.options.option import option
from divergence.output import append_output, check_output, write_output

if TYPE_CHECKING:
    from divergence.report.checking import CheckPage


def check(
    *,
    golden: str = option(
        "GOLDEN", "The run kept as right, or a folder of them by device and dtype.", default=...
    ),
    new: str = option("NEW", "The run to check.", default=...),
    options: Annotated[dict[str, Any], CheckOptions],
    bless: bool = option(
        "--bless",
        "Store NEW as the golden (a directory, .tar or .zip) and say what changes.",
        default=False,
    ),
    keep_previous: bool = option(
        "--keep-previous", "With --bless: keep the old golden as GOLDEN.previous.", default=False
    ),
    yes: bool = option(
        "--yes", "With --bless: replace a golden without asking on a terminal.", default=False
    ),
    allow_nonfinite: bool = option(
        "--allow-nonfinite",
        "With --bless: also a run in which a block or the logits hold nan or inf.",
        default=False,
    ),
    html: Path | None = HTML,
    junit: Path | None = option(
        "--junit FILE", "Also write the rules as a JUnit file, for a CI server.", OUTPUT
    ),
    github: bool = option(
        "--github",
        "Also print GitHub's annotations, and append to the step's summary.",
        OUTPUT,
        default=False,
    ),
    codequality: Path | None = option(
        "--codequality FILE", "Also write GitLab's code quality report.", OUTPUT
    ),
    output: Output,
) -> None:
    """The policy says which verdicts pass, how many tokens must agree and how much must
    have been compared.

    Examples:
    divergence check golden new
    divergence check golden new --policy strict
    divergence check golden new --policy ./policies/nightly.toml --json > check.json
    divergence check golden new --html report.html       # kept with the job
    divergence check golden new --junit junit.xml --github      # in CI
    divergence check goldens/llama new       # of a folder, the golden that fits best
    divergence check golden.zip new --bless      # new becomes the golden

    Exit codes: 0 the policy is met; 1 it is not; 2 the runs cannot be compared.
    """
    options = {**settings("check"), **options}
    sinks = _Sinks(
        junit=junit, codequality=codequality, summary=_summary_file(github, json=output.json)
    )
    check_output(html, what="page")
    check_output(junit, what="JUnit file")
    check_output(codequality, what="code quality report")
    check_output(sinks.summary, what="step's summary")
    if bless and any((html, junit, github, codequality)):
        raise UsageError(
            "--bless checks nothing, so there is nothing for --html, --junit, --github or "
            "--codequality",
            hint="check first, then bless",
        )
    from divergence.layout import print_lines
    from divergence.report.text import document_lines

    if bless:
        from divergence.gate import golden as goldens
        from divergence.report.checking import blessing_documents

        def agree(blessing: Any) -> bool:
            question = document_lines(*blessing_documents(blessing, asked=True))
            print_lines(question, file=sys.stderr)
            sys.stderr.write("replace it? [y/N] ")
            sys.stderr.flush()
            return sys.stdin.readline().strip().lower() in ("y", "yes")

        asks = not (yes or output.silent) and sys.stdin.isatty() and sys.stderr.isatty()
        with progress_bars(quiet=asks or output.silent) as progress:
            blessing = goldens.bless(
                golden,
                new,
                name_map=options.get("name_map"),
                allow_nonfinite=allow_nonfinite,
                keep_previous=keep_previous,
                agree=agree if asks else None,
                progress=progress,
            )
        if output.json:
            show(answer_json(blessed=blessing))
        elif not output.quiet:
            print_lines(document_lines(*blessing_documents(blessing)))
        return

    from msgspec.structs import asdict

    from divergence.gate.check import check
    from divergence.report.checking import (
        check_document,
        check_documents,
        checked_page,
        stopped_page,
    )

    try:
        with progress_bars(quiet=output.silent) as progress:
            result = check(golden, new, progress=progress, **options)
    except DivergenceError as error:
        report = getattr(error, "report", None)
        sinks.write(stopped_page(error, golden, new))
        if html is not None and report is not None:
            report.to_html(html)
        with sinks.fence():
            if report is not None:
                show_report(report, output)
                error.where = error.hint = None  # the screen says both
            if sinks.summary is None:
                raise
            show(f"error: {error}")
        raise typer.Exit(error.exit_code) from error
    if html is not None:
        from divergence.comparison.background import background_of
        from divergence.report.page import page

        background, above = background_of(result.report), check_document(result)
        text = page(result.report, background, above=above, command_name="check")
        write_output(text, html, what="page")
    with sinks.fence():
        if output.json or output.quiet:
            brief = check_document(result, brief=True)
            parts = asdict(result)
            del parts["remarks"]  # its notes say them in words
            show_document(brief, output, json=lambda: answer_json(**parts))
        else:
            documents = check_documents(result, verbose=output.verbose)
            print_lines(document_lines(*documents, verbose=output.verbose))
    sinks.write(checked_page(result))
    if not result.passed:
        exit_with(1)


def _summary_file(github: bool, *, json: bool) -> Path | None:
    if not github:
        return None
    if json:
        raise UsageError(
            "--github prints annotations on stdout, which --json needs for itself",
            hint="use --junit FILE for programs, or check twice",
        )
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        raise UsageError(
            "--github: GITHUB_STEP_SUMMARY is not set, so this is no step of GitHub Actions",
            hint="elsewhere use --junit FILE; to try it: GITHUB_STEP_SUMMARY=summary.md divergence "
            "check ...",
        )
    return Path(file)


class _Sinks(NamedTuple):
    """Says where the answer goes beside the terminal. ``summary`` stands for GitHub."""

    junit: Path | None
    codequality: Path | None
    summary: Path | None

    @contextlib.contextmanager
    def fence(self) -> Iterator[None]:
        """Keep runners from obeying what is printed inside."""
        if self.summary is None:
            yield
            return
        from divergence.report.checking import fence

        begin, end = fence()
        show(begin)
        try:
            yield
        finally:
            show(end)

    def write(self, page: CheckPage) -> None:
        if self.junit is not None:
            from divergence.report.checking import junit_xml

            write_output(junit_xml(page), self.junit, what="JUnit file")
        if self.codequality is not None:
            from divergence.report.checking import codequality_json

            write_output(codequality_json(page), self.codequality, what="code quality report")
        if self.summary is not None:
            from divergence.report.checking import annotation_lines, summary_markdown

            append_output(summary_markdown(page), self.summary, what="step's summary")
            show("\n".join(annotation_lines(page)))

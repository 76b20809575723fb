"""A report as a picture, and what a notebook shows of it."""

from __future__ import annotations

from divergence.analyses.blocks.figures import curves
from divergence.comparison.result import Report, RunSummary
from divergence.errors import UsageError
from divergence.html.parts import small_table
from divergence.html.picture import Picture, compose, picture
from divergence.report.summary import verdict_lines


def picture_of(report: Report) -> Picture:
    """The curves of the page. Raises UsageError where no block was compared."""
    plots = curves(report)
    if not plots:
        raise UsageError(
            "no output of a block was compared, so there is no curve to draw",
            hint="print the report, or write it with --html",
        )
    runs = _run("A", report.reference), _run("B", report.candidate)
    return picture(verdict_lines(report)[0].text, runs, plots)


def report_html(report: Report) -> str:
    """The verdict, and the curve of the phase that it is about."""
    first, *more = verdict_lines(report)
    onset = report.verdict.onset
    wanted = "error-decode" if onset is not None and onset.step else "error-prefill"
    plots = [plot for plot in curves(report) if plot.id == wanted]
    rows = [(line.spans[0].text.strip(), line.spans[1].text) for line in more]
    rows += [("A", _run("", report.reference)), ("B", _run("", report.candidate))]
    rows += [("next", command) for command in report.verdict.next[:1]]
    return small_table(first.text, rows, compose("", (), plots) if plots else None)


def _run(letter: str, run: RunSummary) -> str:
    label = f" ({run.label})" if run.label else ""
    text = f"{run.path}{label}: {run.model}, {run.dtype.removeprefix('torch.')} on {run.device}"
    return f"{letter}  {text}" if letter else text

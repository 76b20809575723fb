"""A report as a picture, and what a notebook shows of it."""

from __future__ import annotations

from divergence.analyses.blocks.figures import curves
from divergence.comparison.result import Report
from divergence.errors import UsageError
from divergence.html.parts import small_table
from divergence.html.picture import Picture, compose, picture
from divergence.report.summary import opening_of, run_text, verdict_headline


def picture_of(report: Report) -> Picture:
    """The curves of the page. Raises UsageError where no block was compared."""
    plots = curves(report)
    if not plots:
        raise UsageError(
            "no output of a block was compared, so there is no curve to draw",
            hint="print the report, or write it with --html",
        )
    runs = f"A  {run_text(report.reference)}", f"B  {run_text(report.candidate)}"
    return picture(str(verdict_headline(report)), runs, plots)


def report_html(report: Report) -> str:
    """The verdict, and the curve of the phase that it is about."""
    whole = opening_of(report)
    onset = report.verdict.onset
    wanted = "error-decode" if onset is not None and onset.step else "error-prefill"
    plots = [plot for plot in curves(report) if plot.id == wanted]
    rows = [(fact.label, fact.text) for fact in whole.headline.facts]
    rows += [("A", run_text(report.reference)), ("B", run_text(report.candidate))]
    rows += [("next", command) for command in whole.next[:1]]
    return small_table(str(whole.headline), rows, compose("", (), plots) if plots else None)

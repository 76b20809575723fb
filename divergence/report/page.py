"""Pages: the verdict first, then what there is to show, then the two runs; of a report, of many
runs, of localize, and of each answer that has documents. html/page.py draws them.

Nothing here opens a run: ``background`` brings what the report does not hold.

A page is sent by mail and read in a browser, so what it carries for download is bounded: of a
report with more results than fit, the worst are kept, and the page says how many.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
from typing import Any

from msgspec.structs import replace

from divergence._version import __version__
from divergence.analyses.blocks.sections import curves
from divergence.comparison.result import Answer, Background, Report, RunSummary
from divergence.document import Document, Side, named
from divergence.domain import placed
from divergence.errors import UsageError
from divergence.experiments.result import Localization
from divergence.fleet.result import Matrix
from divergence.html.page import frame
from divergence.html.parts import render, small_table
from divergence.html.picture import Picture, compose, compose_tree
from divergence.numerics.trees import Tree
from divergence.report.environment import csv_columns
from divergence.report.matrix import matrix_document
from divergence.report.summary import (
    computed,
    document,
    headline,
    model_name,
    opening_of,
    run_text,
    states,
    verdict_headline,
)
from divergence.report.text import document_markdown


def page(
    report: Report,
    background: Background,
    *,
    above: Document | None = None,
    command_name: str = "compare",
) -> str:
    """The whole file, as text. ``above``: another command's answer that rests on this report
    (`check`, `localize`), and comes first."""
    packed, num_kept = attached(report)
    data_lead, total = "This page holds the report it was made of", len(report.sites)
    if num_kept != total:
        data_lead = (
            f"This page holds {num_kept:,} of {total:,} results, the worst first, so that it stays "
            "small; `divergence compare --json` and `--csv` write all of them"
        )
    verdict = report.verdict
    onset = verdict.onset and (verdict.onset.block or verdict.onset.site)
    # ``DIVERGED: model.layers.6``
    answer = f"{headline(report)}: {(onset or verdict.summary)[:60]}"
    sides = [_side(*run) for run in _runs(report)]
    whole = dataclasses.replace(document(report, background=background), sides=sides)
    a, b = (run.label or run.path for run in (report.reference, report.candidate))
    return frame(
        command_name,
        f"{answer} · {a[:60]} / {b[:60]}",
        [whole] if above is None else [above, whole],
        attachment=packed,
        data_lead=data_lead,
        made_by=report.tool_version,
        columns=csv_columns(),
    )


def _side(letter: str, run: RunSummary) -> Side:
    return Side(
        letter=letter,
        name=run.label or run.path,
        warnings=[item.text for item in states(run)],
        facts=[("model", model_name(run)), ("computed", computed(run)), ("run", run.path)],
    )


MOST_BYTES = 300_000
"""Of the packed report; a third more as text."""
_MOST_RESULTS = 4000
_TRIES = 6


def attached(report: Report) -> tuple[bytes, int]:
    """The JSON, and how many results of sites it holds."""
    # what the verdict rests on first, then by the share of a limit, then by the difference
    ranked = sorted(
        report.sites,
        key=lambda site: (
            not site.flagged,
            not (site.nonfinite is not None and site.nonfinite.total > 0),
            -_size(site.usage),
            -_size(site.rel_l2),
        ),
    )
    most = min(len(ranked), _MOST_RESULTS)
    data = b""
    for _ in range(_TRIES):
        kept = set(map(id, ranked[:most]))
        thinned = replace(report, sites=[site for site in report.sites if id(site) in kept])
        if most < len(ranked):  # lists that no page needs in full, where not even the sites fit
            unmatched = report.coverage.unmatched[: _MOST_RESULTS // 8]
            thinned = replace(thinned, coverage=replace(report.coverage, unmatched=unmatched))
        if most < len(ranked) and (operators := report.operators) is not None:
            worst = sorted(operators.results, key=lambda result: -result.limit_usage)[:500]
            kept = set(map(id, worst))
            results = [result for result in operators.results if id(result) in kept]
            thinned = replace(thinned, operators=replace(operators, results=results))
        data = thinned.to_json().encode()
        packed = len(gzip.compress(data, compresslevel=6))
        if packed <= MOST_BYTES or most == 0:
            break
        most = int(most * 0.9 * MOST_BYTES / packed)
    return data, most


def _size(value: float | None) -> float:
    return 0.0 if value is None else math.inf if math.isnan(value) else value


def page_of(answer: Answer, background: Background | None = None) -> str:
    """The page, whatever the answer is of. ``background``: of its report, where it has one."""
    background = background or Background()
    if isinstance(answer, Report):
        return page(answer, background)
    documents = _documents_of(answer)
    if isinstance(answer, Localization) and answer.report is not None:
        above = documents[0]
        return page(answer.report, background, above=above, command_name=answer.COMMAND)
    whole: Any = answer
    parts = {}
    if isinstance(answer, Matrix):
        whole = replace(answer, rows=[replace(row, report=None) for row in answer.rows])
        lead = "This page holds the answer it was made of, without the report of each pair"
        parts = {"noun": "Run", "data_lead": lead}
    return frame(
        answer.COMMAND,
        str(documents[0].headline)[:120],
        documents,
        attachment=whole.to_json().encode(),
        made_by=getattr(answer, "tool_version", __version__),
        **parts,
    )


def markdown_of(answer: Answer) -> str:
    """The documents of the page, as Markdown."""
    documents = [document(answer)] if isinstance(answer, Report) else _documents_of(answer)
    return document_markdown(*documents, made_by=f"`divergence {answer.COMMAND}` {__version__}")


def _documents_of(answer: Answer) -> list[Document]:
    """Return what stands on its page; of a report the top alone."""
    if isinstance(answer, Report):
        runs = [named(name, run_text(run)) for name, run in _runs(answer)]
        return [dataclasses.replace(opening_of(answer), known=runs)]
    if isinstance(answer, Matrix):
        return [matrix_document(answer, page=True)]
    assert answer.DOCUMENTS is not None
    documents = placed(answer.DOCUMENTS)(answer)
    return [documents] if isinstance(documents, Document) else documents


# A report as a picture, and what a notebook shows of it.


def picture_of(report: Report) -> Picture:
    """The curves of the page. Raises UsageError where no block was compared."""
    plots = curves(report)
    if not plots:
        raise UsageError(
            "no output of a block was compared, so there is no curve to draw",
            hint="print the report, or write it with --html",
        )
    runs = [f"{name}  {run_text(run)}" for name, run in _runs(report)]
    return Picture(render(compose(str(verdict_headline(report)), runs, plots)))


def picture_of_tree(tree: Tree, title: str, described: str) -> Picture:
    """The order in which numbers are added, drawn as a tree below its title and a sentence."""
    return Picture(render(compose_tree(tree, title, described)))


def notebook_of(answer: Answer) -> str:
    """Show what is known at once; of a report also the curve of its verdict's phase."""
    whole, *_ = _documents_of(answer)
    rows = [(fact.label.strip(), fact.text) for fact in (*whole.headline.facts, *whole.known)]
    rows += [("next", command) for command in whole.next[:1]]
    plots = []
    if isinstance(answer, Report):
        onset = answer.verdict.onset
        wanted = "error-decode" if onset is not None and onset.step else "error-prefill"
        plots = [plot for plot in curves(answer) if plot.id == wanted]
    return small_table(str(whole.headline), rows, compose("", (), plots) if plots else None)


def _runs(report: Report) -> list[tuple[str, RunSummary]]:
    return [("A", report.reference), ("B", report.candidate)]

"""A Matrix in sections: who is odd, then one row a run.

Rows stand in the order in which the runs were given. In a terminal a long list keeps those that do
not agree, and says how many were left out.
"""

from __future__ import annotations

import os
from collections import Counter

from divergence.comparison.result import VerdictKind
from divergence.document import (
    Block,
    BlockPart,
    Column,
    Document,
    Figures,
    Headline,
    Plot,
    PlotLine,
    Section,
    Sentence,
    Table,
    each_in,
    named,
    out_of,
)
from divergence.fleet.result import Matrix, MatrixRow
from divergence.report.summary import run_text
from divergence.words import HEADLINES, count, decimal, letter, limit_share, share

MAX_ROWS = 40
NUM_FIRST = 4
"""Agreeing rows of a long list that are shown all the same."""
MAX_NAMED = 8
"""Runs of one group that are named."""
_MOST_ON_PAGE = 1000
_COLUMNS = (
    "run",
    "machine",
    "verdict",
    "from",
    Column("wrong", letter),
    Column("of limit", limit_share),
    Column("logits L2", decimal),
    Column("top-1", share, face="page"),
    Column("tokens", out_of),
)


def matrix_document(matrix: Matrix, *, all_runs: bool = False, page: bool = False) -> Document:
    """Show who is odd, and a row for each run. ``all_runs``: nothing is left out. ``page``: for a
    page."""
    sections = [_runs(matrix, every=all_runs, page=page), *_among(matrix)]
    reports = [row.report_path for row in matrix.rows if row.report_path]
    if reports and not page:
        text = f"{count(len(reports), 'file')}, {reports[0]} ..."
        sections.append(Section(body=[named("reports", text)]))
    return Document(headline=headline_of(matrix), sections=sections, next=matrix.next)


def headline_of(matrix: Matrix) -> Headline:
    """Return who is odd, and what there is to say of it."""
    word, style = "NO ANSWER", "bold yellow"
    if matrix.odd:
        word, style = "ODD", "bold red"
    elif any(_state(row) == "diverged" for row in matrix.rows):
        word, style = "SPLIT", "bold red"
    elif len(matrix.groups) == 1 and len(matrix.groups[0].runs) > 1:
        word, style = "AGREE", "bold green"
    tally = Counter(_called(row.verdict, "not compared") for row in matrix.rows)
    facts = [
        named("first", run_text(matrix.reference)),
        named("others", ", ".join(f"{number:,} {kind}" for kind, number in tally.items())),
        *(named("only there", text, "bold") for text in matrix.only_odd),
    ]
    for row in matrix.rows:
        if row.problem is not None:
            parts = (" ".join(part.split()) for part in row.problem.split("\n"))
            facts.append(named("not compared", f"{row.path}: {'; '.join(parts)}"))
    for group in matrix.identical:
        more = f", {len(group) - MAX_NAMED:,} more" if len(group) > MAX_NAMED else ""
        facts.append(named("same bits", ", ".join(group[:MAX_NAMED]) + more))
    return Headline(word, matrix.agreement, style, facts)


def _state(row: MatrixRow) -> str:
    if row.verdict in (None, "incomparable", "undetermined"):
        return "silent"
    return "agrees" if row.verdict in ("identical", "within_floor") else "diverged"


def _runs(matrix: Matrix, *, every: bool, page: bool) -> Section:
    """A row a run, the first one too; on a page above them a figure in which one is chosen."""
    first = matrix.reference
    top: tuple[object, ...] = (first.path, first.label, "(first)", *[None] * 6)
    rows = [(first.path, "", top)]
    rows += [(row.path, _state(row), _values(row)) for row in matrix.rows]
    hidden: set[int] = set()
    if len(rows) > MAX_ROWS and not every and not page:
        agreeing = [n for n, (_, state, _) in enumerate(rows) if state == "agrees"]
        hidden = {n for n in agreeing[NUM_FIRST:] if rows[n][0] not in matrix.odd}
    folders = {os.path.dirname(path) for path, *_ in rows}
    folder = folders.pop() if len(folders) == 1 else ""
    prefix = f"{folder}/" if folder else ""  # the headline has it
    shown = [row for number, row in enumerate(rows) if number not in hidden]
    words = {"diverged": "wrong", "silent": "below"}
    table = Table(
        columns=_COLUMNS,
        num_left=5,
        names=True,
        rows=[(path.removeprefix(prefix), *values[1:]) for path, _, values in shown],
        marks=["odd " * (path in matrix.odd) + words.get(state, "") for path, state, _ in shown],
    )
    body: list[Block] = [Figures([_usage(matrix)], choose=True)] if page else []
    body.append(table)
    if hidden:
        most = max(matrix.rows[number - 1].limit_usage or 0.0 for number in hidden)
        text = f"… {len(hidden):,} more that agree, at most {limit_share(most)} of a limit (--all)"
        body.append(Sentence(text, indent=2, style="dim"))
    if not page:
        body.append(Sentence("each against the first; > odd, ! diverged, ? not told", style="dim"))
    chosen = matrix.rows[: _MOST_ON_PAGE if page else 0]
    return Section(
        id="runs",
        heading="Runs",
        body=body,
        parts=[BlockPart(block=row.path, facts=_row_facts(row)) for row in chosen],
        detail=f"{count(len(matrix.rows), 'run')}, each compared with {first.path}",
    )


def _usage(matrix: Matrix) -> Plot:
    """Return how much of a limit each run uses."""
    rows = matrix.rows[:_MOST_ON_PAGE]
    says = []
    for row in rows:
        parts = [_called(row.verdict, "not compared")]
        if row.limit_usage is not None:
            parts.append(f"{limit_share(row.limit_usage)} of a limit")
        if row.path in matrix.odd:
            parts.append("not like most of the others")
        says.append(f"{row.path}: {', '.join(parts)}")
    flagged = [n for n, row in enumerate(rows) if (row.limit_usage or 0) > 1]
    return Plot(
        id="usage",
        title="How far each run is from the first",
        says=says,
        wide=True,
        described="The largest share of any limit, by the order in which runs were given: "
        f"{len(flagged)} beyond it.",
        blocks=[row.path for row in rows],
        names=[str(n) for n in range(1, len(rows) + 1)],
        legend=[("dot run", "a run"), ("band floor", "within the limit")],
        flagged=flagged,
        lines=[PlotLine(kind="run", values=[row.limit_usage for row in rows])],
        band=([1.0] * len(rows), [None] * len(rows)),
    )


def _row_facts(row: MatrixRow) -> Table:
    evidence = [] if row.report is None else row.report.verdict.evidence[:5]
    return Table(
        num_left=0,
        sparse=True,
        **each_in(
            [row],
            ("verdict", lambda row: row.summary or row.problem or row.verdict or "not compared"),
            ("confidence", "confidence"),
            ("onset", lambda row: row.onset and row.onset.site),
            ("machine", lambda row: row.run and row.run.label),
            *(("because", lambda _, text=fact.text: text) for fact in evidence),
            ("report", lambda row: None if row.report else row.report_path),
        ),
    )


def _among(matrix: Matrix) -> list[Section]:
    """Return who agrees with whom; nothing where nobody asked."""
    rows = []
    for check in matrix.cross_checks:
        problem = f"not compared: {(check.problem or '').partition(chr(10))[0]}"
        rows.append((check.reference, check.candidate, _called(check.verdict, problem)))
    table = Table(
        title="the other runs with one another",
        columns=("run", "and run", "verdict"),
        rows=rows,
        num_left=3,
        bare=True,
    )
    detail = "who agrees with whom, where the first is odd"
    section = Section(id="among", title="among themselves", body=[table], detail=detail)
    return [section] if rows else []


def _called(verdict: VerdictKind | None, otherwise: str) -> str:
    return otherwise if verdict is None else HEADLINES[verdict]


def _values(row: MatrixRow) -> tuple[object, ...]:
    run, onset = row.run, row.onset
    return (
        row.path,
        run and run.label,
        _called(row.verdict, "not compared" if run else "unreadable"),
        onset and (onset.block or onset.site),
        row.side,
        row.limit_usage,
        row.logits_rel_l2,
        row.top1_agreement,
        None if row.num_tokens is None else (row.num_equal, row.num_tokens),
    )

"""A Matrix in sections: who is odd, then one row a run.

Rows stand in the order in which the runs were given. In a terminal a long list keeps those that do
not agree, and says how many were left out.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter

from divergence.comparison.results import VerdictKind
from divergence.document import (
    Block,
    BlockPart,
    Column,
    Document,
    Figures,
    Headline,
    Section,
    Sentence,
    Table,
    named,
)
from divergence.fleet.result import Matrix, MatrixRow
from divergence.html.figures import Plot, PlotLine
from divergence.layout import count, decimal, limit_share, share
from divergence.report.summary import run_text
from divergence.words import HEADLINES, letter

MAX_ROWS = 40
NUM_FIRST = 4
"""Agreeing rows of a long list that are shown all the same."""
MAX_NAMED = 8
"""Runs of one group that are named."""
_MOST_ON_PAGE = 2000
_COLUMNS = (
    "run", "machine", "verdict", "from", Column("wrong", letter),
    Column("of limit", limit_share), Column("logits L2", decimal), Column("top-1", share), "tokens",
)  # fmt: skip


def matrix_document(
    matrix: Matrix, *, all_runs: bool = False, page: bool = False, brief: bool = False
) -> Document:
    """Who is odd, and a row for each run. ``all_runs``: nothing is left out. ``page``: for a page.
    ``brief``: the headline also tells what was not compared."""
    top = headline_of(matrix)
    if brief:
        lacking = [f"{row.path}: {row.problem}" for row in matrix.rows if row.problem is not None]
        facts = [named("not compared", text.replace("\n", "; ")) for text in lacking]
        top = dataclasses.replace(top, facts=[*top.facts, *facts])
    sections = [_table(matrix, every=all_runs), *_problems(matrix), *_among(matrix)]
    if page:
        sections = [_runs(matrix), *_among(matrix, page=True), *_problems(matrix)]
    reports = [row.report_path for row in matrix.rows if row.report_path]
    if reports and not page:
        text = f"{count(len(reports), 'file')}, {reports[0]} ..."
        sections.append(Section(body=[named("reports", text)]))
    return Document(headline=top, sections=sections, next=matrix.next)


def _problems(matrix: Matrix) -> list[Section]:
    problems = [row for row in matrix.rows if row.problem is not None]
    body = [
        Sentence(text.strip(), "" if number else "-", indent=4 if number else 2)
        for row in problems
        for number, text in enumerate(f"{row.path}: {row.problem}".split("\n"))
    ]
    detail = count(len(problems), "run")
    return [Section(id="failed", title="not compared", detail=detail, body=body)] * bool(body)


def headline_of(matrix: Matrix) -> Headline:
    """Who is odd, and what there is to say of it."""
    word, style = "NO ANSWER", "bold yellow"
    if matrix.odd:
        word, style = "ODD", "bold red"
    elif matrix.groups and len(matrix.groups) == 1 and len(matrix.groups[0].runs) > 1:
        word, style = "AGREE", "bold green"
    elif any(_state(row) == "diverged" for row in matrix.rows):
        word, style = "SPLIT", "bold red"
    tally = Counter(_called(row.verdict, "not compared") for row in matrix.rows)
    facts = [
        named("first", run_text(matrix.reference)),
        named("others", ", ".join(f"{number:,} {kind}" for kind, number in tally.items())),
        *(named("only there", text, "bold") for text in matrix.only_odd),
    ]
    for group in matrix.identical:
        more = f", {len(group) - MAX_NAMED:,} more" if len(group) > MAX_NAMED else ""
        facts.append(named("same bits", ", ".join(group[:MAX_NAMED]) + more))
    return Headline(word, matrix.agreement, style, facts)


def _state(row: MatrixRow) -> str:
    if row.verdict in (None, "incomparable", "undetermined"):
        return "silent"
    return "agrees" if row.verdict in ("identical", "within_floor") else "diverged"


def _table(matrix: Matrix, *, every: bool) -> Section:
    """In a terminal: the first run too."""
    first = matrix.reference
    top: tuple[object, ...] = (first.path, first.label, "(first)", *[None] * 6)
    rows = [(first.path, "", top)]
    rows += [(row.path, _state(row), _values(row)) for row in matrix.rows]
    hidden: set[int] = set()
    if len(rows) > MAX_ROWS and not every:
        agreeing = [n for n, (_, state, _) in enumerate(rows) if state == "agrees"]
        hidden = {n for n in agreeing[NUM_FIRST:] if rows[n][0] not in matrix.odd}
    folders = {os.path.dirname(path) for path, *_ in rows}
    folder = folders.pop() if len(folders) == 1 else ""
    prefix = f"{folder}/" if folder else ""  # the headline has it
    shown = [row for number, row in enumerate(rows) if number not in hidden]
    words = {"diverged": "wrong", "silent": "below"}
    table = Table(
        columns=_COLUMNS, grid=True, gives=(0, 1, 3), num_left=5,
        rows=[(path.removeprefix(prefix), *values[1:]) for path, _, values in shown],
        marks=["onset " * (path in matrix.odd) + words.get(state, "") for path, state, _ in shown],
    )  # fmt: skip
    body: list[Block] = [table]
    if hidden:
        most = max(matrix.rows[number - 1].limit_usage or 0.0 for number in hidden)
        text = f"… {len(hidden):,} more that agree, at most {limit_share(most)} of a limit (--all)"
        body.append(Sentence(text, indent=2, style="dim"))
    body.append(Sentence("each against the first; > odd, ! diverged, ? not told", style="dim"))
    return Section(body=body)


def _runs(matrix: Matrix) -> Section:
    """On a page."""
    rows = matrix.rows[:_MOST_ON_PAGE]
    told = []
    for row in rows:
        parts = [_called(row.verdict, "not compared")]
        if row.limit_usage is not None:
            parts.append(f"{limit_share(row.limit_usage)} of a limit")
        if row.path in matrix.odd:
            parts.append("not like most of the others")
        told.append(f"{row.path}: {', '.join(parts)}")
    flagged = [n for n, row in enumerate(rows) if (row.limit_usage or 0) > 1]
    body: list[Block] = []
    if sum(row.limit_usage is not None for row in rows) > 1:
        paths = [row.path for row in rows]
        plot = Plot(
            id="usage", title="How far each run is from the first", says=told, wide=True,
            blocks=paths,
            described="The largest share of any limit, by the order in which runs were given.",
            label=f"The largest share of a limit that each of {count(len(rows), 'run')} uses: "
            f"{len(flagged)} beyond it.",
            legend=[("dot run", "a run"), ("band floor", "within the limit")],
            names=[str(n) for n in range(1, len(rows) + 1)], flagged=flagged,
            lines=[PlotLine(label="of a limit", kind="run",
                            values=[r.limit_usage for r in rows])],
            band=([1.0] * len(rows), [None] * len(rows)),
        )  # fmt: skip
        body.append(Figures([plot], choose=True))
    body.append(Table(
        caption="Each run against the first", columns=_COLUMNS, names=True, num_left=5,
        rows=[_values(row) for row in rows],
        marks=["flagged" if n in flagged else "" for n in range(len(rows))],
        note="" if len(rows) == len(matrix.rows) else f"The first {len(rows):,} rows.",
    ))  # fmt: skip
    return Section(
        id="runs", title="runs", body=body,
        lead=f"{count(len(matrix.rows), 'run')}, each compared with {matrix.reference.path}.",
        parts=[BlockPart(block=row.path, facts=_row_facts(row)) for row in rows],
    )  # fmt: skip


def _row_facts(row: MatrixRow) -> list[tuple[str, str]]:
    facts = [("verdict", row.summary or row.problem or row.verdict or "not compared")]
    if row.confidence:
        facts.append(("confidence", row.confidence))
    if row.onset is not None:
        facts.append(("onset", row.onset.site))
    if row.run is not None:
        facts.append(("machine", row.run.label))
    if row.report is not None:
        facts += [("because", fact.text) for fact in row.report.verdict.evidence[:5]]
    elif row.report_path:
        facts.append(("report", row.report_path))
    return facts


def _among(matrix: Matrix, *, page: bool = False) -> list[Section]:
    """Who agrees with whom; nothing where nobody asked."""
    rows = [
        (check.reference, check.candidate,
         _called(check.verdict, f"not compared: {(check.problem or '').partition(chr(10))[0]}"))
        for check in matrix.cross_checks
    ]  # fmt: skip
    body: list[Block] = [Sentence(f"{a} and {b}: {said}", "-", indent=2) for a, b, said in rows]
    if page:
        body = [Table(caption="The other runs with one another", num_left=3, rows=rows,
                      columns=("run", "and run", "verdict"))]  # fmt: skip
    return [Section(
        id="among", title="among themselves", body=body,
        detail="who agrees with whom, where the first is odd",
    )] if rows else []  # fmt: skip


def _called(verdict: VerdictKind | None, otherwise: str) -> str:
    return otherwise if verdict is None else HEADLINES[verdict]


def _values(row: MatrixRow) -> tuple[object, ...]:
    run, onset = row.run, row.onset
    return (
        row.path, run and run.label, _called(row.verdict, "not compared" if run else "unreadable"),
        onset and (onset.block or onset.site), row.side, row.limit_usage, row.logits_rel_l2,
        row.top1_agreement,
        None if row.num_tokens is None else f"{row.num_equal}/{row.num_tokens}",
    )  # fmt: skip

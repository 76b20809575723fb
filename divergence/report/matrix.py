"""A Matrix as lines: who is odd, then one row a run.

Rows stand in the order in which the runs were given. A long list keeps those that do not agree, and
says how many were left out.
"""

from __future__ import annotations

import os
from collections import Counter

from divergence.comparison.results import VerdictKind
from divergence.fleet.result import Matrix, MatrixRow
from divergence.layout import (
    BLANK,
    MAX_WIDTH,
    Line,
    count,
    cut,
    decimal,
    heading,
    line,
    prose,
    share,
    times,
)
from divergence.report.summary import VERDICT_STYLES
from divergence.words import HEADLINES, letter

MAX_ROWS = 40
NUM_FIRST = 4
"""Agreeing rows of a long list that are shown all the same."""
MAX_NAMED = 8
"""Runs of one group that are named."""
_GAP = "  "
TITLES = ("run", "machine", "verdict", "from", "wrong", "of limit", "logits L2", "top-1", "tokens")
NUM_WORDS = 5
"""Columns of words; the others are numbers."""
_SHARED = (0, 1, 3)
"""Columns that take what room the others leave."""
_STYLES = {HEADLINES[kind]: style for kind, style in VERDICT_STYLES.items()}
_MARKS = {"diverged": "!", "silent": "?", "agrees": " "}


def matrix_lines(matrix: Matrix, *, all_runs: bool = False) -> list[Line]:
    """The whole matrix. ``all_runs``: nothing is left out."""
    lines = [*_headline(matrix), BLANK, *_table(matrix, all_runs=all_runs), BLANK]
    problems = _problems(matrix)
    if problems:
        lines += [*problems, BLANK]
    if matrix.cross_checks:
        lines.append(heading("among themselves", "who agrees with whom, where the first is odd"))
        for check in matrix.cross_checks:
            problem = (check.problem or "").partition("\n")[0]
            said = called(check.verdict, f"not compared: {problem}")
            lines.append(prose("  - ", f"{check.reference} and {check.candidate}: {said}", width=4))
        lines.append(BLANK)
    reports = [row.report_path for row in matrix.rows if row.report_path]
    if reports:
        lines += [prose("reports", f"{count(len(reports), 'file')}, {reports[0]} ..."), BLANK]
    if matrix.next:
        lines += [heading("next"), *(line(f"  {command}") for command in matrix.next)]
    return lines


def matrix_headline(matrix: Matrix) -> list[Line]:
    """What ``--quiet`` prints: who is odd, and why others were not compared."""
    return [*_headline(matrix), *_problems(matrix)]


def _problems(matrix: Matrix) -> list[Line]:
    problems = [row for row in matrix.rows if row.problem is not None]
    if not problems:
        return []
    return [
        heading("not compared", count(len(problems), "run")),
        *(
            prose("  - " if not number else "    ", text.strip(), width=4)
            for row in problems
            for number, text in enumerate(f"{row.path}: {row.problem}".split("\n"))
        ),
    ]


def _headline(matrix: Matrix) -> list[Line]:
    """Who is odd, and what there is to say of it."""
    word, style = _word(matrix)
    first = matrix.reference
    tally = Counter(called(row.verdict, "not compared") for row in matrix.rows)
    lines = [
        Line((*line((f"{word}: ", style)).spans, *line(matrix.agreement).spans), 2),
        prose(
            "first",
            f"{first.path} ({first.label}): {first.model}, {first.dtype.removeprefix('torch.')} "
            f"on {first.device}",
        ),
        prose("others", ", ".join(f"{number:,} {kind}" for kind, number in tally.items())),
    ]
    lines += [prose("only there", text, style="bold") for text in matrix.only_odd]
    for group in matrix.identical:
        more = f", {len(group) - MAX_NAMED:,} more" if len(group) > MAX_NAMED else ""
        lines.append(prose("same bits", ", ".join(group[:MAX_NAMED]) + more))
    return lines


def _word(matrix: Matrix) -> tuple[str, str]:
    if matrix.odd:
        return "ODD", "bold red"
    if matrix.groups and len(matrix.groups) == 1 and len(matrix.groups[0].runs) > 1:
        return "AGREE", "bold green"
    if any(_state(row) == "diverged" for row in matrix.rows):
        return "SPLIT", "bold red"
    return "NO ANSWER", "bold yellow"


def _state(row: MatrixRow) -> str:
    if row.verdict in (None, "incomparable", "undetermined"):
        return "silent"
    return "agrees" if row.verdict in ("identical", "within_floor") else "diverged"


def _table(matrix: Matrix, *, all_runs: bool) -> list[Line]:
    first = matrix.reference
    rest = ("-",) * (len(TITLES) - 3)
    rows = [(first.path, "first", (first.path, first.label, "(first)", *rest))]
    rows += [(row.path, _state(row), row_cells(row)) for row in matrix.rows]
    hidden: set[int] = set()
    if len(rows) > MAX_ROWS and not all_runs:
        agreeing = [n for n, row in enumerate(rows) if row[1] == "agrees"]
        hidden = {n for n in agreeing[NUM_FIRST:] if rows[n][0] not in matrix.odd}
    folders = {os.path.dirname(path) for path, _, _ in rows}
    folder = folders.pop() if len(folders) == 1 else ""
    prefix = f"{folder}/" if folder else ""  # the headline has it
    shown = [
        (path, state, (path.removeprefix(prefix), *cells[1:]))
        for number, (path, state, cells) in enumerate(rows)
        if number not in hidden
    ]
    widths = _widths([TITLES, *(cells for _, _, cells in shown)])
    lines = [line(("    " + _joined(TITLES, widths), "dim"))]
    for path, state, cells in shown:
        odd = path in matrix.odd
        style = "bold red" if odd else _STYLES.get(cells[2], "")
        mark = (">" if odd else " ") + _MARKS.get(state, " ")
        lines.append(line(f" {mark} ", (_joined(cells, widths), style)))
    if hidden:
        most = max(matrix.rows[number - 1].limit_usage or 0.0 for number in hidden)
        said = f"  … {len(hidden):,} more that agree, at most {times(most)} of a limit (--all)"
        lines.append(line((said, "dim")))
    lines.append(line(("    each against the first; > odd, ! diverged, ? not told", "dim")))
    return lines


def called(verdict: VerdictKind | None, otherwise: str) -> str:
    """The first word of a pair's answer, as its own report begins."""
    return otherwise if verdict is None else HEADLINES[verdict]


def row_cells(row: MatrixRow) -> tuple[str, ...]:
    run, onset = row.run, row.onset
    tokens = "-" if row.num_tokens is None else f"{row.num_equal}/{row.num_tokens}"
    return (
        row.path,
        run.label if run else "-",
        called(row.verdict, "unreadable" if run is None else "not compared"),
        "-" if onset is None else onset.block or onset.site,
        letter(row.side or "-"),
        times(row.limit_usage),
        decimal(row.logits_rel_l2),
        share(row.top1_agreement),
        tokens,
    )


def _widths(rows: list[tuple[str, ...]]) -> list[int]:
    """Each column as wide as its widest cell; the names give way where that is too much."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    room = MAX_WIDTH - 4 - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        longest = max(_SHARED, key=lambda column: widths[column])
        if widths[longest] <= 8:
            break
        widths[longest] -= 1
    return widths


def _joined(cells: tuple[str, ...], widths: list[int]) -> str:
    parts = []
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        text = cut(cell, width)
        parts.append(text.ljust(width) if column < NUM_WORDS else text.rjust(width))
    return _GAP.join(parts).rstrip()

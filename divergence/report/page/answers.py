"""The pages of answers that are not one comparison: many runs, localize, sensitivity, selfcheck,
scores.

Each has the terminal's answer on top and its tables as tables. ``page_of`` takes any of them, and a
Report.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.result import Answer, Report
from divergence.comparison.results import Background
from divergence.document import Block, BlockPart, Figures, Section, Table
from divergence.evaluations.result import Candidate, ScoresReport
from divergence.evaluations.show import TITLES, facts_of, headline, name_of, task_cells
from divergence.experiments.result import Localization, SelfcheckResult, Sensitivity
from divergence.fleet.result import Matrix, MatrixRow
from divergence.html.figures import Plot, PlotLine
from divergence.html.parts import details, el, facts, prose_block
from divergence.layout import Line, count, share, times
from divergence.report import experiments as selfchecks
from divergence.report import experiments as sensitivities
from divergence.report import localization as localized
from divergence.report import matrix as matrices
from divergence.report.page.whole import frame, next_commands, opening, page, printed
from divergence.words import letter

_MOST_ROWS = 2000


def page_of(answer: Answer, background: Background | None = None) -> str:
    """The page, whatever the answer is of. ``background``: of its report, where it has one."""
    if isinstance(answer, Matrix):
        return _matrix(answer)
    if isinstance(answer, Sensitivity):
        return _sensitivity(answer)
    if isinstance(answer, SelfcheckResult):
        return _selfcheck(answer)
    if isinstance(answer, ScoresReport):
        return _scores(answer)
    background = background or Background()
    if isinstance(answer, Localization):
        return _localization(answer, background)
    assert isinstance(answer, Report)
    return page(answer, background)


def _framed(
    name: str, answer: Matrix | Sensitivity | SelfcheckResult, lines: Sequence[Line],
    sections: Sequence[Section | None], *, commands: Sequence[str] = (), **parts: str,
) -> str:  # fmt: skip
    """``parts``: others of ``frame``."""
    return frame(
        name, lines[0].text[:120], [opening(lines, below=next_commands(commands))],
        [section for section in sections if section is not None],
        attachment=answer.to_json().encode(), made_by=answer.tool_version, **parts,
    )  # fmt: skip


# --- many runs ----------------------------------------------------------------------------------


def _matrix(matrix: Matrix) -> str:
    small = replace(matrix, rows=[replace(row, report=None) for row in matrix.rows])
    return _framed(
        "compare", small, matrices.matrix_headline(matrix),
        [_runs(matrix), _among(matrix), _not_compared(matrix)], commands=matrix.next, noun="Run",
        data_lead="This page holds the answer it was made of, without the report of each pair.",
    )  # fmt: skip


def _runs(matrix: Matrix) -> Section:
    rows = matrix.rows[:_MOST_ROWS]
    told = [_says(matrix, row) for row in rows]
    body: list[Block] = []
    if sum(row.limit_usage is not None for row in rows) > 1:
        flagged = [n for n, row in enumerate(rows) if (row.limit_usage or 0) > 1]
        paths = [row.path for row in rows]
        plot = Plot(
            id="usage", title="How far each run is from the first", says=told, wide=True,
            blocks=paths,
            described="The largest share of any limit, by the order in which runs were given.",
            label=f"The largest share of a limit that each of {count(len(rows), 'run')} uses: "
            f"{len(flagged)} beyond 1.",
            legend=[("dot run", "a run"), ("band floor", "within the limit")],
            names=[str(n) for n in range(1, len(rows) + 1)], flagged=flagged,
            lines=[PlotLine(label="of a limit", kind="run",
                            values=[r.limit_usage for r in rows])],
            band=([1.0] * len(rows), [None] * len(rows)),
        )  # fmt: skip
        body.append(Figures([plot], choose=True))
    marks = ["flagged" if (row.limit_usage or 0) > 1 else "" for row in rows]
    body.append(Table(
        caption="Each run against the first", columns=matrices.TITLES, names=True,
        rows=[matrices.row_cells(row) for row in rows], marks=marks, num_left=matrices.NUM_WORDS,
        note="" if len(rows) == len(matrix.rows) else f"The first {len(rows):,} rows.",
    ))  # fmt: skip
    return Section(
        id="runs", title="Runs", body=body,
        lead=f"{count(len(matrix.rows), 'run')}, each compared with {matrix.reference.path}.",
        parts=[BlockPart(block=row.path, facts=_row_facts(row)) for row in rows],
    )  # fmt: skip


def _says(matrix: Matrix, row: MatrixRow) -> str:
    parts = [matrices.called(row.verdict, "not compared")]
    if row.limit_usage is not None:
        parts.append(f"{times(row.limit_usage)} of a limit")
    if row.path in matrix.odd:
        parts.append("not like most of the others")
    return f"{row.path}: {', '.join(parts)}"


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


def _among(matrix: Matrix) -> Section | None:
    if not matrix.cross_checks:
        return None
    rows: list[tuple[str, ...]] = [
        (
            check.reference,
            check.candidate,
            matrices.called(check.verdict, f"not compared: {check.problem or ''}"),
        )
        for check in matrix.cross_checks
    ]
    titles = ("run", "and run", "verdict")
    grid = Table(caption="The other runs with one another", columns=titles, rows=rows, num_left=3)
    return Section(
        id="among", title="Among themselves", body=[grid],
        lead="Who agrees with whom, where the first run is the odd one.",
    )  # fmt: skip


def _not_compared(matrix: Matrix) -> Section | None:
    failed = [row for row in matrix.rows if row.problem is not None]
    if not failed:
        return None
    items = [el("li", prose_block(f"{row.path}: {row.problem}")) for row in failed]
    return Section(id="failed", title="Not compared", body=(el("ul", *items, class_="why"),))


# --- localize -----------------------------------------------------------------------------------


def _localization(result: Localization, background: Background) -> str:
    lines = localized.localization_lines(result, answer_only=True)
    top = opening(lines, id="answer", label="Answer", below=next_commands(result.commands))
    descent = Section(
        id="descent", title="The descent", lead="From the block to the operator, and its proof.",
        body=(_levels(result), printed(localized.proof_lines(result))),
    )  # fmt: skip
    if result.report is None:
        return frame(
            "localize", lines[0].text[:120], [top], [descent],
            attachment=result.to_json().encode(), made_by=__version__,
        )  # fmt: skip
    return page(
        result.report, background, openings=[top], sections=[descent], command_name="localize"
    )


def _levels(result: Localization) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            level.level,
            level.site or "nothing stands out",
            letter(level.side or "-"),
            level.verdict,
            level.why or "-",
        )
        for level in result.levels
    ]
    return Table(
        caption="Level by level", columns=("level", "begins at", "wrong", "verdict", "why"),
        rows=rows, num_left=5,
    )  # fmt: skip


# --- sensitivity --------------------------------------------------------------------------------


def _sensitivity(result: Sensitivity) -> str:
    first, *rest = sensitivities.answer_lines(result)
    tables = [_sizes(result, escalated=False)]
    if result.escalated:
        tables.append(_sizes(result, escalated=True))
    pictures = _size_plots(result) if len(result.blocks) > 3 else []
    sizes = Section(
        id="sizes", title="The smallest fault that is seen",
        lead="Faults of growing size were planted in what B recorded, until compare "
        "saw them.",
        body=(Figures(pictures) if pictures else None, *tables),
    )  # fmt: skip
    units = Table(
        caption="A size is a share of", columns=("fault", "unit"), rows=list(result.units.items()),
        num_left=2,
    )  # fmt: skip
    more = [el("p", line.text.strip()) for line in rest]
    basis = Section(
        id="basis", title="What it rests on",
        body=(printed(sensitivities.setup_lines(result)), units),
    )  # fmt: skip
    return frame(
        "sensitivity", first.text[:120],
        [opening([first], *more, standing="good", label="Answer",
                 below=next_commands(result.next))],
        [sizes, basis], attachment=result.to_json().encode(), made_by=result.tool_version,
    )  # fmt: skip


def _sizes(result: Sensitivity, *, escalated: bool) -> Table:
    sizes = {(size.block, size.fault): size for size in result.sizes}
    rows = [
        (block, *(sensitivities.cell(sizes[block, fault], escalated) for fault in result.phrases))
        for block in result.blocks
    ]
    what = "with the escalated pass, float32" if escalated else f"anchored pass, {result.dtype}"
    return Table(
        caption=f"Smallest size seen, {what}", columns=("block", *result.phrases), rows=rows
    )


def _size_plots(result: Sensitivity) -> list[Plot]:
    plots = []
    names = [block.rpartition(".")[2] for block in result.blocks]
    for fault in result.phrases:
        sizes = {size.block: size for size in result.of(fault)}
        lines = [PlotLine(label="anchored", kind="anchored",
                          values=[sizes[block].size for block in result.blocks])]  # fmt: skip
        if result.escalated:
            deep = [sizes[block].escalated_size for block in result.blocks]
            lines.append(PlotLine(label="escalated", kind="free", values=deep))
        seen = [value for value in lines[0].values if value is not None]
        worst = f"up to {share(max(seen))}" if seen else "in no block"
        legend = [("line anchored", f"in {result.dtype}"), ("line free", "escalated, float32")]
        plots.append(Plot(
            id=f"size-{fault}", title=fault, names=names, lines=lines,
            described=f"The smallest size that is seen, by block: {worst}.",
            label=f"{fault}: seen {worst}.", legend=legend[: len(lines)],
        ))  # fmt: skip
    return plots


# --- selfcheck ----------------------------------------------------------------------------------


def _selfcheck(result: SelfcheckResult) -> str:
    rows: list[tuple[str, ...]] = [
        (line.name, selfchecks.how_changed(line), selfchecks.result_text(line))
        for line in result.lines
    ]
    bad = [line.status in ("diverged", "suspected") for line in result.lines]
    grid = Table(
        caption="Ways of running", columns=("line", "what is changed", "result"), rows=rows,
        num_left=3, marks=["flagged" if is_bad else "" for is_bad in bad],
    )  # fmt: skip
    verdicts = [
        el("li", prose_block(f"{line.name}: {line.summary}"))
        for line in result.lines
        if line.summary
    ]
    body: list[Block] = [grid]
    if verdicts:
        body.append(details("What compare says of each", el("ul", *verdicts)))
    commands = [command for line in result.diverged or result.compared for command in line.next[:1]]
    ways = Section(
        id="ways", title="Ways of running", body=tuple(body),
        lead="Each is a run like the base run with one thing changed.",
    )  # fmt: skip
    lines = selfchecks.selfcheck_answer(result)
    return _framed("selfcheck", result, lines, [ways], commands=commands[:3])


# --- scores -------------------------------------------------------------------------------------


_STANDINGS = {"equal": "good", "worse": "bad", "incomparable": "bad"}


def _scores(report: ScoresReport) -> str:
    openings = [
        opening([headline(candidate)],
                facts([("A", report.reference.path), ("B", candidate.side.path)]),
                standing=_STANDINGS.get(candidate.verdict, "unsure"), id=f"verdict-{number}",
                below=next_commands(report.next) if not number else ())
        for number, candidate in enumerate(report.candidates)
    ]  # fmt: skip
    sections = [
        _task_section(number, candidate) for number, candidate in enumerate(report.candidates)
    ]
    return frame(
        "scores", headline(report.candidates[0]).text[:120], openings, sections,
        attachment=report.to_json().encode(), made_by=report.tool_version,
    )  # fmt: skip


def _task_section(number: int, candidate: Candidate) -> Section:
    grid = Table(
        caption="Each score, candidate against reference", columns=TITLES, num_left=2,
        rows=[task_cells(task) for task in candidate.tasks],
        marks=["flagged" if task.verdict == "worse" else "" for task in candidate.tasks],
    )  # fmt: skip
    told = [
        el("div", el("h3", name_of(task)), facts(list(facts_of(task, verbose=True))))
        for task in candidate.tasks
    ]
    notes = [
        el("p", text) for text in (*candidate.reasons, *candidate.notes, *candidate.side.notes)
    ]
    return Section(
        id=f"scores-{number}", title=f"Scores of {candidate.side.path}",
        body=(grid, *told, *notes),
    )  # fmt: skip

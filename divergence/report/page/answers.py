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
from divergence.document import Headline, Section
from divergence.evaluations.result import Candidate, ScoresReport
from divergence.evaluations.show import facts_of, headline, name_of, score_table
from divergence.experiments.result import Localization, SelfcheckResult, Sensitivity
from divergence.fleet.result import Matrix
from divergence.html.parts import el, facts
from divergence.report import experiments
from divergence.report import localization as localized
from divergence.report import matrix as matrices
from divergence.report.page.whole import frame, next_commands, opening, page


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
    name: str, answer: Matrix | Sensitivity | SelfcheckResult, top: Headline,
    sections: Sequence[Section], *, commands: Sequence[str] = (), **parts: str,
) -> str:  # fmt: skip
    """``parts``: others of ``frame``."""
    return frame(
        name, str(top)[:120], [opening(top, below=next_commands(commands))], sections,
        attachment=answer.to_json().encode(), made_by=answer.tool_version, **parts,
    )  # fmt: skip


# --- many runs ----------------------------------------------------------------------------------


def _matrix(matrix: Matrix) -> str:
    small = replace(matrix, rows=[replace(row, report=None) for row in matrix.rows])
    return _framed(
        "compare", small, matrices.headline_of(matrix),
        matrices.matrix_sections(matrix), commands=matrix.next, noun="Run",
        data_lead="This page holds the answer it was made of, without the report of each pair.",
    )  # fmt: skip


# --- localize -----------------------------------------------------------------------------------


def _localization(result: Localization, background: Background) -> str:
    answer = localized.headline_of(result)
    top = opening(answer, id="answer", label="Answer", below=next_commands(result.commands))
    sections = [localized.descent_section(result, page=True)]
    if result.report is None:
        return frame(
            "localize", str(answer)[:120], [top], sections,
            attachment=result.to_json().encode(), made_by=__version__,
        )  # fmt: skip
    return page(
        result.report, background, openings=[top], sections=sections, command_name="localize"
    )


# --- sensitivity --------------------------------------------------------------------------------


def _sensitivity(result: Sensitivity) -> str:
    first, *rest = (line.text.strip() for line in experiments.answer_lines(result))
    more = [el("p", text) for text in rest]
    top = Headline("", first)
    return frame(
        "sensitivity", str(top)[:120],
        [opening(top, *more, standing="good", label="Answer",
                 below=next_commands(result.next))],
        experiments.sensitivity_sections(result), attachment=result.to_json().encode(),
        made_by=result.tool_version,
    )  # fmt: skip


def _selfcheck(result: SelfcheckResult) -> str:
    commands = [command for line in result.diverged or result.compared for command in line.next[:1]]
    return _framed("selfcheck", result, Headline("", *experiments.agreement(result)),
                   experiments.selfcheck_sections(result), commands=commands[:3])  # fmt: skip


# --- scores -------------------------------------------------------------------------------------


_STANDINGS = {"equal": "good", "worse": "bad", "incomparable": "bad"}


def _scores(report: ScoresReport) -> str:
    openings = [
        opening(headline(candidate),
                facts([("A", report.reference.path), ("B", candidate.side.path)]),
                standing=_STANDINGS.get(candidate.verdict, "unsure"), id=f"verdict-{number}",
                below=next_commands(report.next) if not number else ())
        for number, candidate in enumerate(report.candidates)
    ]  # fmt: skip
    sections = [
        _task_section(number, candidate) for number, candidate in enumerate(report.candidates)
    ]
    return frame(
        "scores", str(headline(report.candidates[0]))[:120], openings, sections,
        attachment=report.to_json().encode(), made_by=report.tool_version,
    )  # fmt: skip


def _task_section(number: int, candidate: Candidate) -> Section:
    told = [
        el("div", el("h3", name_of(task)), facts(list(facts_of(task, verbose=True))))
        for task in candidate.tasks
    ]
    notes = [
        el("p", text) for text in (*candidate.reasons, *candidate.notes, *candidate.side.notes)
    ]
    return Section(
        id=f"scores-{number}", title=f"Scores of {candidate.side.path}",
        body=(score_table(candidate), *told, *notes),
    )  # fmt: skip

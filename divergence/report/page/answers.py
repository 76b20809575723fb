"""The pages of answers that are not one comparison: many runs, localize, sensitivity, selfcheck,
scores.

Each has the terminal's answer on top and its tables as tables. ``page_of`` takes any of them, and a
Report.
"""

from __future__ import annotations

from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.result import Answer, Report
from divergence.comparison.results import Background
from divergence.document import Document, Headline, Section
from divergence.evaluations.result import Candidate, ScoresReport
from divergence.evaluations.show import facts_of, headline, name_of, score_table
from divergence.experiments.result import Localization, SelfcheckResult, Sensitivity
from divergence.fleet.result import Matrix
from divergence.html.parts import Node, el, facts
from divergence.report import experiments
from divergence.report import localization as localized
from divergence.report import matrix as matrices
from divergence.report.page.whole import frame, opening, page


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
    name: str, answer: Matrix | Sensitivity | SelfcheckResult, whole: Document, *more: Node,
    **parts: str,
) -> str:  # fmt: skip
    """``more``: under the facts. ``parts``: others of ``frame``."""
    return frame(
        name, str(whole.headline)[:120], [opening(whole, *more)], whole.sections,
        attachment=answer.to_json().encode(), made_by=answer.tool_version, **parts,
    )  # fmt: skip


# --- many runs ----------------------------------------------------------------------------------


def _matrix(matrix: Matrix) -> str:
    small = replace(matrix, rows=[replace(row, report=None) for row in matrix.rows])
    whole = Document(
        headline=matrices.headline_of(matrix), sections=matrices.matrix_sections(matrix),
        next=matrix.next,
    )  # fmt: skip
    return _framed(
        "compare", small, whole, noun="Run",
        data_lead="This page holds the answer it was made of, without the report of each pair.",
    )  # fmt: skip


# --- localize -----------------------------------------------------------------------------------


def _localization(result: Localization, background: Background) -> str:
    answer = localized.headline_of(result)
    top = opening(Document(headline=answer, next=result.commands), id="answer", label="Answer")
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
    whole = Document(
        headline=Headline("", first, "green"), next=result.next,
        sections=experiments.sensitivity_sections(result),
    )  # fmt: skip
    return _framed("sensitivity", result, whole, *(el("p", text) for text in rest))


def _selfcheck(result: SelfcheckResult) -> str:
    commands = [command for line in result.diverged or result.compared for command in line.next[:1]]
    return _framed("selfcheck", result, Document(
        headline=Headline("", *experiments.agreement(result)), next=commands[:3],
        sections=experiments.selfcheck_sections(result),
    ))  # fmt: skip


# --- scores -------------------------------------------------------------------------------------


def _scores(report: ScoresReport) -> str:
    openings = [
        opening(Document(headline=headline(candidate), next=() if number else report.next),
                facts([("A", report.reference.path), ("B", candidate.side.path)]),
                id=f"verdict-{number}")
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

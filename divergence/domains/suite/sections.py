"""A suite of operators in a report: one row each, the worse ones first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from divergence.comparison.result import Background, Report
from divergence.document import Block, Column, Section, Sentence, Table, out_of
from divergence.domains.suite.result import SuiteCase, SuiteOperator, SuiteResult
from divergence.words import count, decimal, letter, share, times

_MARKS = {"wrong": "wrong", "flushed": "differs", "ties": "differs"}


def sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> list[Section]:
    """Nothing where models were compared. A page, and ``every``, have the table of all results."""
    suite = report.parts.get("suite")
    if not isinstance(suite, SuiteResult):
        return []
    whole = every or background is not None
    equal = [op for op in suite.operators if op.status == "identical" and not whole]
    operators = [op for op in suite.operators if op not in equal]
    body: list[Block] = []
    if operators:
        body.append(
            Table(
                title="operators",
                columns=_titles(suite.judged),
                num_left=2,
                rows=[_operator_row(op, judged=suite.judged) for op in operators],
                below={n: _ran_by(op) for n, op in enumerate(operators)},
                marks=[_MARKS.get(op.status, "") for op in operators],
            )
        )
    if suite.judged and operators:
        body.append(
            Sentence(
                "W: err B over err A. score: error in units of what rounding explains, wrong "
                f"beyond {suite.score_limit:g}; so is a row's scale that is off by "
                f"{suite.gain_limit:g} standard deviations. ulp: from the truth.",
                indent=2,
                style="dim",
            )
        )
    if equal:
        names = ", ".join(_short(op.operator) for op in equal)
        body.append(Sentence(f"bit-identical: {names}", indent=2, style="dim"))
    if whole:
        body.append(
            Table(
                title="results",
                folded=f"All {len(suite.cases):,} results",
                columns=(
                    "operator",
                    Column("status", _status),
                    *_titles(suite.judged)[3 if suite.judged else 2 :],
                ),
                rows=[_case_row(case, judged=suite.judged) for case in suite.cases],
                num_left=2,
                marks=[_MARKS.get(case.status, "") for case in suite.cases],
            )
        )
    against = "against the truth" if suite.judged else "against one another: no truth was given"
    what = f"{count(len(suite.operators), 'operator')}, {count(len(suite.cases), 'result')}"
    return [Section(id="suite", title="operators", detail=f"{what}, {against}", body=body)]


def _short(operator: str) -> str:
    return operator.removeprefix("suite.")


def _titles(judged: bool) -> Sequence[Column | str]:
    case, differ = Column("worst case", _where, left=True), Column("differ", out_of)
    ulp = Column("ulp p99", _numbers), Column("ulp max", _numbers)
    if not judged:
        return ("operator", differ, Column("rel L2", decimal), *ulp, case)
    score = Column("score", partial(_numbers, digits=1))
    worse = Column("worse", _worse)
    return ("operator", worse, differ, Column("W", times), score, *ulp, case)


def _case_row(case: SuiteCase, *, judged: bool) -> tuple[object, ...]:
    return (_short(case.operator), case, *_figures(case, judged=judged))


def _status(case: SuiteCase) -> str:
    return case.status + (f": {letter(case.side)}" if case.side else "")


def _operator_row(op: SuiteOperator, *, judged: bool) -> tuple[object, ...]:
    differ = (op.num_cases - op.num_same, op.num_cases)
    figures = _figures(op.worst, judged=judged)
    return (_short(op.operator), *([op] if judged else []), differ, *figures)


def _worse(op: SuiteOperator) -> str:
    if op.status in ("flushed", "ties"):
        return f"{op.status}: {letter(op.side)}"
    return letter(op.side or "both") if op.status == "wrong" else "-"


def _ran_by(op: SuiteOperator) -> list[Sentence]:
    """An implementation other than torch's."""
    both = (op.reference_implementation, op.candidate_implementation)
    return (
        [] if both == ("torch", "torch") else [Sentence(" / ".join(dict.fromkeys(both)), "ran by")]
    )


def _figures(case: SuiteCase, *, judged: bool) -> tuple[object, ...]:
    if not judged:
        return (case.rel_l2, [case.ulp_p99], [case.ulp_max], case)
    a, b = case.reference, case.candidate
    if a is None or b is None or case.kind in ("codes", "indices"):
        return (*[None] * 4, case)
    return (case.w, [a.score, b.score], [a.ulp_p99, b.ulp_p99], [a.ulp_max, b.ulp_max], case)


def _where(case: SuiteCase) -> str:
    """The case, and of integers against a truth what is off in A and in B."""
    where = case.site.partition("/")[0].partition(".")[2]
    port = case.site.rpartition(":out")[2]
    where += f" :out{port}" if port else ""
    a, b = case.reference, case.candidate
    if a is None or b is None:
        return where
    if case.kind == "codes":
        both = f"codes off by one {share(a.off_by_one)} / {share(b.off_by_one)}"
        return f"{where}: {both}, more {share(a.off_by_more)} / {share(b.off_by_more)}"
    if case.kind == "indices":
        wrong = f"rows wrong {share(a.rows_wrong)} / {share(b.rows_wrong)}"
        return f"{where}: {wrong}, tied {share(a.rows_tied)} / {share(b.rows_tied)}"
    return where


def _numbers(values: Sequence[float | None], digits: int = 0) -> str:
    """Of one side, or of both: ``0.9/1.2``."""
    most = 999.5 if digits else 1e5
    return "/".join(
        f"{value:.{digits}f}" if value is not None and value < most else decimal(value)
        for value in values
    )

"""A suite of operators in a report: one row each, the worse ones first."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.result import Background, Report
from divergence.document import Block, Column, Section, Sentence, Table
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
                caption="Operators",
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
                caption="Results",
                title="results",
                folded=f"All {len(suite.cases):,} results",
                columns=("operator", "status", *_titles(suite.judged)[3 if suite.judged else 2 :]),
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
    case = Column("worst case", left=True)
    if not judged:
        return ("operator", "differ", "rel L2", "ulp p99", "ulp max", case)
    return ("operator", "worse", "differ", "W", "score", "ulp p99", "ulp max", case)


def _case_row(case: SuiteCase, *, judged: bool) -> tuple[str, ...]:
    status = case.status + (f": {letter(case.side)}" if case.side else "")
    return (_short(case.operator), status, *_figures(case, judged=judged))


def _operator_row(op: SuiteOperator, *, judged: bool) -> tuple[str, ...]:
    differ = f"{op.num_cases - op.num_same}/{op.num_cases}"
    worse = {"wrong": letter(op.side or "both")}.get(op.status, "-")
    if op.status in ("flushed", "ties"):
        worse = f"{op.status}: {letter(op.side)}"
    figures = _figures(op.worst, judged=judged)
    return (_short(op.operator), *([worse] if judged else []), differ, *figures)


def _ran_by(op: SuiteOperator) -> list[Sentence]:
    """An implementation other than torch's."""
    both = (op.reference_implementation, op.candidate_implementation)
    return (
        [] if both == ("torch", "torch") else [Sentence(" / ".join(dict.fromkeys(both)), "ran by")]
    )


def _figures(case: SuiteCase, *, judged: bool) -> tuple[str, ...]:
    where = case.site.partition("/")[0].partition(".")[2]
    port = case.site.rpartition(":out")[2]
    where += f" :out{port}" if port else ""
    if not judged:
        return (decimal(case.rel_l2), _number(case.ulp_p99), _number(case.ulp_max), where)
    a, b = case.reference, case.candidate
    if a is None or b is None:
        return ("-", "-", "-", "-", where)
    if case.kind == "codes":
        both = f"off by one {share(a.off_by_one)} / {share(b.off_by_one)}"
        more = f"more {share(a.off_by_more)} / {share(b.off_by_more)}"
        return ("codes", "", "", "", f"{where}: {both}, {more}")
    if case.kind == "indices":
        wrong = f"rows wrong {share(a.rows_wrong)} / {share(b.rows_wrong)}"
        tied = f"tied {share(a.rows_tied)} / {share(b.rows_tied)}"
        return ("indices", "", "", "", f"{where}: {wrong}, {tied}")
    return (
        times(case.w),
        f"{_number(a.score, 1)}/{_number(b.score, 1)}",
        f"{_number(a.ulp_p99)}/{_number(b.ulp_p99)}",
        f"{_number(a.ulp_max)}/{_number(b.ulp_max)}",
        where,
    )


def _number(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < (999.5 if digits else 1e5) else decimal(value)

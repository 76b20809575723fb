"""A suite of operators in a report: one row each, the worse ones first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from divergence.comparison.result import Background, Report
from divergence.document import Block, Column, Section, Sentence, Table, out_of
from divergence.domains.suite.result import SuiteCase, SuiteOperator, SuiteResult
from divergence.words import count, decimal, letter, share, times

_OFF = {
    "codes": (("codes off by one", "off_by_one"), ("more", "off_by_more")),
    "indices": (("rows wrong", "rows_wrong"), ("tied", "rows_tied")),
}
"""By the kind of a case: what of it is off, and the side's field."""
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
                rows=[
                    (
                        _short(op.operator),
                        *[op] * suite.judged,
                        (op.num_cases - op.num_same, op.num_cases),
                        *_figures(op.worst, judged=suite.judged),
                    )
                    for op in operators
                ],
                below={  # an implementation other than torch's
                    n: [Sentence(" / ".join(dict.fromkeys(both)), "ran by")]
                    for n, op in enumerate(operators)
                    if (both := (op.reference_implementation, op.candidate_implementation))
                    != ("torch", "torch")
                },
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
                rows=[
                    (_short(case.operator), case, *_figures(case, judged=suite.judged))
                    for case in suite.cases
                ],
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


def _status(case: SuiteCase) -> str:
    return case.status + (f": {letter(case.side)}" if case.side else "")


def _worse(op: SuiteOperator) -> str:
    if op.status in ("flushed", "ties"):
        return f"{op.status}: {letter(op.side)}"
    return letter(op.side or "both") if op.status == "wrong" else "-"


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
    off, sides = _OFF.get(case.kind, ()), (case.reference, case.candidate)
    if not off or None in sides:
        return where
    each = (" / ".join(share(getattr(side, name)) for side in sides) for _, name in off)
    parts = (f"{what} {both}" for (what, _), both in zip(off, each, strict=True))
    return f"{where}: {', '.join(parts)}"


def _numbers(values: Sequence[float | None], digits: int = 0) -> str:
    """Of one side, or of both: ``0.9/1.2``."""
    most = 999.5 if digits else 1e5
    return "/".join(
        f"{value:.{digits}f}" if value is not None and value < most else decimal(value)
        for value in values
    )

"""A suite of operators in a report: one line each, the worse ones first."""

from __future__ import annotations

from divergence.comparison.result import Report
from divergence.comparison.results import SuiteCase, SuiteOperator
from divergence.layout import (
    BLANK,
    Line,
    columns,
    count,
    decimal,
    heading,
    line,
    prose,
    share,
    times,
)
from divergence.words import letter

_STYLES = {"wrong": "bold red", "flushed": "yellow", "ties": "yellow"}
_PREFIX = "suite."


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """The table of operators; with ``all_sites`` the one of all results."""
    suite = report.suite
    if suite is None:
        return []
    against = "against the truth" if suite.judged else "against one another: no truth was given"
    what = f"{count(len(suite.operators), 'operator')}, {count(len(suite.cases), 'result')}"
    lines = [heading("operators", f"{what}, {against}")]
    equal = [
        operator for operator in suite.operators if operator.status == "identical" and not all_sites
    ]
    shown = [operator for operator in suite.operators if operator not in equal]
    if shown:
        rows = [titles(suite.judged), *(operator_row(op, judged=suite.judged) for op in shown)]
        for number, item in enumerate(columns(rows, indent=2, widest=44)):
            style = "dim" if number == 0 else _STYLES.get(shown[number - 1].status, "")
            lines.append(line((item.text, style)))
    if suite.judged and shown:
        lines.append(
            prose(
                "  ",
                "W: err B over err A. score: error in units of what rounding "
                f"explains, wrong beyond {suite.score_limit:g}; so is a row's scale that is off by "
                f"{suite.gain_limit:g} standard deviations. ulp: from the truth.",
                width=2,
                style="dim",
            )
        )
    if equal:
        names = ", ".join(_short(op.operator) for op in equal)
        lines.append(prose("  ", f"bit-identical: {names}", width=2, style="dim"))
    if all_sites:
        rows = all_rows(suite.cases, judged=suite.judged)
        lines += [BLANK, heading("results"), *columns(rows, widest=44)]
    return [*lines, BLANK]


def _short(operator: str) -> str:
    return operator.removeprefix(_PREFIX)


def titles(judged: bool) -> tuple[str, ...]:
    """Those of ``operator_row``."""
    if not judged:
        return ("operator", "differ", "rel L2", "ulp p99", "ulp max", "worst case")
    return ("operator", "worse", "differ", "W", "score", "ulp p99", "ulp max", "worst case")


def operator_row(op: SuiteOperator, *, judged: bool) -> tuple[str, ...]:
    """Implementations other than torch's stand behind the name."""
    name = _short(op.operator)
    implementations = {op.reference_implementation, op.candidate_implementation}
    if implementations != {"torch"}:
        name += f" ({' / '.join(sorted(implementations - {'torch'}))})"
    differ = f"{op.num_cases - op.num_same}/{op.num_cases}"
    worse = {"wrong": letter(op.side or "both")}.get(op.status, "-")
    if op.status in ("flushed", "ties"):
        worse = f"{op.status}: {letter(op.side)}"
    return (name, *([worse] if judged else []), differ, *_figures(op.worst, judged=judged))


def _figures(case: SuiteCase, *, judged: bool) -> tuple[str, ...]:
    where = case.site.partition("/")[0].partition(".")[2]
    port = case.site.rpartition(":out")[2]
    where += f" :out{port}" if port else ""
    if not judged:
        return (decimal(case.rel_l2), _ulp(case.ulp_p99), _ulp(case.ulp_max), where)
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
        f"{_number(a.score)}/{_number(b.score)}",
        f"{_ulp(a.ulp_p99)}/{_ulp(b.ulp_p99)}",
        f"{_ulp(a.ulp_max)}/{_ulp(b.ulp_max)}",
        where,
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 999.5 else decimal(value)


def _ulp(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value < 1e5 else decimal(value)


def all_rows(cases: list[SuiteCase], *, judged: bool) -> list[tuple[str, ...]]:
    """One for each result, below titles."""
    rows = [("operator", "status", *titles(judged)[3 if judged else 2 :])]
    for case in cases:
        status = case.status + (f": {letter(case.side)}" if case.side else "")
        rows.append((_short(case.operator), status, *_figures(case, judged=judged)))
    return rows

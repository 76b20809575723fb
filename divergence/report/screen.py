"""The first screen of a comparison: what most readers need, in 25 lines of 80 columns.

The answer, what it could not have seen, what was compared, the worst rows, and one command. What is
left out stands in the whole report (``report_lines``), behind ``-v``.
"""

from __future__ import annotations

from divergence.analyses.blocks.sections import num_bad, prompt_usage, worst_places, worst_rows
from divergence.comparison.result import Report, RunSummary
from divergence.document import Sentence, named
from divergence.layout import (
    BLANK,
    Line,
    columns,
    count,
    cut,
    fold,
    heading,
    limit_share,
    line,
    next_lines,
    prose,
)
from divergence.report.summary import opening_of, report_lines, states
from divergence.report.text import headline_lines, sentence_line

WIDTH, HEIGHT = 80, 25
_NUM_ROWS, _NUM_QUIET = 5, 2
_NUM_PROMPTS = 4


def screen_lines(report: Report, *, more: str = "add -v") -> list[Line]:
    """The first screen. ``more``: how to see the rest. A report without blocks (operators alone, a
    suite, probed arithmetic) is shown whole."""
    if not report.sites and report.verdict.kind != "incomparable":
        return report_lines(report)
    most = _NUM_QUIET if _is_quiet(report) else _NUM_ROWS
    for num_rows in range(most, 1, -1):  # fewer rows where the rest is long
        lines = _screen(report, num_rows, more)
        if sum(len(fold(item, WIDTH)) for item in lines) <= HEIGHT:
            break
    return lines


def _screen(report: Report, num_rows: int, more: str) -> list[Line]:
    whole = opening_of(report)
    # the first facts behind a verdict that is more than that all is well
    most = 5 if report.verdict.kind in ("incomparable", "undetermined") else 2
    facts = [] if _is_quiet(report) else whole.why[:most]
    why = [prose("" if number else "because", text) for number, text in enumerate(facts)]
    # of the second run only what is not as in the first
    a, b = report.reference, report.candidate
    same = (a.model, a.dtype, a.device, a.label) == (b.model, b.dtype, b.device, b.label)
    text = f"{b.path}: the same model, dtype and machine" if same else _run_text(b)
    runs = [named("A", _run_text(a)), *states(a), named("B", text), *states(b)]
    operators: list[Sentence] = []
    if (compared := report.operators) is not None:
        num_beyond = sum(result.limit_usage > 1 for result in compared.results)
        text = f"{compared.num_matched} compared, {num_beyond} beyond the limit"
        first = f"; first {compared.onset}" if compared.onset else ""
        operators = [named("operators", text + first)]
    worst = [*_worst_lines(report, num_rows), *_prompt_lines(report)]
    rest = [count(len(report.notes), "note")] if report.notes else []
    rest += [*["every block"] * bool(report.sites), "every setting"]
    return [
        *headline_lines(whole.headline),
        *why,
        BLANK,
        *map(sentence_line, (*runs, *whole.known, *operators)),
        BLANK,
        *worst,
        *next_lines(command.alone for command in report.verdict.commands[:1]),
        line((f"{', '.join(rest)}: {more}", "dim")),
    ]


def _is_quiet(report: Report) -> bool:
    verdict = report.verdict
    return verdict.kind in ("identical", "within_floor") and verdict.side in (None, "neither")


def _run_text(run: RunSummary) -> str:
    label = f" ({run.label})" if run.label else ""
    return f"{run.path}: {cut(run.model, 40)}, {run.dtype.removeprefix('torch.')}{label}"


def _worst_lines(report: Report, num_rows: int) -> list[Line]:
    if report.verdict.kind == "identical":
        return []
    every = worst_rows(report)
    rows = [row for row in every if not row.worst.identical]
    if not rows:
        return []
    judged = any(site.worst.limit_usage for site in rows)
    places = worst_places(rows)
    table = [("error", "of its limit" if judged else "", "where", "")]
    for row, place in list(zip(rows, places, strict=True))[:num_rows]:
        site = row.worst
        used = "not finite" if num_bad(site) else limit_share(site.limit_usage) if judged else ""
        error = "-" if site.rel_l2 is None else f"{site.rel_l2:.1e}"
        name = cut(site.site, 40) + ("  !" if row.flagged else "")
        table.append((error, used, name, place))
    same = "the others are equal bit for bit" if len(rows) <= num_rows < len(every) else ""
    return [heading(f"worst of {len(every)} places", same), *columns(table, widest=44)]


def _prompt_lines(report: Report) -> list[Line]:
    rows = prompt_usage(report)
    if len(rows) < 2 or report.verdict.kind == "identical" or not rows[0][0]:
        return []
    if rows[0][0] < 1.1 * rows[-1][0]:
        return [prose("prompts", f"all {len(rows)} alike: {limit_share(rows[0][0])} of the limit")]
    shown = [f"{sample} ({limit_share(usage)})" for usage, sample, *_ in rows[:_NUM_PROMPTS]]
    more = f", {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
    return [prose("prompts", f"worst first (the first is 0): {', '.join(shown)}{more}")]

"""Blocks in a report: prompts by their worst site, nan and inf, and the table of sites."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from divergence.analyses.blocks.rows import (
    Elision,
    SiteRow,
    elide,
    escalated_ratios,
    main_pass,
    phase_rows,
    phases,
)
from divergence.comparison.result import Report
from divergence.comparison.results import SiteResult
from divergence.layout import (
    BLANK,
    MAX_WIDTH,
    RATIO_DECADES,
    REL_L2_DECADES,
    Line,
    bar,
    columns,
    count,
    cut,
    decimal,
    heading,
    line,
    prose,
    times,
)
from divergence.run.site import of_parameter

__all__ = ["prompt_lines", "prompt_usage", "show", "table_lines"]


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """No table of equal sites, unless all are asked for."""
    same_bits = report.verdict.kind == "identical" and not all_sites
    without_sites = report.suite is not None or report.logprobs is not None
    return [
        *prompt_lines(report, all_sites=all_sites),
        *_nonfinite_lines(report.sites, all_sites=all_sites),
        *([] if same_bits or without_sites else table_lines(report, all_sites=all_sites)),
    ]


def _nonfinite_lines(sites: list[SiteResult], *, all_sites: bool) -> list[Line]:
    nonfinite = [site for site in sites if site.nonfinite is not None and site.nonfinite.total]
    if not nonfinite:
        return []
    nonfinite.sort(key=lambda site: (site.sample, site.step, site.order, site.pass_))
    shown = nonfinite if all_sites else nonfinite[:5]
    lines = [heading("non-finite values", f"at {count(len(nonfinite), 'site')}; in order:")]
    rows = [("site", "pass", "step", "A nan/inf", "B nan/inf")]
    for site in shown:
        n = site.nonfinite
        assert n is not None
        reference = f"{n.reference_nan:,}/{n.reference_inf:,}"
        candidate = f"{n.candidate_nan:,}/{n.candidate_inf:,}"
        rows.append((site.site, site.pass_, str(site.step), reference, candidate))
    lines += columns(rows, widest=42)
    if len(shown) < len(nonfinite):
        lines.append(line((f"  … {len(nonfinite) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


MAX_PROMPTS = 12


def prompt_lines(report: Report, *, all_sites: bool = False) -> list[Line]:
    """One row a prompt, in the order of how much they use of their limits."""
    rows = prompt_usage(report)
    if len(rows) < 2:
        return []
    shown = rows if all_sites else rows[:MAX_PROMPTS]
    beyond = sum(usage > 1 for usage, *_ in rows)
    lines = [
        heading(
            "prompts",
            f"{beyond} of {len(rows)} beyond a limit" if beyond
            else f"{count(len(rows), 'prompt')}, none beyond a limit",
        )
    ]  # fmt: skip
    table = [("prompt", "worst site", "forward", "error / floor", "share of limit", "")]
    for usage, sample, site, ratio in shown:
        forward = f"step {site.step}" if site.step else site.phase
        mark = "!" if usage > 1 else ""
        table.append((str(sample), site.site, forward, f"{ratio:.2f}", f"{usage:.2f}", mark))
    lines += columns(table, widest=48)
    if len(shown) < len(rows):
        lines.append(line((f"  … {len(rows) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


def prompt_usage(report: Report) -> list[tuple[float, int, SiteResult, float]]:
    """(usage, prompt, site, its ratio), the largest usage first."""
    wanted = main_pass(report.sites)
    worst: dict[int, tuple[float, int, SiteResult, float]] = {}
    for site in report.sites:
        if site.pass_ != wanted or site.usage is None or site.ratio is None:
            continue
        if of_parameter(site.site):  # of all prompts together
            continue
        prompts = [(prompt.sample, prompt.usage, prompt.ratio) for prompt in site.prompts]
        for sample, usage, ratio in prompts or [(site.sample, site.usage, site.ratio)]:
            if sample not in worst or usage > worst[sample][0]:
                worst[sample] = (usage, sample, site, ratio)
    return sorted(worst.values(), key=lambda row: (-row[0], row[1]))


MARK_WIDTH = 4
_PASSES = {
    "anchored": "anchored pass: each block got A's input",
    "free": "free pass: each run on its own values",
}
_LEGEND = {
    "rel L2": "|a-b| / |a| at this place; in an anchored pass A's inputs went in on both sides, so "
    "this much is made there",
    "p:token": "prompt and token where it is largest",
    "p:step": "prompt and decode step where it is largest",
    "r": "|a-b| / |a-truth| of the median token: about 1.4 is rounding",
    "W": "|b-truth| / |a-truth| of the median token: about 1 where both are equally right",
    "floors": "rel L2 of the median token, in units of what rounding makes; worst: of the worst "
    "token",
    "float32": "the same once more in float32, in units of what rounding makes there",
    "bar .1-1e3": "rel L2 in units of what rounding makes, on a logarithmic scale",
    "free L2": "rel L2 where each side went on with its own values: what has added up so far",
}
"""What a column holds, by its title."""


def table_lines(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Both phases' tables, each under its heading, and what their columns hold."""
    if not report.sites and (report.operators is not None or report.collectives is not None):
        return []  # operators or collectives alone were compared
    if not report.sites:
        return [heading("sites", "none were compared"), BLANK]
    lines: list[Line] = []
    titles: dict[str, None] = {}
    for phase in phases(report):
        table = _phase_columns(report, phase)
        lines += [*_phase_lines(report, phase, table, all_sites=all_sites), BLANK]
        titles |= dict.fromkeys(column.title for column in table)
    legend = [
        prose(f"  {name}", text, width=14) for name, text in _LEGEND.items() if name in titles
    ]
    more = prose(
        "  more", "every word: docs/glossary.md; every number: --csv FILE, --json", width=14
    )
    return [*lines, heading("columns"), *legend, more, BLANK]


class _Column(NamedTuple):
    """One number of each row. ``left``: a bar, which begins at the left."""

    title: str
    cell: Callable[[SiteRow], str]
    left: bool = False


def _phase_columns(report: Report, phase: str) -> list[_Column]:
    """What is known of the sites of one phase, in the order of the columns."""
    sites = [site for site in report.sites if site.phase == phase]
    rows = phase_rows(report, phase, all_sites=True)
    several = len({site.sample for site in sites}) > 1
    with_floor = any(site.ratio is not None for site in sites)
    with_worst = any(site.ratio_max is not None for site in sites)
    with_truth = any(row.main is not None and row.main.truth is not None for row in rows)
    escalated = escalated_ratios(report, phase)
    where = "step" if phase == "decode" else "token"

    def of_main(read: Callable[[SiteResult], str]) -> Callable[[SiteRow], str]:
        return lambda row: "-" if row.main is None else read(row.main)

    def place(site: SiteResult) -> str:
        at = _at(site, phase)
        return f"{site.sample}:{at}" if several and at != "-" else str(at)

    cols = [
        _Column("rel L2", of_main(lambda site: decimal(site.rel_l2))),
        _Column(f"p:{where}" if several else where, of_main(place)),
    ]
    if with_truth:
        cols += [
            _Column("r", of_main(lambda site: times(site.truth.r_median if site.truth else None))),
            _Column("W", of_main(lambda site: times(site.truth.w_median if site.truth else None))),
        ]
    else:
        cols += [_Column("floors", of_main(lambda site: times(site.ratio)))] * with_floor
        cols += [_Column("worst", of_main(lambda site: times(site.ratio_max)))] * with_worst
    if escalated:
        cols.append(_Column("float32", lambda row: times(escalated.get(row.site))))
    else:
        cols.append(_bar_column(with_floor=with_floor))
    if any(row.free is not None for row in rows):
        cols.append(_Column("free L2", lambda row: decimal(row.free.rel_l2 if row.free else None)))
    return cols


def _bar_column(*, with_floor: bool) -> _Column:
    def drawn(row: SiteRow) -> str:
        site = row.main
        if site is None:
            return ""
        if with_floor:
            return bar(site.ratio, RATIO_DECADES)
        return bar(site.rel_l2, REL_L2_DECADES)

    return _Column("bar .1-1e3" if with_floor else "bar 1e-8-1", drawn, left=True)


def _phase_lines(
    report: Report, phase: str, table: Sequence[_Column], *, all_sites: bool
) -> list[Line]:
    sites = [site for site in report.sites if site.phase == phase]
    rows = phase_rows(report, phase, all_sites=all_sites)
    shown = list(rows) if all_sites else elide(rows)
    known = [row for row in shown if not isinstance(row, Elision)]
    cells = [[column.cell(row) for column in table] for row in known]
    sizes = [max(map(len, texts)) for texts in zip([c.title for c in table], *cells, strict=True)]
    room = MAX_WIDTH - MARK_WIDTH - sum(size + 2 for size in sizes)
    name_width = min(max(len(row.name) + 2 * row.inner for row in rows), room)

    def across(texts: Sequence[str]) -> str:
        return "".join(
            "  " + (text.ljust(size) if column.left else text.rjust(size))
            for text, size, column in zip(texts, sizes, table, strict=True)
        )

    num_steps = len({site.step for site in sites})
    what = f"decode, {count(num_steps, 'step')}" if phase == "decode" else phase
    over = [
        text
        for text, several in (
            ("steps", num_steps > 1),
            ("prompts", len({site.sample for site in sites}) > 1),
        )
        if several
    ]
    worst = f"; the worst of all {' and '.join(over)}" if over else ""
    lines = [
        heading(what, _PASSES.get(main_pass(sites), main_pass(sites)) + worst + _estimated(rows)),
        line(
            (" " * MARK_WIDTH + "site".ljust(name_width) + across([c.title for c in table]), "dim")
        ),
    ]
    texts = iter(cells)
    for row in shown:
        if isinstance(row, Elision):
            lines.append(_elision(row))
            continue
        name = cut("  " * row.inner + row.name, name_width).ljust(name_width)
        mark = (">" if row.onset else " ") + ("!" if row.flagged else " ")
        style = "bold red" if row.onset else "yellow" if row.flagged else ""
        lines.append(line(f" {mark} ", (name + across(next(texts)), style)))
    return [*lines, _footer(rows)]


def _estimated(rows: list[SiteRow]) -> str:
    """How well the rows are known that were estimated."""
    known = [row.main.estimated for row in rows if row.main is not None and row.main.estimated]
    errors = [estimate.relative_error for estimate in known if estimate.relative_error is not None]
    if not known:
        return ""
    spread = f" ±{100 * statistics.median(errors):.0f}%" if errors else ""
    return f"; estimated{spread}"


def _footer(rows: list[SiteRow]) -> Line:
    num_flagged = sum(row.flagged for row in rows)
    num_same = sum(row.worst.identical for row in rows)
    told = f"{count(len(rows), 'row')}: {num_flagged:,} beyond the limit (!)"
    told += ", > where it begins" if any(row.onset for row in rows) else ""
    return line((f"    {told}; {num_same:,} bit-identical", "dim"))


def _elision(gap: Elision) -> Line:
    worst = gap.worst.worst
    value = times(worst.ratio) if worst.ratio is not None else decimal(worst.rel_l2)
    return line((f"  … {count(gap.num_rows, 'healthy row')}, at most {value}", "dim"))


def _at(site: SiteResult, phase: str) -> int | str:
    if site.identical:
        return "-"
    if phase == "decode":
        return site.step
    return "-" if site.worst_position is None else site.worst_position

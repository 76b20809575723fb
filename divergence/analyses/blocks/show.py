"""Blocks in a report: prompts by their worst site, nan and inf, and the table of sites."""

from __future__ import annotations

import statistics

from divergence.analyses.blocks.rows import (
    Elision,
    Row,
    elide,
    escalated_ratios,
    main_pass,
    phase_rows,
    phases,
)
from divergence.comparison.result import Report
from divergence.comparison.results.sites import SiteResult
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
    times,
)

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
    found = [site for site in sites if site.nonfinite is not None and site.nonfinite.total]
    if not found:
        return []
    found.sort(key=lambda site: (site.sample, site.step, site.order, site.pass_))
    shown = found if all_sites else found[:5]
    lines = [heading("non-finite values", f"at {count(len(found), 'site')}; in order:")]
    rows = [("site", "pass", "step", "reference nan/inf", "candidate nan/inf")]
    for site in shown:
        n = site.nonfinite
        assert n is not None
        reference = f"{n.reference_nan:,}/{n.reference_inf:,}"
        candidate = f"{n.candidate_nan:,}/{n.candidate_inf:,}"
        rows.append((site.site, site.pass_, str(site.step), reference, candidate))
    lines += columns(rows, widest=42)
    if len(shown) < len(found):
        lines.append(line((f"  … {len(found) - len(shown)} more (--all lists them)", "dim")))
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
        forward = f"step {site.step}" if site.step else "prefill"
        mark = "!" if usage > 1 else ""
        table.append((str(sample), site.site, forward, f"{ratio:.2f}", f"{usage:.2f}", mark))
    lines += columns(table, widest=48)
    if len(shown) < len(rows):
        lines.append(line((f"  … {len(rows) - len(shown)} more (--all lists them)", "dim")))
    return [*lines, BLANK]


def prompt_usage(report: Report) -> list[tuple[float, int, SiteResult, float]]:
    """(usage, prompt, site, its ratio), the largest usage first."""
    wanted = main_pass(report.sites)
    found: dict[int, tuple[float, int, SiteResult, float]] = {}
    for site in report.sites:
        if site.pass_ != wanted or site.usage is None or site.ratio is None:
            continue
        prompts = [(one.sample, one.usage, one.ratio) for one in site.prompts]
        for sample, usage, ratio in prompts or [(site.sample, site.usage, site.ratio)]:
            if sample not in found or usage > found[sample][0]:
                found[sample] = (usage, sample, site, ratio)
    return sorted(found.values(), key=lambda row: (-row[0], row[1]))


MARK_WIDTH = 4
TOKEN_WIDTH = 8
_PASSES = {
    "anchored": "anchored pass: each block got the reference's input",
    "free": "free pass: each run on its own values",
}


def table_lines(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Both phases' tables, each under its heading."""
    if not report.sites and report.operators is not None:
        return []  # operators alone were compared
    if not report.sites:
        return [heading("sites", "none were compared"), BLANK]
    lines: list[Line] = []
    for phase in phases(report):
        lines += [*_phase_lines(report, phase, all_sites=all_sites), BLANK]
    return lines


def _phase_lines(report: Report, phase: str, *, all_sites: bool) -> list[Line]:
    sites = [site for site in report.sites if (site.step == 0) == (phase == "prefill")]
    rows = phase_rows(report, phase, all_sites=all_sites)
    shown = list(rows) if all_sites else elide(rows)
    num_samples = len({site.sample for site in sites})
    with_floor = any(site.ratio is not None for site in sites)
    with_worst = any(site.ratio_max is not None for site in sites)
    with_truth = any(row.main is not None and row.main.truth is not None for row in rows)
    escalated = escalated_ratios(report, phase)
    with_free = any(row.free is not None for row in rows)
    # rel L2, 1-cos, token, floors or r, worst or W, bar or f32, free L2; two columns before each
    widths = [7, 7, TOKEN_WIDTH, 8 * with_floor, 8 * with_worst, 10, 7 * with_free]
    room = MAX_WIDTH - MARK_WIDTH - sum(width + 2 for width in widths if width)
    name_width = min(max(len(row.name) + 2 * row.inner for row in rows), room)

    num_steps = len({site.step for site in sites})
    what = f"decode, {count(num_steps, 'step')}" if phase == "decode" else "prefill"
    over = [
        text
        for text, several in (("steps", num_steps > 1), ("samples", num_samples > 1))
        if several
    ]
    worst = f"; the worst of all {' and '.join(over)}" if over else ""
    where = "token" if phase == "prefill" else "step"
    titles = [
        "site".ljust(name_width),
        "rel L2".rjust(7),
        "1-cos".rjust(7),
        (f"s:{where}" if num_samples > 1 else where).rjust(TOKEN_WIDTH),
    ]
    titles += [("r" if with_truth else "floors").rjust(8)] if with_floor else []
    titles += [("W" if with_truth else "worst").rjust(8)] if with_worst else []
    scale = "bar .1-1e3" if with_floor else "bar 1e-8-1"
    titles += ["float32".rjust(10) if escalated else scale.ljust(10)]
    titles += ["free L2".rjust(7)] if with_free else []
    lines = [
        heading(what, _PASSES.get(main_pass(sites), main_pass(sites)) + worst + _estimated(rows)),
        line(("    " + "  ".join(titles), "dim")),
    ]
    for row in shown:
        if isinstance(row, Elision):
            lines.append(_elision(row))
            continue
        lines.append(
            _row(
                row,
                name_width,
                phase=phase,
                with_sample=num_samples > 1,
                with_floor=with_floor,
                with_worst=with_worst,
                with_free=with_free,
                with_truth=with_truth,
                escalated=escalated,
            )
        )
    lines.append(
        _footer(rows, with_worst=with_worst, with_truth=with_truth, escalated=bool(escalated))
    )
    return lines


def _estimated(rows: list[Row]) -> str:
    """How well the rows are known that were estimated."""
    found = [row.main.estimated for row in rows if row.main is not None and row.main.estimated]
    errors = [one.relative_error for one in found if one.relative_error is not None]
    if not found:
        return ""
    spread = f" ±{100 * statistics.median(errors):.0f}%" if errors else ""
    return f"; estimated{spread}"


def _footer(rows: list[Row], *, with_worst: bool, with_truth: bool, escalated: bool) -> Line:
    num_flagged = sum(row.flagged for row in rows)
    num_same = sum(row.worst.identical for row in rows)
    parts = [f"{count(len(rows), 'row')}: {num_flagged:,} flagged (!), {num_same:,} bit-identical"]
    if any(row.onset for row in rows):
        parts.append("> onset")
    if with_truth:
        parts.append("r, W: |a-b|, |b-R| over |a-R|")
    elif with_worst:
        parts.append("floors: median token, worst: worst token")
    if escalated:
        parts.append("float32: escalated")
    return line((f"    {'; '.join(parts)}", "dim"))


def _elision(gap: Elision) -> Line:
    worst = gap.worst.worst
    value = times(worst.ratio) if worst.ratio is not None else decimal(worst.rel_l2)
    return line((f"  … {count(gap.num_rows, 'healthy row')}, at most {value}", "dim"))


def _row(
    row: Row,
    name_width: int,
    *,
    phase: str,
    with_sample: bool,
    with_floor: bool,
    with_worst: bool,
    with_free: bool,
    with_truth: bool,
    escalated: dict[str, float],
) -> Line:
    style = "bold red" if row.onset else "yellow" if row.flagged else ""
    mark = (">" if row.onset else " ") + ("!" if row.flagged else " ")
    name = cut("  " * row.inner + row.name, name_width).ljust(name_width)
    main = row.main
    at = str(_at(main, phase)) if main is not None else "-"
    if main is not None and with_sample and at != "-":
        at = f"{main.sample}:{at}"
    cells = [
        decimal(main.rel_l2 if main else None).rjust(7),
        decimal(main.one_minus_cosine if main else None).rjust(7),
        cut(at, TOKEN_WIDTH).rjust(TOKEN_WIDTH),
    ]
    left, right = (main.ratio, main.ratio_max) if main else (None, None)
    if with_truth:
        truth = main.truth if main else None
        left, right = (truth.r_median, truth.w_median) if truth else (None, None)
    if with_floor:
        cells.append(times(left).rjust(8))
    if with_worst:
        cells.append(times(right).rjust(8))
    filled = times(escalated.get(row.site)).rjust(10) if escalated else ""
    if main is not None and not escalated:
        scale = (main.ratio, RATIO_DECADES) if with_floor else (main.rel_l2, REL_L2_DECADES)
        filled = bar(*scale)
    tail = f"  {decimal(row.free.rel_l2 if row.free else None).rjust(7)}" if with_free else ""
    return line(
        f" {mark} ",
        (name, style),
        "  ",
        ("  ".join(cells), style),
        "  ",
        (filled.ljust(10), style),
        (tail, style),
    )


def _at(site: SiteResult, phase: str) -> int | str:
    if site.identical:
        return "-"
    if phase == "decode":
        return site.step
    return "-" if site.worst_position is None else site.worst_position

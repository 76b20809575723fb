"""Blocks on a page: the error of each, where and when it is largest, what a block is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from divergence.analyses.blocks.maps import maps
from divergence.analyses.blocks.parts import block_parts
from divergence.analyses.blocks.rows import Elision, Row, elide, main_pass, phase_rows, phases
from divergence.analyses.blocks.show import prompt_usage
from divergence.comparison.result import Report
from divergence.comparison.results.background import Background
from divergence.html.element import Element, el
from divergence.html.figures import Line, figure, line_plot
from divergence.html.parts import Section, Table, details, table
from divergence.layout import count, decimal, times

__all__ = ["page"]

_MOST_ROWS = 240
_WORST = 5


def page(report: Report, background: Background) -> list[Section]:
    """Nothing where no site was compared."""
    if not report.sites:
        return []
    figures: dict[str, dict[str, object]] = {}
    plots: list[Element] = []
    tables: list[Element] = []
    rows_of = {phase: phase_rows(report, phase) for phase in phases(report)}
    for phase, every in rows_of.items():
        rows = [row for row in every if not row.inner]
        plots += _plots(report, phase, rows, figures)
        tables.append(table(_table(rows, f"All blocks, {phase}")))
    pictures, more = maps(report, background)
    figures |= more
    parts = block_parts(report)
    equal = all(site.identical for site in report.sites)
    placed = report.verdict.onset is not None
    return [
        Section(
            id="blocks", lead=_lead(report, equal=equal),
            title="Where the error is made" if placed else "The error of each block",
            body=(
                None if equal else table(_worst(rows_of.values())),
                el("div", *plots, class_="figures"),
                el("div", class_="chosen", id="chosen", hidden=True),
                el("div", *pictures, class_="figures") if pictures else None,
                *_prompts(report),
                details(f"All {count(len(parts), 'row')} as a table", *tables),
            ),
            figures=figures, blocks=parts, chosen=_chosen(report, rows_of.values()),
        )
    ]  # fmt: skip


def _lead(report: Report, *, equal: bool) -> str:
    if equal:
        return "There is none: all bits are equal."
    if main_pass(report.sites) == "anchored":
        return (
            "Each block of B was given the input that A recorded, so an error at its output was "
            "made in that block and not inherited. The shaded band is what rounding explains."
        )
    return (
        "Each run went its own way, so a block also carries the errors of those before it. The "
        "shaded band is what rounding in one block explains."
    )


def _key(site_name: str) -> str:
    """A row's name on an axis: the number of a block, the module of what is outside them."""
    module = site_name.rpartition(":")[0] or site_name
    return module.rpartition(".")[2]


def _plots(
    report: Report, phase: str, rows: Sequence[Row], figures: dict[str, dict[str, object]]
) -> list[Element]:
    """The error of each block and, with a truth, of both sides."""
    outputs = [row for row in rows if row.worst.rel_l2 is not None]
    if not outputs:
        return []
    steps = len({s.step for s in report.sites if s.step})
    what = "Prefill: the prompt" if phase == "prefill" else f"Decode: {count(steps, 'step')}"
    found = [_error_plot(phase, what, outputs, figures)]
    if any(row.main is not None and row.main.truth is not None for row in outputs):
        found.append(_truth_plot(phase, what, outputs, figures))
    return found


def _typical(row: Row, *, free: bool) -> float | None:
    """The median token's error, or that of the whole tensor where tokens are not known apart."""
    site = row.free if free else row.main
    if site is None:
        return None
    return site.rel_l2 if site.token_rel_l2_median is None else site.token_rel_l2_median


def _error_plot(
    phase: str, what: str, rows: Sequence[Row], figures: dict[str, dict[str, object]]
) -> Element:
    anchored = any(row.main is not None and row.main.pass_ == "anchored" for row in rows)
    kind = "anchored" if anchored else "free"
    lines = [Line(label=kind, kind=kind, values=[_typical(row, free=False) for row in rows])]
    if any(row.free is not None for row in rows):
        free = [_typical(row, free=True) for row in rows]
        lines.append(Line(label="free", kind="free", values=free))
    floors = [row.worst.floor for row in rows]
    limits = [
        None if site.floor is None or site.limit is None else site.floor * site.limit
        for site in (row.worst for row in rows)
    ]
    with_floor = any(floors)
    flagged = [n for n, row in enumerate(rows) if row.flagged]
    onset = next((n for n, row in enumerate(rows) if row.onset), None)
    worst = max(rows, key=_usage)
    told = (
        f"{count(len(flagged), 'block')} beyond the limit" if flagged else "none beyond the limit"
    )
    legend = [(f"line {kind}", "made in this block" if anchored else "error at this block")]
    legend += [("line free", "on its own values")] if len(lines) > 1 else []
    if with_floor:
        legend += [("band floor", "one rounding floor"), ("band limit", "up to the limit")]
    legend += [("dot flagged", "beyond the limit")] if flagged else []
    id = f"error-{phase}"
    figures[id] = {
        "kind": "line", "says": [_says(row) for row in rows], "blocks": [row.name for row in rows],
    }  # fmt: skip
    plot = line_plot(
        [_key(row.name) for row in rows], lines, flagged=flagged, onset=onset,
        band=(floors, limits) if with_floor else None,
        label=f"Error of {count(len(rows), 'block')} on a logarithmic axis, {what}: {told}. "
        f"The largest: {_says(worst)}.",
    )  # fmt: skip
    return figure(
        id, f"Difference between A and B. {what}", plot, legend=legend,
        described=f"Relative L2 of the typical token, worst forward; {told}.",
    )  # fmt: skip


def _says(row: Row) -> str:
    """A block in one sentence, for the cursor and for who does not see the picture."""
    site = row.worst
    parts = ["equal bits" if site.identical else f"error {decimal(site.rel_l2)}"]
    if site.ratio is not None and not site.identical:
        limit = "" if site.limit is None else f" (limit {times(site.limit)})"
        parts.append(f"{times(site.ratio)} the rounding floor{limit}")
    if row.free is not None:
        parts.append(f"on its own values {decimal(row.free.rel_l2)}")
    if row.flagged:
        parts.append("beyond its limit")
    return f"{row.name}: {', '.join(parts)}"


def _truth_plot(
    phase: str, what: str, rows: Sequence[Row], figures: dict[str, dict[str, object]]
) -> Element:
    truths = [row.main.truth if row.main is not None else None for row in rows]
    a = [None if one is None else one.reference_error for one in truths]
    b = [None if one is None else one.candidate_error for one in truths]
    says = [
        f"{row.name}: "
        + (
            "no truth here" if one is None else
            f"A {decimal(one.reference_error)}, B {decimal(one.candidate_error)} from the truth, "
            f"B over A {times(one.w_median)}"
        )
        for row, one in zip(rows, truths, strict=True)
    ]  # fmt: skip
    apart = [(one.w_median, row.name) for row, one in zip(rows, truths, strict=True) if one]
    most, where = max(apart, key=lambda item: max(item[0], 1 / item[0] if item[0] else 0.0))
    told = f"B over A is {times(most)} at {where}, where they are most unlike"
    flagged = [n for n, row in enumerate(rows) if row.flagged]
    id = f"truth-{phase}"
    figures[id] = {"kind": "line", "says": says, "blocks": [row.name for row in rows]}
    plot = line_plot(
        [_key(row.name) for row in rows],
        [Line(label="A", kind="reference", values=a), Line(label="B", kind="candidate", values=b)],
        flagged=[], onset=next(iter(flagged), None),
        label=f"Distance of both sides from the float64 truth, {what}: {told}.",
    )  # fmt: skip
    legend = [("dot reference", "A, reference"), ("dot candidate", "B, candidate")]
    return figure(id, f"Distance from the truth. {what}", plot, legend=legend,
                  described=f"Which side is wrong: {told}.")  # fmt: skip


def _table(rows: Sequence[Row], caption: str) -> Table:
    shown = elide(list(rows), max_rows=_MOST_ROWS)
    kept = [row for row in shown if not isinstance(row, Elision)]
    gone = sum(row.num_rows for row in shown if isinstance(row, Elision))
    note = f"{count(gone, 'healthy row')} left out." if gone else ""
    return rows_table(kept, caption, note=note)


def rows_table(rows: Sequence[Row], caption: str, *, note: str = "") -> Table:
    """Rows of blocks with their figures; columns that none of them has are left out."""
    columns: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("relative L2", lambda row: decimal(row.worst.rel_l2)),
        ("× floor", lambda row: times(row.worst.ratio)),
        ("worst token", lambda row: times(row.worst.ratio_max)),
        ("share of limit", lambda row: _share(row.worst.limit_usage)),
        ("B over A", lambda row: times(row.worst.truth.w_median) if row.worst.truth else "-"),
        ("own values", lambda row: decimal(row.free.rel_l2 if row.free else None)),
    )
    kept = [(title, cell) for title, cell in columns if any(cell(row) != "-" for row in rows)]
    return Table(
        caption=caption, titles=("block", "worst at", *(title for title, _ in kept)), num_left=2,
        rows=[
            (row.site if row.inner else row.name, _where(row), *(cell(row) for _, cell in kept))
            for row in rows
        ],
        marks=["onset" if row.onset else "flagged" if row.flagged else "" for row in rows],
        note=note, names=True,
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%" if value < 2 else times(value)


def _where(row: Row) -> str:
    site = row.worst
    if site.identical:
        return "-"
    sample = site.sample if site.worst_sample is None else site.worst_sample
    forward = f"step {site.step}" if site.step else "prefill"
    token = "" if site.worst_position is None or site.step else f", token {site.worst_position}"
    return f"prompt {sample}, {forward}{token}"


def _worst(rows_of: Iterable[list[Row]]) -> Table:
    """The rows that use most of their limits, both phases together."""
    rows = [row for every in rows_of for row in every if not row.inner or row.onset]
    rows.sort(key=lambda row: (not row.onset, -_usage(row)))
    rows = [row for row in rows if not row.worst.identical or row.flagged] or rows
    return rows_table(rows[:_WORST], f"The {min(_WORST, len(rows))} largest")


def _usage(row: Row) -> float:
    """By which rows are ordered; a nan is the largest."""
    value = row.worst.limit_usage
    value = row.worst.rel_l2 if value is None else value
    return 0.0 if value is None else math.inf if math.isnan(value) else value


def _chosen(report: Report, rows_of: Iterable[list[Row]]) -> str | None:
    onset = report.verdict.onset
    if onset is not None:
        return onset.block or onset.site
    rows = [row for every in rows_of for row in every if not row.inner]
    worst = max(rows, key=_usage, default=None)
    return None if worst is None else worst.name


def _prompts(report: Report) -> list[Element]:
    rows = prompt_usage(report)
    if len(rows) < 2:
        return []
    shown = rows[:12]
    content = Table(
        caption="Prompts, the worst first", titles=("prompt", "worst at", "forward", "× floor",
                                                    "share of limit"),
        rows=[
            (str(sample), site.site, f"step {site.step}" if site.step else "prefill", times(ratio),
             _share(usage))
            for usage, sample, site, ratio in shown
        ],
        marks=["flagged" if usage > 1 else "" for usage, *_ in shown], num_left=3,
        note=f"{len(rows) - len(shown)} more prompts." if len(rows) > len(shown) else "",
    )  # fmt: skip
    return [table(content)]

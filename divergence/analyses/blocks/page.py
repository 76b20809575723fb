"""Blocks on a page: the error of each, where and when it is largest, what a block is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from divergence.analyses.blocks.curves import phase_curves, usage
from divergence.analyses.blocks.maps import maps
from divergence.analyses.blocks.parts import block_parts
from divergence.analyses.blocks.rows import (
    Elision,
    Row,
    elide,
    main_pass,
    phase_rows,
    phases,
    worst_rows,
)
from divergence.analyses.blocks.show import prompt_usage
from divergence.comparison.result import Report
from divergence.comparison.results.background import Background
from divergence.html.element import Element, el
from divergence.html.parts import Section, Table, details, table
from divergence.layout import count, decimal, times
from divergence.run.schema.site import of_parameter

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
        curves = phase_curves(report, phase, rows)
        plots += [one.figure() for one in curves]
        figures |= {one.id: one.data() for one in curves}
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
                None if equal else table(_worst(report)),
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
    if of_parameter(site.site):
        return f"{site.phase}, all prompts"
    sample = site.sample if site.worst_sample is None else site.worst_sample
    forward = f"step {site.step}" if site.step else site.phase
    token = "" if site.worst_position is None or site.step else f", token {site.worst_position}"
    return f"prompt {sample}, {forward}{token}"


def _worst(report: Report) -> Table:
    """The rows that use most of their limits, as the terminal's first screen has them."""
    every = worst_rows(report)
    rows = [row for row in every if not row.worst.identical] or every
    num = min(_WORST, len(rows))
    return rows_table(rows[:_WORST], f"The {num} largest" if num > 1 else "The largest")


def _chosen(report: Report, rows_of: Iterable[list[Row]]) -> str | None:
    onset = report.verdict.onset
    if onset is not None:
        return onset.block or onset.site
    rows = [row for every in rows_of for row in every if not row.inner]
    worst = max(rows, key=usage, default=None)
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
            (str(sample), site.site, f"step {site.step}" if site.step else site.phase, times(ratio),
             _share(usage))
            for usage, sample, site, ratio in shown
        ],
        marks=["flagged" if usage > 1 else "" for usage, *_ in shown], num_left=3,
        note=f"{len(rows) - len(shown)} more prompts." if len(rows) > len(shown) else "",
    )  # fmt: skip
    return [table(content)]

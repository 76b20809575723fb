"""Blocks in figures: curves of their errors, and maps of blocks by step, prompt and token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from divergence.analyses.blocks.rows import SiteRow, is_input, main_pass, phase_rows, phases, usage
from divergence.comparison.result import Report
from divergence.comparison.results import Background, SiteResult
from divergence.html.figures import (
    DECADES,
    FLOORS,
    LIMIT_SHARES,
    HeatScale,
    Plot,
    PlotLine,
    figure,
    heat_map,
)
from divergence.html.parts import Element
from divergence.layout import count, decimal, times

# The error of each block as curves, and with a truth the distance of both sides from it.

_PHASES = {
    "prefill": "Prefill: the prompt", "backward": "Backward: gradients",
    "optimizer": "Optimizer: updates",
}  # fmt: skip


def _key(site_name: str) -> str:
    """A row's name on an axis: the number of a block, the module of what is outside them."""
    module = site_name.rpartition(":")[0] or site_name
    return module.rpartition(".")[2]


def curves(report: Report) -> list[Plot]:
    """Of the prefill and of decode; none where no block was measured."""
    return [
        plot
        for phase in phases(report)
        for plot in phase_curves(
            report, phase, [row for row in phase_rows(report, phase) if not row.inner]
        )
    ]


def phase_curves(report: Report, phase: str, rows: Sequence[SiteRow]) -> list[Plot]:
    """The error of each block and, with a truth, of both sides."""
    outputs = [row for row in rows if row.worst.rel_l2 is not None]
    if not outputs:
        return []
    steps = len({s.step for s in report.sites if s.step})
    what = _PHASES.get(phase) or f"Decode: {count(steps, 'step')}"
    plots = [_error_plot(phase, what, outputs)]
    if any(row.main is not None and row.main.truth is not None for row in outputs):
        plots.append(_truth_plot(phase, what, outputs))
    return plots


def _typical(row: SiteRow, *, free: bool) -> float | None:
    """The median token's error, or that of the whole tensor where tokens are not known apart."""
    site = row.free if free else row.main
    if site is None:
        return None
    return site.rel_l2 if site.token_rel_l2_median is None else site.token_rel_l2_median


def _error_plot(phase: str, what: str, rows: Sequence[SiteRow]) -> Plot:
    anchored = any(row.main is not None and row.main.pass_ == "anchored" for row in rows)
    kind = "anchored" if anchored else "free"
    lines = [PlotLine(label=kind, kind=kind, values=[_typical(row, free=False) for row in rows])]
    if any(row.free is not None for row in rows):
        free = [_typical(row, free=True) for row in rows]
        lines.append(PlotLine(label="free", kind="free", values=free))
    floors = [row.worst.floor for row in rows]
    limits = [
        None if site.floor is None or site.limit is None else site.floor * site.limit
        for site in (row.worst for row in rows)
    ]
    with_floor = any(floors)
    flagged = [n for n, row in enumerate(rows) if row.flagged]
    onset = next((n for n, row in enumerate(rows) if row.onset), None)
    worst = max(rows, key=usage)
    told = (
        f"{count(len(flagged), 'block')} beyond the limit" if flagged else "none beyond the limit"
    )
    legend = [(f"line {kind}", "made in this block" if anchored else "error at this block")]
    legend += [("line free", "on its own values")] if len(lines) > 1 else []
    if with_floor:
        legend += [("band floor", "one rounding floor"), ("band limit", "up to the limit")]
    legend += [("dot flagged", "beyond the limit")] if flagged else []
    return Plot(
        id=f"error-{phase}", title=f"Difference between A and B. {what}", legend=legend,
        described=f"Relative L2 of the typical token, worst forward; {told}.",
        label=f"Error of {count(len(rows), 'block')} on a logarithmic axis, {what}: {told}. "
        f"The largest: {_says(worst)}.",
        names=[_key(row.name) for row in rows], lines=lines, flagged=flagged, onset=onset,
        band=(floors, limits) if with_floor else None,
        says=[_says(row) for row in rows], blocks=[row.name for row in rows],
    )  # fmt: skip


def _says(row: SiteRow) -> str:
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


def _truth_plot(phase: str, what: str, rows: Sequence[SiteRow]) -> Plot:
    truths = [row.main.truth if row.main is not None else None for row in rows]
    a = [None if truth is None else truth.reference_error for truth in truths]
    b = [None if truth is None else truth.candidate_error for truth in truths]
    says = [
        f"{row.name}: "
        + (
            "no truth here" if truth is None else
            f"A {decimal(truth.reference_error)}, B {decimal(truth.candidate_error)} from the "
            f"truth, B over A {times(truth.w_median)}"
        )
        for row, truth in zip(rows, truths, strict=True)
    ]  # fmt: skip
    apart = [(truth.w_median, row.name) for row, truth in zip(rows, truths, strict=True) if truth]
    most, where = max(apart, key=lambda item: max(item[0], 1 / item[0] if item[0] else 0.0))
    told = f"B over A is {times(most)} at {where}, where they are most unlike"
    flagged = [n for n, row in enumerate(rows) if row.flagged]
    legend = [("dot reference", "A"), ("dot candidate", "B")]
    return Plot(
        id=f"truth-{phase}", title=f"Distance from the truth. {what}", legend=legend,
        described=f"Which side is wrong: {told}.",
        label=f"Distance of both sides from the float64 truth, {what}: {told}.",
        names=[_key(row.name) for row in rows], onset=next(iter(flagged), None),
        lines=[PlotLine(label="A", kind="reference", values=a),
               PlotLine(label="B", kind="candidate", values=b)],
        says=says, blocks=[row.name for row in rows],
    )  # fmt: skip


# Maps of colour: which blocks err in which steps, in which prompts, at which tokens.

_MOST = 128
"""Rows and columns of a map; of more, neighbours share one, and the worst of them is shown."""

Cells = dict[tuple[str, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Map:
    id: str
    title: str
    column: str
    """What a column is: ``step``, ``prompt``, ``token``."""
    rows: Sequence[str]
    columns: Sequence[str]
    values: list[list[float | None]]
    scale: HeatScale

    def figure(self) -> Element:
        """On a page."""
        known = [
            (value, row, column)
            for row, line in zip(self.rows, self.values, strict=True)
            for column, value in zip(self.columns, line, strict=True)
            if value is not None
        ]
        value, row, column = max(known, key=lambda item: (not math.isfinite(item[0]), item[0]))
        told = f"The largest is {float(f'{value:.2g}'):g} {self.scale.unit}, at {row}, "
        told += f"{self.column} {column}"
        if self.scale is LIMIT_SHARES:
            beyond = sum(item[0] > 100 or not math.isfinite(item[0]) for item in known)
            told += f"; {count(beyond, 'cell')} of {len(known):,} beyond the limit"
        classes = (f"cell {kind}" for kind in self.scale.classes())
        legend = list(zip(classes, self.scale.names, strict=True))
        if any(not math.isfinite(item[0]) for item in known):
            legend.append(("cell broken", "nan, inf"))
        picture = heat_map(
            [row.removesuffix(":out").rpartition(".")[2] for row in self.rows], self.columns,
            self.values, scale=self.scale, label=f"{self.title}. {told}.",
            row_height=max(3.0, min(16.0, 300 / len(self.rows))),
        )  # fmt: skip
        return figure(self.id, self.title, picture, described=f"{told}.", legend=legend,
                      wide=self.column == "token")  # fmt: skip

    def data(self) -> dict[str, object]:
        """For the script; two digits are what is said of a cell."""

        def rounded(value: float) -> float | str:
            return float(f"{value:.2g}") if math.isfinite(value) else f"{value:g}"

        return {
            "kind": "heat", "rows": self.rows, "columns": self.columns, "column": self.column,
            "unit": self.scale.unit, "blocks": self.rows,
            "values": [[None if v is None else rounded(v) for v in row] for row in self.values],
        }  # fmt: skip


def maps(report: Report, background: Background) -> list[_Map]:
    """Blocks by steps, by prompts and by tokens, where there are several."""
    grids = (*_of_forwards(report), _of_positions(background))
    return [_thinned(grid) for grid in grids if grid is not None]


def _of_forwards(report: Report) -> list[_Map]:
    """Blocks by steps and blocks by prompts, each the worst of the other."""
    wanted = main_pass(report.sites)
    sites = sorted((s for s in report.sites if s.pass_ == wanted and _is_row(s)), key=_order)
    rows = list(dict.fromkeys(site.block or site.site for site in sites))
    scale = LIMIT_SHARES if any(site.usage is not None for site in sites) else DECADES
    by_step: Cells = {}
    by_prompt: Cells = {}
    for site in sites:
        value = site.rel_l2
        if scale is LIMIT_SHARES:
            value = None if site.usage is None else 100 * site.usage
        if site.nonfinite is not None and site.nonfinite.differ:
            value = math.nan
        if value is None:
            continue
        row = site.block or site.site
        _keep_worst(by_step, (row, site.step), value)
        members = (
            [(prompt.sample, 100 * prompt.usage) for prompt in site.prompts]
            if scale is LIMIT_SHARES
            else []
        )
        for sample, used in members or [(site.sample, value)]:
            _keep_worst(by_prompt, (row, sample), used)
    grids = []
    for id, column, cells in (("steps", "step", by_step), ("prompts", "prompt", by_prompt)):
        columns = sorted({number for _, number in cells})
        if len(columns) > 1:
            values = [[cells.get((row, number)) for number in columns] for row in rows]
            grids.append(_Map(
                id=f"map-{id}", title=f"Blocks × {id}", column=column, rows=rows,
                columns=[str(number) for number in columns], values=values, scale=scale,
            ))  # fmt: skip
    return grids


def _of_positions(background: Background) -> _Map | None:
    positions = background.positions
    if positions is None or not positions.blocks:
        return None
    return _Map(
        id="map-tokens", title=f"Blocks × tokens of prompt {positions.sample}", column="token",
        rows=positions.blocks, columns=positions.tokens, values=positions.floors, scale=FLOORS,
    )  # fmt: skip


def _is_row(site: SiteResult) -> bool:
    """A block's own output, or that of a module outside all blocks."""
    own = site.block is None or site.site == f"{site.block}:out"
    return own and not is_input(site.site)


def _order(site: SiteResult) -> tuple[int, str]:
    return site.order, site.site


def _keep_worst(cells: Cells, at: tuple[str, int], value: float) -> None:
    before = cells.get(at)
    if before is None or value > before or math.isnan(value):
        cells[at] = value


def _thinned(grid: _Map) -> _Map:
    """At most so many rows and columns, by the worst of neighbours."""
    tall, wide = (1 + (len(names) - 1) // _MOST for names in (grid.rows, grid.columns))
    if tall == wide == 1:
        return grid
    values = [
        [
            _worst(
                value for row in grid.values[y : y + tall] for value in row[x : x + wide]
            )
            for x in range(0, len(grid.columns), wide)
        ]
        for y in range(0, len(grid.rows), tall)
    ]  # fmt: skip
    return _Map(
        id=grid.id, title=grid.title, column=grid.column, values=values, scale=grid.scale,
        rows=_named(grid.rows, tall), columns=_named(grid.columns, wide),
    )  # fmt: skip


def _worst(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    broken = next((value for value in known if not math.isfinite(value)), None)
    return broken if broken is not None else max(known, default=None)


def _named(names: Sequence[str], step: int) -> list[str]:
    if step == 1:
        return list(names)
    groups = (names[n : n + step] for n in range(0, len(names), step))
    return [f"{group[0]} to {group[-1]}" if len(group) > 1 else group[0] for group in groups]

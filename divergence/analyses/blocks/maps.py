"""Maps of colour: which blocks err in which steps, in which prompts, at which tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from divergence.analyses.blocks.rows import is_input, main_pass
from divergence.comparison.result import Report
from divergence.comparison.results import Background, SiteResult
from divergence.html.figures import DECADES, FLOORS, LIMIT_SHARES, HeatScale, figure, heat_map
from divergence.html.parts import Element
from divergence.layout import count

__all__ = ["maps"]

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


def maps(
    report: Report, background: Background
) -> tuple[list[Element], dict[str, dict[str, object]]]:
    """The figures, and what the script needs for each."""
    grids = [
        _thinned(grid)
        for grid in (*_of_forwards(report), _of_positions(background))
        if grid is not None
    ]
    return [_figure(grid) for grid in grids], {grid.id: _data(grid) for grid in grids}


def _of_forwards(report: Report) -> list[_Map]:
    """Blocks by steps and blocks by prompts, each the worst of the other."""
    wanted = main_pass(report.sites)
    sites = sorted((s for s in report.sites if s.pass_ == wanted and _is_row(s)), key=_order)
    rows = list(dict.fromkeys(site.block or site.site for site in sites))
    scale = LIMIT_SHARES if any(site.usage is not None for site in sites) else DECADES
    by_step: Cells = {}
    by_prompt: Cells = {}
    for site in sites:
        value = site.usage if scale is LIMIT_SHARES else site.rel_l2
        if site.nonfinite is not None and site.nonfinite.differ:
            value = math.nan
        if value is None:
            continue
        row = site.block or site.site
        _keep_worst(by_step, (row, site.step), value)
        members = (
            [(prompt.sample, prompt.usage) for prompt in site.prompts]
            if scale is LIMIT_SHARES
            else []
        )
        for sample, usage in members or [(site.sample, value)]:
            _keep_worst(by_prompt, (row, sample), usage)
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


def _figure(fig: _Map) -> Element:
    known = [
        (value, row, column)
        for row, line in zip(fig.rows, fig.values, strict=True)
        for column, value in zip(fig.columns, line, strict=True)
        if value is not None
    ]
    value, row, column = max(known, key=lambda item: (not math.isfinite(item[0]), item[0]))
    beyond = sum(item[0] > 1 or not math.isfinite(item[0]) for item in known)
    told = f"The largest is {_amount(value)} {fig.scale.unit}, at {row}, {fig.column} {column}"
    if fig.scale.num_calm < len(fig.scale.names) and fig.scale is LIMIT_SHARES:
        told += f"; {count(beyond, 'cell')} of {len(known):,} beyond the limit"
    legend = list(zip([f"cell {kind}" for kind in fig.scale.classes()], fig.scale.names,
                      strict=True))  # fmt: skip
    if any(not math.isfinite(item[0]) for item in known):
        legend.append(("cell broken", "nan, inf"))
    picture = heat_map(
        [row.removesuffix(":out").rpartition(".")[2] for row in fig.rows], fig.columns, fig.values,
        scale=fig.scale, label=f"{fig.title}. {told}.",
        row_height=max(3.0, min(16.0, 300 / len(fig.rows))),
    )  # fmt: skip
    return figure(fig.id, fig.title, picture, described=f"{told}.", legend=legend,
                  wide=fig.column == "token")  # fmt: skip


def _amount(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else f"{value:g}"


def _data(grid: _Map) -> dict[str, object]:
    return {
        "kind": "heat", "rows": grid.rows, "columns": grid.columns, "column": grid.column,
        "unit": grid.scale.unit, "blocks": grid.rows,
        "values": [[None if v is None else _rounded(v) for v in row] for row in grid.values],
    }  # fmt: skip


def _rounded(value: float) -> float | str:
    """Two digits are what is said of a cell."""
    return float(f"{value:.2g}") if math.isfinite(value) else f"{value:g}"

"""Blocks on a page: the curve of errors over blocks, and maps of blocks by step and token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from divergence.analyses.blocks.show import (
    Elision,
    SiteRow,
    badness,
    elide,
    is_input,
    main_pass,
    phase_rows,
    phases,
    prompt_usage,
    worst_rows,
)
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
from divergence.html.parts import BlockPart, Element, Section, Table, details, el, table
from divergence.layout import count, decimal, shape_text, times
from divergence.run.site import of_parameter

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


def usage(row: SiteRow) -> float:
    """By which rows are ordered; a nan is the largest."""
    value = row.worst.limit_usage
    value = row.worst.rel_l2 if value is None else value
    return 0.0 if value is None else math.inf if math.isnan(value) else value


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


# Blocks on a page: the error of each, where and when it is largest, what a block is made of.

_MOST_ROWS = 240
_WORST = 5
_MOST_MODULES = 3000
"""Rows of all blocks together: some 250 kB of a page. Where there are more, the worst of each
block."""


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
        plots += [curve.figure() for curve in curves]
        figures |= {curve.id: curve.data() for curve in curves}
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
                None if equal else table(_worst_table(report)),
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


def _table(rows: Sequence[SiteRow], caption: str) -> Table:
    shown = elide(list(rows), max_rows=_MOST_ROWS)
    kept = [row for row in shown if not isinstance(row, Elision)]
    gone = sum(row.num_rows for row in shown if isinstance(row, Elision))
    note = f"{count(gone, 'healthy row')} left out." if gone else ""
    return rows_table(kept, caption, note=note)


def rows_table(rows: Sequence[SiteRow], caption: str, *, note: str = "") -> Table:
    """Rows of blocks with their figures; columns that none of them has are left out."""
    columns: tuple[tuple[str, Callable[[SiteRow], str]], ...] = (
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


def _where(row: SiteRow) -> str:
    site = row.worst
    if site.identical:
        return "-"
    if of_parameter(site.site):
        return f"{site.phase}, all prompts"
    sample = site.sample if site.worst_sample is None else site.worst_sample
    forward = f"step {site.step}" if site.step else site.phase
    token = "" if site.worst_position is None or site.step else f", token {site.worst_position}"
    return f"prompt {sample}, {forward}{token}"


def _worst_table(report: Report) -> Table:
    """The rows that use most of their limits, as the terminal's first screen has them."""
    every = worst_rows(report)
    rows = [row for row in every if not row.worst.identical] or every
    num = min(_WORST, len(rows))
    return rows_table(rows[:_WORST], f"The {num} largest" if num > 1 else "The largest")


def _chosen(report: Report, rows_of: Iterable[list[SiteRow]]) -> str | None:
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


def block_parts(report: Report) -> list[BlockPart]:
    """One for each block, and for each site outside all blocks, in execution order."""
    blocks: dict[str, dict[str, list[SiteResult]]] = {}
    wanted = {main_pass(report.sites), "free"}
    sites = (site for site in report.sites if site.pass_ in wanted)
    for site in sorted(sites, key=lambda site: (site.order, site.site)):
        blocks.setdefault(site.block or site.site, {}).setdefault(site.site, []).append(site)
    num_modules = sum(map(len, blocks.values()))
    most = max(4, _MOST_MODULES // max(1, len(blocks))) if num_modules > _MOST_MODULES else None
    onset = report.verdict.onset
    return [_part(name, sites, most, onset.site if onset else None)
            for name, sites in sorted(blocks.items(), key=_last_run)]  # fmt: skip


def _last_run(item: tuple[str, dict[str, list[SiteResult]]]) -> tuple[int, str]:
    """A block ends after its parts."""
    name, sites = item
    return max(site.order for group in sites.values() for site in group), name


def _part(
    name: str, sites: dict[str, list[SiteResult]], most: int | None, onset: str | None
) -> BlockPart:
    worst = {site: max(group, key=_rank) for site, group in sites.items()}
    shown = [site for site, result in worst.items() if not result.identical or site == onset]
    shown = shown or [site for site in worst if not is_input(site)]
    if most is not None and len(shown) > most:
        kept = set(sorted(shown, key=lambda site: _rank(worst[site]), reverse=True)[:most])
        shown = [site for site in shown if site in kept]
    equal = sum(result.identical for site, result in worst.items() if site not in shown)
    left = len(worst) - len(shown) - equal
    notes = [f"{count(equal, 'more site')} with equal bits."] if equal else []
    notes += [f"{count(left, 'more site')} in the JSON."] if left else []
    own = worst.get(f"{name}:out") or max(worst.values(), key=_rank)
    return BlockPart(
        block=name, facts=_facts(own, sites.values()),
        tables=[
            _modules_table(name, [worst[site] for site in shown], sites, onset, " ".join(notes))
        ],
    )  # fmt: skip


def _modules_table(
    block: str, results: list[SiteResult], sites: dict[str, list[SiteResult]], onset: str | None,
    note: str,
) -> Table:  # fmt: skip
    titles = ("module", "class", "shape", "relative L2", "× floor", "worst token", "1 − cosine",
              "max |a−b|", "B over A")  # fmt: skip
    rows = [_module_row(block, result) for result in results]
    kept = [n for n in range(len(titles)) if n < 4 or any(row[n] != "-" for row in rows)]
    flagged = {site for site, group in sites.items() if any(forward.flagged for forward in group)}
    return Table(
        caption="Modules, the worst forward of each", titles=tuple(titles[n] for n in kept),
        rows=[tuple(row[n] for n in kept) for row in rows], num_left=3, names=True, note=note,
        marks=["onset" if shown.site == onset else "flagged" if shown.site in flagged else ""
               for shown in results],
    )  # fmt: skip


def _rank(site: SiteResult) -> tuple[bool, bool, bool, float, float]:
    """The pass that is judged comes before the free one."""
    nonfinite, flagged, ratio, rel_l2 = badness(site)
    return site.pass_ != "free", nonfinite, flagged, ratio, rel_l2


def _module_row(block: str, site: SiteResult) -> tuple[str, ...]:
    own = site.site.removeprefix(block).removeprefix(".") or site.site
    return (
        own, site.kind or "-", shape_text(site.shape),
        "equal" if site.identical else decimal(site.rel_l2), times(site.ratio),
        times(site.ratio_max), decimal(site.one_minus_cosine), decimal(site.max_abs),
        times(site.truth.w_median) if site.truth else "-",
    )  # fmt: skip


def _facts(site: SiteResult, groups: Iterable[list[SiteResult]]) -> list[tuple[str, str]]:
    facts = [
        ("class", site.kind or "-"),
        ("dtype", _both(site.reference_dtype, site.candidate_dtype)),
    ]
    facts.append(("relative L2", "equal bits" if site.identical else decimal(site.rel_l2)))
    if site.floor is not None:
        facts.append(("rounding floor", decimal(site.floor)))
    if site.ratio is not None and site.limit is not None:
        facts.append(("× floor, limit", f"{times(site.ratio)}, {times(site.limit)}"))
    if site.truth is not None:
        truth = site.truth
        facts.append(("from the truth, A", decimal(truth.reference_error)))
        facts.append(("from the truth, B", decimal(truth.candidate_error)))
    if site.worst_position is not None and not site.identical:
        facts.append(("worst token", str(site.worst_position)))
    if site.worst_channel is not None and not site.identical:
        facts.append(("worst feature", str(site.worst_channel)))
    flagged = sum(result.flagged for group in groups for result in group)
    if flagged:
        facts.append(("results beyond a limit", str(flagged)))
    return facts


def _both(reference: str, candidate: str) -> str:
    reference, candidate = reference.removeprefix("torch."), candidate.removeprefix("torch.")
    return reference if reference == candidate else f"{reference} / {candidate}"

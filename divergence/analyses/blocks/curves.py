"""The error of each block as curves, and with a truth the distance of both sides from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from divergence.analyses.blocks.rows import SiteRow, phase_rows, phases
from divergence.comparison.result import Report
from divergence.html.figures import Plot, PlotLine
from divergence.layout import count, decimal, times

__all__ = ["curves", "phase_curves", "usage"]


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

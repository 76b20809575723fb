"""Collectives in a report: a table of them, one of the orders, one of the rates."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.comparison.result import Report
from divergence.comparison.results import BandwidthRow, CollectiveFault, CollectivesSide, OrderRow
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
    size,
)
from divergence.words import letter

_MOST_FAULTS = 8


def show(report: Report, *, all_sites: bool = False) -> list[Line]:
    """Every side's tables. ``all_sites``: every fault, order, size and differing case."""
    result = report.collectives
    if result is None:
        return []
    lines: list[Line] = []
    for side in result.sides:
        lines += _side(side, alone=len(result.sides) == 1, whole=all_sites)
    if result.differing:
        what = f"{len(result.differing):,} of {result.num_common:,} cases"
        shown = result.differing if all_sites else result.differing[:_MOST_FAULTS]
        rows: list[tuple[str, ...]] = [("case", "ranks", "rel L2")]
        rows += [(diff.site.partition("/")[0], _ranks(diff.ranks), decimal(diff.rel_l2))
                 for diff in shown]  # fmt: skip
        lines += [heading("different bits", what), *_table(rows), BLANK]
    return lines


def _side(side: CollectivesSide, *, alone: bool, whole: bool) -> list[Line]:
    whose = "" if alone else f" of {letter(side.side)}"
    cases = count(sum(row.num_cases for row in side.rows), "case")
    lines = [heading(f"collectives{whose}", f"{side.num_ranks} ranks, {side.backend}, {cases}")]
    rows = collective_rows(side)
    for number, item in enumerate(columns(rows, indent=2)):
        wrong = number > 0 and side.rows[number - 1].num_right < side.rows[number - 1].num_cases
        lines.append(line((item.text, "dim" if number == 0 else "bold red" if wrong else "")))
    lines += [
        prose("  ", "error: of rounded sums, in units of what rounding in any order may make at "
              "most, (n - 1) u Σ|x|.", width=2, style="dim"),
        *(prose("  not supported", text, width=16, style="yellow") for text in side.unsupported),
        BLANK,
    ]  # fmt: skip
    if side.faults:
        rows = fault_rows(side, whole=whole)
        shown = rows if whole else rows[: _MOST_FAULTS + 1]
        lines += [heading(f"faults{whose}", count(len(side.faults), "finding")), *_table(shown)]
        if len(shown) < len(rows):
            lines.append(line((f"  … {len(rows) - len(shown):,} more (--all lists them)", "dim")))
        lines.append(BLANK)
    if side.orders:
        lines += [
            heading(f"order of addition{whose}", "found from outside, and replayed bit by bit"),
            *_table(order_rows(side, whole=whole)),
            BLANK,
        ]
    if side.bandwidth:
        lines += [
            heading(f"bandwidth{whose}", "median of calls, slowest rank"),
            *_table(bandwidth_rows(side, whole=whole)),
            BLANK,
        ]
    return lines


def _table(rows: list[tuple[str, ...]]) -> list[Line]:
    first, *rest = columns(rows, indent=2, widest=66)
    return [line((first.text, "dim")), *rest]


def collective_rows(side: CollectivesSide) -> list[tuple[str, ...]]:
    """One a collective, below titles."""
    rows: list[tuple[str, ...]] = [("collective", "by", "cases", "right", "repeated", "error")]
    for row in side.rows:
        flushed = f" ({row.num_flushed} flushed)" if row.num_flushed else ""
        rows.append(
            (row.collective, row.implementation, str(row.num_cases), f"{row.num_right}{flushed}",
             str(row.num_repeated), _usage(row.limit_usage))
        )  # fmt: skip
    return rows


def fault_rows(side: CollectivesSide, *, whole: bool) -> list[tuple[str, ...]]:
    """One a fault, below titles; those that say the same of other cases are one unless
    ``whole``."""
    rows: list[tuple[str, ...]] = [("ranks", "case", "check", "wrong", "what")]
    groups: dict[tuple[object, ...], list[CollectiveFault]] = {}
    for number, fault in enumerate(side.faults):
        key = (fault.check, fault.collective, fault.ranks, fault.text if fault.ranks else "")
        groups.setdefault((*key, number if whole else 0), []).append(fault)
    for group in groups.values():
        fault = group[0]
        more = f", {len(group) - 1} more" if len(group) > 1 else ""
        case = f"{fault.collective}.{fault.dtype}.{fault.size}.{fault.values}{more}"
        rows.append(
            (_ranks(fault.ranks), case, fault.check,
             f"{fault.num_wrong:,}/{fault.elements:,}", fault.text)
        )  # fmt: skip
    return rows


def order_rows(side: CollectivesSide, *, whole: bool) -> list[tuple[str, ...]]:
    """One an order, below titles; rows that say the same but for the size are one unless
    ``whole``."""
    rows: list[tuple[str, ...]] = [
        ("collective", "dtype", "elements", "order", "ranks added", "sums in", "expected", "error")
    ]
    seen: dict[tuple[str, ...], list[OrderRow]] = {}
    for order in side.orders:
        key: tuple[str, ...] = (
            order.collective,
            order.dtype,
            order.order,
            order.accumulates or "-",
            order.first,
        )
        if whole:
            key += (str(order.elements),)
        seen.setdefault(key, []).append(order)
    for group in seen.values():
        order = group[0]
        sums = order.accumulates or ("-" if order.measured is None else "not told")
        rows.append(
            (order.collective, order.dtype, ", ".join(f"{each.elements:,}" for each in group),
             order.order, order.first, sums, decimal(order.expected), decimal(order.measured))
        )  # fmt: skip
    return rows


def bandwidth_rows(side: CollectivesSide, *, whole: bool) -> list[tuple[str, ...]]:
    """One a collective and size, below titles; the largest size alone unless ``whole``."""
    linked = any(row.link_rate for row in side.bandwidth)
    rows: list[tuple[str, ...]] = [
        ("collective", "bytes", "time", "algbw", "busbw", *(["link", "of it"] if linked else []))
    ]
    shown: Sequence[BandwidthRow] = side.bandwidth
    if not whole:
        shown = list({row.collective: row for row in side.bandwidth}.values())
    for row in shown:
        cells = [row.collective, size(row.bytes), _time(row.seconds), _rate(row.algbw),
                 _rate(row.busbw)]  # fmt: skip
        if linked:
            rate = row.link_rate
            cells += ["-", "-"] if not rate else [_rate(rate), share(row.busbw / rate)]
        rows.append(tuple(cells))
    return rows


def _usage(value: float | None) -> str:
    """``74%``; a wrong sum's in powers of ten."""
    return "-" if value is None else share(value) if value < 10 else f"{value:.0e}x"


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "") or "?"

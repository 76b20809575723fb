"""Collectives in a report: a table of them, one of the faults, of the orders, of the rates."""

from __future__ import annotations

from collections.abc import Iterable

from divergence.comparison.result import Report
from divergence.comparison.results import Background
from divergence.document import Block, Column, Section, Sentence, Table
from divergence.domains.collectives.result import (
    BandwidthRow,
    CollectiveFault,
    CollectivesResult,
    CollectivesSide,
)
from divergence.layout import count, decimal, limit_share, rank_names, share, size
from divergence.words import grouped, letter

_MOST_FAULTS = 8


def sections(
    report: Report, *, every: bool = False, background: Background | None = None
) -> list[Section]:
    """Every side's tables; with ``every``, and on a page, all faults, orders, sizes and cases."""
    result = report.parts.get("collectives")
    if not isinstance(result, CollectivesResult):
        return []
    whole = every or background is not None
    alone = len(result.sides) == 1
    made = [
        section
        for side in result.sides
        for section in _side(side, "" if alone else f" of {letter(side.side)}", whole=whole)
    ]
    if result.differing:
        table = Table(
            caption="Different bits",
            columns=("case", "ranks", Column("rel L2", decimal)),
            num_left=2,
            most=_MOST_FAULTS,
            rows=[
                (diff.site.partition("/")[0], rank_names(diff.ranks), diff.rel_l2)
                for diff in result.differing
            ],
        )
        what = f"{len(result.differing):,} of {result.num_common:,} cases"
        made.append(Section(id="bits", title="different bits", detail=what, body=[table]))
    return made


def _side(side: CollectivesSide, whose: str, *, whole: bool) -> list[Section]:
    body: list[Block] = [
        Table(
            caption=f"Collectives{whose}",
            num_left=2,
            columns=(
                "collective",
                "by",
                "cases",
                "right",
                "repeated",
                Column("error", limit_share),
            ),
            rows=[
                (
                    row.collective,
                    row.implementation,
                    row.num_cases,
                    f"{row.num_right} ({row.num_flushed} flushed)"
                    if row.num_flushed
                    else row.num_right,
                    row.num_repeated,
                    row.limit_usage,
                )
                for row in side.rows
            ],
            marks=["" if row.num_right == row.num_cases else "wrong" for row in side.rows],
        ),
        Sentence(
            "error: of rounded sums, in units of what rounding in any order may make at most, "
            "(n - 1) u Σ|x|.",
            indent=2,
            style="dim",
        ),
        *(
            Sentence(text, "not supported", indent=2, hang=16, style="yellow")
            for text in side.unsupported
        ),
    ]
    if side.faults:
        body.append(
            Table(
                caption=f"Faults{whose}",
                title=f"faults{whose}",
                num_left=5,
                detail=count(len(side.faults), "finding"),
                columns=("ranks", "case", "check", "wrong", "what"),
                rows=_fault_rows(side.faults, apart=whole),
                most=_MOST_FAULTS,
            )
        )
    more: list[Block] = []
    if side.orders:
        # rows that say the same but for the size are one unless all are asked for
        groups = grouped(
            side.orders,
            lambda order: (
                order.collective,
                order.dtype,
                order.order,
                order.accumulates or "-",
                order.first,
                order.elements if whole else 0,
            ),
        )
        rows: list[tuple[object, ...]] = []
        for group in groups.values():
            order = group[0]
            sums = order.accumulates or ("-" if order.measured is None else "not told")
            sizes = sorted({each.elements for each in group})
            rows.append(
                (
                    order.collective,
                    order.dtype,
                    " to ".join(f"{number:,}" for number in dict.fromkeys((sizes[0], sizes[-1]))),
                    order.order,
                    order.first,
                    sums,
                    order.expected,
                    order.measured,
                )
            )
        more.append(
            Table(
                caption=f"Order of addition{whose}",
                title=f"order of addition{whose}",
                num_left=6,
                detail="found from outside, and replayed bit by bit",
                folded="Order of addition",
                columns=(
                    "collective",
                    "dtype",
                    "elements",
                    "order",
                    "ranks added",
                    "sums in",
                    Column("expected", decimal),
                    Column("error", decimal),
                ),
                rows=rows,
            )
        )
    if side.bandwidth:
        linked = any(row.link_rate for row in side.bandwidth)
        rates: Iterable[BandwidthRow] = side.bandwidth
        if not whole:  # the largest size alone
            rates = {row.collective: row for row in side.bandwidth}.values()
        more.append(
            Table(
                caption=f"Bandwidth{whose}",
                title=f"bandwidth{whose}",
                folded="Bandwidth",
                detail="median of calls, slowest rank",
                columns=(
                    "collective",
                    Column("bytes", size),
                    Column("time", _time),
                    Column("algbw", _rate),
                    Column("busbw", _rate),
                    *((Column("link", _rate), Column("of it", share)) if linked else ()),
                ),
                rows=[
                    (
                        row.collective,
                        row.bytes,
                        row.seconds,
                        row.algbw,
                        row.busbw,
                        *(
                            (
                                row.link_rate or None,
                                row.busbw / row.link_rate if row.link_rate else None,
                            )
                            if linked
                            else ()
                        ),
                    )
                    for row in rates
                ],
            )
        )
    cases = count(sum(row.num_cases for row in side.rows), "case")
    return [
        Section(
            id=f"collectives-{side.side}",
            title=f"collectives{whose}",
            detail=f"{side.num_ranks} ranks, {side.backend}, {cases}",
            body=body,
        ),
        *[
            Section(
                id=f"orders-{side.side}",
                heading=f"Orders and rates{whose}",
                body=more,
                verbose=True,
            )
        ]
        * bool(more),
    ]


def _fault_rows(faults: Iterable[CollectiveFault], *, apart: bool) -> list[tuple[object, ...]]:
    """One a fault; those that say the same of other cases are one unless ``apart``."""
    groups = grouped(
        faults,
        lambda fault: (
            fault.check,
            fault.collective,
            fault.ranks,
            fault.text if fault.ranks else "",
            id(fault) if apart else 0,
        ),
    )
    rows: list[tuple[object, ...]] = []
    for fault, *others in groups.values():
        more = f", {len(others)} more" if others else ""
        case = f"{fault.collective}.{fault.dtype}.{fault.size}.{fault.values}{more}"
        wrong = f"{fault.num_wrong:,}/{fault.elements:,}"
        rows.append((rank_names(fault.ranks), case, fault.check, wrong, fault.text))
    return rows


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

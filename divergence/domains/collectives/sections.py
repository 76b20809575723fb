"""Collectives in a report: a table of them, one of the faults, of the orders, of the rates."""

from __future__ import annotations

from collections.abc import Iterable

from divergence.comparison.result import Background, Report
from divergence.document import Block, Column, Section, Sentence, Table, each_in, out_of
from divergence.domains.collectives.result import (
    BandwidthRow,
    CollectiveFault,
    CollectiveRow,
    CollectivesResult,
    CollectivesSide,
    OrderRow,
)
from divergence.words import count, decimal, grouped, letter, limit_share, rank_names, share, size

_MOST_FAULTS, _MOST_ORDERS = 8, 12


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
            title="different bits",
            num_left=2,
            most=_MOST_FAULTS,
            **each_in(
                result.differing,
                ("case", lambda diff: diff.site.partition("/")[0]),
                (Column("ranks", rank_names), "ranks"),
                (Column("rel L2", decimal), "rel_l2"),
            ),
        )
        what = f"{len(result.differing):,} of {result.num_common:,} cases"
        made.append(Section(id="bits", title="different bits", detail=what, body=[table]))
    return made


def _side(side: CollectivesSide, whose: str, *, whole: bool) -> list[Section]:
    body: list[Block] = [
        Table(
            title=f"collectives{whose}",
            num_left=2,
            **each_in(
                side.rows,
                ("collective", "collective"),
                ("by", "implementation"),
                ("cases", "num_cases"),
                (Column("right", _right), lambda row: row),
                ("repeated", "num_repeated"),
                (Column("error", limit_share), "limit_usage"),
            ),
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
                title=f"faults{whose}",
                num_left=5,
                detail=count(len(side.faults), "finding"),
                columns=("ranks", "case", "check", Column("wrong", out_of), "what"),
                rows=_fault_rows(side.faults, apart=whole),
                most=_MOST_FAULTS,
            )
        )
    more: list[Block] = []
    if side.orders:
        more.append(
            Table(
                title=f"order of addition{whose}",
                num_left=6,
                detail="found from outside, and replayed bit by bit",
                folded="Order of addition",
                most=_MOST_ORDERS,
                **each_in(
                    side.orders,
                    ("collective", "collective"),
                    ("dtype", "dtype"),
                    (Column("elements", "{:,}".format), "elements"),
                    ("order", "order"),
                    ("ranks added", "first"),
                    ("sums in", _sums_in),
                    (Column("expected", decimal), "expected"),
                    (Column("error", decimal), "measured"),
                ),
            )
        )
    if side.bandwidth:
        rates: Iterable[BandwidthRow] = side.bandwidth
        if not whole:  # the largest size alone
            rates = {row.collective: row for row in side.bandwidth}.values()
        more.append(
            Table(
                title=f"bandwidth{whose}",
                folded="Bandwidth",
                detail="median of calls, slowest rank",
                sparse=True,
                **each_in(
                    rates,
                    ("collective", "collective"),
                    (Column("bytes", size), "bytes"),
                    (Column("time", _time), "seconds"),
                    (Column("algbw", _rate), "algbw"),
                    (Column("busbw", _rate), "busbw"),
                    (Column("link", _rate), lambda row: row.link_rate or None),
                    (
                        Column("of it", share),
                        lambda row: row.busbw / row.link_rate if row.link_rate else None,
                    ),
                ),
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
        Section(
            id=f"orders-{side.side}", heading=f"Orders and rates{whose}", body=more, verbose=True
        ),
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
        wrong = (fault.num_wrong, fault.elements)
        rows.append((rank_names(fault.ranks), case, fault.check, wrong, fault.text))
    return rows


def _right(row: CollectiveRow) -> str:
    return f"{row.num_right}" + (f" ({row.num_flushed} flushed)" if row.num_flushed else "")


def _sums_in(order: OrderRow) -> str:
    return order.accumulates or ("-" if order.measured is None else "not told")


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

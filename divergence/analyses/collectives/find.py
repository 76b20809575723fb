"""What one or two runs of collectives show."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.collectives.cases import ADDING
from divergence.comparison.decide import check
from divergence.comparison.results.findings import Check, Finding, Onset
from divergence.comparison.results.sites import Coverage
from divergence.comparison.results.suites import (
    CollectiveFault,
    CollectivesResult,
    CollectivesSide,
    OrderRow,
)
from divergence.facts import Fact, plain
from divergence.layout import count
from divergence.run.command import command
from divergence.run.reader import Run
from divergence.words import SideOrBoth, letter, list_names

__all__ = ["find_in_one", "find_in_two", "orders_text"]

_MOST = 6


def find_in_one(judged: CollectivesSide, run: Run) -> Finding:
    """The one finding on one run."""
    if judged.faults:
        return _of_faults([judged], [run], judged.faults, "reference", of=1)
    num = sum(row.num_cases for row in judged.rows)
    done = run.manifest.complete and not judged.num_missing
    cases = "the one case holds" if num == 1 else f"all {num:,} cases hold"
    held = f"{cases} on {judged.num_ranks} ranks ({judged.backend}): "
    who = "every rank has" if done else "the ranks whose results are there have"
    detail = f"{who} what it should" if done else f"{who} what they should"
    detail += ", the same bits each time"
    orders = orders_text(judged.orders)
    return Finding(
        claim="collectives",
        kind="within_floor" if num else "undetermined",
        headline=[
            plain(
                (f"{held}{detail}" if num else "nothing was checked but orders and times")
                + (f"; {orders}" if orders else "")
            )
        ],
        rests_on=_checks(judged, done),
        evidence=_facts(judged),
    )


def find_in_two(result: CollectivesResult, a: Run, b: Run, coverage: Coverage) -> Finding:
    """The one finding on two runs."""
    faulty = [judged for judged in result.sides if judged.faults]
    if faulty:
        side: SideOrBoth = "both" if len(faulty) == 2 else faulty[0].side
        runs = {"reference": a, "candidate": b}
        return _of_faults(
            faulty, [runs[judged.side] for judged in faulty], faulty[0].faults, side, of=2
        )  # fmt: skip
    sides = result.sides
    done = a.manifest.complete and b.manifest.complete and not coverage.unmatched
    checks = [check("coverage", done, "not every case was compared")]
    checks += [item for judged in sides for item in _checks(judged, True)[1:]]
    facts = [fact for judged in sides for fact in _facts(judged, name=True)]
    if not result.num_common:
        return Finding(
            claim="collectives",
            kind="undetermined",
            headline=[plain(f"{_alone(sides)}no case is common to both{_numbers(sides)}")],
            rests_on=[check("measured", False, "nothing was compared")],
            evidence=facts,
        )
    if not result.differing:
        return Finding(
            claim="collectives",
            kind="identical",
            headline=[plain(f"all {result.num_common:,} cases have the same bits, and are right")],
            rests_on=checks,
            evidence=facts,
        )
    most = result.differing[0]
    told = [orders_text(judged.orders) or "an order that is not known" for judged in sides]
    orders = f"in both {told[0]}" if told[0] == told[1] else f"in A {told[0]}, in B {told[1]}"
    return Finding(
        claim="collectives",
        kind="within_floor",
        headline=[
            plain(
                f"{len(result.differing):,} of {result.num_common:,} cases differ, by no more than "
                f"rounding explains (relative difference up to {most.rel_l2:.1e}): {orders}"
            )
        ],
        rests_on=checks,
        evidence=facts,
        commands=[command("compare", a.path, b.path, all=True)],
    )


def _alone(sides: Sequence[CollectivesSide]) -> str:
    checked = all(any(row.num_cases for row in judged.rows) for judged in sides)
    return "each run is right by itself; " if checked else ""


def _numbers(sides: Sequence[CollectivesSide]) -> str:
    a, b = (judged.num_ranks for judged in sides)
    return f" ({a} ranks and {b})" if a != b else ""


def _checks(judged: CollectivesSide, done: bool) -> list[Check]:
    made = any(row.num_cases for row in judged.rows)
    return [
        check("coverage", done, "not every rank's results are in the run"),
        check("measured", made, "no case was run"),
    ]


def _of_faults(
    sides: Sequence[CollectivesSide],
    runs: Sequence[Run],
    faults: Sequence[CollectiveFault],
    side: SideOrBoth,
    *,
    of: int,
) -> Finding:
    """``of``: how many runs there are."""
    first = faults[0]
    whose = "" if of == 1 else f" of {letter(sides[0].side)}"
    collectives = {fault.collective for judged in sides for fault in judged.faults}
    known = {row.collective for judged in sides for row in judged.rows}
    many = len(known) > 3 and 2 * len(collectives) > len(known)
    cases = len({fault.site for judged in sides for fault in judged.faults})
    more = (
        f" ({count(cases, 'case')} in all: {', '.join(sorted(collectives))})" if cases > 1 else ""
    )
    facts = [
        plain(("" if of == 1 else f"{letter(judged.side)}: ") + _sentence(fault, alike))
        for judged in sides
        for fault, alike in _grouped(judged.faults)[:_MOST]
    ]
    missing = any(judged.num_missing for judged in sides) or not all(
        r.manifest.complete for r in runs
    )
    return Finding(
        claim="collectives",
        kind="systematic" if many else "localized",
        headline=[
            plain(
                f"{_who(first, whose)}: {first.collective} of {first.dtype}, {first.size} "
                f"({first.elements:,} elements), {first.values}: {first.text}{more}"
            )
        ],
        onset=Onset(site=first.site, block=None, sample=0, step=0, position=None),
        side=side,
        rests_on=[
            check("coverage", not missing, "not every rank's results are in the run"),
            check(
                "rank",
                not first.assumed or _confirmed(first, sides[0].faults),
                _assumed(first),
                made=False,
            ),
        ],
        evidence=facts,
        commands=[command("compare", *(run.path for run in runs), all=True)],
    )


def _assumed(fault: CollectiveFault) -> str:
    if fault.collective in ADDING:
        return "that each rank reduces its own part of the buffer is assumed"
    return "what was sent wrong and what was received wrong look alike"


def _confirmed(fault: CollectiveFault, faults: Sequence[CollectiveFault]) -> bool:
    """Does another fault name the same ranks by what they hold?"""
    return any(not other.assumed and other.ranks == fault.ranks for other in faults)


def _who(fault: CollectiveFault, whose: str = "") -> str:
    if fault.ranks:
        return f"{_names(fault.ranks)}{whose}"
    wrong = f"{_names(fault.wrong_ranks)}{whose}"
    if len(fault.wrong_ranks) > 1:
        return f"{wrong}, all wrong (one rank made it, or each did)"
    if fault.wrong_ranks:
        return f"{wrong}, which alone holds the result (any may have made it)"
    return f"a rank{whose} that cannot be told"


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {list_names([*map(str, ranks)], 6)}"


def _grouped(faults: Sequence[CollectiveFault]) -> list[tuple[CollectiveFault, int]]:
    """The first fault of each kind, and how many there are of it."""
    groups: dict[tuple[object, ...], list[CollectiveFault]] = {}
    for fault in faults:
        groups.setdefault((fault.check, fault.collective, fault.ranks), []).append(fault)
    return [(group[0], len(group)) for group in groups.values()]


def _sentence(fault: CollectiveFault, alike: int) -> str:
    also = f", and in {count(alike - 1, 'more case')} alike" if alike > 1 else ""
    return (
        f"{_who(fault)}, {fault.collective} of {fault.dtype} {fault.size} {fault.values}: "
        f"{fault.text} ({fault.num_wrong:,} of {fault.elements:,} elements){also}"
    )


def orders_text(orders: Sequence[OrderRow]) -> str:
    """``all_reduce adds by ring``; several where sizes or dtypes differ."""
    told: dict[str, list[OrderRow]] = {}
    for row in orders:
        if row.collective == "all_reduce":
            told.setdefault(row.order, []).append(row)
    if not told:
        return ""
    names = [
        f"by {name}" if len(told) == 1 else f"by {name} ({rows[0].dtype} {rows[0].size} ...)"
        for name, rows in told.items()
    ]
    by = " and ".join(names).replace("by one addition", "in one addition")
    return "all_reduce adds " + by.replace("by not revealed", "in an order that is not known")


def _facts(judged: CollectivesSide, *, name: bool = False) -> list[Fact]:
    """What else is worth a line."""
    whose = f"{letter(judged.side)}: " if name else ""
    facts = []
    sums = {row.collective: row.limit_usage for row in judged.rows if row.limit_usage is not None}
    if sums:
        worst = max(sums, key=lambda collective: sums[collective] or 0.0)
        facts.append(
            plain(
                f"{whose}sums are at most {sums[worst] or 0.0:.0%} of what rounding in any "
                f"order of {judged.num_ranks} ranks may be off by ({worst})",
                limit_usage=sums[worst] or 0.0,
            )
        )
    proven = [row for row in judged.orders if row.accumulates is not None]
    if proven:
        how = sorted({f"{row.dtype} in {row.accumulates}" for row in proven})
        num = sum(row.num_replayed for row in proven)
        facts.append(
            plain(
                f"{whose}replaying the orders gives {num:,} recorded elements bit by bit; "
                f"partial sums are kept of {', '.join(how)}"
            )
        )
    rows = judged.identities
    if rows:
        promised = [row for row in rows if row.promised]
        same = sum(row.num_different == 0 for row in rows)
        facts.append(
            plain(
                f"{whose}reduce-scatter, then all-gather make the all-reduce's bits in {same} "
                f"of {len(rows)} cases; the orders of addition promise it in {len(promised)}"
            )
        )
    flushed = sum(row.num_flushed for row in judged.rows)
    if flushed:
        facts.append(plain(f"{whose}subnormal sums become 0 in {count(flushed, 'case')}"))
    return facts

"""Runs of collectives compared: what each does wrong by itself, and where two differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from divergence.analyses.collectives.adding import ranks_named
from divergence.analyses.collectives.judge import judge
from divergence.analyses.collectives.recorded import Recorded
from divergence.collectives.cases import ADDING
from divergence.comparison.analysis import report_of
from divergence.comparison.arithmetic import facts_of_operators
from divergence.comparison.decide import check
from divergence.comparison.result import Report
from divergence.comparison.results import (
    Check,
    CollectiveDiff,
    CollectiveFault,
    CollectivesResult,
    CollectivesSide,
    Coverage,
    Finding,
    Onset,
    OrderRow,
    Skipped,
)
from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.run.command import command, command_line
from divergence.run.reader import Run
from divergence.words import Progress, Side, SideOrBoth

# What one or two runs of collectives show.

_MOST = 6


def find_in_one(judged: CollectivesSide, run: Run) -> Finding:
    """The one finding on one run."""
    if judged.faults:
        return _of_faults([judged], [run], "reference")
    num = sum(row.num_cases for row in judged.rows)
    done = run.manifest.complete and not judged.num_missing
    orders = _orders(judged.orders)
    headline = fact("collectives.nothing_checked", orders=orders)
    if num:
        headline = fact(
            "collectives.holds", num=num, num_ranks=judged.num_ranks, backend=judged.backend,
            done=done, orders=orders,
        )  # fmt: skip
    return Finding(
        claim="collectives",
        kind="within_floor" if num else "undetermined",
        headline=[headline],
        rests_on=_checks(judged, done),
        evidence=_facts(judged),
    )


def find_in_two(result: CollectivesResult, a: Run, b: Run, coverage: Coverage) -> Finding:
    """The one finding on two runs."""
    sides = result.sides
    faulty = [judged for judged in sides if judged.faults]
    if faulty:
        side: SideOrBoth = "both" if len(faulty) == 2 else faulty[0].side
        runs = {"reference": a, "candidate": b}
        return _of_faults(faulty, [runs[judged.side] for judged in faulty], side, named=True)
    done = a.manifest.complete and b.manifest.complete and not coverage.unmatched
    checks = [check("coverage", done, fact("not_every_case"))]
    checks += [item for judged in sides for item in _checks(judged, True)[1:]]
    facts = [item for judged in sides for item in _facts(judged, side=judged.side)]
    if not result.num_common:
        nums = [judged.num_ranks for judged in sides]
        other = nums[0] != nums[1]
        none_common = fact(
            "collectives.none_common",
            checked=all(any(row.num_cases for row in judged.rows) for judged in sides),
            num_in_reference=nums[0] if other else None,
            num_in_candidate=nums[1] if other else None,
        )
        return Finding(
            claim="collectives",
            kind="undetermined",
            headline=[none_common],
            rests_on=[check("measured", False, fact("collectives.nothing_compared"))],
            evidence=facts,
        )
    if not result.differing:
        return Finding(
            claim="collectives",
            kind="identical",
            headline=[fact("collectives.all_same", num=result.num_common)],
            rests_on=checks,
            evidence=facts,
        )
    reference, candidate = (
        _orders(judged.orders) or fact("collectives.order_not_known") for judged in sides
    )
    differ = fact(
        "collectives.differ", num=len(result.differing), total=result.num_common,
        rel_l2=result.differing[0].rel_l2, same_orders=reference == candidate,
        reference=reference, candidate=candidate,
    )  # fmt: skip
    return Finding(
        claim="collectives",
        kind="within_floor",
        headline=[differ],
        rests_on=checks,
        evidence=facts,
        commands=[command("compare", a.path, b.path, all=True)],
    )


def _checks(judged: CollectivesSide, done: bool) -> list[Check]:
    made = any(row.num_cases for row in judged.rows)
    return [
        check("coverage", done, fact("collectives.ranks_missing")),
        check("measured", made, fact("collectives.no_case")),
    ]


def _of_faults(
    sides: Sequence[CollectivesSide], runs: Sequence[Run], side: SideOrBoth, *, named: bool = False
) -> Finding:
    """``sides``: those with faults. ``named``: there are two, and whose fault it is is told."""
    first = sides[0].faults[0]
    collectives = sorted({fault.collective for judged in sides for fault in judged.faults})
    known = {row.collective for judged in sides for row in judged.rows}
    many = len(known) > 3 and 2 * len(collectives) > len(known)
    num_cases = len({fault.site for judged in sides for fault in judged.faults})
    headline = fact(
        "collectives.fault", who=_who(first, sides[0].side if named else None),
        **_case(first), num_cases=num_cases if num_cases > 1 else None, collectives=collectives,
    )  # fmt: skip
    missing = any(judged.num_missing for judged in sides) or not all(
        r.manifest.complete for r in runs
    )
    # another fault may name the same ranks by what they hold
    confirmed = any(not other.assumed and other.ranks == first.ranks for other in sides[0].faults)
    adds = first.collective in ADDING
    assumed = fact("collectives.part_assumed") if adds else fact("collectives.look_alike")
    return Finding(
        claim="collectives",
        kind="systematic" if many else "localized",
        headline=[headline],
        onset=Onset(site=first.site, block=None, sample=0, step=0, position=None),
        side=side,
        rests_on=[
            check("coverage", not missing, fact("collectives.ranks_missing")),
            check("rank", not first.assumed or confirmed, assumed, made=False),
        ],
        evidence=[
            item for judged in sides for item in _lines(judged, judged.side if named else None)
        ],
        commands=[command("compare", *(run.path for run in runs), all=True)],
    )


def _lines(judged: CollectivesSide, side: Side | None) -> list[Fact]:
    """The first fault of each kind, and how many there are like it."""
    groups: dict[tuple[object, ...], list[CollectiveFault]] = {}
    for fault in judged.faults:
        groups.setdefault((fault.check, fault.collective, fault.ranks), []).append(fault)
    return [
        fact("collectives.fault_line", side=side, who=_who(group[0]), **_case(group[0]),
             num_wrong=group[0].num_wrong, num_alike=len(group) - 1 or None)
        for group in list(groups.values())[:_MOST]
    ]  # fmt: skip


def _case(fault: CollectiveFault) -> dict[str, Any]:
    return {
        "collective": fault.collective,
        "dtype": fault.dtype,
        "size": fault.size,
        "elements": fault.elements,
        "values": fault.values,
        "what": fault.what,
    }


def _who(fault: CollectiveFault, side: Side | None = None) -> Fact:
    if fault.ranks:
        return fact("collectives.named", ranks=ranks_named(fault.ranks), side=side)
    if not fault.wrong_ranks:
        return fact("collectives.nobody", side=side)
    code = "collectives.all_wrong" if len(fault.wrong_ranks) > 1 else "collectives.one_holds"
    return fact(code, ranks=ranks_named(fault.wrong_ranks), side=side)


def _orders(orders: Sequence[OrderRow]) -> Fact | None:
    """``all_reduce adds by ring``; several where sizes or dtypes differ."""
    first: dict[str, OrderRow] = {}
    for row in orders:
        if row.collective == "all_reduce":
            first.setdefault(row.order, row)
    several = len(first) > 1
    ways = [
        fact("collectives.way", order=row.order, dtype=row.dtype if several else None,
             size=row.size if several else None)
        for row in first.values()
    ]  # fmt: skip
    return fact("collectives.adds", ways=ways) if ways else None


def _facts(judged: CollectivesSide, *, side: Side | None = None) -> list[Fact]:
    """What else is worth a line. ``side``: whose, where there are two."""
    facts = []
    sums = {row.collective: row.limit_usage for row in judged.rows if row.limit_usage is not None}
    if sums:
        worst = max(sums, key=lambda collective: sums[collective])
        facts.append(
            fact("collectives.usage", side=side, limit_usage=sums[worst],
                 num_ranks=judged.num_ranks, collective=worst)
        )  # fmt: skip
    proven = [row for row in judged.orders if row.accumulates is not None]
    if proven:
        pairs = sorted({(row.dtype, row.accumulates or "") for row in proven})
        kept = [fact("collectives.kept", dtype=own, accumulates=wide) for own, wide in pairs]
        num = sum(row.num_replayed for row in proven)
        facts.append(fact("collectives.replayed", side=side, num=num, kept=kept))
    rows = judged.identities
    if rows:
        facts.append(
            fact("collectives.identities", side=side, total=len(rows),
                 num_same=sum(row.num_different == 0 for row in rows),
                 num_promised=sum(row.promised for row in rows))
        )  # fmt: skip
    flushed = sum(row.num_flushed for row in judged.rows)
    if flushed:
        facts.append(fact("collectives.flushed", side=side, num=flushed))
    return facts


# Runs of collectives: one judged by itself, or two held against each other.
#
# Each side is judged by the definitions alone (collectives.judge), so a side that is wrong is named
# without trusting the other. Where both are right, results may still differ: two libraries add in
# two orders. Cases are paired by name; only those with the same inputs on every rank are compared.


def report_alone(run: Run, *, progress: Progress | None = None) -> Report:
    """The report on one run. Raises RunFormatError for a damaged one."""
    judged = judge(run, "reference", progress)
    num = sum(row.num_cases for row in judged.rows)
    coverage = Coverage(num_compared=num, num_only_reference=judged.num_missing)
    result = CollectivesResult(sides=[judged])
    return report_of(run, run, find_in_one(judged, run), coverage, [], collectives=result)


def report_on(
    a: Run, b: Run, *, truth: Run | None, floor: Sequence[object], layers: Sequence[Run],
    progress: Progress | None,
) -> Report:  # fmt: skip
    """The report on two runs. Raises UsageError for a truth, a floor or layers, and RunFormatError
    for a damaged run."""
    for option, given in (("--truth", truth), ("--floor", floor), ("--layers", layers)):
        if given:
            raise UsageError(
                f"{option} means nothing to collectives: each is held to its definition",
                hint=command_line("compare", a.path, b.path),
            )
    sides: list[tuple[Side, Run]] = [("reference", a), ("candidate", b)]
    judged = [judge(run, side, progress) for side, run in sides]
    reference, candidate = Recorded(a), Recorded(b)
    result, coverage = _pair(reference, candidate, judged)
    lines = [line for line in facts_of_operators(a, b)[0] if line.check != "engine"]
    finding = find_in_two(result, a, b, coverage)
    return report_of(a, b, finding, coverage, lines, collectives=result)


def _pair(
    reference: Recorded, candidate: Recorded, judged: list[CollectivesSide]
) -> tuple[CollectivesResult, Coverage]:
    ours = {case.site: case for case in reference.cases()}
    theirs = {case.site: case for case in candidate.cases()}
    skipped: list[Skipped] = []
    differing: list[CollectiveDiff] = []
    num_common = 0
    for site, case in ours.items():
        other = theirs.get(site)
        if other is None:
            skipped.append(_skip(site, fact("collectives.no_partner"), "reference"))
            continue
        reason = None
        if reference.num_ranks != candidate.num_ranks:
            reason = fact(
                "collectives.other_num_ranks", reference=reference.num_ranks,
                candidate=candidate.num_ranks,
            )  # fmt: skip
        elif _inputs(reference, case.place) != _inputs(candidate, case.place):
            reason = fact("collectives.other_inputs")
        if reason is not None:
            skipped.append(_skip(site, reason, "both"))
            continue
        num_common += 1
        ranks = [rank for rank in case.ranks if case.digests(rank)[:1] != other.digests(rank)[:1]]
        if ranks:
            far = [
                _apart(case.results[rank], other.results[rank])
                for rank in ranks
                if rank in case.results and rank in other.results
            ]
            size = max(far, default=float("nan"))
            differing.append(CollectiveDiff(site=site, ranks=tuple(ranks), rel_l2=size))
    skipped += [
        _skip(site, fact("collectives.no_partner"), "candidate")
        for site in theirs
        if site not in ours
    ]
    result = CollectivesResult(
        sides=judged, num_common=num_common, num_same=num_common - len(differing),
        differing=sorted(differing, key=lambda diff: -diff.rel_l2),
    )  # fmt: skip
    return result, Coverage.of(num_common, skipped)


def _inputs(recorded: Recorded, place: str) -> list[tuple[int, str | None]]:
    """(rank, digest) of what the ranks put in."""
    return sorted(
        (rank, record.xxh3)
        for (rank, site), record in recorded.records.items()
        if site == f"{place}:in.x"
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖b - a‖ / ‖a‖."""
    if a.shape != b.shape:
        return float("inf")
    x, y = a.double(), b.double()
    norm, far = float(x.norm()), float((y - x).norm())
    return 0.0 if far == 0.0 else far / norm if norm else float("inf")


def _skip(site: str, reason: Fact, side: SideOrBoth) -> Skipped:
    return Skipped("free", 0, 0, site, side, reason)

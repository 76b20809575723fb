"""Runs of collectives: one judged by itself, or two held against each other.

Each side is judged by the definitions alone (collectives.judge), so a side that is wrong is named
without trusting the other. Where both are right, results may still differ: two libraries add in two
orders. Cases are paired by name; only those with the same inputs on every rank are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from divergence.analyses.collectives.find import find_in_one, find_in_two
from divergence.analyses.collectives.judge import judge
from divergence.analyses.collectives.recorded import Recorded
from divergence.comparison.analysis import report_of
from divergence.comparison.arithmetic import facts_of_operators
from divergence.comparison.result import Report
from divergence.comparison.results import (
    CollectiveDiff,
    CollectivesResult,
    CollectivesSide,
    Coverage,
    Skipped,
)
from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.words import Progress, Side, SideOrBoth

__all__ = ["report_alone", "report_on"]


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

"""The first operator to blame: a source, whose error nothing that feeds it explains.

An operator is a source only if nothing that feeds it is beyond its own limit (coremltools calls it
the failure source). What only enlarges an error does not make it, so the onset moves back to what
feeds it where that is near its limit on the same side.
"""

from __future__ import annotations

from collections.abc import Callable

from divergence.analyses.operators.errors import MeasuredOperators
from divergence.comparison.results.operators import OperatorResult
from divergence.numerics.rounding.floor import Thresholds

__all__ = ["first_source"]

_NEAR = 0.55  # of the limit: as far as healthy operators go


def first_source(
    measured: MeasuredOperators,
    by_path: dict[tuple[str, str], OperatorResult],
    thresholds: Thresholds,
) -> OperatorResult | None:
    """The first source in execution order; the prefill comes before the decode steps."""
    entering = {(unit.match.reference.path, unit.phase): unit.feeds for unit in measured.units}

    def feeds(result: OperatorResult) -> list[OperatorResult]:
        """Those that are judged: what feeds an unjudged one (a copy that the truth's layout does
        not need) feeds what that feeds."""
        found: list[OperatorResult] = []
        waiting, seen = [result], {id(result)}
        while waiting:
            paths = entering[waiting.pop().site, result.phase]
            known = [by_path[p, result.phase] for p in paths if (p, result.phase) in by_path]
            known = [feed for feed in known if id(feed) not in seen]
            seen.update(id(feed) for feed in known)
            found += [feed for feed in known if feed.verdict != "unjudged"]
            waiting += [feed for feed in known if feed.verdict == "unjudged"]
        return found

    flagged = [r for r in by_path.values() if r.limit_usage > 1 and r.verdict != "unjudged"]
    if measured.frame == "operator":
        return flagged[0] if flagged else None
    sources = [r for r in flagged if not any(feed.limit_usage > 1 for feed in feeds(r))]
    if not sources:
        return flagged[0] if flagged else None
    onset = min(sources, key=lambda r: (r.phase == "decode", r.order))
    return _moved_back(onset, feeds, thresholds) if measured.with_truth else onset


def _moved_back(
    onset: OperatorResult,
    feeds: Callable[[OperatorResult], list[OperatorResult]],
    thresholds: Thresholds,
) -> OperatorResult:
    """To what feeds it, while that is on the same side's way to the limit and the step from it
    is less than the limit itself: an error that is mostly inherited was made before."""
    side = onset.verdict
    while onset.why in ("typical", "row", "column", "slice", None):
        before = [
            feed
            for feed in feeds(onset)
            if feed.leans == side
            and feed.limit_usage > _NEAR
            and onset.limit_usage / feed.limit_usage < thresholds.operator
        ]
        if not before:
            break
        onset = max(before, key=lambda feed: feed.limit_usage)
        onset.verdict = side
    return onset

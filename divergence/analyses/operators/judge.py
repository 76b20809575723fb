"""Which operator, and whose: from measured operators to the first one that is to blame.

For each operator W = err(b, R) / err(a, R), the floor of one operator (numerics.operator) added in
quadrature on both sides, so that two exact results give 1 and rounding noise no ratio. Beyond
``Thresholds.operator`` the candidate is to blame, below its inverse the reference; few numbers
may spread wider (numerics.chance). Narrower questions see what a median cannot: one row's error
over the other side's there, one column's, and one slice's (a head's typical row).

Within a block errors are inherited: what feeds a wrong operator's result into others makes
those look wrong too. So an operator is a *source* only if nothing that feeds it is beyond its
limit (coremltools calls it the failure source), and where something that feeds it is already
near it on the same side, and the step from it is less than a limit, the onset is moved back to
that: what doubles an error (a square, a mean) does not make it.

Integers are codes: chosen indices may differ only where rounding explains it, that is where the
values chosen between are nearer to each other than the two sides' inputs are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from divergence.analyses.operators.errors import MeasuredOperators, OperatorUnit
from divergence.analyses.operators.facts import judge_operands, judge_roundings, region_result
from divergence.analyses.operators.onset import first_source
from divergence.analyses.operators.regions import in_words
from divergence.comparison.calls.graph import Node
from divergence.comparison.results.operators import (
    OperatorResult,
    OperatorsResult,
    OtherInput,
    Question,
    UnmatchedOperator,
)
from divergence.numerics.pairs.operator import slices_of
from divergence.numerics.rounding.chance import rare_ratio
from divergence.numerics.rounding.floor import THRESHOLDS, Thresholds
from divergence.run.schema.manifest import ModuleNote
from divergence.run.schema.site import module_of
from divergence.words import Side

__all__ = ["judge_operators"]

_SIDES: tuple[Side, Side] = ("reference", "candidate")
_ENOUGH_ROWS = 16
_ENOUGH_COLUMNS = 16
_EXPONENTIAL = ("aten._softmax", "aten._log_softmax", "aten.exp")
"""d exp(s) = exp(s) ds: what was an absolute difference is a relative one, ‖s‖ times larger."""


@dataclass(slots=True)
class _Pooled:
    """All forwards of a unit: per row (T,), each side's error with the floor in quadrature.
    ``wide``: rows of enough numbers to be looked at alone (masked scores are short at first)."""

    reference: torch.Tensor
    candidate: torch.Tensor
    between: torch.Tensor
    floor: torch.Tensor
    raw: tuple[float, float]
    columns: tuple[torch.Tensor, torch.Tensor] | None
    slices: list[torch.Tensor]
    wide: torch.Tensor
    num_values: int
    num_columns: int
    nonfinite: tuple[int, int]
    over_1_ulp: tuple[float, float]


def judge_operators(
    measured: MeasuredOperators,
    *,
    notes: dict[str, ModuleNote],
    thresholds: Thresholds = THRESHOLDS,
    two_dtypes: bool = False,
) -> OperatorsResult:
    """Judge every unit; ``notes``: the reference's modules, for their class and block.

    ``two_dtypes``: the models' dtypes differ, so the coarser side is farther from the truth by
    right, and by more with every operator: only nan and inf are judged then.
    """
    blocks = [path for path, note in notes.items() if note.role == "block"]
    extra = {
        side: {n.path: n for n in nodes if n.path not in measured.in_regions[side]}
        for side, nodes in measured.lone.items()
    }
    results: list[OperatorResult] = []
    by_path: dict[tuple[str, str], OperatorResult] = {}
    norms: dict[str, float] = {}
    untold: dict[tuple[str, str], None] = {}  # what pads may have made, by path and phase
    for unit in measured.units:
        result = _result(unit, notes, blocks)
        feeds = [by_path[path, unit.phase] for path in unit.feeds if (path, unit.phase) in by_path]
        pooled = _pool(unit)
        if pooled is not None:
            _fill(result, pooled)
            if measured.with_truth:
                _against_truth(result, pooled, thresholds, alone=measured.frame == "operator")
            else:
                norm = max((norms.get(feed.site, 1.0) for feed in feeds), default=1.0)
                grows = max(1.0, norm) if unit.match.reference.name in _EXPONENTIAL else 1.0
                _against_each_other(result, pooled, feeds, thresholds, grows)
            norms[result.site] = max(e.largest_norm for _, _, e in unit.forwards if e is not None)
        _codes(result, unit, measured.with_truth)
        judge_roundings(result, unit, thresholds)
        judge_operands(result, unit)
        if two_dtypes:  # casts are to other dtypes by right
            result.other_operands = [one for one in result.other_operands if one.is_value]
        if two_dtypes and result.why != "nonfinite":
            result.limit_usage, result.why, result.verdict = 0.0, None, "unjudged"
        if unit.untold or _inherits(unit, result, untold):
            result.limit_usage, result.why, result.verdict = 0.0, None, "unjudged"
            untold[result.site, unit.phase] = None
        if feeds and measured.frame == "block":
            entering = [abs(math.log(feed.w)) for feed in feeds if feed.w]
            result.w_entering = math.exp(max(entering)) if entering else None
        ends: tuple[tuple[Side, Node], ...] = (
            ("candidate", unit.match.candidate),
            ("reference", unit.match.reference),
        )
        for side, node in ends:
            if not result.fed_by and unit.region is None:
                result.fed_by = _only_there(node, extra[side])
                result.fed_by_side = side if result.fed_by else None
        result.other_inputs = _telling(unit, result, feeds, thresholds)
        results.append(result)
        by_path[result.site, unit.phase] = result
    onset = first_source(measured, by_path, thresholds)
    return OperatorsResult(
        frame="operator" if measured.frame == "operator" else "block",
        judged="truth" if measured.with_truth else "difference",
        num_matched=len(results),
        num_value_matches=sum(result.match == "value" for result in results),
        onset=None if onset is None else onset.site,
        side=None
        if onset is None or onset.verdict not in ("reference", "candidate", "both")
        else onset.verdict,
        results=results,
        unmatched=[
            UnmatchedOperator(
                side=side, site=node.path, operator=node.call.operator, source=node.call.source
            )
            for side in _SIDES
            for node in extra[side].values()
        ],
        notes=[*_not_compared(measured), *_of_pads(untold)],
    )


def _inherits(
    unit: OperatorUnit, result: OperatorResult, untold: dict[tuple[str, str], None]
) -> bool:
    """Beyond its limit, or not judged, and fed by what pads may have made: is it that?"""
    fed = any((path, unit.phase) in untold for path in unit.feeds)
    return fed and (result.verdict == "unjudged" or result.limit_usage > 1)


def _of_pads(untold: dict[tuple[str, str], None]) -> list[str]:
    """What was not judged since the batch's pads may be in it."""
    paths = list(dict.fromkeys(path for path, _ in untold))
    if not paths:
        return []
    shown = ", ".join(paths[:2]) + (", …" if len(paths) > 2 else "")
    return [
        f"could not be judged: {len(paths)} results that may hold the batch's pads, and do not "
        f"tell where ({shown}); capture without --batch to have them judged"
    ]


def _telling(
    unit: OperatorUnit,
    result: OperatorResult,
    feeds: list[OperatorResult],
    thresholds: Thresholds,
) -> list[OtherInput]:
    """Of the arguments that come from elsewhere those whose values differ by more than what feeds
    the operator does."""
    entering = max((feed.difference or 0.0 for feed in feeds), default=0.0)
    base = math.hypot(math.sqrt(2) * (result.floor or 0.0), entering)
    return [
        item
        for item in unit.other_inputs
        if item.difference is None or item.difference > thresholds.operator_growth * base
    ]


def _only_there(node: Node, extra: dict[str, Node]) -> list[str]:
    """Calls without a partner that feed ``node``, also through one another, in order."""
    found: dict[str, Node] = {}
    waiting = [path for path in node.feeds if path in extra]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = extra[path]
            waiting += [feed for feed in extra[path].feeds if feed in extra]
    return sorted(found, key=lambda path: found[path].order)


def _result(unit: OperatorUnit, notes: dict[str, ModuleNote], blocks: list[str]) -> OperatorResult:
    one, two = unit.match.reference, unit.match.candidate
    module = module_of(f"{one.path}:out")
    note = notes.get(module)
    inside = [b for b in blocks if module == b or module.startswith(b + ".")]
    return OperatorResult(
        site=one.path,
        candidate_site=two.path,
        match=unit.match.method,
        operator=one.call.operator,
        candidate_operator=two.call.operator,
        kind=note.kind if note else None,
        block=max(inside, key=len) if inside else None,
        source=one.call.source,
        phase=unit.phase,
        order=one.order,
        sample=unit.forwards[0][0][0],
        step=unit.forwards[0][0][1],
        shape=one.results[0].shape,
        reference_dtype=one.results[0].dtype,
        candidate_dtype=two.results[0].dtype,
        identical=unit.num_equal == len(unit.forwards),
        region=None if unit.region is None else region_result(unit),
    )


def _not_compared(measured: MeasuredOperators) -> list[str]:
    """Calls without a partner that lead to nothing that both sides have: said, never guessed."""
    parts = [
        f"{in_words(nodes)} of the {side} ({', '.join(node.path for node in nodes[:2])}"
        + (", …)" if len(nodes) > 2 else ")")
        for side, nodes in measured.unreached.items()
        if nodes
    ]
    if len(parts) < 2:  # what one side computes besides has nothing to be compared with
        return []
    return [
        f"could not be compared: {' and '.join(parts)} have no result in common with the other "
        "side's"
    ]


def _pool(unit: OperatorUnit) -> _Pooled | None:
    found = [errors for _, _, errors in unit.forwards if errors is not None]
    if not found:
        return None
    reference, candidate, between, floor = (
        torch.cat([getattr(errors, name) for errors in found])
        for name in ("reference", "candidate", "between", "floor")
    )
    widths = {len(errors.column_floor) for errors in found if len(errors.reference)}
    columns = None
    if len(widths) == 1 and len(reference) >= _ENOUGH_ROWS:
        base = sum(errors.column_floor for errors in found)
        columns = tuple(
            (sum(getattr(errors, f"column_{side}") for errors in found) + base).sqrt()
            for side in ("reference", "candidate")
        )
    weight = max(1, sum(len(errors.reference) for errors in found))

    def median(rows: torch.Tensor) -> float:
        return float(rows.median()) if len(rows) else 0.0

    def num_nonfinite(side: int) -> int:
        return sum(errors.num_nonfinite[side] for errors in found)

    def over_1_ulp(side: int) -> float:
        return sum(errors.over_1_ulp[side] * len(errors.reference) for errors in found) / weight

    return _Pooled(
        reference=torch.hypot(reference, floor),
        candidate=torch.hypot(candidate, floor),
        between=between,
        floor=floor,
        raw=(median(reference), median(candidate)),
        columns=columns,
        wide=torch.cat([errors.counts for errors in found]) >= _ENOUGH_COLUMNS,
        slices=slices_of([e for e in found if len(e.reference)], least=_ENOUGH_ROWS),
        num_values=sum(len(e.reference) * len(e.column_floor) for e in found),
        num_columns=min(widths, default=0),
        nonfinite=(num_nonfinite(0), num_nonfinite(1)),
        over_1_ulp=(over_1_ulp(0), over_1_ulp(1)),
    )


def _fill(result: OperatorResult, pooled: _Pooled) -> None:
    if len(pooled.floor):
        result.difference = float(pooled.between.square().mean().sqrt())
        result.floor = float(pooled.floor.median())


def _against_truth(
    result: OperatorResult, pooled: _Pooled, thresholds: Thresholds, *, alone: bool
) -> None:
    result.reference_error, result.candidate_error = pooled.raw
    result.ulp_share_reference, result.ulp_share_candidate = pooled.over_1_ulp
    if any(pooled.nonfinite):
        result.limit_usage, result.why = math.inf, "nonfinite"
        result.verdict = _side(pooled.nonfinite[1] > pooled.nonfinite[0])
        return
    if not len(pooled.floor):
        return
    wider = rare_ratio(pooled.num_values)
    a, b = (_typical(rows) for rows in (pooled.reference, pooled.candidate))
    result.w = b / a
    asked: list[tuple[float, Question, Side]] = []  # (share of the limit, why, side)
    limit = thresholds.operator * wider
    asked.append((max(result.w, 1 / result.w) / limit, "typical", _side(b > a)))
    result.peak = 1.0
    if bool(pooled.wide.any()):  # the error of few numbers says little of a row
        rows = _excess(pooled.reference[pooled.wide], pooled.candidate[pooled.wide])
        asked += [(rows[s] / (thresholds.operator_row * wider), "row", s) for s in rows]
        result.peak = max(rows.values())
    if pooled.columns is not None:
        columns = _excess(*pooled.columns)
        peak = thresholds.operator_column * rare_ratio(len(pooled.floor))
        asked += [(columns[s] / peak, "column", s) for s in columns]
        result.peak = max(result.peak, *columns.values())
    for members in pooled.slices:
        one, two = (_typical(side[members]) for side in (pooled.reference, pooled.candidate))
        times = max(one / two, two / one)
        wide = thresholds.operator_column * rare_ratio(len(members) * pooled.num_columns)
        asked.append((times / wide, "slice", _side(two > one)))
        result.peak = max(result.peak, times)
    result.limit_usage, result.why, side = max(asked)
    result.leans = side
    result.verdict = side if result.limit_usage > 1 else "fine"
    if result.limit_usage <= 1:
        far = thresholds.typical * wider * float(pooled.floor.median())
        if alone and min(a, b) > far:
            result.verdict, result.why = "both", "typical"
            result.limit_usage = min(a, b) / far


def _typical(rows: torch.Tensor) -> float:
    """The median row; of a few rows their rms, as their median is one of a few."""
    few = len(rows) < _ENOUGH_ROWS
    return float(rows.square().mean().sqrt() if few else rows.median())


def _excess(reference: torch.Tensor, candidate: torch.Tensor) -> dict[Side, float]:
    """Each side's largest error over the other side's there (or its median, if larger)."""
    return {
        "candidate": float((candidate / reference.clamp_min(reference.median())).max()),
        "reference": float((reference / candidate.clamp_min(candidate.median())).max()),
    }


def _side(candidate: bool) -> Side:
    return "candidate" if candidate else "reference"


def _against_each_other(
    result: OperatorResult,
    pooled: _Pooled,
    feeds: list[OperatorResult],
    thresholds: Thresholds,
    grows: float,
) -> None:
    """Without a truth: by how much the difference grows over what came in, which correct code makes
    ``grows`` times as large. No side is named."""
    if any(pooled.nonfinite):
        result.limit_usage, result.why, result.verdict = math.inf, "nonfinite", "differs"
        return
    if result.floor is None or result.difference is None:  # no row is left
        return
    entering = max((feed.difference or 0.0 for feed in feeds), default=0.0)
    base = math.hypot(math.sqrt(2) * result.floor, grows * entering)
    limit = thresholds.operator_growth * rare_ratio(pooled.num_values)
    result.limit_usage = result.difference / base / limit if base > 0 else 0.0
    result.verdict = "differs" if result.limit_usage > 1 else "fine"
    result.why = "typical" if result.limit_usage > 1 else None


def _codes(result: OperatorResult, unit: OperatorUnit, with_truth: bool) -> None:
    if not unit.num_codes:
        return
    other = unit.codes
    result.codes = other.differing / unit.num_codes
    if result.verdict == "unjudged":
        result.verdict = "fine"
    if other.unexplained == 0 or result.limit_usage > 1:
        return
    result.limit_usage, result.why = math.inf, "codes"
    if not with_truth or other.wrong[0] == other.wrong[1]:
        result.verdict = "differs"
    else:
        result.verdict = _side(other.wrong[1] > other.wrong[0])

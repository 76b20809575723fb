"""One operator against its limits: errors, codes, its operands, and how often a region rounds.

For each operator W = err(b, R) / err(a, R), the floor of one operator (numerics.operator) added in
quadrature on both sides, so that two exact results give 1 and rounding noise no ratio. Beyond
``Thresholds.operator`` the candidate is to blame, below its inverse the reference; few numbers
may spread wider (numerics.floor). Narrower questions see what a median cannot: one row's error
over the other side's there, one column's, and one slice's (a head's typical row).

Integers are codes: chosen indices may differ only where rounding explains it, that is where the
values chosen between are nearer to each other than the two sides' inputs are.

Another number in the call is a fact: the operator is flagged for it however little it changes,
and it is the onset if nothing before it is wrong. Other dims, flags or dtypes are told, and flag
nothing by themselves: the same job can be asked for in several ways.

A region of products and additions is held against an ideal product (operators.products): beyond
``Thresholds.operator_roundings`` the side that rounds so often is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from divergence.analyses.operators.errors import OperatorUnit
from divergence.analyses.operators.operands import argument_names
from divergence.comparison.calls.graph import Forward
from divergence.comparison.results import OperatorResult, OtherMask, Question, RegionResult
from divergence.facts import fact, sentence
from divergence.numerics.floor import Thresholds, rare_ratio
from divergence.numerics.operator import OperatorErrors, slices_of
from divergence.words import Side

__all__ = ["Size", "judge_unit", "region_result"]

_ENOUGH_ROWS = 16
_ENOUGH_COLUMNS = 16
_EXPONENTIAL = ("aten._softmax", "aten._log_softmax", "aten.exp")
"""d exp(s) = exp(s) ds: what was an absolute difference is a relative one, ‖s‖ times larger."""
_ADDITIVE = ("aten.add", "aten.sub", "aten.masked_fill", "aten.where")
"""What went in may cancel, or a mask take the large numbers out of a row: the relative difference
of what is left is larger, the absolute one is not."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a result without a truth: its largest row's norm, and its errors by forward."""

    largest: float
    errors: dict[Forward, OperatorErrors]


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


def judge_unit(
    result: OperatorResult,
    unit: OperatorUnit,
    feeds: Sequence[OperatorResult],
    sizes: dict[tuple[str, str], Size],
    thresholds: Thresholds,
    *,
    with_truth: bool,
    alone: bool,
) -> OperatorResult:
    """One unit held against every limit. ``sizes``: of each result so far, by site and phase;
    ``alone``: each operator on its own inputs."""
    pooled = _pool(unit)
    if pooled is not None:
        if len(pooled.floor):
            result = replace(
                result,
                difference=float(pooled.between.square().mean().sqrt()),
                floor=float(pooled.floor.median()),
            )
        if with_truth:
            result = _against_truth(result, pooled, thresholds, alone=alone)
        else:
            entering = {
                feed.site: sizes[key] for feed in feeds if (key := (feed.site, feed.phase)) in sizes
            }
            carried = max((feed.difference or 0.0 for feed in feeds), default=0.0)
            if unit.match.reference.name in _EXPONENTIAL:
                carried *= max([1.0, *(size.largest for size in entering.values())])
            elif unit.match.reference.name in _ADDITIVE:
                carried = max(carried, _added(unit, entering))
            result = _against_each_other(result, pooled, carried, thresholds)
            sizes[result.site, unit.phase] = _size(unit)
    result = _judge_masks(result, unit, with_truth=with_truth)
    result = _with_codes(result, unit, with_truth)
    result = _judge_roundings(result, unit, thresholds)
    return _judge_operands(result, unit)


def _size(unit: OperatorUnit) -> Size:
    by_forward = {at: errors for at, _, errors in unit.forwards if errors is not None}
    largest = max(
        float(forward.norm.max()) if len(forward.norm) else 0.0 for forward in by_forward.values()
    )
    return Size(largest, by_forward)


def _added(unit: OperatorUnit, entering: Mapping[str, Size]) -> float:
    """What the differences of all that goes into a sum make of its rows, relative to each: rms. Of
    what goes in as it was made, row by row: what lies between might order the rows otherwise. A row
    that has no difference there (it is 0, or masked) explains its own."""
    directly = [] if unit.region else [
        entering[path] for path in unit.match.reference.feeds if path in entering
    ]  # fmt: skip
    squares: list[torch.Tensor] = []
    for forward, _, errors in unit.forwards:
        if errors is None:
            continue
        total = torch.zeros(len(errors.rows), dtype=torch.float64)
        for feed in directly:
            goes_in = feed.errors.get(forward)
            if goes_in is not None and goes_in.shape == errors.shape:
                every = torch.full((math.prod(errors.shape),), math.nan, dtype=torch.float64)
                every[goes_in.rows] = goes_in.between * goes_in.norm
                total += every[errors.rows]
        squares.append(torch.where(total.isnan(), errors.between, total / errors.norm).square())
    rows = torch.cat(squares) if squares else torch.zeros(0)
    return float(rows.mean().sqrt()) if len(rows) else 0.0


def _pool(unit: OperatorUnit) -> _Pooled | None:
    measured = [errors for _, _, errors in unit.forwards if errors is not None]
    if not measured:
        return None
    reference, candidate, between, floor = (
        torch.cat([getattr(errors, name) for errors in measured])
        for name in ("reference", "candidate", "between", "floor")
    )
    finite = [errors for errors in measured if len(errors.reference)]  # the others have no columns
    widths = {len(errors.column_floor) for errors in finite}
    columns = None
    if len(widths) == 1 and len(reference) >= _ENOUGH_ROWS:
        base = sum(errors.column_floor for errors in finite)
        columns = tuple(
            (sum(getattr(errors, f"column_{side}") for errors in finite) + base).sqrt()
            for side in ("reference", "candidate")
        )
    weight = max(1, sum(len(errors.reference) for errors in measured))

    def median(rows: torch.Tensor) -> float:
        return float(rows.median()) if len(rows) else 0.0

    def num_nonfinite(side: int) -> int:
        return sum(errors.num_nonfinite[side] for errors in measured)

    def over_1_ulp(side: int) -> float:
        return sum(errors.over_1_ulp[side] * len(errors.reference) for errors in measured) / weight

    return _Pooled(
        reference=torch.hypot(reference, floor),
        candidate=torch.hypot(candidate, floor),
        between=between,
        floor=floor,
        raw=(median(reference), median(candidate)),
        columns=columns,
        wide=torch.cat([errors.counts for errors in measured]) >= _ENOUGH_COLUMNS,
        slices=slices_of(finite, least=_ENOUGH_ROWS),
        num_values=sum(len(e.reference) * len(e.column_floor) for e in finite),
        num_columns=min(widths, default=0),
        nonfinite=(num_nonfinite(0), num_nonfinite(1)),
        over_1_ulp=(over_1_ulp(0), over_1_ulp(1)),
    )


def _against_truth(
    result: OperatorResult, pooled: _Pooled, thresholds: Thresholds, *, alone: bool
) -> OperatorResult:
    result = replace(
        result,
        reference_error=pooled.raw[0],
        candidate_error=pooled.raw[1],
        ulp_share_reference=pooled.over_1_ulp[0],
        ulp_share_candidate=pooled.over_1_ulp[1],
    )
    if any(pooled.nonfinite):
        verdict = _side(pooled.nonfinite[1] > pooled.nonfinite[0])
        return replace(result, limit_usage=math.inf, why="nonfinite", verdict=verdict)
    if not len(pooled.floor):
        return result
    excess = _excess_of_largest if result.phase == "backward" else _excess
    wider = rare_ratio(pooled.num_values)
    a, b = (_typical(rows) for rows in (pooled.reference, pooled.candidate))
    w, peak = b / a, 1.0
    asked: list[tuple[float, Question, Side]] = []  # (share of the limit, why, side)
    asked.append((max(w, 1 / w) / (thresholds.operator * wider), "typical", _side(b > a)))
    if bool(pooled.wide.any()):  # the error of few numbers says little of a row
        rows = excess(pooled.reference[pooled.wide], pooled.candidate[pooled.wide])
        asked += [(rows[s] / (thresholds.operator_row * wider), "row", s) for s in rows]
        peak = max(rows.values())
    if pooled.columns is not None:
        columns = excess(*pooled.columns)
        limit = thresholds.operator_column * rare_ratio(len(pooled.floor))
        asked += [(columns[s] / limit, "column", s) for s in columns]
        peak = max(peak, *columns.values())
    for members in pooled.slices:
        ours, theirs = (_typical(side[members]) for side in (pooled.reference, pooled.candidate))
        times = max(ours / theirs, theirs / ours)
        limit = thresholds.operator_column * rare_ratio(len(members) * pooled.num_columns)
        asked.append((times / limit, "slice", _side(theirs > ours)))
        peak = max(peak, times)
    usage, why, side = max(asked)
    result = replace(
        result, w=w, peak=peak, limit_usage=usage, why=why, leans=side,
        verdict=side if usage > 1 else "fine",
    )  # fmt: skip
    far = thresholds.typical * wider * float(pooled.floor.median())
    if usage <= 1 and alone and min(a, b) > far:
        result = replace(result, verdict="both", why="typical", limit_usage=min(a, b) / far)
    return result


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


def _excess_of_largest(reference: torch.Tensor, candidate: torch.Tensor) -> dict[Side, float]:
    """Each side's largest error over the other's largest. Of a gradient a row's error may come of
    one number, a sum whose terms cancel (as in a norm's backward): then rows differ so much by
    chance that a row tells nothing beside the same row of the other side."""
    largest = float(reference.max()), float(candidate.max())
    return {"candidate": largest[1] / largest[0], "reference": largest[0] / largest[1]}


def _side(candidate: bool) -> Side:
    return "candidate" if candidate else "reference"


def _against_each_other(
    result: OperatorResult,
    pooled: _Pooled,
    carried: float,
    thresholds: Thresholds,
) -> OperatorResult:
    """Without a truth: by how much the relative difference grows over what correct code makes of
    what came in, ``carried``. No side is named."""
    if any(pooled.nonfinite):
        return replace(result, limit_usage=math.inf, why="nonfinite", verdict="differs")
    if result.floor is None or result.difference is None:  # no row is left
        return result
    base = math.hypot(math.sqrt(2) * result.floor, carried)
    limit = thresholds.operator_growth * rare_ratio(pooled.num_values)
    usage = result.difference / base / limit if base > 0 else 0.0
    if usage > 1:
        return replace(result, limit_usage=usage, verdict="differs", why="typical")
    return replace(result, limit_usage=usage, verdict="fine", why=None)


def _judge_masks(result: OperatorResult, unit: OperatorUnit, *, with_truth: bool) -> OperatorResult:
    """Scores that one side alone hides are another mask, whatever the others' errors are: a fact
    about what was computed."""
    masks = [errors.masked for _, _, errors in unit.forwards if errors and errors.masked]
    if not masks or result.why == "nonfinite":
        return result
    wrong = [sum(mask.wrong[side] for mask in masks) for side in (0, 1)]
    told = with_truth and wrong[0] != wrong[1]
    return replace(
        result, limit_usage=math.inf, why="masked",
        verdict=_side(wrong[1] > wrong[0]) if told else "differs",
        other_mask=OtherMask(
            num_by_reference=sum(mask.by[0] for mask in masks),
            num_by_candidate=sum(mask.by[1] for mask in masks),
            first=masks[0].first,
            of_tokens=unit.phase == "prefill" and not unit.padded and _is_square(result.shape),
        ),
    )  # fmt: skip


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[-1] == shape[-2]


def _with_codes(result: OperatorResult, unit: OperatorUnit, with_truth: bool) -> OperatorResult:
    if not unit.num_codes:
        return result
    other = unit.codes
    result = replace(result, codes=other.differing / unit.num_codes)
    if result.verdict == "unjudged":
        result = replace(result, verdict="fine")
    if other.unexplained == 0 or result.limit_usage > 1:
        return result
    verdict = "differs"
    if with_truth and other.wrong[0] != other.wrong[1]:
        verdict = _side(other.wrong[1] > other.wrong[0])
    return replace(result, limit_usage=math.inf, why="codes", verdict=verdict)


def _judge_operands(result: OperatorResult, unit: OperatorUnit) -> OperatorResult:
    """With ``other_operands``, and flagged for those that are numbers."""
    result = replace(result, other_operands=unit.other_operands)
    if result.why == "nonfinite" or not any(
        other_operand.is_value for other_operand in unit.other_operands
    ):
        return result
    verdict = result.verdict if result.verdict in ("candidate", "reference", "both") else "differs"
    return replace(
        result, measurable=result.limit_usage > 1, verdict=verdict, limit_usage=math.inf,
        why="operands",
    )  # fmt: skip


def _judge_roundings(
    result: OperatorResult, unit: OperatorUnit, thresholds: Thresholds
) -> OperatorResult:
    """A region is flagged for its own roundings, where nothing else flags it more."""
    if unit.own is None:
        return result
    limits = [thresholds.operator_roundings * rare_ratio(own.num_values) for own in unit.own]
    shares = [own.times / limit for own, limit in zip(unit.own, limits, strict=True)]
    if result.verdict == "unjudged":
        result = replace(result, verdict="fine")
    if max(shares) <= result.limit_usage:
        return result
    side: Side = "candidate" if shares[1] > shares[0] else "reference"
    result = replace(result, limit_usage=max(shares), leans=side)
    if max(shares) <= 1:
        return result
    return replace(result, why="roundings", verdict="both" if min(shares) > 1 else side)


def region_result(unit: OperatorUnit) -> RegionResult:
    """The region as it is reported."""
    region = unit.region
    assert region is not None
    consumer, argument = region.consumer, None
    if consumer is not None:
        names = argument_names(consumer.reference.call)
        argument = names.get(region.number, str(region.number))
    times = (None, None) if unit.own is None else tuple(own.times for own in unit.own)
    return RegionResult(
        replaced=region.replaced,
        reference=[node.path for node in region.reference],
        candidate=[node.path for node in region.candidate],
        inputs=list(dict.fromkeys(_input(name) for _, name in region.inputs)),
        consumer=None if consumer is None else consumer.reference.path,
        argument=argument,
        reference_times=times[0],
        candidate_times=times[1],
    )


def _input(name: str) -> str:
    return sentence(fact("operators.origin", name=name or None))

"""What is known of an operator beside its errors: other scalars, and how often a region rounds.

Another number in the call is a fact: the operator is flagged for it however little it changes,
and it is the onset if nothing before it is wrong. Other dims, flags or dtypes are told, and flag
nothing by themselves: the same job can be asked for in several ways.

A region of products and additions is held against an ideal product (operators.products): beyond
``Thresholds.operator_roundings`` the side that rounds so often is named.
"""

from __future__ import annotations

import math

from divergence.analyses.operators.errors import OperatorUnit
from divergence.analyses.operators.inputs import argument_names
from divergence.comparison.results.operators import OperatorResult, RegionResult
from divergence.numerics.rounding.chance import rare_ratio
from divergence.numerics.rounding.floor import Thresholds
from divergence.words import Side

__all__ = ["judge_operands", "judge_roundings", "region_result"]


def judge_operands(result: OperatorResult, unit: OperatorUnit) -> None:
    """Set ``other_operands``, and flag the result for those that are numbers."""
    result.other_operands = unit.other_operands
    if result.why == "nonfinite" or not any(one.is_value for one in unit.other_operands):
        return
    result.measurable = result.limit_usage > 1
    if result.verdict not in ("candidate", "reference", "both"):
        result.verdict = "differs"
    result.limit_usage, result.why = math.inf, "operands"


def judge_roundings(result: OperatorResult, unit: OperatorUnit, thresholds: Thresholds) -> None:
    """Flag a region for its own roundings, where nothing else flags it more."""
    if unit.own is None:
        return
    limits = [thresholds.operator_roundings * rare_ratio(own.num_values) for own in unit.own]
    shares = [own.times / limit for own, limit in zip(unit.own, limits, strict=True)]
    if result.verdict == "unjudged":
        result.verdict = "fine"
    if max(shares) <= result.limit_usage:
        return
    side: Side = "candidate" if shares[1] > shares[0] else "reference"
    result.limit_usage, result.leans = max(shares), side
    if max(shares) > 1:
        result.why = "roundings"
        result.verdict = "both" if min(shares) > 1 else side


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
        text=region.text,
        reference=[node.path for node in region.reference],
        candidate=[node.path for node in region.candidate],
        inputs=list(dict.fromkeys(name or "outside the block" for _, name in region.inputs)),
        consumer=None if consumer is None else consumer.reference.path,
        argument=argument,
        reference_times=times[0],
        candidate_times=times[1],
    )

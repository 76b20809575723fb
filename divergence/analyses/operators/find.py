"""Operators: which one makes the error, told to the decision with its evidence.

Beside the operator stands what the probes found of the arithmetic behind it: they looked at
operators and shapes of their own, so a fact counts where it is about the same operation in the same
dtype. It explains where the sides differ, and where all that was verified is equal, it is a reason
to look elsewhere than at the hardware.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from divergence.analyses.operators.measure import (
    have_two_dtypes,
    measure_operators,
    operator_notes,
    rate_operators,
)
from divergence.analyses.operators.operands import operand_facts
from divergence.comparison.advice import Advice
from divergence.comparison.align import anchored_passes
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.arithmetic import Explained, differences, explain_arithmetic, is_about
from divergence.comparison.constants import CLEAR_TIMES
from divergence.comparison.decide import check
from divergence.comparison.result import (
    Finding,
    Onset,
    OperatorResult,
    OperatorsResult,
    OtherInput,
    OtherMask,
    Verdict,
)
from divergence.facts import Fact, fact
from divergence.run.command import Command
from divergence.run.manifest import ArithmeticFact, Manifest
from divergence.words import SIDES, Side, other_side

_MOST = 3
_ESCALATED = "escalated"


def measure(measured: Measured) -> OperatorsResult | None:
    """The operators of the first pass in which one is off; else of the first that both recorded:
    the anchored one, then the escalated one, which in float32 sees a wrong formula far below the
    floor of a 16-bit dtype."""
    a, b, truth = measured.reference, measured.candidate, measured.truth
    truth = truth if truth is not None and truth.anchors else None
    first: OperatorsResult | None = None
    for passes in _passes(a.manifest, b.manifest):
        operators = measure_operators(
            a,
            b,
            passes,
            truth=None if truth is None else truth.run,
            rename=measured.rename,
            truth_pass="anchored" if truth is None else truth.anchored_pass,
        )
        if operators is None:
            continue
        result = rate_operators(
            operators,
            notes=a.manifest.plan.modules,
            thresholds=measured.thresholds,
            two_dtypes=have_two_dtypes(a.manifest, b.manifest),
        )
        if passes[1] == _ESCALATED:
            result = replace(result, pass_=_ESCALATED)
        if result.onset is not None:
            return result
        first = first or result
    return first


def _passes(a: Manifest, b: Manifest) -> list[tuple[str, str]]:
    """(the reference's, the candidate's), the anchored ones first."""
    if a.tokens.groups != b.tokens.groups:
        return []  # of other batches: other shapes, and rows of other prompts
    anchored = anchored_passes(a, b)
    passes = [] if anchored is None else [anchored]
    plans = (a.plan, b.plan)
    same = a.plan.anchored_to is not None and a.plan.anchored_to == b.plan.anchored_to
    if same and all(_ESCALATED in plan.passes for plan in plans):
        passes.append((_ESCALATED, _ESCALATED))
    return passes


def find(measured: Measured) -> AnalysisResult:
    """The first operator that is off while nothing that feeds it is; or that none is."""
    operators = measured.operators
    notes = operator_notes(measured.reference, measured.candidate, operators)
    if operators is None:
        return AnalysisResult(notes=notes)
    finding = finding_of(operators, measured.advice)
    return AnalysisResult(findings=[finding], parts={"operators": operators}, notes=notes)


def finding_of(operators: OperatorsResult, advice: Advice | None = None) -> Finding:
    """Say what operators show that were held against limits; ``advice``: to tell what is next."""
    first = onset_result(operators)
    if first is None:  # none is to blame: the verdict, where nothing else was compared
        usages = [r.limit_usage for r in operators.results if r.verdict != "unjudged"]
        none_beyond = fact(
            "operators.none_beyond",
            num_operators=len(usages),
            largest_limit_usage=max(usages, default=0.0),
        )
        equal = operators.results and all(r.identical for r in operators.results)
        headline = fact("operators.all_near", judged=operators.judged)
        if equal:
            headline = fact("operators.all_equal", num_matched=operators.num_matched)
        lone = len(operators.unmatched) + len(operators.remarks)
        return Finding(
            claim="operators_fine",
            kind="identical" if equal else "within_floor",
            headline=[headline],
            side="neither" if operators.judged == "truth" else None,
            rests_on=[check("coverage", not lone, fact("operators.not_all"))],
            evidence=[none_beyond],
            beside=[none_beyond],
        )
    side, is_called = operators.side, first.why == "operands"
    by = side if side in SIDES and not is_called else None
    if is_called:  # that operands differ is read, not measured; what it does is measured
        rests_on = [check("shows", first.measurable, fact("operators.shows_nothing"))]
    else:
        by_truth, margin = operators.judged != "difference", first.limit_usage
        rests_on = [
            check("told_by_truth", by_truth, fact("operators.no_truth")),
            check("clear", margin > CLEAR_TIMES, fact("not_clear", margin=margin)),
        ]
    return Finding(
        claim="operator_off",
        role="refines",
        kind="nonfinite" if first.why == "nonfinite" else "localized",
        headline=[
            _what_happens(first, seems=rests_on[0].state == "failed"),
            fact("by", by=by, both=side == "both" and not is_called),
        ],
        onset=Onset(
            site=f"{first.site}:out",
            block=first.block,
            sample=first.sample,
            step=first.step,
            position=None,
            pass_=operators.pass_,
        ),
        equal_inputs=True,
        side=side,
        rests_on=rests_on,
        evidence=operator_evidence(first, operators),
        beside=[fact("operators.beside_blocks")],
        commands=[] if advice is None else _next(first, side, advice),
    )


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Return what was probed of the arithmetic that the operator at the onset stands on."""
    operators = measured.operators
    if operators is None or operators.onset is None:
        return []
    first = next((r for r in operators.results if r.site == operators.onset), None)
    if first is None:
        return []
    explained = explain_arithmetic(measured.reference.manifest, measured.candidate.manifest)
    evidence = behind_operator(first, explained)
    return [Finding(claim="explanation", role="explains", about_onset=True, evidence=evidence)]


def _next(first: OperatorResult, side: str | None, advice: Advice) -> list[Command]:
    """The operator by itself; where it was given something else, that."""
    if first.fed_by:
        return advice.operator_input(f"{first.fed_by[-1]}:out", first.fed_by_side)
    if first.region is not None or first.other_operands:  # no operator is wrong by itself
        return [
            *advice.operator_input(f"{first.site}:out", "reference"),
            *advice.operator_input(f"{first.candidate_site}:out", "candidate"),
        ]
    return advice.operator(first.site, first.candidate_site, side)


def _what_happens(first: OperatorResult, *, seems: bool) -> Fact:
    site, region = first.site, first.region
    if first.other_operands:
        called = first.other_operands[0].site or site
        operands = operand_facts(first.other_operands)
        return fact("operators.called_with", site=called, operands=operands)
    if first.other_mask is not None:
        return fact("operators.other_mask", site=site, mask=_mask(first.other_mask))
    if region is not None and first.why == "roundings":
        ratio = max(region.reference_times or 0.0, region.candidate_times or 0.0)
        return fact("operators.rounded_too_often", site=site, region=region.replaced, ratio=ratio)
    if region is None and first.fed_by:
        makers, side = first.fed_by[:_MOST], first.fed_by_side
        return fact("operators.comes_from_lone", site=site, side=side, makers=makers)
    if region is None and first.other_inputs:
        item = first.other_inputs[0]
        return fact("operators.comes_in", site=site, argument=item.argument, how=_how(item))
    argument = None if region is None else region.argument
    return fact(
        "operators.made_at",
        seems=seems,
        site=site,
        argument=argument,
        consumer=None if region is None or argument is None else region.consumer,
        region=None if region is None else region.replaced,
    )


def _mask(mask: OtherMask) -> Fact:
    """The first score that one side alone hides, of whichever side shows more."""
    hides: Side = "candidate" if mask.num_by_candidate > mask.num_by_reference else "reference"
    query, key = mask.first[-2:] if len(mask.first) > 1 else (0, mask.first[-1])
    return fact(
        "operators.mask",
        shows=other_side(hides),
        hides=hides,
        of_tokens=mask.of_tokens,
        query=query,
        key=key,
    )


def _how(item: OtherInput) -> Fact:
    if item.viewed:
        return fact("operators.viewed")
    if item.origin_in_reference == item.origin_in_candidate and item.difference is not None:
        return fact("operators.input_differs", difference=item.difference)
    return fact("operators.other_origin")


def onset_result(operators: OperatorsResult) -> OperatorResult | None:
    """The result that the onset names, of the first phase in which it is beyond its limit."""
    at_onset = [r for r in operators.results if r.site == operators.onset]
    beyond = [r for r in at_onset if r.limit_usage > 1]
    if beyond:
        return min(beyond, key=lambda r: r.phase == "decode")
    return max(at_onset, key=lambda r: r.limit_usage, default=None)


def operator_evidence(first: OperatorResult, operators: OperatorsResult) -> list[Fact]:
    values = {
        key: value
        for key in ("w", "reference_error", "candidate_error", "floor", "difference", "codes")
        if (value := getattr(first, key)) is not None
    }
    called = None
    if first.source or first.backward_of:
        called = fact("operators.called_at", source=first.source, backward_of=first.backward_of)
    evidence = [
        fact(
            "operators.why",
            site=first.site,
            phase=first.phase,
            reason=_reason(first),
            **values,
            called_at=called,
        )
    ]
    evidence += [
        fact(
            "operators.other_operand",
            argument=item.argument,
            kind=item.kind,
            reference=item.reference_value,
            candidate=item.candidate_value,
            difference=item.difference,
            share=item.difference if item.difference != math.inf else None,
        )
        for item in first.other_operands
    ]
    if first.other_operands and first.why == "operands" and not first.measurable:
        evidence.append(fact("operators.change_within_rounding"))
    if first.other_operands and first.verdict in SIDES:
        evidence.append(fact("operators.meaning_not_known"))
    region = first.region
    if region is not None:
        inputs = region.inputs[:_MOST]
        evidence.append(fact("operators.as_one_step", inputs=inputs, region=region.replaced))
        times_a, times_b = region.reference_times, region.candidate_times
        if times_a is not None and times_b is not None:
            own = fact("operators.own_errors", candidate_times=times_b, reference_times=times_a)
            evidence.append(own)
    dtypes = first.reference_dtype, first.candidate_dtype
    if dtypes[0] != dtypes[1]:
        evidence.append(fact("operators.other_dtype", reference=dtypes[0], candidate=dtypes[1]))
    # what feeds it is the question then
    given = first.fed_by or first.other_inputs or first.other_operands or first.other_mask
    entering = first.w_entering if operators.frame == "block" and not given else None
    if entering is not None and first.why != "codes":
        evidence.append(fact("operators.fed_well", w_entering=entering))
    evidence += [
        fact(
            "operators.other_input",
            argument=item.argument,
            how=_how(item),
            reference=item.origin_in_reference,
            candidate=item.origin_in_candidate,
            difference=item.difference,
        )
        for item in first.other_inputs
    ]
    if operators.frame == "operator":
        evidence.append(fact("operators.same_inputs"))
    calls = [
        fact("operators.lone_call", site=u.site, source=u.source)
        for u in operators.unmatched
        if u.site in first.fed_by
    ]
    if calls:
        side = other_side(first.fed_by_side)
        evidence.append(fact("operators.lone_feeds", side=side, calls=calls[:_MOST]))
    causal = operators.causal
    if causal is not None:
        evidence.append(
            fact(
                "operators.cause",
                holds=causal.holds,
                before=causal.before,
                after=causal.largest_limit_usage,
                still=causal.still[:_MOST],
            )
        )
    return evidence


def _reason(first: OperatorResult) -> Fact:
    region, mask = first.region, first.other_mask
    if first.why == "operands":
        unclear = first.w is None or not first.measurable or first.verdict == "differs"
        operands = operand_facts(first.other_operands)
        farther = None if unclear else _farther(first)
        return fact("operators.called", operands=operands, farther=farther)
    if first.why == "roundings":
        assert region is not None
        times = {"reference": region.reference_times, "candidate": region.candidate_times}
        side = "reference" if (times["reference"] or 0) > (times["candidate"] or 0) else "candidate"
        return fact(
            "operators.rounded_on_the_way",
            region=region.replaced,
            side=side,
            ratio=times[side],
            dtype=first.candidate_dtype,
        )
    if mask is not None:
        return fact(
            "operators.mask_counts",
            mask=_mask(mask),
            num_by_reference=mask.num_by_reference,
            num_by_candidate=mask.num_by_candidate,
        )
    if first.why == "codes":
        return fact("operators.integers_differ", codes=first.codes)
    if first.why == "nonfinite":
        return fact("operators.nonfinite", side=first.verdict)
    if first.verdict == "both":
        return fact(
            "operators.both_far",
            reference_error=first.reference_error,
            candidate_error=first.candidate_error,
            floor=first.floor,
        )
    if first.w is None:
        return fact("operators.differ", difference=first.difference)
    return _farther(first)


def _farther(first: OperatorResult) -> Fact:
    """Return who is farther from the truth, and by how much."""
    assert first.w is not None
    side = first.verdict if first.verdict in SIDES else SIDES[first.w >= 1]
    other = other_side(side)
    errors = {"reference": first.reference_error, "candidate": first.candidate_error}
    peak = first.why in ("row", "column", "slice")
    return fact(
        "operators.farther",
        side=side,
        other=other,
        why=first.why,
        ratio=first.peak if peak else max(first.w, 1 / first.w),
        own=errors[side],
        other_error=errors[other],
        floor=first.floor,
    )


def behind_operator(first: OperatorResult, explained: Explained) -> list[Fact]:
    """Say what the arithmetic says of the operator at the onset; nothing where none was probed."""
    dtypes = {first.reference_dtype, first.candidate_dtype}
    behind: dict[str, Any] = {"operator": first.operator, "dtypes": sorted(dtypes)}

    def about(item: ArithmeticFact) -> bool:
        return is_about(item, first.operator, dtypes)

    differing = [pair for pair in explained.differing if about(pair[0])]
    probes = list(dict.fromkeys(item.probe for item in explained.equal if about(item)))
    if differing:
        return [
            fact("operators.arithmetic_behind", **behind, what=item)
            for item in differences(differing, explained)[:_MOST]
        ]
    return [fact("operators.arithmetic_same", **behind, probes=probes)] if probes else []

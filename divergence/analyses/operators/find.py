"""Operators: which one makes the error, told to the decision with its evidence.

Beside the operator stands what the probes found of the arithmetic behind it: they looked at
operators and shapes of their own, so a fact counts where it is about the same operation in the same
dtype. It explains where the sides differ, and where all that was verified is equal, it is a reason
to look elsewhere than at the hardware.
"""

from __future__ import annotations

import math

from divergence.analyses.operators.measure import operator_notes
from divergence.analyses.operators.operands import operands_text
from divergence.comparison.advice import Advice
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.arithmetic import Explained, explain_arithmetic, is_about, sentences
from divergence.comparison.results.findings import Check, Finding, Onset, Verdict
from divergence.comparison.results.operators import (
    CausalCheck,
    OperatorResult,
    OperatorsResult,
    OtherInput,
    OtherMask,
)
from divergence.facts import Fact, fact, plain
from divergence.run.command import Command
from divergence.run.schema.provenance import ArithmeticFact
from divergence.words import figure, letter

__all__ = ["behind_operator", "explain", "find", "finding_of", "onset_result", "operator_evidence"]

_BESIDE = "the blocks' own outputs are within the floor: seen in the operator alone"
_WHERE = {"row": " in one row", "column": " in one column", "slice": " in one slice"}


def find(measured: Measured) -> AnalysisResult:
    """The first operator that is off while nothing that feeds it is; or that none is."""
    operators = measured.operators
    notes = operator_notes(measured.reference, measured.candidate, operators)
    if operators is None:
        return AnalysisResult(notes=notes)
    finding = finding_of(operators, measured.advice)
    return AnalysisResult(findings=[finding], parts={"operators": operators}, notes=notes)


def finding_of(operators: OperatorsResult, advice: Advice | None = None) -> Finding:
    """What operators that were held against their limits show; ``advice``: to tell what is next."""
    first = onset_result(operators)
    return _fine(operators) if first is None else _off(first, operators, advice)


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """What was probed of the arithmetic that the operator at the onset stands on."""
    operators = measured.operators
    if operators is None or operators.onset is None:
        return []
    first = next((r for r in operators.results if r.site == operators.onset), None)
    if first is None:
        return []
    explained = explain_arithmetic(measured.reference.manifest, measured.candidate.manifest)
    evidence = behind_operator(first, explained)
    return [Finding(claim="explanation", role="explains", about_onset=True, evidence=evidence)]


def _off(first: OperatorResult, operators: OperatorsResult, advice: Advice | None) -> Finding:
    site = f"{first.site}:out"
    side = operators.side
    by = side if side in ("reference", "candidate") else None
    if first.why == "operands":
        by = None
    rests_on = _checks(first, operators)
    seems = "seems to be made at" if rests_on[0].state == "failed" else "is made at"
    return Finding(
        claim="operator_off",
        role="refines",
        kind="nonfinite" if first.why == "nonfinite" else "localized",
        headline=[plain(_what_happens(first, seems)), fact("by", by=by, both=side == "both" and first.why != "operands")],
        onset=Onset(
            site=site, block=first.block, sample=first.sample, step=first.step, position=None,
            pass_=operators.pass_,
        ),
        equal_inputs=True,
        side=side,
        rests_on=rests_on,
        evidence=operator_evidence(first, operators),
        beside=[plain(_BESIDE)],
        commands=[] if advice is None else _next(first, side, advice),
    )  # fmt: skip


def _checks(first: OperatorResult, operators: OperatorsResult) -> list[Check]:
    """That operands differ is read, not measured; what it does is measured."""
    if first.why == "operands":
        return [check("shows", first.measurable, "what it changes here is within rounding")]
    by_truth = operators.judged != "difference"
    return [
        check("told_by_truth", by_truth, "no truth: judged by the two sides' difference"),
        check(
            "clear", first.limit_usage > 2,
            f"{first.limit_usage:.1f} × its limit; above 2 × it would be high",
        ),
    ]  # fmt: skip


def _fine(operators: OperatorsResult) -> Finding:
    """None is to blame. The verdict, where nothing else was compared."""
    judged = [r for r in operators.results if r.verdict != "unjudged"]
    largest = max((r.limit_usage for r in judged), default=0.0)
    said = plain(
        f"none of {len(judged)} operators is beyond its limit; the largest uses "
        f"{largest:.0%} of it",
        num_operators=len(judged),
        largest_limit_usage=largest,
    )
    equal = operators.results and all(r.identical for r in operators.results)
    lone = len(operators.unmatched) + len(operators.notes)
    near = "the truth" if operators.judged == "truth" else "the other side"
    return Finding(
        claim="operators_fine",
        kind="identical" if equal else "within_floor",
        headline=[
            plain(
                f"all {operators.num_matched} operators are equal bit for bit"
                if equal
                else f"every operator is as near to {near} as rounding allows"
            )
        ],
        side="neither" if operators.judged == "truth" else None,
        rests_on=[check("coverage", not lone, "some operators had no partner, or are not judged")],
        evidence=[said],
        beside=[said],
    )


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


def _what_happens(first: OperatorResult, seems: str) -> str:
    if first.other_operands:
        called = first.other_operands[0].site or first.site
        return f"{called} is called with {operands_text(first.other_operands)}"
    if first.other_mask is not None:
        return f"the sides hide other scores at {first.site}: {_mask_text(first.other_mask)}"
    if first.region is not None:
        region = first.region
        if first.why == "roundings":
            times = max(region.reference_times or 0.0, region.candidate_times or 0.0)
            return (
                f"sums are rounded too often at {first.site}: {region.text}, {times:.2g} × the "
                "error of an ideal product"
            )
        if region.argument is None:
            return f"the error {seems} {first.site}: {region.text}"
        where = f"{first.site}, which {region.consumer} is given as {region.argument}"
        return f"the error {seems} {where}: {region.text}"
    if first.fed_by:
        names = ", ".join(first.fed_by[:3])
        return (
            f"the error comes into {first.site} from operators that only "
            f"{letter(first.fed_by_side)} calls: {names}"
        )
    for item in first.other_inputs:
        return f"the error comes into {first.site}: its input {item.argument} {_how(item)}"
    return f"the error {seems} {first.site}"


def _mask_text(mask: OtherMask) -> str:
    """``in B token 4 sees token 0, which A hides``: the first, of whichever side shows more."""
    shows, hides = "B", "A"
    if mask.num_by_candidate > mask.num_by_reference:
        shows, hides = "A", "B"
    query, key = mask.first[-2:] if len(mask.first) > 1 else (0, mask.first[-1])
    pair = f"token {query} sees token {key}" if mask.of_tokens else f"query {query} sees key {key}"
    return f"in {shows} {pair}, which {hides} hides"


def _how(item: OtherInput) -> str:
    if item.viewed:
        return "is looked at differently"
    if item.reference == item.candidate and item.difference is not None:
        return f"differs by {item.difference:.2g}"
    return "comes from elsewhere"


def onset_result(operators: OperatorsResult) -> OperatorResult | None:
    """The result that the onset names, of the first phase in which it is beyond its limit."""
    at_onset = [r for r in operators.results if r.site == operators.onset]
    beyond = [r for r in at_onset if r.limit_usage > 1]
    if beyond:
        return min(beyond, key=lambda r: r.phase == "decode")
    return max(at_onset, key=lambda r: r.limit_usage, default=None)


def operator_evidence(first: OperatorResult, operators: OperatorsResult) -> list[Fact]:
    """Why this operator."""
    called = f" ({first.called_at})" if first.called_at else ""
    name = f"{first.site}{called}, {first.phase}"
    values = {
        key: value
        for key in ("w", "reference_error", "candidate_error", "floor", "difference", "codes")
        if (value := getattr(first, key)) is not None
    }
    evidence = [
        plain(f"{name}: {_reason(first)}", **values),
        *_operand_evidence(first),
        *_region_evidence(first),
    ]
    texts: list[str] = []
    if first.reference_dtype != first.candidate_dtype:
        texts.append(f"its result is {first.reference_dtype} in A and {first.candidate_dtype} in B")
    # what feeds it is the question then
    given = first.fed_by or first.other_inputs or first.other_operands or first.other_mask
    told = operators.frame == "block" and not given
    if told and first.w_entering is not None and first.why != "codes":
        texts.append(f"what feeds it is fine: W at most {figure(first.w_entering)} there")
    for item in first.other_inputs:
        differ = "" if item.difference is None else f" (they differ by {item.difference:.2g})"
        texts.append(
            f"its input {item.argument} {_how(item)}: {item.reference} in A, "
            f"{item.candidate} in B{differ}"
        )
    if operators.frame == "operator":
        texts.append("both sides had the same inputs, bit for bit")
    before = [u for u in operators.unmatched if u.site in first.fed_by]
    if before:
        names = ", ".join(f"{u.site} ({u.source})" if u.source else u.site for u in before[:3])
        other = "reference" if first.fed_by_side == "candidate" else "candidate"
        texts.append(f"what feeds it has no partner in {letter(other)}: {names}")
    evidence += [plain(text) for text in texts]
    if operators.causal is not None:
        evidence.append(_causal_evidence(operators.causal))
    return evidence


def _causal_evidence(check: CausalCheck) -> Fact:
    rest = f"the rest is not fine yet: {', '.join(check.still[:3])}"
    if check.holds:
        shares = f"{check.before:.2g} → {check.largest_limit_usage:.2g}"
        rest = f"everything after it is fine (largest share of a limit {shares})"
    return plain(
        f"with A's result put in its place, {rest}",
        before=check.before,
        after=check.largest_limit_usage,
    )


def _operand_evidence(first: OperatorResult) -> list[Fact]:
    evidence: list[Fact] = []
    if not first.other_operands:
        return evidence
    for item in first.other_operands:
        values = {} if item.difference is None else {"difference": item.difference}
        where = "made outside the recorded modules" if item.kind == "constant" else "in the call"
        by = f", {item.difference:.2%} off" if item.difference not in (None, math.inf) else ""
        evidence.append(
            plain(
                f"{item.argument}, {where}: {item.reference} in A, {item.candidate} in B{by}",
                **values,
            )
        )
    if first.why == "operands" and not first.measurable:
        text = "what that changes here is within rounding: the number differs for sure"
        evidence.append(plain(text))
    if first.verdict in ("candidate", "reference"):
        text = "the truth is of A's code: it cannot tell which value is meant"
        evidence.append(plain(text))
    return evidence


def _region_evidence(first: OperatorResult) -> list[Fact]:
    region = first.region
    if region is None:
        return []
    begin = f", from {', '.join(region.inputs[:3])}" if region.inputs else ""
    evidence = [plain(f"compared as one step{begin}: {region.text}")]
    if region.candidate_times is not None and region.reference_times is not None:
        evidence.append(
            plain(
                "by themselves, computed again in float64 from each side's own inputs, they "
                f"add {region.candidate_times:.3g} × what an ideal product does (it rounds once), "
                f"A's {region.reference_times:.3g} ×",
                candidate_times=region.candidate_times,
                reference_times=region.reference_times,
            )
        )
    return evidence


def _reason(first: OperatorResult) -> str:
    if first.why == "operands":
        text = f"called with {operands_text(first.other_operands)}"
        if first.w is None or not first.measurable or first.verdict == "differs":
            return text
        return f"{text}; {_farther(first)}"
    if first.why == "roundings":
        assert first.region is not None
        times = {"reference": first.region.reference_times,
                 "candidate": first.region.candidate_times}  # fmt: skip
        mine = "reference" if (times["reference"] or 0) > (times["candidate"] or 0) else "candidate"
        return (
            f"{first.region.text}: what {letter(mine)} adds there is {times[mine]:.3g} × the error "
            f"of an ideal product, so sums are rounded to {first.candidate_dtype} on the way"
        )
    if first.other_mask is not None:
        mask = first.other_mask
        return (
            f"{_mask_text(mask)}; hidden by A alone: {mask.num_by_reference:,}, by B alone: "
            f"{mask.num_by_candidate:,}"
        )
    if first.why == "codes":
        return (
            f"{first.codes:.2%} of its integers differ, and rounding of its inputs does not "
            "explain it (exact ties, or values too far apart)"
        )
    if first.why == "nonfinite":
        return f"{letter(first.verdict)} has nan or inf where the other side has none"
    if first.verdict == "both":
        return (
            f"both are far from the truth: {first.reference_error:.2e} and "
            f"{first.candidate_error:.2e}, ideal {first.floor:.2e}"
        )
    if first.w is None:
        return f"the sides differ by {first.difference:.2e}, more than what came in explains"
    return _farther(first)


def _farther(first: OperatorResult) -> str:
    """Who is farther from the truth, and by how much."""
    assert first.w is not None
    mine, other = ("candidate", "reference") if first.w >= 1 else ("reference", "candidate")
    if first.verdict in ("reference", "candidate"):
        mine = first.verdict
        other = "reference" if mine == "candidate" else "candidate"
    where = _WHERE.get(first.why or "", "")
    times = first.peak if where else max(first.w, 1 / first.w)
    errors = {"reference": first.reference_error, "candidate": first.candidate_error}
    assert times is not None  # where a peak is the reason, it was measured
    shown = f"{times:.3g}" if math.isfinite(times) else "infinitely"
    return (
        f"{letter(mine)}'s error is {shown} × {letter(other)}'s{where}; typically off by "
        f"{errors[mine]:.2e} and {errors[other]:.2e}, ideal {first.floor:.2e}"
    )


_MOST = 3


def behind_operator(first: OperatorResult, explained: Explained) -> list[Fact]:
    """What the arithmetic says of the operator at the onset; nothing where nothing was probed."""
    dtypes = {first.reference_dtype, first.candidate_dtype}

    def about(fact: ArithmeticFact) -> bool:
        return is_about(fact, first.operator, dtypes)

    differ = [pair for pair in explained.differing if about(pair[0])]
    same = [fact for fact in explained.equal if about(fact)]
    name = f"{first.operator} in {' and '.join(sorted(dtypes))}"
    if differ:
        return [
            plain(f"arithmetic behind {name}: {item.text}", **item.values)
            for item in sentences(differ, explained)[:_MOST]
        ]
    if not same:
        return []
    probes = ", ".join(dict.fromkeys(fact.probe for fact in same))
    return [
        plain(
            f"what was probed behind {name} is the same on both sides ({probes}): look at "
            "software and data first"
        )
    ]

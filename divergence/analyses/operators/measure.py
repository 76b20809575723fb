"""Operators measured and judged: which are beyond their limit, and where each error comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from divergence.analyses.operators.limits import (
    MeasuredOperators,
    OperatorUnit,
    Size,
    judge_unit,
    measure_operators,
    region_result,
)
from divergence.analyses.operators.regions import counted
from divergence.comparison.align.pairs import anchored_passes
from divergence.comparison.analysis import Measured
from divergence.comparison.calls import CallNode
from divergence.comparison.measure.judge import work_dtype
from divergence.comparison.measure.truth import Truth
from divergence.comparison.results import (
    OperatorResult,
    OperatorsResult,
    OtherInput,
    UnmatchedOperator,
)
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.run.manifest import Manifest, ModuleNote
from divergence.run.reader import Run
from divergence.run.site import module_of, phase_of
from divergence.words import Side

# Which operator, and whose: from measured operators to the first one that is to blame.
#
# Within a block errors are inherited: what feeds a wrong operator's result into others makes
# those look wrong too. So an operator is a *source* only if nothing that feeds it is beyond its
# limit (coremltools calls it the failure source), and where something that feeds it is already
# near it on the same side, and the step from it is less than a limit, the onset is moved back to
# that: what doubles an error (a square, a mean) does not make it.
#
# Rounding to whole numbers, as quantisers do, turns a difference of rounding into a whole step
# where a number lies on a tie. So what it gives is not judged by its size, nor is what that alone
# makes large: codes are judged as codes (analyses/codes).

_SIDES: tuple[Side, Side] = ("reference", "candidate")
_STEPS = ("aten.round", "aten.floor", "aten.ceil", "aten.trunc")


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
    sizes: dict[tuple[str, str], Size] = {}
    steps: set[tuple[str, str]] = set()  # of whole numbers, by path and phase
    untold: dict[tuple[str, str], None] = {}  # what pads may have made, by path and phase
    for unit in measured.units:
        result = _result(unit, notes, blocks)
        feeds = [by_path[key] for key in _keys(unit.feeds, unit.phase) if key in by_path]
        result = judge_unit(
            result, unit, feeds, sizes, thresholds,
            with_truth=measured.with_truth, alone=measured.frame == "operator",
        )  # fmt: skip
        if two_dtypes:  # casts are to other dtypes by right
            numbers = [operand for operand in result.other_operands if operand.is_value]
            result = replace(result, other_operands=numbers)
        if two_dtypes and result.why != "nonfinite":
            result = replace(result, limit_usage=0.0, why=None, verdict="unjudged")
        if (
            unit.region is None  # what one side computes besides is no tie
            and result.why != "nonfinite"
            and result.limit_usage > 1
            and (any(key in steps for key in _keys(unit.feeds, unit.phase)) or _is_step(result))
        ):
            result = replace(result, limit_usage=0.0, why=None, verdict="unjudged")
            steps.add((result.site, unit.phase))
        if unit.untold or _inherits(unit, result, untold):
            result = replace(result, limit_usage=0.0, why=None, verdict="unjudged")
            untold[result.site, unit.phase] = None
        if feeds and measured.frame == "block":
            entering = [abs(math.log(feed.w)) for feed in feeds if feed.w]
            result = replace(result, w_entering=math.exp(max(entering)) if entering else None)
        ends: tuple[tuple[Side, CallNode], ...] = (
            ("candidate", unit.match.candidate),
            ("reference", unit.match.reference),
        )
        for side, node in ends:
            if not result.fed_by and result.region is None:
                alone = extra[side]
                if unit.region is not None:  # its copies are members
                    alone = {other.path: other for other in measured.lone[side]}
                fed_by = _only_there(node, alone)
                result = replace(result, fed_by=fed_by, fed_by_side=side if fed_by else None)
        result = replace(result, other_inputs=_telling(unit, result, feeds, thresholds))
        results.append(result)
        by_path[result.site, unit.phase] = result
    way = first_source(measured, by_path, thresholds)
    verdict = way[0].verdict if way else None
    moved = {id(result) for result in way[1:]}
    results = [replace(row, verdict=verdict) if id(row) in moved else row for row in results]
    return OperatorsResult(
        frame="operator" if measured.frame == "operator" else "block",
        judged="truth" if measured.with_truth else "difference",
        num_matched=len(results),
        num_value_matches=sum(result.match == "value" for result in results),
        onset=way[-1].site if way else None,
        side=verdict if verdict in ("reference", "candidate", "both") else None,
        results=results,
        unmatched=[
            UnmatchedOperator(
                side=side, site=node.path, operator=node.call.operator, source=node.call.source
            )
            for side in _SIDES
            for node in extra[side].values()
        ],
        remarks=_remarks(measured, untold),
    )


def _keys(paths: Iterable[str], phase: str) -> list[tuple[str, str]]:
    """Calls of the same forward, with their phases: a backward is fed by its forward too."""
    return [(path, phase_of(path, int(phase == "decode"))) for path in paths]


def _is_step(result: OperatorResult) -> bool:
    """The same rounding to whole numbers on both sides."""
    names = {name.rpartition(".")[0] if name.count(".") > 1 else name
             for name in (result.operator, result.candidate_operator)}  # fmt: skip
    return len(names) == 1 and names <= set(_STEPS)


def _inherits(
    unit: OperatorUnit, result: OperatorResult, untold: dict[tuple[str, str], None]
) -> bool:
    """Beyond its limit, or not judged, and fed by what pads may have made: is it that?"""
    fed = any(key in untold for key in _keys(unit.feeds, unit.phase))
    return fed and (result.verdict == "unjudged" or result.limit_usage > 1)


def _remarks(measured: MeasuredOperators, untold: dict[tuple[str, str], None]) -> list[Fact]:
    """What was not compared or judged, and why: calls without a partner that lead to nothing that
    both sides have, results that may hold the batch's pads, and what is behind other experts."""
    remarks = []
    sides = [
        fact("operators.unreached", calls=counted(nodes), side=side,
             paths=[node.path for node in nodes[:2]], more=len(nodes) > 2)
        for side, nodes in measured.unreached.items()
        if nodes
    ]  # fmt: skip
    if len(sides) > 1:  # what one side computes besides has nothing to be compared with
        remarks.append(fact("operators.nothing_common", sides=sides))
    paths = list(dict.fromkeys(path for path, _ in untold))
    if paths:
        remarks.append(fact("operators.pads", num=len(paths), paths=paths[:2], more=len(paths) > 2))
    samples = measured.rerouted
    if samples:
        remarks.append(fact("operators.rerouted", num=len(samples), samples=samples))
    return remarks


def _telling(
    unit: OperatorUnit, result: OperatorResult, feeds: list[OperatorResult], thresholds: Thresholds
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


def _only_there(node: CallNode, extra: dict[str, CallNode]) -> list[str]:
    """Calls without a partner that feed ``node``, also through one another, in order."""
    first_calls: dict[str, CallNode] = {}
    waiting = [path for path in node.feeds if path in extra]
    while waiting:
        path = waiting.pop()
        if path not in first_calls:
            first_calls[path] = extra[path]
            waiting += [feed for feed in extra[path].feeds if feed in extra]
    return sorted(first_calls, key=lambda path: first_calls[path].order)


def _result(unit: OperatorUnit, notes: dict[str, ModuleNote], blocks: list[str]) -> OperatorResult:
    (sample, step), match, _ = unit.forwards[0]
    reference, candidate = match.reference, match.candidate
    module = module_of(f"{reference.path}:out")
    note = notes.get(module)
    inside = [b for b in blocks if module == b or module.startswith(b + ".")]
    return OperatorResult(
        site=reference.path,
        candidate_site=candidate.path,
        match=match.method,
        operator=reference.call.operator,
        candidate_operator=candidate.call.operator,
        kind=note.kind if note else None,
        block=max(inside, key=len) if inside else None,
        source=reference.call.source,
        backward_of=reference.call.backward_of,
        phase=unit.phase,
        order=reference.order,
        sample=sample,
        step=step,
        shape=reference.results[0].shape,
        reference_dtype=reference.results[0].dtype,
        candidate_dtype=candidate.results[0].dtype,
        identical=unit.num_equal == len(unit.forwards),
        region=None if unit.region is None or unit.region.is_copied else region_result(unit),
    )


_NEAR = 0.55  # of the limit: as far as healthy operators go


def first_source(
    measured: MeasuredOperators,
    by_path: dict[tuple[str, str], OperatorResult],
    thresholds: Thresholds,
) -> list[OperatorResult]:
    """From the first source in execution order back to where its error was made, which is last;
    the prefill comes before the decode steps. Empty where nothing is beyond its limit."""
    entering = {(unit.match.reference.path, unit.phase): unit.feeds for unit in measured.units}

    def feeds(result: OperatorResult) -> list[OperatorResult]:
        """Those that are judged: what feeds an unjudged one (a copy that the truth's layout does
        not need) feeds what that feeds."""
        judged: list[OperatorResult] = []
        waiting, seen = [result], {id(result)}
        while waiting:
            current = waiting.pop()
            keys = _keys(entering[current.site, current.phase], current.phase)
            known = [by_path[key] for key in keys if key in by_path]
            known = [feed for feed in known if id(feed) not in seen]
            seen.update(id(feed) for feed in known)
            judged += [feed for feed in known if feed.verdict != "unjudged"]
            waiting += [feed for feed in known if feed.verdict == "unjudged"]
        return judged

    flagged = [r for r in by_path.values() if r.limit_usage > 1 and r.verdict != "unjudged"]
    if measured.frame == "operator":
        return flagged[:1]
    sources = [r for r in flagged if not any(feed.limit_usage > 1 for feed in feeds(r))]
    if not sources:
        return flagged[:1]
    onset = min(sources, key=lambda r: (r.phase == "decode", r.order))
    return _moved_back(onset, feeds, thresholds) if measured.with_truth else [onset]


def _moved_back(
    onset: OperatorResult,
    feeds: Callable[[OperatorResult], list[OperatorResult]],
    thresholds: Thresholds,
) -> list[OperatorResult]:
    """On to what feeds it, while that is on the same side's way to the limit and the step from it
    is less than the limit itself: an error that is mostly inherited was made before."""
    side, way = onset.verdict, [onset]
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
        way.append(onset)
    return way


# Operators of two runs, in the passes where both sides' blocks had equal inputs.
#
# The anchored pass, or where nothing is found there the escalated one, which in float32 sees a
# wrong formula far below the floor of a 16-bit dtype. Both sides must have recorded operators.

_ESCALATED = "escalated"


def measure(measured: Measured) -> OperatorsResult | None:
    """The operators of two runs, each with its limit."""
    return compare_operators(
        measured.reference, measured.candidate, measured.truth, rename=measured.rename,
        thresholds=measured.thresholds,
    )  # fmt: skip


def compare_operators(
    a: Run, b: Run, truth: Truth | None, *, rename: Callable[[str], str], thresholds: Thresholds
) -> OperatorsResult | None:
    """None where not both sides recorded operators from equal inputs."""
    anchoring_truth = truth if truth is not None and truth.anchors else None
    first: OperatorsResult | None = None
    for passes in _passes(a.manifest, b.manifest):
        measured = measure_operators(
            a, b, passes, truth=None if anchoring_truth is None else anchoring_truth.run,
            truth_pass="anchored" if anchoring_truth is None else anchoring_truth.anchored_pass,
            rename=rename,
        )  # fmt: skip
        if measured is None:
            continue
        result = judge_operators(
            measured, notes=a.manifest.plan.modules, thresholds=thresholds,
            two_dtypes=_two_dtypes(a.manifest, b.manifest),
        )  # fmt: skip
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
    anchored = anchored_passes(a, b, [])
    passes = [] if anchored is None else [anchored]
    plans = (a.plan, b.plan)
    same = a.plan.anchored_to is not None and a.plan.anchored_to == b.plan.anchored_to
    if same and all(_ESCALATED in plan.passes for plan in plans):
        passes.append((_ESCALATED, _ESCALATED))
    return passes


def _two_dtypes(a: Manifest, b: Manifest) -> bool:
    return a.model.dtype != b.model.dtype or work_dtype(a) != work_dtype(b)


def operator_notes(a: Run, b: Run, operators: OperatorsResult | None) -> list[Fact]:
    """Why operators that were recorded are not compared; nothing where they are."""
    counts = {
        name: sum(record.call is not None for record in run.records)
        for name, run in (("reference", a), ("candidate", b))
    }
    if operators is not None and _two_dtypes(a.manifest, b.manifest):
        return [fact("operators.two_dtypes")]
    if operators is not None or not any(counts.values()):
        return []
    if all(counts.values()):
        other_batches = a.manifest.tokens.groups != b.manifest.tokens.groups
        code = "other_batches" if other_batches else "other_block_inputs"
        return [fact(f"operators.{code}")]
    side, other = sorted(counts, key=lambda name: -counts[name])
    return [fact("operators.one_side_only", side=side, num=counts[side], other=other)]

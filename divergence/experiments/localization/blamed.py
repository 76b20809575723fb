"""Which side of a localized operator is wrong, if that can be told.

The truth is the reference's own code in float64. It tells kernels apart from what the code asks
for, but not whose *code* is right. So a side is named only on evidence that does not rest on that:

- *alone*: one side's operator is off by itself, on its own recorded inputs, by the operator's
  definition. That holds whoever made the truth.
- *the reference* is blamed by a truth that was made on a machine which repeats the reference: its
  own code in float64 says otherwise than its kernels, and the candidate agrees with it.
- *the candidate* is blamed by a truth with which the candidate's own code agrees in float64 (a
  second float64 run, made on the candidate's machine), or both sides were repeated on one machine.

Where float64 tells the two sides' code apart, it names neither: by each side's code the other is
wrong. What the runs recorded of their code then decides as it does for ``compare``
(analyses.code.doubt_of_code). Levels that blame different sides contradict each other: no side.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from divergence.analyses.code.find import CODE_NOT_TOLD, doubt_of_code
from divergence.analyses.operators.find import finding_of
from divergence.comparison.decide import RANK, check, confidence_of, decide
from divergence.comparison.preflight.code import (
    TruthDisagreement,
    disagreement,
    other_code,
    without_pads,
)
from divergence.comparison.result import Report
from divergence.comparison.results import OperatorResult, OtherInput, Verdict
from divergence.experiments.localization.machine import Goal, Maker
from divergence.experiments.result import NEAR, OwnError, is_right_alone
from divergence.facts import Fact, fact
from divergence.run.reader import Run
from divergence.run.site import BACKWARD
from divergence.words import Side, SideBothOrNeither

__all__ = ["BlamedSide", "blame", "decided"]

_SIDES = ("reference", "candidate")
_MUCH = 10.0  # times what the two codes differ by: then a tenth of the error at most is the code's


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedSide:
    """The side that is wrong, or why none is named; fields as in ``Localization``."""

    side: Side | None = None
    contradiction: Fact | None = None
    doubt: Fact | None = None
    code: str | None = None


def blame(
    maker: Maker,
    goal: Goal,
    made: dict[str, Run],
    truth: Run,
    site: str,
    alone: list[OwnError],
    *,
    blamed: SideBothOrNeither | None,
    above: str | None,
) -> BlamedSide:
    """Whose operator is wrong. ``blamed``: the side that the operators blame, against ``truth``;
    ``above``: the one that the comparison blames which named the block; ``site``: the operator,
    ``alone``: each side's by itself."""
    off = _off_alone(alone)
    levels = [
        fact("experiments.block_by", module=goal.block, side=above),
        fact("experiments.operator_by", site=site, side=blamed),
        fact("experiments.alone_by", site=site, side=off),
    ]
    levels = [level for level in levels if level["side"] in _SIDES]
    if len({level["side"] for level in levels}) == 2:
        return BlamedSide(contradiction=fact("experiments.levels_apart", levels=levels))
    if blamed != "reference" and blamed != "candidate":
        return BlamedSide()
    mine, theirs = made["reference"].manifest, made["candidate"].manifest
    apart = other_code(mine, theirs, goal.block)
    if off == blamed or (maker.one_machine and not apart):
        return BlamedSide(side=blamed)
    if blamed == "candidate" and maker.is_prepared(blamed):  # no truth is made of what it changes
        doubt = doubt_of_code(mine, theirs, goal.block)
        return BlamedSide(doubt=doubt) if doubt else BlamedSide(side=blamed)
    if blamed == "candidate":
        output = f"{goal.block}{BACKWARD if BACKWARD in site else ''}:out"
        return _by_both_codes(maker, goal, made, truth, output)
    if maker.folder.is_verified(truth):
        return BlamedSide(side="reference")
    maker.ask("reference", fact("experiments.makes_truth_by_code"))
    return BlamedSide(doubt=fact("experiments.truth_not_verified", truth=str(truth.path)))


def decided(
    deep: Report, first: OperatorResult, named: BlamedSide, *, alone: list[OwnError],
    given: list[OtherInput],
) -> Verdict:  # fmt: skip
    """The verdict of the descent, which all that is printed of it says: the operator ``first`` of
    the last comparison ``deep``, by the side that ``named`` leaves. Of an operator that is right
    ``alone`` what it is ``given`` is the reason, where nothing else is known."""
    operators, known = deep.operators, deep.verdict
    assert operators is not None
    inputs = [item for item in given[:1] if item.difference]
    if is_right_alone(alone) and inputs and not (first.other_inputs or first.region):
        first = replace(first, other_inputs=inputs)
    side = operators.side if operators.side == "both" and named.side is None else named.side
    results = [first if result.site == first.site else result for result in operators.results]
    finding = finding_of(replace(operators, side=side, results=results))
    verdict = decide([finding], deep.preflight).verdict
    checks = verdict.checks
    same_block = known.onset is not None and known.onset.block in (None, first.block)
    if same_block and RANK[known.confidence] > RANK[verdict.confidence]:
        checks = known.checks  # that the block is wrong is as sure as it was
    if named.contradiction is not None:
        checks = [*checks, check("agreement", False, fact("experiments.levels_blame"))]
    elif named.doubt is not None:
        checks = [*checks, CODE_NOT_TOLD]
    others = (item for item in known.evidence if item not in finding.evidence)
    evidence = [*finding.evidence, *others]
    return replace(verdict, checks=checks, confidence=confidence_of(checks), evidence=evidence)


def _off_alone(errors: list[OwnError]) -> str | None:
    """The side whose operator is off by itself, while the other's is not, or far less."""
    if len(errors) != 2:
        return None
    less, more = sorted(errors, key=lambda own: own.times)
    return more.side if more.times > NEAR * max(1.0, less.times) else None


def _by_both_codes(
    maker: Maker, goal: Goal, made: dict[str, Run], truth: Run, output: str
) -> BlamedSide:
    """The candidate is blamed: does its own code say so too?"""
    assert goal.block is not None
    other = maker.truth("truth-by-candidate", goal, side="candidate")
    if other is None:
        return BlamedSide(doubt=fact("experiments.only_by_reference_code"))
    apart = disagreement(truth, other, inside=goal.block)
    if apart.num_compared == 0:
        return BlamedSide(doubt=fact("experiments.no_common_site"))
    first = apart.first
    if first is None or _is_small(first, truth, other, made["candidate"], output):
        return BlamedSide(side="candidate")
    manifests = made["reference"].manifest, made["candidate"].manifest
    doubt = doubt_of_code(*manifests, goal.block)
    if doubt is None and all(manifest.model.code for manifest in manifests):
        return BlamedSide(side="candidate", code=first.site)
    return BlamedSide(
        doubt=fact("experiments.codes_apart", apart=first.fact, doubt=doubt), code=first.site
    )


def _is_small(apart: TruthDisagreement, truth: Run, other: Run, run: Run, output: str) -> bool:
    """Is the candidate's error at the block's ``output`` far beyond what the codes differ by?"""
    errors, differ = 0.0, 0.0
    for record in truth.records:
        if record.pass_ != "anchored" or record.site != output:
            continue
        theirs, own = other.find(record.coordinates), run.find(record.coordinates)
        if theirs is None or own is None or {theirs.shape, own.shape} != {record.shape}:
            return False
        true, mine, its = (
            without_pads(run.manifest, record, source.read(entry).double())
            for source, entry in ((truth, record), (run, own), (other, theirs))
        )
        if true is None or mine is None or its is None:
            return False
        errors = max(errors, float((mine - true).norm() / true.norm()))
        differ = max(differ, float((its - true).norm() / true.norm()))
    return 0 < differ * _MUCH <= errors

"""Operators of two runs, in the passes where both sides' blocks had equal inputs.

The anchored pass, or where nothing is found there the escalated one, which in float32 sees a
wrong formula far below the floor of a 16-bit dtype. Both sides must have recorded operators.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from divergence.analyses.operators.errors import measure_operators
from divergence.analyses.operators.judge import judge_operators
from divergence.comparison.align.pairs import anchored_passes
from divergence.comparison.analysis import Measured
from divergence.comparison.measure.floors import work_dtype
from divergence.comparison.measure.truth import Truth
from divergence.comparison.results import OperatorsResult
from divergence.facts import Fact, fact
from divergence.numerics.floor import Thresholds
from divergence.run.manifest import Manifest
from divergence.run.reader import Run

__all__ = ["compare_operators", "measure", "operator_notes"]

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

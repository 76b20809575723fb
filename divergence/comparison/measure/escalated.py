"""Measuring escalated passes: each side's float32 pass against the truth, or with each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import msgspec

from divergence.comparison.align.pairs import Alignment
from divergence.comparison.align.pieces import Pair, pieces_in, why_no_pair
from divergence.comparison.experts import Routes
from divergence.comparison.measure.floors import ModelFloor
from divergence.comparison.measure.measurer import Measurer
from divergence.comparison.measure.truth import Truth, inputs_of
from divergence.comparison.results import SiteResult
from divergence.numerics.floor import Thresholds
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.run.site import BACKWARD, is_operator_site
from divergence.words import Progress, Side

__all__ = ["compare_escalated", "drop_escalated"]

ESCALATED = "escalated"


def compare_escalated(
    a: Run,
    b: Run,
    truth: Truth | None,
    thresholds: Thresholds,
    measure: Callable[..., list[SiteResult]],
    progress: Progress | None,
    *,
    sides: Sequence[Side] = ("reference", "candidate"),
    routes: Routes | None = None,
) -> list[SiteResult]:
    """One result for each escalated record that has a partner.

    Against the truth each side of ``sides`` answers for itself (``of``); where none reaches, two
    escalated passes of equal inputs are compared with each other. ``routes`` takes what was seen
    of experts.
    """
    inputs = inputs_of(a, b)
    both: tuple[tuple[Side, Run], ...] = ("reference", a), ("candidate", b)
    having = [(name, run) for name, run in both if _has(run)]
    results: list[SiteResult] = []
    if truth is not None and truth.anchors:
        true_run = truth.run
        for name, run in having:
            if name not in sides:
                continue
            if run.manifest.escalated_to != true_run.manifest.plan.anchored_to:
                continue
            if run.manifest.model.dtype != true_run.manifest.model.dtype:
                continue  # its weights were rounded otherwise: far beyond float32's floor
            results += _measured(
                true_run, run, "anchored", name, inputs, thresholds, measure, progress, routes
            )
    if (
        len(having) == 2
        and a.manifest.model.dtype == b.manifest.model.dtype
        and a.manifest.escalated_to == b.manifest.escalated_to
    ):
        alone = [{(r.sample, r.step, r.site) for r in results if r.of == side} for side in sides]
        results += _measured(
            a, b, ESCALATED, None, inputs, thresholds, measure, progress, routes,
            without=set.intersection(*alone),
        )  # fmt: skip
    return results


def drop_escalated(alignment: Alignment, results: Sequence[SiteResult]) -> Alignment:
    """Without the escalated records that ``results`` are of: those were compared after all."""
    used = {(r.sample, r.step, r.site) for r in results if r.of != "reference"}
    left = [
        item
        for item in alignment.only_candidate
        if item.pass_ != ESCALATED or (item.sample, item.step, item.site) not in used
    ]
    return replace(alignment, only_candidate=left)


def _has(run: Run) -> bool:
    return ESCALATED in run.manifest.plan.passes


def _measured(
    reference: Run,
    candidate: Run,
    pass_: str,
    of: Side | None,
    inputs: Run | None,
    thresholds: Thresholds,
    measure: Callable[..., list[SiteResult]],
    progress: Progress | None,
    routes: Routes | None,
    *,
    without: Collection[tuple[int, int, str]] = (),
) -> list[SiteResult]:
    pairs = []
    split = reference.manifest.tokens.groups != candidate.manifest.tokens.groups
    theirs = pieces_in(reference, pass_, split=split)
    for key, piece in pieces_in(candidate, ESCALATED, split=split).items():
        other = theirs.get(key)
        if key in without:
            continue
        if is_operator_site(piece.record.site) and BACKWARD in piece.record.site:
            continue  # sums of gradients are made in another order where casts are: see calls.match
        if format_named(piece.record.dtype).kind != "float":
            continue
        if other is None or why_no_pair(other, piece, exactly=True) is not None:
            continue
        pairs.append(Pair(reference=other, candidate=piece, pass_=ESCALATED, match="exact"))
    pairs.sort(key=lambda pair: (pair.reference.record.sample, pair.reference.record.step,
                                 pair.reference.record.order))  # fmt: skip
    float32 = format_named("float32")
    measurer = Measurer(reference, candidate, ModelFloor(thresholds), inputs=inputs, work=float32)
    results = [
        msgspec.structs.replace(result, of=of) for result in measure(measurer, pairs, progress)
    ]
    if routes is not None:
        routes.take(measurer.judge.routes, of)
    return results

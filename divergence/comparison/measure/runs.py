"""Measuring: two runs, aligned, with the numbers of every pair of tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from divergence.comparison.advice import advise
from divergence.comparison.align.coverage import account, tokens_row
from divergence.comparison.align.pairs import (
    Alignment,
    NameMap,
    align,
    renaming,
    replayed_from,
    why_nothing,
)
from divergence.comparison.analysis import Measured, is_probe, numbers_of
from divergence.comparison.measure.floors import ModelFloor
from divergence.comparison.measure.measurer import Measurer
from divergence.comparison.measure.pipeline import measure_all
from divergence.comparison.measure.site_fields import without_floor
from divergence.comparison.measure.truth import Truth, inputs_of
from divergence.comparison.results import PreflightLine, SiteResult
from divergence.errors import IncomparableError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.words import Progress

__all__ = ["aligned", "measure", "measure_tensors", "opened", "run_notes"]


def opened(run: str | Path | Run) -> Run:
    """The run, its ranks' tensors put together."""
    run = run if isinstance(run, Run) else Run.open(run)
    if run.manifest.mesh is None:
        return run
    from divergence.run.ranks import unsharded

    return unsharded(run)


def opened_truth(run: str | Path | Run) -> Run:
    """The truth that ``run`` is, or else the one that it carries, its ranks' tensors put together.
    What it is no truth for is told by who judges by it."""
    from divergence.run.reader import own_truth

    run = opened(run)
    return run if run.manifest.settings.compute_dtype is not None else own_truth(run) or run


def aligned(a: Run, b: Run, names: NameMap | None) -> Alignment:
    """The pairs of which something can be known; the others are skipped, with the reason."""
    alignment = align(a, b, name_map=names)
    if all(
        a.has_bytes(pair.reference.record) and b.has_bytes(pair.candidate.record)
        for pair in alignment.pairs
    ):
        return alignment
    from divergence.comparison.measure.reduced import without_unknowable

    return without_unknowable(alignment, a, b)


def measure(
    a: Run,
    b: Run,
    lines: list[PreflightLine],
    *,
    names: NameMap | None = None,
    truth: str | Path | Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    progress: Progress | None = None,
) -> Measured:
    """Everything that two runs have in common: tensors, escalated passes, operators, tokens.

    ``lines``: preflight. ``truth``: by default the one that the run carries whose inputs anchored
    the comparison, or else, of free runs, the first that one of the two carries. Raises
    IncomparableError where nothing is, UsageError for a truth of other runs.
    """
    floor = None
    if truth is None and replayed_from(a.manifest, b.manifest) is None:
        anchoring = inputs_of(a, b)  # both sides got its inputs, as its own truth did
        free = [run for run in (a, b) if "truth_free" in run.manifest.plan.passes]
        for run in [anchoring, *free]:
            if truth is None and run is not None and run.manifest.plan.truth is not None:
                from divergence.run.reader import own_truth

                truth = own_truth(run)
    if truth is None:
        floor = _floor_side(a, b)
    against = None if truth is None else Truth(opened_truth(truth), a, b)
    alignment = aligned(a, b, names)
    rename = names or renaming(a, b, None)[0]
    measured = measure_tensors(
        a, b, alignment, truth=against, floor=floor, thresholds=thresholds, progress=progress
    )
    escalated: list[SiteResult] = []
    if any("escalated" in run.manifest.plan.passes for run in (a, b)):
        from divergence.comparison.measure.escalated import compare_escalated

        escalated = compare_escalated(
            a, b, against, thresholds, measure_all, progress, routes=measured.routes
        )
    sites = [*measured.sites, *escalated]
    measured = replace(measured, sites=sites, preflight=lines, rename=rename)
    measured = replace(measured, operators=numbers_of("operators", measured))
    if not alignment.pairs and measured.operators is None:
        raise IncomparableError(
            "nothing was compared: the two runs have no tensor in common "
            f"({len(a.records)} and {len(b.records)} records)",
            where=f"{a.path} and {b.path}",
            hint=sentence(why_nothing(alignment)),
        )
    if escalated:
        from divergence.comparison.measure.escalated import drop_escalated

        alignment = drop_escalated(alignment, escalated)
    alignment, covered = account(
        alignment, a, b, rename=rename, escalated=escalated, operators=measured.operators
    )
    tokens = numbers_of("tokens", measured)
    unmatched = [*alignment.only_reference, *alignment.only_candidate, *alignment.skipped]
    notes = run_notes(a, b, alignment)
    if sites and all(site.step > 0 for site in sites):
        notes.append(fact("measure.no_prefill"))
    if measured.experts:
        from divergence.comparison.rerouted import routing_notes

        notes += routing_notes(sites, measured.routes)
    anchors = against is not None and against.anchors
    return replace(
        measured,
        alignment=alignment,
        tokens=tokens,
        covered=[*covered, *tokens_row(tokens)],
        missing=len(unmatched) + (0 if tokens is None else tokens.num_missing),
        notes=[*notes, *_truth_notes(against, sites)],
        advice=advise(a, b, against.run if against is not None and anchors else None),
    )


def _floor_side(a: Run, b: Run) -> Run | None:
    """The side that carries a floor for this comparison: the one that the other repeats."""
    inputs = inputs_of(a, b)
    run = inputs or (b if a.manifest.like == b.manifest.id else a)
    return run if "floor" in run.manifest.plan.passes else None


def measure_tensors(
    a: Run,
    b: Run,
    alignment: Alignment,
    *,
    truth: Truth | None = None,
    floor: Run | None = None,
    inputs: Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    progress: Progress | None = None,
) -> Measured:
    """The numbers of the pairs of ``alignment`` alone. ``inputs``: the run whose inputs anchored
    the candidate; found where it is not given."""
    measurer = Measurer(
        a, b, ModelFloor(thresholds), inputs=inputs or inputs_of(a, b), truth=truth, own_floor=floor
    )
    sites = measure_all(measurer, alignment.pairs, progress)
    if is_probe(a.manifest) and is_probe(b.manifest):
        sites = without_floor(sites)
    forms = [format_named(run.manifest.model.dtype) for run in (a, b)]
    routed: frozenset[str] = frozenset()
    experts = any(note.routed for note in a.manifest.plan.modules.values())
    if experts:
        from divergence.comparison.rerouted import unknown_blocks

        routed = unknown_blocks(a.manifest, sites)
    return Measured(
        reference=a,
        candidate=b,
        truth=truth,
        floor=floor,
        alignment=alignment,
        sites=sites,
        thresholds=thresholds,
        advice=advise(a, b),
        routes=measurer.judge.routes,
        truth_samples=measurer.judge.truth_samples if truth or floor else None,
        anchored=alignment.anchored and any(s.pass_ == "anchored" for s in sites),
        routed=routed,
        experts=experts,
        narrow=any(form.kind == "float" and form.itemsize <= 2 for form in forms),
    )


def _truth_notes(truth: Truth | None, sites: list[SiteResult]) -> list[Fact]:
    if truth is None:
        return []
    notes = []
    if not truth.run.manifest.complete:
        why = truth.run.manifest.stopped_by or None
        notes.append(fact("measure.truth_incomplete", why=why))
    elif not truth.anchors:
        notes.append(fact("measure.truth_of_free_runs"))
    if any(s.estimated or s.is_unmeasured for s in sites):
        notes.append(fact("measure.truth_judges_full"))
    return notes


def run_notes(a: Run, b: Run, alignment: Alignment) -> list[Fact]:
    """What to know of the runs themselves: names, cut off records, settings that were not met."""
    notes = list(alignment.notes)
    if alignment.prefix is not None:
        reference, candidate = (name or None for name in alignment.prefix)
        notes.append(fact("measure.prefix_read", reference=reference, candidate=candidate))
    for side, run in (("reference", a), ("candidate", b)):
        if run.torn_tail:
            notes.append(fact("measure.torn_tail", side=side))
        both = a.manifest.overrides if run is b else b.manifest.overrides
        for override in run.manifest.overrides:
            if override in both or override.name in ("sites", "model"):
                continue  # shared, or no influence on the numbers
            values = {"name": override.name, "used": override.used}
            notes.append(
                fact("measure.told_to_use", side=side, reference=override.reference, **values)
            )
        changed = run.manifest.plan.only_changed
        if changed is not None and not all(run.has_bytes(record) for record in run.records):
            notes.append(fact("measure.only_changed", side=side, run=changed))
    return notes

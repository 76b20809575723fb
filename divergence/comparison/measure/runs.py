"""Two runs measured: opened, aligned, and every pair read and measured once, in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from divergence.comparison.advice import advise
from divergence.comparison.align.coverage import account, tokens_row
from divergence.comparison.align.pairs import (
    Alignment,
    NameMap,
    Pair,
    align,
    pieces_in,
    renaming,
    replayed_from,
    why_no_pair,
    why_nothing,
)
from divergence.comparison.analysis import Measured, is_of_machine, numbers_of
from divergence.comparison.experts import Routes, routing_notes, unknown_blocks
from divergence.comparison.measure.floors import ModelFloor, has_gates
from divergence.comparison.measure.pairs import HERE, Measurer, Measuring, measure_all
from divergence.comparison.measure.truth import SamplesBySite, Truth, inputs_of
from divergence.comparison.results import PreflightLine, SiteResult
from divergence.errors import IncomparableError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.numerics.formats import format_named
from divergence.run.reader import Run, own_truth
from divergence.run.site import BACKWARD, is_operator_site
from divergence.words import Side

ESCALATED = "escalated"


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
    run = opened(run)
    return run if run.manifest.settings.compute_dtype is not None else own_truth(run) or run


def measure(
    a: Run,
    b: Run,
    lines: list[PreflightLine],
    *,
    names: NameMap | None = None,
    truth: str | Path | Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    measuring: Measuring = HERE,
) -> Measured:
    """Everything that two runs have in common: tensors, escalated passes, operators, tokens.

    ``lines``: preflight. ``truth``: by default the one that the run carries whose inputs anchored
    the comparison, or else, of free runs, the first that one of the two carries. Raises
    IncomparableError where nothing is, UsageError for a truth of other runs.
    """
    # what both sides are held against: a truth, or the floor that one of them carries
    inputs, floor = inputs_of(a, b), None
    if truth is None and replayed_from(a.manifest, b.manifest) is None:
        # of whose inputs both sides got, its own truth did too
        free = [run for run in (a, b) if "truth_free" in run.manifest.plan.passes]
        for run in [inputs, *free]:
            if truth is None and run is not None and run.manifest.plan.truth is not None:
                truth = own_truth(run)
    if truth is None:  # the side that carries a floor for this comparison: the other repeats it
        side = inputs or (b if a.manifest.like == b.manifest.id else a)
        floor = side if "floor" in side.manifest.plan.passes else None
    against = None if truth is None else Truth(opened_truth(truth), a, b)
    # which tensor belongs to which, and the numbers of each pair
    alignment = aligned(a, b, names)
    rename = names or renaming(a, b, None)[0]
    measured = measure_tensors(
        a, b, alignment, truth=against, floor=floor, thresholds=thresholds, measuring=measuring
    )
    escalated: list[SiteResult] = []
    if any("escalated" in run.manifest.plan.passes for run in (a, b)):
        escalated, samples = compare_escalated(
            a, b, against, thresholds, measuring, routes=measured.routes
        )
        measured.samples.take(samples)
    sites = [*measured.sites, *escalated]
    measured = replace(measured, sites=sites, preflight=lines, rename=rename)
    # operators are measured before it is told what was compared, tokens with what is left
    measured = replace(measured, operators=numbers_of("operators", measured))
    if not alignment.pairs and measured.operators is None:
        raise IncomparableError(
            "nothing was compared: the two runs have no tensor in common "
            f"({len(a.records)} and {len(b.records)} records)",
            where=f"{a.path} and {b.path}",
            hint=sentence(why_nothing(alignment)),
        )
    if escalated:  # the records that these are of were compared after all
        used = {(r.sample, r.step, r.site) for r in escalated if r.of != "reference"}
        left = [
            item
            for item in alignment.only_candidate
            if item.pass_ != ESCALATED or (item.sample, item.step, item.site) not in used
        ]
        alignment = replace(alignment, only_candidate=left)
    alignment, covered = account(
        alignment, a, b, rename=rename, escalated=escalated, operators=measured.operators
    )
    tokens = numbers_of("tokens", measured)
    # what to know of it: records that were left over, and what a truth cannot tell
    unmatched = [*alignment.only_reference, *alignment.only_candidate, *alignment.skipped]
    notes = run_notes(a, b, alignment)
    if sites and all(site.step > 0 for site in sites):
        notes.append(fact("measure.no_prefill"))
    if measured.experts:
        notes += routing_notes(sites, measured.routes)
    anchors = against is not None and against.anchors
    if against is not None and not against.run.manifest.complete:
        why = against.run.manifest.stopped_by or None
        notes.append(fact("measure.truth_incomplete", why=why))
    elif against is not None and not anchors:
        notes.append(fact("measure.truth_of_free_runs"))
    if against is not None and any(s.estimated or s.is_unmeasured for s in sites):
        notes.append(fact("measure.truth_judges_full"))
    return replace(
        measured,
        alignment=alignment,
        tokens=tokens,
        covered=[*covered, *tokens_row(tokens)],
        missing=len(unmatched) + (0 if tokens is None else tokens.num_missing),
        notes=notes,
        advice=advise(a, b, against.run if against is not None and anchors else None),
    )


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


def measure_tensors(
    a: Run,
    b: Run,
    alignment: Alignment,
    *,
    truth: Truth | None = None,
    floor: Run | None = None,
    inputs: Run | None = None,
    thresholds: Thresholds = THRESHOLDS,
    measuring: Measuring = HERE,
) -> Measured:
    """The numbers of the pairs of ``alignment`` alone. ``inputs``: the run whose inputs anchored
    the candidate; found where it is not given."""
    measurer = Measurer(
        a, b, ModelFloor(thresholds), inputs=inputs or inputs_of(a, b), truth=truth, own_floor=floor
    )
    sites = measure_all(measurer, alignment.pairs, measuring)
    if is_of_machine(a.manifest) and is_of_machine(b.manifest):
        # their inputs cancel on purpose, and no model's floor fits
        nothing = dict.fromkeys(("floor", "ratio", "ratio_max", "ratio_sink"))
        sites = [msgspec.structs.replace(site, **nothing, prompts=[]) for site in sites]
    forms = [format_named(run.manifest.model.dtype) for run in (a, b)]
    routed: frozenset[str] = frozenset()
    experts = any(note.routed for note in a.manifest.plan.modules.values())
    if experts:
        routed = unknown_blocks(a.manifest, sites)
    if has_gates(a.manifest):
        routed |= {BACKWARD}
    return Measured(
        reference=a,
        candidate=b,
        truth=truth,
        floor=floor,
        alignment=alignment,
        sites=sites,
        thresholds=thresholds,
        advice=advise(a, b),
        routes=measurer.rater.routes,
        samples=measurer.rater.samples,
        anchored=alignment.anchored and any(s.pass_ == "anchored" for s in sites),
        routed=routed,
        experts=experts,
        narrow=any(form.kind == "float" and form.itemsize <= 2 for form in forms),
    )


def compare_escalated(
    a: Run,
    b: Run,
    truth: Truth | None,
    thresholds: Thresholds,
    measuring: Measuring,
    *,
    routes: Routes | None = None,
) -> tuple[list[SiteResult], SamplesBySite]:
    """One result for each escalated record that has a partner, and the samples of their rows.

    Passes of equal inputs are compared with each other, and held against a truth of these inputs.
    Where they are not, or one side has none, each is held against the truth by itself (``of``).
    ``routes`` takes what was seen of experts.
    """
    inputs, samples = inputs_of(a, b), SamplesBySite()
    both: tuple[tuple[Side, Run], ...] = ("reference", a), ("candidate", b)
    having = [(side, run) for side, run in both if ESCALATED in run.manifest.plan.passes]
    # other weights were rounded otherwise: that is far beyond float32's floor
    judging = [
        (side, run)
        for side, run in having
        if truth is not None
        and truth.anchors
        and run.manifest.escalated_to == truth.run.manifest.plan.anchored_to
        and run.manifest.model.dtype == truth.run.manifest.model.dtype
    ]
    results: list[SiteResult] = []

    def measured(reference: Run, pass_: str, run: Run, of: Side | None, by: Truth | None) -> None:
        pairs = []
        split = reference.manifest.tokens.groups != run.manifest.tokens.groups
        partners = pieces_in(reference, pass_, split=split)
        for key, piece in pieces_in(run, ESCALATED, split=split).items():
            other = partners.get(key)
            if is_operator_site(piece.record.site) and BACKWARD in piece.record.site:
                continue  # sums of gradients are made in another order where casts are: see calls
            if format_named(piece.record.dtype).kind != "float":
                continue
            if other is None or why_no_pair(other, piece, exactly=True) is not None:
                continue
            pairs.append(Pair(reference=other, candidate=piece, pass_=ESCALATED, match="exact"))
        pairs.sort(
            key=lambda pair: (
                pair.reference.record.sample,
                pair.reference.record.step,
                pair.reference.record.order,
            )
        )
        measurer = Measurer(
            reference,
            run,
            ModelFloor(thresholds),
            inputs=inputs,
            truth=by,
            work=format_named("float32"),
        )
        for result in measure_all(measurer, pairs, measuring):
            results.append(msgspec.structs.replace(result, of=of))
        if routes is not None:
            routes.take(measurer.rater.routes, of)
        samples.take(measurer.rater.samples)

    if (
        len(having) == 2
        and a.manifest.model.dtype == b.manifest.model.dtype
        and a.manifest.escalated_to == b.manifest.escalated_to
    ):
        measured(a, ESCALATED, b, None, truth if len(judging) == 2 else None)
    elif truth is not None:
        for side, run in judging:
            measured(truth.run, "anchored", run, side, None)
    return results, samples


def run_notes(a: Run, b: Run, alignment: Alignment) -> list[Fact]:
    """Say what to know of the runs: names, cut off records, settings that were not met."""
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

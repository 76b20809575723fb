"""compare(): two runs → a Report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from divergence._version import __version__
from divergence.comparison.align.coverage import account, tokens_row
from divergence.comparison.align.names import NameMap, load_name_map
from divergence.comparison.align.pairs import Alignment, align, renaming, why_nothing
from divergence.comparison.arithmetic.facts import explain_arithmetic
from divergence.comparison.arithmetic.probes import judge_probes
from divergence.comparison.blocks.allowed import allowed_errors
from divergence.comparison.blocks.ends import find_ends
from divergence.comparison.blocks.suspects import shown_by
from divergence.comparison.decide.advice import Advice, WithinAdvice
from divergence.comparison.decide.judge import Case, judge, judge_units
from divergence.comparison.decide.trusted import refuse_own_floor, widening_notes
from divergence.comparison.experts.routes import Routes, routing_notes, with_experts
from divergence.comparison.experts.routing import unknown_blocks
from divergence.comparison.gate.bounds import check_thresholds
from divergence.comparison.gate.fitness import with_itself
from divergence.comparison.measure.escalated import compare_escalated, drop_escalated
from divergence.comparison.measure.floors import ModelFloor
from divergence.comparison.measure.measurer import Measurer
from divergence.comparison.measure.pipeline import measure_all, measured_on
from divergence.comparison.measure.reduced import without_unknowable
from divergence.comparison.measure.truth import Tallies, Truth, inputs_of
from divergence.comparison.measure.unmeasured import NO_PREFILL, is_unmeasured
from divergence.comparison.operators.arithmetic import with_arithmetic
from divergence.comparison.operators.result import OperatorsResult
from divergence.comparison.operators.runs import compare_operators, operator_notes
from divergence.comparison.operators.verdict import with_operators
from divergence.comparison.precision.audit import audit_runs
from divergence.comparison.precision.findings import with_audit
from divergence.comparison.preflight.code import with_code
from divergence.comparison.preflight.lines import preflight
from divergence.comparison.preflight.owner import with_owner
from divergence.comparison.ranks.replicas import check_replicas, with_replicas
from divergence.comparison.result import (
    Coverage,
    Evidence,
    PassCoverage,
    PreflightLine,
    Report,
    SiteResult,
    TokensResult,
    Verdict,
)
from divergence.comparison.run_summary import summary_of
from divergence.comparison.suite.compare import is_suite, report_on_suites
from divergence.comparison.tokens.choices import compare_tokens, relate_to_onset
from divergence.comparison.within import align_within, check_alone, explain_within
from divergence.errors import IncomparableError, UsageError
from divergence.numerics.formats import format_named
from divergence.numerics.rounding.floor import THRESHOLDS, Thresholds
from divergence.run.process_tuning import collect_garbage_rarely
from divergence.run.ranks.unshard import unsharded
from divergence.run.reader import Run
from divergence.run.schema.site import one_or_more
from divergence.run.untrusted.command import command_line

__all__ = ["Measured", "compare", "measure_runs", "summary_of"]


@collect_garbage_rarely()
def compare(
    reference: str | Path | Run,
    candidate: str | Path | Run | None = None,
    *,
    force: bool = False,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    thresholds: Thresholds = THRESHOLDS,
    device: str = "cpu",
    progress: Callable[[str, int, int | None, str], None] | None = None,
) -> Report:
    """Compare ``candidate`` with ``reference``, as in ``diff old new``.

    ``force`` measures although preflight found a blocking difference (other weights,
    other tokens). ``name_map``: a TOML file of module names, see compare.names. ``truth``: the
    float64 run that `truth` made of the run that anchored the comparison; it tells which
    side is wrong. ``floor``: runs of trusted machines like ``reference``; what they differ by
    widens the limits. ``thresholds``: multiples of the floor, see numerics.floor.
    ``device``: where tensors are measured; not the CPU only where float64 is to be had.
    Without ``candidate``: one run's decode steps against its whole pass, see comparison.within.

    Raises RunFormatError for unreadable runs, IncomparableError when they have nothing in
    common, and UsageError for a truth or a floor that belongs to other runs, or for a single run
    without a whole pass.
    """
    floor, device = one_or_more(floor), str(device)
    if device != "cpu":
        with measured_on(device):
            return compare(
                reference, candidate, force=force, name_map=name_map, truth=truth, floor=floor,
                thresholds=thresholds, progress=progress,
            )  # fmt: skip
    check_thresholds(thresholds)
    a = _opened(reference)
    if candidate is None:
        check_alone(truth=truth, floor=floor, name_map=name_map)
        return _within(a, thresholds, progress)
    b = _opened(candidate)
    a.borrow_from(b)
    b.borrow_from(a)
    if is_suite(a) and is_suite(b):
        found_there = report_on_suites(
            a, b, truth=truth and _opened(truth), floor=floor, progress=progress
        )
        return with_itself(found_there, a.manifest, b.manifest)
    names = None if name_map is None else load_name_map(name_map)
    arithmetic = explain_arithmetic(a.manifest, b.manifest)
    lines = [*preflight(a, b, names=names), *arithmetic.lines]
    blocking = [line for line in lines if line.status == "blocking"]
    if blocking and not force:
        return _incomparable(a, b, lines, blocking)
    found = measure_runs(
        a, b, lines, names=names, truth=truth, floor=floor, thresholds=thresholds,
        progress=progress,
    )  # fmt: skip
    case, alignment = replace(found.case, arithmetic=arithmetic.brief()), found.alignment
    own = judge(case, thresholds=thresholds)
    verdict = judge_probes(a.manifest, b.manifest, arithmetic, case) or with_arithmetic(
        with_operators(
            with_experts(own, case.sites, found.routes),
            found.operators,
            case.advice,
            alone=not case.sites,
        ),
        found.operators,
        arithmetic,
    )
    audit = audit_runs(a, b, rename=names or renaming(a, b, None)[0])
    replicas = check_replicas(a, b, alignment.pairs)
    verdict = with_replicas(verdict, replicas, case.sites, alignment.pairs, a, b)
    report = Report(
        tool_version=__version__,
        reference=summary_of(a),
        candidate=summary_of(b),
        verdict=with_owner(
            with_code(with_audit(verdict, audit), a.manifest, b.manifest),
            found.truth and found.truth.run,
            a.manifest,
            b.manifest,
        ),
        operators=found.operators,
        audit=audit,
        preflight=lines,
        tokens=relate_to_onset(case.tokens, verdict.onset),
        coverage=_coverage(alignment, [*found.covered, *tokens_row(case.tokens)]),
        sites=list(case.sites),
        notes=[*found.notes, *widening_notes(case.shown, case.sites, len(floor), thresholds)],
        replicas=replicas,
    )
    return with_itself(report, a.manifest, b.manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Two runs, measured: everything that ``judge`` needs, and what a change is measured with."""

    reference: Run
    candidate: Run
    truth: Truth | None
    alignment: Alignment
    case: Case
    notes: list[str]
    routes: Routes
    operators: OperatorsResult | None = None
    covered: list[PassCoverage] = field(default_factory=list)


def measure_runs(
    a: Run,
    b: Run,
    lines: list[PreflightLine],
    *,
    names: NameMap | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    thresholds: Thresholds = THRESHOLDS,
    progress: Callable[..., None] | None = None,
) -> Measured:
    """Align and measure. Parameters and errors are those of ``compare``; ``lines``: preflight."""
    floor = one_or_more(floor)
    alignment = without_unknowable(align(a, b, name_map=names), a, b)
    right = None if truth is None else Truth(_opened(truth), a, b)
    rename = names or renaming(a, b, None)[0]
    operators = compare_operators(a, b, right, rename=rename, thresholds=thresholds)
    if not alignment.pairs and operators is None:
        raise IncomparableError(
            "nothing was compared: the two runs have no tensor in common "
            f"({len(a.records)} and {len(b.records)} records)",
            where=f"{a.path} and {b.path}",
            hint=why_nothing(alignment),
        )
    measurer = Measurer(a, b, ModelFloor(thresholds), inputs=inputs_of(a, b), truth=right)
    sites = measure_all(measurer, alignment.pairs, progress)
    escalated = compare_escalated(
        a, b, right, thresholds, measure_all, progress, routes=measurer.routes
    )
    sites += escalated
    alignment = drop_escalated(alignment, escalated)
    alignment, covered = account(
        alignment, a, b, rename=rename, escalated=escalated, operators=operators
    )
    notes = _notes(a, b, alignment)
    if sites and all(site.step > 0 for site in sites):
        notes.append(NO_PREFILL)
    notes += [*routing_notes(sites, measurer.routes), *operator_notes(a, b, operators)]
    unmatched = [*alignment.only_reference, *alignment.only_candidate, *alignment.skipped]
    if right is not None and not right.run.manifest.complete:
        notes.append(
            f"the truth is incomplete ({right.run.manifest.stopped_by or 'it was cut off'}): what "
            "it does not hold is judged without it"
        )
    elif right is not None and not right.anchors:
        notes.append("the truth has no anchored pass to these inputs: it judges free runs alone")
    if right is not None and any(s.estimated or is_unmeasured(s) for s in sites):
        notes.append("the truth judges only what both runs keep in full")
    # a replay chose none: its tokens are its source's
    replays = any(run.manifest.plan.replayed_pass is not None for run in (a, b))
    tokens = None
    if not replays:
        tokens = compare_tokens(
            a, b, truth=right and right.run, allowed=allowed_errors(sites), thresholds=thresholds
        )
    missing = len(unmatched) + (0 if tokens is None else tokens.num_missing)
    case = _case(a, b, alignment, sites, lines, tokens, right and measurer.tallies, missing)
    case = replace(
        case,
        advice=Advice(a, b, right.run if right is not None and right.anchors else None),
        partial=right is not None and not right.run.manifest.complete,
        ends=find_ends(a, b, alignment, sites, truth=right and right.run, thresholds=thresholds),
    )
    notes += case.ends.notes() if case.ends is not None else []
    if floor:
        shown = _shown(a, b, floor, right, names, thresholds)
        case = replace(case, shown=shown, widened_beyond=any(x > 1 for x in shown.values()))
    return Measured(
        reference=a, candidate=b, truth=right, alignment=alignment, case=case, notes=notes,
        routes=measurer.routes, operators=operators, covered=covered,
    )  # fmt: skip


def _within(run: Run, thresholds: Thresholds, progress: Callable[..., None] | None) -> Report:
    """One run: its decode steps with the cache against its whole pass."""
    alignment = align_within(run)
    if not alignment.pairs:
        raise IncomparableError(
            "nothing was compared: the decode steps and the whole pass share no rows of tokens",
            where=str(run.path),
            hint=why_nothing(alignment),
        )
    measurer = Measurer(run, run, ModelFloor(thresholds), inputs=run)
    sites = measure_all(measurer, alignment.pairs, progress)
    lines, coverage = preflight(run, run), _coverage(alignment)
    case = _case(run, run, alignment, sites, lines, None, None, len(coverage.unmatched))
    case = replace(case, advice=WithinAdvice(run), notes=())
    return Report(
        tool_version=__version__,
        reference=summary_of(run),
        candidate=summary_of(run),
        verdict=explain_within(judge(case, thresholds=thresholds)),
        preflight=lines,
        tokens=None,
        coverage=coverage,
        sites=sites,
        notes=_notes(run, run, alignment),
    )


def _opened(run: str | Path | Run) -> Run:
    return unsharded(run if isinstance(run, Run) else Run.open(run))


def _case(
    a: Run,
    b: Run,
    alignment: Alignment,
    sites: list[SiteResult],
    lines: list[PreflightLine],
    tokens: TokensResult | None,
    tallies: Tallies | None,
    missing: int,
) -> Case:
    forms = [format_named(run.manifest.model.dtype) for run in (a, b)]
    return Case(
        sites=sites,
        preflight=lines,
        tokens=tokens,
        anchored=alignment.anchored and any(s.pass_ == "anchored" for s in sites),
        routed=unknown_blocks(a.manifest, sites),
        experts=any(note.routed for note in a.manifest.plan.modules.values()),
        advice=Advice(a, b),
        missing=missing,
        notes=alignment.notes,
        tallies=tallies,
        narrow=any(form.kind == "float" and form.itemsize <= 2 for form in forms),
    )


def _shown(
    a: Run,
    b: Run,
    runs: Sequence[str | Path | Run],
    right: Truth | None,
    names: NameMap | None,
    thresholds: Thresholds,
) -> dict[tuple[str, str, str], float]:
    """What trusted runs use of their limits, the largest of all by site."""
    shown: dict[tuple[str, str, str], float] = {}
    for run in map(_opened, runs):
        refuse_own_floor(run, a, b)
        blocking = [line.check for line in preflight(a, run) if line.status == "blocking"]
        run.borrow_from(a)
        alignment = without_unknowable(align(a, run, name_map=names), a, run)
        if blocking or not alignment.pairs:
            raise UsageError(
                f"{run.path} shows no floor for {a.path}: "
                + (f"other {' and '.join(blocking)}" if blocking else "no tensor in common"),
                hint=command_line("capture", like=a.path, o="RUN") + " on a trusted machine",
            )
        measurer = Measurer(a, run, ModelFloor(thresholds), inputs=inputs_of(a, run), truth=right)
        sites = measure_all(measurer, alignment.pairs, None)
        case = _case(a, run, alignment, sites, [], None, right and measurer.tallies, 0)
        for key, share in shown_by(judge_units(case, thresholds)[0]).items():
            shown[key] = max(share, shown.get(key, 0.0))
    return shown


def _incomparable(
    a: Run, b: Run, lines: list[PreflightLine], blocking: list[PreflightLine]
) -> Report:
    return Report(
        tool_version=__version__,
        reference=summary_of(a),
        candidate=summary_of(b),
        verdict=Verdict(
            kind="incomparable",
            summary="not the same experiment: "
            + " and ".join(f"other {line.check}" for line in blocking),
            confidence="high",
            evidence=[
                Evidence(
                    text=f"{line.check}: "
                    + (line.detail or f"{line.reference} against {line.candidate}")
                )
                for line in blocking
            ],
            next=Advice(a, b).force(),
        ),
        preflight=lines,
        tokens=None,
        coverage=Coverage(
            num_compared=0, num_only_reference=0, num_only_candidate=0, num_skipped=0
        ),
        sites=[],
    )


def _coverage(alignment: Alignment, passes: Sequence[PassCoverage] = ()) -> Coverage:
    return Coverage(
        num_compared=len(alignment.pairs),
        num_only_reference=len(alignment.only_reference),
        num_only_candidate=len(alignment.only_candidate),
        num_skipped=len(alignment.skipped),
        unmatched=[*alignment.only_reference, *alignment.only_candidate, *alignment.skipped],
        passes=list(passes),
    )


def _notes(a: Run, b: Run, alignment: Alignment) -> list[str]:
    notes = list(alignment.notes)
    if alignment.prefix is not None:
        one, two = (name or "(nothing)" for name in alignment.prefix)
        notes.append(f"sites were matched with the prefix {one} read as {two}")
    for name, run in (("reference", a), ("candidate", b)):
        if run.torn_tail:
            notes.append(f"the {name}'s last record line was cut off and left out")
        both = a.manifest.overrides if run is b else b.manifest.overrides
        for override in run.manifest.overrides:
            if override in both or override.name in ("sites", "model"):
                continue  # shared, or no influence on the numbers
            notes.append(
                f"the {name} was told to use {override.name} {override.used} "
                f"instead of {override.reference}"
            )
        changed = run.manifest.plan.only_changed
        if changed is not None and not all(run.has_bytes(record) for record in run.records):
            notes.append(
                f"the {name} stores what differs from run {changed} alone, which is not at hand: "
                "of the rest digests and statistics are compared"
            )
    return notes

"""compare(): two runs → a Report.

Everything flows one way: preflight, align and measure (measure.runs), findings of the
analyses that apply, one decision, what explains it, the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replaced

from divergence._version import __version__
from divergence.comparison.advice import advise
from divergence.comparison.align.coverage import not_exercised
from divergence.comparison.align.pairs import NameMap, load_name_map
from divergence.comparison.analysis import (
    AnalysisResult,
    Measured,
    applying,
    report_of,
    whole_report,
)
from divergence.comparison.decide import decide, explained, nothing_explains, one_run_verdict
from divergence.comparison.measure.pairs import HERE, Measuring, measuring_on
from divergence.comparison.measure.runs import (
    measure,
    opened,
    opened_truth,
)
from divergence.comparison.preflight.lines import MEDIA, preflight, prompt_headline
from divergence.comparison.result import Report, no_parts, summary_of
from divergence.comparison.results import Coverage, Finding, PreflightLine
from divergence.domain import hook_places, placed
from divergence.errors import UsageError
from divergence.facts import fact, with_sentences
from divergence.numerics.floor import THRESHOLDS, Thresholds, check_thresholds
from divergence.numerics.formats import format_named
from divergence.run.command import Command, command
from divergence.run.reader import Run
from divergence.run.site import one_or_more
from divergence.words import Progress


@with_sentences
def compare(
    reference: str | Path | Run,
    candidate: str | Path | Run | None = None,
    *,
    force: bool = False,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    layers: str | Path | Run | Sequence[str | Path | Run] = (),
    thresholds: Thresholds = THRESHOLDS,
    device: str | Measuring = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Compare ``candidate`` with ``reference``, as in ``diff old new``.

    ``force`` measures although preflight found a blocking difference (other weights,
    other tokens). ``name_map``: a TOML file of module names. ``truth``: the
    float64 run that `truth` made of the run that anchored the comparison; it tells which
    side is wrong. ``floor``: runs of trusted machines like ``reference``; what they differ by
    widens the limits. ``layers``: for each side that holds log-probabilities alone, a run of it
    with layers; they tell which block explains the difference. ``thresholds``: multiples of the
    floor, see numerics.floor.
    ``device``: where tensors are measured; not the CPU only where float64 is to be had.
    Without ``candidate``: one run's decode steps against its whole pass, see comparison.within; a
    run of a suite that needs no second against its definitions.

    Raises RunFormatError for unreadable runs, IncomparableError when they have nothing in
    common, and UsageError for a truth or a floor that belongs to other runs, or for a single run
    without a whole pass.
    """
    floor = one_or_more(floor)
    check_thresholds(thresholds)
    measuring = measuring_on(device, progress)
    a = opened(reference)
    if candidate is None:
        from divergence.comparison.within import check_alone, compare_within, explain_within

        check_alone(truth=truth, floor=floor, name_map=name_map)
        if (report_alone := whole_report("alone", "report_alone", a)) is not None:
            return report_alone(a, progress=progress)
        return explain_within(report_on(compare_within(a, thresholds, measuring), ("blocks",)))
    b = opened(candidate)
    a.set_fallback(b)
    b.set_fallback(a)
    if (report_whole := whole_report("applies", "report_on", a, b)) is not None:
        report = report_whole(
            a,
            b,
            truth=truth and opened_truth(truth),
            floor=floor,
            layers=[opened(run) for run in one_or_more(layers)],
            progress=progress,
        )
        return _one_run_report(report, a)
    if layers:
        raise UsageError(
            "--layers stands in for log-probabilities alone, and both runs hold layers"
        )
    names = None if name_map is None else load_name_map(name_map)
    # preflight: is it worth while, and what differs besides the numbers?
    lines = preflight(a, b, names=names)
    if a.manifest.arithmetic or b.manifest.arithmetic:
        from divergence.comparison.arithmetic import explain_arithmetic

        lines += explain_arithmetic(a.manifest, b.manifest).lines
    blocking = [line for line in lines if line.status == "blocking"]
    if blocking and not force:
        return _incomparable(a, b, lines, blocking)
    held_against: dict[str, Any] = {
        "names": names,
        "truth": truth,
        "floor": floor,
        "thresholds": thresholds,
    }
    # every pair of tensors, then the questions and the one decision
    measured = measure_runs(a, b, lines, **held_against, measuring=measuring)
    report = report_on(measured)
    # may the same model be written otherwise? Then what the form explains is taken off first
    if report.verdict.kind in ("localized", "systematic", "drift"):
        from divergence.comparison.invariances import freed

        free = freed(measured, report)
        if free is not None:
            # it lies in the memory of this process
            here = replace(measuring, measure=None, progress=None)
            measured = measure_runs(a, free.candidate, lines, **held_against, measuring=here)
            report = free.report(report, report_on(measured), thresholds)
    if floor:
        from divergence.comparison.trusted import widening_notes

        notes = widening_notes(measured.shown, report.sites, len(floor), thresholds)
        report = replaced(report, remarks=[*report.remarks, *notes])
    return _one_run_report(_truth_report(report, a, b), a)


def measure_runs(
    a: Run,
    b: Run,
    lines: list[PreflightLine],
    *,
    names: NameMap | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    thresholds: Thresholds = THRESHOLDS,
    measuring: Measuring = HERE,
) -> Measured:
    """Align and measure, with the limits that trusted runs widen. Parameters and errors are those
    of ``compare``; ``lines``: preflight."""
    # sums of float32 round by their order, and what a training step clips or updates shares the
    # errors of what it is given
    narrow = all(format_named(run.manifest.model.dtype).itemsize == 2 for run in (a, b))
    if narrow and not a.manifest.training.train and nothing_explains(a, b, lines):
        thresholds = thresholds.of_one_machine
    measured = measure(
        a, b, lines, names=names, truth=truth, thresholds=thresholds, measuring=measuring
    )
    if not floor:
        return measured
    from divergence.comparison.trusted import trusted_limits

    quiet = replace(measuring, progress=None)
    shown = trusted_limits(measured, one_or_more(floor), names=names, measuring=quiet)
    return replace(measured, shown=shown)


def report_on(measured: Measured, names: Sequence[str] | None = None) -> Report:
    """The report: every analysis that applies is asked, one decision is made, and explained.
    ``names``: of these analyses alone."""
    analyses = applying(measured, names)
    answers = {
        analysis.name: analysis.find(measured) if analysis.find else AnalysisResult()
        for analysis in analyses
    }
    findings = [finding for answer in answers.values() for finding in answer.findings]
    decision = decide(findings, measured.preflight, alike=measured.unexplained)
    parts: dict[str, Any] = {}
    for answer in answers.values():
        parts.update(answer.parts)
    sites = []
    for site in parts["sites"]:
        if site.key in decision.flags:  # at least all of a limit, where it is told
            shares = {"limit_usage": site.limit_usage, "usage": site.usage}
            beyond = {key: None if x is None else max(1.0, x) for key, x in shares.items()}
            site = replaced(site, flagged=True, **beyond)
        sites.append(site)
    measured = replace(measured, sites=sites)
    explanations = [
        finding
        for analysis in analyses
        if analysis.explain is not None
        for finding in analysis.explain(measured, decision.verdict, answers[analysis.name])
    ]
    verdict = explained(decision.verdict, explanations)
    unreached = not_exercised(measured.reference)
    modules = [part.text for part in unreached if part.what == "module"]
    if modules and verdict.kind in ("identical", "within_floor"):
        rest = fact("not_exercised", modules=modules)
        verdict = replaced(verdict, headline=[*verdict.headline, rest])
    tokens, alignment = parts.get("tokens"), measured.alignment
    return Report(
        tool_version=__version__,
        reference=summary_of(measured.reference),
        candidate=summary_of(measured.candidate),
        verdict=verdict,
        preflight=list(measured.preflight),
        tokens=tokens and tokens.related_to(verdict.onset),
        coverage=Coverage(
            num_compared=len(alignment.pairs),
            num_only_reference=len(alignment.only_reference),
            num_only_candidate=len(alignment.only_candidate),
            num_skipped=len(alignment.skipped),
            unmatched=alignment.unmatched,
            passes=list(measured.covered),
        ),
        sites=sites,
        not_exercised=unreached,
        visible=parts.get("visible"),
        remarks=[*measured.notes, *(note for answer in answers.values() for note in answer.notes)],
        findings=[claim for claim in (*findings, *explanations) if claim.says_something],
        parts={name: parts.get(name) for name in no_parts()},
        operators=parts.get("operators"),
        audit=parts.get("audit"),
        replicas=parts.get("replicas", []),
    )


def _one_run_report(report: Report, a: Run) -> Report:
    """The report, where both runs are one: equal bits prove nothing then."""
    if report.reference.id != report.candidate.id:
        return report
    differ = any(replica.num_different for replica in report.replicas)
    ranks = a.manifest.num_ranks if a.manifest.model.task == "operators" else 1
    again = command("capture", like=a.path, o="NEW", ranks=ranks if ranks > 1 else None)
    verdict = one_run_verdict(
        report.verdict,
        report.reference.id,
        judged_by_truth=any(part.by_truth for part in report.parts.values() if part),
        num_held=0 if differ else sum(replica.num_tensors for replica in report.replicas[:1]),
        commands=[again] if a.manifest.can_be_repeated else [],
    )
    return replaced(report, verdict=verdict)


def _truth_report(report: Report, a: Run, b: Run) -> Report:
    """The report, where one side is a truth: it judges other runs, and none is captured like it."""
    truths = [run.manifest.settings.compute_dtype is not None for run in (a, b)]
    if truths[0] == truths[1]:
        return report
    pair, truth = (("RUN", b.path), a.path) if truths[0] else ((a.path, "OTHER"), b.path)
    note = fact("truth_judges_two") if truths[0] else ""
    judged = command("compare", *pair, truth=truth, note=note)
    return replaced(report, verdict=replaced(report.verdict, commands=[judged]))


def _relating(a: Run, b: Run) -> list[Command]:
    return [item for place in hook_places("other_weights").values() for item in placed(place)(a, b)]


def _incomparable(
    a: Run, b: Run, lines: list[PreflightLine], blocking: list[PreflightLine]
) -> Report:
    unknown = any(
        line.check == "weights" and line.details == [fact("preflight.no_digests")]
        for line in blocking
    )
    names = ("prompt ids", MEDIA, *["weights"] * unknown)
    others = [line.check for line in blocking if line.check not in names]
    apart = [fact("preflight.undigested")] if unknown else []
    apart += [fact("preflight.other", checks=others)] if others else []
    apart += [item for line in blocking if line.check == MEDIA for item in line.details]
    if any(line.check == "prompt ids" for line in blocking):
        apart.append(prompt_headline(a.manifest, b.manifest))
    suites = [run.manifest.model.task == "operators" for run in (a, b)]
    if suites[0] != suites[1]:  # nothing of one is in the other, and no capture makes it so
        apart = [fact("preflight.model_and_suite", a_is_suite=suites[0])]
    headline = [*apart[:1], *(fact("preflight.and", what=what) for what in apart[1:])]
    finding = Finding(
        claim="other_experiment",
        kind="incomparable",
        headline=headline,
        evidence=[
            fact(
                "preflight.blocking",
                check=line.check,
                details=line.details or None,
                reference=line.reference,
                candidate=line.candidate,
            )
            for line in blocking
            if line.check != MEDIA  # the headline holds all of it
        ],
        commands=[]
        if suites[0] != suites[1]
        else [
            *(_relating(a, b) if "weights" in others else []),
            *advise(a, b).made_alike(other_model=bool(others) or unknown),
        ],
    )
    return report_of(a, b, finding, Coverage(num_compared=0), lines)

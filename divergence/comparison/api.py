"""compare(): two runs → a Report.

Everything flows one way, and reads so below: preflight, then align and measure (``measure_runs``),
then the findings of the analyses that apply, one decision, what explains it, and the report
(``report_on``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replaced

from divergence._version import __version__
from divergence.comparison.advice import advise
from divergence.comparison.align import (
    NameMap,
    account,
    load_name_map,
    opened,
    opened_truth,
    replayed_from,
    run_notes,
    tokens_row,
    why_nothing,
)
from divergence.comparison.analysis import (
    AnalysisResult,
    Measured,
    applying,
    numbers_of,
    report_of,
    whole_report,
)
from divergence.comparison.decide import decide, explained, nothing_explains, one_run_verdict
from divergence.comparison.experts import choices_in, routing_notes
from divergence.comparison.measure.pairs import (
    ESCALATED,
    HERE,
    Measuring,
    aligned,
    compare_escalated,
    measure_tensors,
    measuring_on,
)
from divergence.comparison.measure.truth import Truth, inputs_of
from divergence.comparison.preflight import (
    GIVEN,
    MEDIA,
    preflight,
    prompt_headline,
    without_guesses,
)
from divergence.comparison.result import (
    Coverage,
    Finding,
    PreflightLine,
    Report,
    SiteResult,
    Unexercised,
    no_parts,
    summary_of,
)
from divergence.domain import hook_places, placed
from divergence.errors import IncomparableError, RunFormatError, UsageError
from divergence.facts import fact, sentence, with_sentences
from divergence.numerics.floor import THRESHOLDS, Thresholds, check_thresholds
from divergence.numerics.formats import format_named
from divergence.run.command import command
from divergence.run.reader import Run, own_truth
from divergence.run.site import one_or_more, starred
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
    # one run: by itself, or its decode steps against its pass over the whole sequence
    if candidate is None:
        from divergence.comparison.within import compare_within, explain_within

        given = {
            "--truth": truth,
            "--floor": floor,
            "--map": name_map,
            "--layers": layers,
            "--force": force,
        }
        if for_two := [option for option, value in given.items() if value]:
            raise UsageError(
                f"one run: {' and '.join(for_two)} would need a comparison of two runs",
                hint="divergence compare A B, or leave it out",
            )
        if (report_alone := whole_report("alone", "report_alone", a)) is not None:
            return report_alone(a, progress=progress)
        return explain_within(report_on(compare_within(a, thresholds, measuring), ("blocks",)))
    b = opened(candidate)
    a.set_fallback(b)  # of equal tensors one side may keep the bytes for both
    b.set_fallback(a)
    # runs that are not compared site by site: suites, log-probabilities alone
    if (report_whole := whole_report("applies", "report_on", a, b)) is not None:
        report = report_whole(
            a,
            b,
            truth=truth and opened_truth(truth),
            floor=floor,
            layers=[opened(run) for run in one_or_more(layers)],
            progress=progress,
        )
        return _one_run_report(report, a, b)
    if layers:
        raise UsageError(
            "--layers stands in for log-probabilities alone, and both runs hold layers"
        )
    names = None if name_map is None else load_name_map(name_map)
    # preflight: is it worth while, and what differs besides the numbers?
    lines = preflight(a, b, names=names)
    if a.manifest.arithmetic or b.manifest.arithmetic:
        from divergence.comparison.arithmetic import explain_arithmetic

        arithmetic = explain_arithmetic(a.manifest, b.manifest)
        # another precision explains more than what else is of the machine
        checks = [line.check for line in lines]
        place = checks.index("device") if arithmetic.precise else len(lines)
        lines[place:place] = arithmetic.lines
    blocking = [line for line in lines if line.status == "blocking"]
    if blocking and not force:
        return _asked_alike(_incomparable(a, b, lines, blocking), name_map)

    # every pair of tensors, then the questions and the one decision
    options: dict[str, Any] = {
        "names": names,
        "truth": truth,
        "floor": floor,
        "thresholds": thresholds,
    }
    measured = measure_runs(a, b, lines, **options, measuring=measuring)
    report = report_on(measured)
    # may the same model be written otherwise? Then what the form explains is taken off first
    if report.verdict.kind in ("localized", "systematic", "drift"):
        from divergence.comparison.invariances import freed

        free = freed(measured, report)
        if free is not None:
            # it lies in the memory of this process
            own = replace(measuring, measure=None, progress=None)
            measured = measure_runs(a, free.candidate, lines, **options, measuring=own)
            rest = free.report(report, report_on(measured), thresholds)
            if rest is report and report.verdict.side == "reference" and names is None:
                # by B's truth it is A that has the form: it is taken off A
                other = freed(measure_runs(b, a, lines, **options, measuring=own), report)
                if other is not None:
                    measured = measure_runs(other.candidate, b, lines, **options, measuring=own)
                    rest = free.report(report, report_on(measured), thresholds)
            report = rest
    # what trusted runs did to the limits; and of a truth, or of one run twice, what that is worth
    if floor:
        from divergence.comparison.trusted import widening_notes

        notes = widening_notes(measured.shown, report.sites, len(floor), thresholds)
        report = replaced(report, remarks=[*report.remarks, *notes])
    truths = [run.manifest.settings.compute_dtype is not None for run in (a, b)]
    if truths[0] != truths[1]:  # it judges other runs, and none is captured like it
        pair, judge = (("RUN", b.path), a.path) if truths[0] else ((a.path, "OTHER"), b.path)
        note = fact("truth_judges_two") if truths[0] else ""
        judged = command("compare", *pair, truth=judge, note=note)
        report = replaced(report, verdict=replaced(report.verdict, commands=[judged]))
    return _one_run_report(_asked_alike(report, name_map, floor), a, b)


def _asked_alike(
    report: Report, name_map: str | Path | None, floor: Sequence[str | Path | Run] = ()
) -> Report:
    """The report, whose comparisons read the same names and widen the same limits; a descent reads
    the names of one model alone, and takes no floor."""
    trusted = [run.path if isinstance(run, Run) else run for run in floor]
    commands = []
    for each in report.verdict.commands:
        if each.name == "compare":
            each = each.with_options(map=name_map, floor=trusted or None)
        elif each.name == "localize" and trusted:
            each = replaced(each, note=fact("with_model_without_floor"))
        if each.name != "localize" or name_map is None:
            commands.append(each)
    return replaced(report, verdict=replaced(report.verdict, commands=commands))


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
    """Everything that two runs have in common, aligned and measured: tensors, escalated passes,
    operators, tokens; with the limits that trusted runs widen.

    ``lines``: preflight. ``truth``: by default the one that the run carries whose inputs anchored
    the comparison, or else, of free runs, the first that one of the two carries. Other parameters
    are those of ``compare``. Raises IncomparableError where nothing is, UsageError for a truth of
    other runs.
    """
    # Inference in 16 bits alone: sums of float32 round by their order, and what a training step
    # clips or updates shares the errors of what it is given.
    narrow = all(format_named(run.manifest.model.dtype).itemsize == 2 for run in (a, b))
    if narrow and not a.manifest.training.train and nothing_explains(a, b, lines):
        thresholds = thresholds.of_one_machine
    # what both sides are held against: a truth, or the floor that one of them carries
    inputs, own_floor = inputs_of(a, b), None
    if truth is None and replayed_from(a.manifest, b.manifest) is None:
        # of whose inputs both sides got, its own truth did too
        free = [run for run in (a, b) if "truth_free" in run.manifest.plan.passes]
        for run in [inputs, *free]:
            if truth is None and run is not None and run.manifest.plan.truth is not None:
                truth = own_truth(run)
    if truth is None:  # the side that carries a floor for this comparison: the other repeats it
        side = inputs or (b if a.manifest.like == b.manifest.id else a)
        own_floor = side if "floor" in side.manifest.plan.passes else None
    against = None if truth is None else Truth(opened_truth(truth), a, b)
    # which tensor belongs to which, and the numbers of each pair
    alignment = aligned(a, b, names)
    measured = measure_tensors(
        a, b, alignment, truth=against, floor=own_floor, thresholds=thresholds, measuring=measuring
    )
    escalated: list[SiteResult] = []
    if any("escalated" in run.manifest.plan.passes for run in (a, b)):
        escalated, samples = compare_escalated(
            a, b, against, thresholds, measuring, routes=measured.routes
        )
        measured.samples.take(samples)
    sites = [*measured.sites, *escalated]
    measured = replace(measured, sites=sites, preflight=lines)
    # operators are measured before it is told what was compared, tokens with what is left
    measured = replace(measured, operators=numbers_of("operators", measured))
    if not alignment.pairs and measured.operators is None:
        reason = why_nothing(alignment)
        again = command("capture", like=a.path, o="NEW", note="records what A does").text
        hints = [again] if a.manifest.can_be_repeated else []
        hints += ["--map FILE, if they mean the same"] * (reason.code == "align.first_sites")
        if any(line.status == "blocking" for line in lines):
            again = command("compare", a.path, b.path).text
            hints.append(f"{again} says what stops the comparison, and what to run")
        raise IncomparableError(
            f"nothing was compared: {sentence(reason)}",
            where=f"{a.path} and {b.path}",
            hint=tuple(hints) or None,
        )
    if escalated:  # the records that these are of were compared after all
        used = {(r.sample, r.step, r.site) for r in escalated if r.of != "reference"}
        left = [
            item
            for item in alignment.only_candidate
            if item.pass_ != ESCALATED or (item.sample, item.step, item.site) not in used
        ]
        alignment = replace(alignment, only_candidate=left)
    alignment, covered = account(alignment, a, b, escalated=escalated, operators=measured.operators)
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
    measured = replace(
        measured,
        alignment=alignment,
        tokens=tokens,
        covered=[*covered, *tokens_row(tokens)],
        missing=len(unmatched) + (0 if tokens is None else tokens.num_missing),
        notes=notes,
        advice=advise(a, b, against.run if against is not None and anchors else None),
    )
    if not floor:
        return measured
    from divergence.comparison.trusted import trusted_limits

    quiet = replace(measuring, progress=None)
    shown = trusted_limits(measured, one_or_more(floor), measuring=quiet)
    return replace(measured, shown=shown)


def report_on(measured: Measured, names: Sequence[str] | None = None) -> Report:
    """The report: every analysis that applies is asked, one decision is made, and explained.
    ``names``: of these analyses alone."""
    # what each analysis claims, and which claim is the verdict
    analyses = applying(measured, names)
    answers = {
        analysis.name: analysis.find(measured) if analysis.find else AnalysisResult()
        for analysis in analyses
    }
    findings = [finding for answer in answers.values() for finding in answer.findings]
    decision = decide(findings, measured.preflight, alike=measured.unexplained)
    # what they fill of the report; the sites that the verdict rests on are flagged
    parts: dict[str, Any] = {}
    for answer in answers.values():
        parts.update(answer.parts)
    sites = []
    for site in parts["sites"]:  # filled by the analysis ``blocks``, always
        if site.key in decision.flags:  # at least all of a limit, where it is told
            shares = {"limit_usage": site.limit_usage, "usage": site.usage}
            beyond = {key: None if x is None else max(1.0, x) for key, x in shares.items()}
            site = replaced(site, flagged=True, **beyond)
        sites.append(site)
    measured = replace(measured, sites=sites)
    # why it is so, and what no prompt reached
    explanations = [
        finding
        for analysis in analyses
        if analysis.explain is not None
        for finding in analysis.explain(measured, decision.verdict, answers[analysis.name])
    ]
    verdict = explained(decision.verdict, explanations)
    unreached = _not_exercised(measured.reference)
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


def _one_run_report(report: Report, a: Run, b: Run) -> Report:
    """The report, where both runs are one: equal bits prove nothing then, and what digests spared
    is read where it lies here, for a copy may be damaged. Raises RunFormatError."""
    if report.reference.id != report.candidate.id:
        return report
    for run in (a, b) if a.path != b.path else ():
        if not run.far and (problems := run.verify()):
            hint = "copy it again, or capture again"
            raise RunFormatError(problems[0], where=str(run.path), hint=hint)
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


def _incomparable(
    a: Run, b: Run, lines: list[PreflightLine], blocking: list[PreflightLine]
) -> Report:
    unknown = any(
        line.check == "weights" and line.details == [fact("preflight.no_digests")]
        for line in blocking
    )
    names = ("prompt ids", GIVEN, MEDIA, *["weights"] * unknown)
    others = [line.check for line in blocking if line.check not in names]
    apart = [fact("preflight.undigested")] if unknown else []
    apart += [fact("preflight.other", checks=others)] if others else []
    apart += [item for line in blocking if line.check in (GIVEN, MEDIA) for item in line.details]
    if any(line.check == "prompt ids" for line in blocking):
        apart.append(prompt_headline(a.manifest, b.manifest))
    suites = [run.manifest.model.task == "operators" for run in (a, b)]
    if suites[0] != suites[1]:  # nothing of one is in the other, and no capture makes it so
        apart = [fact("preflight.model_and_suite", a_is_suite=suites[0])]
    headline = [*apart[:1], *(fact("preflight.and", what=what) for what in apart[1:])]
    places = hook_places("other_weights").values() if "weights" in others else ()
    related = [placed(place)(a, b) for place in places]
    if relations := [item for facts, _ in related for item in facts]:
        lines, blocking = (
            [without_guesses(line, relations) if line.check == "weights" else line for line in some]
            for some in (lines, blocking)
        )
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
            if line.check not in (GIVEN, MEDIA)  # the headline holds all of it
        ],
        commands=[]
        if suites[0] != suites[1]
        else [
            *(item for _, commands in related for item in commands),
            *advise(a, b).made_alike(other_model=bool(others) or unknown),
        ],
    )
    return report_of(a, b, finding, Coverage(num_compared=0), lines)


_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_TOWERS = ("vision", "audio")


def _not_exercised(run: Run) -> list[Unexercised]:
    """Lists what no forward of a run used: modules, the largest share of the parameters first,
    experts by block, where the choice and the router's logits were recorded, and windows."""
    plan, config, tokens = run.manifest.plan, run.manifest.model.config, run.manifest.tokens
    total = max(1, run.manifest.model.num_parameters)
    shares: dict[str, int] = {}
    for path, count in plan.not_called.items():
        shares[starred(path)] = shares.get(starred(path), 0) + count
    unreached = [
        Unexercised(what="module", name=name, share=count / total)
        for name, count in sorted(shares.items(), key=lambda item: -item[1])
    ]
    if any(note.routed for note in plan.modules.values()):
        seen: dict[str, set[int]] = {}
        num_experts: dict[str, int] = {}
        for key, records in choices_in(run).items():
            block = str(key[-1])
            for record in records:
                if len(key) == 5:
                    num_experts[block] = record.shape[-1]
                elif run.has_bytes(record):
                    seen.setdefault(block, set()).update(run.array(record).reshape(-1).tolist())
        for block, experts in seen.items():
            num, rest = num_experts.get(block, 0), num_experts.get(block, 0) - len(experts)
            if rest > 0:
                unreached.append(Unexercised(what="experts", name=block, size=rest, of=num))
    longest = max((len(s.prompt_ids) + len(s.generated_ids) for s in tokens.samples), default=0)
    for name, size in config.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf not in _WINDOWS or isinstance(size, bool) or not isinstance(size, int):
            continue
        if prefix.partition("_config")[0] in _TOWERS:  # of patches or frames, not of tokens
            continue
        used = config.get(f"{prefix}.use_{leaf}".lstrip("."), True)
        if used and size > 0 and longest and longest <= size:
            unreached.append(Unexercised(what="window", name=name, size=size, of=longest))
    return unreached

"""scores(): two or more evaluations of one benchmark, paired document by document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from divergence._version import __version__
from divergence.comparison.result import PreflightLine
from divergence.domains.scores.formats import FORMATS, read
from divergence.domains.scores.formats.reading import ReadRequest
from divergence.domains.scores.joining import (
    Pairs,
    capture_flips,
    causes_of,
    joined,
    pair,
    preflight,
    setting_lines,
    unit_lines,
)
from divergence.domains.scores.judging import adjusted, gated, measured, unpaired
from divergence.domains.scores.result import (
    Candidate,
    EvaluationSummary,
    ScoresReport,
    TaskScores,
    worst_of,
)
from divergence.domains.scores.rows import (
    DEFAULT_BANDS,
    Band,
    Evaluation,
    ScoresPolicy,
    Series,
    SeriesName,
    parse_band,
)
from divergence.domains.scores.statistics import cluster_sums, lopsided, need_scipy
from divergence.errors import UsageError
from divergence.facts import Fact, fact, sentence, with_sentences
from divergence.gate.policy import load_policy
from divergence.run.command import Command, command
from divergence.run.reader import Run
from divergence.run.site import one_or_more
from divergence.words import Progress

_Paired = dict[SeriesName, tuple[Series, Pairs]]


@with_sentences
def scores(
    reference: str | Path,
    candidate: str | Path,
    *others: str | Path,
    format: str = "auto",
    band: str | float | None = None,
    policy: ScoresPolicy | str | Path | None = None,
    tasks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    filters: Sequence[str] = (),
    cluster: str | None = None,
    force: bool = False,
    runs: Sequence[str | Path | Run] = (),
    capture: str | Path | None = None,
    out: str | Path | None = None,
    num_prompts: int = 8,
    max_new_tokens: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ScoresReport:
    """Are the scores of two evaluations the same, as far as so many documents can tell?

    ``reference``, ``candidate``, ``others``: result folders or files of lm-evaluation-harness,
    evalscope, opencompass, inspect, or tables of id and score; each candidate is held against the
    reference.
    ``band``: how far a score may be off and still count as equal: "3%" of the reference's score
    (the default), "1.5pp" or 0.015. ``policy``: which verdicts pass, by file or name; with it or a
    band, ``ScoresReport.passed`` is told.
    ``tasks``, ``metrics``, ``filters``: names or globs of what is compared. ``cluster``: the field
    of a document by which documents depend on one another. ``force``: pairs documents although
    prompts or settings differ, and replaces an existing run.
    ``runs``: two runs of prompts that flipped, the reference's and the candidate's: each flip that
    they hold is told as a near tie or a real shift of its answer's margin.
    ``capture``: a model, to record up to ``num_prompts`` prompts whose scores flipped, as a run in
    ``out``.

    Needs the package scipy (the extra ``scores``). Raises UsageError, and DumpError for files that
    are damaged or unknown.
    """
    need_scipy()
    if format not in ("auto", *FORMATS):
        raise UsageError(f"no format is called {format!r}", hint=f"one of {', '.join(FORMATS)}")
    if (capture is None) != (out is None):
        raise UsageError("--capture MODEL and --out RUN belong together", hint="give both")
    paths = [str(source) for source in (reference, candidate, *others)]
    gate = None
    if isinstance(policy, ScoresPolicy):
        policy.check("policy")
        gate = policy
    elif band is not None or policy is not None:
        gate = getattr(load_policy(policy), "scores", ScoresPolicy())
    asked = band if band is not None else None if gate is None else gate.band
    first_band = [] if asked is None else [parse_band(asked)]
    bands = list(dict.fromkeys([*first_band, *DEFAULT_BANDS]))  # the usual ones beside it
    reading = ReadRequest(
        tasks=one_or_more(tasks),
        metrics=one_or_more(metrics),
        filters=one_or_more(filters),
        cluster=cluster,
    )
    sides: list[Evaluation] = []
    files: set[Path] = set()
    for number, path in enumerate(paths, 1):
        sides.append(read(path, reading, format=format))
        if progress is not None:
            progress("read", number, len(paths), path)
        # a folder and what lies in it are the same results, too
        own = {Path(series.file).resolve() for series in sides[-1].series}
        files = files or own  # the first side's
        if number > 1 and own & files:
            raise UsageError(
                "both sides are the same results, so nothing is compared",
                where=sides[-1].path,
                hint="name the results of another evaluation",
            )
    first, *rest = sides
    paired: list[_Paired] = []
    task_groups = []
    for side in rest:
        named = side.named()
        pairs = {
            series.name: (series, pair(series, named[series.name], force=force))
            for series in first.series
            if series.name in named
        }
        paired.append(pairs)
        task_groups.append(_compared(first, side, pairs, bands, force=force))
    judged = iter(adjusted([task for group in task_groups for task in group]))
    made = [
        _candidate(first, side, [next(judged) for _ in tasks_])
        for side, tasks_ in zip(rest, task_groups, strict=True)
    ]
    if gate is not None:
        made = [gated(result, gate) for result in made]
    report = ScoresReport(tool_version=__version__, reference=_summary(first), candidates=made)
    if capture is not None and out is not None:
        captured = capture_flips(
            first,
            paired[0],
            model=capture,
            out=out,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            trust_remote_code=trust_remote_code,
            force=force,
            dtype=dtype,
            device=device,
            progress=progress,
        )
        report = replace(report, captured=captured)
    if runs:
        report = replace(
            report, candidates=[joined(made[0], first, rest[0].dtype, paired[0], runs), *made[1:]]
        )
    return replace(report, commands=_commands(report, paths, runs, reading))


def _compared(
    a: Evaluation, b: Evaluation, paired: _Paired, bands: Sequence[Band], *, force: bool
) -> list[TaskScores]:
    """Each task of either side, without Holm's p values."""
    tasks_a, tasks_b = a.named(), b.named()
    task_scores: list[TaskScores] = []
    for name in dict.fromkeys((*tasks_a, *tasks_b)):
        if name not in paired:
            side = "reference" if name not in tasks_a else "candidate"
            stopped = fact("evaluations.no_task", side=side, task=str(name))
            task_scores.append(_stopped(name, stopped))
            continue
        series, pairs = paired[name]
        other, pairing = tasks_b[name], pairs.pairing
        alone = series.total is not None or other.total is not None
        if alone:
            scored = a if series.total is not None else b
            task = unpaired(series, other, bands, documents=FORMATS[scored.format].documents)
            means = [np.array([score or 0.0]) for score in (task.reference, task.candidate)]
            lines = [*setting_lines(series, other), *unit_lines(*means)]
        else:
            lines = preflight(series, other, pairs)
        nothing = not alone and not pairing.num_paired
        blocked = [line for line in lines if line.status == "blocking"]
        if nothing:
            blocked += [line for line in lines if line.status == "differs" and line.details]
        if nothing or (blocked and not force):
            task = replace(_stopped(name, _other(blocked)), pairing=None if alone else pairing)
        elif not alone:
            causes = causes_of(pairs, (a.dtype, b.dtype))
            task = replace(measured(series, pairs, bands), causes=causes, remarks=_remarks(pairs))
        task_scores.append(replace(task, preflight=lines))
    return task_scores


def _other(blocked: Sequence[PreflightLine]) -> Fact:
    """Say why the two are not the same evaluation."""
    reasons = []
    for line in blocked:
        apart = fact("evaluations.apart", reference=line.reference, candidate=line.candidate)
        reasons.append(fact("evaluations.check", check=line.check, what=line.details or apart))
    return fact("evaluations.not_the_same", reasons=reasons)


def _stopped(name: SeriesName, why: Fact) -> TaskScores:
    return TaskScores(**name._asdict(), verdict="incomparable", headline=[why])


def _remarks(pairs: Pairs) -> list[Fact]:
    remarks: list[Fact] = []
    if all(
        a.score == b.score and a.choices == b.choices and a.answer == b.answer
        for a, b in pairs.rows
    ):
        exact = all(a.choices is not None for a, _ in pairs.rows)
        remarks.append(fact("evaluations.same_answers", to_the_digit=exact))
    clusters = pairs.pairing.num_clusters
    if pairs.clusters is not None and clusters < 20:
        remarks.append(fact("evaluations.few_clusters", num_clusters=clusters))
    sums, _ = cluster_sums(pairs.candidate - pairs.reference, pairs.clusters)
    if pairs.clusters is not None and lopsided(sums):
        num = int((sums != 0).sum())
        remarks.append(fact("evaluations.lopsided_clusters", num_clusters=num))
    return remarks


def _candidate(a: Evaluation, b: Evaluation, tasks: list[TaskScores]) -> Candidate:
    compared = [task for task in tasks if task.verdict != "incomparable"]
    verdict = worst_of([task.verdict for task in compared])
    remarks = [
        fact("evaluations.incomplete", side=side, what=log.incomplete)
        for side, log in (("reference", a), ("candidate", b))
        if log.incomplete
    ]
    if a.format != b.format:
        remarks.append(fact("evaluations.two_tools", reference=a.format, candidate=b.format))
    headline = tasks[0].headline
    if len(tasks) > 1 and compared:  # of several how many have which verdict
        verdicts = Counter(task.verdict for task in tasks)
        counts = [
            fact("evaluations.num_of", num_scores=verdicts[name], verdict=name)
            for name in ("worse", "undecided", "better", "equal", "incomparable")
            if name in verdicts
        ]
        headline = [fact("evaluations.scores", num_scores=len(tasks), counts=counts)]
    return Candidate(
        side=_summary(b), verdict=verdict, headline=headline, tasks=tasks, remarks=remarks
    )


def _summary(side: Evaluation) -> EvaluationSummary:
    return EvaluationSummary(
        path=side.path,
        format=side.format,
        model=side.model,
        dtype=side.dtype,
        tool=side.tool,
        remarks=side.remarks,
    )


def _commands(
    report: ScoresReport, paths: list[str], runs: Sequence[str | Path | Run], reading: ReadRequest
) -> list[Command]:
    asked: dict[str, Any] = {
        "task": reading.tasks,
        "metric": reading.metrics,
        "filter": reading.filters,
        "cluster": reading.cluster,
    }
    if runs:
        candidate, other = (str(run.path if isinstance(run, Run) else run) for run in runs)
        return [command("compare", candidate, other, note=_why("to_begin"))]
    flips = any(
        task.num_lost or task.num_gained
        for candidate in report.candidates[:1]
        for task in candidate.tasks
    )
    if report.captured is not None:
        run = report.captured.path
        asked |= {"pair": ("--runs", run, f"{run}-b"), "note": _why("to_explain")}
        return [
            command("capture", like=run, o=f"{run}-b", note=_why("on_other")),
            command("compare", run, f"{run}-b", note=_why("to_layer")),
            command("scores", *paths[:2], **asked),
        ]
    if flips and report.verdict in ("worse", "better", "undecided"):
        asked |= {"capture": "MODEL", "o": "flips"}
        return [command("scores", *paths[:2], **asked, note=_why("to_record"))]
    return []


def _why(code: str) -> str:
    return sentence(fact(f"evaluations.{code}"))

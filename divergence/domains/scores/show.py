"""A ScoresReport as lines for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import msgspec

from divergence.document import Column, Document, Headline, Section, Sentence, Table, named
from divergence.domains.scores.judging import band_of
from divergence.domains.scores.result import (
    Candidate,
    EvaluationSummary,
    RunCauses,
    RunFlip,
    ScoresReport,
    TaskScores,
)
from divergence.domains.scores.rows import SeriesName
from divergence.facts import sentence
from divergence.words import count, list_names, printable

_WORDS = {
    "equal": "EQUAL",
    "better": "BETTER",
    "worse": "WORSE",
    "undecided": "UNDECIDED",
    "incomparable": "STOPPED",
}
_STYLES = {
    "equal": "bold green",
    "better": "bold yellow",
    "worse": "bold red",
    "undecided": "bold yellow",
    "incomparable": "bold red",
}
_DETAILED = 3
"""Tasks up to so many are all told in full; of more, those that are not equal."""


def name_of(task: TaskScores) -> str:
    return str(SeriesName(task.task, task.filter, task.metric))


def headline(candidate: Candidate) -> Headline:
    task = candidate.tasks[0]
    words = candidate.summary
    if len(candidate.tasks) == 1 and task.difference is not None:
        words = f"{name_of(task)} {_score(task.reference)} -> {_score(task.candidate)}: {words}"
    return Headline(_WORDS[candidate.verdict], printable(words), _STYLES[candidate.verdict])


def scores_documents(report: ScoresReport, *, verbose: bool = False) -> list[Document]:
    """One of each candidate; what to run next stands in the last. ``verbose``: every task, every
    check."""
    documents = []
    for number, candidate in enumerate(report.candidates):
        top = headline(candidate)
        if candidate.passed is not None:
            most = len(candidate.reasons) if verbose else _DETAILED
            text, style = "passed", "green"
            if not candidate.passed:
                text = f"failed: {list_names(candidate.reasons, most, '; ')}"
                style = "bold red"
            top = dataclasses.replace(top, facts=[named("policy", text, style)])
        tasks = candidate.tasks
        if not verbose and len(tasks) > _DETAILED:
            order = ("worse", "undecided", "better", "incomparable")
            tasks = sorted(
                (task for task in tasks if task.verdict in order),
                key=lambda task: order.index(task.verdict),
            )[:_DETAILED]
        several = len(candidate.tasks) > 1 or len(report.candidates) > 1
        table = Section(
            id=f"scores-{number}",
            heading=f"Scores of {candidate.side.path}",
            body=[score_table(candidate)],
        )
        lines = [_side("A", report.reference), _side("B", candidate.side)]
        brief = not several and not verbose  # the headline has its name and verdict
        lines += [named(*fact) for fact in facts_of(tasks[0]) if fact[0] != "verdict"] * brief
        details = [
            Section(
                id=f"score-{number}-{place}",
                title=name_of(task),
                verbose=several,
                body=[
                    named(*fact, indent=2, width=14)
                    for fact in facts_of(task, verbose=verbose)
                    if fact[0] != "verdict" or several
                ],
            )
            for place, task in enumerate(() if brief else tasks)
        ]
        notes = [*report.reference.notes, *candidate.side.notes, *candidate.notes]
        notes_shown = [named("note", note) for note in dict.fromkeys(notes)]
        if report.captured is not None and candidate is report.candidates[-1]:
            prompts = count(report.captured.num_prompts, "prompt")
            notes_shown.append(named("captured", f"{prompts} recorded in {report.captured.path}"))
        if brief:
            lines, notes_shown = [*lines, *notes_shown], []
        if brief and candidate.tasks[0].test != "unpaired":
            rest = "every band, what such scores can tell: add -v"
            lines.append(named("more", rest, "dim"))
        last = Section(id=f"notes-{number}", heading="Notes", body=notes_shown)
        documents.append(
            Document(
                headline=top,
                known=lines,
                sections=[*[table] * (several or verbose), *details, *[last] * bool(notes_shown)],
                next=report.next if candidate is report.candidates[-1] else (),
            )
        )
    return documents


def page_documents(report: ScoresReport) -> list[Document]:
    """Those of the page: everything."""
    return scores_documents(report, verbose=True)


def _side(name: str, side: EvaluationSummary) -> Sentence:
    names = [fact for fact in (side.model, side.dtype, side.tool or side.format) if fact]
    return named(name, f"{side.path}: {', '.join(names)}")


def score_table(candidate: Candidate) -> Table:
    """One row a task."""
    return Table(
        caption="Each score, candidate against reference",
        num_left=2,
        columns=(
            "score",
            "verdict",
            "n",
            Column("A", _score),
            Column("B", _score),
            Column("difference", _signed),
            "95% interval",
            Column("p (Holm)", _p),
        ),
        rows=[
            (name_of(task), task.verdict, *[None] * 6)
            if task.difference is None or task.pairing is None
            else (
                name_of(task),
                task.verdict,
                f"{task.pairing.num_paired:,}",
                task.reference,
                task.candidate,
                task.difference,
                f"{_signed(task.low)} to {_signed(task.high)}",
                task.p_adjusted,
            )
            for task in candidate.tasks
        ],
        marks=["flagged" if task.verdict == "worse" else "" for task in candidate.tasks],
    )


def facts_of(task: TaskScores, *, verbose: bool = False) -> Iterator[tuple[str, str]]:
    """A name and what it is, of one task."""
    if task.difference is None or task.pairing is None:
        yield "verdict", task.summary
        if task.pairing is not None:
            yield from _left_out(task)
        return
    pairing = task.pairing
    yield "verdict", task.summary
    better = "" if task.higher_is_better else "; lower is better"
    yield (
        "score",
        f"{_score(task.reference)} -> {_score(task.candidate)}, difference "
        f"{_signed(task.difference)} ± {_number(task.standard_error)} (standard error){better}"
        if task.standard_error is not None
        else f"{_signed(task.difference)}{better}",
    )
    words = {"mcnemar": "exact McNemar", "permutation": "permutation of signs", "t": "t test"}
    holm = f", {_p(task.p_adjusted)} by Holm" if task.p_adjusted != task.p_value else ""
    chance = f"p = {_p(task.p_value)} ({words.get(task.test or 't', 'two separate samples')}{holm})"
    interval = f"95%: {_signed(task.low)} to {_signed(task.high)}"
    if task.test == "unpaired":
        if task.standard_error is not None:
            counts = f"{pairing.num_reference:,} and {pairing.num_candidate:,} documents"
            yield "interval", f"{interval}, of {counts}, no pairs"
            yield "chance", chance
            yield from _bands(task)
        yield from _notes(task, verbose=False)
        return
    paired = count(pairing.num_paired, "paired document")
    if pairing.num_clusters != pairing.num_paired:
        paired += f" in {pairing.num_clusters:,} clusters"
    if max(pairing.repeats) > 1:
        paired += f", {pairing.repeats[0]:g} and {pairing.repeats[1]:g} answers to each"
    yield "interval", f"{interval}, of {paired}"
    yield "chance", chance
    if verbose:
        yield from _bands(task)
    least = "only beyond what such scores can have: they are too few"
    if task.smallest_difference is not None:
        least = f"of {_number(task.smallest_difference)} in four of five such evaluations"
    narrowest = f"the narrowest band it shows is ±{_number(task.shown_band)}"
    if verbose:
        yield "can tell", f"a true difference {least}; {narrowest}"
    changed = (
        ""
        if task.num_changed is None
        else (f"; {task.num_changed:,} of {pairing.num_paired:,} answers changed")
    )
    if task.graded:
        # of a better score that is lower, num_lost counts those that rose
        fell, rose = (task.num_lost, task.num_gained)[:: 1 if task.higher_is_better else -1]
        yield "changes", f"{fell:,} scores fell, {rose:,} rose{changed}"
    else:
        yield "flips", f"{task.num_lost:,} lost, {task.num_gained:,} gained{changed}"
    if task.causes is not None:
        yield "why", _why(task)
    if task.run_causes is not None:
        yield from _in_runs(task.run_causes, verbose=verbose)
    yield from _left_out(task)
    yield from _notes(task, verbose=verbose)


def _notes(task: TaskScores, *, verbose: bool) -> Iterator[tuple[str, str]]:
    for note in task.notes:
        yield "note", note
    for check in task.preflight:
        if check.status == "blocking" or (verbose and check.status != "same"):
            detail = check.detail or f"{check.reference} / {check.candidate}"
            yield "preflight", f"{check.check} {check.status}: {detail}"


def _bands(task: TaskScores) -> Iterator[tuple[str, str]]:
    for band in task.bands:
        state = "equal" if band.equal else "not shown"
        more = "" if band.needed is None else f"; some {band.needed:,} documents would settle it"
        yield "band", f"{sentence(band_of(band))}: {state}, p = {_p(band.p_value)}{more}"


def _why(task: TaskScores) -> str:
    causes = task.causes
    assert causes is not None
    parts = [
        f"{count(causes.num_ties, 'flip')} at near ties ({_signed(causes.difference_of_ties)})",
        f"{causes.num_shifts:,} with a real shift ({_signed(causes.difference_of_shifts)})",
    ]
    return (
        f"{' and '.join(parts)}: a tie's margin moves by no more than {causes.limit:.2g} nats, by "
        f"{causes.limit_of}; the median moved by {causes.median_shift:.2g}"
    )


def _in_runs(causes: RunCauses, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield what two runs tell of the flips, then the flips themselves."""
    counts = {"not reproduced": causes.num_not_reproduced, "not told": causes.num_not_told}
    parts = [
        f"{count(causes.num_ties, 'near tie')} ({_signed(causes.difference_of_ties)})",
        f"{count(causes.num_shifts, 'real shift')} ({_signed(causes.difference_of_shifts)})",
        *(f"{number:,} {words}" for words, number in counts.items() if number),
    ]
    yield (
        "in the runs",
        f"{len(causes.flips):,} of {causes.num_flips:,} flips: {', '.join(parts)}; a tie's margin "
        f"moves by no more than {causes.limit:.2g} nats, by {causes.limit_of}",
    )
    for flip in causes.flips[: None if verbose else _DETAILED]:
        yield "flip", _flip(flip)
    for note in causes.notes:
        yield "note", note


def _flip(flip: RunFlip) -> str:
    words = {
        "tie": "a near tie",
        "shift": "a real shift",
        "not_reproduced": "not reproduced",
        "not_told": "not told",
    }[flip.judgement]
    margins = f"prompt {flip.sample}, token {flip.step}: {words}"
    if flip.reference_margin is not None and flip.candidate_margin is not None:
        margins += (
            f", {flip.reference!r} over {flip.candidate!r} by {flip.reference_margin:.3g} nats in "
            f"A and {flip.candidate_margin:.3g} in B"
        )
    return f"{margins}: {flip.why}" if flip.why else margins


def _left_out(task: TaskScores) -> Iterator[tuple[str, str]]:
    pairing = task.pairing
    assert pairing is not None
    counts = {
        "only in A": pairing.num_reference_only,
        "only in B": pairing.num_candidate_only,
        "asked in other words": pairing.num_other_prompt,
        "with another right answer": pairing.num_other_target,
        "without a usable score": pairing.num_unscored,
        "with two scores": pairing.num_conflicting,
    }
    reasons = [f"{number:,} {words}" for words, number in counts.items() if number]
    if pairing.num_duplicates:
        reasons.append(f"{pairing.num_duplicates:,} rows that repeat a document")
    reasons += [f"{number:,} answers: {why}" for why, number in pairing.whys.items()]
    if reasons:
        yield "left out", "; ".join(reasons)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:+.4f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if value >= 1e-4 else "<0.0001"


def scores_csv(report: ScoresReport) -> str:
    """One row a task of each candidate: the fields of TaskScores, nested ones by their path."""
    rows = [
        {
            "reference_path": report.reference.path,
            "candidate_path": candidate.side.path,
            **_flat(task),
        }
        for candidate in report.candidates
        for task in candidate.tasks
    ]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(task: TaskScores) -> dict[str, object]:
    fields: dict[str, Any] = msgspec.to_builtins(task)
    for name in ("preflight", *task.TEXTS.values()):
        fields.pop(name)
    fields["notes"] = "; ".join(fields["notes"])
    for name in ("pairing", "causes", "run_causes"):
        for key, value in (fields.pop(name) or {}).items():
            if not isinstance(value, list | tuple | dict):
                fields[f"{name}_{key}"] = value
    for band in fields.pop("bands"):
        word = f"band_{100 * band['limit']:g}{'pct' if band['relative'] else 'points'}"
        for key in ("width", "p_value", "equal", "needed"):
            fields[f"{word}_{key}"] = band[key]
    return fields

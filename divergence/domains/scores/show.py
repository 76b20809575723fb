"""A ScoresReport as lines for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from divergence.document import Column, Document, Headline, Section, Sentence, Table, named
from divergence.domains.scores.joining import left_out
from divergence.domains.scores.judging import band_of
from divergence.domains.scores.result import (
    Candidate,
    EvaluationSummary,
    Pairing,
    ScoresReport,
    TaskScores,
)
from divergence.domains.scores.rows import SeriesName
from divergence.facts import fact, sentence
from divergence.words import chance, count, fixed, list_names, printable, signed

_HEADLINES = {
    "equal": ("EQUAL", "bold green"),
    "better": ("BETTER", "bold yellow"),
    "worse": ("WORSE", "bold red"),
    "undecided": ("UNDECIDED", "bold yellow"),
    "incomparable": ("STOPPED", "bold red"),
}
_DETAILED = 3
"""Tasks up to so many are all told in full; of more, those that are not equal."""
_OF_EACH = ("interval", "chance")
"""What stands below the answer of one of several candidates."""


def name_of(task: TaskScores) -> str:
    return str(SeriesName(task.task, task.filter, task.metric))


def headline(candidate: Candidate) -> Headline:
    task = candidate.tasks[0]
    words = candidate.summary
    if len(candidate.tasks) == 1 and task.difference is not None:
        scores = f"{fixed(task.reference, 4)} -> {fixed(task.candidate, 4)}"
        words = f"{name_of(task)} {scores}: {words}"
    word, style = _HEADLINES[candidate.verdict]
    return Headline(word, printable(words), style)


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
        several, is_last = len(candidate.tasks) > 1, candidate is report.candidates[-1]
        table = Section(
            id=f"scores-{number}",
            heading=f"Scores of {candidate.side.path}",
            detail="each score, candidate against reference",
            body=[score_table(candidate)],
        )
        lines = [_side("A", report.reference)] * (verbose or not number)
        lines.append(_side("B", candidate.side))
        brief = not several and not verbose  # the headline has its name and verdict
        for name, text in facts_of(tasks[0]) if brief else ():
            if name != "verdict" and (len(report.candidates) == 1 or name in _OF_EACH):
                lines.append(named(name, text))
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
        alone = [task for task in tasks if task.test == "unpaired" and task.notes]
        notes += [f"{name_of(task)}: {task.notes[0]}" for task in alone[: several and not verbose]]
        notes_shown = [named("note", note) for note in dict.fromkeys(notes)]
        if report.captured is not None and is_last:
            prompts = count(report.captured.num_prompts, "prompt")
            notes_shown.append(named("captured", f"{prompts} recorded in {report.captured.path}"))
        if brief:
            lines, notes_shown = [*lines, *notes_shown], []
        if brief and is_last and candidate.tasks[0].test != "unpaired":
            rest = "every band, every flip, what such scores can tell: add -v"
            lines.append(named("more", rest, "dim"))
        last = Section(id=f"notes-{number}", heading="Notes", body=notes_shown)
        documents.append(
            Document(
                headline=top,
                known=lines,
                sections=[*[table] * (several or verbose), *details, *[last] * bool(notes_shown)],
                next=report.next if is_last else (),
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
    rows: list[tuple[Any, ...]] = []
    for task in candidate.tasks:
        pairing = task.pairing
        figures: tuple[Any, ...] = (None,) * 6
        if task.difference is not None and pairing is not None:
            # of scores as a whole the documents of the side with fewer
            num = pairing.num_paired or min(pairing.num_reference, pairing.num_candidate)
            ends = None if task.low is None else (task.low, task.high)
            scores = task.reference, task.candidate, task.difference
            figures = num or None, *scores, ends, task.p_adjusted
        rows.append((name_of(task), task.verdict, *figures))
    return Table(
        num_left=2,
        columns=(
            "score",
            "verdict",
            Column("n", "{:,}".format),
            Column("A", partial(fixed, digits=4)),
            Column("B", partial(fixed, digits=4)),
            Column("difference", signed),
            Column("95% interval", lambda ends: " to ".join(map(signed, ends))),
            Column("p (Holm)", chance),
        ),
        rows=rows,
        marks=["flagged" if task.verdict == "worse" else "" for task in candidate.tasks],
    )


def facts_of(task: TaskScores, *, verbose: bool = False) -> Iterator[tuple[str, str]]:
    """A name and what it is, of one task."""
    pairing = task.pairing

    def shown(name: str, code: str, **values: Any) -> tuple[str, str]:
        values = asdict(task) | values
        return name, sentence(fact(f"evaluations.shown_{code}", **values))

    yield "verdict", task.summary
    if pairing is None:
        return
    if task.difference is None:
        yield from _left_out(pairing)
        return
    yield shown("score", "score")
    first, second = pairing.repeats
    clusters = None if pairing.num_clusters == pairing.num_paired else pairing.num_clusters
    answers = {"answers": max(first, second) > 1, "first": first, "second": second}
    documents = asdict(pairing) | answers | {"clusters": clusters}
    unpaired = task.test == "unpaired"
    if not unpaired or task.standard_error is not None:
        yield shown("interval", "interval_unpaired" if unpaired else "interval", **documents)
        adjusted = None if task.p_adjusted == task.p_value else task.p_adjusted
        yield shown("chance", "chance", p_adjusted=adjusted)
        for band in task.bands if unpaired or verbose else ():
            yield shown("band", "band", **asdict(band), band=band_of(band))
    if unpaired:
        yield from _notes(task, verbose=False)
        return
    if verbose:
        yield shown("can tell", "can_tell")
    num_paired = None if task.num_changed is None else pairing.num_paired
    if task.graded:
        # of a better score that is lower, num_lost counts those that rose
        fell, rose = (task.num_lost, task.num_gained)[:: 1 if task.higher_is_better else -1]
        yield shown("changes", "changes", fell=fell, rose=rose, num_paired=num_paired)
    else:
        yield shown("flips", "flips", num_paired=num_paired)
    if task.causes is not None:
        yield shown("why", "why", **asdict(task.causes), verbose=verbose)
    if (causes := task.run_causes) is not None:
        yield shown("in the runs", "in_runs", num=len(causes.flips), **asdict(causes))
        for flip in causes.flips[: None if verbose else _DETAILED]:
            margins = None not in (flip.reference_margin, flip.candidate_margin)
            tokens = f"{flip.reference!r} over {flip.candidate!r}" if margins else None
            yield shown("flip", "flip", **asdict(flip), tokens=tokens)
        for note in causes.notes:
            yield "note", note
    yield from _left_out(pairing)
    yield from _notes(task, verbose=verbose)


def _notes(task: TaskScores, *, verbose: bool) -> Iterator[tuple[str, str]]:
    for note in task.notes:
        yield "note", note
    for check in task.preflight:
        if check.status == "blocking" or (verbose and check.status != "same"):
            detail = check.detail or f"{check.reference} / {check.candidate}"
            yield "preflight", f"{check.check} {check.status}: {detail}"


def _left_out(pairing: Pairing) -> Iterator[tuple[str, str]]:
    reasons = [item for items in left_out(pairing).values() for item in items if item["num"]]
    if reasons:
        yield "left out", sentence(fact("evaluations.parts", parts=reasons))


def scores_csv(report: ScoresReport) -> str:
    """One row a task of each candidate: the fields of TaskScores, nested ones by their path."""
    rows = []
    for candidate in report.candidates:
        paths = {"reference_path": report.reference.path, "candidate_path": candidate.side.path}
        rows += [paths | _flat(task) for task in candidate.tasks]
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

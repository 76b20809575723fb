"""A run against itself: its decode steps with the cache against its whole pass.

A decode step must compute what one forward over the whole sequence computes for that token.
The whole pass made that forward, each block getting the inputs that the free pass recorded,
so its row of a token is the reference and the free pass's decode step of that token the
candidate, judged like an anchored pair: what differs at a block's output was made in it, by
the cache or state, or by the kernel of the other shape. Which of the two is right it does not
tell; where a cache is meant to be exact, the step is wrong.

Only tensors whose rows are tokens (axis 1) have a row to compare. Others are skipped by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from divergence.comparison.advice import WithinAdvice
from divergence.comparison.align import Alignment, Pair, Piece, is_given, run_notes, why_nothing
from divergence.comparison.analysis import Measured
from divergence.comparison.measure.pairs import Measuring, measure_tensors
from divergence.comparison.preflight import preflight
from divergence.comparison.result import Report, Skipped
from divergence.errors import IncomparableError, UsageError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import Thresholds
from divergence.run.command import command_line
from divergence.run.manifest import Tokens
from divergence.run.reader import Run
from divergence.run.record import Record


def compare_within(run: Run, thresholds: Thresholds, measuring: Measuring) -> Measured:
    """Measure each decode step's rows against the whole pass's rows of the same tokens.

    Raises UsageError where the run has no whole pass, IncomparableError where the two share no row.
    """
    whole = {(r.sample, r.site): r for r in run.records if r.pass_ == "whole"}
    if not whole:
        encodes = run.manifest.model.task.startswith("encoder")
        alone = encodes or not any(record.step for record in run.records)
        made = [command.text for command in WithinAdvice(run).whole()]
        raise UsageError(
            f"{run.path} alone has nothing to compare: a run's decode steps are held against its "
            f"own pass over the whole sequence, and {'an encoder' if encodes else 'it'} has none"
            if alone
            else f"{run.path} holds no whole pass, so there is nothing to compare its decode steps "
            "with",
            hint=(
                command_line("compare", run.path, "OTHER", note="with a second run"),
                *([] if alone else made),
                *[command_line("compare", run.path, run.path, note="its ranks against one another")]
                * bool(run.manifest.mesh),
            ),
        )
    # a pair for each decode step's tensor of which the whole pass holds the same tokens' rows
    tokens = run.manifest.tokens
    members = {group[0]: group for group in tokens.groups}
    pairs: list[Pair] = []
    skipped: list[Skipped] = []
    used: set[tuple[int, str]] = set()
    for record in run.records:
        if record.pass_ != "free" or record.step == 0:
            continue
        key = (record.sample, record.site)
        other = whole.get(key)
        if other is None and is_given(run.manifest, record.site):
            continue  # an input that the whole pass took from this very record
        used.add(key)
        absent = fact("align.not_in_whole")
        reason = absent if other is None else _no_row(tokens, other, record)
        if other is None or reason is not None:
            skipped.append(Skipped(*record.coordinates, "candidate", reason))
            continue
        pairs += _pairs(tokens, other, record, members[record.sample])
    alignment = Alignment(
        pairs=sorted(pairs, key=_order),
        only_reference=[
            Skipped(*record.coordinates, "reference", fact("align.not_in_steps"))
            for key, record in whole.items()
            if key not in used
        ],
        only_candidate=[],
        skipped=skipped,
        prefix=None,
        anchored=True,
        notes=[fact("align.whole_and_free", run=str(run.path))],
    )
    if not alignment.pairs:
        raise IncomparableError(
            "nothing was compared: the decode steps and the whole pass share no rows of tokens",
            where=str(run.path),
            hint=sentence(why_nothing(alignment)),
        )
    # measured as an anchored pair is
    measured = measure_tensors(
        run, run, alignment, inputs=run, thresholds=thresholds, measuring=measuring
    )
    return replace(
        measured,
        alignment=replace(alignment, notes=[]),
        preflight=preflight(run, run),
        advice=WithinAdvice(run),
        missing=len(alignment.unmatched),
        notes=run_notes(run, run, alignment),
    )


def explain_within(report: Report) -> Report:
    """The report with what was compared in front; one run is made again in float32 where two would
    be escalated."""
    evidence, headline = (
        [item.with_values(within=True) if item["within"] is False else item for item in facts]
        for facts in (report.verdict.evidence, report.verdict.headline)
    )
    verdict = msgspec.structs.replace(
        report.verdict, headline=[fact("whole_pass"), *headline], evidence=evidence
    )
    return msgspec.structs.replace(report, verdict=verdict)


def _pairs(tokens: Tokens, whole: Record, record: Record, group: list[int]) -> Iterator[Pair]:
    """One pair for each sample of the batch, or one for what all of them share."""
    token = _token(tokens, record)
    row = token if whole.positions is None else whole.positions.index(token)
    for index, number in enumerate(group[: record.shape[0]]):
        pads = tokens.samples[number].num_left_pad
        yield Pair(
            reference=Piece(whole, number, index, row, row + 1, pads),
            candidate=Piece(record, number, index, 0, 1, pads),
            pass_="anchored",
            match="exact",
        )


def _no_row(tokens: Tokens, whole: Record, record: Record) -> Fact | None:
    """Say why a decode step's tensor is no row of the whole pass's, or None."""
    sample = tokens.samples[record.sample]
    length = sample.num_left_pad + len(sample.prompt_ids) + len(sample.generated_ids) - 1
    group = tokens.group_of(record.sample)
    full, step = whole.shape, record.shape
    if (
        min(len(full), len(step)) < 2
        or (full[0], full[2:]) != (step[0], step[2:])
        or step[1] != 1
        or full[0] not in (1, len(group))
        or (whole.positions is None and full[1] != length)
    ):
        return fact("align.rows_are_no_tokens", whole=full, step=step)
    if whole.positions is not None and _token(tokens, record) not in whole.positions:
        return fact("align.token_not_in_whole")
    return None


def _token(tokens: Tokens, record: Record) -> int:
    """Index in the padded sequence of the token that a decode step was fed."""
    sample = tokens.samples[record.sample]
    return sample.num_left_pad + len(sample.prompt_ids) + record.step - 1


def _order(pair: Pair) -> tuple[int, int, int, int]:
    record = pair.candidate.record
    return (record.sample, record.step, pair.reference.record.order, pair.candidate.sample)

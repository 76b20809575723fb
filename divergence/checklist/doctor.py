"""doctor(): two runs → a Checkup: eight points to settle, and a ladder of causes.

Nothing is measured here that `compare` does not measure. It is asked first, and its verdict stands;
where it stops early, at other tokens or other weights, the checklist tells what to settle.

The rungs are tokens, weights, code, prefill, decode, sampling, ranks. Each may explain all those
below it, so the ladder stops at the first that does. What it says of numbers is what compare says:
where that abstains the rung is unknown, for compare's own reason. A rung that differs without
explaining what was found fails too, and the ladder goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from divergence._version import __version__
from divergence.checklist.points import (
    CheckedPair,
    Said,
    code,
    phase,
    points_of,
    precision,
    ranks,
    sampling,
    settings_differ,
    tokens,
    weights,
    worst,
)
from divergence.checklist.result import Checkup, Rung, RungName
from divergence.comparison.advice import Advice
from divergence.comparison.align.pairs import load_name_map
from divergence.comparison.api import compare
from divergence.comparison.measure.runs import opened
from divergence.comparison.preflight.lines import CPU_OPERATORS, preflight
from divergence.comparison.result import summary_of
from divergence.errors import IncomparableError, UsageError
from divergence.facts import Fact, apart, fact, sentence, worded
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.site import LOGPROBS
from divergence.words import Progress, printable

_TOLD = frozenset(
    {
        "code", "weights", "blocks", "model class", "config", "quantization", "prompt ids",
        "tokenizer", "chat template", "generated ids", "dtype", "attention", "determinism",
        "repeatability", "engine", CPU_OPERATORS, "substituted operators", "ranks",
        "planted faults", "completeness",
    }
)  # fmt: skip
"""Lines of preflight that a point, a rung or a note of its own tells of."""


def doctor(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    *,
    name_map: str | Path | None = None,
    truth: str | Path | Run | None = None,
    floor: str | Path | Run | Sequence[str | Path | Run] = (),
    progress: Progress | None = None,
) -> Checkup:
    """Compare two runs of a model, and lay out what is known as a checklist and a ladder of causes.

    The options are those of ``compare``, and so is the verdict.

    Raises RunFormatError for unreadable runs, and UsageError for runs of operators alone and for a
    truth or a floor that belongs to other runs.
    """
    a, b = opened(reference), opened(candidate)
    for run in (a, b):
        if run.manifest.model.task == "operators":
            raise UsageError(
                f"doctor is for runs of models, and {run.path} is one of operators alone",
                hint=command_line("compare", a.path, b.path),
            )
        if run.manifest.plan.sites == [LOGPROBS]:
            raise UsageError(
                f"doctor is for runs of models, and {run.path} holds log-probabilities alone",
                hint=command_line("compare", a.path, b.path),
            )
    report, reason = None, ""
    try:
        report = compare(a, b, name_map=name_map, truth=truth, floor=floor, progress=progress)
        lines = report.preflight
    except IncomparableError as error:
        names = None if name_map is None else load_name_map(name_map)
        lines, reason = preflight(a, b, names=names), error.message
    pair = CheckedPair(
        a=a, b=b, lines={line.check: line for line in lines}, report=report, reason=reason
    )
    rungs, stop = ladder_of(pair)
    checkup = worded(
        Checkup(
            tool_version=__version__,
            reference=summary_of(a),
            candidate=summary_of(b),
            verdict=pair.verdict,
            reason=reason or None,
            points=points_of(pair),
            ladder=rungs,
            explained_by=stop,
            facts=_notes(pair),
        )
    )
    # texts that add no line and no escape code, whatever a run is called
    points, ladder = (
        [replace(row, evidence=printable(row.evidence)) for row in rows]
        for rows in (checkup.points, checkup.ladder)
    )
    notes = list(map(printable, checkup.notes))
    return replace(checkup, points=points, ladder=ladder, notes=notes)


def _notes(pair: CheckedPair) -> list[Fact]:
    notes = []
    for side, manifest in zip(("reference", "candidate"), pair.manifests, strict=True):
        if manifest.plan.plants:
            notes.append(fact("checklist.planted", side=side, plants=manifest.plan.plants))
        if not manifest.complete:
            why = manifest.stopped_by or None
            notes.append(fact("checklist.incomplete", side=side, why=why))
    verdict = pair.verdict
    if verdict is not None and verdict.kind == "identical" and verdict.side == "both":
        notes.append(fact("checklist.equally_wrong"))
    other = [
        line.check
        for line in pair.lines.values()
        if line.status == "differs" and line.check not in _TOLD
    ]
    if other:
        notes.append(fact("checklist.other_settings", num=len(other), checks=other))
    return notes


def ladder_of(pair: CheckedPair) -> tuple[list[Rung], RungName | None]:
    """All seven rungs, in order, and the one at which the ladder stops."""
    asks: dict[RungName, Callable[[CheckedPair], Said]] = {
        "tokens": _tokens, "weights": _weights, "code": code,
        "prefill": partial(phase, decode=False), "decode": partial(phase, decode=True),
        "sampling": sampling, "ranks": ranks,
    }  # fmt: skip
    rungs: list[Rung] = []
    stop: RungName | None = None
    for name, ask in asks.items():
        title = sentence(fact(f"checklist.rung_{name}"))
        if stop is not None:
            facts = [fact("checklist.explained_by", rung=stop)]
            rungs.append(Rung(name=name, title=title, state="not_reached", facts=facts))
            continue
        state, evidence, explains = ask(pair)
        rungs.append(
            Rung(
                name=name, title=title, state=state, explains=explains, facts=list(evidence),
                next=_next(name, pair) if state == "fail" else None,
            )
        )  # fmt: skip
        stop = name if explains else None
    return rungs, stop


def _tokens(pair: CheckedPair) -> Said:
    state, evidence = tokens(pair)
    return state, evidence, state == "fail"


def _weights(pair: CheckedPair) -> Said:
    """Other values make another computation. Another precision of the same values is allowed for
    in every limit, so it explains what is within them."""
    (state, details), (same, how) = weights(pair), precision(pair)
    evidence = apart([how, *details])
    if state == "fail":
        return "fail", evidence, True
    verdict = pair.verdict
    if same == "fail" and not (verdict is not None and verdict.kind == "identical"):
        within = verdict is not None and verdict.kind == "within_floor"
        return "fail", evidence, within
    if same == "fail":  # and every bit is equal
        same = "pass"
    return worst(state, same), evidence, False


def _next(name: RungName, pair: CheckedPair) -> str:
    if name in ("tokens", "weights") or (name == "code" and settings_differ(pair)):
        return Advice(pair.a, pair.b).alike().text
    if pair.verdict is not None and pair.verdict.commands:
        return pair.verdict.commands[0].alone
    return command_line("compare", pair.a.path, pair.b.path, verbose=True)

"""Two runs of which one or both hold log-probabilities alone: the whole report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from divergence.analyses.logprobs.find import find
from divergence.analyses.logprobs.measure import (
    are_drawn,
    decoding_line,
    expert_of,
    has_experts,
    joined,
    layers_of,
    measure,
    of_drawn,
    with_layers,
)
from divergence.analyses.logprobs.pairs import PromptPair, facts_of, pair_runs, prompt_line
from divergence.analyses.logprobs.pattern import pattern_of, scale_of
from divergence.comparison.analysis import report_of
from divergence.comparison.preflight.lines import preflight
from divergence.comparison.result import Report, summary_of
from divergence.comparison.results import Coverage, Finding, PreflightLine, PreflightStatus
from divergence.errors import UsageError
from divergence.facts import Fact, fact, plain
from divergence.run.manifest import UNKNOWN
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT
from divergence.run.site import LOGPROBS, one_or_more
from divergence.words import Progress, Side

_SHOWN = ("tokenizer", "chat template", "complete")
"""Lines of preflight that mean something to a side of which nothing else is known."""


def report_on(
    a: Run,
    b: Run,
    *,
    truth: Run | None,
    floor: str | Path | Run | Sequence[str | Path | Run],
    layers: Sequence[Run],
    progress: Progress | None,
) -> Report:
    """Raises UsageError for a truth, a model's run without logits, or layers of other runs."""
    if truth is not None:
        raise UsageError(
            "--truth means nothing to log-probabilities alone: no block was seen",
            hint="compare the float64 run itself: divergence compare TRUTH RUN",
        )
    floors = [Run.open(source) for source in one_or_more(floor)]
    pairs = pair_runs(a, b)
    lines = _preflight(pairs, a, b)
    blocking = [line for line in lines if line.status == "blocking"]
    if blocking:
        return _stopped(a, b, lines, blocking[0])
    scale = scale_of(a, b, floors)
    experts = has_experts([a, b, *layers])
    pattern = pattern_of(pairs, scale, experts=experts)
    result = measure(pairs, pattern, scale, a, b)
    if layers:
        shown = layers_of(pairs, with_layers(a, b, layers), progress)
        result = replace(result, layers=shown)
    result = replace(result, expert=expert_of(pairs, [a, b, *layers]))
    whole = a.manifest.complete and b.manifest.complete and not result.num_other
    finding = find(result, pairs, pattern, scale, whole=whole, experts=experts)
    if are_drawn(a, b):
        finding = of_drawn(finding, result.texts, pairs)
    if result.layers is not None:
        finding = joined(finding, result.layers)
    compared = sum(len(pair.rows) for pair in pairs)
    coverage = Coverage(
        num_compared=compared, num_only_reference=_alone(pairs, 0),
        num_only_candidate=_alone(pairs, 1),
    )  # fmt: skip
    return report_of(a, b, finding, coverage, lines, notes=_notes(a, b), logprobs=result)


def _alone(pairs: list[PromptPair], side: int) -> int:
    """Tokens that one side alone scored, or scored after other text."""
    sides = (pair.candidate if side else pair.reference for pair in pairs)
    return sum(len(sequence.rows) for sequence in sides) - sum(len(pair.rows) for pair in pairs)


def _preflight(pairs: list[PromptPair], a: Run, b: Run) -> list[PreflightLine]:
    lines = [line for line in preflight(a, b) if line.check in _SHOWN]
    dtypes = [summary_of(run).dtype.removeprefix("torch.") for run in (a, b)]
    known = UNKNOWN not in dtypes
    status: PreflightStatus = (
        "unknown" if not known else "same" if dtypes[0] == dtypes[1] else "differs"
    )
    dtype = PreflightLine(check="dtype", status=status, reference=dtypes[0], candidate=dtypes[1])
    names = [_engine(run) for run in (a, b)]
    same: PreflightStatus = "same" if names[0] == names[1] else "differs"
    engine = PreflightLine(check="engine", status=same, reference=names[0], candidate=names[1])
    return [prompt_line(pairs, a, b), decoding_line(a, b), dtype, engine, *lines]


def _engine(run: Run) -> str:
    """Its name, and its version where that is known."""
    note = run.manifest.engine
    if note is None:
        return "transformers"
    return note.name if note.version in ("", UNKNOWN) else f"{note.name} {note.version}"


def _stopped(a: Run, b: Run, lines: list[PreflightLine], line: PreflightLine) -> Report:
    what = line.details or [
        fact("logprobs.against", reference=line.reference, candidate=line.candidate)
    ]
    if line.detail:
        what = [plain(line.detail)]
    finding = Finding(
        claim="other_experiment", kind="incomparable",
        headline=[fact("logprobs.not_asked_the_same", what=what)],
        evidence=[fact("logprobs.check", check=line.check, what=what)],
    )  # fmt: skip
    return report_of(a, b, finding, Coverage(num_compared=0), lines, notes=_notes(a, b))


def _notes(a: Run, b: Run) -> list[Fact]:
    notes: list[Fact] = []
    sides: tuple[tuple[Side, Run], ...] = (("reference", a), ("candidate", b))
    for side, run in sides:
        facts = facts_of(run)
        if other := facts.get("answers as"):
            model = run.manifest.model.source
            notes.append(fact("logprobs.answers_as", side=side, model=model, answers_as=other))
        # what a server lacks stands in the run in words
        lacks = [text for text in facts.get("lacks", "").split("; ") if text]
        notes += [fact("logprobs.side_lacks", side=side, what=plain(text)) for text in lacks]
        if facts.get("token ids") == BY_TEXT:
            notes.append(fact("logprobs.by_text", side=side))
    if all(run.manifest.plan.sites == [LOGPROBS] for run in (a, b)):
        notes.append(fact("logprobs.no_layer"))
    return notes

"""Flips joined to two runs of their prompts: do the runs answer as the evaluations did, and by how
much did the answer's margin move between them?

The runs are those that ``scores --capture`` and then ``capture --like`` wrote. A document is found
in them by its prompt's tokens. Its answer token is

    of multiple choice     the first token of A's choice against that of B's, at step 0
    of a generated answer  the first token where both runs' greedy choices part

and the margin, in nats, is the difference of both tokens' log-probabilities. By the limit L that
flips.py has for the runs' dtype a flip is

    a real shift    the margin falls by more than L, from no less than -L in A's run to no more
                    than L in B's
    a near tie      it lies within L of 0 in both runs, on whichever side: what the runs do not
                    repeat of the evaluation, such as its batches, rounds it either way
    not reproduced  else: the flip came from sampling, another prompt, other weights
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from divergence.comparison.align.pieces import logits_row
from divergence.errors import PromptError, UsageError
from divergence.evaluations.flips import OF_ALL, explained, flips_of
from divergence.evaluations.formats import lm_eval, prompts_of
from divergence.evaluations.pairing import Pairs
from divergence.evaluations.result import Candidate, FlipCauses, RunCauses, RunFlip
from divergence.evaluations.rows import Evaluation, ScoreRow, Series, SeriesName
from divergence.facts import Fact, fact
from divergence.recording.prompts import Prompt, tokenize
from divergence.run.reader import Run
from divergence.words import Side

__all__ = ["joined"]

_Ids = tuple[int, ...]


class _Answer(NamedTuple):
    """A's token and B's, at a step. ``weights``: of their log-probabilities in the metric.
    ``whole``: no other token belongs to either answer. ``logged``: the margin by each side's own
    log."""

    step: int
    tokens: tuple[int, int]
    weights: tuple[float, float] = (1.0, 1.0)
    whole: bool = True
    logged: tuple[float, float] | None = None


class _Joint:
    """Both runs, with what turns a document's prompt into their samples."""

    def __init__(self, runs: Sequence[str | Path | Run]) -> None:
        if len(runs) != 2:
            raise UsageError("--runs takes two runs, A's and B's", hint="--runs flips flips-b")
        self.runs = Run.open(runs[0]), Run.open(runs[1])
        reference, other = self.runs
        if reference.manifest.id == other.manifest.id:
            raise UsageError("both runs are the same one, so nothing is joined",
                             where=str(other.path), hint="--runs flips flips-b")  # fmt: skip
        self.places: list[dict[_Ids, int]] = [{}, {}]
        self.texts: dict[str, _Ids] = {}
        for run, places in zip(self.runs, self.places, strict=True):
            for number, sample in enumerate(run.manifest.tokens.samples):
                places.setdefault(tuple(sample.prompt_ids), number)
                if run is reference and sample.text:
                    self.texts.setdefault(sample.text, tuple(sample.prompt_ids))
        self.tokenizer = _tokenizer(self.runs)
        dtypes = [run.manifest.model.dtype.removeprefix("torch.") for run in self.runs]
        self.dtypes = dtypes[0], dtypes[1]

    def ids(self, prompt: Prompt) -> _Ids | None:
        """Of text, as the run has it; of chat by the tokenizer."""
        if prompt.text in self.texts:
            return self.texts[prompt.text]
        if self.tokenizer is None:
            return None
        try:
            (sample,) = tokenize([prompt], self.tokenizer, chat=False)
        except PromptError:
            return None
        return tuple(sample.prompt_ids)

    def samples(self, ids: _Ids | None) -> tuple[int, int] | None:
        """The prompt's number in each run."""
        if ids is None or not all(ids in places for places in self.places):
            return None
        return self.places[0][ids], self.places[1][ids]


def _tokenizer(runs: Sequence[Run]) -> Any:
    """That of the model of either run, where it is here and is the one that was recorded."""
    from divergence.recording.engines.identity import tokenizer_digest
    from divergence.recording.engines.load import load_tokenizer

    for model in (run.manifest.model for run in runs):
        if model.tokenizer_digest is None:
            continue
        tokenizer = load_tokenizer(model.source, revision=model.revision, trust_remote_code=False)
        if tokenizer is not None and tokenizer_digest(tokenizer) == model.tokenizer_digest:
            return tokenizer
    return None


def joined(
    candidate: Candidate, side: Evaluation, dtype: str | None,
    paired: Mapping[SeriesName, tuple[Series, Pairs]], runs: Sequence[str | Path | Run],
) -> Candidate:  # fmt: skip
    """The candidate with what both runs tell of its flips. ``dtype``: what it was evaluated in.

    Raises UsageError where nothing flipped, or the runs hold no prompt that did."""
    joint = _Joint(runs)
    tasks = []
    for task in candidate.tasks:
        series_pairs = paired.get(SeriesName(task.task, task.filter, task.metric))
        causes = None
        if series_pairs is not None and task.difference is not None:
            causes = _causes(side, *series_pairs, joint, task.causes, (side.dtype, dtype))
        tasks.append(replace(task, run_causes=causes))
    if not any(task.run_causes for task in tasks):
        flips = any(task.num_lost or task.num_gained for task in tasks)
        raise UsageError(
            "the runs hold none of the prompts whose scores flipped" if flips
            else "no score flipped, so there is nothing to look for in runs",
            where="--runs", hint="divergence scores A B --capture MODEL -o RUN records them",
        )  # fmt: skip
    return replace(candidate, tasks=tasks)


def _causes(
    side: Evaluation, series: Series, pairs: Pairs, joint: _Joint, causes: FlipCauses | None,
    dtypes: Sequence[str | None],
) -> RunCauses | None:  # fmt: skip
    """None where nothing flipped, or no flip's prompt is in both runs."""
    numbers = flips_of(pairs)
    places = {pairs.rows[number][0].place for number in numbers}
    prompts = prompts_of(side.format, series, places)
    judged = side.format == "lm-eval" and any(pairs.rows[n][0].choices for n in numbers)
    asked = lm_eval.asked(series, places) if judged else {}
    limit, source = explained(joint.dtypes)
    # the documents' own shifts are a finer limit, and hold for runs in the same dtypes
    if causes is not None and causes.source == OF_ALL and tuple(dtypes) == joint.dtypes:
        limit, source = min(limit, causes.limit), OF_ALL
    flips: list[RunFlip] = []
    shares: Counter[str] = Counter()
    off: tuple[list[float], list[float]] = [], []
    for number in numbers:
        first, second = pairs.rows[number]
        prompt = prompts.get(first.place)
        samples = None if prompt is None else joint.samples(joint.ids(prompt))
        if samples is None:
            continue
        if first.choices is not None and second.choices is not None:
            answer: _Answer | Fact | None = _chosen(
                asked[first.place], (first, second), series.name.metric, joint
            )
        else:
            answer = _parted(joint.runs, samples)
        flip = _judged(first.document, answer, joint, samples, limit)
        flips.append(flip)
        if isinstance(answer, _Answer) and answer.whole and answer.logged is not None:
            margins = flip.reference_margin, flip.candidate_margin
            for side_off, margin, logged in zip(off, margins, answer.logged, strict=True):
                if margin is not None:
                    side_off.append(abs(margin - logged))
        shares[flip.judgement] += pairs.candidate[number] - pairs.reference[number]
    if not flips:
        return None
    count, (reference, other) = Counter(flip.judgement for flip in flips), joint.runs
    return RunCauses(
        reference=str(reference.path), candidate=str(other.path), limit=limit, source=source,
        num_flips=len(numbers), num_ties=count["tie"], num_shifts=count["shift"],
        num_not_reproduced=count["not_reproduced"], num_not_told=count["not_told"],
        difference_of_ties=float(shares["tie"]) / len(pairs.rows),
        difference_of_shifts=float(shares["shift"]) / len(pairs.rows), flips=flips,
        remarks=_remarks(joint, dtypes) + _strange(off, limit),
    )  # fmt: skip


_SIDES: tuple[Side, Side] = ("reference", "candidate")


def _remarks(joint: _Joint, dtypes: Sequence[str | None]) -> list[Fact]:
    """Runs in another dtype than what was evaluated say less of it."""
    return [
        fact("evaluations.run_dtype", side=side, run_dtype=run_dtype, dtype=dtype)
        for side, run_dtype, dtype in zip(_SIDES, joint.dtypes, dtypes, strict=True)
        if dtype is not None and run_dtype != dtype
    ]


def _strange(off: tuple[list[float], list[float]], limit: float) -> list[Fact]:
    """A run whose margins are not those of its side's own log ran something else."""
    medians = [statistics.median(distances) if distances else 0.0 for distances in off]
    return [
        fact("evaluations.run_off", side=side, nats=median)
        for side, median in zip(_SIDES, medians, strict=True)
        if not median <= limit
    ]


def _judged(
    document: str, answer: _Answer | Fact | None, joint: _Joint, samples: tuple[int, int],
    limit: float,
) -> RunFlip:  # fmt: skip
    told = RunFlip(document=document, sample=samples[0], step=0, judgement="not_told")
    if isinstance(answer, Fact):
        return replace(told, reason=answer)
    if answer is None:
        same = fact("evaluations.no_token_differs")
        return replace(told, judgement="not_reproduced", reason=same)
    names = [_text(joint, token) for token in answer.tokens]
    told = replace(told, step=answer.step, reference=names[0], candidate=names[1])
    a, b = (_margin(run, sample, answer) for run, sample in zip(joint.runs, samples, strict=True))
    if a is None or b is None:
        return replace(told, reason=fact("evaluations.no_logits"))
    if not math.isfinite(a) or not math.isfinite(b):
        return replace(told, judgement="shift", reason=fact("evaluations.nonfinite_logits"))
    told = replace(told, reference_margin=a, candidate_margin=b)
    if a - b > limit and a >= -limit and b <= limit:
        return replace(told, judgement="shift")
    if max(abs(a), abs(b)) <= limit:
        return replace(told, judgement="tie")
    if not answer.whole:
        return replace(told, reason=fact("evaluations.several_tokens"))
    return replace(told, judgement="not_reproduced")


def _text(joint: _Joint, token: int) -> str:
    if joint.tokenizer is not None:
        return str(joint.tokenizer.decode([token]))
    texts = (run.manifest.tokens.texts.get(str(token)) for run in joint.runs)
    return next((text for text in texts if text is not None), f"#{token}")


def _margin(run: Run, sample: int, answer: _Answer) -> float | None:
    row = logits_row(run, sample, answer.step)
    if row is None or max(answer.tokens) >= len(row):
        return None
    logprob, other = row.double().log_softmax(-1)[list(answer.tokens)].tolist()
    return float(answer.weights[0] * logprob - answer.weights[1] * other)


def _parted(runs: tuple[Run, Run], samples: tuple[int, int]) -> _Answer | None:
    """The first different greedy choice; None where there is none."""
    ids, other = (
        run.manifest.tokens.samples[sample].chosen_ids
        for run, sample in zip(runs, samples, strict=True)
    )
    both = enumerate(zip(ids, other, strict=False))
    return next((_Answer(step, tokens) for step, tokens in both if tokens[0] != tokens[1]), None)


def _chosen(
    asked: tuple[str, list[str]], rows: tuple[ScoreRow, ScoreRow], metric: str, joint: _Joint
) -> _Answer | Fact:
    """The first tokens of A's choice and of B's, or why they are not known."""
    context, texts = asked
    if joint.tokenizer is None:
        return fact("evaluations.no_tokenizer")
    before = joint.ids(Prompt(text=context)) or ()
    tails, weights = [], []
    mine, theirs = (row.choices or () for row in rows)
    numbers = mine.index(max(mine)), theirs.index(max(theirs))
    for text in (texts[number] for number in numbers):
        ids = joint.ids(Prompt(text=context + text)) or ()
        if ids[: len(before)] != before or len(ids) == len(before):
            return fact("evaluations.begins_in_prompt")
        tails.append(ids[len(before) :])
        weights.append(lm_eval.weight(metric, text))
    if tails[0][0] == tails[1][0]:
        return fact("evaluations.same_token")
    whole = all(len(tail) == 1 for tail in tails)
    margin, other = (choices[numbers[0]] - choices[numbers[1]] for choices in (mine, theirs))
    tokens = tails[0][0], tails[1][0]
    return _Answer(0, tokens, (weights[0], weights[1]), whole, (margin, other))

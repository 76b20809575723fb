"""Two evaluations joined: documents paired, and why choices between answers flipped."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from divergence.comparison.align import logits_row
from divergence.comparison.result import PreflightLine, PreflightStatus
from divergence.domains.scores.formats import lm_eval, prompts_of
from divergence.domains.scores.result import (
    Candidate,
    Captured,
    FlipCauses,
    Pairing,
    RunCauses,
    RunFlip,
)
from divergence.domains.scores.rows import Evaluation, ScoreRow, Series, SeriesName
from divergence.errors import PromptError, UsageError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import LOGPROB_LIMIT_BY_DTYPE, LOGPROB_LIMIT_WIDEST
from divergence.numerics.logits import log_softmax
from divergence.recording.prompts import Prompt, tokenize
from divergence.run.foreign import DumpFolder
from divergence.run.reader import Run
from divergence.words import Progress, Side

# Two series of one task, document by document.
#
# A pair is one document with a usable score on both sides, asked in the same words, with the same
# right answer. Everything else is counted and is in no number. A document's score is the mean of
# its repeats: repeats are no documents of their own, so they make a score surer and n no larger.

_DIGITS = 1e-6


@dataclass(frozen=True, slots=True)
class Pairs:
    """Holds both scores of each paired document, its cluster, one row of each side."""

    pairing: Pairing
    reference: np.ndarray
    candidate: np.ndarray
    clusters: np.ndarray | None
    """None where each document is its own."""
    rows: list[tuple[ScoreRow, ScoreRow]]
    same_order: bool
    single: bool
    """One answer a document, on both sides."""

    @property
    def binary(self) -> bool:
        """Are all scores 0 or 1?"""
        values = np.concatenate([self.reference, self.candidate])
        return bool(np.isin(values, (0.0, 1.0)).all())


@dataclass(slots=True)
class _Side:
    """One side's documents: the rows of each that have a score."""

    scored: dict[str, list[ScoreRow]]
    unscored: set[str]
    duplicates: int
    conflicting: set[str]
    whys: Counter[Fact]

    @property
    def num_documents(self) -> int:
        return len(self.scored) + len(self.unscored) + len(self.conflicting)


def pair(a: Series, b: Series, *, force: bool = False) -> Pairs:
    """``force``: also pairs documents that were asked in other words."""
    reference, other = _side(a.rows), _side(b.rows)
    rows: list[tuple[ScoreRow, ScoreRow]] = []
    scores: list[tuple[float, float]] = []
    num_prompt = num_target = num_answers = num_other_answers = 0
    for document, row in reference.scored.items():
        partner = other.scored.get(document)
        if partner is None:
            continue
        first, second = row[0], partner[0]
        if _differ(first.target, second.target) and not force:
            num_target += 1
            continue
        if _differ(first.prompt, second.prompt) and not force:
            num_prompt += 1
            continue
        rows.append((first, second))
        scores.append((_mean(row), _mean(partner)))
        num_answers, num_other_answers = num_answers + len(row), num_other_answers + len(partner)
    num = len(rows)
    values = np.array(scores, dtype=float).reshape(num, 2)
    # a number for each document; one without a name is a cluster of its own
    numbers: dict[str | int, int] = {}
    members = [
        numbers.setdefault(first.cluster or second.cluster or place, len(numbers))
        for place, (first, second) in enumerate(rows)
    ]
    clusters = None if len(numbers) == num else np.array(members)
    conflicting = reference.conflicting | other.conflicting
    unscored = (reference.unscored | other.unscored) - conflicting
    lost = unscored | conflicting
    pairing = Pairing(
        num_paired=num,
        num_clusters=num if clusters is None else int(clusters.max()) + 1,
        num_reference=reference.num_documents,
        num_candidate=other.num_documents,
        num_reference_only=len(reference.scored.keys() - other.scored.keys() - lost),
        num_candidate_only=len(other.scored.keys() - reference.scored.keys() - lost),
        num_other_prompt=num_prompt,
        num_other_target=num_target,
        num_unscored=len(unscored),
        num_duplicates=reference.duplicates + other.duplicates,
        num_conflicting=len(conflicting),
        repeats=(num_answers / num, num_other_answers / num) if num else (0.0, 0.0),
        whys={sentence(why): count for why, count in (reference.whys + other.whys).items()},
    )
    positions = {document: number for number, document in enumerate(other.scored)}
    order = [positions[second.document] for _, second in rows]
    return Pairs(
        pairing,
        values[:, 0],
        values[:, 1],
        clusters,
        rows,
        same_order=all(x < y for x, y in itertools.pairwise(order)),
        single=num_answers == num_other_answers == num,
    )


def _side(rows: list[ScoreRow]) -> _Side:
    by_answer: dict[tuple[str, int], ScoreRow] = {}
    side = _Side({}, set(), 0, set(), Counter())
    for row in rows:
        chosen = by_answer.setdefault((row.document, row.repeat), row)
        if chosen is not row:
            same = chosen.score == row.score and not _differ(chosen.prompt, row.prompt)
            side.duplicates += same
            if not same:
                side.conflicting.add(row.document)
            continue
        if row.score is None:
            side.whys[row.why or fact("evaluations.without_score")] += 1
            side.unscored.add(row.document)
        else:
            side.scored.setdefault(row.document, []).append(row)
    side.unscored -= side.scored.keys()  # some of its repeats were scored
    for document in side.conflicting:
        side.scored.pop(document, None)
    side.unscored -= side.conflicting
    return side


def _mean(rows: list[ScoreRow]) -> float:
    return sum(row.score or 0.0 for row in rows) / len(rows)  # all of them have one


def _differ(a: str | None, b: str | None) -> bool:
    return a is not None and b is not None and a != b


def left_out(pairing: Pairing) -> dict[str, list[Fact]]:
    """How many documents are in no pair, by what is checked of them."""
    sides = {"reference": pairing.num_reference_only, "candidate": pairing.num_candidate_only}
    return {
        "documents": [
            fact("evaluations.only_in", num=num, side=side) for side, num in sides.items()
        ],
        "prompts": [fact("evaluations.other_words", num=pairing.num_other_prompt)],
        "targets": [fact("evaluations.other_answer", num=pairing.num_other_target)],
        "scores": [
            fact("evaluations.unusable", num=pairing.num_unscored),
            *(fact("evaluations.unusable_why", num=n, why=why) for why, n in pairing.whys.items()),
        ],
        "duplicates": [
            fact("evaluations.duplicates", num=pairing.num_duplicates),
            fact("evaluations.conflicting", num=pairing.num_conflicting),
        ],
    }


def preflight(a: Series, b: Series, pairs: Pairs) -> list[PreflightLine]:
    """Check what must be equal before any number is believed."""
    pairing = pairs.pairing
    left = left_out(pairing)
    counts = [f"{num:,}" for num in (pairing.num_reference, pairing.num_candidate)]
    usable = "" if pairing.num_unscored else sentence(fact("evaluations.all_usable"))
    twice = f"{pairing.num_duplicates + pairing.num_conflicting:,}"
    repeats = [f"{repeat:g}" for repeat in pairing.repeats]
    order = [] if pairs.same_order else [fact("evaluations.other_order")]
    lines = [
        _line("documents", counts, *left["documents"], blocks=not pairing.num_paired),
        _hashes("prompts", a, b, *left["prompts"]),
        _hashes("targets", a, b, *left["targets"]),
        _line("scores", [usable] * 2, *left["scores"], same=not pairing.num_unscored),
        _line("duplicates", [twice] * 2, *left["duplicates"]),
        _line("repeats", repeats, same=pairing.repeats[0] == pairing.repeats[1]),
        _line("order", ["", ""], *order),
        *unit_lines(pairs.reference, pairs.candidate),
    ]
    directions = [side.higher_is_better for side in (a, b)]
    if directions[0] != directions[1]:
        better = [sentence(fact("evaluations.direction", higher=higher)) for higher in directions]
        lines.append(_line("direction", better, blocks=True))
    # documents of clusters that both sides tell, and do not tell alike. Names may differ
    named = [(a.cluster, b.cluster) for a, b in pairs.rows if a.cluster and b.cluster]
    parts = [Counter(names) for names in zip(*set(named), strict=True)]
    if num := sum(parts[0][x] > 1 or parts[1][y] > 1 for x, y in named):
        other = fact("evaluations.other_clusters", num_documents=num)
        lines.append(_line("clusters", ["", ""], other, blocks=True))
    return [*lines, *setting_lines(a, b)]


def setting_lines(a: Series, b: Series) -> list[PreflightLine]:
    """Return what each setting is on both sides; any that differs makes it another question."""
    lines = []
    for name in dict.fromkeys((*a.settings, *b.settings)):
        values = a.settings.get(name), b.settings.get(name)
        status: PreflightStatus = "same" if values[0] == values[1] else "blocking"
        lines.append(
            PreflightLine(
                check=name,
                status="unknown" if None in values else status,
                reference=values[0] or _said(False),
                candidate=values[1] or _said(False),
            )
        )
    return lines


def unit_lines(reference: np.ndarray, candidate: np.ndarray) -> list[PreflightLine]:
    """Says that one side counts in percent and the other in shares, or in another such scale, by
    the largest scores of both: by what most documents show, else by these, where none is below 0.
    Of a score as a whole each side has one number."""
    tops = [float(np.abs(side).max(initial=0.0)) for side in (reference, candidate)]
    least, most = sorted(tops)
    below = min(reference.min(initial=0.0), candidate.min(initial=0.0)) < 0
    far = 20.0 if len(reference) > 1 else 1.0  # a mean of percent may be small
    rescaled = not below and 0 < least <= 1 and 50 <= most / least <= 200 and most >= far
    both = (reference != 0) & (candidate != 0)
    if not rescaled and int(both.sum()) > 1:
        # most are a hundred times the other side's, or ten times or more to the last digit
        powers = np.log10(np.abs(candidate[both])) - np.log10(np.abs(reference[both]))
        middle = float(np.median(powers))
        exact = float(np.mean(np.abs(powers - middle) < _DIGITS)) > 0.5
        rescaled = 1.9 <= abs(middle) <= 2.1 or (exact and abs(middle) > 1 - _DIGITS)
    if not rescaled:
        return []
    units = [sentence(fact("evaluations.scores_up_to", largest=top)) for top in tops]
    return [_line("units", units, blocks=True)]


def _line(
    check: str, shown: list[str], *details: Fact, same: bool | None = None, blocks: bool = False
) -> PreflightLine:
    """``details``: what is counted, left out where it is 0. ``same``: by default, where none is."""
    parts = [item for item in details if item["num"] != 0]
    same = not parts if same is None else same
    status: PreflightStatus = "blocking" if blocks else "same" if same else "differs"
    counted = [fact("evaluations.parts", parts=parts)] if parts else []
    return PreflightLine(
        check=check, status=status, reference=shown[0], candidate=shown[1], details=counted
    )


def _hashes(check: str, a: Series, b: Series, differing: Fact) -> PreflightLine:
    field = check.removesuffix("s")
    has = [bool(side.rows) and getattr(side.rows[0], field) is not None for side in (a, b)]
    if not all(has):
        first, second = map(_said, has)
        return PreflightLine(check=check, status="unknown", reference=first, candidate=second)
    return _line(check, ["", ""], differing)


def _said(is_known: bool) -> str:
    return sentence(fact("evaluations.said", known=is_known))


# Why multiple choice flips: at near ties, or since the choices' likelihoods moved.
#
# A choice flips where the margin (in nats) between the reference's choice and the candidate's is
# made up. Rounding moves every margin a little; where it moved by no more than rounding explains,
# the flip is one at a near tie, which another machine would make elsewhere. Where it moved by more,
# the cause is worth a look in the tensors.
#
# The limit is four standard deviations of a margin's shift. Its scale is the mean |shift| that
# these two sides show between the two likeliest choices, but no more than what the coarser dtype
# explains (√2 times the bound for one log-probability): so a fault that
# shifts every document cannot pass as rounding. A mean |x| of a normal is 0.8 standard deviations.
#
# ``capture_flips`` goes from a score to the tensors: the prompts that flipped become a run. They
# come from the reference's files, as they were rendered there; the documents whose margin moved
# most come first. Of multiple choice one forward is recorded, the one that ranks the choices.

_LIMIT = 4.0
_MEAN_TO_SIGMA = math.sqrt(math.pi / 2)
OF_ALL = fact("evaluations.shifts_of_all")


def shift_of(a: ScoreRow, b: ScoreRow) -> float | None:
    """Return how far the margin between A's choice and B's moved; between A's two likeliest where
    both chose alike. None without the likelihoods of the same choices."""
    if a.choices is None or b.choices is None or len(a.choices) != len(b.choices):
        return None
    choices_a, choices_b = a.choices, b.choices
    first, other = choices_a.index(max(choices_a)), choices_b.index(max(choices_b))
    if other == first:
        other = max((n for n in range(len(choices_a)) if n != first), key=choices_a.__getitem__)
    return abs((choices_a[first] - choices_a[other]) - (choices_b[first] - choices_b[other]))


def causes_of(pairs: Pairs, dtypes: Sequence[str | None]) -> FlipCauses | None:
    """None without likelihoods, and where no score flipped and rounding explains the margins."""
    if not pairs.single:
        return None
    shifts = [shift_of(a, b) for a, b in pairs.rows]
    judged = np.array([shift is not None for shift in shifts])
    if not judged.any():
        return None
    values = np.array([math.nan if shift is None else shift for shift in shifts])
    limit, source = explained(dtypes)
    seen = _LIMIT * _MEAN_TO_SIGMA * float(values[judged].mean())
    if seen <= limit:
        limit, source = seen, OF_ALL
    diff = pairs.candidate - pairs.reference
    if not diff.any() and np.median(values[judged]) <= limit:
        return None
    flips = judged & (diff != 0)
    ties, real = flips & (values <= limit), flips & ~(values <= limit)
    return FlipCauses(
        limit=limit,
        source=source,
        num_ties=int(ties.sum()),
        num_shifts=int(real.sum()),
        difference_of_ties=float(diff[ties].sum() / len(diff)),
        difference_of_shifts=float(diff[real].sum() / len(diff)),
        median_shift=float(np.median(values[judged])),
        num_judged=int(judged.sum()),
    )


def explained(dtypes: Sequence[str | None]) -> tuple[float, Fact]:
    """Tell how far a margin may move by rounding of the coarser dtype, in nats, and of which."""
    limits = [
        (LOGPROB_LIMIT_BY_DTYPE[dtype], dtype)
        for dtype in dtypes
        if dtype in LOGPROB_LIMIT_BY_DTYPE
    ]
    is_told = len(limits) == len(dtypes)
    bound, coarse = max(limits) if is_told else (LOGPROB_LIMIT_WIDEST, "bfloat16")
    source = fact("evaluations.rounding", dtype=coarse, known=is_told)
    return _LIMIT * _MEAN_TO_SIGMA * math.sqrt(2) * bound, source


def flips_of(pairs: Pairs) -> list[int]:
    """The pairs whose scores differ, the largest shift of a margin first; losses first."""
    differences = (pairs.candidate - pairs.reference).tolist()
    flips = [number for number, difference in enumerate(differences) if difference]
    shifts = {number: shift_of(*pairs.rows[number]) or 0.0 for number in flips}
    return sorted(flips, key=lambda number: (-shifts[number], differences[number]))


def capture_flips(
    side: Evaluation,
    paired: Mapping[SeriesName, tuple[Series, Pairs]],
    *,
    model: str | Path,
    out: str | Path,
    num_prompts: int,
    max_new_tokens: int | None,
    progress: Progress | None,
    **options: Any,
) -> Captured:
    """Raises UsageError where nothing flipped, or the format holds no prompts."""
    prompts: dict[Prompt, str] = {}
    num_flips, choices = 0, True
    for series, pairs in paired.values():
        flips = flips_of(pairs)
        num_flips += len(flips)
        rows = [pairs.rows[flip][0] for flip in flips[: max(0, num_prompts - len(prompts))]]
        by_place = prompts_of(side.format, series, {row.place for row in rows})
        for row in rows:
            if row.place in by_place:
                prompts.setdefault(by_place[row.place], row.document)
                choices = choices and row.choices is not None
    if not prompts:
        raise UsageError(
            "no score flipped, so there is no prompt to record"
            if not num_flips
            else f"{side.format}'s files do not hold the prompts of the {num_flips:,} flips",
            where=side.path,
            hint="divergence capture MODEL --prompts FILE records any prompts",
        )
    from divergence.recording.api import make_run

    if max_new_tokens is None and choices:
        max_new_tokens = 1
    run = make_run(
        str(model),
        out=out,
        prompts=list(prompts),
        max_new_tokens=max_new_tokens,
        progress=progress,
        **options,
    )
    return Captured(path=str(run.path), num_prompts=len(prompts), documents=list(prompts.values()))


# Flips joined to two runs of their prompts: do the runs answer as the evaluations did, and by how
# much did the answer's margin move between them?
#
# The runs are those that ``scores --capture`` and then ``capture --like`` wrote. A document is
# found in them by its prompt's tokens. Its answer token is
#
#     of multiple choice     the first token of A's choice against that of B's, at step 0
#     of a generated answer  the first token where both runs' greedy choices part
#
# and the margin, in nats, is the difference of both tokens' log-probabilities. By the limit L that
# numerics.floor has for the runs' dtype a flip is
#
#     a real shift    the margin falls by more than L, from no less than -L in A's run to no more
#                     than L in B's
#     a near tie      it lies within L of 0 in both runs, on whichever side: what the runs do not
#                     repeat of the evaluation, such as its batches, rounds it either way
#     not reproduced  else: the flip came from sampling, another prompt, other weights

_SIDES: tuple[Side, Side] = ("reference", "candidate")
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
            raise UsageError(
                "both runs are the same one, so nothing is joined",
                where=str(other.path),
                hint="--runs flips flips-b",
            )
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
        """Return the ids of text, as the run has it; of chat by the tokenizer."""
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

    def text(self, token: int) -> str:
        if self.tokenizer is not None:
            return str(self.tokenizer.decode([token]))
        texts = (run.manifest.tokens.texts.get(str(token)) for run in self.runs)
        return next((text for text in texts if text is not None), f"#{token}")


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
    candidate: Candidate,
    side: Evaluation,
    dtype: str | None,
    paired: Mapping[SeriesName, tuple[Series, Pairs]],
    runs: Sequence[str | Path | Run],
) -> Candidate:
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
            "the runs hold none of the prompts whose scores flipped"
            if flips
            else "no score flipped, so there is nothing to look for in runs",
            where="--runs",
            hint="divergence scores A B --capture MODEL -o RUN records them",
        )
    return replace(candidate, tasks=tasks)


def _causes(
    side: Evaluation,
    series: Series,
    pairs: Pairs,
    joint: _Joint,
    causes: FlipCauses | None,
    dtypes: Sequence[str | None],
) -> RunCauses | None:
    """None where nothing flipped, or no flip's prompt is in both runs."""
    numbers = flips_of(pairs)
    places = {pairs.rows[number][0].place for number in numbers}
    prompts = prompts_of(side.format, series, places)
    judged = side.format == "lm-eval" and any(pairs.rows[n][0].choices for n in numbers)
    file = DumpFolder(series.file)
    asked = lm_eval.asked(file, file.names[0], places) if judged else {}
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
            rows = first, second
            answer: _Answer | Fact | None = _chosen(
                asked[first.place], rows, series.name.metric, joint
            )
        else:
            # the first different greedy choice
            runs = zip(joint.runs, samples, strict=True)
            chosen = [run.manifest.tokens.samples[sample].chosen_ids for run, sample in runs]
            both = enumerate(zip(*chosen, strict=False))
            answer = next((_Answer(step, (x, y)) for step, (x, y) in both if x != y), None)
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
    # runs in another dtype than what was evaluated say less of it
    remarks = [
        fact("evaluations.run_dtype", side=one_side, run_dtype=run_dtype, dtype=dtype)
        for one_side, run_dtype, dtype in zip(_SIDES, joint.dtypes, dtypes, strict=True)
        if dtype is not None and run_dtype != dtype
    ]
    # a run whose margins are not those of its side's own log ran something else
    medians = [statistics.median(distances) if distances else 0.0 for distances in off]
    remarks += [
        fact("evaluations.run_off", side=one_side, nats=median)
        for one_side, median in zip(_SIDES, medians, strict=True)
        if not median <= limit
    ]
    count, (reference, other) = Counter(flip.judgement for flip in flips), joint.runs
    return RunCauses(
        reference=str(reference.path),
        candidate=str(other.path),
        limit=limit,
        source=source,
        num_flips=len(numbers),
        num_ties=count["tie"],
        num_shifts=count["shift"],
        num_not_reproduced=count["not_reproduced"],
        num_not_told=count["not_told"],
        difference_of_ties=float(shares["tie"]) / len(pairs.rows),
        difference_of_shifts=float(shares["shift"]) / len(pairs.rows),
        flips=flips,
        remarks=remarks,
    )


def _judged(
    document: str,
    answer: _Answer | Fact | None,
    joint: _Joint,
    samples: tuple[int, int],
    limit: float,
) -> RunFlip:
    flip = RunFlip(document=document, sample=samples[0], step=0, judgement="not_told")
    if isinstance(answer, Fact):
        return replace(flip, reason=answer)
    if answer is None:
        same = fact("evaluations.no_token_differs")
        return replace(flip, judgement="not_reproduced", reason=same)
    names = [joint.text(token) for token in answer.tokens]
    flip = replace(flip, step=answer.step, reference=names[0], candidate=names[1])
    margins: list[float | None] = []
    for run, sample in zip(joint.runs, samples, strict=True):
        row = logits_row(run, sample, answer.step)
        if row is None or max(answer.tokens) >= len(row):
            margins.append(None)
            continue
        logprob, other = log_softmax(row)[list(answer.tokens)].tolist()
        margins.append(float(answer.weights[0] * logprob - answer.weights[1] * other))
    a, b = margins
    if a is None or b is None:
        return replace(flip, reason=fact("evaluations.no_logits"))
    if not math.isfinite(a) or not math.isfinite(b):
        return replace(flip, judgement="shift", reason=fact("evaluations.nonfinite_logits"))
    flip = replace(flip, reference_margin=a, candidate_margin=b)
    if a - b > limit and a >= -limit and b <= limit:
        return replace(flip, judgement="shift")
    if max(abs(a), abs(b)) <= limit:
        return replace(flip, judgement="tie")
    if not answer.whole:
        return replace(flip, reason=fact("evaluations.several_tokens"))
    return replace(flip, judgement="not_reproduced")


def _chosen(
    asked: tuple[str, list[str]], rows: tuple[ScoreRow, ScoreRow], metric: str, joint: _Joint
) -> _Answer | Fact:
    """The first tokens of A's choice and of B's, or why they are not known."""
    context, texts = asked
    if joint.tokenizer is None:
        return fact("evaluations.no_tokenizer")
    before = joint.ids(Prompt(text=context)) or ()
    tails, weights = [], []
    choices_a, choices_b = (row.choices or () for row in rows)
    numbers = choices_a.index(max(choices_a)), choices_b.index(max(choices_b))
    for text in (texts[number] for number in numbers):
        ids = joint.ids(Prompt(text=context + text)) or ()
        if ids[: len(before)] != before or len(ids) == len(before):
            return fact("evaluations.begins_in_prompt")
        tails.append(ids[len(before) :])
        weights.append(lm_eval.weight(metric, text))
    if tails[0][0] == tails[1][0]:
        return fact("evaluations.same_token")
    whole = all(len(tail) == 1 for tail in tails)
    margin, other = (
        choices[numbers[0]] - choices[numbers[1]] for choices in (choices_a, choices_b)
    )
    tokens = tails[0][0], tails[1][0]
    return _Answer(0, tokens, (weights[0], weights[1]), whole, (margin, other))

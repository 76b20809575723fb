"""The pattern of log-probabilities that differ: where, how much they may, what is doubtful."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from divergence.comparison.constants import FEW_ROWS
from divergence.comparison.decide import check
from divergence.comparison.judge import limit_of, observed, outliers, reach
from divergence.comparison.result import Check
from divergence.comparison.trusted import refuse_compared
from divergence.domains.logprobs.hypotheses import FEW, MOST, is_one_way, share_of_size
from divergence.domains.logprobs.pairs import PromptPair, pair_runs, prompt_line
from divergence.domains.logprobs.result import LogprobsResult, PatternName
from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.numerics.floor import LOGPROB_LIMIT_BY_DTYPE, LOGPROB_LIMIT_WIDEST, THRESHOLDS
from divergence.numerics.statistics import (
    LEAST_PROMPTS,
    LEVEL,
    Certainty,
    certainty_of,
    least_share,
)
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.words import grouped

# What rounding explains of Δ log p, as a mean of |Δ| in nats.
#
# Measured, where ``--floor`` names trusted runs of the same prompts: their mean |Δ| from the
# reference, widened as every floor is (numerics.floor, ``widen``). Else by the dtype that a side
# computed in (numerics.floor, ``LOGPROB_LIMIT_BY_DTYPE``).

FAR = 4.0
"""Times LOGPROB_LIMIT_WIDEST, half a nat: beyond it no precision in use is meant, but another
model."""
_TO_SIGMA = math.sqrt(math.pi / 2)
"""A normal deviation over its mean size."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Says what rounding explains."""

    value: float
    """A mean of |Δ| in nats."""
    source: Fact
    """Where it is from: ``dtype``, ``no_dtype``, ``floor_runs`` or ``far_floor_runs``."""
    floor: np.ndarray | None = None
    """|Δ| of the floor runs' tokens, where such were named."""

    @property
    def known(self) -> bool:
        """Is it of these two sides? Else it is the widest that might be meant."""
        return self.by_dtype or self.floor is not None

    @property
    def by_dtype(self) -> bool:
        """Is it the bound of a dtype that both sides tell?"""
        return self.source.code == "logprobs.dtype"

    @property
    def without_dtype(self) -> bool:
        """Does nothing tell it, neither a dtype nor a floor run?"""
        return self.source.code == "logprobs.no_dtype"

    def usual_share(self, bound: float) -> float:
        """Return which share of a trusted machine's tokens differs by more than ``bound``, at most:
        the upper end of its 99% interval. 0 without floor runs."""
        if self.floor is None:
            return 0.0
        return 1 - least_share(int((self.floor <= bound).sum()), len(self.floor))


def scale_of(a: Run, b: Run, floors: Sequence[Run]) -> Scale:
    """Take the scale from the runs of ``floors``, else from both sides' dtypes. Raises UsageError
    for a floor run that is a compared one, or scored none of A's tokens."""
    if floors:
        together = np.concatenate([_from_floor(a, b, run) for run in floors])
        floor = np.abs(together)
        value = THRESHOLDS.widen * float(floor.mean())
        if value > FAR * LOGPROB_LIMIT_WIDEST:
            return Scale(value, fact("logprobs.far_floor_runs", num_runs=len(floors)))
        source = fact("logprobs.floor_runs", num_runs=len(floors))
        return Scale(max(value, 2.0**-20), source, floor)
    dtypes = [run.manifest.model_dtype.removeprefix("torch.") for run in (a, b)]
    if all(dtype in LOGPROB_LIMIT_BY_DTYPE for dtype in dtypes):
        coarse = max(dtypes, key=LOGPROB_LIMIT_BY_DTYPE.__getitem__)
        return Scale(LOGPROB_LIMIT_BY_DTYPE[coarse], fact("logprobs.dtype", dtype=coarse))
    return Scale(LOGPROB_LIMIT_WIDEST, fact("logprobs.no_dtype"))


def _from_floor(a: Run, b: Run, run: Run) -> np.ndarray:
    refuse_compared(run, a, b)
    pairs = pair_runs(a, run)
    delta = np.concatenate([np.empty(0), *(pair.delta for pair in pairs)])
    line = prompt_line(pairs, a, run)
    if line.status == "blocking" or not len(delta):
        raise UsageError(
            f"{run.path} shows no floor for {a.path}: "
            + ("other prompts" if line.status == "blocking" else "no token in common"),
            hint=command_line("capture", like=a.path, o="RUN") + " on a trusted machine",
        )
    return delta


# What the differences look like, and so which kind of cause they have.
#
# Whether a prompt or a token stands out is asked of the one judge (comparison.judge), in units of
# what rounding explains. A prompt's number is the log of its root mean square, made of as many
# numbers as its tokens' participation ratio: few tokens that are far off make no odd prompt, and a
# short answer is excused by its chance. A token is odd beyond the normal deviate of as many tokens.
# Growth is what the last thirds of all answers have beside the first, each answer its own control,
# held as the judge holds a column. Each claims something only with at least LEAST_PROMPTS prompts
# and beyond what rounding explains; a shift, where the 99% interval of a paired bootstrap over
# prompts leaves 0 out (numerics.statistics). benchmarks/logprobs.py counts what healthy pairs and
# planted faults give.

_LEAST = THRESHOLDS.truth_least
"""Of what rounding explains, as of every floor: added to both errors that are held against one
another, and below it nothing tells a cause. The numbers of a chosen token lie below 0, for one, and
so does what is cut off there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """``odd``: prompts that stand out, or (prompt, index in the sequence) of tokens that do.
    ``places``: which of the answers' tokens stand out, counted from 0; -1 is the last one."""

    name: PatternName
    shift: Certainty
    growth: float | None = None
    """Mean |Δ| in the last third of the answers over that in the first."""
    odd: list[tuple[int, int]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    rest: float = 0.0
    """Mean |Δ| of what does not stand out."""
    far: bool = False


def pattern_of(pairs: Sequence[PromptPair], scale: Scale, *, experts: bool | None) -> Pattern:
    """The first that holds, from the most particular to the most general. ``experts``: has the
    model any? None where that is not told."""
    filled = [pair for pair in pairs if len(pair.delta)]
    sizes = [np.abs(pair.delta) for pair in filled]
    # one number a prompt: answers to one prompt are not independent
    by_prompt = grouped(filled, lambda pair: pair.prompt)
    means = [np.mean([x.delta.mean() for x in answers]) for answers in by_prompt.values()]
    shift = certainty_of(np.array(means, np.float64))
    if not filled:
        return Pattern(name="nothing", shift=shift)
    together, delta = np.concatenate(sizes), np.concatenate([pair.delta for pair in filled])
    if not together.any():
        return Pattern(name="equal", shift=shift)
    mean = float(together.mean())
    far = mean > FAR * max(scale.value, LOGPROB_LIMIT_WIDEST)
    enough = shift.num_prompts >= LEAST_PROMPTS
    # however few prompts they are of, rounding and other precisions move tokens either way
    one_sided = mean > _LEAST * scale.value and is_one_way(delta)
    # prompts far beyond the others, each with what others have shown too; where more than a third
    # are nearer to these than to the median, the others are no control
    whole = [np.abs(pair.whole[0]) for pair in filled]
    x, own = _observed(whole, scale=scale.value)
    limit = limit_of(len(filled))
    judged = outliers(x[:, None], own[:, None], THRESHOLDS.ratio_spread, limit)
    control = judged.control[:, 0]
    out = (x > control + judged.reach[:, 0]) & (x > 0)
    alike = x > (control + x[out].min(initial=math.inf)) / 2
    if enough and out.any() and 3 * alike.sum() <= len(x):
        odd = [
            (pair.sample, int(pair.whole[1][size.argmax()]))
            for pair, size, is_out in zip(filled, whole, out, strict=True)
            if is_out
        ]
        means = [size.mean() for size, is_out in zip(sizes, out, strict=True) if not is_out]
        return Pattern(name="sequences", shift=shift, odd=odd, rest=float(np.mean(means)))
    # answers of which the end is farther off than the beginning
    ends = [np.abs(pair.delta[pair.places >= pair.answer_begins]) for pair in filled]
    thirds = [(size[: len(size) // 3], size[-(len(size) // 3) :]) for size in ends if len(size) > 2]
    growth = None
    if thirds:
        begins, finals = zip(*thirds, strict=True)
        early, late = (float(np.mean([x.mean() for x in side])) for side in (begins, finals))
        growth = late / early if early > 0 else math.inf
        x, own = _observed(begins, finals, scale=scale.value)
        chance = np.square(THRESHOLDS.forward_spread) + math.pi / 2 * np.median(own) / len(own)
        if enough and late > scale.value and np.median(x) > reach(limit_of(1), chance):
            return Pattern(name="growing", shift=shift, growth=growth)
    # the same token of all answers: rounding, and routing, keep to no place
    places, there = _places_apart(filled, sizes, scale.value) if enough else ([], [])
    if places:
        odd, rest = _tokens_out(filled, sizes, there)
        return Pattern(name="places", shift=shift, odd=odd, places=places, rest=rest)
    # tokens, few among all, that hold most of the difference; none where a trusted machine shows
    # half as many
    bound = token_bound(together, scale.value)
    out = together > bound
    share, weight = float(out.mean()), float(together[out].sum() / together.sum())
    if enough and share <= FEW and weight >= MOST and share > 2 * scale.usual_share(bound):
        odd, rest = _tokens_out(filled, sizes, [size > bound for size in sizes])
        return Pattern(name="positions", shift=shift, odd=odd, rest=rest)
    if mean <= scale.value and not one_sided:
        return Pattern(name="within", shift=shift, growth=growth)
    if not enough and not one_sided:
        return Pattern(name="few", shift=shift, growth=growth, far=far)
    # tokens far beyond rounding, any number, where most tokens of every prompt are within it
    usual = np.array([typical_of(size) for size in sizes])
    chance = math.pi / 2 / np.array([len(size) for size in sizes])
    within = typical_of(together) <= scale.value
    within = within and bool((usual <= scale.value * np.exp(reach(limit, chance))).all())
    if experts is not False and within:
        odd, rest = _tokens_out(filled, sizes, [size > bound for size in sizes])
        if odd:
            return Pattern(name="positions", shift=shift, odd=odd, rest=rest)
    one_way = abs(shift.mean) >= MOST * mean and (shift.excludes_zero or one_sided)
    name: PatternName = "shifted" if one_way or far else "everywhere"
    return Pattern(name=name, shift=shift, growth=growth, far=far)


def _observed(*sides: Sequence[np.ndarray], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(x, own variance) (R,) for the judge, of R rows of |Δ| each: of two sides the log of the
    second's root mean square over the first's; of one, over what rounding explains, in which there
    is no chance."""
    floor = scale * _TO_SIGMA
    energy, count = np.ones((2, len(sides[0]))), np.full((2, len(sides[0])), 1e12)
    for number, rows in enumerate(sides, start=2 - len(sides)):
        squares = [np.square(row / floor) for row in rows]
        energy[number] = [square.mean() for square in squares]
        with np.errstate(invalid="ignore"):
            count[number] = [square.sum() ** 2 / np.square(square).sum() for square in squares]
    return observed(energy, count, _LEAST)


def token_bound(size: np.ndarray, explained: float) -> float:
    """The |Δ| from which on one of these tokens stands out: of normal deviations as wide as what
    rounding explains, or as the median token's where that is wider."""
    median = float(np.median(size)) if len(size) else 0.0
    return limit_of(len(size)) * max(_TO_SIGMA * explained, median / NormalDist().inv_cdf(0.75))


def beyond_of(pairs: Sequence[PromptPair], scale: Scale) -> tuple[int, int, str]:
    """Prompts whose own mean |Δ| rounding does not explain, the others, and what sets them apart:
    ``longer`` or ``later``, where each of them is and chance would hardly have it so."""
    filled = [pair for pair in pairs if len(pair.delta)]
    out = np.array([np.abs(pair.delta).mean() > scale.value for pair in filled], bool)
    beyond, others = int(out.sum()), int((~out).sum())
    if beyond and others and math.comb(beyond + others, beyond) * LEVEL >= 1:
        for word, values in (
            ("longer", [pair.reference.num_prompt for pair in filled]),
            ("later", [pair.sample for pair in filled]),
        ):
            if min(np.array(values)[out]) > max(np.array(values)[~out]):
                return beyond, others, word
    return beyond, others, ""


def typical_of(size: np.ndarray) -> float:
    """The mean |Δ| of normal deviations with the median of these: what a tail does not move."""
    return float(np.median(size)) / NormalDist().inv_cdf(0.75) / _TO_SIGMA


def _places_apart(
    filled: Sequence[PromptPair], sizes: Sequence[np.ndarray], explained: float
) -> tuple[list[int], list[np.ndarray]]:
    """Finds the places in the answers, the last one (-1) or those from 0 on, at which all prompts
    together are beyond rounding and far beyond the other places; and which tokens stand there."""
    for last in (True, False):
        numbers = [
            np.where(
                pair.places >= pair.answer_begins,
                pair.places - (pair.places.max() + 1 if last else pair.answer_begins),
                len(pair.reference.ids),  # of the prompt, so at no place
            )
            for pair in filled
        ]
        at, size = np.concatenate(numbers), np.concatenate(sizes)
        columns = {n: size[at == n] for n in np.unique(at).tolist()}
        columns = {n: column for n, column in columns.items() if len(column) >= LEAST_PROMPTS}
        if len(columns) < FEW_ROWS:
            continue
        x, own = _observed([*columns.values()], scale=explained)
        limit = limit_of(2 * len(columns))
        judged = outliers(x[:, None], own[:, None], THRESHOLDS.ratio_spread, limit)
        out = (x > (judged.control + judged.reach)[:, 0]) & (x > 0)
        places = np.array(list(columns))[out].tolist()
        if places and 3 * len(places) <= len(columns) and (not last or places == [-1]):
            return places, [np.isin(each, places) for each in numbers]
    return [], []


def _tokens_out(
    filled: Sequence[PromptPair], sizes: Sequence[np.ndarray], out: Sequence[np.ndarray]
) -> tuple[list[tuple[int, int]], float]:
    """The tokens that are ``out``, the largest first; mean |Δ| of the others."""
    tokens = [
        (pair.sample, int(place), float(size))
        for pair, own, far in zip(filled, sizes, out, strict=True)
        for place, size in zip(pair.places[far], own[far], strict=True)
    ]
    tokens.sort(key=lambda item: -item[2])
    rest = float(np.concatenate(sizes)[~np.concatenate(out)].mean())
    return [(sample, place) for sample, place, _ in tokens], rest


# What a mean that rounding explains may hide. Each doubt leaves low confidence, with its reason.
#
# Rounding goes both ways, whatever log p is, is much the same in all prompts, and moves no token
# far. And of what a side does not tell nothing is known: at what margin two answers part, what a
# token has that one side alone scored, by which numbers a token was chosen that is not the
# likeliest of its list.

TIE = 3.0 * math.sqrt(2)
"""Times what rounding explains: what a tie may span. Three standard deviations of the difference of
two log-probabilities, of which a mean of |Δ| is a part."""
FAULT = 4.0 * math.sqrt(2) * _TO_SIGMA
"""The same from which on rounding flips none of many tokens: four of them, with the mean of |Δ|
that a normal deviation has. What lies between is not told."""


def doubts_of(
    result: LogprobsResult, pairs: Sequence[PromptPair], pattern: Pattern, scale: Scale
) -> list[Check]:
    """Check a verdict that nothing is wrong: once by size and once by what is told."""
    size: list[Fact] = []
    shift, mean = pattern.shift, result.delta.mean_abs if result.delta else 0.0
    # one way, where rounding goes both
    if shift.excludes_zero and abs(shift.mean) >= max(MOST * mean, _LEAST * scale.value):
        way = "below" if shift.mean < 0 else "above"
        size.append(fact("logprobs.rounding_both_ways", nats=abs(shift.mean), way=way))
    # a function of log p, as another temperature makes it; of rounding it is none
    if result.delta and mean >= _LEAST * scale.value:
        share = share_of_size(pairs)
        size += [fact("logprobs.goes_with_size", share=share)] if share >= MOST else []
    # answers, prompts and tokens that rounding does not explain, whatever the mean of all is: what
    # is computed at once for a long prompt is right where what follows step by step may not be
    explained = scale.value if scale.by_dtype else max(scale.value, LOGPROB_LIMIT_WIDEST)
    sizes = [np.abs(pair.delta) for pair in pairs if len(pair.delta)]
    answers = [np.abs(pair.delta[pair.places >= pair.answer_begins]) for pair in pairs]
    together = np.concatenate([np.empty(0), *answers])
    if len(together) and (nats := float(together.mean())) > explained:
        size.append(fact("logprobs.answers_beyond", nats=nats))
    if sizes:
        x, own = _observed(sizes, scale=explained)
        if num := int((x > reach(limit_of(len(x)), own)).sum()):
            size.append(fact("logprobs.prompts_beyond", num_prompts=num))
        every = np.concatenate(sizes)
        num, largest = int(np.count_nonzero(every)), float(every.max())
        if 0 < num <= FEW * len(every) and largest > _LEAST * explained:  # the same kernels ran
            size.append(fact("logprobs.only_tokens", num_tokens=num, largest=largest))
        if num := int((every > token_bound(every, explained)).sum()):
            size.append(fact("logprobs.tokens_far_beyond", num_tokens=num, largest=largest))
    doubts: list[Fact] = []
    if num := result.num_flips - result.num_ties - result.num_faults:
        doubts.append(fact("logprobs.ties_not_known", num_answers=num))
    if num := result.num_ended:
        doubts.append(fact("logprobs.ends_not_known", num_answers=num))
    if num := sum(pair.num_untold for pair in pairs):
        doubts.append(fact("logprobs.scores_not_known", num_tokens=num))
    for side, num in result.num_not_likeliest.items():
        most = result.max_below_likeliest.get(side, math.nan)
        doubts.append(fact("logprobs.not_likeliest", side=side, num_times=num, nats=most))
    return [
        check("scale", not size, fact("logprobs.doubts", doubts=size)),
        check("told", not doubts, fact("logprobs.doubts", doubts=doubts)),
    ]

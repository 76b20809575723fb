"""Where log-probabilities that differ lie, what they may differ by, and what is doubtful."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np

from divergence.analyses.logprobs.pairs import (
    FOLLOWS,
    PromptPair,
    pair_runs,
    prompt_line,
    share_of_size,
)
from divergence.comparison.decide import check
from divergence.comparison.results import Check, LogprobsResult
from divergence.comparison.trusted import refuse_compared
from divergence.errors import UsageError
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS
from divergence.numerics.statistics import LEAST_PROMPTS, Certainty, certainty_of
from divergence.run.command import command_line
from divergence.run.reader import Run
from divergence.run.site import LOGPROBS
from divergence.words import grouped

# What rounding explains of Δ log p, as a mean of |Δ| in nats.
#
# Measured, where ``--floor`` names trusted runs of the same prompts: their mean |Δ| from the
# reference, widened as every floor is (numerics.floor, ``widen``). Else by the dtype that a side
# computed in: a random Llama of 16 blocks, whose logits spread by 3 nats, is 0.069 nats from its
# own float64 in bfloat16 (``benchmarks/logprobs.py`` prints it), and two such sides √2 times that
# from one another: 0.1, and 0.125 here. Random models gather more rounding than trained ones, so
# this is a wide bound. float16 has three bits more; float32, whose accumulators are no wider than
# its stores, shows 4e-6 there and more where sums are longer.

BY_DTYPE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-14, "float64": 2.0**-20}
WIDEST = BY_DTYPE["bfloat16"]
"""Of the widest dtype whose rounding is called rounding: narrower ones are another quantisation."""
FAR = 4.0
"""Times WIDEST, half a nat: beyond it no precision in use is meant, but another model."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What rounding explains."""

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
        """Of a trusted machine's tokens, how many differ by more than ``bound``: at most (the upper
        end of Wilson's 99% interval). 0 without floor runs."""
        if self.floor is None:
            return 0.0
        num, z = len(self.floor), NormalDist().inv_cdf(0.99)
        share, room = float((self.floor > bound).mean()), z * z / num
        middle = share + room / 2
        return (middle + z * math.sqrt((share * (1 - share) + room / 4) / num)) / (1 + room)


def scale_of(a: Run, b: Run, floors: Sequence[Run]) -> Scale:
    """From the runs of ``floors``, else from both sides' dtypes. Raises UsageError for a floor run
    that is a compared one, or scored none of A's tokens."""
    if floors:
        together = np.concatenate([_from_floor(a, b, run) for run in floors])
        floor = np.abs(together)
        value = THRESHOLDS.widen * float(floor.mean())
        if value > FAR * WIDEST:
            return Scale(value, fact("logprobs.far_floor_runs", num_runs=len(floors)))
        source = fact("logprobs.floor_runs", num_runs=len(floors))
        return Scale(max(value, 2.0**-20), source, floor)
    dtypes = [_dtype(run) for run in (a, b)]
    if all(dtype in BY_DTYPE for dtype in dtypes):
        coarse = max(dtypes, key=BY_DTYPE.__getitem__)
        return Scale(BY_DTYPE[coarse], fact("logprobs.dtype", dtype=coarse))
    return Scale(WIDEST, fact("logprobs.no_dtype"))


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


def _dtype(run: Run) -> str:
    manifest = run.manifest
    alone = manifest.plan.sites == [LOGPROBS]
    name = manifest.settings.dtype if alone else manifest.model.dtype
    return "" if name is None else name.removeprefix("torch.")


# What the differences look like, and so which kind of cause they have.
#
# The looks: one a prompt (beyond eight times the median prompt), one a token (beyond twenty times
# the median token), one of growth and one of shift over all prompts. Each claims something only
# with at least LEAST_PROMPTS prompts, and only beyond what rounding explains (scale.py); growth and
# shift are claimed where the 99% interval of a paired bootstrap over prompts leaves 0 out
# (numerics.resampling). benchmarks/logprobs.py counts what healthy pairs and planted faults give.

PatternName = Literal[
    "equal", "within", "everywhere", "sequences", "positions", "growing", "shifted", "few",
    "nothing",
]  # fmt: skip
_ODD_PROMPT, _ODD_TOKEN = 8.0, 20.0
_MOST_PROMPTS, _MOST_TOKENS = 1 / 3, 0.05
_FAR_TOKEN = 4.0
_LEAST_ANSWER = 12
"""Tokens of an answer whose beginning and end can be told apart."""
_GROWS = 2.0
_LEAST_APART = 3
_LEAST_TOKENS, _MOST_OTHER = 30, 0.05
"""Of 30 coins, one falls the other way in 1 of 17 million cases."""
_LEAST_SHIFT = 0.25
"""Of what rounding explains: the numbers of a chosen token lie below 0, and so does what is cut off
there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """``odd``: prompts that stand out, or (prompt, index in the sequence) of tokens that do."""

    name: PatternName
    shift: Certainty
    growth: float | None = None
    """Mean |Δ| in the last third of the answers over that in the first."""
    odd: list[tuple[int, int]] = field(default_factory=list)
    rest: float = 0.0
    """Mean |Δ| of what does not stand out."""
    far: bool = False


def pattern_of(pairs: Sequence[PromptPair], scale: Scale, *, experts: bool | None) -> Pattern:
    """The first that holds, from the most particular to the most general. ``experts``: has the
    model any? None where that is not told."""
    held = [pair for pair in pairs if len(pair.delta)]
    sizes = [np.abs(pair.delta) for pair in held]
    shift = certainty_of(_by_prompt(held, [pair.delta.mean() for pair in held]))
    if not held:
        return Pattern(name="nothing", shift=shift)
    together, delta = np.concatenate(sizes), np.concatenate([pair.delta for pair in held])
    if not together.any():
        return Pattern(name="equal", shift=shift)
    mean, count = float(together.mean()), len(together)
    far = mean > FAR * max(scale.value, WIDEST)
    enough = shift.num_prompts >= LEAST_PROMPTS
    # Do nearly all tokens lie on one side? However few prompts they are of, rounding and other
    # precisions move each token one way or the other: the sign of each is a coin.
    fewer = min(int((delta > 0).sum()), int((delta < 0).sum()))
    one_sided = (
        mean > _LEAST_SHIFT * scale.value
        and count >= _LEAST_TOKENS
        and fewer <= _MOST_OTHER * count
    )
    # prompts whose mean |Δ| is far beyond the others'; of a short answer chance is larger
    means = np.array([size.mean() for size in sizes])
    room = 1 + 6 / np.sqrt([len(size) for size in sizes])
    out = means > max(_ODD_PROMPT * float(np.median(means)), scale.value) * room
    if enough and out.any() and out.mean() <= _MOST_PROMPTS:
        odd = [
            (pair.sample, int(pair.places[np.abs(pair.delta).argmax()]))
            for pair, is_out in zip(held, out, strict=True)
            if is_out
        ]
        return Pattern(name="sequences", shift=shift, odd=odd, rest=float(means[~out].mean()))
    growth, grows = _growth(held, scale)
    if enough and grows:
        return Pattern(name="growing", shift=shift, growth=growth)
    # tokens, few among all, that hold most of the difference; none where a trusted machine shows
    # half as many
    bound = max(_ODD_TOKEN * float(np.median(together)), _FAR_TOKEN * scale.value)
    out = together > bound
    share, weight = float(out.mean()), float(together[out].sum() / together.sum())
    few = int(out.sum()) >= 3 and share <= _MOST_TOKENS and weight >= 0.5
    if enough and few and share > 2 * scale.usual_share(bound):
        odd, rest = _tokens_over(held, sizes, bound)
        return Pattern(name="positions", shift=shift, odd=odd, rest=rest)
    if mean <= scale.value and not one_sided:
        return Pattern(name="within", shift=shift, growth=growth)
    if not enough and not one_sided:
        return Pattern(name="few", shift=shift, growth=growth, far=far)
    # tokens far beyond rounding, any number, where most tokens of every prompt are within it
    usual = np.array([typical_of(size) for size in sizes])
    within = typical_of(together) <= scale.value and (usual <= scale.value * room).all()
    if experts is not False and within:
        odd, rest = _tokens_over(held, sizes, _FAR_TOKEN * scale.value)
        if odd:
            return Pattern(name="positions", shift=shift, odd=odd, rest=rest)
    one_way = abs(shift.mean) >= 0.5 * mean and (shift.excludes_zero or one_sided)
    if one_way or far:
        return Pattern(name="shifted", shift=shift, growth=growth, far=far)
    return Pattern(name="everywhere", shift=shift, growth=growth)


def beyond_of(pairs: Sequence[PromptPair], scale: Scale) -> tuple[int, int, str]:
    """Prompts whose own mean |Δ| rounding does not explain, the others, and what sets them apart:
    ``longer`` or ``later``, where each of them is and there are three of either."""
    held = [pair for pair in pairs if len(pair.delta)]
    out = np.array([np.abs(pair.delta).mean() > scale.value for pair in held], bool)
    beyond, others = int(out.sum()), int((~out).sum())
    if min(beyond, others) >= _LEAST_APART:
        for word, values in (
            ("longer", [pair.reference.num_prompt for pair in held]),
            ("later", [pair.sample for pair in held]),
        ):
            if min(np.array(values)[out]) > max(np.array(values)[~out]):
                return beyond, others, word
    return beyond, others, ""


def typical_of(size: np.ndarray) -> float:
    """The mean |Δ| of normal deviations with the median of these: what a tail does not move."""
    return float(np.median(size)) * math.sqrt(2 / math.pi) / NormalDist().inv_cdf(0.75)


def _tokens_over(
    held: Sequence[PromptPair], sizes: Sequence[np.ndarray], bound: float
) -> tuple[list[tuple[int, int]], float]:
    """Tokens that differ by more, the largest first; mean |Δ| of the others."""
    tokens = [
        (pair.sample, int(place), float(size))
        for pair, own in zip(held, sizes, strict=True)
        for place, size in zip(pair.places, own, strict=True)
        if size > bound
    ]
    tokens.sort(key=lambda item: -item[2])
    together = np.concatenate(sizes)
    rest = float(together[together <= bound].mean())
    return [(sample, place) for sample, place, _ in tokens], rest


def _growth(held: Sequence[PromptPair], scale: Scale) -> tuple[float | None, bool]:
    """(last third over first third, does it grow?) of the answers that are long enough."""
    ends, long = [], []
    for pair in held:
        size = np.abs(pair.delta[pair.places >= pair.answer_begins])
        if len(size) >= _LEAST_ANSWER:
            third = len(size) // 3
            ends.append((float(size[:third].mean()), float(size[-third:].mean())))
            long.append(pair)
    if not ends:
        return None, False
    early, late = (np.array(part) for part in zip(*ends, strict=True))
    ratio = float(late.mean() / early.mean()) if early.mean() > 0 else float("inf")
    sure = certainty_of(_by_prompt(long, late - early))
    grows = ratio > _GROWS and sure.low is not None and sure.low > 0 and sure.excludes_zero
    return ratio, bool(grows and late.mean() > scale.value)


def _by_prompt(held: Sequence[PromptPair], values: Sequence[float] | np.ndarray) -> np.ndarray:
    """One number a prompt: the mean over its answers, which are not independent."""
    by_prompt = grouped(zip(held, values, strict=True), lambda item: item[0].prompt)
    groups = ([float(value) for _, value in group] for group in by_prompt.values())
    return np.array([np.mean(group) for group in groups])


# What a mean that rounding explains may hide. Each doubt leaves low confidence, with its reason.
#
# Rounding goes both ways, whatever log p is, is much the same in all prompts, and moves no token
# far. And of what a side does not tell nothing is known: at what margin two answers part, what a
# token has that one side alone scored, by which numbers a token was chosen that is not the
# likeliest of its list.

TIE = 3.0 * math.sqrt(2)
"""Times what rounding explains: what a tie may span. Three standard deviations of the difference of
two log-probabilities, of which a mean of |Δ| is a part."""
FAULT = 4.0 * math.sqrt(2) * math.sqrt(math.pi / 2)
"""The same from which on rounding flips none of many tokens: four of them, with the mean of |Δ|
that a normal deviation has (as in evaluations.joining). What lies between is not told."""
_ONE_WAY = 0.5
_ROOM = 3.0
"""Standard errors by which a prompt's mean may lie above what rounding explains of all."""
_TOO_FAR = 20.0


def doubts_of(
    result: LogprobsResult, pairs: Sequence[PromptPair], pattern: Pattern, scale: Scale
) -> list[Check]:
    """Of a verdict that nothing is wrong: one check of size and one of what is told."""
    size: list[Fact] = []
    shift, mean = pattern.shift, result.delta.mean_abs if result.delta else 0.0
    # one way, where rounding goes both
    if shift.excludes_zero and abs(shift.mean) >= max(_ONE_WAY * mean, _LEAST_SHIFT * scale.value):
        way = "below" if shift.mean < 0 else "above"
        size.append(fact("logprobs.rounding_both_ways", nats=abs(shift.mean), way=way))
    # a function of log p, as another temperature makes it; of rounding it is none
    if result.delta and mean >= _LEAST_SHIFT * scale.value:
        share = share_of_size(pairs)
        size += [fact("logprobs.goes_with_size", share=share)] if share >= FOLLOWS else []
    # answers, prompts and tokens that rounding does not explain, whatever the mean of all is: what
    # is computed at once for a long prompt is right where what follows step by step may not be
    explained = scale.value if scale.by_dtype else max(scale.value, WIDEST)
    sizes = [np.abs(pair.delta) for pair in pairs if len(pair.delta)]
    answers = [np.abs(pair.delta[pair.places >= pair.answer_begins]) for pair in pairs]
    together = np.concatenate([np.empty(0), *answers])
    if len(together) and (nats := float(together.mean())) > explained:
        size.append(fact("logprobs.answers_beyond", nats=nats))
    if num := sum(float(x.mean()) > explained * (1 + _ROOM / math.sqrt(len(x))) for x in sizes):
        size.append(fact("logprobs.prompts_beyond", num_prompts=num))
    if num := sum(int((x > _TOO_FAR * explained).sum()) for x in sizes):
        largest = max(float(x.max()) for x in sizes)
        size.append(fact("logprobs.tokens_far_beyond", num_tokens=num, largest=largest))
    told: list[Fact] = []
    if num := result.num_flips - result.num_ties - result.num_faults:
        told.append(fact("logprobs.ties_not_known", num_answers=num))
    if num := result.num_ended:
        told.append(fact("logprobs.ends_not_known", num_answers=num))
    if num := sum(pair.num_untold for pair in pairs):
        told.append(fact("logprobs.scores_not_known", num_tokens=num))
    for side, num in result.num_not_likeliest.items():
        most = result.max_below_likeliest.get(side, math.nan)
        told.append(fact("logprobs.not_likeliest", side=side, num_times=num, nats=most))
    return [
        check("scale", not size, fact("logprobs.doubts", doubts=size)),
        check("told", not told, fact("logprobs.doubts", doubts=told)),
    ]

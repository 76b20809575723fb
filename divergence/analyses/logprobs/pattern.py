"""What the differences look like, and so which kind of cause they have.

The looks: one a prompt (beyond eight times the median prompt), one a token (beyond twenty times the
median token), one of growth and one of shift over all prompts. Each claims something only with at
least LEAST_PROMPTS prompts, and only beyond what rounding explains (scale.py); growth and shift are
claimed where the 99% interval of a paired bootstrap over prompts leaves 0 out
(numerics.resampling). benchmarks/logprobs.py counts what healthy pairs and planted faults give.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np

from divergence.analyses.logprobs.pairs import PromptPair
from divergence.analyses.logprobs.scale import FAR, WIDEST, Scale
from divergence.numerics.statistics import LEAST_PROMPTS, Certainty, certainty_of

__all__ = ["Pattern", "beyond_of", "pattern_of", "typical_of"]

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
    together = np.concatenate(sizes)
    if not together.any():
        return Pattern(name="equal", shift=shift)
    mean = float(together.mean())
    far = mean > FAR * max(scale.value, WIDEST)
    odd, rest = _odd_prompts(held, sizes, scale)
    enough = shift.num_prompts >= LEAST_PROMPTS
    one_sided = mean > _LEAST_SHIFT * scale.value and _one_sided(
        np.concatenate([pair.delta for pair in held])
    )
    if enough and odd:
        return Pattern(name="sequences", shift=shift, odd=odd, rest=rest)
    growth, grows = _growth(held, scale)
    if enough and grows:
        return Pattern(name="growing", shift=shift, growth=growth)
    odd, rest = _odd_tokens(held, sizes, scale)
    if enough and odd:
        return Pattern(name="positions", shift=shift, odd=odd, rest=rest)
    if mean <= scale.value and not one_sided:
        return Pattern(name="within", shift=shift, growth=growth)
    if not enough and not one_sided:
        return Pattern(name="few", shift=shift, growth=growth, far=far)
    if experts is not False:
        odd, rest = _tail(held, sizes, scale)
        if odd:
            return Pattern(name="positions", shift=shift, odd=odd, rest=rest)
    one_way = abs(shift.mean) >= 0.5 * mean and (shift.excludes_zero or one_sided)
    if one_way or far:
        return Pattern(name="shifted", shift=shift, growth=growth, far=far)
    return Pattern(name="everywhere", shift=shift, growth=growth)


def _one_sided(delta: np.ndarray) -> bool:
    """Do nearly all tokens lie on one side? However few prompts they are of, rounding and other
    precisions move each token one way or the other: the sign of each is a coin."""
    num = len(delta)
    fewer = min(int((delta > 0).sum()), int((delta < 0).sum()))
    return num >= _LEAST_TOKENS and fewer <= _MOST_OTHER * num


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


def _odd_prompts(
    held: Sequence[PromptPair], sizes: Sequence[np.ndarray], scale: Scale
) -> tuple[list[tuple[int, int]], float]:
    """Prompts whose mean |Δ| is far beyond that of the others; of a short answer chance is larger
    (its mean has the error 1 / √n)."""
    means = np.array([size.mean() for size in sizes])
    room = 1 + 6 / np.sqrt([len(size) for size in sizes])
    bound = max(_ODD_PROMPT * float(np.median(means)), scale.value) * room
    odd = means > bound
    if not odd.any() or odd.mean() > _MOST_PROMPTS:
        return [], 0.0
    return (
        [(pair.sample, _worst(pair)) for pair, out in zip(held, odd, strict=True) if out],
        float(means[~odd].mean()),
    )


def _odd_tokens(
    held: Sequence[PromptPair], sizes: Sequence[np.ndarray], scale: Scale
) -> tuple[list[tuple[int, int]], float]:
    """Tokens, few among all, that hold most of the difference; none where a trusted machine shows
    half as many."""
    together = np.concatenate(sizes)
    bound = max(_ODD_TOKEN * float(np.median(together)), _FAR_TOKEN * scale.value)
    out = together > bound
    share, weight = float(out.mean()), float(together[out].sum() / together.sum())
    if int(out.sum()) < 3 or share > _MOST_TOKENS or weight < 0.5:
        return [], 0.0
    if share <= 2 * scale.usual_share(bound):
        return [], 0.0
    return _tokens_over(held, sizes, bound)


def _tail(
    held: Sequence[PromptPair], sizes: Sequence[np.ndarray], scale: Scale
) -> tuple[list[tuple[int, int]], float]:
    """Tokens far beyond rounding, any number, where most tokens of every prompt are within it."""
    if typical_of(np.concatenate(sizes)) > scale.value:
        return [], 0.0
    if any(typical_of(size) > scale.value * (1 + 6 / np.sqrt(len(size))) for size in sizes):
        return [], 0.0
    return _tokens_over(held, sizes, _FAR_TOKEN * scale.value)


def typical_of(size: np.ndarray) -> float:
    """The mean |Δ| of normal deviations with the median of these: what a tail does not move."""
    return float(np.median(size)) * math.sqrt(2 / math.pi) / NormalDist().inv_cdf(0.75)


def _tokens_over(
    held: Sequence[PromptPair], sizes: Sequence[np.ndarray], bound: float
) -> tuple[list[tuple[int, int]], float]:
    """Tokens that differ by more, the largest first; mean |Δ| of the others."""
    tokens = [
        (pair.sample, int(place), float(size))
        for pair, held_sizes in zip(held, sizes, strict=True)
        for place, size in zip(pair.places, held_sizes, strict=True)
        if size > bound
    ]
    tokens.sort(key=lambda item: -item[2])
    together = np.concatenate(sizes)
    return [(sample, place) for sample, place, _ in tokens], float(
        together[together <= bound].mean()
    )


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
    """One number a prompt: the mean over its answers, which are no more independent than its
    tokens."""
    by_prompt: dict[Hashable, list[float]] = {}
    for pair, value in zip(held, values, strict=True):
        by_prompt.setdefault(pair.prompt, []).append(float(value))
    return np.array([np.mean(group) for group in by_prompt.values()])


def _worst(pair: PromptPair) -> int:
    return int(pair.places[np.abs(pair.delta).argmax()])

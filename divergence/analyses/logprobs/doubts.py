"""What a mean that rounding explains may hide. Each doubt leaves low confidence, with its reason.

Rounding goes both ways, whatever log p is, is much the same in all prompts, and moves no token far.
And of what a side does not tell nothing is known: at what margin two answers part, what a token has
that one side alone scored, by which numbers a token was chosen that is not the likeliest of its
list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from divergence.analyses.logprobs.pairs import PromptPair
from divergence.analyses.logprobs.pattern import Pattern
from divergence.analyses.logprobs.processed import share_of_size
from divergence.analyses.logprobs.scale import BY_DTYPE, WIDEST, Scale
from divergence.comparison.decide import check
from divergence.comparison.results.findings import Check
from divergence.comparison.results.tokens import LogprobsResult
from divergence.layout import count, decimal
from divergence.words import letter

__all__ = ["FAULT", "TIE", "doubts_of"]

TIE = 3.0 * math.sqrt(2)
"""Times what rounding explains: what a tie may span. Three standard deviations of the difference of
two log-probabilities, of which a mean of |Δ| is a part."""
FAULT = 4.0 * math.sqrt(2) * math.sqrt(math.pi / 2)
"""The same from which on rounding flips none of many tokens: four of them, with the mean of |Δ|
that a normal deviation has (as in evaluations.flips). What lies between is not told."""
_ONE_WAY, _LEAST_SHIFT = 0.5, 0.25
_ROOM = 3.0
"""Standard errors by which a prompt's mean may lie above what rounding explains of all."""
_FAR_TOKEN = 20.0
_FOLLOWS = 0.5


def doubts_of(
    result: LogprobsResult, pairs: Sequence[PromptPair], pattern: Pattern, scale: Scale
) -> list[Check]:
    """Of a verdict that nothing is wrong: one check of size and one of what is told."""
    size = [*_one_way(pattern, scale, result), *_by_size(pairs, scale), *_beyond(pairs, scale)]
    told = _untold(result, pairs)
    return [
        check("scale", not size, "; ".join(size)), check("told", not told, "; ".join(told)),
    ]  # fmt: skip


def _one_way(pattern: Pattern, scale: Scale, result: LogprobsResult) -> list[str]:
    shift, mean = pattern.shift, result.delta.mean_abs if result.delta else 0.0
    least = max(_ONE_WAY * mean, _LEAST_SHIFT * scale.value)
    if not shift.excludes_zero or abs(shift.mean) < least:
        return []
    word = "below" if shift.mean < 0 else "above"
    return [f"B is {decimal(abs(shift.mean))} nats {word} A, and rounding goes both ways"]


def _by_size(pairs: Sequence[PromptPair], scale: Scale) -> list[str]:
    """Is Δ a function of log p, as another temperature makes it? Of rounding it is none."""
    delta = np.concatenate([np.empty(0), *(pair.delta for pair in pairs)])
    if not len(delta) or np.abs(delta).mean() < _LEAST_SHIFT * scale.value:
        return []
    share = share_of_size(pairs)
    if share < _FOLLOWS:
        return []
    return [f"Δ goes with log p (R² {share:.0%}), as another temperature makes it"]


def _beyond(pairs: Sequence[PromptPair], scale: Scale) -> list[str]:
    """Answers, prompts and tokens that rounding does not explain, whatever the mean of all is: what
    is computed at once for a long prompt is right where what follows step by step may not be."""
    explained = scale.value if scale.of in BY_DTYPE else max(scale.value, WIDEST)
    sizes = [np.abs(pair.delta) for pair in pairs if len(pair.delta)]
    prompts = sum(
        float(size.mean()) > explained * (1 + _ROOM / math.sqrt(len(size))) for size in sizes
    )
    far = sum(int((size > _FAR_TOKEN * explained).sum()) for size in sizes)
    largest = max((float(size.max()) for size in sizes), default=0.0)
    answers = [np.abs(pair.delta[pair.places >= pair.answer_begins]) for pair in pairs]
    together = np.concatenate(answers) if answers else np.empty(0)
    said = []
    if len(together) and (mean := float(together.mean())) > explained:
        said.append(f"beyond it: the answers by themselves, by {decimal(mean)} nats")
    if prompts:
        said.append(f"beyond it by itself: {count(prompts, 'prompt')}")
    if far:
        said.append(f"far beyond it: {count(far, 'token')}, of up to {decimal(largest)} nats")
    return said


def _untold(result: LogprobsResult, pairs: Sequence[PromptPair]) -> list[str]:
    said = []
    if num := result.num_flips - result.num_ties - result.num_faults:
        said.append(f"not known to be ties: {count(num, 'answer')} that parted")
    if num := result.num_ended:
        said.append(f"ended earlier on one side, by how little nobody told: {count(num, 'answer')}")
    if num := sum(pair.num_untold for pair in pairs):
        said.append(f"not told on both sides: {count(num, 'token')} of the answers")
    for side, num in result.num_not_likeliest.items():
        largest = decimal(result.max_below_likeliest.get(side, math.nan))
        said.append(
            f"{letter(side)} does not choose the likeliest token of its own list "
            f"({count(num, 'time')}, by at most {largest} nats)"
        )
    return said

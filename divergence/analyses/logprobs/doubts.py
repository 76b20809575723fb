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
from divergence.analyses.logprobs.scale import WIDEST, Scale
from divergence.comparison.decide import check
from divergence.comparison.results import Check, LogprobsResult
from divergence.facts import Fact, fact

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
        check("scale", not size, fact("logprobs.doubts", doubts=size)),
        check("told", not told, fact("logprobs.doubts", doubts=told)),
    ]


def _one_way(pattern: Pattern, scale: Scale, result: LogprobsResult) -> list[Fact]:
    shift, mean = pattern.shift, result.delta.mean_abs if result.delta else 0.0
    least = max(_ONE_WAY * mean, _LEAST_SHIFT * scale.value)
    if not shift.excludes_zero or abs(shift.mean) < least:
        return []
    way = "below" if shift.mean < 0 else "above"
    return [fact("logprobs.rounding_both_ways", nats=abs(shift.mean), way=way)]


def _by_size(pairs: Sequence[PromptPair], scale: Scale) -> list[Fact]:
    """Is Δ a function of log p, as another temperature makes it? Of rounding it is none."""
    delta = np.concatenate([np.empty(0), *(pair.delta for pair in pairs)])
    if not len(delta) or np.abs(delta).mean() < _LEAST_SHIFT * scale.value:
        return []
    share = share_of_size(pairs)
    return [] if share < _FOLLOWS else [fact("logprobs.goes_with_size", share=share)]


def _beyond(pairs: Sequence[PromptPair], scale: Scale) -> list[Fact]:
    """Answers, prompts and tokens that rounding does not explain, whatever the mean of all is: what
    is computed at once for a long prompt is right where what follows step by step may not be."""
    explained = scale.value if scale.by_dtype else max(scale.value, WIDEST)
    sizes = [np.abs(pair.delta) for pair in pairs if len(pair.delta)]
    prompts = sum(
        float(size.mean()) > explained * (1 + _ROOM / math.sqrt(len(size))) for size in sizes
    )
    far = sum(int((size > _FAR_TOKEN * explained).sum()) for size in sizes)
    largest = max((float(size.max()) for size in sizes), default=0.0)
    answers = [np.abs(pair.delta[pair.places >= pair.answer_begins]) for pair in pairs]
    together = np.concatenate(answers) if answers else np.empty(0)
    doubts = []
    if len(together) and (mean := float(together.mean())) > explained:
        doubts.append(fact("logprobs.answers_beyond", nats=mean))
    if prompts:
        doubts.append(fact("logprobs.prompts_beyond", num_prompts=prompts))
    if far:
        doubts.append(fact("logprobs.tokens_far_beyond", num_tokens=far, largest=largest))
    return doubts


def _untold(result: LogprobsResult, pairs: Sequence[PromptPair]) -> list[Fact]:
    doubts = []
    if num := result.num_flips - result.num_ties - result.num_faults:
        doubts.append(fact("logprobs.ties_not_known", num_answers=num))
    if num := result.num_ended:
        doubts.append(fact("logprobs.ends_not_known", num_answers=num))
    if num := sum(pair.num_untold for pair in pairs):
        doubts.append(fact("logprobs.scores_not_known", num_tokens=num))
    for side, num in result.num_not_likeliest.items():
        nats = result.max_below_likeliest.get(side, math.nan)
        doubts.append(fact("logprobs.not_likeliest", side=side, num_times=num, nats=nats))
    return doubts

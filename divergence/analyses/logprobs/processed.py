"""What sampling settings make of log-probabilities, seen in the differences of two sides.

An engine may tell log-probabilities before or behind its sampling settings, and a trainer need not
do as it does.

- *Temperature*: log p' = log p / T + c, where c is one number for all tokens of a place. Of two
  tokens that both sides list at one place, c falls out: the ratio of their distances is 1 / T.
  Where the chosen tokens alone are told, c goes with log p as well, and the slope of log p' over
  log p lies between 1 and 1 / T: it bounds T.
- *Top-p, top-k, min-p*: behind them the likeliest tokens hold all of the probability, so that each
  is told by -log S nats too high, where S is what they held before. That is never below 0 and never
  above -log(top-p).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from divergence.analyses.logprobs.pairs import PromptPair, values_of
from divergence.facts import Fact, fact

__all__ = ["LEAST_TOKENS", "processed", "share_of_size"]

LEAST_TOKENS = 50
_FITS = 0.99
"""Share of the listed distances that one ratio must explain."""
_FOLLOWS = 0.5
_OTHER = 0.02
"""A ratio nearer to 1 is no other temperature."""
_MOST_OTHER = 0.05
_BOUNDED = 4.0
"""Times the median: no renormalised token is farther off, and other weights leave a longer tail."""
_MOST_LOST = 0.5
"""No top-p in use leaves out more than half of the probability."""


def processed(pairs: Sequence[PromptPair]) -> Fact | None:
    """The setting that explains the differences, where one does."""
    held = [pair for pair in pairs if len(pair.delta)]
    if not held:
        return None
    return _by_lists(held) or _by_size(held) or _renormalised(held)


def share_of_size(pairs: Sequence[PromptPair]) -> float:
    """Of the differences, the share (R²) that is a function of log p."""
    held = [pair for pair in pairs if len(pair.delta)]
    delta = np.concatenate([np.empty(0), *(pair.delta for pair in held)])
    if len(delta) < LEAST_TOKENS:
        return 0.0
    log_p = np.concatenate([values_of(pair)[0] for pair in held])
    if not (delta.std() > 0 and log_p.std() > 0):
        return 0.0
    return float(np.corrcoef(delta, log_p)[0, 1]) ** 2


def _by_lists(held: Sequence[PromptPair]) -> Fact | None:
    """By the tokens that both sides list at one place, each less their mean there."""
    parts = []
    for pair in held:
        for _, mine, other in pair.rows:
            p, q = pair.reference.distribution(mine), pair.candidate.distribution(other)
            _, first, second = np.intersect1d(p.ids, q.ids, return_indices=True)
            values = np.stack([p.log[first], q.log[second]])
            values = values[:, np.isfinite(values).all(0)]
            if values.shape[1] > 1:
                parts.append(values - values.mean(1, keepdims=True))
    if not parts:
        return None
    x, y = np.concatenate(parts, axis=1)
    if len(x) < LEAST_TOKENS or not x.any():
        return None
    ratio = float((x * y).sum() / (x * x).sum())
    apart, rest = float(((y - x) ** 2).sum()), float(((y - ratio * x) ** 2).sum())
    if ratio <= 0 or abs(ratio - 1) < _OTHER or rest > (1 - _FITS) * apart:
        return None
    return fact(
        "logprobs.temperature", temperature=1 / ratio, share=1 - rest / apart, num_tokens=len(x)
    )


def _by_size(held: Sequence[PromptPair]) -> Fact | None:
    """By the chosen tokens alone."""
    share = share_of_size(held)
    if share < _FOLLOWS:
        return None
    x, y = np.concatenate([values_of(pair) for pair in held], axis=1)
    slope = float(np.cov(x, y)[0, 1] / x.var(ddof=1))
    if slope <= 0 or abs(slope - 1) < _OTHER:
        return None
    bound = "most" if slope > 1 else "least"
    return fact("logprobs.goes_with_size", share=share, temperature=1 / slope, bound=bound)


def _renormalised(held: Sequence[PromptPair]) -> Fact | None:
    delta = np.concatenate([pair.delta for pair in held])
    size, mean = np.abs(delta), float(delta.mean())
    against = int((delta * mean < 0).sum())
    usual = float(np.median(size))
    if len(delta) < LEAST_TOKENS or against > _MOST_OTHER * len(delta):
        return None
    if float(size.max()) > min(_BOUNDED * usual, -math.log(_MOST_LOST)):
        return None
    return fact(
        "logprobs.renormalised",
        side="candidate" if mean > 0 else "reference",
        num_higher=len(delta) - against,
        num_tokens=len(delta),
        nats=usual,
        kept=math.exp(-usual),
    )

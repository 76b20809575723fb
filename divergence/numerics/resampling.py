"""How sure a mean over prompts is: the paired bootstrap, a permutation of signs, and its power.

Tokens of one prompt depend on each other; prompts do not. So the unit that is drawn is the prompt,
with the difference of both sides that it gave (paired). Draws come from a seeded generator: the
same numbers give the same answer everywhere.

    interval       quantiles of the mean of n prompts drawn with replacement (Efron and Tibshirani,
                   An Introduction to the Bootstrap, 1993, ch. 13)
    p value        share of the 2^n changes of sign that give as large a mean: if neither side is
                   above the other, each sign is a coin (Fisher, The Design of Experiments, 1935)
    least share    Clopper and Pearson's exact lower bound
    smallest shift (z_{0.995} + z_{0.8}) sd / √n: seen at the 1% level in four of five such sets
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import msgspec
import numpy as np

__all__ = ["LEAST_PROMPTS", "Certainty", "certainty_of", "least_share", "rank_sum"]

LEAST_PROMPTS = 8
"""Fewer give 2^7 = 128 changes of sign or less that count twice: no p value below 1%."""
_DRAWS = 10_000
_EXACT = 12
_LEVEL, _POWER = 0.01, 0.8


class Certainty(msgspec.Struct, frozen=True, kw_only=True):
    """Of the mean over prompts of their mean differences."""

    num_prompts: int
    mean: float
    low: float | None = None
    """Lower end of the 99% interval. None with fewer prompts than LEAST_PROMPTS, as all below."""
    high: float | None = None
    p_value: float | None = None
    """Of a mean of 0, two-sided."""
    smallest_shift: float | None = None
    """The least shift of all prompts that so many of such a spread would show."""

    @property
    def excludes_zero(self) -> bool:
        """Do interval and p value both say that it is not 0?"""
        return (
            self.low is not None and self.high is not None and not self.low <= 0 <= self.high
            and self.p_value is not None and self.p_value <= _LEVEL
        )  # fmt: skip


def certainty_of(values: np.ndarray) -> Certainty:
    """``values``: one finite number a prompt."""
    num = len(values)
    mean = float(values.mean()) if num else 0.0
    if num < LEAST_PROMPTS:
        return Certainty(num_prompts=num, mean=mean)
    generator = np.random.default_rng(0)
    draws = max(1, 2_000_000 // num)
    means: list[np.ndarray] = []
    for start in range(0, _DRAWS, draws):
        picked = generator.integers(0, num, (min(draws, _DRAWS - start), num))
        means.append(values[picked].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [_LEVEL / 2, 1 - _LEVEL / 2])
    normal = NormalDist()
    z = normal.inv_cdf(1 - _LEVEL / 2) + normal.inv_cdf(_POWER)
    spread = float(values.std(ddof=1))
    return Certainty(
        num_prompts=num, mean=mean, low=float(low), high=float(high),
        p_value=_p_value(values, generator), smallest_shift=z * spread / math.sqrt(num),
    )  # fmt: skip


def least_share(num: int, of: int) -> float:
    """The lower end of the one-sided 99% interval of a share of which ``num`` of ``of`` were seen
    (Clopper and Pearson, Biometrika 26, 1934): as many would be seen in 1 of 100 sets."""
    if not 0 < num <= of:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        above = (
            sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(num, of + 1))
            if of <= 1000
            else _above(num, of, share)
        )
        low, high = (share, high) if above < _LEVEL else (low, share)
    return low


def _above(num: int, of: int, share: float) -> float:
    """The same probability where it has many terms: the normal one."""
    return 1 - NormalDist(of * share, math.sqrt(of * share * (1 - share)) or 1.0).cdf(num - 0.5)


def rank_sum(values: np.ndarray, there: np.ndarray) -> float:
    """Standard deviations by which ``values[there]`` rank above the others (Wilcoxon, Biometrics
    Bulletin 1, 1945; ties share their mean rank); 0 where either is empty."""
    n, m, num = int(there.sum()), int((~there).sum()), len(values)
    if not n or not m:
        return 0.0
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    ties = float((counts**3 - counts).sum()) / (num * (num - 1))
    spread = math.sqrt(n * m / 12 * (num + 1 - ties))
    return (float(ranks[there].sum()) - n * (num + 1) / 2) / spread if spread else 0.0


def _p_value(values: np.ndarray, generator: np.random.Generator) -> float:
    """Of all changes of sign where they are few, else of draws of them."""
    wanted = abs(float(values.mean())) * (1 - 1e-12)
    if len(values) <= _EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(values))))
        return float((np.abs((signs * values).mean(axis=1)) >= wanted).mean())
    hits, rows = 0, max(1, 2_000_000 // len(values))
    for start in range(0, _DRAWS, rows):
        shape = min(rows, _DRAWS - start), len(values)
        signs = generator.integers(0, 2, shape) * 2.0 - 1.0
        hits += int((np.abs((signs * values).mean(axis=1)) >= wanted).sum())
    return (hits + 1) / (_DRAWS + 1)

"""Tests and intervals by resampling: no distribution is assumed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np

# How sure a mean over prompts is: the paired bootstrap, a permutation of signs, and its power.
#
# Tokens of one prompt depend on each other; prompts do not. So the unit that is drawn is the
# prompt, with the difference of both sides that it gave (paired). Draws come from a seeded
# generator: the same numbers give the same answer everywhere.
#
#     interval       quantiles of the mean of n prompts drawn with replacement (Efron and
#                    Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13)
#     p value        share of the 2^n changes of sign that give as large a mean: if neither side is
#                    above the other, each sign is a coin (Fisher, The Design of Experiments, 1935)
#     least share    Clopper and Pearson's exact lower bound
#     smallest shift (z_{0.995} + z_{0.8}) sd / √n: seen at the 1% level in four of five such sets

LEAST_PROMPTS = 8
"""Fewer give 2^7 = 128 changes of sign or less that count twice: no p value below 1%."""
_DRAWS = 10_000
_EXACT = 12
LEVEL, _POWER = 0.01, 0.8


class Certainty(msgspec.Struct, frozen=True, kw_only=True):
    """Says how certain the mean over prompts of their mean differences is."""

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
            self.low is not None
            and self.high is not None
            and not self.low <= 0 <= self.high
            and self.p_value is not None
            and self.p_value <= LEVEL
        )


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
    low, high = np.quantile(np.concatenate(means), [LEVEL / 2, 1 - LEVEL / 2])
    normal = NormalDist()
    z = normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(_POWER)
    spread = float(values.std(ddof=1))
    # of all changes of sign where they are few, else of draws of them
    wanted = abs(mean) * (1 - 1e-12)
    if num <= _EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=num)))
        p_value = float((np.abs((signs * values).mean(axis=1)) >= wanted).mean())
    else:
        hits = 0
        for start in range(0, _DRAWS, draws):
            signs = generator.integers(0, 2, (min(draws, _DRAWS - start), num)) * 2.0 - 1.0
            hits += int((np.abs((signs * values).mean(axis=1)) >= wanted).sum())
        p_value = (hits + 1) / (_DRAWS + 1)
    return Certainty(
        num_prompts=num,
        mean=mean,
        low=float(low),
        high=float(high),
        p_value=p_value,
        smallest_shift=z * spread / math.sqrt(num),
    )


def least_share(num: int, of: int) -> float:
    """The lower end of the one-sided 99% interval of a share of which ``num`` of ``of`` were seen
    (Clopper and Pearson, Biometrika 26, 1934): as many would be seen in 1 of 100 sets."""
    if not 0 < num <= of:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        if of <= 1000:
            chances = (
                math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(num, of + 1)
            )
            above = sum(chances)
        else:  # the normal distribution, in place of many terms
            spread = math.sqrt(of * share * (1 - share)) or 1.0
            above = 1 - NormalDist(of * share, spread).cdf(num - 0.5)
        low, high = (share, high) if above < LEVEL else (low, share)
    return low


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


# Do two sources' sampled texts come from one distribution? A kernel two-sample test.
#
# The statistic is the squared maximum mean discrepancy (unbiased; Gretton et al., A Kernel
# Two-Sample Test, JMLR 2012, eq. 3) under a Hamming kernel between answers to one prompt, the share
# of positions that hold the same token (Gao, Liang and Guestrin, Model Equality Testing, 2024;
# there the number of them), averaged over prompts. If the two sources are one, the answers to a
# prompt may change sides: the p value is the share of such permutations that give as large a
# statistic.
#
# A test that sees nothing says little without its power. It is told as the smallest share of
# answers that would have to come from another model for the test to see it in four of five draws.
# That model is as far as they get: its answers are as alike as these, and like these no more than
# answers to another prompt are. One that answers nearly the same is seen less well.

_DRAWS_TWO_SAMPLE, _TRIALS = 2000, 200
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class TwoSample(msgspec.Struct, frozen=True, kw_only=True):
    """``p_value``: None where there are too few answers for one of 1%."""

    num_prompts: int
    num_answers: int
    """Of one side, to all prompts."""
    mmd: float
    """Squared; it may be below 0 where the two are one."""
    p_value: float | None
    smallest_share: float | None
    """None where no share is seen, not even that of all answers."""


class _Prompt:
    """The answers to one prompt: ``kernel`` (n, n), and draws of who is on which side (D, n)."""

    def __init__(self, a: np.ndarray, b: np.ndarray, generator: np.random.Generator) -> None:
        both = np.concatenate([a, b])
        self.kernel = np.stack([(both == row).mean(axis=1) for row in both])
        self.num = len(a), len(b)
        keys = generator.random((_DRAWS_TWO_SAMPLE, len(both)))
        keys[0] = np.arange(len(both))  # the first draw is what was seen
        self.first = (keys.argsort(axis=1).argsort(axis=1) < len(a)).astype(np.float64)

    @property
    def alike(self) -> float:
        """Mean kernel of two answers."""
        num = len(self.kernel)
        return float((self.kernel.sum() - np.trace(self.kernel)) / (num * (num - 1)))

    def statistic(self, other: float = 0.0, kept: np.ndarray | None = None) -> np.ndarray:
        """Compute the statistic of each draw (D,). ``kept`` (T, n): which answers of the second
        side stay; the others are replaced by another model's, whose kernel with these is
        ``other``."""
        first = self.first if kept is None else self.first[: len(kept)]
        second = 1 - first
        stays = second if kept is None else second * kept
        own, num = np.diagonal(self.kernel), stays.sum(axis=1)
        n, m = self.num
        within = self._sum(first, first) - first @ own
        gone = m - num
        behind = self._sum(stays, stays) - stays @ own
        behind += self.alike * gone * (gone - 1) + 2 * other * num * gone
        across = self._sum(first, stays) + other * n * gone
        mmd: np.ndarray = within / (n * (n - 1)) + behind / (m * (m - 1)) - 2 * across / (n * m)
        return mmd

    def _sum(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        sums: np.ndarray = ((left @ self.kernel) * right).sum(axis=1)
        return sums


def two_sample(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> TwoSample:
    """``pairs``: of each prompt both sides' answers, int (n, L) and (m, L) with n, m >= 2, filled
    up with one number behind their ends. Raises ValueError for fewer answers."""
    if not pairs or any(len(a) < 2 or len(b) < 2 for a, b in pairs):
        raise ValueError("at least two answers to each prompt are needed on both sides")
    generator = np.random.default_rng(0)
    prompts = [_Prompt(a, b, generator) for a, b in pairs]
    mmds = np.mean([prompt.statistic() for prompt in prompts], axis=0)
    ways = sum(math.log(math.comb(sum(prompt.num), prompt.num[0])) for prompt in prompts)
    enough = ways >= math.log(2 / LEVEL)
    p_value = float((mmds >= mmds[0] - 1e-12).mean())
    return TwoSample(
        num_prompts=len(pairs),
        num_answers=sum(len(answers) for answers, _ in pairs),
        mmd=float(mmds[0]),
        p_value=p_value if enough else None,
        smallest_share=_smallest_share(prompts, pairs, mmds, generator) if enough else None,
    )


def _smallest_share(
    prompts: list[_Prompt],
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    null: np.ndarray,
    generator: np.random.Generator,
) -> float | None:
    bound = float(np.quantile(null, 1 - LEVEL, method="higher"))
    kernels = []  # of answers to different prompts
    for (first, _), (second, _) in itertools.pairwise(pairs):
        length = min(first.shape[1], second.shape[1])
        kernels.append(float((first[0, :length] == second[0, :length]).mean()) if length else 0.0)
    other = float(np.mean(kernels)) if kernels else 0.0
    for share in _SHARES:
        mmds = np.zeros(_TRIALS)
        for prompt in prompts:
            kept = (generator.random((_TRIALS, sum(prompt.num))) >= share).astype(np.float64)
            mmds += prompt.statistic(other, kept)
        if float((mmds / len(prompts) > bound).mean()) >= _POWER:
            return share
    return None

"""Do two sources' sampled texts come from one distribution? A kernel two-sample test.

The statistic is the squared maximum mean discrepancy (unbiased; Gretton et al., A Kernel
Two-Sample Test, JMLR 2012, eq. 3) under a Hamming kernel between answers to one prompt, the share
of positions that hold the same token (Gao, Liang and Guestrin, Model Equality Testing, 2024; there
the number of them), averaged over prompts. If the two sources are one, the answers to a prompt may
change sides: the p value is the share of such permutations that give as large a statistic.

A test that sees nothing says little without its power. It is told as the smallest share of answers
that would have to come from another model for the test to see it in four of five draws. That model
is as far as they get: its answers are as alike as these, and like these no more than answers to
another prompt are. One that answers nearly the same is seen less well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

__all__ = ["LEVEL", "TwoSample", "two_sample"]

LEVEL, _POWER = 0.01, 0.8
_DRAWS, _TRIALS = 2000, 200
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
        keys = generator.random((_DRAWS, len(both)))
        keys[0] = np.arange(len(both))  # the first draw is what was seen
        self.first = (keys.argsort(axis=1).argsort(axis=1) < len(a)).astype(np.float64)

    @property
    def alike(self) -> float:
        """Mean kernel of two answers."""
        num = len(self.kernel)
        return float((self.kernel.sum() - np.trace(self.kernel)) / (num * (num - 1)))

    def statistic(self, other: float = 0.0, kept: np.ndarray | None = None) -> np.ndarray:
        """Of each draw (D,). ``kept`` (T, n): which answers of the second side stay; the others are
        replaced by another model's, whose kernel with these is ``other``."""
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
        mmd: np.ndarray = (
            within / (n * (n - 1)) + behind / (m * (m - 1)) - 2 * across / (n * m)
        )  # fmt: skip
        return mmd

    def _sum(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        sums: np.ndarray = ((left @ self.kernel) * right).sum(axis=1)
        return sums


def two_sample(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, seed: int = 0) -> TwoSample:
    """``pairs``: of each prompt both sides' answers, int (n, L) and (m, L) with n, m >= 2, filled
    up with one number behind their ends. Raises ValueError for fewer answers."""
    if not pairs or any(len(a) < 2 or len(b) < 2 for a, b in pairs):
        raise ValueError("at least two answers to each prompt are needed on both sides")
    generator = np.random.default_rng(seed)
    prompts = [_Prompt(a, b, generator) for a, b in pairs]
    mmds = np.mean([prompt.statistic() for prompt in prompts], axis=0)
    ways = sum(math.log(math.comb(sum(prompt.num), prompt.num[0])) for prompt in prompts)
    enough = ways >= math.log(2 / LEVEL)
    p_value = float((mmds >= mmds[0] - 1e-12).mean())
    return TwoSample(
        num_prompts=len(pairs), num_answers=sum(len(answers) for answers, _ in pairs),
        mmd=float(mmds[0]), p_value=p_value if enough else None,
        smallest_share=_smallest_share(prompts, pairs, mmds, generator) if enough else None,
    )  # fmt: skip


def _smallest_share(
    prompts: list[_Prompt],
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    null: np.ndarray,
    generator: np.random.Generator,
) -> float | None:
    bound = float(np.quantile(null, 1 - LEVEL, method="higher"))
    other = _across(pairs)
    for share in _SHARES:
        mmds = np.zeros(_TRIALS)
        for prompt in prompts:
            kept = (generator.random((_TRIALS, sum(prompt.num))) >= share).astype(np.float64)
            mmds += prompt.statistic(other, kept)
        if float((mmds / len(prompts) > bound).mean()) >= _POWER:
            return share
    return None


def _across(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The mean kernel of answers to different prompts; 0 with one prompt alone."""
    kernels = []
    for (first, _), (second, _) in itertools.pairwise(pairs):
        length = min(first.shape[1], second.shape[1])
        kernels.append(float((first[0, :length] == second[0, :length]).mean()) if length else 0.0)
    return float(np.mean(kernels)) if kernels else 0.0

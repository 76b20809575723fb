"""Is a difference more than chance? Exact McNemar, changes of sign by cluster, and Holm; and the
interval of a difference between binary scores.

McNemar    of b documents lost and c gained, each is a coin if neither side is better: the exact
           binomial test, two-sided (McNemar 1947)
signs      graded scores, repeats, clusters: the share of changes of sign of the clusters' sums
           that give as large a sum (Fisher 1935). All of them up to 2^13, else draws from a
           seeded generator; above MOST_SIGNS clusters the t test, which is its limit
score      the interval of binary scores, each document alone: all differences that the score
           test does not reject (Tango 1998, Statistics in Medicine 17; one of the two that
           Fagerland, Lydersen and Laake 2014 recommend)
Holm       of several tasks: the p values that keep the chance of any false one at the level
           (Holm 1979)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from divergence.evaluations.statistics.means import mean_of

__all__ = ["MOST_SIGNS", "holm", "mcnemar", "score_interval", "sign_test"]

MOST_SIGNS = 2000
"""More clusters that differ than this, and t is as good to three digits."""
_DRAWS = 9_999


def mcnemar(lost: int, gained: int) -> float:
    """The exact two-sided p value; 1 where nothing flipped."""
    from scipy import stats

    if lost + gained == 0:
        return 1.0
    return float(stats.binomtest(lost, lost + gained, 0.5).pvalue)


def score_interval(
    lost: np.ndarray | int, gained: np.ndarray | int, num: int, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the interval of (gained - lost) / num, for each of the numbers of documents lost
    and gained, of any one shape. By bisection.

    With the difference D given, q is the maximum-likelihood estimate of the chance to be lost, and

        z(D) = (gained - lost - num D) / √(num (2 q + D (1 - D)))
    """
    from scipy import stats

    lost, gained = np.asarray(lost, float), np.asarray(gained, float)
    reach = stats.norm.ppf((1 + level) / 2)

    def deviations(difference: np.ndarray) -> np.ndarray:
        b = (2 * num + lost - gained) * difference - lost - gained
        c = -lost * difference * (1 - difference)
        q = (np.sqrt(np.maximum(b**2 - 8 * num * c, 0.0)) - b) / (4 * num)
        variance = np.maximum(num * (2 * q + difference * (1 - difference)), 1e-12)
        deviation: np.ndarray = (gained - lost - num * difference) / np.sqrt(variance)
        return deviation

    middle, ends = (gained - lost) / num, []
    for sign in (-1.0, 1.0):
        inside, outside = middle, np.full(middle.shape, sign)
        for _ in range(50):
            half = (inside + outside) / 2
            held = np.abs(deviations(half)) <= reach
            inside, outside = np.where(held, half, inside), np.where(held, outside, half)
        ends.append(inside)
    return ends[0], ends[1]


def sign_test(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, str]:
    """The two-sided p value of no difference, and the test's name."""
    from scipy import stats

    changed = sums[sums != 0]
    if len(changed) < 2:  # one alone is as large with either sign
        return 1.0, "permutation"
    if len(changed) > MOST_SIGNS:
        summary = mean_of(sums, sizes)
        return float(2 * stats.t.sf(abs(summary.mean / summary.error), summary.freedom)), "t"
    result = stats.permutation_test(
        (changed,), lambda values, axis: values.sum(axis=axis), permutation_type="samples",
        n_resamples=_DRAWS, vectorized=True, batch=1 + 2_000_000 // len(changed),
        alternative="two-sided", rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(min(1.0, result.pvalue)), "permutation"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in the given order."""
    adjusted, reached = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = reached
    return adjusted

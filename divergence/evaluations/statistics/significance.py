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

How much so many documents can tell, and how many would be needed: ``spread`` is the standard
deviation of one document's difference, clusters included: √n times the clustered standard error
without made-up clusters. ``pad``: of these, in units of one document. A padded error at n documents
is √(n spread² + 2 pad²) / n, to within 2/n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from divergence.evaluations.statistics.means import mean_of

__all__ = [
    "LEVEL", "MOST_SIGNS", "POWER", "documents_needed", "holm", "mcnemar", "score_interval",
    "sign_test", "smallest_difference",
]  # fmt: skip

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


LEVEL = 0.05
"""Of intervals (95%), of tests, and of each of the two tests of equivalence."""
POWER = 0.8


def smallest_difference(error: float, freedom: float) -> float:
    """The true difference that the test would find in four of five such sets."""
    from scipy import stats

    return float((stats.t.ppf(1 - LEVEL / 2, freedom) + stats.t.ppf(POWER, freedom)) * error)


def documents_needed(
    spread: float, pad: float, *, difference: float, band: float, num: int
) -> int | None:
    """So many documents like these would settle it, with probability POWER.

    First: as many as show that sides without any true difference are equal within the band. Where
    there are as many already, the difference is near the band's edge: then as many as tell on
    which side of it a true difference of this size lies, or beyond the band that it is none of 0.
    None where no number would.
    """
    from scipy import stats

    z_test, z_two, z_power, z_half = stats.norm.ppf(
        [1 - LEVEL, 1 - LEVEL / 2, POWER, (1 + POWER) / 2]
    )
    if band <= 0:
        return None
    least = _count(spread, pad, (z_test + z_half) / band)
    if least > num:
        return least
    if abs(difference) < band:
        room = (z_test + z_power) / (band - abs(difference))
    else:
        room = (z_two + z_power) / abs(difference)
    return max(_count(spread, pad, room), num + 1)


def _count(spread: float, pad: float, per_error: float) -> int:
    """The least n with √(n spread² + 2 pad²) / n ≤ 1 / per_error."""
    a = (spread * per_error) ** 2
    b = 2 * (pad * per_error) ** 2
    return max(2, math.ceil((a + math.sqrt(a * a + 4 * b)) / 2))

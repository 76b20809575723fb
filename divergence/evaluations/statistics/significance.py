"""Is a difference more than chance? Exact McNemar, changes of sign by cluster, and Holm.

McNemar    of b documents lost and c gained, each is a coin if neither side is better: the exact
           binomial test, two-sided (McNemar 1947)
signs      graded scores, repeats, clusters: the share of changes of sign of the clusters' sums
           that give as large a sum (Fisher 1935). All of them up to 2^13, else draws from a
           seeded generator; above MOST_SIGNS clusters the t test, which is its limit
Holm       of several tasks: the p values that keep the chance of any false one at the level
           (Holm 1979)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from divergence.evaluations.statistics.means import mean_of

__all__ = ["MOST_SIGNS", "holm", "mcnemar", "sign_test"]

MOST_SIGNS = 2000
"""More clusters that differ than this, and t is as good to three digits."""
_DRAWS = 9_999


def mcnemar(lost: int, gained: int) -> float:
    """The exact two-sided p value; 1 where nothing flipped."""
    from scipy import stats

    if lost + gained == 0:
        return 1.0
    return float(stats.binomtest(lost, lost + gained, 0.5).pvalue)


def sign_test(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, str]:
    """The two-sided p value of no difference, and the test's name."""
    from scipy import stats

    changed = sums[sums != 0]
    if len(changed) < 2:  # one alone is as large with either sign
        return 1.0, "permutation"
    if len(changed) > MOST_SIGNS:
        found = mean_of(sums, sizes)
        return float(2 * stats.t.sf(abs(found.mean / found.error), found.freedom)), "t"
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

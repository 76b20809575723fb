"""Statistics of paired scores: pure functions on arrays. scipy is imported here alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from divergence.errors import UsageError


def need_scipy() -> None:
    """Raise UsageError where scipy is not installed."""
    try:
        import scipy.stats  # noqa: F401 - only to see whether it is there
    except ImportError as error:
        raise UsageError(
            "the statistics of scores need the package scipy",
            hint="pip install 'divergence-debug[scores]'",
        ) from error


# The mean of paired differences with the error of clustered documents.
#
# Documents of one cluster (questions about one text, ways of asking one fact) are not independent,
# so the unit is the cluster (Miller, Adding Error Bars to Evals, arXiv:2411.00640, 2024). With S_g
# the sum and n_g the number of documents of cluster g, n = Σ n_g and d = Σ S_g / n:
#
#     var(d) = Σ w_g (S_g - n_g d)² / n²,   w_g = 1 / (1 - n_g/n)
#
# w is the small-sample correction of Bell and McCaffrey (2002, "CR2"), and t has their degrees of
# freedom; without clusters that is the paired t test. (Miller's formula has w = 1.)
#
# Such an interval is too narrow where few documents differ, as between two healthy machines: with
# no flip at all its width would be 0. So two made-up clusters are added for intervals and
# equivalence, of mean size, whose sums lie as far to either side as the mean of fourth powers of
# the sums that are not 0, ⁴√(Σ S⁴ / k): large ones weigh more, as in the variance. For unclustered
# binary scores that is the error of Bonett and Price (Statistics in Medicine 31, 2012); their
# interval is another, ``significance.score_interval``. Of clusters, and of graded scores, made-up
# ones fade as more than a third of the G differ, for then the set itself says how they do: their
# squares have the weight
#
#     w = 3/2 (1 - k / (G - 1)),  at most 1, and at least 1/G, of graded scores 0, the paired t test
#
# And where clusters flip in one direction, a few of them as a whole, a set that misses those has
# too small a mean and too small an error at once. So of clusters t is taken through Hall's
# transformation (Journal of the Royal Statistical Society B 54, 1992), with the skewness γ of the
# clusters' sums:
#
#     g(t) = t + a t² + a² t³ / 3 + a / 2,   a = γ / (3 √G)
#
# ``benchmarks/scores_coverage.py`` prints what the intervals cover.
#
# All functions take sums as (..., clusters): leading axes are separate data sets.

Floats = np.ndarray
FEW = 30
"""Clusters that differ: with fewer, in one direction, intervals may hold less often than said."""
_ONE_WAY = 0.8


class Mean(NamedTuple):
    """A mean, its standard error, the degrees of freedom of t, and a of Hall's transformation."""

    mean: Floats
    error: Floats
    freedom: Floats
    skew: Floats


class Padding(NamedTuple):
    """Two made-up clusters: how far they lie from their middle, and what a square of theirs weighs
    (1: as much as any other's)."""

    far: Floats
    weight: Floats


def cluster_sums(values: Floats, clusters: Floats | None) -> tuple[Floats, Floats]:
    """(sums, sizes) of each cluster. ``clusters``: its number for each value; None: each alone."""
    if clusters is None:
        return values, np.ones(len(values))
    sizes = np.bincount(clusters).astype(float)
    return np.bincount(clusters, weights=values), sizes


def padding(sums: Floats, sizes: Floats, span: float, *, graded: bool = False) -> Padding:
    """The made-up clusters. ``span``: how much one document's score could change, where no cluster
    changed at all. ``graded``: of documents alone, whose scores are more than right and wrong."""
    largest, changed = np.abs(sums).max(-1, initial=0.0), (sums != 0).sum(-1)
    shares = sums / np.where(largest > 0, largest, 1.0)[..., None]  # whose powers stay in range
    power_mean = largest * ((shares**4).sum(-1) / np.maximum(changed, 1)) ** 0.25
    far: Floats = np.where(changed > 0, power_mean, span * sizes.mean())
    num = sums.shape[-1]
    alone = sizes.max() == 1
    if alone and not graded:
        return Padding(far, np.ones_like(far))
    fading = 1.5 * (1 - changed / max(num - 1, 1))
    return Padding(far, np.clip(fading, 0.0 if alone else 1 / num, 1.0))


def lopsided(sums: Floats) -> Floats:
    """Do few clusters differ, nearly all of them in one direction? Then one more that flips as a
    whole would change both mean and error, and the interval may be too narrow."""
    changed = (sums != 0).sum(-1)
    one_way = np.maximum((sums > 0).sum(-1), (sums < 0).sum(-1))
    flags: Floats = (changed > 0) & (changed < FEW) & (one_way >= _ONE_WAY * changed)
    return flags


def mean_of(
    sums: Floats, sizes: Floats, *, pad: Padding | None = None, middle: Floats | float = 0.0
) -> Mean:
    """``pad``: made-up clusters, with which skewness of clusters is corrected; None: neither, the
    plain t. ``middle``: the mean that they lie around."""
    skewed = pad is not None and sizes.max() > 1
    if pad is not None:
        share = np.sqrt(pad.weight)[..., None]
        size = share * sizes.mean()
        centre = np.asarray(middle)[..., None] * size
        aside = share * pad.far[..., None]
        sums = np.concatenate([sums, centre - aside, centre + aside], axis=-1)
        sizes = np.broadcast_to(sizes, (*sums.shape[:-1], len(sizes)))
        sizes = np.concatenate([sizes, size, size], axis=-1)
    total = sizes.sum(-1, keepdims=True)
    mean = sums.sum(-1) / total[..., 0]
    if sizes.shape[-1] < 2:
        nan = np.full_like(mean, np.nan)
        return Mean(mean, nan, nan, np.zeros_like(mean))
    weights = 1 / (1 - sizes / total)
    left = sums - sizes * mean[..., None]
    num: Floats = total[..., 0]
    error = np.sqrt((weights * left**2).sum(-1)) / num
    # tr(B)² / tr(B²) with B = √w (n_g [g=h] - n_g n_h / n) √w: Satterthwaite's approximation
    weighted = weights * sizes**2
    skew = np.zeros_like(mean)  # γ / (3 √G) of the clusters' residuals; 0 where all are 0
    if skewed:
        with np.errstate(divide="ignore", invalid="ignore"):
            skew = (left**3).sum(-1) / (left**2).sum(-1) ** 1.5 / 3
        skew = np.nan_to_num(skew, nan=0.0, posinf=0.0, neginf=0.0)
    trace2 = (sizes**2).sum(-1) + (weighted.sum(-1) ** 2 - (weighted**2).sum(-1)) / num**2
    return Mean(mean, error, num**2 / trace2, skew)


def interval(summary: Mean, level: float) -> tuple[Floats, Floats]:
    """Both ends of the interval that holds the true mean with probability ``level``."""
    from scipy import stats

    # the t whose transformation by Hall is ``reach``; ``reach`` itself without skewness
    flat = np.abs(summary.skew) < 1e-9
    a = np.where(flat, 1.0, summary.skew)
    ends = []
    for sign in (1.0, -1.0):
        reach = sign * stats.t.ppf((1 + level) / 2, summary.freedom)
        t = np.where(flat, reach, (np.cbrt(1 + 3 * a * (reach - a / 2)) - 1) / a)
        ends.append(summary.mean - t * summary.error)
    return ends[0], ends[1]


def equivalence_p(sums: Floats, sizes: Floats, band: Floats, *, pad: Padding | None) -> Floats:
    """The p value of two one-sided tests (Schuirmann 1987): is the mean difference inside the band?

    ``band``: of each cluster, how far its sum may be off: the limit times n_g, or for a relative
    band the limit times the reference's own sum, so that the error of the reference's score is in
    the test (Fieller's way).
    """
    from scipy import stats

    middle = band.sum(-1) / sizes.sum()
    worst: Floats = np.zeros(sums.shape[:-1])
    for sign in (1.0, -1.0):
        summary = mean_of(band + sign * sums, sizes, pad=pad, middle=middle)
        with np.errstate(divide="ignore", invalid="ignore"):
            t, a = summary.mean / summary.error, summary.skew
            p = stats.t.sf(t + a * t**2 + a**2 * t**3 / 3 + a / 2, summary.freedom)
        worst = np.maximum(worst, np.nan_to_num(p, nan=1.0))
    return worst


# Is a difference more than chance? Exact McNemar, changes of sign by cluster, and Holm; and the
# interval of a difference between binary scores.
#
# McNemar    of b documents lost and c gained, each is a coin if neither side is better: the exact
#            binomial test, two-sided (McNemar 1947)
# signs      graded scores, repeats, clusters: the share of changes of sign of the clusters' sums
#            that give as large a sum (Fisher 1935). All of them up to 2^13, else draws from a
#            seeded generator; above MOST_SIGNS clusters the t test, which is its limit
# score      the interval of binary scores, each document alone: all differences that the score
#            test does not reject (Tango 1998, Statistics in Medicine 17; one of the two that
#            Fagerland, Lydersen and Laake 2014 recommend)
# Holm       of several tasks: the p values that keep the chance of any false one at the level
#            (Holm 1979)
#
# How much so many documents can tell, and how many would be needed: ``spread`` is the standard
# deviation of one document's difference, clusters included: √n times the clustered standard error
# without made-up clusters. ``pad``: of these, in units of one document. A padded error at n
# documents is √(n spread² + 2 pad²) / n, to within 2/n.

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
            kept = np.abs(deviations(half)) <= reach
            inside, outside = np.where(kept, half, inside), np.where(kept, outside, half)
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
        (changed,),
        lambda values, axis: values.sum(axis=axis),
        permutation_type="samples",
        n_resamples=_DRAWS,
        vectorized=True,
        batch=1 + 2_000_000 // len(changed),
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
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

"""What chance alone does to few numbers: how much wider a limit must be for them."""

from __future__ import annotations

import math
from statistics import NormalDist

__all__ = ["normal_deviate", "rare_ratio", "spread"]

_ENOUGH = 64
"""With this many values, thresholds already hold what is left of chance."""
_RARE = 1e-6
_DEVIATIONS = 3.7


def spread(num_values: int, *, num_looks: int = 1) -> float:
    """By how much the relative error of few numbers may exceed that of many, by chance alone.

    With error and signal of n random numbers each, the square of their ratio has the
    F(n, n) distribution, whose logarithm has about the variance 4/n + 4/n² (2 ψ'(n/2)).
    3.7 standard deviations: less than one in 1,000 (its tail is heavier than a normal one).
    The thresholds themselves hold the width that is left at 64 numbers. A router over 4
    experts, one token: 4 numbers.

    ``num_looks``: of how many such errors the largest is judged. Each is then given its share of
    the chance that one look has (Bonferroni: p / n), so that the chance of any false alarm stays
    that of one look, whether the looks depend on each other or not.
    """

    def width(n: int, deviations: float) -> float:
        return deviations / 2 * math.sqrt(4 / n + 4 / n**2)

    wanted = width(max(1, num_values), _deviations(max(1, num_looks)))
    return math.exp(max(0.0, wanted - width(_ENOUGH, _DEVIATIONS)))


def _deviations(num_looks: int) -> float:
    """Standard deviations that the largest of so many exceeds as rarely as one exceeds 3.7."""
    if num_looks == 1:
        return _DEVIATIONS
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-_DEVIATIONS) / num_looks)


def rare_ratio(num_values: int) -> float:
    """How much wider a limit of two errors' ratio must be for few numbers than for 64, where one in
    a million healthy ones may exceed it: the operators of one block are thousands of questions.

    The square of the ratio of two rms errors of n random numbers has the F(n, n) distribution,
    whose tail is P(F > f) ≈ 2 / (n B(n/2, n/2)) f^(-n/2); of a single number it is
    Cauchy's. Beyond 64 numbers the normal approximation (``spread``) does.
    """

    def ratio(n: int) -> float:
        beta = 2 * math.lgamma(n / 2) - math.lgamma(n)
        return math.exp((math.log(2 / n / _RARE) - beta) / n)

    return max(1.0, ratio(max(1, num_values)) / ratio(_ENOUGH))


def normal_deviate(t: float, freedom: int) -> float:
    """The normal deviate that is as rare as Student's ``t`` with ``freedom`` degrees of freedom.

    Wallace, "Bounds on normal approximations to Student's and the chi-square
    distributions", Ann. Math. Stat. 30, 1959.
    """
    shrink = (8 * freedom + 1) / (8 * freedom + 3)
    return shrink * math.sqrt(freedom * math.log1p(t * t / freedom))

"""Does the difference of two curves leave its own noise, and from which step on?

d_t is the relative difference of step t. Under the null hypothesis it has mean 0, whatever its
size: two runs that round differently go apart like this. The n steps are put into K blocks, m_k
being the mean of d over a block, and the noise of a block mean is taken from successive blocks,

    s² = Σ (m_k - m_(k-1))² / (2 (K-1))        (von Neumann et al., "The mean square successive
                                                difference", Ann. Math. Statist. 12, 1941)

which a slow change of the mean hardly enters. The running sum from zero, max_j |Σ_(k<=j) m_k| /
(s sqrt K), is then compared with its limit. For noise that is independent from block to block the
sum is a random walk, so P(max > x) <= 4 P(T > x) (reflection), T being Student's t with about
2 (K-1) / 3 degrees of freedom, those of s. The sum must exceed its limit with K = 16 and with K =
32: noise that is alike for some steps then looks like noise in at least one of them. So that a
late drift is seen beside its own noise, the last half, quarter and eighth of the steps are looked
at too; the limit is that of 0.1% for all four looks together (Bonferroni).

From which step on: the k for which "zero before k, a straight line from k on" has the smallest
squared error. It is an estimate, and early steps of a slow drift are within the noise.

It refuses to tell with fewer than 64 steps, and looks at no part of fewer than 256. Differences
that stay alike for longer than a block (a thirty-second of the steps) are no noise to it.

A jump needs no noise to stand out of: where two logs agree to 1e-7 for 150 steps and to 1e-3 from
then on, no rounding did that. Rounding errors grow, and from one step to the next not tenfold.
"""

from __future__ import annotations

import math

import numpy as np

from divergence.facts import fact
from divergence.training.curves.result import Trend

__all__ = ["MIN_BEFORE", "MIN_STEPS", "block_means", "jump_of", "successive_noise", "trend_of"]

MIN_STEPS = 64
MIN_PART = 256
"""Steps of a half, quarter or eighth that is looked at for itself: eight and more in a block."""
LIMITS = {16: 6.042, 32: 4.707}
"""Number of blocks → x with 4 P(T > x) = 0.001 / 4, for Student's t with 10 and 20.7 degrees of
freedom (scipy.stats.t.ppf)."""

MIN_BEFORE = 16
"""Steps whose agreement is taken for that of the logs, whatever it is. Of fewer, an agreement to
the last digit is."""
_JUMP, _STAYS, _MIN_AFTER = 10.0, 3.0, 8
_RESOLUTION = 4 * 2.0**-23
"""Relative: a loss is computed in float32, where healthy kernels were seen 3e-7 apart."""


def block_means(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """(n,) → (num_blocks,): means over stretches of nearly equal length."""
    return np.array([part.mean() for part in np.array_split(values, num_blocks)])


def successive_noise(values: np.ndarray) -> float:
    """The standard deviation, from differences of successive values alone."""
    if len(values) < 2:
        return math.nan
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / 2))


def jump_of(a: np.ndarray, b: np.ndarray) -> tuple[int, float] | None:
    """(index, relative agreement before it) of the first step that is ten times farther off than
    any before it, and the logs' last digit, where the median of it and the 15 behind it stays three
    times so. ``a``, ``b`` (n,): finite, ``a`` not 0."""
    n = len(a)
    if n < 2 + _MIN_AFTER:
        return None
    error = np.abs(b - a) / np.abs(a)
    before = np.concatenate([[0.0], np.maximum.accumulate(error)[:-1]])
    digit = np.maximum(_RESOLUTION, max(_last_digit(a), _last_digit(b)) / np.abs(a))
    allowed = np.maximum(before, digit)
    agrees = (np.arange(n) >= MIN_BEFORE) | ((np.arange(n) >= 2) & (before <= digit))
    for index in np.flatnonzero(agrees & (error > _JUMP * allowed))[: n - _MIN_AFTER]:
        after = error[index : index + 16]
        if len(after) >= _MIN_AFTER and np.median(after) > _STAYS * allowed[index]:
            return int(index), float(before[index])
    return None


def _last_digit(values: np.ndarray) -> float:
    """Of decimal numbers, as logs write them; 0 where they have all digits."""
    for digits in range(7):
        if np.allclose(np.round(values, digits), values, rtol=1e-10, atol=0):
            return float(10.0**-digits)
    return 0.0


def trend_of(steps: np.ndarray, diffs: np.ndarray) -> Trend:
    """``steps`` (n,), ``diffs`` (n,): finite relative differences in order of steps."""
    if len(diffs) < MIN_STEPS:
        return Trend(
            state="not_told", statistic=None, limit=None, parts_at=None,
            lacking=fact("training.few_steps", num_steps=len(diffs), least=MIN_STEPS),
        )  # fmt: skip
    parts = [diffs] + [
        diffs[-(len(diffs) // share) :] for share in (2, 4, 8) if len(diffs) // share >= MIN_PART
    ]
    statistic, limit = max(map(_weaker, parts), key=lambda pair: pair[0] / pair[1])
    leaves = statistic > limit
    return Trend(
        state="parts" if leaves else "within_noise",
        statistic=statistic if math.isfinite(statistic) else None,
        limit=limit,
        parts_at=int(steps[_onset(diffs)]) if leaves else None,
    )


def _weaker(diffs: np.ndarray) -> tuple[float, float]:
    """(statistic, limit) for the number of blocks with which the sum goes less far."""
    pairs = []
    for num_blocks, limit in LIMITS.items():
        means = block_means(diffs, num_blocks)
        noise = successive_noise(means) * math.sqrt(num_blocks)
        reach = float(np.max(np.abs(np.cumsum(means))))
        pairs.append((reach / noise if noise else math.inf if reach else 0.0, limit))
    return min(pairs, key=lambda pair: pair[0] / pair[1])


def _onset(diffs: np.ndarray) -> int:
    """The index k that makes Σ_(t<k) d² + min over a, b of Σ_(t>=k) (d - a - b (t-k))² smallest."""
    n = len(diffs)
    reversed_ = diffs[::-1].astype(np.float64)
    count = np.arange(1, n + 1, dtype=np.float64)  # length of the tail
    index = np.arange(n, dtype=np.float64)
    sum_d = np.cumsum(reversed_)
    sum_id = np.cumsum(reversed_ * index)
    mean_i = (count - 1) / 2
    var_i = count * (count**2 - 1) / 12
    cov = sum_id - mean_i * sum_d
    explained = sum_d**2 / count
    explained[1:] += cov[1:] ** 2 / var_i[1:]
    shortest = max(2, n // 32)  # a line through a few steps explains noise
    best = int(np.argmax(explained[shortest - 1 :])) + shortest
    return n - best

"""The judge's outlier question: is a number beyond what correct kernels make of its like?

An *observation* holds one side's error against the other's in some rows: x = log W with
W² = Σe_B² / Σe_A², e the distance from the truth in floors. Each sum is made of n numbers: not as
many as it has elements but its participation ratio (Σe²)² / Σe⁴, which is near 1 where one channel
or one token carries the error, as massive activations do. Where rounding alone is at work W² has
the F(n, n) distribution, and √n sinh x is Student's t of n degrees of freedom, exactly
(Cacoullos 1965); its normal deviate is (8n + 1) / (8n + 3) √(2n ln cosh x) (Wallace 1959). So few
numbers convict hardly anything, and need no rule of their own.

The observations of one *family* (the same place in all blocks, one pass and phase) are a table,
members × columns, columns being forwards or rows. Median polish (Tukey 1977) fits
x = μ + member + column + rest. What makes a block hard or a token hard troubles both sides alike
and is not in x; what makes one side's kernels coarser is in μ; what troubles one token in all
blocks is in its column. Judged are the rest of each cell and the columns' effects; and the members'
own x over all rows, against their median. A member's effect that stands out itself excuses none of
its cells. The variance of each is

    its own, 1/n + 1/n² for two sides of n numbers (¼ Var log F(n, n))
    + its control's: π/2 · the others' typical variance / how many they are
    + σ², the larger of σ0 and of what the others are apart (1.4826 × their median deviation)

σ0 is what healthy kernels differ by beyond chance (``Thresholds.site_spread`` and its like). All
observations of a comparison share one chance of a false alarm, a quarter for each level.

Where no truth tells the errors apart, x = log of the two sides' difference in floors: the rounding
model is the side whose error is known, and no chance is in it. Only what is larger stands out then
(``one_sided``).

A mean of many rows, as a scale error is, needs no ratio: x is that mean itself, candidate less
reference, a normal number of known variance (``linear``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from divergence.comparison.constants import (
    CLEAR_TIMES,
    FALSE_ALARM_RATE,
    HARD_TIMES,
    NOISE_DEVIATIONS,
)

Floats = npt.NDArray[np.float64]
Level = Literal["site", "forward", "row", "channel"]

_CONTROL = math.pi / 2
"""The variance of a median of k normal numbers, times k."""
_ROUNDS = 6
_BY_CHANCE = 2 * NormalDist().cdf(-NOISE_DEVIATIONS)
"""How seldom two errors of n numbers are so far in one direction: P(cos² > c) < (1 - c)^((n-1)/2),
the tail of the beta distribution."""


@dataclass(frozen=True, slots=True)
class JudgedTable:
    """A table judged, (M, K). An observation stands out where |x - control| is beyond ``reach``."""

    x: Floats
    control: Floats
    reach: Floats
    column: Floats
    """(K,): what all members have in common in a column, beside the other columns."""
    column_reach: Floats
    usual: float
    """The median of all."""
    one_sided: bool = False
    """Is x of the two sides' difference, which has no side?"""

    def excess(self, member: int) -> Floats:
        """Tells (K,) by how much of ``reach`` a member is beside its control by an error of its
        own: a side is convicted where it is clearly the larger, by half of what an outlier is
        apart, and for nothing else, however its siblings fare; 0 elsewhere."""
        x, control, reach = (each[member] for each in (self.x, self.control, self.reach))
        own = (np.abs(x) > reach / 2) & ((x > 0) == (x > control))
        if self.one_sided:
            own = x > control
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(np.where(own, np.abs(x - control) / reach, 0.0))

    def standing_out(
        self, member: int, energy: Floats, least: float | Floats, widened: float = 1.0
    ) -> tuple[Floats, Floats]:
        """Finds ((K,), (K,)) the candidate's squared error at which a member would stand out,
        beside ``energy``, the reference's; and what it is where it is as its siblings' are.
        ``least``: as in ``observed``."""
        control, reach = self.control[member], self.reach[member] + math.log(widened)
        added = energy + np.square(least)
        if self.one_sided:  # an effect may be less than what no difference at all makes
            control = np.maximum(control, 0.5 * np.log(np.square(least) / added))
        out = control + reach
        if not self.one_sided:
            out = np.maximum(out, reach / 2)
        with np.errstate(over="ignore"):
            far, usual = (np.exp(2 * np.minimum(x, 300.0)) * added for x in (out, control))
        return np.where(out < 300.0, far, math.inf), usual


def outliers(
    x: Floats,
    own: Floats,
    sigma0: float,
    limit: float,
    *,
    linear: bool = False,
    control: Floats | None = None,
    kept: npt.NDArray[np.bool_] | None = None,
) -> JudgedTable:
    """Judges a table. ``x``, ``own`` (M, K): log W of each member and column, nan where there is no
    observation, and the variance that it has of itself. ``limit``: the deviate beyond which one
    stands out. ``linear``: x is no log W but a normal number. ``control`` (M, K): what each is held
    against, where there are no others of its kind; it is taken as exact. ``kept`` (M,): members
    whose own effect excuses their cells, however large it is."""
    num_members, num_columns = x.shape
    if control is not None:
        off = np.clip(x - control, -700.0, 700.0)  # of an exact side it is without bound
        of_columns = max(sigma0, _deviation(off - _medians(off, 1)[:, None]))
        none = np.zeros(num_columns)
        far = reach(limit, own + of_columns**2)
        return JudgedTable(x, control, far, column=none, column_reach=none + math.inf, usual=0.0)
    usual, members, columns, rest = _polished(x)
    by_member, by_column = _medians(own, 1), _medians(own, 0)
    control_variance = _CONTROL * by_column[None, :] / max(1, num_members - 1)
    if num_columns > 1:
        control_variance = control_variance + _CONTROL * by_member[:, None] / (num_columns - 1)
    sigma = np.full(num_members, max(sigma0, _deviation(rest)))

    def beyond(limit: float, variance: Floats) -> Floats:
        return np.asarray(limit * np.sqrt(variance)) if linear else reach(limit, variance)

    # of few members, one that stands out moves the others' deviation
    apart = [members]
    if num_members > 1:
        apart = [np.delete(members, number) for number in range(num_members)]
    of_members = np.array([max(sigma0, _deviation(y - np.median(y))) for y in apart])
    if num_columns == 1:
        sigma, members = of_members, np.zeros(num_members)
        if 2 * np.sum((x == 0) & (own == 0)) >= max(4, num_members):
            sigma[:] = sigma0  # half are equal bit for bit: the same kernels ran
    else:  # what is off in most of its columns does not excuse itself in the others
        chance = _CONTROL * by_member / num_columns + np.square(of_members)
        out = np.abs(members) > beyond(limit, chance)
        members = np.where(out if kept is None else out & ~kept, 0.0, members)
    variance = own + control_variance + np.square(sigma)[:, None]
    column_sigma = max(sigma0, _deviation(columns))
    return JudgedTable(
        x=x,
        control=usual + members[:, None] + columns[None, :],
        reach=beyond(limit, variance),
        column=columns,
        column_reach=beyond(limit, _CONTROL * by_column / num_members + column_sigma**2),
        usual=usual,
    )


def observed(
    energy: Floats,
    numbers: Floats,
    least: float | Floats,
    groups: npt.NDArray[np.intp] | None = None,
    *,
    typical: bool = False,
) -> tuple[Floats, Floats]:
    """Makes observations (x, own variance), (…, K), of rows or of ``groups`` of rows.

    ``energy`` (2, …, R): squared error of the reference and the candidate, in floors²; ``numbers``:
    of how many numbers each is made; ``least``: added to both errors, in floors, so that two tiny
    ones make no large ratio; it has no chance. A group is the mean energy of its rows, made of
    their numbers as far as these carry it; or ``typical``, the median row, where single rows may be
    off by rightly taking another way.
    """
    count = np.maximum(np.nan_to_num(numbers, nan=1.0, posinf=1.0), 1.0)
    if groups is not None and not typical:
        rows = np.bincount(groups)
        with np.errstate(all="ignore"):
            total, fourth = (
                np.apply_along_axis(lambda line: np.bincount(groups, line), -1, values)
                for values in (energy, np.square(energy) / count)
            )
            pooled = np.where(fourth > 0, np.square(total) / np.maximum(fourth, 1e-300), 1.0)
        energy = total / rows
        count = np.maximum(np.nan_to_num(pooled, nan=1.0, posinf=1.0), 1.0)
    added = energy + least**2
    with np.errstate(all="ignore"):
        x = 0.5 * np.log(added[1] / added[0])
        share = np.square(np.where(energy == np.inf, 1.0, energy / added))
    own = (share * (1 / count + 1 / count**2)).sum(axis=0) / 2
    if groups is None or not typical:
        return x, own
    grouped = [np.flatnonzero(groups == group) for group in range(groups.max() + 1)]
    middle = np.stack([_medians(x[..., members], -1) for members in grouped], axis=-1)
    chance = [_CONTROL * _medians(own[..., members], -1) / len(members) for members in grouped]
    return middle, np.stack(chance, axis=-1)


def times_of(log: float) -> float:
    """e to that power, no more than a float can hold."""
    return math.exp(min(log, 700.0))


def reach_of_median(own: Floats) -> float:
    """Tells by how much chance may move the median of independent observations, of such variance
    each."""
    if not len(own):
        return math.inf
    return float(reach(limit_of(1), _CONTROL * np.median(own, axis=0) / len(own)).item())


def reach(limit: float, variance: Floats) -> Floats:
    """The |x| of which ``limit`` is the deviate."""
    n: Floats = 2 / (np.sqrt(1 + 4 * np.maximum(variance, 1e-12)) - 1)  # variance is 1/n + 1/n²
    log_cosh = np.square(limit * (8 * n + 3) / (8 * n + 1)) / (2 * n)
    with np.errstate(over="ignore"):
        near = np.arccosh(np.exp(np.minimum(log_cosh, 300.0)))
    size: Floats = np.where(log_cosh > 300.0, log_cosh + math.log(2), near)
    return size


def in_step(energy: Floats, between: Floats, numbers: Floats) -> Floats:
    """The share (2, R) of each side's squared error that has the direction of the other side's,
    beyond what chance makes of so many numbers. ``energy``: (2, R), ``between``: (R,), of the
    difference of the sides, which tells the cosine: |d|² = |e_A|² + |e_B|² - 2 |e_A| |e_B| cos."""
    with np.errstate(all="ignore"):
        cosine = (energy.sum(axis=0) - between) / 2 / np.sqrt(energy.prod(axis=0))
        chance = np.where(numbers > 1, 1 - _BY_CHANCE ** (2 / (numbers - 1)), 1.0)
        share = np.nan_to_num((np.square(cosine) - chance) / (1 - chance))
    return np.asarray(np.clip(share, 0.0, 1.0))


def effective_numbers(numbers: Floats, share: Floats) -> Floats:
    """Counts the numbers that an error is made of, of which ``share`` is one number."""
    return np.asarray(1 / (np.square(1 - share) / numbers + np.square(share)))


def made_of(
    energy: Floats, between: Floats, numbers: Floats, usual: npt.NDArray[np.bool_]
) -> tuple[Floats, float]:
    """Counts (2, R) of how many numbers rows' errors are made, no more than ``numbers``, as their
    columns show; and the squared error of the hardest row, 0 where none is hard. ``energy``,
    ``between``: as in ``in_step``; ``usual``: (R,), rows that are no sinks.

    What makes a row hard on both sides enlarges the rounding of a few numbers, as sharp attention
    does that of its scores. Then both errors are large; or, where that number happens to be small
    on one side, they have one direction, while a fault has another than the other side's rounding.
    What both have beyond ``HARD_TIMES`` times the usual error counts as one number; and where there
    are rows of which that is the most, so does what is no larger than ``CLEAR_TIMES`` times the
    hardest of them: chance may have spared the other side."""
    with np.errstate(all="ignore"):  # the largest errors are near what a number can hold
        least = energy.min(axis=0)
        typical = HARD_TIMES**2 * float(np.median(least[usual])) if usual.any() else 0.0
        share = in_step(energy, between, numbers)
        both = np.maximum(least, share * energy)
        mostly = np.where(share > 1 / 2, both, least)  # chance makes a small share of many rows
        hardest = float(np.where(np.isfinite(mostly), mostly, 0.0).max(initial=0.0))
        hardest = hardest if hardest > typical else 0.0
        both = np.maximum(both, np.minimum(energy, CLEAR_TIMES**2 * hardest))
        enlarged = np.maximum(both - typical, 0.0) / energy
        return effective_numbers(
            numbers, np.clip(np.nan_to_num(enlarged, nan=1.0), 0.0, 1.0)
        ), hardest


def farthest(num_observations: int, numbers: Floats | float, sigma0: float) -> Floats:
    """The W beyond which one of so many observations that have no siblings is an outlier, each of
    two sides' errors being made of ``numbers``."""
    n = np.maximum(np.asarray(numbers, float), 1.0)
    far = reach(limit_of(num_observations), 1 / n + 1 / n**2 + sigma0**2)
    return np.asarray(np.exp(np.minimum(far, 300.0)))


@functools.lru_cache(maxsize=256)
def limit_of(num_observations: int) -> float:
    """The deviate beyond which one of so many is an outlier, on either side, at a quarter of
    FALSE_ALARM_RATE (Bonferroni: whether they depend on each other or not)."""
    return -NormalDist().inv_cdf(FALSE_ALARM_RATE / 8 / max(1, num_observations))


def _polished(x: Floats) -> tuple[float, Floats, Floats, Floats]:
    """Polishes x into (usual, members (M,), columns (K,), rest (M, K)), the effects' medians 0."""
    usual = float(_medians(x.reshape(1, -1), 1)[0])
    rest, members, columns = x - usual, np.zeros(len(x)), np.zeros(x.shape[1])
    for _ in range(_ROUNDS if x.shape[1] > 1 else 1):
        step = _medians(rest, 1)
        members, rest = members + step, rest - step[:, None]
        step = _medians(rest, 0)
        columns, rest = columns + step, rest - step
        if not np.abs(step).max(initial=0.0) > 1e-3:
            break
    shift = float(np.median(members)), float(np.median(columns))
    return usual + sum(shift), members - shift[0], columns - shift[1], rest


def _medians(values: Floats, axis: int) -> Floats:
    """Medians along an axis, of what is there; 0 where there is nothing."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axis))
    nothing = np.isnan(values).all(axis=axis, keepdims=True)
    return np.asarray(np.nanmedian(np.where(nothing, 0.0, values), axis=axis))


def _deviation(values: Floats) -> float:
    numbers = values[~np.isnan(values)]
    return 1.4826 * float(np.median(np.abs(numbers))) if numbers.size else 0.0

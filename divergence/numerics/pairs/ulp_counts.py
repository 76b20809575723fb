"""How many ulp apart two tensors are: share beyond one, 99th percentile, largest.

The percentile is exact, without a histogram of all distances. A sample of runs guesses
where it lies. Guessed within a few ulp (16-bit formats), one pass counts how many
distances exceed each of these; otherwise it counts those at a bound just below and
keeps those beyond it (a few percent), among which the percentile is selected. A wrong
guess costs another pass, and takes a tensor whose sampled runs are unlike the rest. Compiled
loops count the same things, without blocks.

Elements with |a| < u · rms(a) are left out: there cancellation makes 1e7 ulp of
nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from divergence.numerics.formats import Format
from divergence.numerics.kernels import Kernel
from divergence.numerics.pairs.blocks import BLOCK, Grid, Rows
from divergence.numerics.pairs.ulp_tails import MOST_STEPS, Counting, InBlocks, InLoops, Tail

if TYPE_CHECKING:
    from divergence.numerics.on_device import OnDevice

__all__ = ["UlpCounts", "count_ulp", "smallest_key"]


class UlpCounts(msgspec.Struct, frozen=True, kw_only=True):
    """``share_over_1``: of the counted elements, the share more than 1 ulp apart. ``p99``:
    smallest distance that at least 99 % of them do not exceed. ``max``: the largest. All
    in ulp of the format named to count_ulp; all 0 where nothing was counted."""

    num_counted: int
    share_over_1: float
    p99: float
    max: float


def count_ulp(
    a: Grid,
    b: Grid,
    form: Format,
    *,
    rows: Rows,
    rms: float,
    check_finite: bool = True,
    threads: int = 1,
    block: int = BLOCK,
    kernel: Kernel = "numpy",
    there: OnDevice | None = None,
) -> UlpCounts:
    """Distances in ``form`` between ``rows`` of a and b where |a| >= u · ``rms``.

    Unit: ulp of ``form``; values stored otherwise are rounded to it. ``rms``: of a.
    Elements that are not finite on both sides are left out; ``check_finite=False``
    promises that there are none. -0 equals +0. A value that overflows on rounding to
    ``form`` counts as its inf, one ulp beyond the largest. ``there``: the pair on a device.
    Source: divergence.numerics.pairs.ulp.
    """
    smallest = smallest_key(form, form.unit_roundoff * rms)
    counting: Counting
    if there is not None and form.itemsize <= 4:
        counting = there.distances(form, rows=rows, smallest_key=smallest, check=check_finite)
    elif kernel == "compiled" and InLoops.reads(a, b, form, check=check_finite):
        counting = InLoops(a, b, form, rows=rows, smallest_key=smallest, check=check_finite)
    else:
        counting = InBlocks(
            a, b, form, rows=rows, smallest_key=smallest, check=check_finite, block=block
        )
    guess = counting.guess()
    bound, high = guess or (0, 0)
    close = guess is not None and high - bound < MOST_STEPS - 1
    steps = range(max(0, bound - 1), high + 1) if close else range(0)
    while True:
        tails = counting.count(bound, steps, threads=threads)
        counted = sum(tail.num_counted for tail in tails)
        if counted == 0:
            return UlpCounts(num_counted=0, share_over_1=0.0, p99=0.0, max=0.0)
        num_above = counted - math.ceil(0.99 * counted) + 1  # p99 is the num_above-th largest
        p99 = _from_steps(tails, num_above) if steps else _from_beyond(tails, num_above)
        if p99 is None:
            too_low = bool(steps) and _over(tails)[-1] >= num_above
            bound, steps = (high if too_low else bound // 2), range(0)
            continue
        if 1 in steps:
            num_over_1 = int(_over(tails)[steps.index(1)])
        else:
            num_over_1 = sum(tail.num_over_1 for tail in tails)
        return UlpCounts(
            num_counted=counted,
            share_over_1=num_over_1 / counted,
            p99=float(p99),
            max=float(max(tail.largest for tail in tails)),
        )


def _over(tails: list[Tail]) -> np.ndarray:
    """How many distances exceed each of the steps, of all workers."""
    return sum((tail.num_over for tail in tails[1:]), tails[0].num_over)


def _from_steps(tails: list[Tail], num_above: int) -> int | None:
    """The num_above-th largest distance, or None where it is not among the steps."""
    steps = tails[0].steps
    few = np.flatnonzero(_over(tails) < num_above)
    if not len(few) or (few[0] == 0 and steps[0] > 0):
        return None
    return steps[int(few[0])]


def _from_beyond(tails: list[Tail], num_above: int) -> int | None:
    """The same among the distances picked out, or None where it is below the bound."""
    beyond = np.concatenate([one for tail in tails for one in tail.beyond] or [np.empty(0)])
    if len(beyond) >= num_above:
        return int(np.partition(beyond, len(beyond) - num_above)[len(beyond) - num_above])
    bound = tails[0].bound
    if bound == 0 or len(beyond) + sum(tail.num_at_bound for tail in tails) >= num_above:
        return bound
    return None


def smallest_key(form: Format, magnitude: float) -> int:
    """Key of the smallest value of ``form`` that is >= magnitude (> 0 or 0): subnormals number
    the multiples of the smallest one, and each binade above holds 2^mantissa_bits values."""
    if magnitude == 0.0:
        return 0
    magnitude = min(magnitude, form.max)
    fraction, exponent = math.frexp(magnitude)  # magnitude = fraction · 2^exponent, in [1/2, 1)
    lowest = math.frexp(form.smallest_normal)[1]
    if exponent < lowest:
        key = math.ceil(magnitude / form.smallest_subnormal)
    else:
        steps = math.ceil(math.ldexp(2 * fraction - 1, form.mantissa_bits))
        key = ((exponent - lowest + 1) << form.mantissa_bits) + steps
    return key if form.signed else key - 1  # e8m0fnu has no zero

"""How many ulp apart two tensors are: share beyond one, 99th percentile, largest.

The percentile is exact, without a histogram of all distances. A sample of runs guesses
where it lies. Guessed within a few ulp (16-bit formats), one pass counts how many
distances exceed each of these; otherwise it counts those at a bound just below and
keeps those beyond it (a few percent), among which the percentile is selected. A wrong
guess costs another pass, and takes a tensor whose sampled runs are unlike the rest.

Elements with |a| < u · rms(a) are left out: there cancellation makes 1e7 ulp of
nothing.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch

from divergence.numerics.blocks import BLOCK, Grid, Rows
from divergence.numerics.formats import Format
from divergence.numerics.sums import tiles
from divergence.numerics.ulp import distance_array, key_array, stored_bits
from divergence.numerics.workers import Split, run_split

__all__ = ["UlpCounts", "count_ulp"]

_NUM_RUNS, _RUN = 16, 1024
_MOST_STEPS = 5
"""Counting what exceeds one value costs a tenth of picking out what exceeds it."""


class UlpCounts(msgspec.Struct, frozen=True, kw_only=True):
    """``share_over_1``: of the counted elements, the share more than 1 ulp apart. ``p99``:
    smallest distance that at least 99 % of them do not exceed. ``max``: the largest. All
    in ulp of the format named to count_ulp; all 0 where nothing was counted."""

    num_counted: int
    share_over_1: float
    p99: float
    max: float


class _Tail:
    """One worker's counts: how many distances exceed each of ``steps`` or, without steps, how
    many are at ``bound`` and which are beyond."""

    def __init__(self, bound: int, steps: range) -> None:
        self.bound, self.steps = bound, steps
        self.num_counted = self.num_over_1 = self.num_at_bound = self.largest = 0
        self.num_over = np.zeros(len(steps), np.int64)
        self.beyond: list[np.ndarray] = []

    def add(self, distance: np.ndarray, num_counted: int, mask: np.ndarray) -> None:
        """``mask``: a bool buffer of the distances' shape (a new array costs page faults)."""
        self.num_counted += num_counted
        largest = int(distance.max())
        self.largest = max(self.largest, largest)
        for number, step in enumerate(self.steps):
            if largest > step:
                self.num_over[number] += np.count_nonzero(np.greater(distance, step, out=mask))
        if largest > 1 and 1 not in self.steps:
            self.num_over_1 += int(np.count_nonzero(np.greater(distance, 1, out=mask)))
        if self.steps:
            return
        if self.bound and largest >= self.bound:
            self.num_at_bound += int(np.count_nonzero(np.equal(distance, self.bound, out=mask)))
        if largest > self.bound:
            self.beyond.append(distance[np.greater(distance, self.bound, out=mask)])


class _Distances:
    """Masked distances of one block after another; a worker has one of its own."""

    def __init__(self, a: Grid, b: Grid, form: Format, *, smallest_key: int, check: bool) -> None:
        self._a, self._b, self._form, self._check = a, b, form, check
        width = max(2, form.itemsize)
        self._buffers = np.empty((3, BLOCK), f"i{width}")
        self._keep = np.empty(BLOCK, bool)
        self._smallest_key = smallest_key

    def block(self, rows: Rows, cols: slice) -> tuple[np.ndarray, int, np.ndarray]:
        """Distances (0 where masked), how many elements are not masked, a spare mask."""
        bits_a, bits_b = self._bits(self._a, rows, cols), self._bits(self._b, rows, cols)
        shape, size = bits_a.shape, bits_a.size
        one, two, three = (buffer[:size].reshape(shape) for buffer in self._buffers)
        keep = self._keep[:size].reshape(shape)
        keys_a = key_array(bits_a, self._form, out=one, scratch=three)
        keys_b = key_array(bits_b, self._form, out=two, scratch=three)
        np.greater_equal(np.abs(keys_a, out=three), self._smallest_key, out=keep)
        if self._check:
            for grid in (self._a, self._b):
                values = grid.load(rows, cols, np.empty(BLOCK))
                np.logical_and(keep, np.isfinite(values), out=keep)
        distance = distance_array(keys_a, keys_b, out=three, scratch=one)
        num_counted = int(np.count_nonzero(keep))
        if num_counted < size:
            np.multiply(distance, keep, out=distance)
        return distance, num_counted, keep

    def _bits(self, grid: Grid, rows: Rows, cols: slice) -> np.ndarray:
        if grid.format.name == self._form.name:
            return grid.bits[rows, cols]
        return stored_bits(grid.torch[rows, cols], self._form)


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
) -> UlpCounts:
    """Distances in ``form`` between ``rows`` of a and b where |a| >= u · ``rms``.

    Unit: ulp of ``form``; values stored otherwise are rounded to it. ``rms``: of a.
    Elements that are not finite on both sides are left out; ``check_finite=False``
    promises that there are none. -0 equals +0. A value that overflows on rounding to
    ``form`` counts as its inf, one ulp beyond the largest. Source: divergence.numerics.ulp.
    """
    options = {"smallest_key": _smallest_key(form, form.unit_roundoff * rms), "check": check_finite}
    parts = tiles(rows, a.num_cols, block=block)
    low, high = _guess(_Distances(a, b, form, **options), parts)
    steps = range(max(0, low - 1), high + 1) if high - low < _MOST_STEPS else range(0)
    bound = low
    while True:

        def work(part: Split, bound: int = bound, steps: range = steps) -> _Tail:
            tail = _Tail(bound, steps)
            distances = _Distances(a, b, form, **options)
            for one, cols in part:
                tail.add(*distances.block(one, cols))
            return tail

        tails = run_split(work, parts, threads=threads)
        counted = sum(tail.num_counted for tail in tails)
        if counted == 0:
            return UlpCounts(num_counted=0, share_over_1=0.0, p99=0.0, max=0.0)
        num_above = counted - math.ceil(0.99 * counted) + 1  # p99 is the num_above-th largest
        p99 = _from_steps(tails, num_above) if steps else _from_beyond(tails, num_above)
        if p99 is None:
            over = sum(tail.num_over for tail in tails)
            too_low = bool(steps) and over[-1] >= num_above
            bound, steps = (high if too_low else bound // 2), range(0)
            continue
        if 1 in steps:
            num_over_1 = int(sum(tail.num_over for tail in tails)[steps.index(1)])
        else:
            num_over_1 = sum(tail.num_over_1 for tail in tails)
        return UlpCounts(
            num_counted=counted,
            share_over_1=num_over_1 / counted,
            p99=float(p99),
            max=float(max(tail.largest for tail in tails)),
        )


def _from_steps(tails: list[_Tail], num_above: int) -> int | None:
    """The num_above-th largest distance, or None where it is not among the steps."""
    steps = tails[0].steps
    few = np.flatnonzero(sum(tail.num_over for tail in tails) < num_above)
    if not len(few) or (few[0] == 0 and steps[0] > 0):
        return None
    return steps[int(few[0])]


def _from_beyond(tails: list[_Tail], num_above: int) -> int | None:
    """The same among the distances picked out, or None where it is below the bound."""
    beyond = np.concatenate([one for tail in tails for one in tail.beyond] or [np.empty(0)])
    if len(beyond) >= num_above:
        return int(np.partition(beyond, len(beyond) - num_above)[len(beyond) - num_above])
    bound = tails[0].bound
    if bound == 0 or len(beyond) + sum(tail.num_at_bound for tail in tails) >= num_above:
        return bound
    return None


def _guess(distances: _Distances, parts: list[tuple[Rows, slice]]) -> tuple[int, int]:
    """The 97th and 99.9th percentile of the distances in up to 16 blocks' first runs."""
    found = []
    for rows, cols in parts[:: max(1, len(parts) // _NUM_RUNS)]:
        stop = min(cols.stop, cols.start + _RUN)
        count = max(1, _RUN // (stop - cols.start))
        if isinstance(rows, slice):
            few: Rows = slice(rows.start, min(rows.stop, rows.start + count))
        else:
            few = rows[:count]
        found.append(distances.block(few, slice(cols.start, stop))[0].ravel().copy())
    if not found:
        return 0, 0
    low, high = np.quantile(np.concatenate(found), [0.97, 0.999], method="lower")
    return int(low), int(high)


def _smallest_key(form: Format, magnitude: float) -> int:
    """Key of the smallest value of ``form`` that is >= magnitude (> 0 or 0)."""
    if magnitude == 0.0:
        return 0
    value = torch.tensor([min(magnitude, form.max)], dtype=torch.float64).to(form.torch_dtype)
    key = int(key_array(stored_bits(value, form), form)[0])
    return key + (float(value) < magnitude)

"""How many ulp apart two tensors are: share beyond one, 99th percentile, largest.

The percentile is exact, without a histogram of all distances: a sample of runs
guesses a bound below it, one pass counts the distances at the bound and keeps those
beyond it (a few percent), and the percentile is selected among these. A guess that
was too high is halved and the pass repeated, which takes a tensor whose sampled
runs are unlike the rest.

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


class UlpCounts(msgspec.Struct, frozen=True, kw_only=True):
    """``share_over_1``: of the counted elements, the share more than 1 ulp apart. ``p99``:
    smallest distance that at least 99 % of them do not exceed. ``max``: the largest. All
    in ulp of the format named to count_ulp; all 0 where nothing was counted."""

    num_counted: int
    share_over_1: float
    p99: float
    max: float


class _Tail:
    """One worker's counts, and every distance beyond ``bound``."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.num_counted = self.num_over_1 = self.num_at_bound = self.largest = 0
        self.beyond: list[np.ndarray] = []


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
    a: Grid, b: Grid, form: Format, *, rows: Rows, rms: float, check_finite: bool = True,
    threads: int = 1, block: int = BLOCK,
) -> UlpCounts:
    """Distances in ``form`` between ``rows`` of a and b where |a| >= u · ``rms``.

    Unit: ulp of ``form``; values stored otherwise are rounded to it. ``rms``: of a.
    Elements that are not finite on both sides are left out; ``check_finite=False``
    promises that there are none. -0 equals +0. A value that overflows on rounding to
    ``form`` counts as its inf, one ulp beyond the largest. Source: divergence.numerics.ulp.
    """
    options = {"smallest_key": _smallest_key(form, form.unit_roundoff * rms), "check": check_finite}
    parts = tiles(rows, a.num_cols, block=block)
    bound = _guess(_Distances(a, b, form, **options), parts)
    while True:

        def work(part: Split, bound: int = bound) -> _Tail:
            tail = _Tail(bound)
            distances = _Distances(a, b, form, **options)
            for one, cols in part:
                _add(tail, *distances.block(one, cols))
            return tail

        tails = run_split(work, parts, threads=threads)
        counted = sum(tail.num_counted for tail in tails)
        if counted == 0:
            return UlpCounts(num_counted=0, share_over_1=0.0, p99=0.0, max=0.0)
        num_above = counted - math.ceil(0.99 * counted) + 1  # p99 is the num_above-th largest
        beyond = np.concatenate([one for tail in tails for one in tail.beyond] or [np.empty(0)])
        if len(beyond) >= num_above:
            p99 = float(np.partition(beyond, len(beyond) - num_above)[len(beyond) - num_above])
        elif bound == 0 or len(beyond) + sum(tail.num_at_bound for tail in tails) >= num_above:
            p99 = float(bound)
        else:
            bound //= 2
            continue
        return UlpCounts(
            num_counted=counted,
            share_over_1=sum(tail.num_over_1 for tail in tails) / counted,
            p99=p99,
            max=float(max(tail.largest for tail in tails)),
        )


def _add(tail: _Tail, distance: np.ndarray, num_counted: int, mask: np.ndarray) -> None:
    """``mask``: a bool buffer of the distances' shape (an array made anew costs page faults)."""
    tail.num_counted += num_counted
    largest = int(distance.max())
    tail.largest = max(tail.largest, largest)
    if largest > 1:
        tail.num_over_1 += int(np.count_nonzero(np.greater(distance, 1, out=mask)))
    if tail.bound and largest >= tail.bound:
        tail.num_at_bound += int(np.count_nonzero(np.equal(distance, tail.bound, out=mask)))
    if largest > tail.bound:
        tail.beyond.append(distance[np.greater(distance, tail.bound, out=mask)])


def _guess(distances: _Distances, parts: list[tuple[Rows, slice]]) -> int:
    """The 97th percentile of the distances in up to 16 blocks' first runs."""
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
        return 0
    return int(np.quantile(np.concatenate(found), 0.97, method="lower"))


def _smallest_key(form: Format, magnitude: float) -> int:
    """Key of the smallest value of ``form`` that is >= magnitude (> 0 or 0)."""
    if magnitude == 0.0:
        return 0
    value = torch.tensor([min(magnitude, form.max)], dtype=torch.float64).to(form.torch_dtype)
    key = int(key_array(stored_bits(value, form), form)[0])
    return key + (float(value) < magnitude)

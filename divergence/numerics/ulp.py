"""Distances in representable values of a named format, one by one and counted over tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from divergence.numerics.arrays import as_array, bits_of, rounded, wide
from divergence.numerics.formats import Format
from divergence.numerics.sums import BLOCK, READABLE, Grid, Kernel, Rows, run_split, tiles

if TYPE_CHECKING:
    import torch

    from divergence.numerics.arrays import Tensor

# Distance in representable values of a named format.
#
# Read as integers, the magnitudes of one sign of a binary float format count its
# values upwards from zero; negate those with the sign bit and the whole format lies
# on one integer line, the *lattice* (Bruce Dawson, "Comparing Floating Point
# Numbers", 2012). The key of -0 is the key of +0; the largest finite value and inf
# are neighbours. The distance of two values is the difference of their keys.
#
# It refuses to compare across formats silently: the format is always named, and
# values stored in another one are rounded to it first.
#
# ``spacing``: how far apart the values of a format lie around a number, the unit of its last
# rounding. Rounding to nearest errs by at most half the spacing; uniformly over that, by 1/√12 =
# 0.29 of it in the root mean square. Unlike the unit roundoff, which is relative to the number,
# the spacing stands still within a binade and among subnormals.

NAN_DISTANCE = 2**63 - 1
"""What ulp_distance answers where exactly one side is nan; also its ceiling."""


def ulp_distance(a: torch.Tensor, b: torch.Tensor, form: Format) -> torch.Tensor:
    """|key(a) - key(b)| per element, int64, symmetric.

    Unit: ulp of ``form``. 0 for equal values, +0 and -0, and for nan beside nan;
    NAN_DISTANCE where one side only is nan. Distances beyond 2^63 - 1 (float64 of
    opposite signs) stop there. Source: module docstring.
    """
    import torch

    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    distance = distance_array(
        key_array(stored_bits(a, form), form), key_array(stored_bits(b, form), form)
    )
    distance = np.minimum(distance.astype(np.uint64), np.uint64(NAN_DISTANCE)).astype(np.int64)
    nan_a, nan_b = (np.isnan(wide(rounded(values, form))) for values in (a, b))
    distance = np.where(nan_a ^ nan_b, NAN_DISTANCE, np.where(nan_a & nan_b, 0, distance))
    return torch.from_numpy(np.asarray(distance)).reshape(a.shape)


def stored_bits(values: Tensor, form: Format) -> np.ndarray:
    """The bit patterns of ``values`` in ``form``, as signed integers (uint8 for one byte)."""
    if form.kind != "float":
        raise ValueError(f"ulp distances exist in float formats, not in {form.name}")
    return bits_of(rounded(as_array(values), form))


def key_array(
    bits: np.ndarray,
    form: Format,
    *,
    out: np.ndarray | None = None,
    scratch: np.ndarray | None = None,
) -> np.ndarray:
    """Keys of bit patterns as signed integers of the same width (int16 for one byte).

    With s = bits >> (width - 1), which is -1 for a set sign and 0 otherwise,
    (bits ^ (s & 0x7f..)) - s turns sign and magnitude into two's complement.
    ``out`` and ``scratch``: buffers of the keys' dtype and ``bits``' shape, or None.
    """
    if form.itemsize == 1:
        return np.take(byte_keys(form), bits, out=out)
    width = 8 * form.itemsize
    sign = np.right_shift(bits, width - 1, out=scratch)
    keys: np.ndarray = np.bitwise_and(sign, bits.dtype.type(2 ** (width - 1) - 1), out=out)
    np.bitwise_xor(keys, bits, out=keys)
    np.subtract(keys, sign, out=keys)
    return keys


def distance_array(
    a: np.ndarray,
    b: np.ndarray,
    *,
    out: np.ndarray | None = None,
    scratch: np.ndarray | None = None,
) -> np.ndarray:
    """|a - b| of two key arrays as unsigned integers of their width: exact, because the
    larger minus the smaller, modulo 2^width, is the distance even where it wraps."""
    high: np.ndarray = np.maximum(a, b, out=out)
    low = np.minimum(a, b, out=scratch)
    np.subtract(high, low, out=high)
    return high.view(f"u{high.itemsize}")


def byte_keys(form: Format) -> np.ndarray:
    """The key of each of the 256 patterns of a one-byte format."""
    patterns = np.arange(256, dtype=np.int16)
    if not form.signed:  # e8m0fnu: a bare exponent, in order as it stands; 0xff is nan
        return patterns
    keys = np.where(patterns < 128, patterns, 128 - patterns).astype(np.int16)
    if form.name.endswith("fnuz"):
        keys[0x80] = 128  # nan sits where -0 would
    return keys


ROUNDING_RMS = 1 / math.sqrt(12)
"""Rms error of rounding to nearest, in spacings."""


_EXPONENT_BITS = 0x7FF << 52


def spacing(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Distance of neighbouring values of ``form`` around each float64 ``x``.

    Unit: that of x. The subnormals' distance at 0, nan where x is not finite; no upper end.
    """
    import torch

    # the exponent bits alone are the power of two at or below |x|: 0 for 0, inf for inf and nan
    power = (x.contiguous().view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    distance = (power * 2.0**-form.mantissa_bits).clamp_min(form.smallest_subnormal)
    return distance.masked_fill_(power == math.inf, math.nan)


# How many ulp apart two tensors are: share beyond one, 99th percentile, largest.
#
# The percentile is exact, without a histogram of all distances. A sample of runs guesses
# where it lies. Guessed within a few ulp (16-bit formats), one pass counts how many
# distances exceed each of these; otherwise it counts those at a bound just below and
# keeps those beyond it (a few percent), among which the percentile is selected. A wrong
# guess costs another pass, and takes a tensor whose sampled runs are unlike the rest. Compiled
# loops count the same things, without blocks.
#
# Elements with |a| < u · rms(a) are left out: there cancellation makes 1e7 ulp of
# nothing.
#
# The tail of the distances is counted in numpy's blocks or in compiled loops. Both give one Tail
# per thread: how many distances exceed each of a few neighbouring values or, where the percentile
# was not guessed that closely, those beyond a bound themselves.


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
    there: Callable[..., Counting] | None = None,
) -> UlpCounts:
    """Distances in ``form`` between ``rows`` of a and b where |a| >= u · ``rms``.

    Unit: ulp of ``form``; values stored otherwise are rounded to it. ``rms``: of a.
    Elements that are not finite on both sides are left out; ``check_finite=False``
    promises that there are none. -0 equals +0. A value that overflows on rounding to
    ``form`` counts as its inf, one ulp beyond the largest. ``there``: counts on a device.
    Source: divergence.numerics.ulp.
    """
    smallest = smallest_key(form, form.unit_roundoff * rms)
    # a value that is finite in its own format and not in ``form`` is told from one that is inf in
    # both by nothing that compiled loops see
    names = {a.format.name, b.format.name, form.name}
    looped = form.name in READABLE and (not check_finite or len(names) == 1)
    counting: Counting
    if there is not None and form.itemsize <= 4:
        counting = there(form, rows=rows, smallest_key=smallest, check=check_finite)
    else:
        counted_by = InLoops if kernel == "compiled" and looped else InBlocks
        counting = counted_by(
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
        num_over_1 = sum(tail.num_over_1 for tail in tails)
        if steps:
            # how many distances exceed each of the steps, of all workers
            over = sum((tail.num_over for tail in tails[1:]), tails[0].num_over)
            few = np.flatnonzero(over < num_above)
            if not len(few) or (few[0] == 0 and steps[0] > 0):  # it is not among the steps
                bound, steps = (high if over[-1] >= num_above else bound // 2), range(0)
                continue
            p99 = steps[int(few[0])]
            if 1 in steps:
                num_over_1 = int(over[steps.index(1)])
        else:
            parts = [part for tail in tails for part in tail.beyond]
            beyond = np.concatenate(parts or [np.empty(0)])
            num_at_bound = sum(tail.num_at_bound for tail in tails)
            if len(beyond) >= num_above:
                place = len(beyond) - num_above
                p99 = int(np.partition(beyond, place)[place])
            elif bound == 0 or len(beyond) + num_at_bound >= num_above:
                p99 = bound
            else:
                bound //= 2
                continue
        return UlpCounts(
            num_counted=counted,
            share_over_1=num_over_1 / counted,
            p99=float(p99),
            max=float(max(tail.largest for tail in tails)),
        )


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


_NUM_RUNS, _RUN = 16, 1024
MOST_STEPS = 5
"""Counting what exceeds one value costs a tenth of picking out what exceeds it."""


class Tail:
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


class Counting(Protocol):
    """One pair in one format, under one mask."""

    def guess(self) -> tuple[int, int] | None:
        """The 97th and 99.9th percentile of a sample; None where all there is would fit in."""

    def count(self, bound: int, steps: range, *, threads: int) -> list[Tail]:
        """All distances, by thread."""


class InBlocks:
    """Masked distances of one block after another, in numpy: any format."""

    def __init__(
        self,
        a: Grid,
        b: Grid,
        form: Format,
        *,
        rows: Rows,
        smallest_key: int,
        check: bool,
        block: int = BLOCK,
    ) -> None:
        """``check``: leave out what is not finite on both sides."""
        self._a, self._b, self._form, self._check = a, b, form, check
        self._smallest_key, self._rows = smallest_key, rows
        self._parts = tiles(rows, a.num_cols, block=block)

    def guess(self) -> tuple[int, int] | None:
        """Guess from up to 16 blocks' first runs."""
        distances, buffers = [], self._buffers()
        for rows, cols in self._parts[:: max(1, len(self._parts) // _NUM_RUNS)]:
            stop = min(cols.stop, cols.start + _RUN)
            count = max(1, _RUN // (stop - cols.start))
            if isinstance(rows, slice):
                few: Rows = slice(rows.start, min(rows.stop, rows.start + count))
            else:
                few = rows[:count]
            distance = self._block(few, slice(cols.start, stop), buffers)[0]
            distances.append(distance.ravel().copy())
        return _percentiles(np.concatenate(distances)) if distances else (0, 0)

    def count(self, bound: int, steps: range, *, threads: int) -> list[Tail]:
        def work(parts: list[tuple[Rows, slice]]) -> Tail:
            tail, buffers = Tail(bound, steps), self._buffers()
            for rows, cols in parts:
                tail.add(*self._block(rows, cols, buffers))
            return tail

        return run_split(work, self._parts, threads=threads)

    def _buffers(self) -> tuple[np.ndarray, np.ndarray]:
        return np.empty((3, BLOCK), f"i{max(2, self._form.itemsize)}"), np.empty(BLOCK, bool)

    def _block(
        self, rows: Rows, cols: slice, buffers: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, int, np.ndarray]:
        """Distances (0 where masked), how many elements are not masked, a spare mask."""
        bits_a, bits_b = (stored(grid, self._form, rows, cols) for grid in (self._a, self._b))
        shape, size = bits_a.shape, bits_a.size
        out_a, out_b, three = (buffer[:size].reshape(shape) for buffer in buffers[0])
        keep = buffers[1][:size].reshape(shape)
        keys_a = key_array(bits_a, self._form, out=out_a, scratch=three)
        keys_b = key_array(bits_b, self._form, out=out_b, scratch=three)
        np.greater_equal(np.abs(keys_a, out=three), self._smallest_key, out=keep)
        if self._check:
            for grid in (self._a, self._b):
                values = grid.load(rows, cols, np.empty(BLOCK))
                np.logical_and(keep, np.isfinite(values), out=keep)
        distance = distance_array(keys_a, keys_b, out=three, scratch=out_a)
        num_counted = int(np.count_nonzero(keep))
        if num_counted < size:
            np.multiply(distance, keep, out=distance)
        return distance, num_counted, keep


class InLoops(InBlocks):
    """The same in compiled loops, for formats of 16 to 64 bits."""

    def count(self, bound: int, steps: range, *, threads: int) -> list[Tail]:
        from divergence.numerics.compiled import RUN_DISTANCES, count_steps, pick_beyond

        size = self._form.itemsize
        kind: type[np.unsignedinteger] = np.dtype(f"u{size}").type
        signed: type[np.signedinteger] = np.dtype(f"i{size}").type
        most, high = np.iinfo(kind).max, np.iinfo(signed).max
        if self._check:
            high = int(stored_bits(np.array([self._form.max]), self._form)[0])
        keys = signed(self._smallest_key), signed(high), signed(0)
        values = tuple(kind(min(steps.start + step, most)) for step in range(MOST_STEPS))
        # rows at once: 4 million elements, so that what is picked out or rounded stays small
        at_once = max(1, (1 << 22) // max(1, self._a.num_cols))

        def work(part: np.ndarray) -> Tail:
            tail = Tail(bound, steps)
            for start in range(0, len(part), at_once):
                a, b, rows = self._bits(part[start : start + at_once])
                counts, over = np.zeros(4, np.uint64), np.zeros(MOST_STEPS, np.int64)
                if steps:
                    count_steps(a, b, rows, *keys, kind(0), kind(1), values, counts, over)
                    tail.num_over += over[: len(steps)]
                else:
                    run: np.ndarray = np.empty(RUN_DISTANCES, kind)
                    # one more than can be found: the loop writes before it knows
                    beyond = np.empty(len(rows) * a.shape[1] + 1, kind)
                    num_beyond = pick_beyond(
                        a, b, rows, *keys, kind(0), kind(1), kind(bound), counts, run, beyond
                    )
                    tail.beyond.append(beyond[:num_beyond].copy())
                counted, over_1, largest, at_bound = counts.tolist()
                tail.num_counted += counted
                tail.num_over_1 += over_1
                tail.largest = max(tail.largest, largest)
                tail.num_at_bound += at_bound
            return tail

        rows = self._rows
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return run_split(work, numbers, threads=threads)

    def _bits(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Both sides' bit patterns in the format, and the numbers of ``rows`` there."""
        grids = self._a, self._b
        if {grid.format.name for grid in grids} == {self._form.name}:
            return self._a.bits, self._b.bits, rows
        every = slice(0, self._a.num_cols)
        gapless = len(rows) > 0 and int(rows[-1]) - int(rows[0]) == len(rows) - 1
        near = slice(int(rows[0]), int(rows[-1]) + 1) if gapless else rows
        a, b = (np.ascontiguousarray(stored(grid, self._form, near, every)) for grid in grids)
        return a, b, np.arange(len(rows))


def stored(grid: Grid, form: Format, rows: Rows, cols: slice) -> np.ndarray:
    """A block's bit patterns in ``form``, rounded to it where it is stored otherwise."""
    if grid.format.name == form.name:
        return grid.bits[rows, cols]
    return stored_bits(grid.array[rows, cols], form)


def _percentiles(distances: np.ndarray) -> tuple[int, int]:
    ordered = np.sort(distances)
    low, high = (int(ordered[int(share * (len(ordered) - 1))]) for share in (0.97, 0.999))
    return low, high

"""The tail of a tensor's ulp distances: two ways to count it, in numpy's blocks or compiled loops.

Both give one Tail per thread: how many distances exceed each of a few neighbouring values
or, where the percentile was not guessed that closely, those beyond a bound themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from divergence.numerics.formats import Format
from divergence.numerics.pairs.blocks import BLOCK, Grid, Rows
from divergence.numerics.pairs.sums import tiles
from divergence.numerics.pairs.ulp import distance_array, key_array, stored_bits
from divergence.numerics.workers import run_split

if TYPE_CHECKING:
    from divergence.numerics.compiled.distances import Distances

__all__ = ["MOST_STEPS", "Counting", "InBlocks", "InLoops", "Tail"]

_NUM_RUNS, _RUN = 16, 1024
_LOOP_RUN, _FEW = 512, 1 << 14
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
        self, a: Grid, b: Grid, form: Format, *, rows: Rows, smallest_key: int, check: bool,
        block: int = BLOCK,
    ) -> None:  # fmt: skip
        """``check``: leave out what is not finite on both sides."""
        self._a, self._b, self._form, self._check = a, b, form, check
        self._smallest_key = smallest_key
        self._parts = tiles(rows, a.num_cols, block=block)

    def guess(self) -> tuple[int, int]:
        """From up to 16 blocks' first runs."""
        found, buffers = [], self._buffers()
        for rows, cols in self._parts[:: max(1, len(self._parts) // _NUM_RUNS)]:
            stop = min(cols.stop, cols.start + _RUN)
            count = max(1, _RUN // (stop - cols.start))
            if isinstance(rows, slice):
                few: Rows = slice(rows.start, min(rows.stop, rows.start + count))
            else:
                few = rows[:count]
            distance = self._block(few, slice(cols.start, stop), buffers)[0]
            found.append(distance.ravel().copy())
        return _percentiles(np.concatenate(found)) if found else (0, 0)

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
        one, two, three = (buffer[:size].reshape(shape) for buffer in buffers[0])
        keep = buffers[1][:size].reshape(shape)
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


class InLoops:
    """The same in compiled loops, for formats of 16 to 64 bits (``reads``)."""

    def __init__(
        self, a: Grid, b: Grid, form: Format, *, rows: Rows, smallest_key: int, check: bool
    ) -> None:
        self._a, self._b, self._form = a, b, form
        self._rows: np.ndarray = (
            np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        )
        self._low, self._high = smallest_key, 2 ** (8 * form.itemsize - 1) - 1
        if check:
            top = torch.tensor([form.max], dtype=torch.float64).to(form.torch_dtype)
            self._high = int(stored_bits(top, form)[0])

    @staticmethod
    def reads(a: Grid, b: Grid, form: Format, *, check: bool) -> bool:
        """Whether the loops can count this: a value that is finite in its own format and not in
        ``form`` is told from one that is inf in both by nothing they see."""
        if form.name not in ("bfloat16", "float16", "float32", "float64"):
            return False
        return not check or a.format.name == b.format.name == form.name

    def guess(self) -> tuple[int, int] | None:
        """From the first 512 elements of up to 16 rows, or more of each where they are few, or
        of more where they are short."""
        num_cols = self._a.num_cols
        if len(self._rows) * num_cols <= _FEW:
            return None
        length = max(_LOOP_RUN, _FEW // len(self._rows) // 2)
        count = max(16, _FEW // 2 // min(num_cols, length))
        rows = self._rows[:: max(1, len(self._rows) // count)]
        distances, rows = self._distances(rows)
        return _percentiles(distances.sample(rows, length))

    def count(self, bound: int, steps: range, *, threads: int) -> list[Tail]:
        def work(part: np.ndarray) -> Tail:
            tail = Tail(bound, steps)
            for rows in self._pieces(part):
                distances, rows = self._distances(rows)
                if steps:
                    found, over = distances.count_steps(rows, steps.start)
                    tail.num_over += over[: len(steps)]
                else:
                    found, beyond = distances.pick_beyond(rows, bound)
                    tail.num_at_bound += found[3]
                    tail.beyond.append(beyond)
                tail.num_counted += found[0]
                tail.num_over_1 += found[1]
                tail.largest = max(tail.largest, found[2])
            return tail

        return run_split(work, self._rows, threads=threads)

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows at once: 4 million elements, so that what is picked out or rounded stays small."""
        count = max(1, (1 << 22) // max(1, self._a.num_cols))
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def _distances(self, rows: np.ndarray) -> tuple[Distances, np.ndarray]:
        """The loops over ``rows``, and their numbers there."""
        from divergence.numerics.compiled.distances import Distances

        names = {self._a.format.name, self._b.format.name, self._form.name}
        if len(names) == 1:
            return Distances(self._a.bits, self._b.bits, self._low, self._high), rows
        every = slice(0, self._a.num_cols)
        near = slice(int(rows[0]), int(rows[-1]) + 1) if _gapless(rows) else rows
        a, b = (
            np.ascontiguousarray(stored(grid, self._form, near, every))
            for grid in (self._a, self._b)
        )
        return Distances(a, b, self._low, self._high), np.arange(len(rows))


def _gapless(rows: np.ndarray) -> bool:
    return len(rows) > 0 and int(rows[-1]) - int(rows[0]) == len(rows) - 1


def stored(grid: Grid, form: Format, rows: Rows, cols: slice) -> np.ndarray:
    """A block's bit patterns in ``form``, rounded to it where it is stored otherwise."""
    if grid.format.name == form.name:
        return grid.bits[rows, cols]
    return stored_bits(grid.torch[rows, cols], form)


def _percentiles(distances: np.ndarray) -> tuple[int, int]:
    ordered = np.sort(distances)
    low, high = (int(ordered[int(share * (len(ordered) - 1))]) for share in (0.97, 0.999))
    return low, high

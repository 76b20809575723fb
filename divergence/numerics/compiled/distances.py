"""Ulp distances of two arrays of bit patterns, counted in compiled loops.

Runs of 2048 are counted in integers of the patterns' own width, so that a vector holds as many
as it can; each run's counts are then added up in 64 bits. What is counted and why:
divergence.numerics.pairs.ulp_counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from divergence.numerics.compiled.numbers import (
    add_if,
    distance,
    in_range,
    jit,
    key,
    larger,
    or_zero,
)

__all__ = ["NUM_STEPS", "BitDistances"]

NUM_STEPS = 5
"""How many neighbouring values are counted at once."""

_RUN = 2048
_UNSIGNED: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@jit
def _count_steps(
    a: np.ndarray,
    b: np.ndarray,
    rows: np.ndarray,
    low: np.signedinteger,
    high: np.signedinteger,
    nothing: np.signedinteger,
    zero: np.unsignedinteger,
    one: np.unsignedinteger,
    steps: tuple[np.unsignedinteger, ...],
    counts: np.ndarray,
    over: np.ndarray,
) -> None:
    s0, s1, s2, s3, s4 = steps
    for row in rows:
        for start in range(0, a.shape[1], _RUN):
            stop = min(start + _RUN, a.shape[1])
            x_row, y_row = a[row, start:stop], b[row, start:stop]
            n = over1 = n0 = n1 = n2 = n3 = n4 = top = zero
            for j in range(stop - start):
                p, q = key(x_row[j]), key(y_row[j])
                keep = in_range(p, low, high) & in_range(q, nothing, high)
                d = or_zero(keep, distance(p, q))
                n = add_if(n, keep)
                over1 = add_if(over1, d > one)
                n0 = add_if(n0, d > s0)
                n1 = add_if(n1, d > s1)
                n2 = add_if(n2, d > s2)
                n3 = add_if(n3, d > s3)
                n4 = add_if(n4, d > s4)
                top = larger(top, d)
            counts[0] += n
            counts[1] += over1
            counts[2] = max(counts[2], np.uint64(top))
            over[0] += n0
            over[1] += n1
            over[2] += n2
            over[3] += n3
            over[4] += n4


@jit
def _pick_beyond(
    a: np.ndarray,
    b: np.ndarray,
    rows: np.ndarray,
    low: np.signedinteger,
    high: np.signedinteger,
    nothing: np.signedinteger,
    zero: np.unsignedinteger,
    one: np.unsignedinteger,
    bound: np.unsignedinteger,
    counts: np.ndarray,
    run: np.ndarray,
    beyond: np.ndarray,
) -> int:
    """``counts``: counted, over 1, largest, at the bound. Returns how many ``beyond`` got."""
    num_beyond = 0
    for row in rows:
        for start in range(0, a.shape[1], _RUN):
            stop = min(start + _RUN, a.shape[1])
            x_row, y_row = a[row, start:stop], b[row, start:stop]
            n = over1 = at = top = zero
            for j in range(stop - start):
                p, q = key(x_row[j]), key(y_row[j])
                keep = in_range(p, low, high) & in_range(q, nothing, high)
                d = or_zero(keep, distance(p, q))
                n = add_if(n, keep)
                over1 = add_if(over1, d > one)
                at = add_if(at, d == bound)
                top = larger(top, d)
                run[j] = d
            counts[0] += n
            counts[1] += over1
            counts[2] = max(counts[2], np.uint64(top))
            counts[3] += at
            if top > bound:
                for j in range(stop - start):
                    beyond[num_beyond] = run[j]
                    num_beyond += run[j] > bound
    return num_beyond


@jit
def _sample(
    a: np.ndarray,
    b: np.ndarray,
    rows: np.ndarray,
    low: np.signedinteger,
    high: np.signedinteger,
    nothing: np.signedinteger,
    length: int,
    distances: np.ndarray,
) -> int:
    """Distances of up to ``length`` elements at the start of each of ``rows``."""
    num = 0
    for row in rows:
        for j in range(min(length, a.shape[1])):
            p, q = key(a[row, j]), key(b[row, j])
            keep = in_range(p, low, high) & in_range(q, nothing, high)
            distances[num] = or_zero(keep, distance(p, q))
            num += 1
    return num


_Arguments = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.signedinteger, np.signedinteger, np.signedinteger
]


@dataclass(frozen=True, slots=True)
class BitDistances:
    """Two arrays (rows, columns) of signed bit patterns of one format, 16 to 64 bits wide.

    ``low``: smallest key that counts; ``high``: largest, on both sides.
    """

    a: np.ndarray
    b: np.ndarray
    low: int
    high: int

    def _arguments(self, rows: np.ndarray) -> _Arguments:
        kind = self.a.dtype.type
        return self.a, self.b, rows, kind(self.low), kind(self.high), kind(0)

    @property
    def _unsigned(self) -> type[np.unsignedinteger]:
        return _UNSIGNED[self.a.itemsize]

    def count_steps(self, rows: np.ndarray, first: int) -> tuple[list[int], list[int]]:
        """(counted, over 1, largest) and how many exceed each of the values from ``first``."""
        kind = self._unsigned
        counts, over = np.zeros(3, np.uint64), np.zeros(NUM_STEPS, np.int64)
        most = np.iinfo(kind).max
        steps = tuple(kind(min(first + step, most)) for step in range(NUM_STEPS))
        _count_steps(*self._arguments(rows), kind(0), kind(1), steps, counts, over)
        return counts.tolist(), over.tolist()

    def pick_beyond(self, rows: np.ndarray, bound: int) -> tuple[list[int], np.ndarray]:
        """(counted, over 1, largest, at the bound) and the distances beyond the bound."""
        kind = self._unsigned
        counts = np.zeros(4, np.uint64)
        run: np.ndarray = np.empty(_RUN, kind)
        # one more than can be found: the loop writes before it knows
        beyond = np.empty(len(rows) * self.a.shape[1] + 1, kind)
        num_beyond = _pick_beyond(
            *self._arguments(rows), kind(0), kind(1), kind(bound), counts, run, beyond
        )
        return counts.tolist(), beyond[:num_beyond].copy()

    def sample(self, rows: np.ndarray, length: int) -> np.ndarray:
        """The distances of up to ``length`` elements of each of ``rows``; 0 where left out."""
        distances = np.empty(len(rows) * min(length, self.a.shape[1]), self._unsigned)
        _sample(*self._arguments(rows), length, distances)
        return distances

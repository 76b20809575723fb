"""Reading the pairs: what is read of which run, ahead of being measured, and checked on the way.

Equal checksums are equal tensors: their bytes are checked against them, not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from divergence.comparison.align.pieces import Pair
from divergence.comparison.measure.truth import Truth
from divergence.errors import RunFormatError
from divergence.run.reader import Run
from divergence.run.schema.record import Record

__all__ = ["Reading", "equal_by_record"]

BaseOf = Callable[[Pair], tuple[Run, Record] | None]


class Reading:
    """The bytes of two runs' pairs, and of the truth. ``base_of``: what a pair needs besides."""

    def __init__(
        self, reference: Run, candidate: Run, truth: Truth | None, base_of: BaseOf
    ) -> None:
        self._reference, self._candidate = reference, candidate
        self._truth, self._base_of = truth, base_of

    def read_ahead(self, pair: Pair) -> None:
        """Bring a pair's bytes into memory and check them; ``look`` says what is wrong."""
        with contextlib.suppress(RunFormatError):
            self.check(pair)

    def prefetch(self, pairs: Sequence[Pair]) -> None:
        """Say to runs that are far away what will be read of them, in which order."""
        if not any(run.far for run in (self._reference, self._candidate)):
            return
        wanted: dict[int, tuple[Run, list[Record]]] = {}
        for pair in pairs:
            in_truth = self._right(pair)
            if equal_by_record(pair) and in_truth is None:
                continue
            reference, candidate = pair.reference.record, pair.candidate.record
            parts = [(self._reference, reference), (self._candidate, candidate)]
            if in_truth is not None:
                parts.append(in_truth)
            base = self._base_of(pair)
            parts += [] if base is None else [base]
            for run, record in parts:
                wanted.setdefault(id(run), (run, []))[1].append(record)
        for run, records in wanted.values():
            run.expect(records)

    def fetch(self, pair: Pair) -> None:
        """Have the system fetch what is on this machine's disks of a pair."""
        for run, record in self.reads(pair):
            if not run.far:
                run.will_read(record)

    def check(self, pair: Pair) -> None:
        """Both sides' bytes are what their records say; each tensor is looked at once. Of a run
        that is far away, what is equal by its record is not fetched to be looked at."""
        sides = (self._reference, pair.reference.record), (self._candidate, pair.candidate.record)
        for run, record in sides:
            if run.far and equal_by_record(pair):
                continue
            run.check(record)

    def has_both(self, pair: Pair) -> bool:
        """Are the bytes of both sides at hand?"""
        return self._reference.has_bytes(pair.reference.record) and self._candidate.has_bytes(
            pair.candidate.record
        )

    def release(self, pairs: Sequence[Pair]) -> None:
        """What was read of the pairs may leave memory."""
        self._reference.release([pair.reference.record for pair in pairs])
        self._candidate.release([pair.candidate.record for pair in pairs])
        if self._truth is not None:
            self._truth.run.release_read(sum(8 * pair.reference.record.numel for pair in pairs))

    def reads(self, pair: Pair) -> list[tuple[Run, Record]]:
        """What of which run is read for a pair, a block's input apart."""
        reference, candidate = pair.reference.record, pair.candidate.record
        parts = [(self._reference, reference), (self._candidate, candidate)]
        in_truth = self._right(pair)
        return parts if in_truth is None else [*parts, in_truth]

    def _right(self, pair: Pair) -> tuple[Run, Record] | None:
        """What the truth has of a pair."""
        record = None if self._truth is None else self._truth.record(pair)
        return None if self._truth is None or record is None else (self._truth.run, record)


def equal_by_record(pair: Pair) -> bool:
    """Are the two equal bit for bit, by what was recorded of them?"""
    ref, cand = pair.reference.record, pair.candidate.record
    return (
        ref.xxh3 == cand.xxh3 is not None and ref.dtype == cand.dtype and ref.shape == cand.shape
        and ref.positions == cand.positions
        and pair.reference.row is None and pair.candidate.row is None
    )  # fmt: skip

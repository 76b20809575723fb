"""Measuring the pairs: reads both tensors ahead and checks them, calls numerics.

Equal checksums are equal tensors: their bytes are checked against them, not measured.
A pair of tensors that occurs at several sites (one block's output is the next one's
input) is measured once. Pads are masked by the samples' token counts, and rows are turned back into
token positions. Small tensors of one shape are measured many at a time.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from divergence.comparison.align.pieces import Pair, Pieces, is_repeated, repeated, same_positions
from divergence.comparison.experts import Routing
from divergence.comparison.measure.floors import Floor, work_format
from divergence.comparison.measure.judge import Judge, PairNumbers
from divergence.comparison.measure.truth import Truth
from divergence.comparison.results import LogitsDiff
from divergence.errors import RunFormatError
from divergence.numerics.formats import Format, format_named
from divergence.numerics.kernels import Kernel
from divergence.numerics.logits import measure_logits
from divergence.numerics.pairs import MOST_NUMEL, NUMEL_AT_ONCE, measure_many, measure_pair
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import module_of

if TYPE_CHECKING:
    import torch

    from divergence.numerics.pairs import AgainstTruth
    from divergence.run.reader import OwnFloor

__all__ = ["Measurer", "PairNumbers", "Reading", "equal_by_record"]

_REMEMBERED = 256  # recent pairs: an output returns as the next input soon, or not at all

_Key = tuple[object, ...]
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


class Measurer:
    """Measures pairs of two runs; keeps what repeats."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        floor: Floor,
        *,
        inputs: Run | None = None,
        truth: Truth | None = None,
        own_floor: Run | None = None,
        work: Format | None = None,
    ) -> None:
        """``inputs``: the run whose inputs anchored the pairs. ``own_floor``: the side that carries
        one, where there is no truth. ``work``: what both sides computed in, where that is not
        their models' dtype."""
        self._reference, self._candidate = reference, candidate
        self._pieces = Pieces(reference, candidate, inputs)
        self._truth = truth
        self.reading = Reading(reference, candidate, truth, self._base_of)
        self.kernel: Kernel = "numpy"
        self.device: torch.device | None = None  # measure there, not by the kernel
        self._routing = Routing(reference, candidate)
        self.judge = Judge(
            reference, candidate, self._pieces, self._routing, floor,
            work or work_format(reference.manifest, candidate.manifest),
            _shared([reference, candidate, *([] if truth is None else [truth.run])]),
            None if own_floor is None else _floor_of(own_floor),
        )  # fmt: skip
        self._notes = reference.manifest.plan.modules
        self._logits_site = reference.manifest.plan.logits_site
        self._cache: dict[_Key, PairNumbers] = {}
        self._lock = threading.Lock()

    def measure(self, pair: Pair, *, threads: int = 1) -> PairNumbers | None:
        """Read and measure; None where the bytes are equal. Safe to call from several threads.

        ``threads``: to measure this pair with. Raises RunFormatError on bad bytes.
        """
        if not self.reading.has_both(pair):
            return self._reduced(pair)
        true_record = None if self._truth is None else self._truth.record(pair)
        is_block = self._is_block(pair)
        if equal_by_record(pair):
            self.reading.check(pair)  # true only if the bytes agree with what was recorded
            numbers = PairNumbers(None, None, None, pair.reference.record.shape)
            if true_record is None:
                return None
        else:
            numbers = self._numbers(pair, is_block, threads)
        if true_record is None or format_named(true_record.dtype).kind != "float":
            return numbers
        return msgspec.structs.replace(numbers, against=self._against(pair, true_record, is_block))

    def measure_small(self, pairs: Sequence[Pair]) -> list[PairNumbers | None]:
        """``measure`` of each, many at a time where their tensors are small and alike."""
        measured: list[PairNumbers | None] = [None] * len(pairs)
        alike: dict[_Key, list[tuple[int, _Operands]]] = {}
        for number, pair in enumerate(pairs):
            operands = self._operands(pair)
            if operands is None:
                measured[number] = self.measure(pair)
            elif operands.truth is None and operands.equal:
                self.reading.check(pair)
            else:
                alike.setdefault(operands.kind, []).append((number, operands))
        for group in alike.values():
            at_once = max(1, NUMEL_AT_ONCE // max(1, group[0][1].reference.numel))
            for first in range(0, len(group), at_once):
                part = group[first : first + at_once]
                results = self._measure_alike([(pairs[number], each) for number, each in part])
                for (number, _), result in zip(part, results, strict=True):
                    measured[number] = result or self.measure(pairs[number])
        return measured

    def _operands(self, pair: Pair) -> _Operands | None:
        """What a pair is measured with; None for one that is not measured beside others."""
        ref, cand = pair.reference.record, pair.candidate.record
        if (
            ref.numel > MOST_NUMEL or ref.shape != cand.shape or ref.positions != cand.positions
            or pair.reference.row is not None or pair.candidate.row is not None
            or self.device is not None or ref.site == self._logits_site
            or not self.reading.has_both(pair)
            or self._pieces.row_mask(pair.reference, ref.shape) is not None
        ):  # fmt: skip
            return None
        truth = None if self._truth is None else self._truth.record(pair)
        if truth is not None:
            assert self._truth is not None
            float_ = all(format_named(r.dtype).kind == "float" for r in (truth, ref))
            routed = self._routing.of(pair, math.prod(ref.shape[:-1]), (self._truth.run, truth))
            if not float_ or truth.shape != ref.shape or (routed and routed.kept is not None):
                return None
        base = self._pieces.base_source(pair) if self._is_block(pair) else None
        return _Operands(ref, cand, base, truth, equal=equal_by_record(pair))

    def _measure_alike(self, pairs: Sequence[tuple[Pair, _Operands]]) -> list[PairNumbers | None]:
        """Pairs of one kind; None for one that must be measured by itself, also where its bytes
        are bad: measuring it says what is wrong."""
        first = pairs[0][1]
        base, truth = None, None
        try:
            a = self._reference.read_many([operands.reference for _, operands in pairs])
            if first.equal:
                b = a
                for pair, _ in pairs:
                    self.reading.check(pair)
            else:
                b = self._candidate.read_many([operands.candidate for _, operands in pairs])
            if first.base is not None:
                bases = [operands.base[1] for _, operands in pairs if operands.base is not None]
                base = first.base[0].read_many(bases)
            if first.truth is not None and self._truth is not None:
                records = [operands.truth for _, operands in pairs if operands.truth is not None]
                truth = self._truth.run.read_many(records)
        except RunFormatError:
            return [None] * len(pairs)
        against: Sequence[AgainstTruth | None] = [None] * len(pairs)
        if truth is not None:
            from divergence.numerics.pairs import against_many

            against = against_many(a, b, truth, base)
        shape = first.reference.shape
        if first.equal:
            return [
                None if errors is None else PairNumbers(None, None, None, shape, against=errors)
                for errors in against
            ]
        return [
            None
            if measured is None or (truth is not None and beside is None)
            else PairNumbers(measured[0], None, measured[1], shape, against=beside)
            for measured, beside in zip(measure_many(a, b, base=base), against, strict=True)
        ]

    def _reduced(self, pair: Pair) -> PairNumbers | None:
        """What can be known without the bytes of both sides."""
        from divergence.comparison.measure.reduced import look_reduced

        is_block = self._is_block(pair)
        base = self._pieces.base_record(pair) if is_block else None
        looked = look_reduced(self._pieces, pair, base=base)
        self.reading.check(pair)
        if looked is None:
            return None
        metrics, rows, estimate, least, shape = looked
        return PairNumbers(metrics, None, rows, shape, estimate=estimate, least=least)

    def _base_of(self, pair: Pair) -> tuple[Run, Record] | None:
        """What a block's output needs beside the pair: its input."""
        return self._pieces.base_source(pair) if self._is_block(pair) else None

    def _is_block(self, pair: Pair) -> bool:
        """Is it a block's output?"""
        site = pair.reference.record.site
        note = self._notes.get(module_of(site))
        return note is not None and note.role == "block" and site.endswith(":out")

    def _against(self, pair: Pair, true_record: Record, is_block: bool) -> AgainstTruth | None:
        """Both sides against the truth, where all three can be laid side by side. Only a block adds
        to what it gets: of a dropout that hands its input on, nothing would be left."""
        from divergence.numerics.pairs import measure_against

        assert self._truth is not None
        pieces, run = self._pieces, self._truth.run
        a = pieces.tensor(self._reference, pair.reference)
        b = pieces.tensor(self._candidate, pair.candidate)
        if is_repeated(pair.reference, pair.candidate):
            a, b = repeated(a, b)
        if not (a.is_floating_point() and a.shape == b.shape):
            return None
        own = pair.reference if true_record.shape == pair.reference.record.shape else pair.candidate
        truth = pieces.rows_of(run.read(true_record), own)
        truth = truth if truth.shape == a.shape else repeated(truth, a)[0]
        base = pieces.base(pair) if is_block and true_record.site.endswith(":out") else None
        if base is not None and base.shape != a.shape:
            base = None
        mask = pieces.row_mask(pair.reference, tuple(a.shape))
        routed = self._routing.of(pair, math.prod(a.shape[:-1]), (run, true_record))
        if routed is not None and routed.kept is not None:
            mask = routed.kept if mask is None else mask & routed.kept
        return measure_against(
            a, b, truth, row_mask=mask, base=base, kernel=self.kernel, device=self.device
        )

    def _numbers(self, pair: Pair, is_block: bool, threads: int) -> PairNumbers:
        ref, cand = pair.reference.record, pair.candidate.record
        base = self._pieces.base(pair) if is_block and ref.site.endswith(":out") else None
        logits = ref.site == self._logits_site
        whole = pair.reference.row is None and pair.candidate.row is None
        # what has no digest (a tensor in parts) cannot be told from another like it
        whole = whole and None not in (ref.xxh3, cand.xxh3)
        key = (
            ref.xxh3, ref.dtype, cand.xxh3, cand.dtype, ref.shape, cand.shape, logits,
            ref.positions, cand.positions, base is not None, ref.step == 0,
        )  # fmt: skip
        known = self._cache.get(key) if whole else None
        if known is not None:
            self.reading.check(pair)  # the same contents may lie at several places
            return known
        a, b = (
            self._pieces.tensor(self._reference, pair.reference),
            self._pieces.tensor(self._candidate, pair.candidate),
        )
        if base is not None and ref.positions is None and cand.positions is not None:
            base = same_positions(base, ref, b, cand)[0]
        a, b = same_positions(a, ref, b, cand)
        if base is not None and base.shape != a.shape:
            base = repeated(base, a)[0]
        mask = self._pieces.row_mask(pair.reference, tuple(a.shape))
        metrics, rows = measure_pair(
            a, b, row_mask=mask, base=base, threads=threads, kernel=self.kernel, device=self.device
        )
        distance = None
        if logits and a.ndim >= 1 and a.numel():
            values = measure_logits(a, b, row_mask=mask)
            if values.num_rows > values.num_skipped:  # else no row was finite enough to measure
                distance = LogitsDiff(
                    **{name: getattr(values, name) for name in LogitsDiff.__struct_fields__}
                )
        numbers = PairNumbers(metrics, distance, rows, tuple(a.shape))
        if whole:
            with self._lock:
                self._cache[key] = numbers
                if len(self._cache) > _REMEMBERED:
                    self._cache.pop(next(iter(self._cache)))
        return numbers


class _Operands:
    """The records that a small pair is measured with. ``kind``: equal for those that can be
    measured together."""

    __slots__ = ("base", "candidate", "equal", "kind", "reference", "truth")

    def __init__(
        self,
        reference: Record,
        candidate: Record,
        base: tuple[Run, Record] | None,
        truth: Record | None,
        *,
        equal: bool,
    ) -> None:
        self.reference, self.candidate = reference, candidate
        self.base, self.truth, self.equal = base, truth, equal
        self.kind: _Key = (
            equal, reference.shape, reference.dtype, candidate.dtype,
            None if base is None else (id(base[0]), base[1].dtype),
            None if truth is None else truth.dtype,
        )  # fmt: skip


def _floor_of(run: Run) -> OwnFloor | None:
    """Loaded where a run carries one alone."""
    from divergence.run.reader import floor_of

    return floor_of(run)


def _shared(runs: Sequence[Run]) -> Callable[[str], float]:
    """By site, the rounding that all of its rows have in common."""
    if all(run.manifest.training.optimizer is None for run in runs):
        return _nothing_shared
    from divergence.comparison.measure.clipping import SharedRounding

    return SharedRounding(runs)


def _nothing_shared(site: str) -> float:
    return 0.0

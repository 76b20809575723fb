"""A run of collectives as recorded, and what each collective must give by its definition."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from divergence.domains.collectives.capturing import ORDER, SECONDS, bus_factor
from divergence.domains.collectives.cases import (
    ADDING,
    COLLECTIVES,
    FLOATS,
    PREFIX,
    ROOT_RANK,
    SIZES,
    CollectiveCase,
    all_cases,
)
from divergence.domains.collectives.result import BandwidthRow
from divergence.errors import RunFormatError
from divergence.numerics.formats import format_of
from divergence.run.ranks import UnshardedRun
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import join_site, module_of, operator_path

# A run of collectives, read case by case: what each rank put in, and what it got.


@dataclass(frozen=True, slots=True)
class MaskedSizes:
    """Says what masks gave: sizes (calls, N) of the whole buffer."""

    case: CollectiveCase
    elements: int
    sizes: np.ndarray


class Recorded:
    """The run, by rank and site. ``num_ranks``: of its mesh. Raises RunFormatError where its
    records cannot be of so many ranks."""

    def __init__(self, run: Run) -> None:
        self.run = run.run if isinstance(run, UnshardedRun) else run
        self.num_ranks = run.manifest.num_ranks
        self.records = {(record.rank, record.site): record for record in self.run.records}
        if not 2 <= self.num_ranks <= max(2, len(self.run.records)):
            raise RunFormatError(
                f"collectives of {self.num_ranks} ranks, and {len(self.run.records)} records",
                where=str(run.path),
                hint="two ranks at least make such a run; capture it again",
            )
        self.run.expect(self.run.records)
        self._calls: dict[str, Record] = {}
        for record in self.run.records:
            if record.call is not None:
                self._calls.setdefault(record.site, record)

    def cases(self) -> Iterator[RecordedCase]:
        by_path = {case.path: case for case in all_cases()}
        for record in self._calls.values():
            case = by_path.get(module_of(record.site))
            assert record.call is not None
            if case is not None and record.call.operator == f"{PREFIX}{case.collective}":
                yield RecordedCase(self, case)

    def find(self, case: CollectiveCase) -> RecordedCase | None:
        recorded_case = RecordedCase(self, case)
        return recorded_case if recorded_case.site in self._calls else None

    def orders(self) -> Iterator[MaskedSizes]:
        """Yield what was measured of the orders, the ranks' parts put together."""
        for site, record in self._calls.items():
            assert record.call is not None
            if record.call.operator != ORDER:
                continue
            facts = record.call.arguments
            parts = [self.read(rank, site) for rank in range(self.num_ranks)]
            rows = [part for part in parts if part is not None and part.ndim == 2]
            elements = facts.get("elements")
            name, dtype, size = (str(facts.get(key)) for key in ("collective", "dtype", "size"))
            is_case = name in ADDING and dtype in FLOATS and size in SIZES
            alike = len({len(part) for part in rows}) == 1 and len(rows[0]) > 0
            if not (is_case and alike and sum(part.shape[1] for part in rows) == elements):
                continue
            sizes = torch.cat(rows, dim=1).to(torch.int64).numpy()
            case = CollectiveCase(
                next(kind for kind in COLLECTIVES if kind == name), dtype, size, "random"
            )
            yield MaskedSizes(case, sizes.shape[1], sizes)

    def bandwidth(self) -> Iterator[BandwidthRow]:
        """Yield how fast each collective was at each size, by the median of its calls."""
        for site, record in self._calls.items():
            assert record.call is not None
            facts = record.call.arguments
            times = self.read(record.rank, site) if record.call.operator == SECONDS else None
            num_bytes, link = facts.get("bytes"), facts.get("link_bytes_per_s")
            if times is None or not isinstance(num_bytes, int) or not times.numel():
                continue
            collective = str(facts.get("collective"))
            seconds = statistics.median(times.double().tolist())
            algbw = num_bytes / max(seconds, 1e-12)
            yield BandwidthRow(
                collective=collective,
                bytes=num_bytes,
                seconds=seconds,
                algbw=algbw,
                busbw=algbw * bus_factor(collective, self.num_ranks),
                link_rate=float(link) if isinstance(link, int | float) else None,
            )

    def read(self, rank: int, site: str) -> torch.Tensor | None:
        record = self.records.get((rank, site))
        return None if record is None else self.run.read(record)

    def implementation(self, path: str) -> str:
        note = self.run.manifest.plan.modules.get(path)
        return "-" if note is None else note.kind


class RecordedCase:
    """One case, its tensors read when asked for."""

    def __init__(self, recorded: Recorded, case: CollectiveCase) -> None:
        self.recorded, self.case, self.num_ranks = recorded, case, recorded.num_ranks
        self.place = operator_path(case.path, f"{PREFIX}{case.collective}", 1)
        self.site, self.site_in = join_site(self.place, "out"), join_site(self.place, "in.x")

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """Return the inputs by rank; of a broadcast the root's alone. Raises RunFormatError for one
        that is not of the case's size and dtype. ``has_inputs``: are they all there?"""
        read = [self.recorded.read(rank, self.site_in) for rank in self._givers]
        parts = [part for part in read if part is not None]
        size = self.case.elements(self.num_ranks)
        for part in parts:
            if tuple(part.shape) != (size,) or part.dtype != getattr(torch, self.case.dtype):
                raise RunFormatError(
                    f"what a rank put in is not {size} elements of {self.case.dtype}",
                    where=f"{self.recorded.run.path}, {self.place}",
                )
        return parts

    @property
    def _givers(self) -> range:
        return range(1 if self.case.collective == "broadcast" else self.num_ranks)

    @property
    def has_inputs(self) -> bool:
        """Are all inputs there? Of a run that was stopped some may be missing."""
        return all((rank, self.site_in) in self.recorded.records for rank in self._givers)

    @cached_property
    def results(self) -> dict[int, torch.Tensor]:
        """Return the results by rank, of those that are there."""
        by_rank = {rank: self.recorded.read(rank, self.site) for rank in self.ranks}
        results = {rank: out for rank, out in by_rank.items() if out is not None}
        for rank, out in results.items():
            if out.ndim != 1 or out.dtype != getattr(torch, self.case.dtype):
                raise RunFormatError(
                    f"what rank {rank} got is no row of {self.case.dtype}",
                    where=f"{self.recorded.run.path}, {self.site}",
                )
        return results

    @property
    def input_digests(self) -> list[str | None]:
        """Return the digests of what each rank put in."""
        ranks = range(self.num_ranks)
        records = (self.recorded.records.get((rank, self.site_in)) for rank in ranks)
        return [None if record is None else record.xxh3 for record in records]

    @property
    def ranks(self) -> range:
        """Return who has a result."""
        return range(1 if self.case.collective == "reduce" else self.num_ranks)

    @cached_property
    def whole(self) -> torch.Tensor | None:
        """The sum as every rank has it, or the ranks' parts together; None where ranks differ."""
        results = self.results
        if len(results) < len(self.ranks):
            return None
        if self.case.collective == "reduce_scatter":
            return torch.cat([results[rank] for rank in self.ranks])
        first = results[0]
        return first if all(torch.equal(first, result) for result in results.values()) else None

    def digests(self, rank: int) -> list[str | None]:
        """Return the digests of a rank's result, and of those of its repetitions."""
        hashes = []
        for number in range(1, self.recorded.run.manifest.repeatability.num_runs + 1):
            port = "out" if number == 1 else f"out.run{number}"
            record = self.recorded.records.get((rank, join_site(self.place, port)))
            if record is None:  # the manifest alone says how many there are
                break
            hashes.append(record.xxh3)
        return hashes

    def repetition(self, rank: int, number: int) -> torch.Tensor | None:
        return self.recorded.read(rank, join_site(self.place, f"out.run{number}"))


# What each rank should hold.


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ over ranks, in two float64 of which the second is what the first lacks. ``bound``: how far
    a sum of n terms may be from it in any order, where every addition is rounded to the dtype:
    γ Σ|x_r|, γ = (n - 1) u / (1 - (n - 1) u) (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., (4.4)), and what the float64 arithmetic here may be off by."""

    high: torch.Tensor
    low: torch.Tensor
    bound: torch.Tensor

    def __len__(self) -> int:
        return len(self.high)

    def __getitem__(self, where: slice) -> Sum:
        return Sum(self.high[where], self.low[where], self.bound[where])

    def error(self, x: torch.Tensor) -> torch.Tensor:
        """x - Σ; nan and inf count as infinitely far."""
        error = (x.double() - self.high) - self.low
        return torch.where(error.isfinite(), error, torch.inf)

    def usage(self, x: torch.Tensor) -> torch.Tensor:
        """|x - Σ| in units of the bound."""
        return self.error(x).abs() / self.bound.clamp_min(5e-324)

    def differs(self, x: torch.Tensor) -> torch.Tensor:
        """Find where ``x`` is farther off than rounding explains."""
        return self.error(x).abs() > self.bound


@dataclass(frozen=True, slots=True)
class Bits:
    """Says what a rank should hold where nothing is added."""

    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, where: slice) -> Bits:
        return Bits(self.values[where])

    def differs(self, x: torch.Tensor) -> torch.Tensor:
        return bits_differ(x, self.values)


def exact_sum(inputs: list[torch.Tensor]) -> Sum:
    """Compensated (Neumaier's summation): the error is below 2^-100 Σ|x_r|."""
    high = torch.zeros(inputs[0].shape, dtype=torch.float64)
    low, size = torch.zeros_like(high), torch.zeros_like(high)
    for term in inputs:
        x = term.double()
        total = high + x
        low += torch.where(high.abs() >= x.abs(), (high - total) + x, (x - total) + high)
        high, size = total, size + x.abs()
    form = format_of(inputs[0].dtype)
    steps = (len(inputs) - 1) * form.unit_roundoff
    bound = steps / (1 - steps) * size if form.kind == "float" else torch.zeros_like(size)
    return Sum(high, low, bound * (1 + 2.0**-40))


def expected_of(case: RecordedCase) -> dict[int, Sum | Bits]:
    """Return what each rank should hold."""
    inputs, n, name = case.inputs, case.num_ranks, case.case.collective
    if case.case.adds:
        whole = exact_sum(inputs)
        each = len(whole) // n if name == "reduce_scatter" else 0
        return {
            rank: whole[rank * each : (rank + 1) * each] if each else whole for rank in case.ranks
        }
    if name == "broadcast":
        return dict.fromkeys(range(n), Bits(inputs[ROOT_RANK]))
    if name == "all_gather":
        return dict.fromkeys(range(n), Bits(torch.cat(inputs)))
    if name == "all_to_all":
        parts = [[sent.chunk(n)[rank] for sent in inputs] for rank in range(n)]
        return {rank: Bits(torch.cat(part)) for rank, part in enumerate(parts)}
    return {rank: Bits(inputs[(rank - 1) % n]) for rank in range(n)}


def bits_differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Element by element; -0 is not 0, and a nan is itself."""
    if x.dtype.is_floating_point:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        x, y = x.contiguous().view(whole), y.contiguous().view(whole)
    return x != y

"""Measuring the pairs: reads both tensors, calls numerics, writes a SiteResult.

Equal checksums are equal tensors: their bytes are checked against them, not measured.
A pair of tensors that occurs at several sites (one block's output is the next one's
input) is measured once. Pads are masked by the samples' token counts, and rows are turned back into
token positions.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.comparison.align.pieces import Pair, Pieces, same_positions
from divergence.comparison.experts import Routes, Routing, kept_rows
from divergence.comparison.measure.floors import Floor, row_floor
from divergence.comparison.measure.pair_format import storage_format, work_format
from divergence.comparison.measure.reading import Reading, equal_by_record
from divergence.comparison.measure.reduced import look_reduced
from divergence.comparison.measure.site_fields import (
    SitePlace,
    identical_site,
    nonfinite_in,
    nonfinite_of,
    shared_fields,
)
from divergence.comparison.measure.truth import SamplesBySite, Truth, truth_diff
from divergence.comparison.results.sites import LogitsDiff, PromptRatio, SiteResult, num_rows
from divergence.numerics.formats import Format, format_named
from divergence.numerics.kernels import Kernel
from divergence.numerics.pairs.against import AgainstTruth, measure_against, with_rounding
from divergence.numerics.pairs.logits import measure_logits
from divergence.numerics.pairs.metrics import Estimate
from divergence.numerics.pairs.pair import PairMetrics, RowMetrics, measure_pair
from divergence.run.reader import Run
from divergence.run.schema.record import Record
from divergence.run.schema.site import module_of

if TYPE_CHECKING:
    import torch

__all__ = ["Measurer", "PairNumbers"]


_REMEMBERED = 256  # recent pairs: an output returns as the next input soon, or not at all


@dataclass(frozen=True, slots=True)
class PairNumbers:
    """What was measured of one pair: metrics, rows for judging, the shape compared. ``estimate``:
    how well, where it was estimated; ``least``: the least relative L2, where nothing else is known.
    """

    metrics: PairMetrics
    logits: LogitsDiff | None
    rows: RowMetrics
    shape: tuple[int, ...]
    against: AgainstTruth | None = None
    estimate: Estimate | None = None
    least: float | None = None


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
        work: Format | None = None,
    ) -> None:
        """``inputs``: the run whose inputs anchored the pairs. ``work``: what both sides
        computed in, where that is not their models' dtype."""
        self._reference, self._candidate = reference, candidate
        self._pieces = Pieces(reference, candidate, inputs)
        self._floor, self._truth = floor, truth
        self.reading = Reading(reference, candidate, truth, self._base_of)
        self.kernel: Kernel = "numpy"
        self.device: torch.device | None = None  # measure there, not by the kernel
        self.truth_samples = SamplesBySite()
        self.routing = Routing(reference, candidate)
        self.routes = Routes()
        self._work = work or work_format(reference.manifest, candidate.manifest)
        self._notes = reference.manifest.plan.modules
        self._logits_site = reference.manifest.plan.logits_site
        self._blocks = sorted(
            (path for path, note in self._notes.items() if note.role == "block"),
            key=len, reverse=True,
        )  # fmt: skip
        self._block_by_path: dict[str, str | None] = {}
        self._cache: dict[tuple[object, ...], PairNumbers] = {}
        self._lock = threading.Lock()
        self._entering: dict[tuple[int, int, str], RowMetrics] = {}
        self._beside: dict[tuple[int, int, str], float] = {}
        self._earlier: dict[tuple[int, str], float] = {}

    def measure(self, pair: Pair, *, threads: int = 1) -> PairNumbers | None:
        """Read and measure; None where the bytes are equal. Safe to call from several threads.

        ``threads``: to measure this pair with. Raises RunFormatError on bad bytes.
        """
        if not self.reading.has_both(pair):
            return self._reduced(pair)
        right = None if self._truth is None else self._truth.record(pair)
        if equal_by_record(pair):
            self.reading.check(
                pair
            )  # equal by what was recorded: true only if the bytes agree with it
            if right is None:
                return None
        is_block = self._is_block(pair)
        found = self._find(pair, is_block, threads)
        if right is None or format_named(right.dtype).kind != "float":
            return found
        return replace(found, against=self._against(pair, right, is_block))

    def _reduced(self, pair: Pair) -> PairNumbers | None:
        """What can be known without the bytes of both sides."""
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

    def _against(self, pair: Pair, right: Record, is_block: bool) -> AgainstTruth | None:
        """Both sides against the truth, where all three can be laid side by side. Only a block adds
        to what it gets: of a dropout that hands its input on, nothing would be left."""
        assert self._truth is not None
        pieces, run = self._pieces, self._truth.run
        a = pieces.tensor(self._reference, pair.reference)
        b = pieces.tensor(self._candidate, pair.candidate)
        if not (a.is_floating_point() and a.shape == b.shape):
            return None
        own = pair.reference if right.shape == pair.reference.record.shape else pair.candidate
        truth = pieces.rows_of(run.read(right), own)
        base = pieces.base(pair) if is_block and right.site.endswith(":out") else None
        if base is not None and base.shape != a.shape:
            base = None
        mask = pieces.row_mask(pair.reference, tuple(a.shape))
        routed = self.routing.of(pair, math.prod(a.shape[:-1]), (run, right))
        if routed is not None and routed.kept is not None:
            mask = routed.kept if mask is None else mask & routed.kept
        return measure_against(
            a, b, truth, row_mask=mask, base=base, kernel=self.kernel, device=self.device
        )

    def result_of(self, pair: Pair, found: PairNumbers | None) -> SiteResult:
        """The pair's SiteResult with its floor, from what ``measure`` found. Call in the order of
        the alignment: in a free pass, what a module inherits was judged before it."""
        one, two = pair.reference.record, pair.candidate.record
        path = module_of(one.site)
        note = self._notes.get(path)
        place: SitePlace = {
            "pass_": pair.pass_,
            "sample": pair.reference.sample,
            "step": two.step,
            "site": one.site,
            "order": one.order,
            "candidate_site": two.site if two.site != one.site else None,
            "match": pair.match,
            "block": self.block_of(path),
            "role": note.role if note else None,
            "kind": note.kind if note else None,
            "reference_dtype": one.dtype,
            "candidate_dtype": two.dtype,
        }
        if found is None or (equal_by_record(pair) and self.reading.has_both(pair)):
            result = self._identical(pair, place)
            return result if found is None else self._with_truth(result, found, pair)
        # a sketch's rows are all that lies behind the first two axes
        rows = found.shape if found.estimate is None else (*found.shape[:2], 1)[: len(found.shape)]
        sample, position = self._pieces.locate(pair.reference, rows, found.metrics.worst_row)
        result = SiteResult(
            **place,
            **shared_fields(found.metrics),
            shape=found.shape,
            identical=found.metrics.identical,
            worst_sample=sample,
            worst_position=position,
            nonfinite=nonfinite_of(found.metrics),
            logits=found.logits,
            estimated=found.estimate,
            at_least=found.least,
        )
        if result.rel_l2 is not None:
            result = self._with_ratios(pair, result, found)
        return self._with_truth(result, found, pair)

    def _with_truth(self, result: SiteResult, found: PairNumbers, pair: Pair) -> SiteResult:
        """How far both sides are from the truth, noted for the statistics over its site too."""
        against = found.against
        if against is None:
            return result
        result = msgspec.structs.replace(result, truth=truth_diff(against))
        floor = self._row_floor(pair, result, against.norm, against.update)
        if floor is not None:
            if self._reference.manifest.model.dtype != self._candidate.manifest.model.dtype:
                against = with_rounding(against, floor)
            self.truth_samples.add(result, against, floor)
        return result

    def _row_floor(
        self, pair: Pair, result: SiteResult, norm: torch.Tensor, update: torch.Tensor | None
    ) -> torch.Tensor | None:
        return row_floor(
            norm.clamp_min(1e-300), update, form=storage_format(pair), work=self._work,
            num_features=result.shape[-1] if result.shape else 1, role=result.role or "inner",
        )  # fmt: skip

    def _identical(self, pair: Pair, place: SitePlace) -> SiteResult:
        record = pair.reference.record
        result = identical_site(record, place)
        more: dict[str, Any] = {"num_rerouted": 0 if self.routing.is_known(pair) else None}
        if result.nonfinite is not None and self._reference.has_bytes(record):
            mask = self._pieces.row_mask(pair.reference, record.shape)
            if mask is not None:  # the statistics count rows of padding, too
                more["nonfinite"] = nonfinite_in(self._reference.read(record), mask)
        if result.ulp_format is not None:
            members = self._pieces.members(pair.reference, result.shape)
            rows = num_rows(result) // max(1, len(members))
            prompts = [PromptRatio(sample=n, ratio=0.0, num_rows=rows) for n in members]
            more |= {"ratio": 0.0, "ratio_max": 0.0, "prompts": prompts}
        return msgspec.structs.replace(result, **more)

    def _with_ratios(self, pair: Pair, result: SiteResult, found: PairNumbers) -> SiteResult:
        """Floor and ratios of the tokens that both sides sent to the same experts, if any
        choose."""
        routed = self.routing.of(pair, len(found.rows.rel_l2))
        rows = found.rows if routed is None else kept_rows(found.rows, routed)
        result = self._with_floor(pair, result, rows)
        if routed is None:
            return result
        more: dict[str, Any] = {"num_rerouted": routed.num_rerouted}
        if result.ratio is not None:
            floor = self._row_floor(pair, result, rows.norm, rows.update_norm)
            self.routes.add(result, routed, None if floor is None else rows.rel_l2 / floor)
        if routed.kept is not None and bool(routed.kept.any()):
            worst = int(rows.rel_l2.nan_to_num(-1.0).argmax())
            place = self._pieces.locate(pair.reference, found.shape, worst)
            more["worst_sample"], more["worst_position"] = place
        return msgspec.structs.replace(result, **more)

    def _with_floor(self, pair: Pair, result: SiteResult, rows: RowMetrics) -> SiteResult:
        """Floor and ratios. In the free pass a block answers only for what it adds."""
        one, two = (format_named(p.record.dtype) for p in (pair.reference, pair.candidate))
        if one.kind != "float" or two.kind != "float":
            return result
        inherited, beside = None, 0.0
        members = [] if result.estimated else self._pieces.members(pair.reference, result.shape)
        if pair.pass_ == "free":
            path, _, port = result.site.partition(":")
            key = (result.sample, result.step, path)
            if port.startswith("in"):
                self._enter(key, port, result, rows)
            else:
                inherited = self._entering.get(key)
                beside = max(
                    self._beside.get(key, 0.0), self._earlier.get((result.sample, path), 0.0)
                )
        found = self._floor.ratios(
            rows,
            form=storage_format(pair),
            work=self._work,
            num_features=result.shape[-1] if result.shape else 1,
            role=result.role or "inner",
            inherited=inherited,
            beside=beside,
            num_members=max(1, len(members)),
        )
        if found is None:
            return result
        return msgspec.structs.replace(
            result,
            floor=found.floor,
            ratio=found.typical,
            ratio_max=found.worst,
            ratio_sink=found.sink,
            prompts=[
                PromptRatio(sample=members[number], ratio=ratio, num_rows=rows)
                for number, ratio, rows in found.members
            ],
        )

    def _enter(
        self, key: tuple[int, int, str], port: str, result: SiteResult, rows: RowMetrics
    ) -> None:
        """Note the error with which a module was entered in the free pass."""
        size = result.token_rel_l2_median or 0.0
        if port == "in":
            self._entering[key] = rows
            earlier = (key[0], key[2])
            self._earlier[earlier] = max(self._earlier.get(earlier, 0.0), size)
        elif "mask" not in port:
            self._beside[key] = max(self._beside.get(key, 0.0), size)

    def block_of(self, path: str) -> str | None:
        """The block that ``path`` is or lies in."""
        if path not in self._block_by_path:
            within = (b for b in self._blocks if path == b or path.startswith(b + "."))
            self._block_by_path[path] = next(within, None)
        return self._block_by_path[path]

    def _find(self, pair: Pair, is_block: bool, threads: int) -> PairNumbers:
        one, two = pair.reference.record, pair.candidate.record
        base = self._pieces.base(pair) if is_block and one.site.endswith(":out") else None
        logits = one.site == self._logits_site
        whole = pair.reference.row is None and pair.candidate.row is None
        # what has no digest (a tensor in parts) cannot be told from another like it
        whole = whole and None not in (one.xxh3, two.xxh3)
        key = (
            one.xxh3, one.dtype, two.xxh3, two.dtype, one.shape, logits, one.positions,
            two.positions, base is not None, one.step == 0,
        )  # fmt: skip
        known = self._cache.get(key) if whole else None
        if known is not None:
            self.reading.check(pair)  # the same contents may lie at several places
            return known
        a, b = (
            self._pieces.tensor(self._reference, pair.reference),
            self._pieces.tensor(self._candidate, pair.candidate),
        )
        if base is not None and one.positions is None and two.positions is not None:
            base = same_positions(base, one, b, two)[0]
        a, b = same_positions(a, one, b, two)
        mask = self._pieces.row_mask(pair.reference, tuple(a.shape))
        metrics, rows = measure_pair(
            a, b, row_mask=mask, base=base, threads=threads, kernel=self.kernel, device=self.device
        )
        found = None
        if logits and a.ndim >= 1 and a.numel():
            values = measure_logits(a, b, row_mask=mask)
            if values.num_rows > values.num_skipped:  # else no row was finite enough to measure
                found = LogitsDiff(
                    **{name: getattr(values, name) for name in LogitsDiff.__struct_fields__}
                )
        result = PairNumbers(metrics, found, rows, tuple(a.shape))
        if whole:
            with self._lock:
                self._cache[key] = result
                if len(self._cache) > _REMEMBERED:
                    self._cache.pop(next(iter(self._cache)))
        return result

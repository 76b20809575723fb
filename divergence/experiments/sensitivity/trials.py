"""Trials: what compare would say of a pair if one block of the candidate were faulty.

In an anchored pass every block gets recorded input, so a fault at a block's output changes
that block's recorded output and nothing else of the pass. A trial therefore changes those
tensors as a plant would, measures their pairs again, and gives all the rest as it was measured
before to the very same judge. The model does not run.

Left as they are: the free pass (a real fault changes it from there on; where there is an
anchored pass the onset does not rest on it) and what repeats the last block's output outside
the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from divergence.analyses.blocks.find import find as find_in_blocks
from divergence.comparison.align.pieces import Pair
from divergence.comparison.analysis import Measured, applying
from divergence.comparison.decide import decide
from divergence.comparison.measure.floors import ModelFloor
from divergence.comparison.measure.measurer import Measurer
from divergence.comparison.measure.runs import compare_escalated
from divergence.comparison.measure.truth import inputs_of
from divergence.comparison.results import SiteResult, Verdict
from divergence.experiments.sensitivity.faults import SizedFault
from divergence.facts import Fact, fact, worded
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.recording.plant import FORWARDS
from divergence.run.manifest import digest_tensor
from divergence.run.reader import Run
from divergence.run.record import Coordinates, Record
from divergence.run.site import module_of

if TYPE_CHECKING:
    import torch

__all__ = ["Overlay", "SensitivityTrials", "sees"]


class Overlay(Run):
    """``base`` with other tensors at some of its records. ``records`` lists the changed ones
    alone; ``find`` and ``read`` know all."""

    def __init__(self, base: Run, changed: Iterable[tuple[Record, torch.Tensor]]) -> None:
        self._base = base
        self._changed: dict[Coordinates, torch.Tensor] = {}
        records = []
        for record, tensor in changed:
            assert tuple(tensor.shape) == record.shape, record.site
            records.append(msgspec.structs.replace(record, xxh3=digest_tensor(tensor)))
            self._changed[record.coordinates] = tensor
        super().__init__(base.path, base.manifest, records)

    def find(self, coordinates: Coordinates) -> Record | None:
        """The record at (pass, sample, step, site): the changed one where there is one."""
        return super().find(coordinates) or self._base.find(coordinates)

    def read(self, record: Record, *, verify: bool = True) -> torch.Tensor:
        """The record's tensor as it is here."""
        tensor = self._changed.get(record.coordinates)
        return self._base.read(record, verify=verify) if tensor is None else tensor


_SEEN = ("localized", "nonfinite")


def sees(verdict: Verdict, block: str) -> bool:
    """The verdict names this block and no other."""
    onset = verdict.onset
    return verdict.kind in _SEEN and onset is not None and onset.block == block


class SensitivityTrials:
    """Judges a measured pair again and again, with one block's output changed."""

    def __init__(self, measured: Measured, *, thresholds: Thresholds = THRESHOLDS) -> None:
        self.measured, self._thresholds = measured, thresholds
        self._unchanged = [
            finding
            for analysis in applying(measured, ("tokens", "ends"))
            if analysis.find is not None
            for finding in analysis.find(measured).findings
        ]
        self._a, self._b = measured.reference, measured.candidate
        self._inputs = inputs_of(self._a, self._b) or self._a
        notes = self._a.manifest.plan.modules
        self._pairs: dict[str, list[Pair]] = {}
        for pair in measured.alignment.pairs:
            path, _, port = pair.reference.record.site.partition(":")
            note = notes.get(module_of(pair.reference.record.site))
            if pair.pass_ == "anchored" and port == "out" and note and note.role == "block":
                self._pairs.setdefault(module_of(path), []).append(pair)
        self.escalated = any(_of_candidate(site) for site in measured.sites)
        self.num_trials = 0
        self._channels: dict[str, int] = {}

    @property
    def blocks(self) -> list[str]:
        """Every block whose output was compared in the anchored pass, in execution order."""
        return list(self._pairs)

    def unfit(self, block: str, fault: SizedFault) -> Fact | None:
        """Why ``fault`` cannot be planted at ``block``, or None."""
        if fault.spelled is not None:
            return None
        if all(self._entering(pair.candidate.record) is not None for pair in self._pairs[block]):
            return None
        return fact("experiments.no_input")

    def num_features(self, block: str) -> int:
        """Length of the last axis of the block's output."""
        return self._pairs[block][0].candidate.record.shape[-1]

    def judge(
        self, block: str, fault: SizedFault, size: float, *, escalated: bool = False
    ) -> Verdict:
        """The verdict with this fault. ``escalated``: planted in and judged with the escalated
        pass too; else that pass is left out."""
        self.num_trials += 1
        measured = self.measured
        pairs = self._pairs[block]
        site = pairs[0].reference.record.site
        records = {pair.candidate.record.coordinates: pair.candidate.record for pair in pairs}
        overlay = Overlay(self._b, self._changed(block, fault, size, records.values(), escalated))
        measurer = Measurer(
            self._a,
            overlay,
            ModelFloor(self._thresholds),
            inputs=inputs_of(self._a, overlay),
            truth=measured.truth,
            own_floor=self._a if measured.floor is measured.reference else None,
        )
        changed = [_with_record(pair, overlay) for pair in pairs]
        sites = [s for s in measured.sites if s.pass_ == "free" or (
            s.pass_ == "anchored" and s.site != site)]  # fmt: skip
        sites += _measure(measurer, changed)
        if escalated:
            again = compare_escalated(
                self._a, overlay, measured.truth, self._thresholds, _measure, None,
                sides=("candidate",),
            )  # fmt: skip
            theirs = {result.site for result in again}
            sites += again
            sites += [
                s for s in measured.sites
                if s.pass_ == "escalated" and not (_of_candidate(s) and s.site in theirs)
            ]  # fmt: skip
        known = measured.truth_samples
        truth_samples = known and known.with_changed(measurer.judge.truth_samples)
        return self.verdict_of(replace(measured, sites=sites, truth_samples=truth_samples))

    def verdict_of(self, measured: Measured) -> Verdict:
        """What the blocks, the ends and the tokens say together. The ends and the tokens are those
        of the pair as it is: no trial changes them."""
        findings = [*find_in_blocks(measured).findings, *self._unchanged]
        return worded(decide(findings, measured.preflight).verdict)

    def _changed(
        self, block: str, fault: SizedFault, size: float, records: Iterable[Record], escalated: bool
    ) -> Iterator[tuple[Record, torch.Tensor]]:
        """Each changed record with its faulty tensor."""
        channel = self.channel(block)
        for anchored in records:
            variants: list[Record | None] = [anchored]
            if escalated:
                variants.append(
                    self._b.find(("escalated", anchored.sample, anchored.step, anchored.site))
                )
            for record in filter(None, variants):
                tensor = fault.apply(
                    self._b.read(record),
                    size,
                    site=record.site,
                    entering=None if fault.spelled is not None else self._entering(record),
                    channel=channel,
                    # the number that capture gives a forward, so that noise is the same
                    forward=record.sample * FORWARDS + record.step,
                )
                yield record, tensor

    def _entering(self, record: Record) -> torch.Tensor | None:
        """The anchored input of a block, where it is like its output."""
        site = module_of(record.site) + ":in"
        entering = self._inputs.find(("free", record.sample, record.step, site))
        if (
            entering is None
            or entering.shape != record.shape
            or entering.positions != record.positions
        ):
            return None
        tensor = self._inputs.read(entering)
        return tensor if tensor.is_floating_point() else None

    def channel(self, block: str) -> int:
        """The channel of middling size: neither a massive activation nor a dead one."""
        if block not in self._channels:
            record = self._pairs[block][0].candidate.record
            tensor = self._b.read(record)
            rms = tensor.double().reshape(-1, tensor.shape[-1]).square().mean(0)
            self._channels[block] = int(rms.argsort()[len(rms) // 2])
        return self._channels[block]


def _measure(measurer: Measurer, pairs: list[Pair], _progress: None = None) -> list[SiteResult]:
    """One after the other: they are few, and already in memory."""
    return measurer.judge.results(pairs, [measurer.measure(pair) for pair in pairs])


def _with_record(pair: Pair, overlay: Overlay) -> Pair:
    record = overlay.find(pair.candidate.record.coordinates)
    assert record is not None
    candidate = msgspec.structs.replace(pair.candidate, record=record)
    return msgspec.structs.replace(pair, candidate=candidate)


def _of_candidate(site: SiteResult) -> bool:
    return site.pass_ == "escalated" and site.of in (None, "candidate")

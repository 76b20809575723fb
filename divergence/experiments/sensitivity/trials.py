"""Faults planted into measured pairs, and the smallest size of each that is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from divergence.comparison.result import Report
from divergence.comparison.results import SiteResult, Verdict
from divergence.errors import UsageError
from divergence.experiments.localization.repetition import check_substituted, why_not_bits
from divergence.experiments.result import Confirmation, FaultSize
from divergence.facts import Fact, fact, sentence, worded
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.recording.plant import FORWARDS, parse_plant
from divergence.run.overlay import Overlay
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import did_you_mean, module_of
from divergence.run.trust import recorded_attention
from divergence.words import Progress

if TYPE_CHECKING:
    import torch


# Faults that have a size, from too small to be seen to gross.
#
# Each is a plant (recording.plant) at a block's output with its argument made of the
# size s, save ``update-scale``: what a block adds to the residual stream, out - in, becomes
# (1 + s)(out - in), as a wrong constant inside its attention or its MLP makes it. That one has no
# plant: a plant sees the output alone.
#
# There is no zeroed head here: a head lies inside a block, whose recorded output does not tell it
# apart. Plant that one for real: capture --plant 'BLOCK.self_attn.o_proj:in=zero:FIRST-LAST'.

UPDATE_SCALE = "update-scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFault:
    """``unit``: what the size is a share of. ``phrase``: the code of the fault of one size.
    ``spelled(size, channel, num_features)``: its plant, where it has one. ``high``: the largest
    size that is tried; ``in_features``: it comes in whole features."""

    name: str
    unit: Fact
    phrase: str
    spelled: Callable[[float, int, int], str] | None
    high: float = 1.0
    in_features: bool = False

    def rounded(self, size: float, num_features: int) -> float:
        """The size that is planted where ``size`` is asked for: whole features, or as it is."""
        if not self.in_features:
            return size
        return max(1, round(size * num_features)) / num_features

    def apply(
        self,
        tensor: torch.Tensor,
        size: float,
        *,
        site: str,
        entering: torch.Tensor | None,
        channel: int,
        forward: int,
    ) -> torch.Tensor:
        """The faulty tensor, a new one. ``entering``: the block's input, of the same shape."""
        if self.spelled is not None:
            fault = self.spelled(size, channel, tensor.shape[-1])
            return parse_plant(f"{site}={fault}").apply(tensor, forward)
        assert entering is not None
        before = entering.double()
        # float64: only the result is rounded, and that to where it is stored
        return (before + (1 + size) * (tensor.double() - before)).to(tensor.dtype)


def _zero(size: float, channel: int, num_features: int) -> str:
    return f"zero:0-{max(1, round(size * num_features)) - 1}"


FAULTS = {
    fault.name: fault
    for fault in (
        SizedFault(
            name="scale",
            unit=fact("experiments.unit_of_output"),
            phrase="experiments.fault_scale",
            spelled=lambda size, _, __: f"scale:{1 + size!r}",
        ),
        SizedFault(
            name=UPDATE_SCALE,
            unit=fact("experiments.unit_of_update"),
            phrase="experiments.fault_update",
            spelled=None,
        ),
        SizedFault(
            name="noise",
            unit=fact("experiments.unit_of_rms"),
            phrase="experiments.fault_noise",
            spelled=lambda size, _, __: f"noise:{size!r}",
        ),
        SizedFault(
            name="bias",
            unit=fact("experiments.unit_of_rms"),
            phrase="experiments.fault_bias",
            spelled=lambda size, _, __: f"bias:{size!r}",
        ),
        SizedFault(
            name="channel",
            unit=fact("experiments.unit_of_channel"),
            phrase="experiments.fault_channel",
            spelled=lambda size, channel, _: f"channel:{channel}:{1 + size!r}",
            high=100.0,
        ),
        SizedFault(
            name="zero",
            unit=fact("experiments.unit_of_features"),
            phrase="experiments.fault_zero",
            spelled=_zero,
            in_features=True,
        ),
    )
}
"""Every fault by its name."""

DEFAULT_FAULTS = ("scale", UPDATE_SCALE, "noise", "bias", "channel")


def faults_named(names: Sequence[str]) -> list[SizedFault]:
    """The faults asked for, once each. Raises UsageError with what there is."""
    faults: dict[str, SizedFault] = {}
    for name in names:
        if name not in FAULTS:
            raise UsageError(
                f"no fault of growing size is called {name!r}",
                where="--faults",
                hint=did_you_mean(name, FAULTS, count=1, then=f"one of {', '.join(FAULTS)}"),
            )
        faults[name] = FAULTS[name]
    if not faults:
        raise UsageError("no fault to plant", where="--faults", hint=f"some of {', '.join(FAULTS)}")
    return list(faults.values())


# Trials: what compare would say of a pair if one block of the candidate were faulty.
#
# In an anchored pass every block gets recorded input, so a fault at a block's output changes
# that block's recorded output and nothing else of the pass. A trial therefore changes those
# tensors as a plant would, measures their pairs again, and gives all the rest as it was measured
# before to the very same judge. The model does not run.
#
# Left as they are: the free pass (a real fault changes it from there on; where there is an
# anchored pass the onset does not rest on it) and what repeats the last block's output outside
# the blocks.


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
            again, samples = compare_escalated(
                self._a, overlay, measured.truth, self._thresholds, _measure, None
            )
            theirs = {(result.of, result.site) for result in again}
            sites += again
            sites += [
                s for s in measured.sites
                if s.pass_ == "escalated" and (s.of, s.site) not in theirs
            ]  # fmt: skip
            measurer.judge.truth_samples.take(samples)
        known = measured.truth_samples
        truth_samples = known and known.with_changed(measurer.judge.truth_samples)
        # the tensors of the pairs are those without the fault, and show nothing of its structure
        alignment = replace(measured.alignment, pairs=[])
        return self.verdict_of(
            replace(measured, sites=sites, truth_samples=truth_samples, alignment=alignment)
        )

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


# The smallest size of each fault that is seen: searched by bisection, confirmed by real plants.
#
# The grid of sizes is logarithmic and has eight points to a doubling, so a size is found to 9 %.
# What is seen need not grow with the size (rounding of a format, a question that one size answers
# and a larger one does not), so twice and four times the found size must be seen as well; where
# they are not, the search goes on above them.
#
# A trial changes recorded tensors; a real plant changes the running model. Where the model is at
# hand, each fault is captured twice for one block: 1.3 times the found size must be seen there by
# the ordinary compare, and 0.7 times must not. Where nothing was planted that capture must repeat
# the candidate: on another machine it would confirm what that machine sees.

LOWEST = 1e-8
"""The smallest size tried: a tenth of the rounding of float32."""
PER_DOUBLING = 8
_DOUBLINGS_ABOVE = (1, 2)


def smallest_seen(
    seen: Callable[[float], bool], *, high: float, low: float = LOWEST, guess: float | None = None
) -> float | None:
    """The smallest size in [low, high] from which on it is seen, at the found size, twice and
    four times that (as far as they are below ``high``). None where ``high`` itself is not seen.

    ``guess``: where to begin, for example what was found elsewhere; saves trials.
    """
    top = math.ceil(math.log2(high / low) * PER_DOUBLING)
    known: dict[int, bool] = {}

    def size(place: int) -> float:
        return min(low * math.pow(2.0, place / PER_DOUBLING), high)

    def at(place: int) -> bool:
        if place not in known:
            known[place] = seen(size(place))
        return known[place]

    if not at(top):
        return None
    below, above = -1, top  # not seen (nothing is tried there), seen
    if guess is not None:
        below, above = _around(at, round(math.log2(guess / low) * PER_DOUBLING), top)
    while True:
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if at(middle) else (middle, above)
        missed = [
            above + n * PER_DOUBLING
            for n in _DOUBLINGS_ABOVE
            if above + n * PER_DOUBLING <= top and not at(above + n * PER_DOUBLING)
        ]
        if not missed:
            return size(above)
        below, above = max(missed), top


def _around(at: Callable[[int], bool], guess: int, top: int) -> tuple[int, int]:
    """(not seen, seen) near a guess, in strides that double."""
    place, stride = min(max(guess, 0), top), 2
    if at(place):
        while place - stride >= 0 and at(place - stride):
            place, stride = place - stride, 2 * stride
        return max(place - stride, -1), place
    while place + stride < top and not at(place + stride):
        place, stride = place + stride, 2 * stride
    return place, min(place + stride, top)


def search_sizes(
    trials: SensitivityTrials,
    blocks: list[str],
    faults: list[SizedFault],
    progress: Progress | None,
) -> list[FaultSize]:
    """Every fault at every block; a neighbour's size is where the next search begins."""
    sizes: list[FaultSize] = []
    for number, fault in enumerate(faults):
        guesses: dict[bool, float | None] = {}
        for place, block in enumerate(blocks):
            if progress is not None:
                done = number * len(blocks) + place
                progress("plant", done, len(faults) * len(blocks), f"{fault.name} in {block}")
            sizes.append(_search(trials, block, fault, guesses))
    return sizes


def _search(
    trials: SensitivityTrials, block: str, fault: SizedFault, guesses: dict[bool, float | None]
) -> FaultSize:
    reason = trials.unfit(block, fault)
    if reason is not None:
        return FaultSize(block=block, fault=fault.name, size=None, tried=0.0, why=reason)
    num_features = trials.num_features(block)
    by_pass: dict[bool, tuple[float | None, list[Fact]]] = {False: (None, []), True: (None, [])}
    for escalated in (False, True)[: 1 + trials.escalated]:
        why: dict[float, list[Fact]] = {}

        def seen(
            size: float, escalated: bool = escalated, why: dict[float, list[Fact]] = why
        ) -> bool:
            verdict = trials.judge(block, fault, size, escalated=escalated)
            here = sees(verdict, block)
            seen_as = fact("experiments.verdict", kind=verdict.kind, what=verdict.headline)
            why[size] = verdict.evidence[:1] if here else [seen_as]
            return here

        size = smallest_seen(
            seen,
            high=fault.high,
            low=1 / num_features if fault.in_features else LOWEST,
            guess=guesses.get(escalated),
        )
        if size is None:
            by_pass[escalated] = None, why[fault.high]
            continue
        guesses[escalated] = size
        by_pass[escalated] = fault.rounded(size, num_features), why[size]
    return FaultSize(
        block=block,
        fault=fault.name,
        size=by_pass[False][0],
        tried=fault.high,
        evidence=by_pass[False][1],
        escalated_size=by_pass[True][0],
        escalated_evidence=by_pass[True][1],
    )


_AROUND = ((1.3, True), (0.7, False))


def confirm_sizes(
    a: Run,
    b: Run,
    trials: SensitivityTrials,
    sizes: Sequence[FaultSize],
    *,
    block: str,
    capturing: Callable[..., Run],
    comparing: Callable[..., Report],
) -> list[Confirmation]:
    """Two captures a fault that has a plant and was seen at ``block``, with the candidate's dtype
    and attention; faults that come in whole features are left out. ``capturing`` repeats ``a``
    with other options, ``comparing`` judges as the trials did."""
    confirmations: list[Confirmation] = []
    own = b.manifest.model
    for entry in sizes:
        fault = FAULTS[entry.fault]
        if entry.block != block or entry.size is None or fault.spelled is None or fault.in_features:
            continue
        for factor, expected in _AROUND:
            size = entry.size * factor
            spelled = fault.spelled(size, trials.channel(block), trials.num_features(block))
            plant = f"{block}:out={spelled}"
            faulty = capturing(
                dtype=None if own.dtype == a.manifest.model.dtype else own.dtype,
                attn_implementation=recorded_attention(b.manifest),
                plants=[plant],
            )
            try:
                _check(faulty, b, block)
                report = comparing(a, faulty)
            finally:
                faulty.close()
            verdict = report.verdict
            confirmations.append(
                Confirmation(
                    block=block,
                    fault=fault.name,
                    plant=plant,
                    size=size,
                    expected=expected,
                    seen=sees(verdict, block),
                    verdict=verdict.kind,
                    summary=verdict.summary,
                )
            )
    return confirmations


def _check(faulty: Run, b: Run, block: str) -> None:
    """Raises UsageError where this machine does not repeat ``b`` at what the plant leaves alone."""
    name = sentence(fact("experiments.planted_run"))
    repetition = check_substituted(faulty, b, site=f"{block}:out", block=block, name=name)
    if repetition.how == "differs" and why_not_bits(b.manifest, faulty.manifest) is None:
        raise UsageError(
            f"this is not the machine of {b.path}: {repetition.site} differs where nothing was "
            "planted, so a plant here confirms nothing",
            where=f"{repetition.num_different} of {repetition.num_compared} shared tensors differ",
            hint="run it on that machine, or without --candidate, or without --confirm",
        )

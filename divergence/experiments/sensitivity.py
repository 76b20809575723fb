"""sensitivity(): how small a fault this set-up would see, measured by planting some.

The set-up is a run, a healthy candidate like it, and what else compare is given: a truth,
trusted runs, thresholds. At chosen blocks faults of several kinds are planted in what the
candidate recorded, smaller and smaller, and each
time the judge of compare is asked. So the answer is about the whole way from numbers to
verdict, the limits included, and not about a formula for them.

What it does not say: how large a real fault is at a block's output (a wrong constant in one
attention head may be small there), or what a fault outside the blocks would look like.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from divergence._version import __version__
from divergence.analyses.blocks.find import find as find_in_blocks
from divergence.comparison.advice import Advice, beside, other_prompts
from divergence.comparison.align import Pair, opened
from divergence.comparison.analysis import Measured, applying
from divergence.comparison.api import compare, measure_runs
from divergence.comparison.decide import decide
from divergence.comparison.measure.pairs import Measurer, Measuring, compare_escalated, measure_all
from divergence.comparison.measure.rating import PairNumbers
from divergence.comparison.measure.truth import inputs_of
from divergence.comparison.preflight import preflight
from divergence.comparison.result import Report, Verdict, summary_of
from divergence.errors import IncomparableError, UsageError
from divergence.experiments.localization.repetition import check_substituted, why_not_bits
from divergence.experiments.result import Confirmation, FaultSize, Sensitivity
from divergence.facts import Fact, fact, sentence, template_of, worded
from divergence.numerics.floor import THRESHOLDS, Thresholds, spread
from divergence.numerics.formats import format_named
from divergence.recording.api import make_run
from divergence.recording.passes import why_no_anchor
from divergence.recording.plant import FORWARDS, parse_plant
from divergence.run.command import Command, command, command_line
from divergence.run.reader import Overlay, Run, own_truth
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


FAULTS = {
    name: SizedFault(
        name=name,
        unit=fact(f"experiments.unit_of_{unit}"),
        phrase=f"experiments.fault_{phrase}",
        spelled=spelled,
        high=100.0 if name == "channel" else 1.0,
        in_features=name == "zero",
    )
    for name, unit, phrase, spelled in (
        ("scale", "output", "scale", lambda size, _, __: f"scale:{1 + size!r}"),
        (UPDATE_SCALE, "update", "update", None),
        ("noise", "rms", "noise", lambda size, _, __: f"noise:{size!r}"),
        ("bias", "rms", "bias", lambda size, _, __: f"bias:{size!r}"),
        ("channel", "channel", "channel", lambda size, at, _: f"channel:{at}:{1 + size!r}"),
        (
            "zero",
            "features",
            "zero",
            lambda size, _, width: f"zero:0-{max(1, round(size * width)) - 1}",
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
        self.escalated = any(
            site.pass_ == "escalated" and site.of in (None, "candidate") for site in measured.sites
        )
        self.num_trials = 0
        self._channels: dict[str, int] = {}

    @property
    def blocks(self) -> list[str]:
        """Every block whose output was compared in the anchored pass, in execution order."""
        return list(self._pairs)

    def unfit(self, block: str, fault: SizedFault) -> Fact | None:
        """Say why ``fault`` cannot be planted at ``block``, or None."""
        if fault.spelled is not None:
            return None
        if all(self._entering(pair.candidate.record) is not None for pair in self._pairs[block]):
            return None
        return fact("experiments.no_input")

    def num_features(self, block: str) -> int:
        """Length of the last axis of the block's output."""
        return self._pairs[block][0].candidate.record.shape[-1]

    def verdict_with(
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
            self._thresholds,
            inputs=inputs_of(self._a, overlay),
            truth=measured.truth,
            own_floor=self._a if measured.floor is measured.reference else None,
        )
        changed = []
        for pair in pairs:
            record = overlay.find(pair.candidate.record.coordinates)
            assert record is not None
            piece = msgspec.structs.replace(pair.candidate, record=record)
            changed.append(msgspec.structs.replace(pair, candidate=piece))
        sites = [
            s
            for s in measured.sites
            if s.pass_ == "free" or (s.pass_ == "anchored" and s.site != site)
        ]
        sites += measure_all(measurer, changed, _ONE_BY_ONE)
        if escalated:
            again, samples = compare_escalated(
                self._a, overlay, measured.truth, self._thresholds, _ONE_BY_ONE
            )
            redone = {(result.of, result.site) for result in again}
            sites += again
            sites += [
                s for s in measured.sites if s.pass_ == "escalated" and (s.of, s.site) not in redone
            ]
            measurer.rater.samples.take(samples)
        samples = measured.samples.with_changed(measurer.rater.samples)
        # the tensors of the pairs are those without the fault, and show nothing of its structure
        alignment = replace(measured.alignment, pairs=[])
        return self.verdict_of(replace(measured, sites=sites, samples=samples, alignment=alignment))

    def verdict_of(self, measured: Measured) -> Verdict:
        """Return what the blocks, the ends and the tokens say together. The ends and the tokens are
        those of the pair as it is: no trial changes them."""
        findings = [*find_in_blocks(measured).findings, *self._unchanged]
        return worded(decide(findings, measured.preflight).verdict)

    def _changed(
        self, block: str, fault: SizedFault, size: float, records: Iterable[Record], escalated: bool
    ) -> Iterator[tuple[Record, torch.Tensor]]:
        """Each changed record with its faulty tensor."""
        channel = self.channel(block)
        for anchored in records:
            _, sample, step, site = anchored.coordinates
            again = self._b.find(("escalated", sample, step, site)) if escalated else None
            for record in filter(None, (anchored, again)):
                entering = None if fault.spelled is not None else self._entering(record)
                tensor = fault.apply(
                    self._b.read(record),
                    size,
                    site=site,
                    entering=entering,
                    channel=channel,
                    # the number that capture gives a forward, so that noise is the same
                    forward=sample * FORWARDS + step,
                )
                yield record, tensor

    def _entering(self, record: Record) -> torch.Tensor | None:
        """The anchored input of a block, where it is like its output."""
        site = module_of(record.site) + ":in"
        entering = self._inputs.find(("free", record.sample, record.step, site))
        alike = (record.shape, record.positions)
        if entering is None or (entering.shape, entering.positions) != alike:
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


def _one_by_one(
    measurer: Measurer, pairs: Sequence[Pair], _progress: None = None
) -> Generator[PairNumbers | None]:
    """Measures pairs one after the other: they are few, and already in memory."""
    for pair in pairs:
        yield measurer.measure(pair)


_ONE_BY_ONE = Measuring(measure=_one_by_one)


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
    outcomes: dict[int, bool] = {}

    def size(place: int) -> float:
        return min(low * math.pow(2.0, place / PER_DOUBLING), high)

    def at(place: int) -> bool:
        if place not in outcomes:
            outcomes[place] = seen(size(place))
        return outcomes[place]

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
            reason = trials.unfit(block, fault)
            if reason is not None:
                unfit = FaultSize(block=block, fault=fault.name, size=None, tried=0.0, why=reason)
                sizes.append(unfit)
                continue
            own = _search(trials, block, fault, False, guesses)
            again = _search(trials, block, fault, True, guesses) if trials.escalated else (None, [])
            sizes.append(
                FaultSize(
                    block=block,
                    fault=fault.name,
                    size=own[0],
                    tried=fault.high,
                    evidence=own[1],
                    escalated_size=again[0],
                    escalated_evidence=again[1],
                )
            )
    return sizes


def _search(
    trials: SensitivityTrials,
    block: str,
    fault: SizedFault,
    escalated: bool,
    guesses: dict[bool, float | None],
) -> tuple[float | None, list[Fact]]:
    """(the smallest size that is seen, if one is; its evidence, or what is said instead)."""
    num_features = trials.num_features(block)
    why: dict[float, list[Fact]] = {}

    def seen(size: float) -> bool:
        verdict = trials.verdict_with(block, fault, size, escalated=escalated)
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
        return None, why[fault.high]
    guesses[escalated] = size
    return fault.rounded(size, num_features), why[size]


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
                # does this machine repeat ``b`` at what the plant leaves alone?
                name = sentence(fact("experiments.planted_run"))
                site = f"{block}:out"
                repetition = check_substituted(faulty, b, site=site, block=block, name=name)
                eager = why_not_bits(b.manifest, faulty.manifest) is not None
                if repetition.how == "differs" and not eager:
                    raise UsageError(
                        f"this is not the machine of {b.path}: {repetition.site} differs where "
                        "nothing was planted, so a plant here confirms nothing",
                        where=f"{repetition.num_different} of {repetition.num_compared} shared "
                        "tensors differ",
                        hint="run it on that machine, or without --candidate, or without --confirm",
                    )
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


# The answer: the pair measured, the blocks chosen, the sizes searched.

DEFAULT_BLOCKS = ("first", "middle", "last")
_HEALTHY = ("identical", "within_floor")


def sensitivity(
    run: str | Path | Run,
    *,
    candidate: str | Path | Run | None = None,
    truth: str | Path | Run | None = None,
    floor: Sequence[str | Path | Run] = (),
    blocks: Sequence[str] = DEFAULT_BLOCKS,
    faults: Sequence[str] = DEFAULT_FAULTS,
    thresholds: Thresholds = THRESHOLDS,
    confirm: bool = False,
    model: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Sensitivity:
    """The smallest fault of each kind that compare would localize, block by block.

    ``candidate``: a healthy run captured like ``run``; no model is needed then. Without one it
    is captured here for the while, by other attention kernels where the model has some.
    ``truth``, ``floor``, ``thresholds``: as in ``compare``. ``blocks``: first, middle, last, all,
    numbers from 0 in execution order, or module paths. ``faults``: see ``FAULTS``.
    ``confirm``: plant the found sizes for real as well, in one block: two captures a fault.

    Raises UsageError for a pair that cannot be planted in (no block outputs, no anchored pass)
    or is not healthy before anything is planted, IncomparableError for other weights or
    tokens, and what ``capture`` and ``compare`` raise.
    """
    a = opened(run)
    chosen = faults_named(faults)
    _chosen_blocks(_blocks_with_outputs(a), blocks)  # before anything is captured
    with contextlib.ExitStack() as stack:
        folder = Path()
        if candidate is None or confirm:
            temporary = tempfile.TemporaryDirectory(prefix="divergence-sensitivity-")
            folder = Path(stack.enter_context(temporary))
        notes: list[Fact] = []
        capturing = partial(
            make_run,
            model,
            like=a,
            device=device,
            trust_remote_code=trust_remote_code,
            force=True,
            progress=progress,
        )
        given: dict[str, Any] = {"truth": truth, "floor": floor, "thresholds": thresholds}
        if candidate is None:
            has_truth = truth is not None or own_truth(a) is not None
            b, kernels = _made_here(a, capturing, folder / "candidate", escalate=has_truth)
            stack.callback(b.close)
            notes.append(kernels)
        else:
            b = opened(candidate)
        trials, verdict = _healthy(a, b, given, progress)
        measured = trials.measured
        where = _chosen_blocks(trials.blocks, blocks)
        sizes = search_sizes(trials, where, chosen, progress)
        confirmations = []
        if confirm:
            confirmations = confirm_sizes(
                a,
                b,
                trials,
                sizes,
                block=where[len(where) // 2],
                capturing=partial(capturing, out=folder / "planted"),
                comparing=partial(compare, progress=progress, **given),
            )
            left = {fault.name for fault in chosen} - {
                confirmation.fault for confirmation in confirmations
            }
            if left:
                notes.append(fact("experiments.not_planted", faults=sorted(left)))
        if verdict.kind == "identical":
            notes.append(fact("experiments.sides_equal"))
        carried = sentence(fact("experiments.own_truth"))
        result = Sensitivity(
            tool_version=__version__,
            reference=summary_of(a),
            candidate=summary_of(b),
            made_here=candidate is None,
            truth=None if measured.truth is None else str(measured.truth.path or carried),
            num_floor_runs=len(floor),
            dtype=a.manifest.model.dtype,
            escalated=trials.escalated,
            verdict=verdict,
            num_blocks=len(trials.blocks),
            num_prompt_tokens=sum(len(s.prompt_ids) for s in a.manifest.tokens.samples),
            num_trials=trials.num_trials,
            blocks=where,
            units={fault.name: sentence(fault.unit) for fault in chosen},
            phrases={fault.name: template_of(fault.phrase) for fault in chosen},
            sizes=sizes,
            confirmations=confirmations,
            remarks=[*notes, *measured.notes],
            commands=deeper(measured, made_here=candidate is None, escalated=trials.escalated),
        )
        return worded(result)


def _blocks_with_outputs(run: Run) -> list[str]:
    """The blocks whose output the run holds. Raises UsageError where no trial could be made."""
    plan = run.manifest.plan
    outputs = {record.site for record in run.records if record.pass_ == "free"}
    blocks = [path for path, note in plan.modules.items() if note.role == "block"]
    blocks = [path for path in blocks if f"{path}:out" in outputs]
    if not blocks:
        raise UsageError(
            f"{run.path} holds no block outputs, so no fault can be planted in them",
            where=f"its sites: {', '.join(plan.sites)}",
            hint=command_line("capture", like=run.path, o=f"{run.path}-blocks", sites="blocks"),
        )
    if plan.plants:
        raise UsageError(
            f"{run.path} carries planted faults itself ({', '.join(plan.plants)})",
            hint="give a healthy run",
        )
    return blocks


def _made_here(
    a: Run, capturing: Callable[..., Run], out: Path, *, escalate: bool
) -> tuple[Run, Fact]:
    """A candidate for the while, and what it is."""
    reason = why_no_anchor(a, a.manifest.plan.modules)
    if reason is not None:
        raise UsageError(f"{a.path} cannot anchor a candidate: {reason}")
    recorded = a.manifest.model.attn_implementation or "eager"
    other = "sdpa" if recorded == "eager" else "eager"
    narrow = format_named(a.manifest.model.dtype).itemsize <= 2
    label = sentence(fact("experiments.label_of_candidate"))
    made = partial(capturing, out=out, escalate=escalate and narrow, label=label)
    try:
        run = made(attn_implementation=other)
    except UsageError:  # the model has no such kernels; anything else is met again below
        run = made()
        return run, fact("experiments.same_kernels")
    return run, fact("experiments.other_kernels", attention=other)


def _healthy(
    a: Run, b: Run, given: dict[str, Any], progress: Progress | None
) -> tuple[SensitivityTrials, Verdict]:
    """The pair measured and judged as it is. ``given``: what ``compare`` is given beside the runs.
    Raises UsageError where it is no pair to plant in."""
    lines = preflight(a, b)
    blocking = [line.check for line in lines if line.status == "blocking"]
    if blocking:
        raise IncomparableError(
            f"not the same experiment: other {' and '.join(blocking)}",
            where=f"{a.path} and {b.path}",
            hint=command_line("capture", like=a.path, o="CANDIDATE"),
        )
    measured = measure_runs(a, b, lines, **given, measuring=Measuring(progress=progress))
    trials = SensitivityTrials(measured, thresholds=given["thresholds"])
    if not trials.blocks:
        reason = why_no_anchor(a, a.manifest.plan.modules)
        if reason is not None:
            raise UsageError(f"{a.path} cannot anchor a candidate: {reason}")
        raise UsageError(
            f"{b.path} has no anchored pass to {a.path}: a fault in one block would show in all "
            "that follow it",
            hint=command_line("capture", like=a.path, o="CANDIDATE"),
        )
    verdict = trials.verdict_of(measured)
    if verdict.kind not in _HEALTHY:
        truth = None if measured.truth is None else measured.truth.path
        again = command_line(
            "compare",
            a.path,
            b.path,
            truth=truth,
            floor=[run.path if isinstance(run, Run) else run for run in given["floor"]],
        )
        raise UsageError(
            "the pair is not healthy before anything is planted: "
            f"{verdict.kind}: {verdict.summary}",
            where=f"{a.path} and {b.path}",
            hint=f"{again} says more; then give a healthy --candidate",
        )
    return trials, verdict


def _chosen_blocks(blocks: list[str], wanted: Sequence[str]) -> list[str]:
    """Blocks by word, number or module path, in execution order. Raises UsageError."""
    places: set[int] = set()
    words = {"first": 0, "middle": len(blocks) // 2, "last": len(blocks) - 1}
    for word in wanted:
        if word == "all":
            places |= set(range(len(blocks)))
        elif word in words:
            places.add(words[word])
        elif word in blocks:
            places.add(blocks.index(word))
        elif word.isdecimal() and int(word) < len(blocks):
            places.add(int(word))
        else:
            raise UsageError(
                f"no block {word!r} among the {len(blocks)} of the run",
                where="--blocks",
                hint=did_you_mean(
                    word,
                    [*words, "all", *blocks],
                    count=1,
                    then=f"first, middle, last, all, numbers from 0 to {len(blocks) - 1}, or a "
                    f"module path such as {blocks[0]}",
                ),
            )
    if not places:
        raise UsageError("no block to plant in", where="--blocks", hint="first, middle, last, all")
    return [blocks[place] for place in sorted(places)]


def deeper(measured: Measured, *, made_here: bool, escalated: bool) -> list[Command]:
    """Commands, the one that gains most first: an escalated pass for a 16-bit dtype, a truth,
    and more tokens where so few are judged that chance widens the limits."""
    a, b = measured.reference, measured.candidate
    advice = Advice(a, b)
    commands: list[Command] = []
    truth_there, narrow = measured.truth, measured.narrow
    here, there = str(a.path), str(b.path)
    truth = beside(here, "-truth") if truth_there is None else truth_there.path
    candidate = None if made_here else there
    if narrow and not escalated and not made_here:
        candidate = beside(there, "-escalated")
        commands.append(advice.escalate("candidate")[0])
    if truth_there is None:
        commands.append(advice.truth()[0])
    if commands:
        also = fact("experiments.and_escalated") if narrow and made_here else ""
        commands.append(command("sensitivity", here, candidate=candidate, truth=truth, note=also))
    num_tokens = sum(len(sample.prompt_ids) for sample in a.manifest.tokens.samples)
    if spread(num_tokens) > 1:
        note = fact("experiments.more_prompts", num_tokens=num_tokens)
        commands.append(other_prompts(a.manifest, beside(here, "-more"), note))
    return commands

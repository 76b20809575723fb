"""Both sides held against a truth: errors of each, and which is farther."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from divergence.comparison.align import Pair, PromptStep, replayed_from
from divergence.comparison.constants import FEW_ROWS, SHARP_TIMES
from divergence.comparison.judge import made_of
from divergence.comparison.preflight import other_code, other_weights
from divergence.comparison.result import SiteResult, TruthDiff
from divergence.errors import IncomparableError, UsageError
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.floor import ENOUGH, floor_weights
from divergence.numerics.formats import format_named
from divergence.run.command import command_line
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import is_norm, is_operator_site, module_of
from divergence.words import SIDES, Side, grouped

if TYPE_CHECKING:
    from divergence.numerics.pairs import AgainstTruth

    _Forwards = Sequence[tuple[SiteResult, AgainstTruth, np.ndarray]]
    """Each with its rows' floor (T,)."""


# The truth: a float64 run that tells which side of a comparison is farther from what is right.
#
# It must repeat the run whose inputs anchor the comparison: only then did every block of
# all three runs get the same input. Operators that were replayed are judged by a replay in
# float64 of the same run and pass, and by nothing else. TruthSamples gather, site by site and phase
# by phase, how far each side is from it: blocks.units judges them.


class Truth:
    """A truth run, checked to belong to the comparison of ``reference`` and ``candidate``.

    Raises UsageError where it is no truth or another run's, IncomparableError for other weights and
    for other code, where both manifests tell it.
    """

    def __init__(self, run: Run, reference: Run, candidate: Run) -> None:
        self.run = run
        manifest, a, b = run.manifest, reference.manifest, candidate.manifest
        replayed = replayed_from(a, b)
        make = command_line("truth", reference.path, o="TRUTH")
        if replayed is not None:
            source = next(
                (side.path for side in (reference, candidate) if side.manifest.id == replayed[0]),
                "RUN",
            )
            make = command_line("replay", source, o="TRUTH", truth=True)
        if manifest.settings.compute_dtype != "float64":
            raise UsageError(
                f"{run.path} is no truth: it was computed in "
                f"{manifest.settings.compute_dtype or manifest.model.dtype}",
                hint=make,
            )
        if manifest.id in (a.id, b.id):
            raise UsageError(
                f"{run.path} is one of the two runs that are compared: it cannot judge itself",
                hint="divergence compare A B --truth TRUTH, with two other runs",
            )
        if manifest.like not in (a.id, b.id, a.plan.anchored_to, b.plan.anchored_to):
            raise UsageError(f"{run.path} is the truth of another run ({manifest.like})", hint=make)
        repeated = a if manifest.like != b.id else b
        if other_weights(repeated, manifest):
            raise IncomparableError(
                "the truth was computed with other weights than the run it repeats",
                where=f"{run.path} ({manifest.model.digest[:12]}, "
                f"there {repeated.model.digest[:12]})",
                hint="divergence truth RUN -o TRUTH --model PATH, with the run's own weights",
            )
        made_otherwise = other_code(repeated, manifest)
        if made_otherwise:
            raise IncomparableError(
                "the truth was made by other code than the run it repeats: "
                + ", ".join(made_otherwise[:5]),
                where=str(run.path),
                hint=f"on the machine that made {repeated.id}: divergence truth RUN -o TRUTH",
            )
        self.path = None if run.path in (reference.path, candidate.path) else run.path
        """What names it in a command; None for what a run carries, which needs no name."""
        self._named_by_candidate = manifest.like == b.id
        self.anchored_pass = "anchored"
        run_of_inputs = inputs_of(reference, candidate)
        inputs = a.plan.anchored_to if a.plan.anchored_to == b.plan.anchored_to else None
        if run_of_inputs is not None:
            inputs = run_of_inputs.manifest.id
        self.anchors = inputs is not None and inputs == manifest.plan.anchored_to
        own = (manifest.plan.anchored_to, manifest.plan.replayed_pass)
        if manifest.plan.replayed_pass is not None or replayed is not None:
            self.anchored_pass, self.anchors = "replayed", own == replayed
        if replayed is not None and not self.anchors:
            raise UsageError(
                f"{run.path} is no truth of replayed operators: it did not run each by itself"
                if manifest.plan.replayed_pass is None
                else f"{run.path} holds the operators of the {own[1]} pass, not of the "
                f"{replayed[1]} pass",
                hint=make,
            )

    def record(self, pair: Pair) -> Record | None:
        """Return what is right at a pair's place; None where the truth does not hold it."""
        pass_ = "free" if pair.pass_ == "free" else self.anchored_pass
        if pass_ != "free" and not self.anchors:
            return None
        own = pair.candidate.record if self._named_by_candidate else pair.reference.record
        record = self.run.find((pass_, own.sample, own.step, own.site))
        if record is None or record.shape != own.shape or record.positions != own.positions:
            return None
        return record


def inputs_of(reference: Run, candidate: Run) -> Run | None:
    """The run whose recorded inputs anchored the pairs, where it is one of the two."""
    a, b = reference.manifest, candidate.manifest
    if b.plan.anchored_to == a.id:
        return reference
    return candidate if a.plan.anchored_to == b.id else None


_NO_CHANNELS = np.zeros((6, 0))  # a slice of the channels would keep them all


class ChannelSums:
    """Over the forwards of a site, column by column: what ``AgainstTruth.channels`` (6, D) of each
    come to. Those of all forwards would take 48 D bytes each."""

    def __init__(self) -> None:
        self.is_mixed = False
        """Do the forwards differ in D? Then the sums are of some of them."""
        self.num_alone = 0
        """Forwards of one row."""
        self.sums: np.ndarray | None = None
        """(10, D): the sums over all forwards, six; of the forwards of FEW_ROWS rows or more the
        sums of the largest row, two; of the forwards of one row the largest, two."""

    def add(self, against: AgainstTruth) -> None:
        """One more forward."""
        channels = against.channels
        if not against.num_rows:
            return
        if self.sums is None:
            self.sums = np.zeros((10, channels.shape[1]))
        elif self.sums.shape[1] != channels.shape[1]:
            self.is_mixed = True
            return
        self.sums[:6] += channels
        if against.num_rows >= FEW_ROWS:
            self.sums[6:8] += channels[4:]
        elif against.num_rows == 1:
            self.num_alone += 1
            np.maximum(self.sums[8:], channels[:2], out=self.sums[8:])


@dataclass
class TruthSamples:
    """One site in one pass and phase: ``forwards`` in order, without their channels but with each
    row's floor (T,)."""

    forwards: list[tuple[SiteResult, AgainstTruth, np.ndarray]] = field(default_factory=list)
    channels: ChannelSums = field(default_factory=ChannelSums)

    def add(self, result: SiteResult, against: AgainstTruth, floor: np.ndarray) -> None:
        """Adds one forward. ``floor`` (T,): of each row."""
        self.channels.add(against)
        rows = msgspec.structs.replace(against, channels=_NO_CHANNELS)
        self.forwards.append((result, rows, floor))

    @functools.cached_property
    def stats(self) -> TruthStats | None:
        """How the site stands to the truth; asked for when all forwards were added."""
        return stats_of(self)


class SamplesBySite:
    """Says what was gathered by (pass, site, phase): the samples against a truth, and the ratio of
    every row of the two sides' difference."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, str], TruthSamples] = {}
        self._ratios: dict[tuple[str, str, str], list[np.ndarray]] = {}

    def add(self, result: SiteResult, against: AgainstTruth, floor: np.ndarray) -> None:
        key = result.pass_, result.site, result.phase
        if key not in self._samples:
            self._samples[key] = TruthSamples()
        self._samples[key].add(result, against, floor)

    def add_ratios(self, result: SiteResult, ratios: np.ndarray) -> None:
        """Adds the ratios of all rows of one forward."""
        key = result.pass_, result.site, result.phase
        self._ratios.setdefault(key, []).append(ratios)

    def find(self, pass_: str, site: str, phase: str) -> TruthSamples | None:
        return self._samples.get((pass_, site, phase))

    def ratios(self, pass_: str, site: str, phase: str) -> np.ndarray:
        return np.concatenate(self._ratios.get((pass_, site, phase), [np.zeros(0)]))

    def take(self, other: SamplesBySite) -> None:
        """Takes over those of ``other``, which are of another pass."""
        self._samples |= other._samples
        for key, ratios in other._ratios.items():
            self._ratios.setdefault(key, []).extend(ratios)

    def with_changed(self, changed: SamplesBySite) -> SamplesBySite:
        """These, with those that ``changed`` holds in place of one's own."""
        both = SamplesBySite()
        both._samples = self._samples | changed._samples
        both._ratios = self._ratios | changed._ratios
        return both


# TruthStats: how one site stands to the truth, over all rows of a phase and forward by forward.
#
# Each side's errors are in floors of the rounding model. blocks.units asks questions of them.


@dataclass(frozen=True, slots=True)
class ForwardStats:
    """One forward of one prompt. ``num_values``: of how many independent numbers its error is made:
    rounding is relative, so of a row as many as its participation ratio (ΣR²)²/ΣR⁴ says, not as
    many as it has columns."""

    result: SiteResult
    num_values: int
    alike: tuple[bool, bool] = (True, True)
    """Where one side's error is not measured: is it certain that it is about as large as the
    other's, if it is not larger, in the typical row and in the one that differs most?"""


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The errors of all rows of one site and phase (R,), for the judge (comparison.judge)."""

    key: np.ndarray
    """The same for the same row of every site: sample, step and number in one integer."""
    place: np.ndarray
    """Index of its forward in ``places``."""
    places: list[PromptStep]
    energy: np.ndarray
    """(2, R): each side's squared error, in floors²."""
    numbers: np.ndarray
    """(2, R): of how many numbers that is made."""
    sink: np.ndarray
    least: np.ndarray | None = None
    """(R,) of the two sides' difference: floors that are added to both errors, so that two tiny
    ones make no large ratio. Of a truth the family tells it."""

    def only(self, keys: np.ndarray) -> RowErrors:
        """The rows of ``keys``, which all are here, in that order."""
        if np.array_equal(keys, self.key):
            return self
        order = np.argsort(self.key)
        rows = order[np.searchsorted(self.key, keys, sorter=order)]
        return replace(
            self,
            key=keys,
            place=self.place[rows],
            energy=self.energy[:, rows],
            numbers=self.numbers[:, rows],
            sink=self.sink[rows],
            least=None if self.least is None else self.least[rows],
        )


@dataclass(frozen=True, slots=True)
class ChannelErrors:
    """The errors of each channel of one site and phase. ``energy`` (2, D): each side's squared
    error over ``num_rows``; ``least`` (D,): within which two errors are alike; ``total``: ΣR² of
    all of them; ``values`` (D,): ΣR² of each."""

    energy: np.ndarray
    least: np.ndarray
    num_rows: int
    total: float
    values: np.ndarray


@dataclass(slots=True)
class TruthStats:
    """Says how one site stands to the truth, all rows of a phase together, and forward by forward.

    ``typical``: each side's median row error in floor units of the rounding model; ``gains``:
    each side's mean scale error over the stream and over the update, the standard error of their
    difference, and the part of that which all rows may share, in units of the typical error.
    """

    typical: dict[Side, float]
    num_values: int = 0
    num_rows: int = 0
    floor: float = 0.0
    """Of the median row, relative to it."""
    hardest: float = 0.0
    """What the hardest row is off by on both sides, in floors; 0 where no row is hard."""
    channels: ChannelErrors | None = None
    gains: list[tuple[float, float, float, float]] = field(default_factory=list)
    gains_at: dict[PromptStep, list[tuple[float, float, float, float]]] = field(
        default_factory=dict
    )
    """The same of each forward, where there are several."""
    first: SiteResult | None = None
    forwards: dict[PromptStep, ForwardStats] = field(default_factory=dict)
    rows: RowErrors | None = None
    in_units: TruthStats | None = None
    """Of the forwards that few channels hold: the rows in each channel's own unit, no scales."""

    @property
    def is_difference(self) -> bool:
        """Is it of the two sides' difference, the rounding model in the place of the reference?"""
        return self.rows is not None and self.rows.least is not None


def stats_of(samples: TruthSamples) -> TruthStats | None:
    """Statistics of the samples of one site and phase. None where no row is left."""
    forwards = [entry for entry in samples.forwards if entry[1].num_rows]
    if not forwards:
        return None
    rows = _Rows(forwards)
    first = forwards[0][0]
    last = first.shape[-1] if first.shape else 1
    if first.estimated is not None:
        last = first.estimated.num_projections
    stats = TruthStats(
        num_values=ENOUGH if is_norm(first.site) else len(rows.norm) * last,
        num_rows=int(rows.usual.sum()),
        typical={side: _median(rows.errors[side][rows.usual]) for side in SIDES},
        floor=_median(rows.floor),
        first=min((entry[0] for entry in forwards), key=lambda r: (r.sample, r.step, r.order)),
    )
    stats.channels = _channel_errors(samples.channels, rows)
    with np.errstate(over="ignore"):
        energy = np.stack([np.square(rows.errors[side]) for side in SIDES])
        between = np.square(rows.between)
    of_columns = np.stack([rows.numbers[side] for side in SIDES])
    of_sides, hardest = made_of(energy, between, of_columns, rows.usual)
    stats.hardest = math.sqrt(hardest)
    with np.errstate(all="ignore"):  # of errors of 0 nothing is known
        share = np.clip(np.nan_to_num(of_sides / of_columns, nan=1.0), 0.0, 1.0).min(axis=0)
    # each forward of each prompt by itself, and where its rows belong
    keys: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    places: dict[PromptStep, int] = {}
    spread = np.maximum(rows.spread * share, 1.0)
    for number, (result, against, _) in enumerate(forwards):
        rows_of_forward = slice(int(rows.start[number]), int(rows.start[number + 1]))
        usual, in_place = rows.usual[rows_of_forward], np.zeros(against.num_rows, np.int64)
        for sample, members in _prompts(result, against):
            place = sample, result.step
            in_place[slice(None) if members is None else members] = places.setdefault(
                place, len(places)
            )
            of_prompt = np.ones_like(usual) if members is None else members
            # of a few unlike rows the median is one row: no more certain than that one is
            kept = usual & of_prompt if (usual & of_prompt).any() else of_prompt
            total = int(kept.sum()) * _median(spread[rows_of_forward][kept])
            among = np.zeros(len(rows.norm), bool)
            among[rows_of_forward] = of_prompt
            stats.forwards[place] = ForwardStats(result, max(1, round(total)), rows.alike(among))
        numbers.append(in_place)
        keys.append(
            (np.int64(result.sample) << 44) + (np.int64(result.step) << 24) + against.row_index
        )
    if is_norm(first.site):  # one number, of many
        of_sides = np.full_like(of_sides, ENOUGH)
    stats.rows = RowErrors(
        np.concatenate(keys), np.concatenate(numbers), list(places), energy, of_sides, rows.sink
    )
    in_units = TruthSamples()
    for result, against, floor in forwards:
        if against.in_units is not None:
            in_units.add(result, against.in_units, floor)
    if in_units.forwards and (again := stats_of(in_units)) is not None:
        stats.in_units = replace(again, gains=[])
    _gains(stats, rows)
    return stats


class _Rows:
    """All rows of a site's forwards, one after the other, (R,). ``errors``: each side's, in
    floors, ``between``: the sides'; ``usual``: those that are no sinks; ``forward``: the number of
    the forward."""

    def __init__(self, forwards: _Forwards) -> None:
        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(against, name) for _, against, _ in forwards])

        counts = [against.num_rows for _, against, _ in forwards]
        self.start = np.concatenate([[0], np.cumsum(counts)])
        self.forward = np.repeat(np.arange(len(forwards)), counts)
        self.norm, self.sink, self.spread = joined("norm"), joined("sink"), joined("spread")
        self.floor = np.concatenate([floor for _, _, floor in forwards])
        self.sides = {side: joined(side) for side in SIDES}
        self.numbers = {side: joined(f"spread_{side}") for side in SIDES}
        self.errors = {
            side: errors / np.maximum(self.norm, 1e-300) / self.floor
            for side, errors in self.sides.items()
        }
        self.usual = ~self.sink if not self.sink.all() else self.sink
        self.gains: dict[str, dict[Side, np.ndarray]] = {
            "gain": {s: joined(f"gain_{s}") for s in SIDES}
        }
        self.update: np.ndarray | None = None
        if all(against.update is not None for _, against, _ in forwards):
            self.update = joined("update")
            self.gains["update_gain"] = {side: joined(f"update_gain_{side}") for side in SIDES}
        self._alike = joined("alike")
        self.between = joined("between") / np.maximum(self.norm, 1e-300) / self.floor

    def alike(self, among: np.ndarray) -> tuple[bool, bool]:
        """(most rows ``among`` all, the one of them with the largest difference for its floor):
        are both sides' errors alike? Where both are measured they are what they are."""
        if self._alike.all() or not among.any():
            return True, True
        worst = int(np.where(among, self.between, -math.inf).argmax())
        return 2 * int(self._alike[among].sum()) > int(among.sum()), bool(self._alike[worst])


def _median(values: np.ndarray) -> float:
    """The lower one."""
    return float(np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2])


def _prompts(result: SiteResult, against: AgainstTruth) -> list[tuple[int, np.ndarray | None]]:
    """Lists (prompt, its rows): all rows, None, are one prompt's unless the forward held several,
    whose rows then follow each other in equal parts."""
    if len(result.prompts) < 2:
        return [(result.prompts[0].sample if result.prompts else result.sample, None)]
    rows_each = math.prod(result.shape[1:-1])
    by_prompt: list[tuple[int, np.ndarray | None]] = []
    for number, prompt in enumerate(result.prompts):
        members = against.row_index // rows_each == number
        if members.any():
            by_prompt.append((prompt.sample, members))
    return by_prompt


def _channel_errors(channels: ChannelSums, rows: _Rows) -> ChannelErrors | None:
    """The errors of each channel; None where nothing is to be told of one.

    Of each forward the channel's largest row is left out, of forwards of one row the largest: one
    bad token is no bad channel, and prompts that begin alike have the same bad token. Two errors
    are alike within the mean channel's, or the typical row error's share by size where that is
    more, of the side where it is less: rounding goes with the values, and a massive activation
    holds nearly all of its row's error."""
    if channels.is_mixed:
        return None  # attention weights: their last axis is the tokens seen so far
    assert channels.sums is not None
    sums, largest, alone = channels.sums[:6], channels.sums[6:8], channels.sums[8:]
    count = int((~rows.sink).sum())
    if count < FEW_ROWS or sums.shape[1] < 2 or not sums[:2].any():
        return None
    if channels.num_alone >= FEW_ROWS:
        largest = largest + alone
    least = []
    for number, side in enumerate(SIDES):
        # of a row that should be zero the error is without bound: then the mean channel is held to
        errors = _median((rows.sides[side] / np.maximum(rows.norm, 1e-300))[~rows.sink])
        with np.errstate(all="ignore"):
            share = np.nan_to_num(np.square(np.float64(errors)) * sums[3])
        least.append(np.maximum(share, sums[number].mean()))
    return ChannelErrors(
        energy=np.maximum(sums[:2] - largest, 0.0),
        least=np.sqrt(np.maximum(np.minimum(*least), 1e-300)),
        num_rows=count,
        total=float(sums[3].sum()),
        values=sums[3],
    )


def _gains(stats: TruthStats, rows: _Rows) -> None:
    """Over all rows, and over those of each forward that has enough of them."""
    if stats.num_rows < FEW_ROWS:
        return
    scales = {}
    for name in rows.gains:
        scale = rows.floor
        if name == "update_gain" and rows.update is not None:
            scale = scale * (rows.norm / np.maximum(rows.update, 1e-300))
        scales[name] = scale / np.sqrt(np.maximum(rows.spread, 1.0))

    def over(chosen: np.ndarray) -> list[tuple[float, float, float, float]]:
        statistics = []
        for name, gains in rows.gains.items():
            reference, candidate = (gains[side][chosen] for side in SIDES)
            error = float((candidate - reference).std(ddof=1)) / math.sqrt(len(reference))
            # all tokens may round a dominant channel the same way
            common = _median(scales[name][chosen])
            statistics.append((float(reference.mean()), float(candidate.mean()), error, common))
        return statistics

    stats.gains = over(rows.usual)
    assert stats.rows is not None
    if len(stats.rows.places) > 1:
        for number, place in enumerate(stats.rows.places):
            chosen = rows.usual & (stats.rows.place == number)
            if chosen.sum() >= FEW_ROWS:
                stats.gains_at[place] = over(chosen)


def truth_diffs(
    judged: Sequence[AgainstTruth | None], *, estimated: Side | None = None
) -> list[TruthDiff | None]:
    """The figures of each forward: r = err(a, b) / err(a, R) and W = err(b, R) / err(a, R).
    ``estimated``: the side whose error is not measured (comparison.measure.rating)."""
    by_number: dict[int, TruthDiff] = {}
    numbered = [(n, errs) for n, errs in enumerate(judged) if errs is not None and errs.num_rows]
    kinds = grouped(numbered, lambda item: (item[1].num_rows, item[1].channels.shape[1]))
    for alike in kinds.values():

        def joined(name: str, alike: Sequence[tuple[int, AgainstTruth]] = alike) -> np.ndarray:
            """(N, …): sooner than np.stack, which looks at each array by itself."""
            together: np.ndarray = np.concatenate([getattr(errs, name) for _, errs in alike])
            return together.reshape(len(alike), -1)

        sink = joined("sink")
        usual = np.where(sink.all(axis=1, keepdims=True), sink, ~sink)
        norm = np.maximum(joined("norm"), 1e-300)
        counts = usual.sum(axis=1)
        rank = np.maximum(1, np.rint(0.99 * counts)).astype(np.int64)
        # each of the reference, the candidate, and between them
        middle, p99, top = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for name in ("reference", "candidate", "between"):
            rows = joined(name) / norm
            ordered = np.sort(np.where(usual, rows, math.nan), axis=1)
            middle.append(medians(rows, usual))
            p99.append(np.take_along_axis(ordered, rank[:, None] - 1, 1)[:, 0])
            top.append(np.take_along_axis(ordered, counts[:, None] - 1, 1)[:, 0])
        channel = np.sqrt(joined("peaks")).T
        both = (middle, p99, top, channel)
        columns = [
            *middle[:2],
            *(_over(errors[2], errors[0], both_zero=0.0) for errors in both),
            *(_over(errors[1], errors[0], both_zero=1.0) for errors in both),
            *(
                np.where(usual, joined(name), 0.0).sum(axis=1) / counts
                for name in ("gain_reference", "gain_candidate")
            ),
        ]
        figures = zip(*(column.tolist() for column in columns), strict=True)
        for (number, _), values in zip(alike, figures, strict=True):
            named = dict(zip(TruthDiff.__struct_fields__, values, strict=False))
            by_number[number] = TruthDiff(**named, estimated=estimated)
    return [by_number.get(number) for number in range(len(judged))]


def _over(top: np.ndarray, bottom: np.ndarray, *, both_zero: float) -> np.ndarray:
    """x/0 = inf. 0/0 = 1 for W (both are right), 0 for r (they are equal)."""
    with np.errstate(all="ignore"):
        of_zero = np.where(top == 0, both_zero, math.inf)
        return np.where(bottom > 0, top / bottom, of_zero)


def medians(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """The (lower) median of each row's kept values, (N, T) → (N,); nan where none is kept, or one
    is nan."""
    if not values.shape[1]:
        return np.full(len(values), math.nan)
    ordered = np.sort(np.where(keep, values, math.nan), axis=1)  # nan comes last
    middle = np.maximum(keep.sum(axis=1) - 1, 0) // 2
    middles = np.take_along_axis(ordered, middle[:, None], 1)[:, 0]
    middles[(keep & np.isnan(values)).any(axis=1)] = math.nan
    return middles


# Whose truth is it? A truth belongs to the code and the weights of the reference.
#
# A float64 run repeats what the code says, so one that was made by faulty code has the fault, and
# blames the side that lacks it. Two things tell whose it is: the digests of the code, where
# manifests hold them (``preflight.other_code``), and the values.
#
# Two float64 runs of one code agree wherever both hold the same site, pass, sample and step. Sums
# may be added in another order on another machine, so up to ``SHARP_TIMES`` times the rounding
# model of numerics.floor in float64 is allowed (its inputs are equal only where each block is given
# them, so anchored passes alone are held against each other). ``SHARP_TIMES``: attention turns a
# relative error of its scores into |s| times as much of its probabilities, and trained models reach
# |s| of 10 and more; 64 allows for some. That is near 1e-13 in small models and 1e-12 in large
# ones, five orders below what float32 rounds. Largest measured between kernel sets of one CPU:
# 1.4e-15.
#
# What it cannot tell: code that is the same on both machines and wrong.


def truths_apart(a: Run, b: Run, *, inside: str | None = None) -> tuple[int, Fact | None]:
    """Hold two float64 runs that are anchored to the same run against each other, ``inside`` one
    block where one is named: (at how many sites and forwards, the first where they differ)."""
    if a.manifest.plan.anchored_to != b.manifest.plan.anchored_to:
        return 0, None
    num_compared, apart = 0, None
    within = ("",) if inside is None else (f"{inside}.", f"{inside}:", f"{inside}#")
    for record in sorted(a.records, key=lambda r: (r.sample, r.step, r.order)):
        if record.pass_ != "anchored" or is_operator_site(record.site):
            continue
        other = b.find(record.coordinates) if record.site.startswith(within) else None
        if other is None or other.positions != record.positions:
            continue
        num_compared += 1
        if apart is None:
            limit = SHARP_TIMES * typical_floor(a.manifest, record, dtype="float64")
            distance = _distance(a, record, b, other)
            if distance > limit:
                apart = fact(
                    "preflight.truths_apart",
                    site=record.site,
                    sample=record.sample,
                    step=record.step,
                    rel_l2=distance,
                    limit=limit,
                )
    return num_compared, apart


def _distance(a: Run, record: Record, b: Run, other: Record) -> float:
    """Relative L2 over what is no pad; 0 where nothing can be said, and infinity where what does
    not round differs, or nan and inf stand at other places."""
    if record.xxh3 is not None and record.xxh3 == other.xxh3:
        return 0.0
    if record.shape != other.shape or record.dtype != other.dtype:
        return math.inf
    if not (a.has_bytes(record) and b.has_bytes(other)):
        return 0.0
    x, y = (
        without_pads(a.manifest, record, wide(run.array(own)))
        for run, own in ((a, record), (b, other))
    )
    if x is None or y is None:
        return 0.0
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(y)):
        return math.inf
    gap, norm = (float(np.linalg.norm(part[finite])) for part in (x - y, x))
    if not gap or not norm or format_named(record.dtype).kind != "float":
        return math.inf if gap else 0.0
    return gap / norm


def without_pads(manifest: Manifest, record: Record, array: np.ndarray) -> np.ndarray | None:
    """The array with the rows of pads set to 0: what stands there is no result (a row that sees
    no key has one value in one kernel and another in the next). None where a batch has pads and
    its axes are not (B, T, ...): which of its rows are pads is not known."""
    pads = None if record.step else manifest.tokens.pads(record.sample)
    if pads is None:
        return array
    if array.shape[:2] != pads.shape:
        return None
    return np.where(pads.reshape(*pads.shape, *[1] * (array.ndim - 2)), 0.0, array)


def typical_floor(manifest: Manifest, record: Record, *, dtype: str | None = None) -> float:
    """Return how far two correct results of one code are typically apart at a site, by the rounding
    model of its format, or of ``dtype`` (relative L2); 0 for what does not round."""
    note = manifest.plan.modules.get(module_of(record.site))
    features = record.shape[-1] if record.shape else 1
    form = format_named(dtype or record.dtype)
    in_block = note is None or note.role != "trunk"
    return math.hypot(*floor_weights(form, num_features=features, in_block=in_block))

"""Rating measured pairs: the floor of each by the rounding model, ratios of many at a time, and a
SiteResult of each.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from divergence.comparison.align import Pair, Piece, Pieces
from divergence.comparison.constants import SMALL_BY_CHANCE_TIMES
from divergence.comparison.experts import Routed, Routes, Routing
from divergence.comparison.measure.truth import SamplesBySite, medians, truth_diffs
from divergence.comparison.result import (
    LogitsDiff,
    NonfiniteCount,
    PromptRatio,
    SiteResult,
    TruthDiff,
)
from divergence.numerics.floor import (
    ACCUMULATOR_ROUNDOFF,
    THRESHOLDS,
    Thresholds,
    floor_weights,
    norm_floor,
)
from divergence.numerics.formats import Format, format_named
from divergence.numerics.pairs import (
    EQUAL,
    NO_ULP,
    AgainstTruth,
    PairMetrics,
    RowMetrics,
    measure_pair,
    with_rounding,
)
from divergence.numerics.summary import Summary
from divergence.numerics.sums import SINK_FACTOR, Estimate
from divergence.run.contents import num_labels
from divergence.run.manifest import Manifest
from divergence.run.reader import COLUMNS, Run
from divergence.run.record import Record
from divergence.run.site import (
    BACKWARD,
    LOSS,
    OPTIMIZER,
    is_gradient,
    is_norm,
    is_of_parameter,
    module_of,
)
from divergence.words import SIDES, Side, grouped

if TYPE_CHECKING:
    from divergence.run.reader import OwnFloor


# ModelFloor turns the rows of pairs into ratios (error made here over floor), by the rounding model
# of numerics.floor. With a truth, errors against it are judged as well (blocks.units), in units of
# the same model.
#
# A row that is zero on the reference's side alone has an infinite relative error, and may still be
# next to nothing. It is held against the median row of its tensor. What lies below the format's
# smallest normal number may be flushed to zero, by right.
#
# Rows whose terms cancel: their own norm is no measure of their error, which is that of the terms.
#
# *A parameter's gradient* is a sum over tokens. Where its terms cancel the row is small and their
# rounding is not, so such a row is held against the median row. All rows of a bias's gradient may
# cancel: that of keys without rotary positions is zero, since what adds the same to all scores
# changes no softmax. The size of its terms is known from the weight's gradient of the same module:
# with g_t entering the module's backward at token t, and x_t its D inputs of rms 1 (as norms leave
# them),
#
#     ‖db‖ = ‖Σ g_t‖     ‖dW‖ = ‖Σ g_t x_tᵀ‖ ≈ √D √(Σ ‖g_t‖²)
#
# so ‖dW‖/√D is what the terms of db come to where they do not cancel. Smaller inputs make that too
# small, and the limit as narrow as without it; larger ones make the limit as much wider, for a bias
# whose terms cancel.
#
# *The loss*, and what passes the last norm backward, are small where a model predicts well.


@dataclass(frozen=True, slots=True)
class Ratios:
    """One pair's rows over their floors."""

    floor: float
    """The median row's floor as a rel_l2."""
    typical: float
    """The median row's error over its floor."""
    worst: float
    """The largest row's, over no less than the median row's floor."""
    sink: float | None = None
    """The largest sink row's; sinks are in none of the above. None where there is none."""
    members: tuple[tuple[int, float, int, float], ...] = ()
    """Of a batch, each member's number, typical ratio, rows, and largest row's ratio."""
    row: int | None = None
    """That of ``worst``, or of ``sink`` where it is the larger."""
    rows: np.ndarray | None = None
    """Every row's ratio, of which those are the largest."""


def ratios_of(
    rows: RowMetrics,
    *,
    form: Format,
    work: Format,
    num_features: int,
    in_block: bool,
    inherited: RowMetrics | None,
    beside: np.ndarray,
    shared: float = 0.0,
    num_members: int = 1,
    thresholds: Thresholds = THRESHOLDS,
) -> list[Ratios | None]:
    """Holds the rows of pairs of one kind, (N, T) each, against the stated rounding model. None
    where there is no row to judge, or nothing rounds (integers).

    ``form``: what the site is stored in; ``work``: what the model computes in, which is
    narrower where it keeps its stream in float32. In a free pass, ``inherited``: the rows of
    the same modules' inputs, and ``beside`` (N,): the relative error of what else came in
    (encoder states, rotary tables, and through attention or a cache the tokens before).
    ``shared``: the rounding that all rows have in common. ``num_members``: of a batch, whose
    rows follow each other in equal parts.
    """
    with np.errstate(all="ignore"):
        # are most rows zero in the reference alone, or all that are not zero in both? No
        # rounding does that
        alone = np.isinf(rows.rel_l2).sum(axis=1)
        num_measured = (~np.isnan(rows.rel_l2)).sum(axis=1)
        some = (np.isfinite(rows.rel_l2) & (rows.norm > 0)).any(axis=1)
        one_sided = (alone > 0) & ((alone * 2 > num_measured) | ~some)
        if inherited is None:
            rows = zero_rows(rows, form, num_features)
        rel, norm, update = rows.rel_l2, rows.norm, rows.update_norm
        floor = row_floor(
            norm,
            update,
            form=form,
            work=work,
            num_features=num_features,
            in_block=in_block,
            shared=shared,
        )
        if floor is None:
            return [None] * len(rel)
        real = np.isfinite(rel) & (norm > 0)
        share = 1.0 if update is None else update / norm
        made, before = rel, beside[:, None]
        if inherited is not None:
            own = np.nan_to_num(inherited.rel_l2)
            carried = own * inherited.norm / norm
            made = np.sqrt(np.maximum(rel**2 - carried**2, 0.0))
            before = np.maximum(before, own)
        # What a module makes of an error that came in: its update moves along.
        allowed = np.sqrt(floor**2 + (thresholds.free_gain * share * before) ** 2)
        ratio = made / allowed
        sinks = real & (norm > SINK_FACTOR * medians(norm, real)[:, None])  # never half of all
        usual = real & ~sinks
        # a single row may be small by chance, and its error is not: that of what cancelled
        own = allowed * norm
        # by how many times: the quantile of the root of χ²_n / n that one row in a million is
        # below (Wilson and Hilferty 1931), inverted; a few numbers may be as small as any
        n = max(1, num_features)
        root = 1 - 2 / (9 * n) - 4.75 * math.sqrt(2 / (9 * n))
        most = (max(SMALL_BY_CHANCE_TIMES, root**-1.5) if root > 0 else math.inf) * own
        single = made * norm / np.clip(medians(own, usual)[:, None], own, most)
        rows_usual, rows_sink = (
            np.where(kept, values, -math.inf) for kept, values in ((usual, single), (sinks, ratio))
        )
        columns = (
            one_sided,
            real.any(axis=1),
            medians(floor, usual),
            medians(ratio, usual),
            rows_usual.max(axis=1, initial=-math.inf),
            sinks.any(axis=1),
            rows_sink.max(axis=1, initial=-math.inf),
            np.maximum(rows_usual, rows_sink).argmax(axis=1),
        )
    rated: list[Ratios | None] = []
    for number, values in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
        lone, some, middle, typical, worst, has_sink, sink, row = values
        if lone:
            rated.append(Ratios(floor=0.0, typical=math.inf, worst=math.inf))
        elif not some:
            rated.append(None)
        else:
            members: tuple[tuple[int, float, int, float], ...] = ()
            largest = np.maximum(rows_usual[number], rows_sink[number])
            if num_members > 1:
                members = _members(ratio[number], usual[number], largest, num_members)
            rated.append(
                Ratios(
                    middle,
                    typical,
                    worst,
                    sink if has_sink else None,
                    members,
                    row,
                    largest[real[number]],
                )
            )
    return rated


def _members(
    ratio: np.ndarray, usual: np.ndarray, largest: np.ndarray, num_members: int
) -> tuple[tuple[int, float, int, float], ...]:
    """Lists (number, median ratio, rows, largest ratio) of each member of a batch."""
    rows_each = max(1, len(usual) // num_members)
    member = np.arange(len(usual)) // rows_each
    by_member = []
    for number in range(num_members):
        own_rows = (member == number) & usual
        if own_rows.any():
            middle = float(medians(ratio[None], own_rows[None])[0])
            worst = float(largest[member == number].max())
            by_member.append((number, middle, int(own_rows.sum()), worst))
    return tuple(by_member)


def row_floor(
    norm: np.ndarray,
    update_norm: np.ndarray | None,
    *,
    form: Format,
    work: Format,
    num_features: int,
    in_block: bool,
    shared: float = 0.0,
) -> np.ndarray | None:
    """The rounding model's floor of each row as a rel_l2; None where nothing rounds.

    ``norm``, ``update_norm``: the rows' ‖out‖ > 0 and ‖f(x)‖, of any shape; see numerics.floor.
    ``shared``: what all rows have in common.
    """
    store, update = floor_weights(form, num_features=num_features, in_block=in_block)
    if work.unit_roundoff > form.unit_roundoff:
        update = floor_weights(work, num_features=num_features, in_block=in_block)[1]
    if store == 0:
        return None
    share = 1.0 if update_norm is None else update_norm / norm
    floor: np.ndarray = np.sqrt(store**2 + shared**2 + (update * share) ** 2) + 0.0 * norm
    return floor


def work_dtype(manifest: Manifest) -> str:
    """Return what the products are computed in: the weights' dtype, or that of autocast."""
    return manifest.training.autocast or manifest.model.dtype


def work_format(*manifests: Manifest) -> Format:
    """The coarser of the formats that the models compute in; 8-bit weights are widened first."""
    forms = [format_named(work_dtype(manifest)) for manifest in manifests]
    forms = [form for form in forms if form.itemsize >= 2] or [format_named("float32")]
    return max(forms, key=lambda form: form.unit_roundoff)


def gradient_format(work: Format, *manifests: Manifest) -> Format:
    """The format in which parameters' gradients are made, where modules compute in ``work``:
    coarser where both sides add them up, or send them, in fewer bits. Where one does, that is a
    difference."""
    sums = []
    for manifest in manifests:
        training = manifest.training
        named = [dtype for dtype in (training.reduce_dtype, training.accumulate_dtype) if dtype]
        forms = [format_named(dtype) for dtype in named] or [work]
        sums.append(max(forms, key=lambda form: form.unit_roundoff))
    finer = min(sums, key=lambda form: form.unit_roundoff)
    return max((work, finer), key=lambda form: form.unit_roundoff)


def zero_rows(rows: RowMetrics, form: Format, num_features: int) -> RowMetrics:
    """Holds rows (N, T) that are zero in the reference alone against the median row."""
    tiny = form.smallest_normal * math.sqrt(max(1, num_features))
    zero = (rows.norm == 0) & np.isinf(rows.rel_l2) & (rows.diff > tiny)
    if not zero.any():
        return rows
    real = np.isfinite(rows.rel_l2) & (rows.norm > 0)
    usual = medians(rows.norm, real)[:, None]  # nan where no row is left: then none is judged so
    zero &= usual > 0
    update = rows.update_norm
    return msgspec.structs.replace(
        rows,
        rel_l2=np.where(zero, rows.diff / usual, rows.rel_l2),
        norm=np.where(zero, usual, rows.norm),
        update_norm=None
        if update is None
        else np.where(zero, medians(update, real)[:, None], update),
    )


def cancels(site: str, role: str | None) -> bool:
    """May its terms cancel, as those of the loss, and of gradients of parameters, inside blocks and
    behind the last one do? ``role``: of its module; None where it is none of the model's."""
    if module_of(site) == LOSS:
        return site.endswith(":out")
    trunk = role == "trunk" and site.endswith(f"{BACKWARD}:out")
    return is_of_parameter(site) or trunk or (role == "inner" and BACKWARD in site)


def small_rows(rows: RowMetrics, usual: float) -> RowMetrics:
    """Holds errors of what is made of terms that may cancel against ``usual``, where a row is
    less. Where it is 0, no such measure is known, and they stay as they are."""
    if not usual:
        return rows
    with np.errstate(all="ignore"):
        norm = np.maximum(rows.norm, usual)
        return msgspec.structs.replace(
            rows,
            rel_l2=np.where(np.isnan(rows.rel_l2), math.nan, rows.diff / norm),
            norm=np.where(rows.diff > 0, norm, rows.norm),  # a row of zeros on both sides is none
        )


def usual_norm(run: Run, record: Record, norm: np.ndarray, form: Format, role: str) -> float:
    """Return what errors are held against in rows of ``norm`` (T,) whose terms cancelled. Of a
    gradient, the median row or the terms of a bias; outside blocks, its terms. Of the loss its
    terms, which are computed in float32, in roundings of ``form``."""

    def rms_at(site: str, *passes: str) -> float:
        """The rms of a site in the first of these passes that has it; 0 where none has."""
        for pass_ in passes:
            beside = run.find((pass_, record.sample, record.step, site))
            if beside is not None:
                return 0.0 if beside.summary is None else beside.summary.rms or 0.0
        return 0.0

    path, _, port = record.site.partition(":")
    if module_of(record.site) == LOSS:
        # A token that is predicted well makes a loss of log(1 + ε) over the number of labels, and a
        # gradient of (p - 1) over that, both from terms of 1: these are what rounds.
        labels = [num_labels(sample) for sample in run.manifest.tokens.samples]
        share = 1 if BACKWARD in record.site else max(labels, default=1)
        return share / max(1, sum(labels)) * min(1.0, ACCUMULATOR_ROUNDOFF / form.unit_roundoff)
    if role == "trunk" and record.site.endswith(f"{BACKWARD}:out"):
        # A module that makes its input k times as large makes a gradient that passes it so, too.
        # Less is left where terms cancel: a norm takes the part along its input away, and where a
        # prediction is good but not sure that is nearly all.
        module = module_of(record.site)
        gradient, made, given = (
            rms_at(site, record.pass_, "free")
            for site in (f"{module}{BACKWARD}:in", f"{module}:out", f"{module}:in")
        )
        if not (gradient and made and given):
            return 0.0
        return gradient * made / given * math.sqrt(record.shape[-1] if record.shape else 1)
    middle = float(np.median(norm[norm > 0])) if (norm > 0).any() else 0.0
    if is_of_parameter(record.site) and path.endswith(BACKWARD) and port.endswith(".bias"):
        weight = rms_at(f"{path}:{port.removesuffix('bias')}weight", record.pass_)
        return max(middle, float(weight * math.sqrt(record.numel)))
    return middle


def stacked(rows: Sequence[RowMetrics]) -> RowMetrics:
    """Lays the rows of N pairs out as (N, T)."""
    updates = [row.update_norm for row in rows if row.update_norm is not None]
    return msgspec.structs.replace(
        rows[0],
        rel_l2=np.stack([row.rel_l2 for row in rows]),
        diff=np.stack([row.diff for row in rows]),
        norm=np.stack([row.norm for row in rows]),
        update_norm=np.stack(updates) if updates else None,
    )


def made_here(
    rows: RowMetrics, inherited: RowMetrics | None, beside: float, thresholds: Thresholds
) -> np.ndarray:
    """Takes from d (T,) of a free pass what came in and what may have been made of that. An error
    that came in moves along, and a module may enlarge it by ``free_gain``."""
    with np.errstate(all="ignore"):
        before, carried = np.full(len(rows.norm), beside), np.zeros(len(rows.norm))
        if inherited is not None:
            own = np.nan_to_num(inherited.rel_l2)
            carried, before = own * inherited.norm, np.maximum(before, own)
        size = rows.norm if rows.update_norm is None else rows.update_norm
        enlarged = thresholds.free_gain * before * size
        rest = np.square(rows.diff) - np.square(carried) - np.square(enlarged)
        made: np.ndarray = np.where(np.isfinite(rows.rel_l2), np.sqrt(np.maximum(rest, 0)), np.nan)
    return made


def has_gates(manifest: Manifest) -> bool:
    """Is an activation's derivative a step, as that of ReLU?"""
    return any(
        value == "relu" and ("act" in key.lower()) for key, value in manifest.model.config.items()
    )


class SharedRounding:
    """The error that no row's own rounding tells, by site: of an optimizer's input and moments, and
    of a backward through gates.

    A gate of ReLU is open or shut by a sign. Two normal numbers that differ by f of their size have
    other signs with the probability arctan(f) / π (Sheppard 1899), and of a gradient half of the
    gates make the rest: where gates differ it is off by √(2 f / π), which is 7% where f is 0.8%, as
    in bfloat16. In float32 it is one gate in millions, so there a token alone is not asked
    (``blocks.units``).

    Each clipped gradient is multiplied by limit / norm, so the rounding of that one number is in
    all that an optimizer gets and in all moments. It is no small one: some kernels add millions of
    squares one after the other in float32, and lose a share of them once the sum is large. The norm
    is judged as a site of its own; what follows from it is held to how far the norms are apart. A
    new value moves by no more than its step times that: a first step of AdamW is the rate at most,
    one of SGD the rate times what gradients are clipped to."""

    def __init__(self, runs: Sequence[Run], work: Format) -> None:
        """``work``: what both sides computed in."""
        self._gates = 0.0
        if has_gates(runs[0].manifest) and work.itemsize <= 2:
            apart_by = floor_weights(work, num_features=1)[1]
            self._gates = math.sqrt(2 * apart_by / math.pi)
        self._rounding, norms = 0.0, []
        stepped = any(run.manifest.training.optimizer is not None for run in runs)
        for run in runs if stepped else ():
            summaries = {}
            for record in run.records:
                if f"{OPTIMIZER}:in." in record.site:
                    lanes = 8 if record.dtype in ("float32", "float64") else 1
                    self._rounding = max(self._rounding, norm_floor(record.numel, lanes=lanes))
                if is_norm(record.site) and record.summary is not None:
                    summaries[record.pass_] = record.summary
            # the last pass, which is the anchored one where there is one
            summary = summaries.get("anchored", summaries.get("free"))
            if summary is not None and summary.rms is not None:
                norms.append(summary.rms)
        apart = max(norms) / min(norms) - 1 if norms and min(norms) > 0 else 0.0
        self._error = max(self._rounding, apart)
        training = runs[0].manifest.training
        self._clipped = any(run.manifest.training.clip_grad_norm is not None for run in runs)
        self._rate = (training.learning_rate or 0.0) * max(1.0, training.clip_grad_norm or 0.0)
        self._sizes = {
            record.site: record.summary.rms
            for record in runs[0].records
            if f"{OPTIMIZER}:out." in record.site and record.summary is not None
        }

    def __call__(self, site: str) -> float:
        path, _, port = site.partition(":")
        if BACKWARD in path:
            return self._gates
        if not path.endswith(OPTIMIZER):
            return 0.0
        if is_norm(site):
            return self._rounding
        if not self._clipped:
            return 0.0
        if port[:3] == "out" and port.count(".") == 1:  # a new value: its step, in shares of it
            return self._error * self._rate / (self._sizes.get(site) or 1.0)
        return self._error * (2 if port.endswith("_sq") else 1)


# What a module inherits in a free pass was measured before it, so pairs come in the alignment's
# order. Pairs of one kind (rows, formats, width, role) are then rated together, as arrays.


_SHARED = [name for name in PairMetrics.__struct_fields__ if name in SiteResult.__struct_fields__]
_shared_of = operator.attrgetter(*_SHARED)
"""The fields that a SiteResult takes over as they are."""


def nonfinite_of(
    metrics: PairMetrics,
    rows: RowMetrics | None,
    pieces: Pieces,
    piece: Piece,
    shape: tuple[int, ...],
) -> NonfiniteCount | None:
    """Counts of both sides, where there is anything to count, and the prompts that hold it."""
    if not (
        metrics.reference_nan
        or metrics.reference_inf
        or metrics.candidate_nan
        or metrics.candidate_inf
    ):
        return None
    counts = NonfiniteCount(
        reference_nan=metrics.reference_nan,
        reference_inf=metrics.reference_inf,
        candidate_nan=metrics.candidate_nan,
        candidate_inf=metrics.candidate_inf,
        reference_neginf=metrics.reference_neginf,
        candidate_neginf=metrics.candidate_neginf,
        differ=metrics.nonfinite_differ,
        reference_alone=metrics.reference_alone,
        candidate_alone=metrics.candidate_alone,
        mask_alike=metrics.mask_alike,
    )
    if rows is None or rows.nonfinite is None:
        return counts
    worst = rows.nonfinite == rows.nonfinite.max()
    sample, position = pieces.locate(piece, shape, int(worst.argmax()))
    members = pieces.members(piece, shape)
    of_members = worst.reshape(len(members), -1).any(axis=1) if members else []
    prompts = [member for member, holds in zip(members, of_members, strict=True) if holds]
    return msgspec.structs.replace(counts, sample=sample, position=position, prompts=prompts)


_Forward = tuple[int, int, str]
"""(sample, step, module path)."""


class PairNumbers(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Says what was measured of one pair."""

    metrics: PairMetrics | None
    """None where the two are equal, and only the truth was measured."""
    logits: LogitsDiff | None
    rows: RowMetrics | None
    """None where ``metrics`` is."""
    shape: tuple[int, ...]
    """The shape compared."""
    against: AgainstTruth | None = None
    estimate: Estimate | None = None
    """How well the metrics are known, where they were estimated."""
    least: float | None = None
    """The least relative L2, where nothing else is known."""
    statistics_agree: bool = False
    """Does nothing show that the two differ at all?"""


@dataclass(slots=True, eq=False)
class _Rated:
    """A pair on its way to a result."""

    pair: Pair
    numbers: PairNumbers
    metrics: PairMetrics
    rows: RowMetrics
    routed: Routed | None = None
    inherited: RowMetrics | None = None
    beside: float = 0.0
    members: list[int] | None = None
    """Prompts of a batch; None where the pair has no floor."""
    ratios: Ratios | None = None


class Rater:
    """Rates the pairs of two runs; keeps what entered each module."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        pieces: Pieces,
        routing: Routing,
        thresholds: Thresholds,
        work: Format,
        shared: Callable[[str], float],
        own_floor: OwnFloor | None = None,
    ) -> None:
        """``work``: what both sides computed in. ``shared``: by site, what all rows share."""
        self.samples = SamplesBySite()
        self.routes = Routes()
        self._reference, self._pieces = reference, pieces
        self._routing, self._thresholds, self._own_floor = routing, thresholds, own_floor
        self._floor_side = SIDES[own_floor is not None and own_floor.run is candidate]
        self._shared = shared
        self._work = work
        self._sums = gradient_format(work, reference.manifest, candidate.manifest)
        self._same_dtype = work_dtype(reference.manifest) == work_dtype(candidate.manifest)
        self._notes = reference.manifest.plan.modules
        self._blocks = sorted(
            (path for path, note in self._notes.items() if note.role == "block"),
            key=len,
            reverse=True,
        )
        self._of_site: dict[str, dict[str, str | None]] = {}
        self._entering: dict[_Forward, RowMetrics] = {}
        self._beside: defaultdict[_Forward, float] = defaultdict(float)
        self._earlier: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._entered_block: defaultdict[str, float] = defaultdict(float)
        """The largest error of what entered a block, or a module outside them."""

    def results(
        self, pairs: Sequence[Pair], measured: Sequence[PairNumbers | None]
    ) -> list[SiteResult]:
        """A result for each pair, from what was measured of it. Call in the alignment's order."""
        rated = [
            None
            if numbers is None or numbers.metrics is None
            else self._entered(pair, numbers, numbers.metrics)
            for pair, numbers in zip(pairs, measured, strict=True)
        ]
        floored = [each for each in rated if each is not None and each.members is not None]
        for alike in grouped(floored, self._kind_of).values():
            self._rate(alike)
        against = [None if numbers is None else numbers.against for numbers in measured]
        estimated: Side | None = None
        if self._own_floor is not None:
            estimated = SIDES[self._floor_side == "reference"]
            against = [self._bounded(pair, each) for pair, each in zip(pairs, rated, strict=True)]
        # of a free pass it is what was made here, and no distance from the truth
        distances = [
            None if estimated and pair.pass_ == "free" else errors
            for pair, errors in zip(pairs, against, strict=True)
        ]
        results = [
            self._identical(pair, truth) if each is None else self._result(each, truth)
            for pair, each, truth in zip(
                pairs, rated, truth_diffs(distances, estimated=estimated), strict=True
            )
        ]
        self._keep_samples(pairs, results, against)
        return results

    # --- floors and ratios ----------------------------------------------------------------------

    def _entered(self, pair: Pair, numbers: PairNumbers, metrics: PairMetrics) -> _Rated:
        """A pair with what came into its module, in the order of the alignment. In the free pass a
        block answers only for what it adds."""
        rows, site = numbers.rows, pair.reference.record.site
        assert rows is not None
        if cancels(site, self._site_fields(site)["role"]):
            rows = small_rows(rows, self._usual(pair, rows.norm))
        rated = _Rated(pair, numbers, metrics, rows)
        if metrics.rel_l2 is None:
            return rated
        rated.routed = self._routing.of(pair, len(rows.rel_l2))
        if rated.routed is not None and rated.routed.kept is not None:
            rel_l2 = np.where(rated.routed.kept, rows.rel_l2, math.nan)
            rated.rows = msgspec.structs.replace(rows, rel_l2=rel_l2)  # the others are masked
        form_a, form_b = (format_named(p.record.dtype) for p in (pair.reference, pair.candidate))
        if form_a.kind != "float" or form_b.kind != "float":
            return rated
        estimated = numbers.estimate is not None
        rated.members = [] if estimated else self._pieces.members(pair.reference, numbers.shape)
        if pair.pass_ != "free":
            return rated
        path, _, port = site.partition(":")
        sample, home = pair.reference.sample, (self._site_fields(site)["block"] or module_of(site))
        forward = sample, pair.candidate.record.step, path
        size = metrics.token_rel_l2_median or 0.0
        if is_of_parameter(site):  # made of what entered the block, forward and backward
            rated.beside = self._entered_block[home]
        elif port.startswith("in"):
            if module_of(site) == home:
                self._entered_block[home] = max(size, self._entered_block[home])
            if port == "in":
                self._entering[forward] = rated.rows
                self._earlier[sample, path] = max(size, self._earlier[sample, path])
            elif "mask" not in port:
                self._beside[forward] = max(size, self._beside[forward])
        else:
            inherited = self._entering.get(forward)
            if inherited is not None and inherited.rel_l2.shape == rated.rows.rel_l2.shape:
                rated.inherited = inherited
            rated.beside = max(self._beside[forward], self._earlier[sample, path])
        return rated

    def _kind_of(self, rated: _Rated) -> tuple[object, ...]:
        """Return what pairs that are rated together have in common."""
        record, other = rated.pair.reference.record, rated.pair.candidate.record
        return (
            record.dtype,
            other.dtype,
            _last(rated.numbers.shape),
            self._role(rated.pair),
            len(rated.rows.rel_l2),
            rated.rows.update_norm is None,
            rated.inherited is None,
            len(rated.members or ()),
            is_gradient(record.site),
            self._shared(record.site),
        )

    def _rate(self, alike: list[_Rated]) -> None:
        """The ratios of pairs of one kind."""
        first = alike[0]
        form, work = self._formats(first.pair)
        all_ratios = ratios_of(
            stacked([rated.rows for rated in alike]),
            form=form,
            work=work,
            num_features=_last(first.numbers.shape),
            in_block=self._role(first.pair) != "trunk",
            inherited=None
            if first.inherited is None
            else stacked([rated.inherited for rated in alike if rated.inherited is not None]),
            beside=np.array([rated.beside for rated in alike]),
            shared=self._shared(first.pair.reference.record.site),
            num_members=max(1, len(first.members or ())),
            thresholds=self._thresholds,
        )
        for rated, ratios in zip(alike, all_ratios, strict=True):
            rated.ratios = ratios

    def _row_floor(
        self, pair: Pair, width: int, norm: np.ndarray, update: np.ndarray | None
    ) -> np.ndarray | None:
        form, work = self._formats(pair)
        with np.errstate(all="ignore"):
            return row_floor(
                np.maximum(norm, 1e-300),
                update,
                form=form,
                work=work,
                num_features=width,
                in_block=self._role(pair) != "trunk",
                shared=self._shared(pair.reference.record.site),
            )

    def _formats(self, pair: Pair) -> tuple[Format, Format]:
        """The formats of a pair: (what it is stored in, what it is computed in). Gradients that are
        added up or sent in fewer bits than they are stored in have been rounded to these."""
        forms = [format_named(piece.record.dtype) for piece in (pair.reference, pair.candidate)]
        form = max(forms, key=lambda form: form.unit_roundoff)
        if self._sums is self._work or not is_gradient(pair.reference.record.site):
            return form, self._work
        return max(form, self._sums, key=lambda format_: format_.unit_roundoff), self._sums

    def _usual(self, pair: Pair, norm: np.ndarray) -> float:
        """Return what errors are held against where a row's terms cancelled."""
        form = max(self._formats(pair), key=lambda form: form.unit_roundoff)
        return usual_norm(self._reference, pair.reference.record, norm, form, self._role(pair))

    def _role(self, pair: Pair) -> str:
        return self._site_fields(pair.reference.record.site)["role"] or "inner"

    # --- results --------------------------------------------------------------------------------

    def _site_fields(self, site: str) -> dict[str, str | None]:
        """Block, role and kind of a site's module."""
        fields = self._of_site.get(site)
        if fields is None:
            path = module_of(site)
            note = self._notes.get(path)
            within = (b for b in self._blocks if path == b or path.startswith(b + "."))
            fields = self._of_site[site] = {
                "block": next(within, None),
                "role": note.role if note else None,
                "kind": note.kind if note else None,
            }
        return fields

    def _place(self, pair: Pair) -> dict[str, Any]:
        reference, candidate = pair.reference.record, pair.candidate.record
        return {
            "pass_": pair.pass_,
            "sample": pair.reference.sample,
            "step": candidate.step,
            "site": reference.site,
            "order": reference.order,
            "candidate_site": candidate.site if candidate.site != reference.site else None,
            "match": pair.match,
            "reference_dtype": reference.dtype,
            "candidate_dtype": candidate.dtype,
            **self._site_fields(reference.site),
        }

    def _identical(self, pair: Pair, truth: TruthDiff | None) -> SiteResult:
        """Bit for bit the same: every difference is 0, and nothing is measured."""
        record = pair.reference.record
        summary = record.summary or Summary(min=None, max=None, mean=None, rms=None, absmax=None)
        norm = None if record.summary is None else (summary.rms or 0.0) * math.sqrt(record.numel)
        nan, inf = summary.num_nan, summary.num_posinf + summary.num_neginf
        nonfinite: NonfiniteCount | None = NonfiniteCount(
            reference_nan=nan,
            reference_inf=inf,
            reference_neginf=summary.num_neginf,
            candidate_nan=nan,
            candidate_inf=inf,
            candidate_neginf=summary.num_neginf,
        )
        if not (nan or inf):
            nonfinite = None
        elif self._reference.has_bytes(record):
            # the statistics count rows of padding too, and do not tell the place
            mask = self._pieces.row_mask(pair.reference, record.shape)
            if mask is not None or nan or inf != summary.num_neginf:
                array = self._reference.array(record)
                metrics, rows = measure_pair(array, array, row_mask=mask)
                nonfinite = nonfinite_of(metrics, rows, self._pieces, pair.reference, record.shape)
        zero, prompts, figures = None, [], dict[str, Any](EQUAL)
        if format_named(record.dtype).kind == "float":
            zero = 0.0
            figures |= {**NO_ULP, "ulp_format": record.dtype}
            members = self._pieces.members(pair.reference, record.shape)
            num_rows = max(1, record.numel // max(1, _last(record.shape))) // max(1, len(members))
            prompts = [PromptRatio(sample=n, ratio=0.0, num_rows=num_rows) for n in members]
        return SiteResult(
            **self._place(pair),
            shape=record.shape,
            identical=True,
            numel=record.numel,
            reference_norm=norm,
            candidate_norm=norm,
            **figures,
            nonfinite=nonfinite,
            truth=truth,
            num_rerouted=0 if self._routing.is_known(pair) else None,
            ratio=zero,
            ratio_max=zero,
            prompts=prompts,
        )

    def _result(self, rated: _Rated, truth: TruthDiff | None) -> SiteResult:
        pair, numbers, ratios = rated.pair, rated.numbers, rated.ratios
        # a sketch's rows are all that lies behind the first two axes
        shape, routed = numbers.shape, rated.routed
        rows = shape if numbers.estimate is None else (*shape[:2], 1)[: len(shape)]
        worst, kept = rated.metrics.worst_row, None if routed is None else routed.kept
        if kept is not None and bool(kept.any()):
            worst = int(np.nan_to_num(rated.rows.rel_l2, nan=-1.0).argmax())
        sample, position = self._pieces.locate(pair.reference, rows, worst)
        more: dict[str, Any] = {"truth": truth}
        if ratios is not None:
            more |= {
                "floor": ratios.floor,
                "ratio": ratios.typical,
                "ratio_max": ratios.worst,
                "ratio_sink": ratios.sink,
                "ratio_position": self._pieces.locate(pair.reference, rows, ratios.row)[1],
                "prompts": [
                    PromptRatio(
                        sample=(rated.members or [])[number],
                        ratio=ratio,
                        num_rows=count,
                        ratio_max=largest,
                    )
                    for number, ratio, count, largest in ratios.members
                ],
            }
        if numbers.least is not None:
            # what a module adds to what it gets is not known: as much as it hands on, say
            form = self._row_floor(pair, _last(shape), np.ones(1), None)
            more["floor"] = 0.0 if form is None else float(form[0])
        if routed is not None:
            more["num_rerouted"] = routed.num_rerouted
            real = self._pieces.row_mask(pair.reference, shape)
            if kept is not None and real is not None and len(real) == len(kept):
                more["num_rerouted"] = int((~kept & real).sum())  # pads go anywhere
        fields = dict(zip(_SHARED, _shared_of(rated.metrics), strict=True))
        fields |= self._place(pair)
        fields |= more
        result = SiteResult(
            shape=shape,
            worst_sample=sample,
            worst_position=position,
            nonfinite=nonfinite_of(rated.metrics, numbers.rows, self._pieces, pair.reference, rows),
            logits=numbers.logits,
            estimated=numbers.estimate,
            at_least=numbers.least,
            statistics_agree=numbers.statistics_agree,
            **fields,
        )
        if ratios is not None and ratios.rows is not None:
            self.samples.add_ratios(result, ratios.rows)
        if routed is not None and ratios is not None and routed.experts is not None:
            norms = rated.rows.norm, rated.rows.update_norm
            floor = self._row_floor(pair, _last(shape), *norms)
            self.routes.add(result, routed, None if floor is None else rated.rows.rel_l2 / floor)
        return result

    # --- against the truth ----------------------------------------------------------------------

    def _bounded(self, pair: Pair, rated: _Rated | None) -> AgainstTruth | None:
        """Both sides against the float64 of one of them, where no more is known than the sums of
        its error. ``rated``: None where the two are equal.

        Of the side that carries the floor (``OwnFloor``) the error e is known, and the difference d
        of the two sides. The other side's error f is not. Where one side's error has a part that
        the other's has not, the smaller one and that part are as good as orthogonal:

            d = f + e, so f² = d² - e²        the other side is the farther off, or as far by itself
            e = f + d, so f² = e² - d²        it shares a part of e, and has not the rest

        so f is taken to be sqrt(|d² - e²|). That is a figure, no measurement, and where d and e are
        of a size it is small whatever f is. So it counts for no less than rounding may be: e, as
        far as that is within ``typical`` floors of the rounding model (less what ``truth_confirm``
        leaves room for). Then the other side is blamed where it is beyond its limits for certain,
        by the triangle inequality; the side of the floor where its own error is beyond what
        rounding makes, and not the other's by as much. Where that figure is far below e, the two
        are judged as without a truth (``AgainstTruth.alike``).
        """
        assert self._own_floor is not None
        thresholds = self._thresholds
        piece = pair.reference if self._floor_side == "reference" else pair.candidate
        rows_of_floor = self._own_floor.rows(piece.record)
        if rows_of_floor is None or pair.pass_ not in ("free", "anchored"):
            return None
        shape = piece.record.shape
        whole = rows_of_floor.reshape(*shape[:-1], rows_of_floor.shape[1])
        floor = self._pieces.rows_of(whole, piece).reshape(-1, rows_of_floor.shape[1])
        columns = dict(zip(COLUMNS, floor.T, strict=True))
        if rated is None:
            mask = self._pieces.row_mask(piece, shape)
            real = np.zeros(len(floor))
            if mask is not None and len(mask) == len(floor):
                real[~mask] = math.nan
            rows = RowMetrics(
                rel_l2=real,
                diff=np.zeros(len(floor)),
                norm=columns["size"],
                update_norm=columns["update"],
            )
            width, inherited, beside = shape[-1], None, 0.0
        else:
            rows, inherited, beside = rated.rows, rated.inherited, rated.beside
            estimate = rated.numbers.estimate
            width = shape[-1] if estimate is None else estimate.num_projections
        if len(rows.rel_l2) != len(floor):  # or nothing was measured
            return None
        # d, nan in rows that do not count; of a free pass what was made here, beyond what may be
        # made of what came in
        between = np.where(np.isfinite(rows.rel_l2), rows.diff, math.nan)
        if pair.pass_ == "free":
            between = made_here(rows, inherited, beside, thresholds)
        norm, update = rows.norm, rows.update_norm
        kept = np.isfinite(between) & np.isfinite(columns["error"]) & np.isfinite(norm) & (norm > 0)
        index = np.flatnonzero(kept)
        norm, between, error = norm[index], between[index], columns["error"][index]
        update = None if update is None else update[index]
        model = self._row_floor(pair, shape[-1], norm, update)
        if model is None or not len(index):
            return None
        figure = np.sqrt(np.abs(np.square(between) - np.square(error)))
        usual = np.minimum(error, thresholds.typical / thresholds.truth_confirm * model * norm)
        fourth = columns["fourth"][index]
        ratio = np.divide(error, fourth, out=np.ones_like(error), where=fourth > 0)
        numbers = np.clip(ratio**4, 1.0, max(1, width))
        zeros = np.zeros(len(index))
        none = None if update is None else zeros
        own, other = self._floor_side, SIDES[self._floor_side == "reference"]
        sides = {own: error, other: np.maximum(usual, figure)}
        # how much of d lies along e is not known: the figure is made of half as many numbers
        spreads = {f"spread_{own}": numbers, f"spread_{other}": numbers / 2}
        return AgainstTruth(
            **sides,
            **spreads,
            norm=norm,
            update=update,
            between=between,
            gain_reference=zeros,
            gain_candidate=zeros,
            update_gain_reference=none,
            update_gain_candidate=none,
            spread=numbers,
            sink=norm > SINK_FACTOR * np.median(norm),
            channels=np.zeros((6, 0)),
            peaks=np.zeros(3),
            row_index=index,
            alike=figure >= error / thresholds.truth_confirm,
        )

    def _keep_samples(
        self,
        pairs: Sequence[Pair],
        results: Sequence[SiteResult],
        against: Sequence[AgainstTruth | None],
    ) -> None:
        """Return how far both sides are from the truth, for the statistics over a site. Where
        blocks did not get equal inputs, a truth blames none."""
        rated = [
            (number, pair, result, row)
            for number, (pair, result, row) in enumerate(zip(pairs, results, against, strict=True))
            if row is not None and (self._own_floor or pair.pass_ != "free")
        ]

        def kind_of(each: tuple[int, Pair, SiteResult, AgainstTruth]) -> tuple[object, ...]:
            _, pair, result, row = each
            return (
                self._formats(pair)[0].name,
                _last(result.shape),
                self._role(pair),
                row.num_rows,
                row.update is None,
                cancels(result.site, result.role),
                self._shared(result.site),
            )

        floors: dict[int, np.ndarray] = {}
        for alike in grouped(rated, kind_of).values():
            _, first, result, _ = alike[0]
            norms = np.stack([row.norm for *_, row in alike])
            updates = [row.update for *_, row in alike if row.update is not None]
            row_floors = self._row_floor(
                first, _last(result.shape), norms, np.stack(updates) if updates else None
            )
            if row_floors is None:
                continue
            if cancels(result.site, result.role):
                usual = [self._usual(pair, row.norm) or 1.0 for _, pair, _, row in alike]
                small = np.array(usual)[:, None] / np.maximum(norms, 1e-300)
                row_floors = row_floors * np.maximum(1.0, small)
            floors |= {each[0]: floor for each, floor in zip(alike, row_floors, strict=True)}
        for number, _, result, row in rated:
            if (floor := floors.get(number)) is not None:
                if not self._same_dtype or self._shared(result.site):
                    row = with_rounding(row, floor)
                self.samples.add(result, row, floor)


def _last(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1

"""Floors for measured pairs: what correct implementations may differ by, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from divergence.comparison.limits import BY_CHANCE
from divergence.comparison.measure.truth import medians
from divergence.numerics.floor import (
    ACCUMULATOR_ROUNDOFF,
    THRESHOLDS,
    Thresholds,
    floor_weights,
    norm_floor,
)
from divergence.numerics.formats import Format, format_named
from divergence.numerics.sums import SINK_FACTOR, RowMetrics
from divergence.run.contents import num_labels
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import BACKWARD, LOSS, OPTIMIZER, is_norm, is_of_parameter, module_of

# ModelFloor turns the rows of pairs into ratios (error made here over floor), by the rounding model
# of numerics.floor. With a truth, errors against it are judged as well (blocks.sides), in units of
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


class ModelFloor:
    """The floor from the stated rounding model; no reference run needed."""

    def __init__(self, thresholds: Thresholds = THRESHOLDS) -> None:
        self.thresholds = thresholds

    def ratios(
        self,
        rows: RowMetrics,
        *,
        form: Format,
        work: Format,
        num_features: int,
        role: str,
        inherited: RowMetrics | None,
        beside: np.ndarray,
        shared: float = 0.0,
        num_members: int = 1,
    ) -> list[Ratios | None]:
        """Judges the rows of pairs of one kind, (N, T) each. None where there is no row to judge,
        or nothing rounds (integers).

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
                role=role,
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
            allowed = np.sqrt(floor**2 + (self.thresholds.free_gain * share * before) ** 2)
            ratio = made / allowed
            sinks = real & (norm > SINK_FACTOR * medians(norm, real)[:, None])  # never half of all
            usual = real & ~sinks
            # a single row may be small by chance, and its error is not: that of what cancelled
            own = allowed * norm
            # by how many times: the quantile of the root of χ²_n / n that one row in a million is
            # below (Wilson and Hilferty 1931), inverted; a few numbers may be as small as any
            n = max(1, num_features)
            root = 1 - 2 / (9 * n) - 4.75 * math.sqrt(2 / (9 * n))
            most = (max(BY_CHANCE, root**-1.5) if root > 0 else math.inf) * own
            single = made * norm / np.clip(medians(own, usual)[:, None], own, most)
            rows_usual, rows_sink = (
                np.where(kept, values, -math.inf)
                for kept, values in ((usual, single), (sinks, ratio))
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
    role: str,
    shared: float = 0.0,
) -> np.ndarray | None:
    """The rounding model's floor of each row as a rel_l2; None where nothing rounds.

    ``norm``, ``update_norm``: the rows' ‖out‖ > 0 and ‖f(x)‖, of any shape; see numerics.floor.
    ``shared``: what all rows have in common.
    """
    part: Literal["block", "inner", "trunk"] = (
        "block" if role == "block" else "inner" if role == "inner" else "trunk"
    )
    store, update = floor_weights(form, num_features=num_features, role=part)
    if work.unit_roundoff > form.unit_roundoff:
        update = floor_weights(work, num_features=num_features, role=part)[1]
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
    (``blocks.sides``).

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
            apart_by = floor_weights(work, num_features=1, role="inner")[1]
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

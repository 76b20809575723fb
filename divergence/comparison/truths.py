"""Whose truth is it? A truth belongs to the code and the weights of the reference.

A float64 run repeats what the code says, so one that was made by faulty code has the fault, and
blames the side that lacks it. Two things tell whose it is: the digests of the code, where
manifests hold them (``preflight.other_code``), and the values.

Two float64 runs of one code agree wherever both hold the same site, pass, sample and step. Sums
may be added in another order on another machine, so up to ``SHARP_TIMES`` times the rounding
model of numerics.floor in float64 is allowed (its inputs are equal only where each block is given
them, so anchored passes alone are held against each other). ``SHARP_TIMES``: attention turns a
relative error of its scores into |s| times as much of its probabilities, and trained models reach
|s| of 10 and more; 64 allows for some. That is near 1e-13 in small models and 1e-12 in large ones,
five orders below what float32 rounds. Largest measured between kernel sets of one CPU: 1.4e-15.

What it cannot tell: code that is the same on both machines and wrong.
"""

from __future__ import annotations

import math

import numpy as np

from divergence.comparison.constants import SHARP_TIMES
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import is_operator_site


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
    note = manifest.plan.modules.get(record.site.rpartition(":")[0])
    role = "block" if note is None else note.role
    features = record.shape[-1] if record.shape else 1
    form = format_named(dtype or record.dtype)
    return math.hypot(*floor_weights(form, num_features=features, role=role))

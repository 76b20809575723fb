"""Whose truth is it? A truth belongs to the code and the weights of the reference.

A float64 run repeats what the code says, so one that was made by faulty code has the fault, and
blames the side that lacks it. Two things tell whose it is: the digests of the code, where manifests
hold them (``code.other_code``), and the values.

Two float64 runs of one code agree wherever both hold the same site, pass, sample and step. Sums may
be added in another order on another machine, so up to ``SHARP`` times the rounding model of
numerics.floor in float64 is allowed (its inputs are equal only where each block is given them, so
anchored passes alone are held against each other). ``SHARP``: attention turns a relative error of
its scores into |s| times as much of its probabilities, and trained models reach |s| of 10 and more;
64 allows for some. That is near 1e-13 in small models and 1e-12 in large ones, five orders below
what float32 rounds. Largest measured between kernel sets of one CPU: 1.4e-15.

What it cannot tell: code that is the same on both machines and wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from divergence.facts import Fact, fact, sentence
from divergence.numerics.floor import floor_weights
from divergence.numerics.formats import format_named
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import is_operator_site

if TYPE_CHECKING:
    import torch

__all__ = ["Agreement", "TruthDisagreement", "disagreement", "without_pads"]

SHARP = 64.0
"""How much wider than the rounding model two float64 runs may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthDisagreement:
    """The first site where two float64 runs differ by more than ``limit`` (relative L2)."""

    site: str
    sample: int
    step: int
    rel_l2: float
    limit: float

    @property
    def fact(self) -> Fact:
        """The same as a fact."""
        return fact(
            "preflight.truths_apart", site=self.site, sample=self.sample, step=self.step,
            rel_l2=self.rel_l2, limit=self.limit,
        )  # fmt: skip

    def __str__(self) -> str:
        return sentence(self.fact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """``num_compared``: sites and forwards that both runs hold; ``first``: where they disagree."""

    num_compared: int
    first: TruthDisagreement | None


def disagreement(a: Run, b: Run, *, inside: str | None = None) -> Agreement:
    """Hold two float64 runs that are anchored to the same run against each other. ``inside``: in
    this block alone."""
    if a.manifest.plan.anchored_to != b.manifest.plan.anchored_to:
        return Agreement(num_compared=0, first=None)
    num_compared, beyond = 0, []
    within = ("",) if inside is None else (f"{inside}.", f"{inside}:", f"{inside}#")
    for record in a.records:
        if record.pass_ != "anchored" or is_operator_site(record.site):
            continue
        if not record.site.startswith(within):
            continue
        other = b.find(record.coordinates)
        if other is None or other.positions != record.positions:
            continue
        num_compared += 1
        distance = _distance(a, record, b, other)
        if distance is not None:
            beyond.append((record, *distance))
    if not beyond:
        return Agreement(num_compared=num_compared, first=None)
    record, rel_l2, limit = min(beyond, key=lambda entry: _place(entry[0]))
    first = TruthDisagreement(
        site=record.site, sample=record.sample, step=record.step, rel_l2=rel_l2, limit=limit
    )
    return Agreement(num_compared=num_compared, first=first)


def _place(record: Record) -> tuple[int, int, int]:
    return (record.sample, record.step, record.order)


def _distance(a: Run, record: Record, b: Run, other: Record) -> tuple[float, float] | None:
    """(relative L2, limit) where it is beyond the limit."""
    if record.xxh3 is not None and record.xxh3 == other.xxh3:
        return None
    form = format_named(record.dtype)
    limit = limit_of(a.manifest, record)
    if record.shape != other.shape or record.dtype != other.dtype:
        return math.inf, limit
    if not (a.has_bytes(record) and b.has_bytes(other)):
        return None
    x, y = a.read(record), b.read(other)
    if form.kind != "float":
        return None if bool((x == y).all()) else (math.inf, 0.0)
    kept = [without_pads(a.manifest, record, tensor.double()) for tensor in (x, y)]
    if kept[0] is None or kept[1] is None:
        return None
    x, y = kept[0], kept[1]
    same = x.isfinite()
    if not bool((same == y.isfinite()).all()):
        return math.inf, limit
    x, y = x.where(same, x.new_zeros(())), y.where(same, y.new_zeros(()))
    norm, apart = float(x.norm()), float((x - y).norm())
    distance = apart / norm if norm else (math.inf if apart else 0.0)
    return (distance, limit) if distance > limit else None


def without_pads(manifest: Manifest, record: Record, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with the rows of pads set to 0: what stands there is no result (a row that sees
    no key has one value in one kernel and another in the next). None where a batch has pads and
    the tensor's axes are not (B, T, ...): which of its rows are pads is not known."""
    pads = None if record.step else manifest.tokens.pads(record.sample)
    if pads is None:
        return tensor
    if tensor.shape[:2] != pads.shape:
        return None
    return tensor.masked_fill(pads.reshape(*pads.shape, *[1] * (tensor.ndim - 2)), 0)


def limit_of(manifest: Manifest, record: Record) -> float:
    """How far two float64 runs of one code may be apart at a site (relative L2)."""
    note = manifest.plan.modules.get(record.site.rpartition(":")[0])
    role = "block" if note is None else note.role
    features = record.shape[-1] if record.shape else 1
    stores, update = floor_weights(format_named("float64"), num_features=features, role=role)
    return SHARP * math.hypot(stores, update)

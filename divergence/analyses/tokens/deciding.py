"""The rows of logits that decided the tokens: found in a run, and what two runs' differ by.

A row is the last position's logits of one sample in one free forward: its argmax is the
greedy choice. Two runs have comparable rows while both were fed the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from divergence.comparison.align.pieces import PromptStep, logits_row
from divergence.numerics.formats import format_named
from divergence.numerics.pairs.logits import kl_divergence
from divergence.run.reader import Run
from divergence.words import Side

if TYPE_CHECKING:
    pass

__all__ = ["Distances", "Spread", "distances_of"]


@dataclass(frozen=True, slots=True)
class Spread:
    """KL over the decided positions, in nats: mean, and 99th percentile (inverted cdf, so the
    largest of fewer than 100)."""

    mean: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """How far apart the sides' distributions are, and how far each is from the truth's.

    ``between``: KL(reference‖candidate); ``floor``: KL(truth‖``side``), ``side`` being the one
    that is nearer to the truth, by the mean: what a correct implementation of this dtype
    errs by, as this comparison itself shows it. ``num_effective``: positions that make up the
    floor's mean, (Σ k)² / Σ k² of their KL k (Kish, Survey Sampling, 1965): few where a few
    uncertain positions outweigh all others.
    """

    num_positions: int
    between: Spread
    floor: Spread | None = None
    side: Side | None = None
    num_effective: float = 0.0


def distances_of(
    reference: Run,
    candidate: Run,
    truth: Run | None,
    places: Sequence[PromptStep],
) -> Distances | None:
    """Over ``places``; None where no row can be compared. One row of each run at a time."""
    between: list[float] = []
    errors: dict[Side, list[float]] = {
        "reference": [], "candidate": []
    }  # fmt: skip
    for place in places:
        a, b = logits_row(reference, *place), logits_row(candidate, *place)
        if a is None or b is None:
            continue
        apart = kl_divergence(a, b)
        if apart is None:
            continue
        between.append(apart)
        right = None if truth is None else logits_row(truth, *place)
        if right is None:
            continue
        one, two = kl_divergence(right, a), kl_divergence(right, b)
        if one is not None and two is not None:
            errors["reference"].append(one)
            errors["candidate"].append(two)
    if not between:
        return None
    if len(errors["reference"]) < len(between):
        return Distances(num_positions=len(between), between=_spread(between))
    side = _coarser(reference, candidate)
    if side is None:
        means = [float(np.mean(errors[one])) for one in ("reference", "candidate")]
        side = "candidate" if means[1] < means[0] else "reference"
    floor = np.array(errors[side])
    squares = float(np.square(floor).sum())
    return Distances(
        num_positions=len(between),
        between=_spread(between),
        floor=_spread(errors[side]),
        side=side,
        num_effective=float(np.sum(floor)) ** 2 / squares if squares > 0 else 1.0,
    )


def _coarser(reference: Run, candidate: Run) -> Side | None:
    """The side whose dtype rounds more: its rounding is what may move a token, not the other's."""
    one, two = (
        format_named(run.manifest.model.dtype).unit_roundoff for run in (reference, candidate)
    )
    if one == two:
        return None
    return "reference" if one > two else "candidate"


def _spread(values: Sequence[float]) -> Spread:
    found = np.asarray(values)
    return Spread(float(found.mean()), float(np.quantile(found, 0.99, method="inverted_cdf")))

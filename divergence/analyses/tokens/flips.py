"""Flips: whether rounding may turn one greedy choice into another, and what it says if not.

A token flips where the error of a side's logits exceeds the gap between two tokens. In the
truth's logits R the gap is exact, |R_i - R_j|, i and j being the two sides' choices: the side
that chose otherwise than R must have erred by as much. The errors of two logits of a row are
taken as independent, of standard deviation s, so their difference has √2 s:

    z = |R_i - R_j| / (√2 s),   s = rms(e - mean(e)),  e = the floor's logits - R, in this row

The floor is the side that is nearer to the truth over all decided positions (by mean KL), so
that z does not depend on which run is called the reference, and a fault does not measure
itself. z <= 3 is a tie: three standard deviations of correct rounding cover it. The other side
may be a correct implementation with coarser kernels, W times as far from the truth; W up to 2.2
is taken as healthy, so a flip is a fault only beyond 3 W (the threshold ``flip``), and
between the two nothing is claimed.

Without a truth s comes from the rounding model: what all blocks together may make
(measure.floors), times the spread of the row, times 2.2 for the coarsest kernels that are taken
as healthy, since no side is known to be as good as the model; the gap is the larger of the two
sides', since the difference has bridged both. A tie is a tie then, and nothing else is claimed.
Without either nothing is: in units of the two sides' own difference every flip is small.

Specific, not sensitive: a fault may flip no token. KL over all decided positions sees more.
It goes with the square of the error: see numerics.floor, ``kl``, for its limit.

A row is the last position's logits of one sample in one free forward. Two runs have comparable rows
while both were fed the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from divergence.comparison.align.pieces import PromptStep, logits_row
from divergence.comparison.measure.pipeline import num_threads
from divergence.comparison.results.tokens import TokenDifference
from divergence.numerics.floor import Thresholds, spread
from divergence.numerics.formats import format_named
from divergence.numerics.pairs.logits import kl_divergence, logit_error
from divergence.run.reader import Run
from divergence.words import Side

if TYPE_CHECKING:
    import torch

__all__ = [
    "TIE", "Distances", "deviations", "distances_of", "judge_by_model", "judge_flip", "kl_fields",
]  # fmt: skip


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
    reference: Run, candidate: Run, truth: Run | None, places: Sequence[PromptStep]
) -> Distances | None:
    """Over ``places``; None where no row can be compared. A thread holds one record of each run."""
    between: list[float] = []
    errors: dict[Side, list[float]] = {"reference": [], "candidate": []}
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="divergence-logits") as pool:
        for found in pool.map(partial(_distances_at, reference, candidate, truth), places):
            if found is not None:
                between.append(found[0])
            if found is not None and found[1] is not None and found[2] is not None:
                errors["reference"].append(found[1])
                errors["candidate"].append(found[2])
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


def _distances_at(
    reference: Run, candidate: Run, truth: Run | None, place: PromptStep
) -> tuple[float, float | None, float | None] | None:
    """KL of one row: reference‖candidate, truth‖reference, truth‖candidate."""
    a, b = logits_row(reference, *place), logits_row(candidate, *place)
    if a is None or b is None:
        return None
    apart = kl_divergence(a, b)
    if apart is None:
        return None
    right = None if truth is None else logits_row(truth, *place)
    if right is None:
        return apart, None, None
    return apart, kl_divergence(right, a), kl_divergence(right, b)


def _coarser(reference: Run, candidate: Run) -> Side | None:
    """The side whose dtype rounds more: its rounding is what may move a token, not the other's."""
    one, two = (
        format_named(run.manifest.model.dtype).unit_roundoff for run in (reference, candidate)
    )
    if one == two:
        return None
    return "reference" if one > two else "candidate"


def _spread(values: Sequence[float]) -> Spread:
    numbers = np.asarray(values)
    return Spread(float(numbers.mean()), float(np.quantile(numbers, 0.99, method="inverted_cdf")))


TIE = 3.0
"""Standard deviations up to which rounding of the floor's own size flips a token."""
_COARSEST = 2.2
"""The largest W that is taken as healthy (docs/verdicts.md): here, over the rounding model."""
_TOKENS = 8
"""Independent numbers that are taken to make up the KL of one position: the tokens that are
likely. It sets how much wider the limit of few positions is."""


def deviations(
    margin: float | None, row_a: torch.Tensor | None, row_b: torch.Tensor | None
) -> float | None:
    """The margin over √2 · rms(a - b), the row's mean difference taken off."""
    if margin is None or row_a is None or row_b is None:
        return None
    error = logit_error(row_a, row_b)
    if error is None or not 0 < error < math.inf:
        return None
    return margin / (math.sqrt(2) * error)


def judge_by_model(
    flip: TokenDifference,
    row_a: torch.Tensor | None,
    row_b: torch.Tensor | None,
    allowed: float | None,
) -> TokenDifference:
    """Judge a flip by what rounding may make of these logits: a tie, or nothing said.
    ``allowed``: the relative error, see compare.allowed."""
    ids = (flip.reference.id, flip.candidate.id)
    if row_a is None or row_b is None or not allowed or max(ids) >= min(len(row_a), len(row_b)):
        return msgspec.structs.replace(flip, z_of=None if flip.z is None else "difference")
    spread_of_row = logit_error(row_a, row_a.new_zeros(row_a.shape))
    gap = max(float(row_a[ids[0]] - row_a[ids[1]]), float(row_b[ids[1]] - row_b[ids[0]]))
    if not spread_of_row or not math.isfinite(gap):
        return msgspec.structs.replace(flip, z_of=None if flip.z is None else "difference")
    z = gap / (math.sqrt(2) * _COARSEST * allowed * spread_of_row)
    return msgspec.structs.replace(flip, z=z, z_of="model", judgement="tie" if z <= TIE else None)


def judge_flip(
    flip: TokenDifference,
    truth: torch.Tensor,
    floor: torch.Tensor | None,
    *,
    thresholds: Thresholds,
) -> TokenDifference:
    """Judge a flip by the truth's row of logits and that of the side which shows the floor."""
    ids = (flip.reference.id, flip.candidate.id)
    if max(ids) >= truth.shape[-1]:
        return flip
    one, two = (float(truth[token]) for token in ids)
    flip = msgspec.structs.replace(flip, truth_margin=one - two)
    z = deviations(abs(one - two), floor, truth)
    if z is None:
        return msgspec.structs.replace(flip, z_of=None if flip.z is None else "difference")
    judgement = "tie" if z <= TIE else "fault" if z > thresholds.flip else None
    return msgspec.structs.replace(flip, z=z, z_of="floor", judgement=judgement)


def kl_fields(
    distances: Distances | None, thresholds: Thresholds, *, routed: bool = False
) -> dict[str, Any]:
    """What TokensResult says of the distributions; without a limit where experts are chosen."""
    if distances is None:
        return {}
    fields: dict[str, Any] = {"kl_mean": distances.between.mean, "kl_p99": distances.between.p99}
    floor = distances.floor
    if floor is None:
        return fields
    tail = max(1, distances.num_positions // 100)  # as many lie above the 99th percentile
    shares = [
        (_over(distances.between.mean, floor.mean), _kl_limit(distances.num_effective, thresholds)),
        (_over(distances.between.p99, floor.p99), _kl_limit(tail, thresholds)),
    ]
    ratio, limit = max(shares, key=lambda share: share[0] / share[1])
    return fields | {
        "floor_side": distances.side,
        "floor_kl_mean": floor.mean,
        "floor_kl_p99": floor.p99,
        "kl_ratio": ratio,
        "kl_limit": None if routed else limit,
    }


def _over(top: float, bottom: float) -> float:
    """0/0 = 1 (both are right), x/0 = inf."""
    if bottom > 0:
        return top / bottom
    return 1.0 if top == 0 else math.inf


def _kl_limit(num_positions: float, thresholds: Thresholds) -> float:
    """Wider where few positions count. KL goes with the square of the error."""
    return thresholds.kl * spread(round(num_positions * _TOKENS)) ** 2

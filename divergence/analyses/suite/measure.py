"""One output of one case of a suite: both sides against the truth.

What a correct implementation may be off by is recorded in the truth, element by element
(``out.floor``, from simulated rounding of the definition; see
divergence.ops.suite.definition). With the last rounding, uniform in half a spacing of the dtype
to either side,

    s_i² = floor_i² + (spacing(R_i) / √12)²        score = rms of (x_i - R_i) / s_i

is 1 for a correct implementation, whatever the operator, the dtype or the values; 0 stands for an
element that is exact and must be. An error of a row's scale (norm statistics in 16 bits, a
softmax whose sum is rounded) hides among the elements' own rounding, and averages to

    gain = <x - round(R), R> / ‖R‖²      over its standard deviation (``out.gain``), rms over rows.

The limits are multiples of what rounding explains: 4 for the score, the room that the floor of a
whole block is given (numerics.floor); 6 for the gain, as for blocks: six standard deviations of
one row. Codes: with λ codes expected to be off by one (each where rounding may carry the value
over a half), more than 4 λ + 6 √λ + 3 are too many, and none may be off by more than one. Indices:
a row whose choice has another score than the truth's by more than six standard deviations of that
difference is wrong; an exactly equal score is a tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from divergence.comparison.result import SuiteSide
from divergence.numerics.formats import Format, format_of
from divergence.numerics.ulp import ROUNDING_RMS, spacing, ulp_distance

__all__ = [
    "GAIN_LIMIT", "SCORE_LIMIT", "Truths", "between", "excess", "ideal_error", "kind_of",
    "score_of_side",
]  # fmt: skip

SCORE_LIMIT = 4.0
GAIN_LIMIT = 6.0
_CODES_FACTOR, _CODES_DEVIATIONS, _CODES_LEAST = 4.0, 6.0, 3.0
_SCORE_DEVIATIONS = 6.0


@dataclass(frozen=True, slots=True, eq=False)
class Truths:
    """What the truth holds of one output; what it does not hold is None."""

    value: torch.Tensor
    floor: torch.Tensor | None
    gain: torch.Tensor | None
    scores: torch.Tensor | None


def kind_of(dtype: torch.dtype) -> Literal["values", "codes", "indices"]:
    """``values``, ``codes`` (int8, 8-bit floats) or ``indices``."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return "values"
    return "codes" if dtype.itemsize == 1 else "indices"


def score_of_side(x: torch.Tensor, truth: Truths, *, subnormal: bool) -> SuiteSide:
    """One side against the truth. ``subnormal``: the case's values are; they may be flushed."""
    kind = kind_of(x.dtype)
    if kind == "values":
        return _values(x, truth, subnormal)
    return _codes(x, truth) if kind == "codes" else _indices(x, truth)


def excess(side: SuiteSide, *, expected_off: float | None, count: int) -> float:
    """How far beyond its limit a side is: over 1 is beyond."""
    if side.num_nonfinite:
        return math.inf
    if side.score is not None:
        return max(side.score / SCORE_LIMIT, (side.gain or 0.0) / GAIN_LIMIT)
    if side.off_by_one is not None:
        if side.off_by_more:
            return math.inf
        expected = (expected_off or 0.0) * count
        allowed = _CODES_FACTOR * expected + _CODES_DEVIATIONS * math.sqrt(expected) + _CODES_LEAST
        return side.off_by_one * count / allowed
    return math.inf if side.rows_wrong else 0.0


def ideal_error(truth: Truths, form: Format) -> tuple[float, float]:
    """(‖round(R)-R‖/‖R‖, ‖floor‖/‖R‖) over the elements that the format holds."""
    rounded = truth.value.to(form.torch_dtype).double()
    kept = rounded.isfinite()
    true = truth.value[kept]
    norm = float(true.norm())
    floor = 0.0 if truth.floor is None else float(truth.floor.double()[kept].norm())
    return _over(float((rounded[kept] - true).norm()), norm), _over(floor, norm)


def between(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float | None, float | None]:
    """(rel_l2 or share that differs, ulp p99, ulp max) of the two sides; no ulp of indices."""
    form = format_of(a.dtype)
    if kind_of(a.dtype) != "values":
        share = float((a.float() != b.float()).double().mean()) if a.numel() else 0.0
        return share, None, None
    wide_a, wide_b = a.double(), b.double()
    finite = wide_a.isfinite() & wide_b.isfinite()
    difference = float((wide_a - wide_b)[finite].norm())
    p99, largest = _ulp(b, a, wide_a, form)
    return _over(difference, float(wide_a[finite].norm())), p99, largest


def _values(x: torch.Tensor, truth: Truths, subnormal: bool) -> SuiteSide:
    form, true = format_of(x.dtype), truth.value
    rounded = true.to(x.dtype)
    held = rounded.double().isfinite()  # beyond the range both may overflow
    computed = x.double()
    num_nonfinite = int((held & ~computed.isfinite()).sum())
    kept = held & computed.isfinite()
    difference = torch.where(kept, computed - true, 0.0)
    zero = (computed == 0.0) & kept & (rounded.double() != 0.0) & subnormal
    z = _standardised(difference, true, rounded, truth.floor, form)
    p99, largest = _ulp(x, rounded, true, form)
    return SuiteSide(
        error=_over(float(difference.norm()), float(torch.where(kept, true, 0.0).norm())),
        ulp_p99=p99,
        ulp_max=largest,
        score=_rms(z[kept & ~zero]),
        gain=None
        if truth.gain is None
        else _gain(computed, rounded.double(), kept, zero, truth.gain),
        num_flushed=int(zero.sum()),
        num_nonfinite=num_nonfinite,
    )


def _standardised(
    difference: torch.Tensor,
    true: torch.Tensor,
    rounded: torch.Tensor,
    floor: torch.Tensor | None,
    form: Format,
) -> torch.Tensor:
    """(x - R) / s; inf where an exact element is not."""
    before = torch.zeros_like(true) if floor is None else floor.double()
    exact = (before == 0.0) & (rounded.double() == true)
    store = torch.where(exact, 0.0, spacing(true, form) * ROUNDING_RMS)
    deviation = (before.square() + store.square()).sqrt()
    return torch.where(difference == 0.0, 0.0, difference / deviation)


def _gain(
    computed: torch.Tensor,
    rounded: torch.Tensor,
    kept: torch.Tensor,
    zero: torch.Tensor,
    deviation: torch.Tensor,
) -> float:
    """Rms over rows of <x - round(R), R> / ‖R‖² in standard deviations. Rows with flushed
    elements, or without a deviation, are left out."""
    value = torch.where(kept, rounded, 0.0)
    norm2 = value.square().sum(-1)
    difference = torch.where(kept, computed - rounded, 0.0)
    gain = (difference * value).sum(-1) / torch.where(norm2 > 0, norm2, 1.0)
    known = (deviation > 0) & (norm2 > 0) & ~zero.any(-1)
    return _rms(gain[known] / deviation.double()[known])


def _codes(x: torch.Tensor, truth: Truths) -> SuiteSide:
    """Shares of codes; those that the truth leaves open (nan) are not judged."""
    true = truth.value.float()
    judged = ~true.isnan()
    if x.is_floating_point():
        apart = ulp_distance(x, truth.value, format_of(x.dtype))
        bad = judged & ~x.float().isfinite()
    else:
        apart = (x.long() - truth.value.long()).abs()
        bad = torch.zeros_like(judged)
    count = max(1, int(judged.sum()))
    return SuiteSide(
        off_by_one=int((judged & ~bad & (apart == 1)).sum()) / count,
        off_by_more=int((judged & ~bad & (apart > 1)).sum()) / count,
        num_nonfinite=int(bad.sum()),
    )


def _indices(x: torch.Tensor, truth: Truths) -> SuiteSide:
    """Shares of rows: a row is as bad as its worst choice."""
    true = truth.value
    different = x != true
    if truth.scores is None:
        rows = different if different.ndim < 2 else different.any(-1)
        share = float(rows.double().mean()) if rows.numel() else 0.0
        return SuiteSide(rows_tied=0.0, rows_near=0.0, rows_wrong=share)
    inside = (x >= 0) & (x < truth.scores.shape[-1])
    chosen = torch.where(inside, x, 0)
    gap = (truth.scores.gather(-1, chosen) - truth.scores.gather(-1, true)).abs()
    floor = torch.zeros_like(truth.scores) if truth.floor is None else truth.floor.double()
    spread = torch.hypot(floor.gather(-1, chosen), floor.gather(-1, true))
    repeated = _repeated(x)
    wrong = (different & ((gap > _SCORE_DEVIATIONS * spread) | ~inside)).any(-1) | repeated
    near = (different & (gap > 0)).any(-1) & ~wrong
    tied = different.any(-1) & ~wrong & ~near
    return SuiteSide(
        rows_tied=float(tied.double().mean()),
        rows_near=float(near.double().mean()),
        rows_wrong=float(wrong.double().mean()),
    )


def _repeated(x: torch.Tensor) -> torch.Tensor:
    """Rows that choose one index twice."""
    ordered = x.sort(-1).values
    return (ordered[..., 1:] == ordered[..., :-1]).any(-1)


def _ulp(
    x: torch.Tensor, other: torch.Tensor, true: torch.Tensor, form: Format
) -> tuple[float, float]:
    """(p99, max) of the distance in values of ``form`` where |R| >= u·rms(R); see ulp_counts."""
    finite = true.isfinite() & x.isfinite() & other.isfinite()
    if not bool(finite.any()):
        return 0.0, 0.0
    rms = _rms(true[finite])
    kept = finite & (true.abs() >= form.unit_roundoff * rms)
    distance = ulp_distance(x, other, form)[kept].double()
    if not len(distance):
        return 0.0, 0.0
    return float(distance.quantile(0.99, interpolation="higher")), float(distance.max())


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _over(top: float, bottom: float) -> float:
    """The quotient; 0 for 0/0, inf for x/0."""
    if bottom == 0.0:
        return 0.0 if top == 0.0 else math.inf
    return top / bottom

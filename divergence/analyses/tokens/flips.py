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
(measure.allowed), times the spread of the row, times 2.2 for the coarsest kernels that are taken
as healthy, since no side is known to be as good as the model; the gap is the larger of the two
sides', since the difference has bridged both. A tie is a tie then, and nothing else is claimed.
Without either nothing is: in units of the two sides' own difference every flip is small.

Specific, not sensitive: a fault may flip no token. KL over all decided positions sees more.
It goes with the square of the error: see numerics.floor, ``kl``, for its limit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from divergence.analyses.tokens.deciding import Distances
from divergence.comparison.results.findings import Evidence, figure
from divergence.comparison.results.tokens import TokenDifference, TokensResult
from divergence.numerics.pairs.logits import logit_error
from divergence.numerics.rounding.chance import spread
from divergence.numerics.rounding.floor import Thresholds

if TYPE_CHECKING:
    import torch

__all__ = [
    "TIE",
    "deviations",
    "flip_evidence",
    "judge_by_model",
    "judge_flip",
    "kl_fields",
    "token_evidence",
    "token_fault",
]

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
    fields: dict[str, Any] = {
        "kl_mean": distances.between.mean,
        "kl_p99": distances.between.p99,
    }
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


def beyond_kl(tokens: TokensResult) -> bool:
    """Whether the distributions are farther apart than the floor explains."""
    if tokens.kl_ratio is None or tokens.kl_limit is None:
        return False
    return tokens.kl_ratio > tokens.kl_limit


def token_fault(tokens: TokensResult | None) -> tuple[str, Evidence] | None:
    """(what no rounding explains, its evidence), where tokens or distributions show it."""
    if tokens is None:
        return None
    fault = next((flip for flip in tokens.differences if flip.judgement == "fault"), None)
    if fault is not None:
        return (
            f"the token at sample {fault.sample}, step {fault.step} flips over a gap of "
            f"{fault.z:.1f} σ of the floor's logit error",
            flip_evidence(fault),
        )
    if tokens.kl_ratio is not None and beyond_kl(tokens):
        return (
            f"the distributions of the decided tokens are {figure(tokens.kl_ratio)} × as far "
            "apart as the floor's from the truth",
            kl_evidence(tokens)[0],
        )
    return None


def token_evidence(tokens: TokensResult | None) -> list[Evidence]:
    """The first flip, and the distributions where they are beyond their limit."""
    if tokens is None:
        return []
    first = tokens.first_difference
    found = [] if first is None else [flip_evidence(first)]
    faults = [flip for flip in tokens.differences if flip.judgement == "fault"]
    if faults and faults[0] is not first:
        found.append(flip_evidence(faults[0], name="first that is no tie"))
    return found + (kl_evidence(tokens) if beyond_kl(tokens) else [])


_SCALES = {
    "floor": "floor's logit error",
    "model": "rounding model's logit error",
    "difference": "logits' diff",
}


def flip_evidence(flip: TokenDifference, *, name: str = "first different token") -> Evidence:
    """One flip in words."""
    what: list[str] = []
    if flip.margin is not None:
        what.append(f"margin {flip.margin:.3g}")
    if flip.z is not None:
        what.append(f"{flip.z:.1f} σ of the {_SCALES[flip.z_of or 'difference']}")
    if flip.judgement is not None:
        what.append(f"a {flip.judgement}")
    elif flip.z_of in ("difference", "model"):
        what.append("not judged")
    values = {key: value for key in ("margin", "truth_margin", "z")
              if (value := getattr(flip, key)) is not None}  # fmt: skip
    return Evidence(
        text=f"{name}: sample {flip.sample}, step {flip.step}"
        + (f" ({', '.join(what)})" if what else ""),
        values=values,
    )


def kl_evidence(tokens: TokensResult) -> list[Evidence]:
    """The distributions in words; nothing where there is no floor."""
    if tokens.kl_ratio is None or tokens.kl_limit is None or tokens.kl_mean is None:
        return []
    return [
        Evidence(
            text=f"KL of the decided tokens: mean {tokens.kl_mean:.2e}, p99 {tokens.kl_p99:.2e} "
            f"nats between the sides; the {tokens.floor_side}'s from the truth: mean "
            f"{tokens.floor_kl_mean:.2e}, p99 {tokens.floor_kl_p99:.2e}; "
            f"{figure(tokens.kl_ratio)} × (limit {tokens.kl_limit:.1f})",
            values={"ratio": tokens.kl_ratio, "limit": tokens.kl_limit},
        )
    ]

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

Specific, not sensitive: a fault may flip no token. KL over all decided positions sees more
(tokens.measure). A row is the last position's logits of one sample in one free forward.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from divergence.comparison.align.pieces import PromptStep, logits_row
from divergence.comparison.results import TokenChoice, TokenDifference
from divergence.numerics.floor import Thresholds
from divergence.numerics.logits import logit_error, top_choices
from divergence.run.reader import Run
from divergence.words import Side

if TYPE_CHECKING:
    import torch

__all__ = ["TIE", "difference_at"]

TIE = 3.0
"""Standard deviations up to which rounding of the floor's own size flips a token."""
_COARSEST = 2.2
"""The largest W that is taken as healthy (docs/verdicts.md): here, over the rounding model."""

_TOP = 5
"""Choices that are named of the first flip."""


def difference_at(
    reference: Run,
    candidate: Run,
    truth: Run | None,
    place: PromptStep,
    thresholds: Thresholds,
    *,
    floor_side: Side | None,
    allowed: float | None,
    tops: bool,
) -> TokenDifference:
    """One flip, judged. ``floor_side``: which side shows the floor, where a truth tells;
    ``allowed``: what rounding may make of this row, for want of a truth; ``tops``: with the most
    likely tokens of both sides."""
    sample, step = place
    runs = [run for run in (truth, candidate, reference) if run is not None]
    texts = {key: text for run in runs for key, text in run.manifest.tokens.texts.items()}
    token_a = reference.manifest.tokens.samples[sample].chosen_ids[step]
    token_b = candidate.manifest.tokens.samples[sample].chosen_ids[step]
    row_a, row_b = logits_row(reference, *place), logits_row(candidate, *place)
    top_a, top_b = _top(row_a, texts), _top(row_b, texts)
    margin = _margin(top_a)
    difference = TokenDifference(
        sample=sample,
        step=step,
        reference=_choice(token_a, row_a, texts),
        candidate=_choice(token_b, row_b, texts),
        margin=margin,
        candidate_margin=_margin(top_b),
        z=_deviations(margin, row_a, row_b),
        reference_top=top_a if tops else [],
        candidate_top=top_b if tops else [],
    )
    true_logits = None if truth is None else logits_row(truth, *place)
    if truth is None or true_logits is None:
        return _judge_by_model(difference, row_a, row_b, allowed)
    chosen = truth.manifest.tokens.samples[sample].chosen_ids
    choice = _choice(chosen[step], true_logits, texts) if step < len(chosen) else None
    mine = row_b if floor_side == "candidate" else row_a
    return _judge_flip(
        msgspec.structs.replace(difference, truth_choice=choice),
        true_logits,
        mine,
        thresholds=thresholds,
    )


def _top(row: torch.Tensor | None, texts: dict[str, str]) -> list[TokenChoice]:
    if row is None:
        return []
    return [
        TokenChoice(id=token, text=texts.get(str(token)), logprob=logprob)
        for token, logprob in top_choices(row, _TOP)
    ]


def _choice(token: int, row: torch.Tensor | None, texts: dict[str, str]) -> TokenChoice:
    logprob = float("nan")
    if row is not None and token < row.shape[0]:
        logprob = float(row.double().log_softmax(0)[token])
    return TokenChoice(id=token, text=texts.get(str(token)), logprob=logprob)


def _margin(top: list[TokenChoice]) -> float | None:
    """Top-1 minus top-2: the same in logits and in log-probabilities."""
    return top[0].logprob - top[1].logprob if len(top) > 1 else None


def _deviations(
    margin: float | None, row_a: torch.Tensor | None, row_b: torch.Tensor | None
) -> float | None:
    """The margin over √2 · rms(a - b), the row's mean difference taken off."""
    if margin is None or row_a is None or row_b is None:
        return None
    error = logit_error(row_a, row_b)
    if error is None or not 0 < error < math.inf:
        return None
    return margin / (math.sqrt(2) * error)


def _judge_by_model(
    flip: TokenDifference,
    row_a: torch.Tensor | None,
    row_b: torch.Tensor | None,
    allowed: float | None,
) -> TokenDifference:
    """Judge a flip by what rounding may make of these logits: a tie, or nothing said.
    ``allowed``: the relative error, see measure.floors."""
    ids = (flip.reference.id, flip.candidate.id)
    if row_a is None or row_b is None or not allowed or max(ids) >= min(len(row_a), len(row_b)):
        return msgspec.structs.replace(flip, z_of=None if flip.z is None else "difference")
    spread_of_row = logit_error(row_a, row_a.new_zeros(row_a.shape))
    gap = max(float(row_a[ids[0]] - row_a[ids[1]]), float(row_b[ids[1]] - row_b[ids[0]]))
    if not spread_of_row or not math.isfinite(gap):
        return msgspec.structs.replace(flip, z_of=None if flip.z is None else "difference")
    z = gap / (math.sqrt(2) * _COARSEST * allowed * spread_of_row)
    return msgspec.structs.replace(flip, z=z, z_of="model", judgement="tie" if z <= TIE else None)


def _judge_flip(
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
    reference, candidate = (float(truth[token]) for token in ids)
    flip = msgspec.structs.replace(flip, truth_margin=reference - candidate)
    z = _deviations(abs(reference - candidate), floor, truth)
    if z is None:
        return msgspec.structs.replace(flip, z_of=None if flip.z is None else "difference")
    judgement = "tie" if z <= TIE else "fault" if z > thresholds.flip else None
    return msgspec.structs.replace(flip, z=z, z_of="floor", judgement=judgement)

"""Routers: does rounding explain that two sides sent a token to different experts?

Only where the logits decide, which is seen from tokens of which they do (comparison.experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["explained_choices", "lead_of", "same_experts", "tie"]

_TIE = 8 * 2.0**-24
"""Routers rank softmax or sigmoid of the logits in float32: so near, two logits may tie there. Two
roundings of the dtype they are recorded in, where that is more: they may have decided before."""
_WITNESSES = 10
"""That logits decide is known from tokens chosen for alike, and from a side that follows its own on
every token. Something else that decides, a bias say, and overrules a lead of this size would have
overruled half of the smaller leads: not one of ten is a chance of 1 in 1,000."""


def same_experts(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """(T,): the same experts on all sides, in whatever order."""
    import torch

    first = rows[0].sort(-1).values
    alike = torch.ones(len(first), dtype=torch.bool)
    for other in rows[1:]:
        alike &= (other.sort(-1).values == first).all(-1)
    return alike


def explained_choices(
    alike: torch.Tensor,
    rows: Sequence[torch.Tensor],
    logits: Sequence[torch.Tensor | None],
    usual: Callable[[], Sequence[torch.Tensor | None]] = tuple,
) -> tuple[torch.Tensor, float | None]:
    """(T,) whether rounding explains a choice that differs, and the widest gap that it decided.
    ``usual()``: each side's leads in all forwards, which are read where this one leaves a doubt."""
    import torch

    explained = torch.ones_like(alike)
    if bool(alike.all()):
        return explained, None
    twice = torch.stack([_has_twice(chosen) for chosen in rows]).any(0)
    if not bool(twice[alike].any()):  # else it is this model's way
        explained &= ~twice
    if any(logit is None for logit in logits):
        return explained, None
    sides = [logit.double() for logit in logits if logit is not None]
    leads = [lead_of(chosen, values) for chosen, values in zip(rows, sides, strict=True)]
    behind_at_most = torch.minimum(*(tie(logit) for logit in logits if logit is not None))
    follow = [lead >= behind_at_most for lead in leads]
    witnesses = [lead for lead, side in zip(leads, follow, strict=True) if bool(side.all())]
    if all(bool(side[alike].all()) for side in follow):
        witnesses.append(leads[0][alike])
    if not witnesses:
        return explained, None  # not the logits alone decide: a bias, groups
    behind = -torch.minimum(*leads)
    if bool((~alike & explained & (behind > -behind_at_most)).any()):
        witnesses += [lead for lead in usual() if lead is not None]
    for lead in witnesses:
        closer = torch.searchsorted(lead.sort().values, behind)
        explained &= alike | (behind <= -behind_at_most) | (closer < _WITNESSES)
    gaps = [
        _gap(rows[0][t], rows[1][t], sides[0][t]) for t in (~alike & explained).nonzero().flatten()
    ]
    return explained, max(gaps, default=None)


def lead_of(chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(T,): the least of the chosen experts' values (T, E) less the greatest of the others'; not
    negative where the chosen (T, k) are the k largest."""
    import torch

    mine = torch.zeros(values.shape, dtype=torch.bool)
    mine.scatter_(1, chosen.long().clamp(0, values.shape[-1] - 1), True)
    least = values.masked_fill(~mine, float("inf")).amin(-1)
    most = values.masked_fill(mine, float("-inf")).amax(-1)
    return least - most


def tie(logits: torch.Tensor) -> torch.Tensor:
    """(T,): of logits (T, E), how far the chosen may lie behind and still be the largest; < 0."""
    import torch

    unit = max(_TIE, torch.finfo(logits.dtype).eps)
    return -unit * logits.double().abs().amax(-1)


def _has_twice(chosen: torch.Tensor) -> torch.Tensor:
    """(T,): is an expert among them more than once? No rounding makes that of the k largest."""
    in_order = chosen.sort(-1).values
    return (in_order[:, 1:] == in_order[:, :-1]).any(-1)


def _gap(experts_a: torch.Tensor, experts_b: torch.Tensor, values: torch.Tensor) -> float:
    """Between the experts that one side alone chose, in these values."""
    left, right = set(experts_a.tolist()), set(experts_b.tolist())
    if left <= right or right <= left:
        return 0.0
    return float(values[sorted(left - right)].max() - values[sorted(right - left)].min())

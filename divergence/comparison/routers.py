"""Routers: does rounding explain that two sides sent a token to different experts?

Where the logits decide, which is seen from tokens of which they do (comparison.experts), each
token's margin tells. Where something beside them decides (a bias, groups), the margin is not known,
but how often rounding may decide is: a choice changes within twice the logits' own difference of a
tie, and few tokens lie so near one. A router of which far more tokens differ is not excused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from divergence.run.manifest import Manifest

__all__ = [
    "Flips",
    "explained_choices",
    "follows",
    "lead_of",
    "logits_decide",
    "same_experts",
    "tie",
]

_TIE = 8 * 2.0**-24
"""Routers rank softmax or sigmoid of the logits in float32: so near, two logits may tie there. Two
roundings of the dtype they are recorded in, where that is more: they may have decided before."""
_WITNESSES = 10
"""That logits decide is known from tokens chosen for alike, and from a side that follows its own on
every token. Something else that decides, a bias say, and overrules a lead of this size would have
overruled half of the smaller leads: not one of ten is a chance of 1 in 1,000."""
_CHANCE = 1e-8
"""That rounding made as many flips: for each router of some hundred blocks."""


@dataclass(frozen=True, slots=True)
class Flips:
    """Of one router: ``places`` tells apart the tokens sent elsewhere that are no tie of their
    logits (the same token behind the same beginning counts once); ``expected``: how many of all
    tokens rounding may send elsewhere, at most."""

    places: frozenset[tuple[float, ...]]
    expected: float

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor], logits: Sequence[torch.Tensor | None]) -> Flips:
        """Of one forward: both sides' experts (T, k) and logits (T, E)."""
        a, b = logits
        if a is None or b is None or a.shape != b.shape or len(a) != len(rows[0]):
            return cls(frozenset(), math.inf)
        values, apart = a.double(), (a.double() - b.double()).abs().amax(-1)
        # sigmoids and softmaxes are flat at large logits: what is rounded there moves more of them
        slope = (values.abs().amax(-1).neg()).sigmoid()
        near = 2 * apart - tie(a) + _TIE / slope
        middle = values.median(-1, keepdim=True).values
        width = (1.5 * (values - middle).abs().median(-1).values).minimum(values.std(-1))
        # E logits lie around one boundary: their density there is at most about E over their width
        chance = (values.shape[-1] * near / width).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
        places = set()
        for token in (~same_experts(rows)).nonzero().flatten().tolist():
            gap = _gap(rows[0][token], rows[1][token], values[token])
            if abs(gap) > float(near[token]):
                scaled = (values[token] / width[token].clamp(min=1e-300)).tolist()
                places.add(tuple(round(value, 1) for value in scaled))
        return cls(frozenset(places), float(chance.sum()))

    @classmethod
    def together(cls, forwards: Iterable[Flips]) -> Flips:
        """Of all forwards of a router."""
        known = list(forwards)
        return cls(
            frozenset[tuple[float, ...]]().union(*(flips.places for flips in known)),
            sum(flips.expected for flips in known),
        )

    @property
    def beyond_chance(self) -> bool:
        """Are there more than rounding makes? By Chernoff's bound on a Poisson number."""
        count, expected = len(self.places), max(self.expected, 1e-30)
        if count <= expected:
            return False
        return count - expected - count * math.log(count / expected) < math.log(_CHANCE)


def logits_decide(manifest: Manifest, router: str) -> bool:
    """Is nothing known that chooses beside the logits of this router (a module's path): no
    parameter next to it but its matrix, as of a bias, and no groups of experts?"""
    parent = router.rpartition(".")[0] + "."
    beside = (
        name.rpartition(".")[2] for name in manifest.model.digests
        if name.startswith(parent) and "expert" not in name.removeprefix(parent).partition(".")[0]
    )  # fmt: skip
    groups = (
        value for key, value in manifest.model.config.items()
        if key.rpartition(".")[2].endswith(("n_group", "topk_group", "expert_group"))
    )  # fmt: skip
    return all(leaf == "weight" for leaf in beside) and all(
        value in (None, 0, 1) for value in groups
    )


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
    flips: Callable[[], Flips] = lambda: Flips.together([]),
) -> tuple[torch.Tensor, float | None]:
    """(T,) whether rounding explains a choice that differs, and the widest gap that it decided.
    ``usual()``: each side's leads in all forwards, which are read where this one leaves a doubt;
    ``flips()``: the router's, where the logits alone do not decide."""
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
    behind = -torch.minimum(*leads)
    if witnesses and bool((~alike & explained & (behind > -behind_at_most)).any()):
        witnesses += [lead for lead in usual() if lead is not None]
    for lead in witnesses:
        closer = torch.searchsorted(lead.sort().values, behind)
        explained &= alike | (behind <= -behind_at_most) | (closer < _WITNESSES)
    # what is left: not the logits alone decide (a bias, groups), or there are too few to know
    untold = ~same_experts(rows) & explained & (behind > -behind_at_most)
    if bool(untold.any()) and flips().beyond_chance:
        explained &= ~untold
    if not witnesses:
        return explained, None
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


def follows(chosen: torch.Tensor, logits: torch.Tensor | None) -> bool:
    """Are every token's experts the largest of its logits?"""
    if logits is None or len(chosen) != len(logits):
        return False
    return bool((lead_of(chosen, logits.double()) >= tie(logits)).all())


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

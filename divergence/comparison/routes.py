"""Which experts each token went to, as comparison.experts finds it and analyses take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from divergence.comparison.results.sites import SiteResult
from divergence.words import Side

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["Routed", "Routes", "Unexplained", "route_key"]


@dataclass(frozen=True, slots=True)
class Routed:
    """One pair's tokens. ``kept`` (T,) bool: judged; None where all are. ``num_rerouted``: left
    out; ``margin``: the largest gap of the reference's logits that was decided the other way, None
    where none was or it is not known. ``experts``: (T, k) the reference's, None where the pair
    comes before the choice. ``unexplained``: the first choice that rounding does not explain."""

    kept: torch.Tensor | None
    num_rerouted: int
    margin: float | None
    experts: torch.Tensor | None
    unexplained: Unexplained | None = None


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A choice of one forward that no rounding explains at ``tokens``, rows of ``num_tokens``:
    ``site`` has it, ``router`` made it (of unknown name: None), ``experts`` are both sides';
    ``follows``: does a side's every token go to the largest of its own logits?"""

    site: str
    router: str | None
    tokens: list[int]
    num_tokens: int
    experts: tuple[torch.Tensor, torch.Tensor]
    follows: tuple[bool, bool]


RouteKey = tuple[Side | None, str, int, int, str]
"""(whose escalated pass, pass, sample, step, site)"""


@dataclass(slots=True)
class Routes:
    """By (whose, pass, sample, step, site), of what lies behind a choice: each token's ratio (T,),
    nan where it is not judged, and its experts (T, k); ``margin``: the widest gap of logits that
    rounding decided; ``unexplained``: by the first result behind it, a choice that it did not.
    Whose: the side of an escalated pass, else None."""

    found: dict[RouteKey, tuple[np.ndarray, torch.Tensor]] = field(default_factory=dict)
    margin: float | None = None
    unexplained: dict[tuple[int, int, str], tuple[SiteResult, Unexplained]] = field(
        default_factory=dict
    )

    def take(self, other: Routes, of: Side | None) -> None:
        """Those of an escalated pass."""
        self.found |= {(of, *key[1:]): value for key, value in other.found.items()}

    def add(self, result: SiteResult, routed: Routed, ratio: np.ndarray | None) -> None:
        if routed.margin is not None:
            self.margin = max(routed.margin, self.margin or 0.0)
        if routed.unexplained is not None:
            place = result.sample, result.step, routed.unexplained.site
            self.unexplained.setdefault(place, (result, routed.unexplained))
        if ratio is not None and routed.experts is not None and len(ratio) == len(routed.experts):
            self.found[route_key(result)] = ratio, routed.experts


def route_key(result: SiteResult) -> RouteKey:
    return result.of, result.pass_, result.sample, result.step, result.site

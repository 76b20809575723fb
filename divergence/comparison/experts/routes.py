"""Routes: each judged token's error and the experts that it was sent to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from divergence.comparison.experts.routing import Routed
from divergence.comparison.results.sites import SiteResult
from divergence.numerics.pairs.metrics import RowMetrics
from divergence.words import Side

if TYPE_CHECKING:
    import torch

__all__ = ["Routes", "kept_rows", "route_key", "routing_notes"]


def kept_rows(rows: RowMetrics, routed: Routed) -> RowMetrics:
    """The rows that are judged; the others count as masked."""
    if routed.kept is None:
        return rows
    return replace(rows, rel_l2=rows.rel_l2.masked_fill(~routed.kept, float("nan")))


RouteKey = tuple[Side | None, str, int, int, str]
"""(whose escalated pass, pass, sample, step, site)"""


@dataclass(slots=True)
class Routes:
    """By (whose, pass, sample, step, site), of what lies behind a choice: each token's ratio (T,),
    nan where it is not judged, and its experts (T, k); ``margin``: the widest gap of logits that
    rounding decided. Whose: the side of an escalated pass, else None."""

    found: dict[RouteKey, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    margin: float | None = None

    def take(self, other: Routes, of: Side | None) -> None:
        """Those of an escalated pass."""
        self.found |= {(of, *key[1:]): value for key, value in other.found.items()}

    def add(self, result: SiteResult, routed: Routed, ratio: torch.Tensor | None) -> None:
        if routed.margin is not None:
            self.margin = max(routed.margin, self.margin or 0.0)
        if ratio is not None and routed.experts is not None and len(ratio) == len(routed.experts):
            self.found[route_key(result)] = ratio, routed.experts


def route_key(result: SiteResult) -> RouteKey:
    return result.of, result.pass_, result.sample, result.step, result.site


def routing_notes(sites: Sequence[SiteResult], routes: Routes) -> list[str]:
    """How many tokens rounding sent elsewhere, where any."""
    outs = [
        s for s in sites
        if s.num_rerouted is not None and s.role == "block" and s.site.endswith(":out")
        and s.pass_ == "anchored"
    ]  # fmt: skip
    moved = [s for s in outs if s.num_rerouted]
    if not moved:
        return []
    blocks = {s.block for s in moved}
    count = sum(_num_rows(s) for s in outs if s.block in blocks)
    gap = "" if routes.margin is None else f" (their router logits lay within {routes.margin:.2g})"
    where = ", ".join(sorted(map(str, blocks)))
    return [
        f"{sum(s.num_rerouted or 0 for s in moved)} of {count} tokens went to other experts on "
        f"one side ({where}): rounding{gap}; they are not judged there"
    ]


def _num_rows(result: SiteResult) -> int:
    return result.numel // max(result.shape[-1], 1)

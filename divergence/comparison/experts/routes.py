"""Experts: what the tokens that are far off have in common, where a block has experts.

One expert of many that is wrong shows in the tokens that were sent to it, and in no other. So where
all tokens beyond the limit share an expert, it is named; tokens that went there and are fine
speak against it and are counted. Rerouted tokens (experts.routing) are in none of the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from divergence.comparison.experts.routing import Routed
from divergence.comparison.result import Evidence, SiteResult, Verdict
from divergence.numerics.pairs.metrics import RowMetrics

if TYPE_CHECKING:
    import torch

__all__ = ["Routes", "kept_rows", "routing_notes", "with_experts"]


def kept_rows(rows: RowMetrics, routed: Routed) -> RowMetrics:
    """The rows that are judged; the others count as masked."""
    if routed.kept is None:
        return rows
    return replace(rows, rel_l2=rows.rel_l2.masked_fill(~routed.kept, float("nan")))


@dataclass(slots=True)
class Routes:
    """By (whose, pass, sample, step, site), of what lies behind a choice: each token's ratio (T,),
    nan where it is not judged, and its experts (T, k); ``margin``: the widest gap of logits that
    rounding decided. Whose: the side of an escalated pass, else None."""

    found: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    margin: float | None = None

    def take(self, other: Routes, of: str | None) -> None:
        """Those of an escalated pass."""
        self.found |= {(of, *key[1:]): value for key, value in other.found.items()}

    def add(self, result: SiteResult, routed: Routed, ratio: torch.Tensor | None) -> None:
        if routed.margin is not None:
            self.margin = max(routed.margin, self.margin or 0.0)
        if ratio is not None and routed.experts is not None and len(ratio) == len(routed.experts):
            self.found[_key(result)] = ratio, routed.experts


def _key(result: SiteResult) -> tuple:
    return result.of, result.pass_, result.sample, result.step, result.site


def with_experts(verdict: Verdict, sites: Sequence[SiteResult], routes: Routes) -> Verdict:
    """The verdict with the expert that its onset's tokens share, if they share one."""
    onset = verdict.onset
    if onset is None or onset.block is None:
        return verdict
    mine = [
        s for s in sites
        if s.site == onset.site and s.pass_ == onset.pass_ and _key(s) in routes.found
        and (s.of is None or s.of == verdict.side)
    ]  # fmt: skip
    said = _shared(mine, routes)
    if said is None:
        return verdict
    return msgspec.structs.replace(
        verdict, evidence=[*verdict.evidence[:1], said, *verdict.evidence[1:]]
    )


def _shared(results: Sequence[SiteResult], routes: Routes) -> Evidence | None:
    off: list[set[int]] = []
    fine: list[set[int]] = []
    for result in results:
        ratio, experts = routes.found[_key(result)]
        for value, chosen in zip(ratio.tolist(), experts.tolist(), strict=True):
            if value != value:
                continue  # not judged
            (off if value > (result.limit or 0.0) else fine).append(set(chosen))
    if not off or not fine:
        return None
    shared = set.intersection(*off)
    # an expert that most tokens go to is shared by whatever is wrong
    named = sorted(e for e in shared if sum(e in chosen for chosen in fine) <= len(off) // 2)
    if not named:
        return None
    there = sum(any(e in chosen for e in named) for chosen in fine)
    tokens = "token" if len(off) == 1 else f"{len(off)} tokens"
    all_ = "" if len(off) == 1 else "all "
    text = f"the {tokens} beyond the limit {all_}went to expert" + (
        f" {named[0]}" if len(named) == 1 else f"s {', '.join(map(str, named))}"
    )
    text += f"; of the {len(fine)} that are fine, {there or 'none'} did"
    return Evidence(text=text, values={"num_tokens": len(off), "num_fine": there})


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

"""Drift: the free run ends farther off than its parts explain, though none is beyond its limit.

It shows in the last block's output, and, with a truth, in the tokens: one flips over a gap
that rounding does not bridge, or their distributions are farther apart than it explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from divergence.compare.figures import figure
from divergence.compare.flips import token_fault
from divergence.compare.result import Evidence, SiteResult, TokensResult
from divergence.compare.units import order_of
from divergence.numerics.floor import Thresholds

__all__ = ["Drift", "find_drift"]


@dataclass(frozen=True, slots=True)
class Drift:
    """``side``: the farther from the truth, where there is one."""

    summary: str
    evidence: Evidence
    side: str | None = None


def find_drift(
    sites: Sequence[SiteResult],
    thresholds: Thresholds,
    tokens: TokensResult | None = None,
    *,
    two_dtypes: bool = False,
) -> Drift | None:
    """With a truth: one side's free run is much farther from it than the other's, or the tokens
    tell that rounding does not explain them. Without, and where the runs are of ``two_dtypes``, so
    that one is farther off by rounding: the error at the end is more than the blocks may make
    together."""
    free = [
        s
        for s in sites
        if s.pass_ == "free" and s.role == "block" and s.site.endswith(":out") and s.step == 0
    ]
    for sample in sorted({site.sample for site in free}):
        mine = sorted(
            (s for s in free if s.sample == sample and s.rel_l2 is not None), key=order_of
        )
        if len(mine) < 2:
            continue
        by_truth = mine[-1].truth is not None and not two_dtypes
        found = (_against_truth if by_truth else _against_floors)(mine, thresholds)
        if found is not None:
            return found
    return _in_tokens(tokens)


def _in_tokens(tokens: TokensResult | None) -> Drift | None:
    found = token_fault(tokens)
    if found is None or tokens is None:
        return None
    what, evidence = found
    farther = {"reference": "candidate", "candidate": "reference", None: None}[tokens.floor_side]
    return Drift(
        summary=f"no single block is beyond its limit, but {what}", evidence=evidence, side=farther
    )


def _against_truth(mine: list[SiteResult], thresholds: Thresholds) -> Drift | None:
    last = mine[-1]
    assert last.truth is not None
    w, limit = last.truth.w_median, thresholds.truth_drift
    if 1 / limit <= w <= limit:
        return None
    side = "candidate" if w > limit else "reference"
    times = w if w > limit else 1 / max(w, 1e-300)
    return Drift(
        summary=f"no single block is beyond its limit, but the {side}'s free run ends "
        f"{figure(times)} × as far from the truth as the other's, at {last.site}",
        evidence=Evidence(text=f"free pass, sample {last.sample}", values={"w": w, "limit": limit}),
        side=side,
    )


def _against_floors(mine: list[SiteResult], thresholds: Thresholds) -> Drift | None:
    """What the blocks make adds as squares where it is rounding; ``drift`` leaves room for what
    they make of each other's."""
    last = mine[-1]
    judged = [site for site in mine if site.floor is not None]
    allowed = math.sqrt(sum(site.floor**2 for site in judged))
    ratio = last.token_rel_l2_median / allowed if allowed else 0.0
    if ratio <= thresholds.drift:
        return None
    return Drift(
        summary=f"no single block is beyond the floor, but the error grows to "
        f"{last.token_rel_l2_median:.1e} at {last.site}, {figure(ratio)} × what the blocks "
        "make together",
        evidence=Evidence(text=f"free pass, sample {last.sample}", values={"ratio": ratio}),
    )

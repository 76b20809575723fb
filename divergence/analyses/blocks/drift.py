"""Drift: the free run ends farther off than its parts explain, though none is beyond its limit.

Looked at in every sample and step, at the last block's output and behind it up to the logits. There
the blocks' and modules' errors are added as squares (results.sites); what blocks make of each
other's is left room for by ``drift``, what the final norm and the head make of what reaches them by
``free_gain``. With a truth the two sides' distances from it are compared instead, over the rows of
a prefill or for the one row of a decode step. Where a model routes tokens, one row may have gone
to another expert, so that the median of fewer than eight tells nothing; and where that is known of
any, on one side or in the truth, the ends of the free runs do not either. Where activations become
codes, one that flips moves everything behind it farther than rounding does, on either side: what
the free runs end with tells nothing then, and only what lies behind the blocks is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from divergence.comparison.results import SiteResult, allowed_errors, main_path
from divergence.facts import Fact, fact
from divergence.numerics.floor import Thresholds, spread
from divergence.run.site import ROOT, module_of
from divergence.words import Side

__all__ = ["Drift", "find_drift"]


_MIN_ROWS = 8


@dataclass(frozen=True, slots=True)
class Drift:
    """``side``: the farther from the truth, where there is one."""

    headline: Fact
    evidence: Fact
    step: int
    side: Side | None = None


def find_drift(
    sites: Sequence[SiteResult],
    thresholds: Thresholds,
    *,
    two_dtypes: bool = False,
    routed: bool = False,
    coded: bool = False,
    rerouted: Callable[[int, int], bool] = lambda sample, step: False,
) -> Drift | None:
    """With a truth: one side's free run is much farther from it than the other's. Without, and
    where the runs are of ``two_dtypes``, so that one is farther off by rounding: the error at the
    end is more than the blocks may make together. ``routed``: blocks choose experts.
    ``coded``: activations become codes. ``rerouted``: of a prompt and step, did a free run send a
    token to other experts than another did?"""
    allowed = allowed_errors(sites)
    for place, path in sorted(main_path(sites).items()):
        if sum(site.role == "block" for site in path) < 2:
            continue
        last = max(n for n, site in enumerate(path) if site.role == "block")
        for site in path[last:]:
            by_truth = site.truth is not None and not two_dtypes
            if by_truth:
                drift = _against_truth(site, allowed.get(place), thresholds)
            else:
                drift = _against_floors(site, allowed.get(place), thresholds)
            if coded or (routed and _num_rows(site) < _MIN_ROWS):
                drift = None
            if drift is not None and rerouted(site.sample, site.step):
                drift = None
            drift = drift or _behind_blocks(site, thresholds)
            if drift is not None:
                return drift
    return None


def _num_rows(site: SiteResult) -> int:
    return math.prod(site.shape[:-1])


def _against_truth(site: SiteResult, allowed: float | None, thresholds: Thresholds) -> Drift | None:
    """The median token; where there is but one row, as in a decode step, its limit is wider."""
    assert site.truth is not None
    one_row = _num_rows(site) == 1
    least = thresholds.truth_least * (allowed or 0.0)  # two tiny errors make no large ratio
    errors = site.truth.candidate_error + least, site.truth.reference_error + least
    w = errors[0] / errors[1] if errors[1] else site.truth.w_median
    limit = thresholds.truth_drift
    if one_row:
        limit = max(limit, thresholds.truth_token)
    limit *= spread(site.shape[-1] if site.shape else 1)
    if 1 / limit <= w <= limit:
        return None
    side: Side = "candidate" if w > limit else "reference"
    times = w if w > limit else 1 / max(w, 1e-300)
    return Drift(
        headline=fact("blocks.ends_farther", side=side, times=times, site=site.site),
        evidence=_where(site, w=w, limit=limit),
        step=site.step,
        side=side,
    )


def _against_floors(
    site: SiteResult, allowed: float | None, thresholds: Thresholds
) -> Drift | None:
    """What the blocks make adds as squares where it is rounding; ``drift`` leaves room for what
    they make of each other's."""
    if allowed is None or site.token_rel_l2_median is None:
        return None
    limit = thresholds.drift * spread(site.numel)
    if site.role != "block":
        limit *= thresholds.free_gain
    ratio = site.token_rel_l2_median / allowed
    if ratio <= limit:
        return None
    return Drift(
        headline=fact(
            "blocks.grows_to",
            site=site.site,
            rel_l2=site.token_rel_l2_median,
            ratio=ratio,
            behind=site.role != "block",
        ),
        evidence=_where(site, ratio=ratio, limit=limit),
        step=site.step,
    )


def _behind_blocks(site: SiteResult, thresholds: Thresholds) -> Drift | None:
    """A module behind the last block adds more than rounding to what comes in, in the free pass."""
    if site.role != "trunk" or module_of(site.site) == ROOT or site.ratio is None:
        return None
    limit = thresholds.typical * spread(site.numel)
    if site.ratio <= limit:
        return None
    return Drift(
        headline=fact("blocks.grows_behind", site=site.site, ratio=site.ratio),
        evidence=_where(site, ratio=site.ratio, limit=limit),
        step=site.step,
    )


def _where(site: SiteResult, **values: Any) -> Fact:
    return fact("blocks.in_free_pass", sample=site.sample, step=site.step, site=site.site, **values)

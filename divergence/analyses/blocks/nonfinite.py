"""Nan and inf: the first place where a result is no number, and which side it is on.

Two sides agree at an element where both are finite, both nan, or both the same infinity
(numerics.pairs.sums): nan at other places, or +inf against -inf, is a difference although the
counts are equal. Where both agree, a result is still no result: nan, +inf, or -inf in a block's
output or input, is a verdict on both sides, however equal the bits are.

Masks hold -inf by right, equal on both sides or against a number that means the same; so may
logits (a token that must not be chosen) and what is inside a block. A nan inside a block counts
where it comes out of it: rows of padding may be nan inside.

The first place is the earliest in execution order, in whichever pass: a nan that is made between
blocks shows in the free pass alone, and one that is made in a block shows in both at one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from divergence.comparison.analysis import Measured
from divergence.comparison.results import Finding, NonfiniteCount, SiteResult, onset_at, order_of
from divergence.facts import Fact, fact
from divergence.run.contents import is_mask
from divergence.run.site import module_of
from divergence.words import Side, SideOrBoth

__all__ = ["find_nonfinite"]


def find_nonfinite(measured: Measured) -> Finding | None:
    """The first such place, where there is one."""
    sites = [site for site in measured.sites if site.nonfinite is not None]
    if not sites:
        return None
    free = {(s.sample, s.step, s.site): s.order for s in measured.sites if s.pass_ == "free"}

    def place(site: SiteResult) -> tuple[int, int, int, bool]:
        order = free.get((site.sample, site.step, site.site), site.order)
        return site.sample, site.step, order, site.pass_ != "anchored"

    apart = [site for site in sites if _num_apart(site)]
    shared = _shared(sites)
    candidates = [site for site in (*apart, *shared) if site.pass_ != "escalated"] or apart
    if not candidates:
        return None
    first = min(candidates, key=place)
    counts = first.nonfinite
    assert counts is not None
    side, what = _shared_by(first, counts) if first in shared else _unlike(first, counts)
    headline = [what]
    num_prompts = len(measured.reference.manifest.tokens.group_of(first.sample))
    if 0 < len(counts.prompts) < num_prompts:
        prompts = sorted(counts.prompts)
        some = fact("some", what="prompt", numbers=prompts, total=num_prompts, alone=False)
        headline.append(fact("blocks.in_prompts", prompts=some))
    onset = onset_at(first)
    if counts.sample is not None:
        onset = replace(onset, sample=counts.sample, position=counts.position)
    flagged = [site for site in apart if site.pass_ == first.pass_]
    return Finding(
        claim="nonfinite",
        kind="nonfinite",
        headline=headline,
        onset=onset,
        place=order_of(first),
        equal_inputs=first.pass_ == "anchored",
        flags=[site.key for site in (*flagged, first)],
        side=side,
        evidence=[_counts(first, counts)],
        commands=[
            *(measured.advice.descent() if measured.anchored else []),
            *measured.advice.look_at(first.site),
        ],
    )


def _num_apart(site: SiteResult) -> int:
    """Elements at which the two sides do not agree."""
    counts = site.nonfinite
    if counts is None:
        return 0
    return counts.differ - (counts.mask_alike if is_mask(site.site) else 0)


def _shared(sites: Sequence[SiteResult]) -> list[SiteResult]:
    """Where both sides have what no block should hand on."""
    without_result = [site for site in sites if not _num_apart(site) and _is_no_result(site)]
    outer = {
        (s.pass_, s.sample, s.step, s.block) for s in without_result if s.role in ("block", "trunk")
    }
    return [s for s in without_result if (s.pass_, s.sample, s.step, s.block) in outer]


def _is_no_result(site: SiteResult) -> bool:
    counts = site.nonfinite
    if counts is None:
        return False
    if counts.reference_nan and counts.candidate_nan:
        return True
    if is_mask(site.site):
        return False
    if counts.reference_inf > counts.reference_neginf:
        return True
    main = site.site == f"{module_of(site.site)}:out" or site.site == f"{module_of(site.site)}:in"
    return site.role == "block" and main and counts.reference_neginf > 0


def _shared_by(site: SiteResult, counts: NonfiniteCount) -> tuple[SideOrBoth | None, Fact]:
    what = _numbers(counts.reference_nan, counts.reference_inf)
    return "both", fact("blocks.nonfinite_shared", what=what, site=site.site)


def _unlike(site: SiteResult, counts: NonfiniteCount) -> tuple[SideOrBoth | None, Fact]:
    alone = counts.reference_alone, counts.candidate_alone
    if all(alone):
        return "both", fact("blocks.nonfinite_apart", site=site.site)
    if not any(alone):
        return None, fact("blocks.nonfinite_other_kind", site=site.site)
    side: Side = "candidate" if alone[1] else "reference"
    mine = counts.candidate_nan, counts.candidate_inf
    other = counts.reference_nan, counts.reference_inf
    if side == "reference":
        mine, other = other, mine
    return side, fact(
        "blocks.nonfinite_alone", what=_numbers(*mine), side=side, site=site.site, fewer=any(other)
    )


def _numbers(num_nan: int, num_inf: int) -> list[Fact]:
    counts = ((num_nan, "nan"), (num_inf, "inf"))
    return [fact("blocks.num_nonfinite", num=num, what=what) for num, what in counts if num]


def _counts(site: SiteResult, counts: NonfiniteCount) -> Fact:
    return fact(
        "blocks.nonfinite_counts",
        site=site.site,
        num_elements=site.numel,
        reference_nan=counts.reference_nan,
        reference_inf=counts.reference_inf,
        reference_neginf=counts.reference_neginf,
        candidate_nan=counts.candidate_nan,
        candidate_inf=counts.candidate_inf,
        candidate_neginf=counts.candidate_neginf,
        num_apart=_num_apart(site),
    )

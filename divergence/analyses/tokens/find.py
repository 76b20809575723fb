"""Tokens: agreement of what was generated, and flips that rounding does not explain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.limits import TIE
from divergence.comparison.results import Finding, SiteResult, TokenDifference, TokensResult
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS
from divergence.words import other_side


def find(measured: Measured) -> AnalysisResult:
    """Find, with a truth, where a token flips over a gap that rounding does not bridge, or the
    distributions are farther apart than it explains."""
    tokens = _widened(measured.tokens, measured.sites)
    return AnalysisResult(findings=findings_of(tokens), parts={"tokens": tokens})


def _widened(tokens: TokensResult | None, sites: Sequence[SiteResult]) -> TokensResult | None:
    """Widen the limit of the KL by what the blocks themselves explain: where one side's kernels are
    W times less exact in the middle block, within its limit, the two errors' squares are to each
    other as 1 and W², and so is what the head makes of them."""
    if tokens is None or tokens.kl_limit is None or tokens.floor_side is None:
        return tokens
    blocks = [
        s.truth.w_median
        for s in sites
        if s.truth and s.role == "block" and s.pass_ == "anchored" and not s.identical
    ]
    blocks = [w if tokens.floor_side == "reference" else 1 / max(w, 1e-300) for w in blocks]
    usual = statistics.median(blocks) if blocks else 1.0
    explained = (1 + min(max(1.0, usual), THRESHOLDS.truth_systematic) ** 2) / 2
    return msgspec.structs.replace(tokens, kl_limit=tokens.kl_limit * explained)


def findings_of(tokens: TokensResult | None) -> list[Finding]:
    if tokens is None:
        return [Finding(claim="context", role="context", evidence=[])]
    first = tokens.first_difference
    evidence = [] if first is None else [_flip_evidence(first)]
    faults = [flip for flip in tokens.differences if flip.judgement == "fault"]
    if faults and faults[0] is not first:
        evidence.append(_flip_evidence(faults[0], later=True))
    ratio, limit = tokens.kl_ratio, tokens.kl_limit
    far = ratio is not None and limit is not None and ratio > limit
    if far:  # farther apart than the floor explains
        kl = fact(
            "tokens.kl",
            mean=tokens.kl_mean,
            p99=tokens.kl_p99,
            side=tokens.floor_side,
            floor_mean=tokens.floor_kl_mean,
            floor_p99=tokens.floor_kl_p99,
            ratio=ratio,
            limit=limit,
        )
        evidence.append(kl)
    findings = [Finding(claim="context", role="context", evidence=evidence)]
    # of two sides the one whose distance is not the floor
    farther = None if tokens.floor_side is None else other_side(tokens.floor_side)

    def drift(
        headline: Fact, evidence: Fact, places: list[tuple[int, int]], step: int | None = None
    ) -> Finding:
        return Finding(
            claim="drift",
            kind="drift",
            headline=[headline],
            step=step,
            accumulated_at=places,
            rests_on=[check("anchored", False, fact("tokens.seen_in_free_run"))],
            side=farther,
            evidence=[evidence],
        )

    if faults:
        fault = faults[0]
        headline = fact("tokens.flips", sample=fault.sample, step=fault.step, z=fault.z)
        spread = all(flip.z_farther is not None and flip.z_farther <= TIE for flip in faults)
        places = [(flip.sample, flip.step) for flip in faults] if spread else []
        findings.append(drift(headline, _flip_evidence(fault), places, fault.step))
    if far:
        headline = fact("tokens.far_apart", ratio=ratio)
        findings.append(drift(headline, evidence[-1], tokens.kl_places))
    return findings


def _flip_evidence(flip: TokenDifference, *, later: bool = False) -> Fact:
    """One flip. ``later``: not the first, but the first that is no tie."""
    sizes: list[Fact] = []
    if flip.margin is not None:
        sizes.append(fact("tokens.margin", margin=flip.margin))
    if flip.z is not None:
        sizes.append(fact("tokens.deviations", z=flip.z, of=flip.z_of or "difference"))
    return fact(
        "tokens.flip",
        later=later,
        sample=flip.sample,
        step=flip.step,
        sizes=sizes,
        unjudged=flip.judgement is None and flip.z_of in ("difference", "model"),
        judgement=flip.judgement,
        truth_margin=flip.truth_margin,
    )

"""Tokens: agreement of what was generated, and flips that rounding does not explain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from divergence.analyses.tokens.measure import TIE
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.results import Finding, SiteResult, TokenDifference, TokensResult
from divergence.facts import Fact, fact
from divergence.numerics.floor import THRESHOLDS
from divergence.words import Side


def find(measured: Measured) -> AnalysisResult:
    """With a truth it is told where a token flips over a gap that rounding does not bridge, or the
    distributions are farther apart than it explains."""
    tokens = _widened(measured.tokens, measured.sites)
    return AnalysisResult(findings=findings_of(tokens), parts={"tokens": tokens})


def _widened(tokens: TokensResult | None, sites: Sequence[SiteResult]) -> TokensResult | None:
    """With the limit of the KL that the blocks themselves explain: where one side's kernels are W
    times less exact in the middle block, within its limit, the two errors' squares are to each
    other as 1 and W², and so is what the head makes of them."""
    if tokens is None or tokens.kl_limit is None or tokens.floor_side is None:
        return tokens
    blocks = [s.truth.w_median for s in sites if s.truth and s.role == "block"
              and s.pass_ == "anchored" and not s.identical]  # fmt: skip
    blocks = [w if tokens.floor_side == "reference" else 1 / max(w, 1e-300) for w in blocks]
    usual = statistics.median(blocks) if blocks else 1.0
    explained = (1 + min(max(1.0, usual), THRESHOLDS.truth_systematic) ** 2) / 2
    return msgspec.structs.replace(tokens, kl_limit=tokens.kl_limit * explained)


def findings_of(tokens: TokensResult | None) -> list[Finding]:
    """What is to be said of the tokens, and whether that is a fault."""
    findings = [Finding(claim="context", role="context", evidence=_token_evidence(tokens))]
    if tokens is None:
        return findings
    farther: Side | None = None  # of two sides the one whose distance is not the floor
    if tokens.floor_side is not None:
        farther = "candidate" if tokens.floor_side == "reference" else "reference"

    def drift(
        headline: Fact, evidence: Fact, places: list[tuple[int, int]], step: int | None = None
    ) -> Finding:
        return Finding(
            claim="drift",
            kind="drift",
            headline=[headline],
            rests_on=[check("anchored", False, fact("tokens.seen_in_free_run"))],
            step=step,
            accumulated_at=places,
            side=farther,
            evidence=[evidence],
        )

    faults = [flip for flip in tokens.differences if flip.judgement == "fault"]
    if faults:
        first = faults[0]
        headline = fact("tokens.flips", sample=first.sample, step=first.step, z=first.z)
        spread = all(flip.z_farther is not None and flip.z_farther <= TIE for flip in faults)
        places = [(flip.sample, flip.step) for flip in faults] if spread else []
        findings.append(drift(headline, _flip_evidence(first), places, first.step))
    if _beyond_kl(tokens):
        headline = fact("tokens.far_apart", ratio=tokens.kl_ratio)
        findings.append(drift(headline, _kl_evidence(tokens)[0], tokens.kl_places))
    return findings


def _beyond_kl(tokens: TokensResult) -> bool:
    """Whether the distributions are farther apart than the floor explains."""
    if tokens.kl_ratio is None or tokens.kl_limit is None:
        return False
    return tokens.kl_ratio > tokens.kl_limit


def _token_evidence(tokens: TokensResult | None) -> list[Fact]:
    """The first flip, and the distributions where they are beyond their limit."""
    if tokens is None:
        return []
    first = tokens.first_difference
    evidence = [] if first is None else [_flip_evidence(first)]
    faults = [flip for flip in tokens.differences if flip.judgement == "fault"]
    if faults and faults[0] is not first:
        evidence.append(_flip_evidence(faults[0], later=True))
    return evidence + (_kl_evidence(tokens) if _beyond_kl(tokens) else [])


def _flip_evidence(flip: TokenDifference, *, later: bool = False) -> Fact:
    """One flip. ``later``: not the first, but the first that is no tie."""
    sizes: list[Fact] = []
    if flip.margin is not None:
        sizes.append(fact("tokens.margin", margin=flip.margin))
    if flip.z is not None:
        sizes.append(fact("tokens.deviations", z=flip.z, of=flip.z_of or "difference"))
    unjudged = flip.judgement is None and flip.z_of in ("difference", "model")
    return fact(
        "tokens.flip",
        later=later,
        sample=flip.sample,
        step=flip.step,
        unjudged=unjudged,
        judgement=flip.judgement,
        sizes=sizes,
        truth_margin=flip.truth_margin,
    )


def _kl_evidence(tokens: TokensResult) -> list[Fact]:
    """The distributions; nothing where there is no floor."""
    if tokens.kl_ratio is None or tokens.kl_limit is None or tokens.kl_mean is None:
        return []
    return [
        fact(
            "tokens.kl",
            mean=tokens.kl_mean,
            p99=tokens.kl_p99,
            side=tokens.floor_side,
            floor_mean=tokens.floor_kl_mean,
            floor_p99=tokens.floor_kl_p99,
            ratio=tokens.kl_ratio,
            limit=tokens.kl_limit,
        )
    ]

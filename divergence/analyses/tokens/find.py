"""Tokens: agreement of what was generated, and flips that rounding does not explain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.results.findings import Finding
from divergence.comparison.results.sites import SiteResult
from divergence.comparison.results.tokens import TokenDifference, TokensResult
from divergence.facts import Fact, plain
from divergence.numerics.floor import THRESHOLDS
from divergence.words import Side, figure, letter

__all__ = ["find", "findings_of"]


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
    fault = _token_fault(tokens)
    if fault is not None and tokens is not None:
        what, evidence, step = fault
        farther: Side | None = None  # of two sides the one whose distance is not the floor
        if tokens.floor_side is not None:
            farther = "candidate" if tokens.floor_side == "reference" else "reference"
        findings.append(
            Finding(
                claim="drift",
                kind="drift",
                headline=[plain(f"no single block is beyond its limit, but {what}")],
                rests_on=[check("anchored", False, "seen in the tokens of the free run alone")],
                step=step,
                side=farther,
                evidence=[evidence],
            )
        )
    return findings


def _beyond_kl(tokens: TokensResult) -> bool:
    """Whether the distributions are farther apart than the floor explains."""
    if tokens.kl_ratio is None or tokens.kl_limit is None:
        return False
    return tokens.kl_ratio > tokens.kl_limit


def _token_fault(tokens: TokensResult | None) -> tuple[str, Fact, int | None] | None:
    """(what no rounding explains, its evidence, the step of one token), where tokens or
    distributions show it."""
    if tokens is None:
        return None
    fault = next((flip for flip in tokens.differences if flip.judgement == "fault"), None)
    if fault is not None:
        return (
            f"the token at prompt {fault.sample}, step {fault.step} flips over a gap of "
            f"{fault.z:.1f} σ of {_SCALES['floor']}",
            _flip_evidence(fault),
            fault.step,
        )
    if tokens.kl_ratio is not None and _beyond_kl(tokens):
        return (
            f"the distributions of the decided tokens are {figure(tokens.kl_ratio)} × as far "
            "apart as the floor's from the truth",
            _kl_evidence(tokens)[0],
            None,
        )
    return None


def _token_evidence(tokens: TokensResult | None) -> list[Fact]:
    """The first flip, and the distributions where they are beyond their limit."""
    if tokens is None:
        return []
    first = tokens.first_difference
    evidence = [] if first is None else [_flip_evidence(first)]
    faults = [flip for flip in tokens.differences if flip.judgement == "fault"]
    if faults and faults[0] is not first:
        evidence.append(_flip_evidence(faults[0], name="first that is no tie"))
    return evidence + (_kl_evidence(tokens) if _beyond_kl(tokens) else [])


_SCALES = {
    "floor": "the logit error that rounding makes",
    "model": "the logit error that rounding may make",
    "difference": "the logits' difference",
}


def _flip_evidence(flip: TokenDifference, *, name: str = "first different token") -> Fact:
    """One flip in words."""
    what: list[str] = []
    if flip.margin is not None:
        what.append(f"margin {flip.margin:.3g}")
    if flip.z is not None:
        what.append(f"{flip.z:.1f} σ of {_SCALES[flip.z_of or 'difference']}")
    judged = "" if flip.judgement is None else f", a {flip.judgement}"
    if flip.judgement is None and flip.z_of in ("difference", "model"):
        judged = ", not judged"
    values = {key: value for key in ("margin", "truth_margin", "z")
              if (value := getattr(flip, key)) is not None}  # fmt: skip
    return plain(
        f"{name}: prompt {flip.sample}, step {flip.step}{judged}"
        + (f" ({', '.join(what)})" if what else ""),
        **values,
    )


def _kl_evidence(tokens: TokensResult) -> list[Fact]:
    """The distributions in words; nothing where there is no floor."""
    if tokens.kl_ratio is None or tokens.kl_limit is None or tokens.kl_mean is None:
        return []
    return [
        plain(
            f"KL of the decided tokens: mean {tokens.kl_mean:.2e}, p99 {tokens.kl_p99:.2e} "
            f"nats between the sides; {letter(tokens.floor_side)}'s from the truth: mean "
            f"{tokens.floor_kl_mean:.2e}, p99 {tokens.floor_kl_p99:.2e}; "
            f"{figure(tokens.kl_ratio)} × (limit {tokens.kl_limit:.1f})",
            ratio=tokens.kl_ratio,
            limit=tokens.kl_limit,
        )
    ]

"""Tokens: agreement of what was generated, and flips that rounding does not explain."""

from __future__ import annotations

from divergence.analyses.tokens.flips import token_evidence, token_fault
from divergence.comparison.answer import Answer
from divergence.comparison.decide import check
from divergence.comparison.measured import Measured
from divergence.comparison.results.findings import Finding
from divergence.comparison.results.tokens import TokensResult
from divergence.words import Side

__all__ = ["find", "findings_of"]


def find(measured: Measured) -> Answer:
    """With a truth it is told where a token flips over a gap that rounding does not bridge, or the
    distributions are farther apart than it explains."""
    return Answer(findings=findings_of(measured.tokens), parts={"tokens": measured.tokens})


def findings_of(tokens: TokensResult | None) -> list[Finding]:
    """What is to be said of the tokens, and whether that is a fault."""
    findings = [Finding(claim="context", role="context", evidence=token_evidence(tokens))]
    fault = token_fault(tokens)
    if fault is not None and tokens is not None:
        what, evidence = fault
        farther: dict[Side | None, Side | None] = {
            "reference": "candidate",
            "candidate": "reference",
            None: None,
        }
        findings.append(
            Finding(
                claim="drift",
                kind="drift",
                summary=f"no single block is beyond its limit, but {what}",
                rests_on=[check("anchored", False, "seen in the tokens of the free run alone")],
                side=farther[tokens.floor_side],
                evidence=[evidence],
            )
        )
    return findings

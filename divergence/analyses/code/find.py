"""Code: what the onset's block runs otherwise, and whose truth it is that names a side.

A truth has the reference's code. Where the two sides' own code differs, it cannot tell whose is
right: ``why_no_side`` says so, unless a forward was replaced on the candidate alone. And where
nothing is known of the code, the reference is not blamed by a truth with which the candidate
agrees: so it looks where the candidate's code made it.
"""

from __future__ import annotations

from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.preflight import (
    code_differences,
    difference_texts,
    numbers_in_doubt,
    numbers_stated,
    other_code,
    replaced_in,
    truth_tells,
)
from divergence.comparison.result import Check, Finding, Verdict
from divergence.facts import Fact, fact
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.site import module_of

_MOST = 3
BY_CONFIGURATION = check(
    "truth_of_reference_code", False, fact("code.by_configuration"), made=False
)
"""The check that no truth can make of a number that both configurations tell."""


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Other code in the onset's block; and where the truth cannot tell the side, why."""
    a, b = measured.reference.manifest, measured.candidate.manifest
    findings = []
    if verdict.onset is not None:
        evidence = code_evidence(a, b, verdict.onset.block)
        # of equal values, a kernel that takes parameters for contiguous reads others
        module = verdict.onset.block or module_of(verdict.onset.site)
        digests_a, digests_b = a.model.parameters, b.model.parameters
        evidence += [
            fact(
                "code.layout",
                parameter=name,
                reference=digests_a[name].strides,
                candidate=digests_b[name].strides,
            )
            for name in sorted(digests_a.keys() & digests_b.keys())
            if name.startswith(f"{module}.") and digests_a[name].strides != digests_b[name].strides
        ][:_MOST]
        findings.append(Finding(claim="explanation", role="explains", evidence=evidence))
    reason = None
    told_by = measured.floor if measured.truth is None else measured.truth.run
    if told_by is not None:
        reason = why_no_side(verdict, told_by, a, b)
    if reason is not None:
        findings.append(
            Finding(
                claim="side_not_told",
                role="abstains",
                rests_on=[not_told(reason)],
                evidence=[reason],
            )
        )
    elif told_by is not None and verdict.side == "candidate":
        block = None if verdict.onset is None else verdict.onset.block
        if numbers := numbers_stated(a, b, block):
            evidence = [fact("code.numbers_stated", numbers=numbers)]
            findings.append(
                Finding(
                    claim="explanation",
                    role="explains",
                    rests_on=[BY_CONFIGURATION],
                    evidence=evidence,
                )
            )
    return findings


def not_told(reason: Fact) -> Check:
    """The check that no truth can make, for this reason."""
    lacking = fact("code.truth_of_a", because=reason.code.removeprefix("code."))
    return check("truth_of_reference_code", False, lacking, made=False)


def code_evidence(a: Manifest, b: Manifest, block: str | None) -> list[Fact]:
    """Say what to know of a verdict whose onset lies in ``block``: does it run other code there?

    Nothing where the code is the same, or was not recorded. Without a block what was replaced
    anywhere is said.
    """
    differences = code_differences(a, b)
    if block is None:
        deliberate = [difference for difference in differences if difference.deliberate]
        return [fact("code.other", what=difference.text) for difference in deliberate[:_MOST]]
    texts = difference_texts([each for each in differences if each.concerns(block)], a, b)
    return [fact("code.other_in_block", what=text) for text in texts[:_MOST]]


def why_no_side(verdict: Verdict, truth: Run, a: Manifest, b: Manifest) -> Fact | None:
    """Say why the truth cannot tell the side that the verdict names; None where it can."""
    if verdict.side == "reference" and verdict.kind in ("localized", "systematic", "drift"):
        own = a if truth.manifest.like != b.id else b
        if own.model.code and truth.manifest.model.code:  # held against each other
            return None
        return fact("code.truth_like_b")
    if verdict.side != "candidate":
        return None
    return doubt_of_code(a, b, None if verdict.onset is None else verdict.onset.block)


def doubt_of_code(a: Manifest, b: Manifest, block: str | None) -> Fact | None:
    """Say why a truth of A's code does not blame B where ``block`` is off; None where it does."""
    if truth_tells(a, b, block):
        return None
    numbers = numbers_in_doubt(a, b, block)
    if numbers:
        return fact("code.numbers_in_doubt", numbers=numbers)
    classes, replaced = other_code(a, b, block)[:4], replaced_in(a, block)[:3]
    return fact("code.side_in_doubt", classes=classes, replaced=replaced)

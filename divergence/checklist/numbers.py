"""The rungs that rest on numbers: prefill, decode, sampling, ranks. All of it is compare's.

A rung explains what is below it only where it is the verdict itself. What stands beside the verdict
(another fault, in the other phase) fails without explaining.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from divergence.checklist.pair import CheckedPair, both, choices_off, not_recorded
from divergence.checklist.result import RungState
from divergence.comparison.decide import tells
from divergence.comparison.results import Claim, Finding, SiteResult
from divergence.facts import Fact, fact, has

__all__ = ["Said", "phase", "ranks", "sampling"]

Said = tuple[RungState, Sequence[Fact], bool]
"""(state, evidence, does it explain the rungs below)."""

_NUMBERS: tuple[Claim, ...] = (
    "nonfinite", "integers_differ", "codes_wrong", "error_made_here", "error_everywhere_of_kind",
    "error_below_floor", "error_between", "operator_off", "drift",
)  # fmt: skip
_SAMPLED: Claim = "not_the_largest_logit"


def phase(pair: CheckedPair, *, decode: bool) -> Said:
    """The first forward of each prompt, or those of one token each."""
    sites, verdict = pair.sites(decode=decode), pair.verdict
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert verdict is not None
    if pair.diverged:
        told = _told_by_ranks(pair)
        made = [
            finding
            for finding in pair.claims(*_NUMBERS)
            if (step := _step_of(finding)) is not None and (step > 0) == decode
        ]
        step = _step_of_verdict(pair)
        if step is not None and (step > 0) == decode and (made or told is None):
            return "fail", verdict.headline, told is None
        shown = _shown_by_ranks(pair)
        beyond = [site for site in sites if site.flagged and site.key not in shown]
        if made or beyond:
            if made:
                return "fail", made[0].headline, False
            return _say("fail", "beyond_too", site=beyond[0].site)
        if verdict.kind == "drift" and step is None:
            return _say("unknown", "forward_not_told", what=verdict.headline)
        if verdict.kind == "nonfinite" and not all(site.identical for site in sites):
            return _say("unknown", "beside_nonfinite")
    if not sites:
        return _say("unknown", "nothing_of_phase", decode=decode)
    if unmeasured := [site for site in sites if site.is_unmeasured]:
        return _say("unknown", "phase_unmeasured", num=len(unmeasured), total=len(sites))
    return "pass", [_within(sites)], False


def _say(state: RungState, code: str, **values: Any) -> Said:
    """One fact, which explains nothing below."""
    return state, [fact(f"checklist.{code}", **values)], False


def _within(sites: list[SiteResult]) -> Fact:
    """What was compared, where none of it is beyond rounding."""
    num_equal = sum(site.identical for site in sites)
    if num_equal == len(sites):
        return fact("checklist.all_equal", num=num_equal)
    judged = [site for site in sites if site.limit_usage is not None]
    free = all(site.pass_ == "free" for site in judged)
    site, usage = None, None
    if not free:
        worst = max(judged, key=lambda site: site.limit_usage or 0.0)
        if (worst.limit_usage or 0.0) <= 1:
            site, usage = worst.site, 100 * (worst.limit_usage or 0.0)
    return fact(
        "checklist.within", total=len(sites), num_equal=num_equal, free=free, site=site, usage=usage
    )


def _step_of(finding: Finding) -> int | None:
    return finding.step if finding.onset is None else finding.onset.step


def _step_of_verdict(pair: CheckedPair) -> int | None:
    """The forward that the verdict names; None where it names none, or sampling."""
    verdict = pair.verdict
    if verdict is None or pair.sampled:
        return None
    if verdict.onset is not None:
        return verdict.onset.step
    steps = [claim.step for claim in pair.claims("drift") if tells(verdict, claim)]
    return steps[0] if steps else None


def sampling(pair: CheckedPair) -> Said:
    """Does each token follow from its own logits?"""
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    if sampled := pair.claims(_SAMPLED):
        return "fail", choices_off(sampled[0]), pair.is_verdict(sampled[0])
    tokens = pair.report.tokens
    if tokens is None or not tokens.num_tokens:
        if pair.report.reference.generates or pair.report.candidate.generates:
            return _say("unknown", "no_common_token")
        return _say("pass", "chooses_none")
    flips = tokens.differences
    if not flips:
        return _say(
            "pass", "choices_equal", forced=tokens.forced, num_equal=tokens.num_equal,
            num_tokens=tokens.num_tokens, num_missing=tokens.num_missing,
        )  # fmt: skip
    first = flips[0]
    kept = not any(None in (flip.margin, flip.candidate_margin) for flip in flips)
    return _say(
        "pass" if kept else "unknown", "choices_differ", forced=tokens.forced, num=len(flips),
        num_tokens=tokens.num_tokens, sample=first.sample, step=first.step, kept=kept,
        judgement=first.judgement,
    )  # fmt: skip


def ranks(pair: CheckedPair) -> Said:
    """Do the processes of a run agree on what several of them hold?"""
    processes = both(pair, lambda manifest: manifest.processes)
    if pair.untold:
        return "unknown", [not_recorded(pair.untold, "processes")], False
    if all(manifest.mesh is None for manifest in pair.manifests):
        return _say("pass", "processes", processes=processes, copies=None)
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    if (told := _told_by_ranks(pair)) is not None:
        return "fail", told.evidence[:1], True
    if apart := pair.claims("replicas_disagree"):
        return "fail", apart[0].evidence[:1], False
    replicas = pair.report.replicas
    num_held = sum(replica.num_tensors for replica in replicas)
    if not num_held:
        return _say("unknown", "processes", processes=processes, copies="lone")
    copies = "order" if any(replica.num_different for replica in replicas) else "agree"
    return _say("pass", "processes", processes=processes, copies=copies, num=num_held)


def _told_by_ranks(pair: CheckedPair) -> Finding | None:
    """What makes a rank the verdict: copies that disagree there, or its own part that is off."""
    if pair.report is None:
        return None
    verdict = pair.report.verdict
    for finding in pair.claims("replicas_disagree"):
        inside = all(item in verdict.headline for item in finding.addition)
        if pair.is_verdict(finding) or (finding.addition and inside):
            return finding
    for finding in pair.report.findings:
        if finding.claim == "explanation" and has(finding.addition, "rank_share"):
            return finding
    return None


def _shown_by_ranks(pair: CheckedPair) -> set[object]:
    """The sites that are flagged since ranks disagree there."""
    return {key for claim in pair.claims("replicas_disagree") for key in claim.flags}

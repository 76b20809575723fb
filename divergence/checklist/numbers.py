"""The rungs that rest on numbers: prefill, decode, sampling, ranks. All of it is compare's.

A rung explains what is below it only where it is the verdict itself. What stands beside the verdict
(another fault, in the other phase) fails without explaining.
"""

from __future__ import annotations

from divergence.checklist.pair import CheckedPair, both, sampling_text
from divergence.checklist.result import RungState
from divergence.comparison.decide import tells
from divergence.comparison.results.findings import Claim, Finding
from divergence.comparison.results.sites import SiteResult
from divergence.facts import has
from divergence.layout import count

__all__ = ["Said", "phase", "ranks", "sampling"]

Said = tuple[RungState, str, bool]
"""(state, evidence, does it explain the rungs below)."""

_NUMBERS: tuple[Claim, ...] = (
    "nonfinite", "integers_differ", "codes_wrong", "error_made_here", "error_everywhere_of_kind",
    "error_below_floor", "error_between", "operator_off", "drift",
)  # fmt: skip
_SAMPLED: Claim = "not_the_largest_logit"


def phase(pair: CheckedPair, *, decode: bool) -> Said:
    """The first forward of each prompt, or those of one token each."""
    sites, verdict = pair.sites(decode=decode), pair.verdict
    what = "a decode step" if decode else "the prefill"
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
            return "fail", verdict.summary, told is None
        shown = _shown_by_ranks(pair)
        beyond = [site for site in sites if site.flagged and site.key not in shown]
        if made or beyond:
            text = made[0].summary if made else f"beyond the limit too: {beyond[0].site}"
            return "fail", text, False
        if verdict.kind == "drift" and step is None:
            return "unknown", f"{verdict.summary}; in which forward is not told", False
        if verdict.kind == "nonfinite" and not all(site.identical for site in sites):
            return "unknown", "beside nan and inf no difference is judged", False
    if not sites:
        return "unknown", f"no tensor of {what} was compared", False
    if unmeasured := [site for site in sites if site.is_unmeasured]:
        text = f"{len(unmeasured)} of {len(sites)} tensors differ, by how much is not known"
        return "unknown", text, False
    return "pass", _within(sites), False


def _within(sites: list[SiteResult]) -> str:
    """What was compared, where none of it is beyond rounding."""
    num_equal = sum(site.identical for site in sites)
    if num_equal == len(sites):
        return f"all {count(len(sites), 'tensor')} equal bit for bit"
    text = f"{len(sites):,} tensors, {num_equal:,} equal bit for bit, the rest within rounding"
    judged = [site for site in sites if site.limit_usage is not None]
    if not any(site.pass_ != "free" for site in judged):
        return f"{text} (free runs alone: low confidence)"
    worst = max(judged, key=lambda site: site.limit_usage or 0.0)
    if (used := worst.limit_usage or 0.0) > 1:
        return text
    return f"{text}: at most {100 * used:.0f}% of a limit, at {worst.site}"


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
        return "fail", sampling_text(sampled[0]), pair.is_verdict(sampled[0])
    tokens = pair.report.tokens
    if tokens is None or not tokens.num_tokens:
        if pair.report.reference.generates or pair.report.candidate.generates:
            return "unknown", "no token was generated on both sides", False
        return "pass", "both: the model chooses no token", False
    forced = "A's tokens were fed to B; " if tokens.forced else ""
    flips = tokens.differences
    if not flips:
        text = f"{forced}{tokens.num_equal:,} of {tokens.num_tokens:,} choices are equal"
        missing = f", {tokens.num_missing:,} of A's were not made" if tokens.num_missing else ""
        return "pass", text + missing, False
    first = flips[0]
    where = f"{len(flips)} of {tokens.num_tokens:,} choices differ, first at prompt {first.sample}"
    where = f"{forced}{where}, step {first.step}"
    if any(None in (flip.margin, flip.candidate_margin) for flip in flips):
        return "unknown", f"{where}; the logits that decided were not kept", False
    how = f" ({first.judgement})" if first.judgement else ""
    return "pass", f"{where}{how}; each is the largest of its own side's logits", False


def ranks(pair: CheckedPair) -> Said:
    """Do the processes of a run agree on what several of them hold?"""
    processes = both(pair, lambda manifest: manifest.processes)
    if pair.untold:
        return "unknown", f"{' and '.join(pair.untold)}: processes are not recorded", False
    if all(manifest.mesh is None for manifest in pair.manifests):
        return "pass", processes, False
    if pair.why_unjudged is not None:
        return "unknown", pair.why_unjudged, False
    assert pair.report is not None
    if (told := _told_by_ranks(pair)) is not None:
        return "fail", told.evidence[0].text, True
    if apart := pair.claims("replicas_disagree"):
        return "fail", apart[0].evidence[0].text, False
    replicas = pair.report.replicas
    num_held = sum(replica.num_tensors for replica in replicas)
    if not num_held:
        return "unknown", f"{processes}; no tensor is held by several ranks", False
    if any(replica.num_different for replica in replicas):
        return "pass", f"{processes}; copies differ as adding in another order does", False
    return "pass", f"{processes}; all copies of {num_held:,} tensors agree", False


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

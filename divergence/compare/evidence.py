"""Evidence: what a verdict rests on, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from divergence.compare.blame import Blame
from divergence.compare.figures import figure
from divergence.compare.flips import token_evidence
from divergence.compare.result import Evidence, Onset, PreflightLine, SiteResult, TokensResult
from divergence.compare.units import Unit

__all__ = ["confidence_of", "context", "onset_of", "unanchored_evidence", "unit_evidence"]


def onset_of(site: SiteResult) -> Onset:
    """The place a verdict points at."""
    return Onset(
        site=site.site,
        block=site.block,
        sample=site.sample if site.worst_sample is None else site.worst_sample,
        step=site.step,
        position=site.worst_position,
        pass_=site.pass_,
    )


def confidence_of(unit: Unit) -> str:
    """High for an anchored unit at twice its limit."""
    if unit.pass_ == "free":
        return "low"
    if unit.blame is not None:
        return "high" if unit.blame.share > 2 else "medium"
    ratio, limit = (
        (max(unit.worst, unit.sink), unit.worst_limit)
        if unit.why in ("token", "sink")
        else (unit.typical, unit.limit)
    )
    return "high" if ratio > 2 * limit else "medium"


def unit_evidence(unit: Unit) -> Evidence:
    """Why a unit is flagged."""
    if unit.blame is not None:
        return _blame_evidence(unit, unit.blame)
    worst = unit.first
    if unit.why in ("token", "sink"):
        what, ratio = ("one token", unit.worst)
        if unit.why == "sink":
            what, ratio = ("one sink token", unit.sink)
        return Evidence(
            text=f"{unit.site}: {what}'s error is {figure(ratio)} × the floor "
            f"(limit {unit.worst_limit:.1f}), position {worst.worst_position}",
            values={"ratio": ratio, "limit": unit.worst_limit},
        )
    control = f", its siblings' {unit.control:.2f} ×" if unit.num_siblings else ""
    floor = "the float32 floor" if unit.pass_ == "escalated" else "the floor"
    return Evidence(
        text=f"{unit.site} ({unit.phase}): the typical token's error is {figure(unit.typical)} × "
        f"{floor}{control} (limit {unit.limit:.1f}); rel L2 {worst.rel_l2:.2e}",
        values={"ratio": unit.typical, "control": unit.control, "limit": unit.limit},
    )


_OTHER = {"candidate": "reference", "reference": "candidate"}


def _blame_evidence(unit: Unit, blame: Blame) -> Evidence:
    values = {"value": blame.value, "control": blame.control, "limit": blame.limit}
    truth = unit.first.truth
    if truth is not None:
        values["reference_error"] = truth.reference_error
        values["candidate_error"] = truth.candidate_error
    place = f"{unit.site} ({unit.phase})"
    if blame.why == "both":
        text = (
            f"{place}: both are {figure(blame.value)} × the rounding model away from the truth "
            f"(limit {blame.limit:.1f})"
        )
        return Evidence(text=text, values=values)
    far = f"{place}: the {blame.side} is {{}} as far from the truth as the {_OTHER[blame.side]}"
    held = f"; elsewhere of its kind {blame.control:.2f} × (limit {blame.limit:.1f} ×)"
    if blame.why == "typical" and blame.detail:
        held = f", like {blame.detail} (limit {blame.limit:.1f} ×)"
    times = f"{figure(blame.value)} ×"
    where = f"at step {blame.at.step}" if blame.at.step else "in the prefill"
    text = {
        "typical": far.format(times) + held,
        "step": f"{far.format(times)} {where}, sample {blame.at.sample}{held}",
        "token": f"{far.format(times)} at one token {where}{held}",
        "sink": f"{far.format(times)} at a sink token {where}{held}",
        "channel": f"{far.format(times)} in one channel{held}",
        "gain": f"{place}: {blame.detail} in the {blame.side}, {blame.value:.0f} standard "
        f"deviations off the blocks of its kind (limit {blame.limit:.0f})",
    }[blame.why]
    if truth is not None and blame.why == "typical":
        errors = (truth.reference_error, truth.candidate_error)
        mine, other = errors if blame.side == "reference" else errors[::-1]
        text += f"; median token off by {mine:.2e} and {other:.2e}"
    return Evidence(text=text, values=values)


def unanchored_evidence(steps: list[int]) -> list[Evidence]:
    """Forwards that the anchored pass did not reach are judged less exactly."""
    if not steps:
        return []
    names = ", ".join(map(str, steps[:6])) + (" …" if len(steps) > 6 else "")
    return [Evidence(text=f"not anchored, so judged from free runs: step {names}")]


def context(
    notes: Sequence[str], preflight: Sequence[PreflightLine], tokens: TokensResult | None
) -> list[Evidence]:
    """What the reader must know beside the numbers."""
    found = [Evidence(text=note) for note in notes]
    for line in preflight:
        if line.check == "repeatability" and line.status == "differs":
            found.append(Evidence(text=f"{line.detail}: differences include its own noise"))
    return found + token_evidence(tokens)

"""The verdict: from measured sites to one sentence, or to "undetermined".

Order of questions: nothing compared? other experiment (preflight)? nan or inf on one
side? every bit equal? beyond the floor in the anchored pass (the error was made
there)? without one, beyond the floor in what each block adds to the free pass (low
confidence)? accumulated beyond what the blocks make (drift)? Only then: rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from divergence.compare.advice import Advice
from divergence.compare.result import (
    Evidence,
    Onset,
    PreflightLine,
    SiteResult,
    TokensResult,
    Verdict,
)
from divergence.compare.units import Unit, build_units, flag, order_of
from divergence.numerics.floor import THRESHOLDS, Thresholds

__all__ = ["Case", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything the judge may look at. ``anchored``: pairs of an anchored pass are there;
    ``routed``: blocks with experts; ``advice`` prints commands;
    ``missing``: records without a partner or skipped."""

    sites: Sequence[SiteResult]
    preflight: Sequence[PreflightLine]
    tokens: TokensResult | None
    anchored: bool
    routed: frozenset[str]
    advice: Advice
    missing: int
    notes: Sequence[str] = ()


def judge(case: Case, *, thresholds: Thresholds = THRESHOLDS) -> Verdict:
    """Judge, and set ``flagged`` on the sites that the verdict rests on.

    Where a blocking difference was overridden, it explains whatever is found: confidence is low.
    """
    verdict = _judge(case, thresholds)
    forced = [line.check for line in case.preflight if line.status == "blocking"]
    if not forced:
        return verdict
    return msgspec.structs.replace(
        verdict,
        summary=f"{verdict.summary} (compared by force: other {' and '.join(forced)})",
        confidence="low",
        side=None,
        evidence=[
            Evidence(text=f"other {' and '.join(forced)}, which may explain everything below"),
            *verdict.evidence,
        ],
    )


def _judge(case: Case, thresholds: Thresholds) -> Verdict:
    bad = _nonfinite(case)
    if bad is not None:
        return bad
    if all(site.identical for site in case.sites):
        return _identical(case)
    pass_ = "anchored" if case.anchored else "free"
    units = build_units(case.sites, pass_)
    if case.anchored:  # forwards that no anchor reached are judged as in free runs
        covered = {(s.sample, s.step) for s in case.sites if s.pass_ == "anchored"}
        rest = [s for s in case.sites if (s.sample, s.step) not in covered]
        units += build_units(rest, "free")
        unanchored = sorted({s.step for s in rest})
    else:
        unanchored = []
    flagged = flag(units, routed=case.routed, thresholds=thresholds)
    for unit in units:
        for result in unit.results:
            result.limit = unit.limit
    for unit in flagged:
        for result in unit.results:
            result.flagged = (result.ratio or 0) > unit.limit or (
                unit.why == "token" and (result.ratio_max or 0) > unit.worst_limit
            )
    if flagged:
        return _beyond_floor(case, units, flagged, thresholds)
    drift = _drift(case, thresholds)
    if drift is not None:
        return drift
    return _within_floor(case, units, unanchored)


def _nonfinite(case: Case) -> Verdict | None:
    """The first place where one side has a nan or inf that the other has not."""
    found = [
        site
        for site in case.sites
        if site.nonfinite is not None
        and (site.nonfinite.reference_nan, site.nonfinite.reference_inf)
        != (site.nonfinite.candidate_nan, site.nonfinite.candidate_inf)
    ]
    anchored = [site for site in found if site.pass_ == "anchored"]
    if not found:
        return None
    first = min(anchored or found, key=order_of)
    counts = first.nonfinite
    more_a = counts.reference_nan + counts.reference_inf
    more_b = counts.candidate_nan + counts.candidate_inf
    side = "candidate" if more_b > more_a else "reference"
    nan, inf = (
        (counts.candidate_nan, counts.candidate_inf)
        if side == "candidate"
        else (counts.reference_nan, counts.reference_inf)
    )
    what = " and ".join(f"{count} {name}" for count, name in ((nan, "nan"), (inf, "inf")) if count)
    for site in found:
        site.flagged = site.pass_ == first.pass_
    return Verdict(
        kind="nonfinite",
        summary=f"{what} in the {side} first at {first.site}, where the other side has "
        + ("fewer" if min(more_a, more_b) else "none"),
        onset=_onset(first),
        confidence="high",
        side=side,
        evidence=[
            Evidence(
                text=f"{first.site}: reference {counts.reference_nan} nan and "
                f"{counts.reference_inf} inf, candidate {counts.candidate_nan} nan and "
                f"{counts.candidate_inf} inf among {first.numel} elements",
                values={"reference": more_a, "candidate": more_b},
            )
        ],
        next=case.advice.look_at(first.site),
    )


def _identical(case: Case) -> Verdict:
    partly = "" if not case.missing else f" ({case.missing} tensors had no partner)"
    return Verdict(
        kind="identical",
        summary=f"all {len(case.sites)} compared tensors are equal bit for bit{partly}",
        confidence="high" if not case.missing else "medium",
        side="neither",
    )


def _beyond_floor(
    case: Case, units: list[Unit], flagged: list[Unit], thresholds: Thresholds
) -> Verdict:
    family = _systematic(units, flagged)
    first = min(flagged, key=lambda unit: order_of(unit.first))
    evidence = [_unit_evidence(first)]
    if not case.anchored:
        evidence.append(
            Evidence(
                text="judged from free runs alone: what each block adds to the "
                "error that came in, against a rounding model"
            )
        )
    if family is not None:
        name, members = family
        first = members[0]
        low = min(unit.typical for unit in members)
        evidence = [
            Evidence(
                text=f"{len(members)} of {_siblings(units, first)} {name} are beyond the floor, "
                f"the least by {low:.1f} ×",
                values={"num_flagged": len(members), "least_ratio": low},
            ),
            *evidence[1:],
        ]
        return Verdict(
            kind="systematic",
            summary=f"every {name} differs by more than rounding, from {first.first.site} on: "
            "a kernel or a precision setting, not one layer",
            onset=_onset(first.first),
            confidence=_confidence(first, case),
            evidence=evidence + _context(case),
            next=_next(case, first),
        )
    others = sorted(
        {unit.results[0].block or unit.site for unit in flagged}
        - {first.results[0].block or first.site}
    )
    if others:
        evidence.append(
            Evidence(
                text=f"also beyond the floor: {', '.join(others[:4])}"
                + (f" and {len(others) - 4} more" if len(others) > 4 else "")
            )
        )
    made = "is made at" if case.anchored else "seems to be made at"
    return Verdict(
        kind="localized",
        summary=f"the error {made} {first.first.site}",
        onset=_onset(first.first),
        confidence=_confidence(first, case),
        evidence=evidence + _context(case),
        next=_next(case, first),
    )


def _systematic(units: list[Unit], flagged: list[Unit]) -> tuple[str, list[Unit]] | None:
    """(what, units) where most units of one kind of block are flagged."""
    blocks = [unit for unit in flagged if unit.kind[0] == "block" and unit.why == "typical"]
    for unit in blocks:
        members = [other for other in blocks if other.kind == unit.kind]
        total = _siblings(units, unit)
        if total >= 3 and len(members) > total / 2:
            place = unit.kind[1].removeprefix(".")
            return (f"{place} ({unit.kind[3]})" if place else unit.kind[3]), members
    return None


def _siblings(units: list[Unit], unit: Unit) -> int:
    return sum(other.kind == unit.kind for other in units)


def _drift(case: Case, thresholds: Thresholds) -> Verdict | None:
    """The free run's error at its end, against the sum of what the blocks may make."""
    free = [
        s
        for s in case.sites
        if s.pass_ == "free"
        and s.role == "block"
        and s.site.endswith(":out")
        and s.step == 0
        and s.floor is not None
    ]
    for sample in sorted({site.sample for site in free}):
        mine = sorted((s for s in free if s.sample == sample), key=order_of)
        if len(mine) < 2:
            continue
        last = mine[-1]
        # What the blocks make adds as squares where it is rounding; `drift` leaves room for
        # what they make of each other's.
        allowed = math.sqrt(sum(site.floor**2 for site in mine))
        ratio = last.token_rel_l2_median / allowed if allowed else 0.0
        if ratio > thresholds.drift:
            return Verdict(
                kind="drift",
                summary=f"no single block is beyond the floor, but the error grows to "
                f"{last.token_rel_l2_median:.1e} at {last.site}, {ratio:.1f} × what the blocks "
                "make together",
                onset=None,
                confidence="low",
                evidence=[
                    Evidence(text=f"free pass, sample {sample}", values={"ratio": ratio}),
                    *_context(case),
                ],
                next=_next(case, None),
            )
    return None


def _within_floor(case: Case, units: list[Unit], unanchored: list[int]) -> Verdict:
    judged = [unit for unit in units if unit.results]
    if not judged:
        return Verdict(
            kind="undetermined",
            summary="the runs differ, but nothing that rounds was compared",
            confidence="low",
            evidence=_context(case),
            next=_next(case, None),
        )
    worst = max(judged, key=lambda unit: (unit.typical, unit.worst))
    token = max(judged, key=lambda unit: unit.worst)
    largest = (
        f"largest error of a typical token: {worst.typical:.2f} × the floor, at {worst.site} "
        f"({worst.phase}; limit {worst.limit:.2g})"
        if worst.typical
        else "the typical token is equal bit for bit at every site"
    )
    sure = case.anchored and not unanchored
    return Verdict(
        kind="within_floor",
        summary="the runs differ by no more than rounding explains: "
        + (
            "no block makes an error beyond the floor"
            if sure
            else "no block adds more than rounding explains (judged from free runs)"
        ),
        confidence="medium" if sure else "low",
        evidence=[
            Evidence(
                text=f"{largest}; of any token: {token.worst:.2f} ×, at {token.site} "
                f"(limit {token.worst_limit:.2g})",
                values={"ratio": worst.typical, "limit": worst.limit},
            ),
            *_unanchored(unanchored),
            *_context(case),
        ],
        next=_next(case, None),
    )


def _unanchored(steps: list[int]) -> list[Evidence]:
    """Forwards that the anchored pass did not reach are judged less exactly."""
    if not steps:
        return []
    names = ", ".join(map(str, steps[:6])) + (" …" if len(steps) > 6 else "")
    return [Evidence(text=f"not anchored, so judged from free runs: step {names}")]


def _context(case: Case) -> list[Evidence]:
    """What the reader must know beside the numbers."""
    found = [Evidence(text=note) for note in case.notes]
    for line in case.preflight:
        if line.check == "repeatability" and line.status == "differs":
            found.append(Evidence(text=f"{line.detail}: differences include its own noise"))
    tokens = case.tokens
    if tokens is not None and tokens.first_difference is not None:
        difference = tokens.first_difference
        margin = "" if difference.margin is None else f" (margin {difference.margin:.3g}"
        if margin:
            margin += "" if difference.z is None else f", {difference.z:.1f} σ of the logits' diff"
            margin += ")"
        found.append(
            Evidence(
                text=f"first different token: sample {difference.sample}, "
                f"step {difference.step}{margin}"
            )
        )
    return found


def _unit_evidence(unit: Unit) -> Evidence:
    worst = unit.first
    if unit.why == "token":
        return Evidence(
            text=f"{unit.site}: one token's error is {unit.worst:.1f} × the floor "
            f"(limit {unit.worst_limit:.1f}), position {worst.worst_position}",
            values={"ratio": unit.worst, "limit": unit.worst_limit},
        )
    control = f", its siblings' {unit.control:.2f} ×" if unit.num_siblings else ""
    return Evidence(
        text=f"{unit.site} ({unit.phase}): the typical token's error is {unit.typical:.1f} × "
        f"the floor{control} (limit {unit.limit:.1f}); rel L2 {worst.rel_l2:.2e}",
        values={"ratio": unit.typical, "control": unit.control, "limit": unit.limit},
    )


def _confidence(unit: Unit, case: Case) -> str:
    if unit.pass_ == "free":
        return "low"
    ratio, limit = (
        (unit.worst, unit.worst_limit) if unit.why == "token" else (unit.typical, unit.limit)
    )
    return "high" if ratio > 2 * limit else "medium"


def _onset(site: SiteResult) -> Onset:
    return Onset(
        site=site.site,
        block=site.block,
        sample=site.sample if site.worst_sample is None else site.worst_sample,
        step=site.step,
        position=site.worst_position,
        pass_=site.pass_,
    )


def _next(case: Case, unit: Unit | None) -> list[str]:
    """The command that gives certainty, or goes deeper."""
    if not case.anchored:
        return case.advice.certainty()
    if unit is None or unit.results[0].block is None:
        return [] if unit is None else case.advice.look_at(unit.site)
    block = unit.results[0].block
    if unit.site.partition(":")[0] != block:
        return case.advice.look_at(unit.site)
    return case.advice.into_block(block)

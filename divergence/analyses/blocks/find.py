"""Blocks: is an error made somewhere, in equal inputs, in free runs, or below the dtype's floor?

Asked in this order: nan or inf on one side (then no error can be measured, and nothing else is
asked)? every bit equal? beyond what rounding explains in the anchored pass (the error was made
there), or without one in what each block adds to the free pass? in the escalated pass, which sees
below the floor of a 16-bit dtype? Only where nothing is: accumulated beyond what the blocks make
(drift)? within rounding?
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from divergence.analyses.blocks.units import (
    Escalation,
    JudgedUnit,
    Judgement,
    Unit,
    build_units,
    families_of,
    farther_side,
    is_table,
    is_whole,
    judge_units,
    next_commands,
    num_columns,
    num_values,
    numbers_alike,
    only_step,
    places_of,
    stacks_of,
    visible_of,
)
from divergence.comparison.align import PromptStep
from divergence.comparison.analysis import AnalysisResult, Measured, Shown
from divergence.comparison.constants import CLEAR_TIMES, FEW_ROWS, FEWEST_SIBLINGS, LEAST_FLOORS
from divergence.comparison.decide import check
from divergence.comparison.experts import mostly_rerouted
from divergence.comparison.result import (
    Finding,
    SiteResult,
    allowed_errors,
    main_path,
    num_rows,
    onset_at,
    order_of,
)
from divergence.facts import Fact, fact
from divergence.numerics.floor import Thresholds, spread
from divergence.run.contents import is_mask
from divergence.run.site import ROOT, is_codes, module_of
from divergence.words import SIDES, Side, grouped, other_side, side_of

# Exact: nan and inf, and which side they are on.
#
# Two sides agree at an element where both are finite, both nan, or both the same infinity
# (numerics.sums). Where both agree, a result is still no result: nan, +inf, or -inf in a block's
# output or input, is a verdict on both sides, however equal the bits are. Masks hold -inf by right;
# so may logits and what is inside a block. A nan inside a block counts where it comes out of it:
# rows of padding may be nan inside.


def find_nonfinite(measured: Measured) -> Finding | None:
    """Claims nan and inf at other places, or with other signs; the first place in order of
    execution. None where there are none."""
    sites = [site for site in measured.sites if site.nonfinite is not None]
    if not sites:
        return None
    free = {(s.sample, s.step, s.site): s.order for s in measured.sites if s.pass_ == "free"}

    def place(site: SiteResult) -> tuple[int, int, int, bool]:
        order = free.get((site.sample, site.step, site.site), site.order)
        return site.sample, site.step, order, site.pass_ != "anchored"

    apart = [site for site in sites if _num_apart(site)]
    without_result = [site for site in sites if not _num_apart(site) and _is_no_result(site)]

    def part(site: SiteResult) -> tuple[str, int, int, str | None]:
        return site.pass_, site.sample, site.step, site.block

    outer = {part(site) for site in without_result if site.role in ("block", "trunk")}
    shared = [site for site in without_result if part(site) in outer]
    candidates = [site for site in (*apart, *shared) if site.pass_ != "escalated"] or apart
    if not candidates:
        return None
    first = min(candidates, key=place)
    runs = measured.reference, measured.candidate
    counted = all(run.manifest.plan.statistics_off is None for run in runs)
    counts = first.nonfinite
    assert counts is not None
    nans, infs, alone = (
        {side: getattr(counts, f"{side}_{what}") for side in SIDES}
        for what in ("nan", "inf", "alone")
    )
    side = side_of([alone[each] > 0 for each in SIDES])
    if first in shared:
        side, what = "both", _numbers(nans["reference"], infs["reference"], counted)
        headline = [fact("blocks.nonfinite_shared", what=what, site=first.site)]
    elif side is None:
        headline = [fact("blocks.nonfinite_other_kind", site=first.site)]
    elif side == "both":
        headline = [fact("blocks.nonfinite_apart", site=first.site)]
    else:
        other = other_side(side)
        headline = [
            fact(
                "blocks.nonfinite_alone",
                what=_numbers(nans[side], infs[side], counted),
                side=side,
                site=first.site,
                fewer=bool(nans[other] or infs[other]),
            )
        ]
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
        evidence=[
            fact(
                "blocks.nonfinite_counts",
                site=first.site,
                num_elements=first.numel,
                **{
                    f"{each}_{what}": getattr(counts, f"{each}_{what}")
                    for each in SIDES
                    for what in ("nan", "inf", "neginf")
                },
                num_apart=_num_apart(first),
                counted=counted,
            )
        ],
        commands=[
            *(measured.advice.descent() if measured.anchored else []),
            *measured.advice.look_at(first.site, side),
        ],
    )


def _num_apart(site: SiteResult) -> int:
    """Elements at which the two sides do not agree."""
    counts = site.nonfinite
    if counts is None:
        return 0
    return counts.differ - (counts.mask_alike if is_mask(site.site) else 0)


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
    main = site.site in (f"{module_of(site.site)}:out", f"{module_of(site.site)}:in")
    return site.role == "block" and main and counts.reference_neginf > 0


def _numbers(num_nan: int, num_inf: int, counted: bool) -> list[Fact]:
    """``counted``: not so in other tools' statistics, which tell that there are some."""
    counts = ((num_nan, "nan"), (num_inf, "inf"))
    return [
        fact("blocks.num_nonfinite", num=num if counted else None, what=what)
        for num, what in counts
        if num
    ]


def find(measured: Measured) -> AnalysisResult:
    """Finds what the blocks show, and all sites with the limits that they were held against."""
    # exact: nan and inf leave no error to be measured
    bad = find_nonfinite(measured)
    if bad is not None or not measured.sites:
        findings = [] if bad is None else [bad]
        return AnalysisResult(findings=findings, parts={"sites": list(measured.sites)})
    # outlier and family: what is beyond its limit
    judged = judged_units(measured)
    sites = _with_limits(measured.sites, [*judged.units, *judged.escalation.units])
    # scope of that; and only where there is none: accumulated
    findings = _claims(dataclasses.replace(measured, sites=sites), judged)
    # how small an error would have been seen, in float32 where both sides were
    main = [unit for unit in judged.units if unit.pass_ != "free" or not measured.anchored]
    deeper = judged.escalation.units if judged.escalation.complete else []
    visible = visible_of(deeper) or visible_of(main)
    # what the reader must know beside the numbers
    evidence: list[Fact] = []
    if steps := judged.unanchored:  # judged less exactly
        evidence.append(fact("blocks.not_anchored", steps=steps[:6], more=len(steps) > 6))
    evidence += estimated_evidence(measured.sites)
    evidence += unmeasured_evidence(measured.sites)
    evidence += measured.alignment.notes
    evidence += _weights_evidence(measured)
    evidence += [
        fact("blocks.own_noise", what=line.details or line.detail)
        for line in measured.preflight
        if line.check == "repeatability" and line.status == "differs"
    ]
    context = Finding(claim="context", role="context", evidence=evidence)
    return AnalysisResult(findings=[*findings, context], parts={"sites": sites, "visible": visible})


def judged_units(measured: Measured) -> Judgement:
    """Holds the sites of the pass that counts against their limits: the anchored pass; what no
    anchor reached, and where there is none, the free pass. Beside it the escalated passes."""

    def units_of(sites: Iterable[SiteResult], pass_: str) -> list[Unit]:
        return build_units(sites, pass_, measured.samples, measured.shown, measured.thresholds)

    units = units_of(measured.sites, "anchored" if measured.anchored else "free")
    unanchored: list[int] = []
    if measured.anchored:
        covered = {(s.sample, s.step) for s in measured.sites if s.pass_ == "anchored"}
        free = (s for s in measured.sites if s.pass_ == "free")
        rest = [s for s in free if (s.sample, s.step) not in covered]
        units += units_of(rest, "free")
        unanchored = sorted({s.step for s in rest})
    sides = {site.of for site in measured.sites if site.pass_ == "escalated"}
    deeper = [
        unit
        for of in sorted(sides, key=str)
        for unit in units_of(
            (s for s in measured.sites if s.of == of and not is_table(s)), "escalated"
        )
    ]
    judged = judge_units([*units, *deeper], routed=measured.routed, thresholds=measured.thresholds)
    return Judgement(
        units=judged[: len(units)],
        unanchored=unanchored,
        escalation=Escalation(judged[len(units) :], sides),
    )


def limits_used(measured: Measured) -> Shown:
    """Maps (pass, site, phase) to the largest share of a limit that is used there."""
    return {
        (unit.pass_, unit.site, unit.phase): max(unit.shown, unit.limit_usage if unit.why else 0.0)
        for unit in judged_units(measured).units
    }


def _claims(measured: Measured, judged: Judgement) -> list[Finding]:
    flagged, escalation = judged.flagged, judged.escalation
    compared = [site for site in measured.sites if site.pass_ != "escalated"]
    if all(site.identical for site in compared):
        # equal runs; with a truth, perhaps equally wrong ones
        shared = [unit for unit in flagged if unit.side == "both"]
        if shared or not escalation.flagged:
            return [_equal(measured, shared, len(compared))]
        flagged = []
    if flagged or escalation.flagged:
        from divergence.analyses.blocks.onset import below_floor, made_at

        if flagged:
            return [made_at(measured, judged.units, flagged, escalation)]
        return [below_floor(measured, escalation)]
    if any(site.at_least is not None or site.statistics_agree for site in compared) and not any(
        site.ratio for site in compared
    ):
        from divergence.analyses.blocks.bounded import bounded

        if (bound := bounded(measured, escalation)) is not None:
            return [bound]
    # what differs by no more than rounding at every place, and is perhaps too much together
    from divergence.comparison.experts import free_routes_differ

    runs = [measured.reference, measured.candidate]
    runs += [] if measured.truth is None else [measured.truth.run]
    two_dtypes = any(line.check == "dtype" and line.status != "same" for line in measured.preflight)
    standouts = find_standouts(judged.units, measured.thresholds, two_dtypes=two_dtypes)
    drifts = find_drifts(
        measured.sites,
        measured.thresholds,
        two_dtypes=two_dtypes,
        routed=measured.experts,
        coded=measured.reference.manifest.quantizes_activations,
        rerouted=lambda *place: measured.experts and free_routes_differ(runs, *place),
    )
    at_ends = bool(drifts) or (measured.tokens is not None and measured.tokens.is_far)
    free: list[JudgedUnit] = []
    if at_ends and measured.anchored:
        units = build_units(measured.sites, "free")
        free = judge_units(units, routed=measured.routed, thresholds=measured.thresholds)
    only_rounds = _only_rounds(measured, free) if free else {}
    findings = [within_rounding(measured, judged, standouts, only_rounds)]
    begins = _begins(measured, free) if drifts and free else []
    parted = [fact("blocks.begins", site=s.site, sample=s.sample, step=s.step) for s in begins]
    findings += [
        Finding(
            claim="drift",
            kind="drift",
            headline=[drift.headline, *parted],
            onset=next(map(onset_at, begins), None),
            rests_on=[check("anchored", False, fact("blocks.seen_in_free_run"))],
            step=drift.step,
            accumulated_at=drift.places if drift.accumulated else [],
            side=drift.side,
            evidence=[drift.evidence],
            commands=next_commands(measured, None, escalation),
        )
        for drift in drifts
    ]
    if standouts:
        findings.append(
            Finding(
                claim="stands_out", role="hints", evidence=[each.fact for each in standouts[:3]]
            )
        )
    return findings


def _equal(measured: Measured, shared: Sequence[JudgedUnit], num_compared: int) -> Finding:
    """Every bit. ``shared``: units of which both sides are far from the truth."""
    missing, evidence = measured.missing, list[Fact]()
    headline = [fact("blocks.all_equal", num=num_compared)]
    if missing > num_compared:  # as those of a training step and a decoding
        headline.append(fact("blocks.most_without_partner", num=missing))
    elif missing:
        headline.append(fact("blocks.without_partner", num=missing))
    if shared:
        from divergence.analyses.blocks.onset import unit_evidence

        headline.append(fact("blocks.both_far"))
        evidence += map(unit_evidence, shared[:3])
    return Finding(
        claim="equal",
        kind="identical",
        headline=headline,
        rests_on=[check("coverage", not missing, fact("blocks.not_all_compared"))],
        side="both" if shared else "neither",
        evidence=[*evidence, *_weights_evidence(measured)],
    )


def _only_rounds(measured: Measured, free: Sequence[JudgedUnit]) -> dict[int, int]:
    """Counts, by sample, how many forwards from the first on only round; the anchored pass is known
    to.

    In such a forward every block and trunk module was measured in the anchored pass, and none is
    beyond its limit in the free pass, where a single token may use up to ``free_gain`` times its
    limit. Samples whose anchored pass is equal bit for bit are left out."""
    off: set[PromptStep] = set()
    for unit in free:
        single = unit.why == "token" and unit.limit_usage <= measured.thresholds.free_gain
        if unit.why is not None and not single:
            off |= places_of(unit)
    seen: dict[str, set[tuple[int, int, str]]] = {"free": set(), "anchored": set()}
    rounded: set[int] = set()
    stacks = stacks_of(measured.sites)
    for site in measured.sites:
        made = site.role in ("block", "trunk") and not is_whole(module_of(site.site), stacks)
        measured_there = site.pass_ == "free" or not site.is_unmeasured
        if made and measured_there and site.pass_ in seen and ":out" in site.site:
            seen[site.pass_].add((site.sample, site.step, site.site))
            if site.pass_ == "anchored" and not site.identical:
                rounded.add(site.sample)
    lacking = {(sample, step) for sample, step, _ in seen["free"] - seen["anchored"]}
    of_a, of_b = (run.manifest.tokens for run in (measured.reference, measured.candidate))
    together = of_a.groups == of_b.groups  # else each prompt has results of its own
    steps: dict[int, int] = {}
    for sample in rounded:  # of equal bits there is nothing to enlarge
        members = (of_a.group_of(sample) if together else []) or [sample]
        sound = {step for first, step, _ in seen["anchored"] if first == sample}
        sound -= {step for first, step in lacking | off if first in (sample, *members)}
        count = next(step for step in range(len(sound) + 1) if step not in sound)
        steps |= dict.fromkeys(members, count)
    return steps


def _begins(measured: Measured, free: Sequence[JudgedUnit]) -> list[SiteResult]:
    """Finds where the free runs part by more than the anchored pass shows: the first place that
    differs, if it is equal there; else the first that is beyond its limit."""

    def at(s: SiteResult) -> tuple[int, int, str]:
        return s.sample, s.step, s.site

    equal = {at(s) for s in measured.sites if s.identical and s.pass_ == "anchored"}
    apart = (
        s for s in measured.sites if s.pass_ == "free" and ":out" in s.site and not s.identical
    )
    first = sorted(apart, key=order_of)[:1]
    if equal & set(map(at, first)):
        return first
    return sorted((u.first for u in free if u.why is not None), key=order_of)[:1]


def _weights_evidence(measured: Measured) -> list[Fact]:
    """Tells how the weights belong together, where they are not simply equal."""
    return [
        fact("blocks.weights", relation=line.details or line.detail)
        for line in measured.preflight
        if (line.check, line.status) == ("weights", "differs") and (line.details or line.detail)
    ]


def _with_limits(sites: Sequence[SiteResult], units: Iterable[JudgedUnit]) -> list[SiteResult]:
    fields: dict[int, dict[str, Any]] = {}
    for unit in units:
        many, off = len(unit.looks) > 1, unit.why is not None
        looks = grouped(unit.looks if many else (), lambda look: id(look.result))
        for result in unit.results:
            used = {look.sample: look.used for look in looks.get(id(result), ())}
            most = max(used.values(), default=0.0 if many else unit.limit_usage)
            values = fields[id(result)] = {
                "limit": unit.limit,
                "limit_usage": max(unit.limit_usage, float(off)),
                "usage": most,
                "prompts": [
                    replace(row, usage=used.get(row.sample, row.usage)) for row in result.prompts
                ],
            }
            if off:  # by all forwards together, perhaps, and by no single one
                flagged = _is_beyond(unit, result)
                values |= {"flagged": flagged, "usage": max(most, float(flagged))}
    return [replace(site, **fields[id(site)]) if id(site) in fields else site for site in sites]


def _is_beyond(unit: JudgedUnit, result: SiteResult) -> bool:
    """Is this one of the results for which the unit is flagged? A healthy prompt beside a faulty
    one is not; where none is beyond by itself, all of them together are."""
    beyond = [look for look in unit.looks if look.used > 1]
    if unit.why in ("forward", "token") or beyond:
        at = None if unit.blame is None or unit.why == "typical" else unit.blame.at
        return result is at or any(look.result is result for look in beyond)
    return unit.blame is not None or (result.ratio or 0) > unit.limit


def estimated_evidence(sites: Sequence[SiteResult]) -> list[Fact]:
    estimates = [(site.step > 0, site.estimated) for site in sites if site.estimated is not None]
    errors = grouped(((is_step, e.relative_error) for is_step, e in estimates), lambda e: e[0])
    facts = []
    for phase, of_phase in (("prefill", errors.get(False)), ("decode", errors.get(True))):
        sizes = [size for _, size in of_phase or () if size is not None]
        if sizes:
            middle, worst = statistics.median(sizes), max(sizes)
            facts.append(fact("blocks.estimate", phase=phase, typical=middle, worst=worst))
    if not estimates:
        return []
    return [fact("blocks.estimated", num_estimated=len(estimates), num=len(sites), errors=facts)]


def unmeasured_evidence(sites: Sequence[SiteResult]) -> list[Fact]:
    """Tells what differs and was not measured, and the most that its statistics tell."""
    unmeasured = [site for site in sites if site.is_unmeasured]
    if not unmeasured:
        return []
    num_agree, evidence = sum(site.statistics_agree for site in unmeasured), []
    if num_agree < len(unmeasured):
        num = len(unmeasured) - num_agree
        evidence.append(fact("blocks.unmeasured", num_unmeasured=num, num=len(sites)))
    if num_agree:
        evidence.append(fact("blocks.statistics_agree", num_agree=num_agree, num=len(sites)))
    most = max(unmeasured, key=lambda site: site.at_least or 0.0)
    if most.at_least:
        evidence.append(
            fact(
                "blocks.at_least_apart",
                site=most.site,
                pass_=most.pass_,
                step=most.step,
                at_least=most.at_least,
            )
        )
    return evidence


# Accumulated: the free run ends farther off than its parts explain, though none is beyond a limit.
#
# Looked at in every sample and step, at the last block's output and behind it up to the logits.
# There the blocks' and modules' errors are added as squares (``allowed_errors``); what blocks make
# of each other's is left room for by ``drift``, what the final norm and the head make of what
# reaches them by ``free_gain``. With a truth the two sides' distances from it are compared. Where a
# model routes tokens, the median of fewer than eight rows tells nothing, nor do the ends where one
# is known to have gone to another expert. Where activations become codes, one that flips moves
# everything behind it farther than rounding does: then only what lies behind the blocks counts.


@dataclass(frozen=True, slots=True)
class Drift:
    """The first place. ``side``: the farther from the truth, where there is one. ``accumulated``:
    over the blocks; else it is made behind them."""

    headline: Fact
    evidence: Fact
    step: int
    side: Side | None = None
    accumulated: bool = True
    places: list[PromptStep] = field(default_factory=list)
    """All forwards with one of this kind."""


def find_drifts(
    sites: Sequence[SiteResult],
    thresholds: Thresholds,
    *,
    two_dtypes: bool = False,
    routed: bool = False,
    coded: bool = False,
    rerouted: Callable[[int, int], bool] = lambda sample, step: False,
) -> list[Drift]:
    """The accumulated ones and those behind the blocks, each with its first place.

    With a truth: one side's free run is much farther from it than the other's. Without, and
    where the runs are of ``two_dtypes``, so that one is farther off by rounding: the error at the
    end is more than the blocks may make together. ``routed``: blocks choose experts.
    ``coded``: activations become codes. ``rerouted``: of a prompt and step, did a free run send a
    token to other experts than another did?"""
    allowed = allowed_errors(sites)
    kinds: dict[bool, Drift] = {}
    for place, path in sorted(main_path(sites).items()):
        blocks = [number for number, site in enumerate(path) if site.role == "block"]
        for site in path[blocks[-1] :] if len(blocks) > 1 else ():
            drift = None
            if not (coded or (routed and math.prod(site.shape[:-1]) < FEW_ROWS)):
                by_truth = site.truth is not None and not two_dtypes
                against = _against_truth if by_truth else _against_floors
                drift = against(site, allowed.get(place), thresholds)
            if drift is None or rerouted(site.sample, site.step):
                drift = _behind_blocks(site, thresholds)
            if drift is not None:
                kinds.setdefault(drift.accumulated, drift).places.append(place)
                break
    return list(kinds.values())


def _against_truth(site: SiteResult, allowed: float | None, thresholds: Thresholds) -> Drift | None:
    """The median token; where there is but one row, as in a decode step, of as many numbers as hold
    its error."""
    assert site.truth is not None
    least = thresholds.truth_least * (allowed or 0.0)  # two tiny errors make no large ratio
    errors = site.truth.candidate_error + least, site.truth.reference_error + least
    w = errors[0] / errors[1] if errors[1] else site.truth.w_median
    numbers = min(numbers_alike(site) if num_rows(site) == 1 else site.numel, num_columns(site))
    limit = thresholds.truth_drift * spread(round(numbers))
    if 1 / limit <= w <= limit:
        return None
    side, times = SIDES[w > limit], max(w, 1 / max(w, 1e-300))
    return Drift(
        fact("blocks.ends_farther", side=side, times=times, site=site.site),
        _where(site, w=w, limit=limit),
        site.step,
        side,
    )


def _against_floors(
    site: SiteResult, allowed: float | None, thresholds: Thresholds
) -> Drift | None:
    """Adds what the blocks make as squares, as rounding does; ``drift`` leaves room for what they
    make of each other's."""
    if allowed is None or site.token_rel_l2_median is None:
        return None
    behind = site.role != "block"
    limit = thresholds.drift * spread(site.numel) * (thresholds.free_gain if behind else 1.0)
    ratio = site.token_rel_l2_median / allowed
    if ratio <= limit:
        return None
    rel_l2 = site.token_rel_l2_median
    headline = fact("blocks.grows_to", site=site.site, rel_l2=rel_l2, ratio=ratio, behind=behind)
    return Drift(headline, _where(site, ratio=ratio, limit=limit), site.step)


def _behind_blocks(site: SiteResult, thresholds: Thresholds) -> Drift | None:
    """A module behind the last block adds more than rounding to what comes in, in the free pass."""
    if site.role != "trunk" or module_of(site.site) == ROOT or site.ratio is None:
        return None
    limit = thresholds.typical * spread(site.numel)
    if site.ratio <= limit:
        return None
    return Drift(
        fact("blocks.grows_behind", site=site.site, ratio=site.ratio),
        _where(site, ratio=site.ratio, limit=limit),
        site.step,
        accumulated=False,
    )


def _where(site: SiteResult, **values: Any) -> Fact:
    return fact("blocks.in_free_pass", sample=site.sample, step=site.step, site=site.site, **values)


# Within rounding: how near the nearest unit came to its limit, and what stands out all the same, a
# place to look first and never a verdict: a block whose typical error in the anchored pass is over
# ``standout`` times its siblings' median, or that was beyond a limit while both sides are equally
# near the truth; all blocks, where one side is farther from the truth in them by their median W.


def within_rounding(
    measured: Measured, judged: Judgement, standouts: list[StandOut], only_rounds: dict[int, int]
) -> Finding:
    """The finding that only rounding differs. ``only_rounds``: see Finding."""
    units, escalation, advice = judged.units, judged.escalation, measured.advice
    unmeasured = [site for site in measured.sites if site.is_unmeasured]
    # where it is not known that only rounding differs
    elsewhere = mostly_rerouted(measured.sites) if measured.experts else None
    reason: Fact | None = None
    if unmeasured and not any(site.ratio for site in measured.sites):
        telling = [site for site in unmeasured if not site.statistics_agree]
        first = min(telling or unmeasured, key=order_of)
        reason = fact("differ_unmeasured", site=first.site, step=first.step)
    elif not units:
        reason = fact("nothing_rounds", within=False)
    elif elsewhere is not None:
        reason = fact("most_not_compared", why=elsewhere)
    if reason is not None:
        return Finding(
            claim="not_known",
            kind="undetermined",
            headline=[reason],
            rests_on=[check("measured" if elsewhere is None else "routed", False, elsewhere)],
            commands=next_commands(measured, None, escalation),
        )
    # what came nearest to its limit
    sure = measured.anchored and not judged.unanchored
    widest = max(units, key=lambda unit: (unit.typical, unit.worst))
    farthest = max(units, key=lambda unit: unit.worst)
    largest = fact(
        "blocks.typical_largest",
        site=widest.site,
        phase=widest.phase,
        ratio=widest.typical,
        limit=widest.limit,
    )
    largest = largest if widest.typical else fact("blocks.typical_equal")
    evidence = [
        fact(
            "blocks.largest",
            typical=largest,
            site=farthest.site,
            ratio=farthest.worst,
            limit=farthest.worst_limit,
        )
    ]
    against_truth = [unit for unit in units if unit.standing is not None]
    if against_truth:
        closest = max(against_truth, key=lambda unit: unit.limit_usage)
        evidence.append(
            fact(
                "blocks.judged_against",
                floor=measured.floor is not None,
                num_judged=len(against_truth),
                site=closest.site,
                phase=closest.phase,
                limit_usage=closest.limit_usage,
            )
        )
    evidence += [
        fact(
            "blocks.equally_near",
            site=unit.site,
            phase=unit.phase,
            ratio=unit.typical if unit.typical > unit.limit else unit.worst,
        )
        for unit in [unit for unit in units if unit.excused][:3]
    ]
    evidence += escalation.healthy()
    if measured.narrow and sure and not escalation.judged:
        can_escalate = bool(advice.escalate())
        if can_escalate or advice.divided:
            evidence.append(fact("hidden_below_floor", within=False, next=can_escalate))
    # one side's arithmetic, where it is coarser in all blocks; the one block, or the blocks that
    # stand out, where nothing else differs at all
    where, alone, outlier = list[Fact](), list[Fact](), None
    named = {each.unit.block for each in standouts if each.side is None}
    anchored = [s for s in measured.sites if s.pass_ == "anchored" and not is_codes(s.site)]
    differing = dict.fromkeys(site.block for site in anchored if not site.identical)
    num_equal = len({site.block for site in anchored} - differing.keys())
    if standouts:
        nearest = standouts[0].unit
        outlier = fact("blocks.differs_more", place=nearest.block or nearest.site)
    for each in [each for each in standouts if each.side is not None][:1]:
        outlier = fact("blocks.farther_everywhere", side=each.side, num=each.num, total=each.total)
        other = other_side(each.side)
        where = [fact("blocks.coarser", side=each.side, other=other, times=each.times)]
    if named and named >= differing.keys():
        where.append(fact("blocks.only_in", places=list(differing)))
    elif len(differing) == 1 and None not in differing and num_equal > FEWEST_SIBLINGS:
        alone = [fact("blocks.only_in", places=list(differing))]
    far = farthest.worst > measured.thresholds.standout / CLEAR_TIMES
    step = only_step(measured) if far else None
    if step is not None:
        where.append(fact("blocks.only_step", step=step))
    # of what is estimated the truth judges nothing, and so says nothing of either side
    estimated = any(result.estimated for unit in units for result in unit.results)
    by_truth = bool(against_truth) and measured.floor is None
    truth_tells = sure and by_truth and not measured.partial and not estimated
    no_truth = fact("blocks.no_truth")
    if measured.floor is not None:
        no_truth = fact("blocks.error_of_one_side")
    elif estimated:
        no_truth = fact("blocks.truth_of_full")
    elif by_truth and measured.partial:
        no_truth = fact("blocks.truth_incomplete")
    elif measured.truth is not None and not sure:
        no_truth = fact("blocks.truth_of_free")
    elif advice.truth_beside is not None:
        no_truth = fact("blocks.truth_beside", path=advice.truth_beside)
    # is a trusted run itself beyond the limits that it widens?
    widened = any(used > 1 for used in (measured.shown or {}).values())
    checks = [
        check(
            "anchored",
            sure,
            fact("no_anchored_pass", of_a_module=measured.reference.manifest.is_of_a_module),
        ),
        check("measured", not unmeasured, fact("blocks.not_kept")),
        check("truth", truth_tells, no_truth, made=by_truth),
        check("no_standout", not standouts and step is None, outlier or fact("blocks.one_step")),
        check("floor_trusted", not widened, fact("blocks.floor_beyond")),
    ]
    if measured.narrow:
        lacking = fact("blocks.no_float32")
        if escalation.unseen is not None:
            lacking = fact("blocks.not_in_float32", side=escalation.unseen)
        elif advice.escalated and measured.truth is None:
            lacking = fact("blocks.float32_takes_truth")
        elif not advice.escalate():
            lacking = fact("blocks.no_float32_here", ranks=advice.divided)
        checks.append(check("escalated", escalation.complete, lacking, made=False))
    # what looks inside the first stand-out; what raises the confidence
    commands, block = advice.judged(), standouts[0].unit.block if standouts else None
    commands += [] if block is None else advice.descent(block)
    commands += next_commands(measured, None, escalation)
    if measured.anchored and measured.truth is None and not commands:
        commands += advice.truth()
    return Finding(
        claim="within_rounding",
        kind="within_floor",
        headline=[fact("only_rounding", sure=sure, numbers=None), *where, *alone],
        rests_on=checks,
        only_rounds=only_rounds,
        side="neither" if truth_tells and not where else None,
        evidence=evidence,
        commands=[item for n, item in enumerate(commands) if item not in commands[:n]],
    )


@dataclass(frozen=True, slots=True)
class StandOut:
    """A block that stands out. ``times``: the typical token's error over its siblings'; where all
    of a kind do, ``side``'s error over the other side's, by their median. ``unit``: the first of
    them then; ``num`` of ``total`` are clearly farther by that side."""

    unit: JudgedUnit
    times: float
    side: Side | None = None
    num: int = 1
    total: int = 1

    @property
    def fact(self) -> Fact:
        unit, block = self.unit, self.unit.block
        values: dict[str, Any] = {"phase": unit.phase, "times": self.times}
        if self.side is not None:
            values |= {"side": self.side, "other": other_side(self.side), "place": block}
            return fact("side_farther", standout=block, num=self.num, total=self.total, **values)
        rel_l2 = max(result.rel_l2 or 0.0 for result in unit.results)
        return fact("stands_out", standout=block, site=unit.site, rel_l2=rel_l2, **values)


def find_standouts(
    units: Sequence[JudgedUnit], thresholds: Thresholds, *, two_dtypes: bool = False
) -> list[StandOut]:
    """Finds those that stand out, in execution order, one a block. ``two_dtypes``: one side's
    arithmetic is coarser by its dtype, and that is no news."""
    standouts: list[StandOut] = []
    anchored = (u for u in units if u.pass_ == "anchored" and u.kind.role == "block")
    for family in families_of(anchored):
        for unit in family if len(family) > FEWEST_SIBLINGS else ():
            usual = statistics.median(o.typical for o in family if o is not unit)
            times = unit.typical / max(usual, LEAST_FLOORS)
            numbers = max(num_values(result) for result in unit.results)
            if times > thresholds.standout * spread(numbers) or (
                unit.excused and times > thresholds.truth_confirm
            ):
                standouts.append(StandOut(unit, times))
        farther = None
        if not two_dtypes and any(unit.standing is not None for unit in family):
            farther = farther_side(family, thresholds.truth_standout)
        if farther is not None:
            side, times = farther
            far = math.log(thresholds.truth_standout)
            off = [unit for unit in family if unit.farther(side) > far] or family
            first = min(off, key=lambda unit: order_of(unit.first))
            standouts.append(StandOut(first, times, side, len(off), len(family)))
    standouts.sort(key=lambda standout: order_of(standout.unit.first))
    blocks = [standout.unit.block for standout in standouts]
    return [each for n, each in enumerate(standouts) if each.unit.block not in blocks[:n]]

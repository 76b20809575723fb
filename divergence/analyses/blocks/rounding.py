"""Where nothing is beyond a limit, this is said: drift at the end, and what stands out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from divergence.analyses.blocks.units import (
    JudgedUnits,
    Unit,
    families_of,
    farther_side,
    next_commands,
    num_columns,
    num_values,
    numbers_alike,
)
from divergence.comparison.align.pairs import PromptStep
from divergence.comparison.analysis import Measured
from divergence.comparison.decide import check
from divergence.comparison.experts import mostly_rerouted
from divergence.comparison.limits import CLEAR, FEW_ROWS, FEWEST, LEAST
from divergence.comparison.results import (
    Finding,
    SiteResult,
    allowed_errors,
    main_path,
    num_rows,
    order_of,
)
from divergence.facts import Fact, fact
from divergence.numerics.floor import Thresholds, spread
from divergence.run.site import ROOT, is_codes, module_of
from divergence.words import SIDES, Side, other_side

# Drift: the free run ends farther off than its parts explain, though none is beyond its limit.
#
# Looked at in every sample and step, at the last block's output and behind it up to the logits.
# There the blocks' and modules' errors are added as squares (results.sites); what blocks make of
# each other's is left room for by ``drift``, what the final norm and the head make of what reaches
# them by ``free_gain``. With a truth the two sides' distances from it are compared instead, over
# the rows of a prefill or for the one row of a decode step. Where a model routes tokens, one row
# may have gone to another expert, so that the median of fewer than eight tells nothing; and where
# that is known of any, on one side or in the truth, the ends of the free runs do not either. Where
# activations become codes, one that flips moves everything behind it farther than rounding does, on
# either side: what the free runs end with tells nothing then, and only what lies behind the blocks
# is looked at.


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
    """Add what the blocks make as squares, as rounding does; ``drift`` leaves room for what they
    make of each other's."""
    if allowed is None or site.token_rel_l2_median is None:
        return None
    behind = site.role != "block"
    limit = thresholds.drift * spread(site.numel) * (thresholds.free_gain if behind else 1.0)
    ratio = site.token_rel_l2_median / allowed
    if ratio <= limit:
        return None
    headline = fact(
        "blocks.grows_to",
        site=site.site,
        rel_l2=site.token_rel_l2_median,
        ratio=ratio,
        behind=behind,
    )
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


# Within rounding: how near the nearest unit came to its limit, and what stands out all the same.
#
# A stand-out is a block that differs by more than other blocks or kernels do, though within
# rounding: a place to look first, never a verdict (a coarser sum in one block of twelve, say, whose
# error a 16-bit dtype hides). A site stands out where its typical token's error in the anchored
# pass is over ``standout`` times the median of its siblings', or where it was beyond a limit and
# both sides turned out equally near the truth. Of a block's sites the first in execution order is
# named.
#
# All blocks together stand out where one side is farther from the truth in all of them, by their
# median W beyond ``truth_standout``: a kernel that is wrong everywhere has no healthy siblings.


def within_rounding(
    measured: Measured,
    judged: JudgedUnits,
    standouts: list[StandOut],
    only_rounds: dict[int, int],
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
    largest = fact("blocks.typical_equal")
    if widest.typical:
        largest = fact(
            "blocks.typical_largest",
            site=widest.site,
            phase=widest.phase,
            ratio=widest.typical,
            limit=widest.limit,
        )
    evidence = [
        fact(
            "blocks.largest",
            typical=largest,
            site=farthest.site,
            ratio=farthest.worst,
            limit=farthest.worst_limit,
        )
    ]
    against_truth = [unit for unit in units if unit.stats is not None]
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
    where, outlier = [], None
    named = {each.unit.results[0].block for each in standouts if each.side is None}
    anchored = [s for s in measured.sites if s.pass_ == "anchored" and not is_codes(s.site)]
    differing = dict.fromkeys(site.block for site in anchored if not site.identical)
    num_equal = len({site.block for site in anchored} - differing.keys())
    if standouts:
        first_unit = standouts[0].unit
        outlier = fact("blocks.differs_more", place=first_unit.results[0].block or first_unit.site)
    coarser = next((standout for standout in standouts if standout.side is not None), None)
    if coarser is not None and coarser.side is not None:
        outlier = fact("blocks.farther_everywhere", side=coarser.side)
        where = [
            fact(
                "blocks.coarser",
                side=coarser.side,
                other=other_side(coarser.side),
                times=coarser.times,
            )
        ]
    alone = []
    if named and named >= differing.keys():
        where.append(fact("blocks.only_in", places=list(differing)))
    elif len(differing) == 1 and None not in differing and num_equal > FEWEST:
        alone = [fact("blocks.only_in", places=list(differing))]
    step = only_step(measured) if farthest.worst > measured.thresholds.standout / CLEAR else None
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
    commands, block = advice.judged(), standouts[0].unit.results[0].block if standouts else None
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


def only_step(measured: Measured) -> int | None:
    """The decode step that holds all that differs, of several that were given equal inputs."""
    rows = [site for site in measured.sites if site.pass_ == "anchored" and site.step]
    steps = {site.step for site in rows if not site.identical}
    others = {site.step for site in rows} - steps
    prefill = any(
        site.pass_ == "anchored" and not site.step and not site.identical for site in measured.sites
    )
    return steps.pop() if len(steps) == 1 and len(others) >= FEWEST and not prefill else None


@dataclass(frozen=True, slots=True)
class StandOut:
    """A block that stands out. ``times``: the typical token's error over its siblings'; where all
    of a kind do, ``side``'s error over the other side's. ``unit``: the first of them then."""

    unit: Unit
    times: float
    side: Side | None = None

    @property
    def fact(self) -> Fact:
        unit, block = self.unit, self.unit.results[0].block
        if self.side is not None:
            return fact(
                "side_farther",
                standout=block,
                phase=unit.phase,
                side=self.side,
                other=other_side(self.side),
                times=self.times,
                place=block,
            )
        rel_l2 = max(result.rel_l2 or 0.0 for result in unit.results)
        return fact(
            "stands_out",
            standout=block,
            site=unit.site,
            phase=unit.phase,
            times=self.times,
            rel_l2=rel_l2,
        )


def find_standouts(
    units: Sequence[Unit],
    thresholds: Thresholds,
    *,
    two_dtypes: bool = False,
) -> list[StandOut]:
    """Finds those that stand out, in execution order, one a block. ``two_dtypes``: one side's
    arithmetic is coarser by its dtype, and that is no news."""
    standouts: list[StandOut] = []
    anchored = (u for u in units if u.pass_ == "anchored" and u.kind[0] == "block")
    for family in families_of(anchored):
        for unit in family if len(family) > FEWEST else ():
            usual = statistics.median(o.typical for o in family if o is not unit)
            times = unit.typical / max(usual, LEAST)
            numbers = max(num_values(result) for result in unit.results)
            if times > thresholds.standout * spread(numbers) or (
                unit.excused and times > thresholds.truth_confirm
            ):
                standouts.append(StandOut(unit, times))
        farther = None
        if not two_dtypes and any(unit.stats is not None for unit in family):
            farther = farther_side(family, thresholds.truth_standout)
        if farther is not None:
            side, times = farther
            first = min(family, key=lambda unit: order_of(unit.first))
            standouts.append(StandOut(first, times, side))
    standouts.sort(key=lambda standout: order_of(standout.unit.first))
    named: dict[str | None, StandOut] = {}
    for standout in standouts:
        named.setdefault(standout.unit.results[0].block, standout)
    return list(named.values())

"""The proof of a localization: cause, operator alone, reproducer.

*Cause*: the healthy side's result is put in the place of the operator that is blamed, on its
machine, and what follows must be fine then. *Alone*: each side's operator in float64 on its own
recorded inputs, by the operator's definition: no truth of the model and no code of it is needed
for that, so a side that is off by itself is off whoever made the truth. *Reproducer*: the same as
a folder for a vendor.

An operator that is right by itself on both sides gives other results for one reason alone: it was
given something else. *Given* names it: a scalar, a constant, an operand with its difference, or
where it comes from. Nothing is said of what was not recorded.
"""

from __future__ import annotations

import math

from divergence.analyses.operators.operands import given_inputs, operands_text
from divergence.comparison.api import compare
from divergence.comparison.calls import CallNode, forwards_of
from divergence.comparison.result import Report
from divergence.comparison.results import CausalCheck, OperatorResult, OtherInput, SiteResult
from divergence.errors import DivergenceError
from divergence.experiments.localization.machine import Goal, Maker
from divergence.experiments.result import OwnError
from divergence.facts import fact, sentence
from divergence.numerics.floor import THRESHOLDS
from divergence.ops.replay import replay
from divergence.ops.reproducer import repro
from divergence.recording.plant import Substitute
from divergence.run.reader import Run
from divergence.run.record import Operand
from divergence.run.site import is_operator_site
from divergence.words import Side

_MIN_ROWS = 8  # fewer rows tell nothing about one channel


def prove(
    maker: Maker, goal: Goal, made: dict[str, Run], truth: Run, deep: Report,
    first: OperatorResult, side: str,
) -> CausalCheck | None:  # fmt: skip
    """The healthy side's result in the guilty one's place: what is then still wrong? None where
    that side's machine is not this one, or the run does not repeat what comes before."""
    assert deep.operators is not None
    other = "candidate" if side == "reference" else "reference"
    guilty, healthy = replaced_sites(made, first, side)
    run = maker.substituted(
        side, goal, made[side], site=guilty, healthy=Substitute(made[other], healthy),
        block=first.block or "",
    )  # fmt: skip
    if run is None:
        return None
    pair = (made["reference"], run) if side == "candidate" else (run, made["candidate"])
    again = compare(*pair, truth=truth, progress=maker.tell)
    if again.operators is None:
        return None
    place = (first.phase == "decode", first.order)
    itself = guilty.rpartition(":")[0] not in (first.site, first.candidate_site)
    before, after = (
        [r for r in o.results if ((r.phase == "decode", r.order) > place and r.site != first.site)
         or (itself and r.site == first.site)]
        for o in (deep.operators, again.operators)
    )  # fmt: skip
    still = [r.site for r in after if r.limit_usage > 1]
    for site in again.sites:
        # what the operator's block gives: its output, of its backward the gradients
        handed_on = site.site == f"{site.block}:out"
        if first.phase == "backward":
            handed_on = site.phase == "backward" and ":out" in site.site
        flagged = site.flagged and site.pass_ != "free" and site.block == first.block
        if flagged and handed_on and _is_off(site, side):
            still.append(site.site)
    return CausalCheck(
        site=first.site,
        holds=not still,
        num_after=len(after),
        before=max((r.limit_usage for r in before), default=0.0),
        largest_limit_usage=max((r.limit_usage for r in after), default=0.0),
        still=list(dict.fromkeys(still)),
    )


def _is_off(site: SiteResult, side: str) -> bool:
    """Is the block's output off by ``side``? Where every block of a kind has the fault, the one
    that is free of it now stands out among its siblings, and is flagged for being right."""
    truth = site.truth
    if truth is None:
        return True
    questions = [(truth.w_median, THRESHOLDS.operator), (truth.w_max, THRESHOLDS.operator_row)]
    if math.prod(site.shape[:-1]) >= _MIN_ROWS:
        questions.append((truth.w_channel, THRESHOLDS.operator_column))
    return any((w if side == "candidate" else 1 / max(w, 1e-300)) > limit for w, limit in questions)


def errors_alone(maker: Maker, made: dict[str, Run], first: OperatorResult) -> list[OwnError]:
    """Each side's operator on its own recorded inputs, against float64."""
    errors: list[OwnError] = []
    places: tuple[tuple[Side, str], ...] = (
        ("reference", first.site), ("candidate", first.candidate_site)
    )  # fmt: skip
    for side, path in places:
        if not stands_alone(first, side):
            continue
        try:
            truth = replay(
                made[side], out=maker.folder / f"{side}-float64", sites=[f"{path}:*"], truth=True,
                force=True, operators=maker.namespaces,
            )  # fmt: skip
        except DivergenceError as error:
            reason = fact("experiments.not_in_float64", site=path, why=error.message)
            maker.tell("note", 0, None, sentence(reason))
            return []
        report = compare(truth, made[side])
        results = [] if report.operators is None else report.operators.results
        mine = [
            OwnError(side=side, error=r.candidate_error, ideal=r.floor, times=r.w)
            for r in results
            if r.site == path and r.w is not None
            and r.candidate_error is not None and r.floor is not None
        ]  # fmt: skip
        if mine:
            errors.append(max(mine, key=lambda own: own.times))
    return errors


def reproduce(
    maker: Maker, made: dict[str, Run], first: OperatorResult, side: str, name: str = "repro"
) -> str | None:
    """One side's operator as a folder; None where it cannot stand alone."""
    path = first.site if side == "reference" else first.candidate_site
    out = maker.folder / name
    try:
        repro(
            made[side], site=f"{path}:out", out=out, step=first.step, sample=first.sample,
            force=True, operators=maker.namespaces,
            called=operands_text(first.other_operands, side),
        )  # fmt: skip
    except DivergenceError as error:
        reason = fact("experiments.no_reproducer", site=path, why=error.message)
        maker.tell("note", 0, None, sentence(reason))
        return None
    return str(out)


def given_to(made: dict[str, Run], first: OperatorResult, pass_: str) -> list[OtherInput]:
    """The tensor operands that differ, the largest difference first; empty for a region, whose
    last operators take other arguments by right."""
    if first.region is not None:
        return []
    reference = _node(made["reference"], first.site, first, pass_)
    candidate = _node(made["candidate"], first.candidate_site, first, pass_)
    if reference is None or candidate is None:
        return []
    return given_inputs(reference, candidate, made["reference"], made["candidate"])


def stands_alone(first: OperatorResult, side: str) -> bool:
    """Is what that side computes there one operator? A region of several is none."""
    if first.region is None:
        return True
    members = first.region.reference if side == "reference" else first.region.candidate
    return len(members) == 1


def _node(run: Run, path: str, first: OperatorResult, pass_: str) -> CallNode | None:
    for name in dict.fromkeys((pass_, "anchored", "free")):
        nodes = forwards_of(run, name).get((first.sample, first.step), [])
        for node in nodes:
            if node.path == path:
                return node
    return None


def replaced_sites(made: dict[str, Run], first: OperatorResult, side: str) -> tuple[str, str]:
    """(site on ``side``, site on the other) of the operator ``first`` or of what feeds it."""
    other = "candidate" if side == "reference" else "reference"
    names = {"reference": first.site, "candidate": first.candidate_site}
    own = f"{names[side]}:out", f"{names[other]}:out"
    if not first.fed_by or first.fed_by_side != side:
        return own
    calls = [
        next(
            (record.call for record in made[which].records
             if record.call is not None and record.site == f"{names[which]}:out"
             and (record.sample, record.step) == (first.sample, first.step)), None,
        )
        for which in (side, other)
    ]  # fmt: skip
    mine, theirs = calls
    if mine is None or theirs is None:
        return own
    for guilty, healthy in zip(mine.operands, theirs.operands, strict=False):
        made_by = _result(guilty)
        if made_by is None or made_by.rpartition(":")[0] != first.fed_by[-1]:
            continue
        given = _result(healthy)
        if given is not None and guilty.via == healthy.via:
            return made_by, given
    return own


def _result(operand: Operand) -> str | None:
    """The operator's result that an operand is, or is a view of."""
    for site in (operand.site, operand.origin):
        if site is not None and is_operator_site(site) and ":out" in site:
            return site
    return None

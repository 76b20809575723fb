"""What the ends show, as a verdict or beside one.

Order, against what is made inside blocks: an integer that differs before the first block that is
beyond its limit is its cause, and so is the verdict; a seam comes after what an anchored or
escalated pass says is made in a block, and before what free runs seem to say of later blocks; then
sampling. Whatever is not the verdict stands in its evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from divergence.comparison.blocks.integers import Integers
from divergence.comparison.blocks.seams import Seam
from divergence.comparison.blocks.units import Unit, order_of
from divergence.comparison.decide.case import Case
from divergence.comparison.decide.evidence import onset_of
from divergence.comparison.decide.figures import figure
from divergence.comparison.result import Evidence, Onset, Verdict
from divergence.comparison.tokens.sampling import Misfit

__all__ = ["judge_ends", "with_ends"]

_SHOWN = 3


def judge_ends(case: Case, flagged: Sequence[Unit], hidden: Sequence[Unit]) -> Verdict | None:
    """The verdict, where something at the ends comes first. ``flagged``, ``hidden``: units beyond
    their limit in the runs' own dtype and in the escalated pass."""
    if case.ends is None:
        return None
    first = min((order_of(unit.first) for unit in flagged), default=None)
    unequal, broken, misfits = case.ends.unequal, case.ends.broken, case.ends.misfits
    if unequal and (first is None or order_of(unequal[0].result) <= first):
        return with_ends(_unequal(case, unequal[0]), case)
    made_here = bool(hidden) or any(unit.pass_ != "free" for unit in flagged)
    if broken and not made_here and (first is None or order_of(broken[0].result) <= first):
        return with_ends(_broken(case, broken), case)
    if misfits and not flagged and not hidden:
        return with_ends(_misfit(case, case.ends.misfits), case)
    return None


def with_ends(verdict: Verdict, case: Case) -> Verdict:
    """The verdict with what else the ends show in its evidence."""
    ends = case.ends
    if ends is None or verdict.kind in ("incomparable", "nonfinite"):
        return verdict
    said = {one.text for one in verdict.evidence}
    more = [
        *[_integer_evidence(one) for one in ends.unequal[:_SHOWN]],
        *[_seam_evidence(seam) for seam in _one_each(ends.broken)[:_SHOWN]],
        *([_misfit_evidence(ends.misfits)] if ends.misfits else []),
    ]
    new = [one for one in more if one.text not in said]
    if not new:
        return verdict
    return msgspec.structs.replace(verdict, evidence=[*verdict.evidence, *new])


def _unequal(case: Case, first: Integers) -> Verdict:
    first.result.flagged = True
    what = "a choice that does not follow from its own scores" if first.choice else (
        "an integer tensor differs, and integers do not round"
    )  # fmt: skip
    by = f", by the {first.side}" if first.side else ""
    return Verdict(
        kind="localized",
        summary=f"{what}: {first.result.site}{by}",
        onset=onset_of(first.result),
        confidence="high",
        side=first.side,
        evidence=[_integer_evidence(first), *case.context()],
        next=case.advice.look_at(first.result.site),
    )


def _integer_evidence(one: Integers) -> Evidence:
    result = one.result
    of = "tokens" if one.choice else "elements"
    return Evidence(
        text=f"{result.site} ({result.pass_}, sample {result.sample}, step {result.step}): "
        f"{one.num_different} of {one.num_compared} {of} differ, the first is {one.reference} in "
        f"the reference, {one.candidate} in the candidate",
        values={"num_different": one.num_different, "num_compared": one.num_compared},
    )


def _one_each(seams: Sequence[Seam]) -> list[Seam]:
    """The first forward of each place."""
    found: dict[tuple[str, str], Seam] = {}
    for seam in seams:
        found.setdefault((seam.before, seam.site), seam)
    return list(found.values())


def _broken(case: Case, broken: Sequence[Seam]) -> Verdict:
    first = broken[0]
    for seam in broken:
        seam.result.flagged = True
    places = _one_each(broken)
    entered = {s.site for s in case.sites if s.role == "block" and s.site.endswith(":in")}
    blocks = [seam for seam in places if seam.site in entered]
    many = len(blocks) >= 3 and 2 * len(blocks) > len(entered)
    sides = {seam.side for seam in broken}
    side = sides.pop() if len(sides) == 1 else None
    by = f", by the {side}" if side else ""
    made = "is made between" if first.way == "changed" else "seems to be made between"
    between = f"{first.before} and {first.site}"
    sure = "low" if first.way == "grown" else "high" if first.size > 2 * first.limit else "medium"
    next_ = case.advice.look_at(first.site)
    if case.tallies is None and first.way == "changed":
        next_ = [*next_, *case.advice.truth()]
    return Verdict(
        kind="systematic" if many else "localized",
        summary=f"the error {made} blocks, at {len(blocks)} of {len(entered)} places, from "
        f"{between} on{by}"
        if many
        else f"the error {made} {between}{by}: outside the modules, which pass",
        onset=onset_of(first.result),
        confidence=sure,
        side=side,
        evidence=[_seam_evidence(first), *case.context()],
        next=next_,
    )


def _seam_evidence(seam: Seam) -> Evidence:
    place = f"sample {seam.result.sample}, step {seam.result.step}"
    if seam.way == "changed":
        other = "reference" if seam.by == "candidate" else "candidate"
        text = (
            f"the {other} hands {seam.before} on to {seam.site} as it is; the {seam.by} changes "
            f"it by {seam.size:.1e} of its norm (two roundings make at most {seam.limit:.1e}), "
            f"{place}"
        )
    else:
        text = (
            f"between {seam.before} and {seam.site} the two sides' difference grows by "
            f"{figure(seam.size)} × what came in and rounding explain (limit {seam.limit:.1f}), "
            f"{place}"
        )
    return Evidence(text=text, values={"size": seam.size, "limit": seam.limit})


def _misfit(case: Case, misfits: Sequence[Misfit]) -> Verdict:
    first = misfits[0]
    sample, step = first.place
    sides = {misfit.side for misfit in misfits}
    site = (case.ends and case.ends.logits_site) or ".:out"
    return Verdict(
        kind="localized",
        summary=f"the token at sample {sample}, step {step} is not the largest of its own logits "
        f"in the {first.side}: sampling, not the model",
        onset=Onset(site=site, block=None, sample=sample, step=step, position=None),
        confidence="high",
        side=first.side if len(sides) == 1 else "both",
        evidence=[_misfit_evidence(misfits), *case.context()],
        next=case.advice.look_at(site),
    )


def _misfit_evidence(misfits: Sequence[Misfit]) -> Evidence:
    first = misfits[0]
    sample, step = first.place
    return Evidence(
        text=f"sampling: {len(misfits)} tokens are not the largest of their own logits, the first "
        f"in the {first.side} at sample {sample}, step {step}: {first.chosen} was chosen, "
        f"{first.largest} is larger by {first.behind:.3g}",
        values={"num_misfits": len(misfits), "behind": first.behind},
    )

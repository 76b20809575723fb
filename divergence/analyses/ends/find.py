"""The ends: what the code between modules does, sampling, and integers, which do not round.

An integer that differs before the first block that is beyond its limit is its cause, and so is the
verdict. What is made between modules is seen in free runs: it comes after what equal inputs show in
a block, and before what free runs seem to say of later blocks. Whatever is not the verdict stands
in its evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from divergence.analyses.ends.ends import find_ends
from divergence.analyses.ends.integers import Integers
from divergence.analyses.ends.sampling import Misfit
from divergence.analyses.ends.seams import Seam
from divergence.comparison.answer import Answer
from divergence.comparison.decide import check
from divergence.comparison.measured import Measured
from divergence.comparison.results.findings import Evidence, Finding, Onset, figure
from divergence.comparison.results.sites import onset_at, order_of

__all__ = ["find"]

_SHOWN = 3


def find(measured: Measured) -> Answer:
    """At most one finding of each kind: the first in execution order."""
    ends = find_ends(
        measured.reference, measured.candidate, measured.alignment, measured.sites,
        truth=None if measured.truth is None else measured.truth.run,
        thresholds=measured.thresholds,
    )  # fmt: skip
    unequal, broken, misfits = ends.unequal, ends.broken, ends.misfits
    found = []
    if unequal:
        found.append(_unequal(measured, unequal))
    if broken:
        found.append(_broken(measured, broken))
    if misfits:
        found.append(_misfit(measured, misfits, ends.logits_site or ".:out"))
    return Answer(findings=found, notes=ends.notes())


def _unequal(measured: Measured, unequal: Sequence[Integers]) -> Finding:
    first = unequal[0]
    what = "a choice that does not follow from its own scores" if first.choice else (
        "an integer tensor differs, and integers do not round"
    )  # fmt: skip
    by = f", by the {first.side}" if first.side else ""
    return Finding(
        claim="integers_differ",
        kind="localized",
        summary=f"{what}: {first.result.site}{by}",
        onset=onset_at(first.result),
        place=order_of(first.result),
        side=first.side,
        evidence=[_integer_evidence(first)],
        beside=[_integer_evidence(one) for one in unequal[:_SHOWN]],
        next=measured.advice.look_at(first.result.site),
        flags=[first.result.key],
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


def _broken(measured: Measured, broken: Sequence[Seam]) -> Finding:
    first = broken[0]
    places = _one_each(broken)
    entered = {s.site for s in measured.sites if s.role == "block" and s.site.endswith(":in")}
    blocks = [seam for seam in places if seam.site in entered]
    many = len(blocks) >= 3 and 2 * len(blocks) > len(entered)
    sides = {seam.side for seam in broken}
    side = sides.pop() if len(sides) == 1 else None
    by = f", by the {side}" if side else ""
    made = "is made between" if first.way == "changed" else "seems to be made between"
    between = f"{first.before} and {first.site}"
    times = first.size / first.limit if first.limit else float("inf")
    next_ = measured.advice.look_at(first.site)
    if measured.truth_samples is None and first.way == "changed":
        next_ = [*next_, *measured.advice.truth()]
    return Finding(
        claim="error_between",
        kind="systematic" if many else "localized",
        summary=f"the error {made} blocks, at {len(blocks)} of {len(entered)} places, from "
        f"{between} on{by}"
        if many
        else f"the error {made} {between}{by}: outside the modules, which pass",
        onset=onset_at(first.result),
        place=order_of(first.result),
        side=side,
        rests_on=[
            check("one_side_alone", first.way == "changed", "both sides compute something there"),
            check("clear", times > 2, f"{times:.1f} × its limit; above 2 × it would be high"),
        ],
        evidence=[_seam_evidence(first)],
        beside=[_seam_evidence(seam) for seam in places[:_SHOWN]],
        next=next_,
        flags=[seam.result.key for seam in broken],
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


def _misfit(measured: Measured, misfits: Sequence[Misfit], site: str) -> Finding:
    first = misfits[0]
    sample, step = first.place
    sides = {misfit.side for misfit in misfits}
    return Finding(
        claim="not_the_largest_logit",
        kind="localized",
        summary=f"the token at sample {sample}, step {step} is not the largest of its own logits "
        f"in the {first.side}: sampling, not the model",
        onset=Onset(site=site, block=None, sample=sample, step=step, position=None),
        side=first.side if len(sides) == 1 else "both",
        evidence=[_misfit_evidence(misfits)],
        beside=[_misfit_evidence(misfits)],
        next=measured.advice.look_at(site),
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

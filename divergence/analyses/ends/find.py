"""The ends: what an anchored pass cannot see, since it puts the reference's tensors in place.

What lies between blocks, before the final norm, before and behind the head (ends.seams), what does
not round (masks, positions and choices: ends.integers), and sampling. Each is exact or nearly so,
and judged on each side by itself.

An integer that differs before the first block that is beyond its limit is its cause, and so is the
verdict. What is made between modules is seen in free runs: it comes after what equal inputs show in
a block, and before what free runs seem to say of later blocks. Whatever is not the verdict stands
in its evidence.

Decoding is greedy, so a token follows from its own row of logits exactly; no rounding lies between
them. Only where several logits are equal is any of them right. A row with a nan decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from divergence.comparison.align.pairs import Piece, PromptStep, logits_row, why_no_pair
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.results import Finding, Onset, SiteResult, Verdict, onset_at, order_of
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.run.site import module_of
from divergence.words import Side

if TYPE_CHECKING:
    import torch

    from divergence.analyses.ends.integers import Integers
    from divergence.analyses.ends.seams import Seam

_SHOWN = 3

_Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def find(measured: Measured) -> AnalysisResult:
    """At most one finding of each kind: the first in execution order. What is equal bit for bit
    has no seams and no other integers, which are looked for in what differs alone."""
    apart = [site for site in measured.sites if not site.identical]
    seams: list[Seam] = []
    integers: list[Integers] = []
    if any(site.pass_ == "free" for site in apart):
        from divergence.analyses.ends.seams import find_seams

        seams = find_seams(measured)
    if any(_is_exact(site) for site in apart):
        from divergence.analyses.ends.integers import find_integers

        integers = find_integers(measured)
    broken = sorted((s for s in seams if s.beyond), key=lambda seam: order_of(seam.result))
    unequal = [integer for integer in integers if integer.judged]
    unequal.sort(key=lambda integer: (order_of(integer.result), integer.result.pass_ != "anchored"))
    misfits = _find_misfits(measured.reference, measured.candidate)
    findings = []
    if unequal:
        findings.append(_unequal(measured, unequal))
    if broken:
        findings.append(_broken(measured, broken))
    if misfits:
        site = measured.reference.manifest.plan.logits_site or ".:out"
        findings.append(_misfit(measured, misfits, site))
    within = [seam for seam in seams if not seam.beyond]
    unjudged = [integer for integer in integers if integer.choice and not integer.judged]
    return AnalysisResult(findings=findings, notes=_notes(within, unjudged))


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """What both sides hand on in shapes that cannot be held together: nothing is known of it, and
    what uses it is not blamed with certainty."""
    sites = _not_compared(measured)
    if not sites or verdict.kind == "incomparable":
        return []
    facts = [
        fact("ends.not_compared", module=site.removesuffix(":out"), reference=a, candidate=b)
        for site, (a, b) in sites.items()
    ]
    places = measured.reference.records
    orders = {record.site: record.order for record in places if record.pass_ == "free"}
    onset = None if verdict.onset is None else orders.get(verdict.onset.site)
    before = onset is not None and any(orders[site] <= onset for site in sites)
    unseen = check("fed_by_compared", False, fact("ends.fed_by_uncompared"))
    return [
        Finding(
            claim="explanation",
            role="explains",
            addition=[fact("ends.and_not_compared", first=facts[0], num_more=len(facts) - 1)],
            rests_on=[unseen] if before else [],
            evidence=facts[:_SHOWN],
        )
    ]


def _not_compared(measured: Measured) -> dict[str, _Shapes]:
    """Both shapes, by site, of what blocks and trunk modules take or give and both sides have,
    where neither shape is that of the other's copies; in execution order."""
    a, b, rename = measured.reference, measured.candidate, measured.rename
    sites: dict[str, _Shapes] = {}
    if not measured.alignment.skipped:
        return sites
    from divergence.analyses.ends.seams import is_passage

    for item in measured.alignment.skipped:
        place = item.sample, item.step
        ours = a.find(("free", *place, item.site))
        theirs = b.find(("free", *place, rename(item.site)))
        if ours is None or theirs is None or not is_passage(ours, a.manifest):
            continue
        if why_no_pair(Piece(ours, item.sample), Piece(theirs, item.sample)) is not None and (
            ours.shape != theirs.shape
        ):
            sites.setdefault(item.site, (ours.shape, theirs.shape))
    return sites


def _is_exact(site: SiteResult) -> bool:
    """Integers or bools on both sides, which do not round?"""
    dtypes = (site.reference_dtype, site.candidate_dtype)
    return all(format_named(dtype).kind in ("int", "bool") for dtype in dtypes)


def _unequal(measured: Measured, unequal: Sequence[Integers]) -> Finding:
    first = unequal[0]
    code = "ends.choice_not_of_scores" if first.choice else "ends.integers_differ"
    return Finding(
        claim="integers_differ",
        kind="localized",
        headline=[fact(code, site=first.result.site), fact("by", by=first.side, both=False)],
        onset=onset_at(first.result),
        place=order_of(first.result),
        side=first.side,
        evidence=[_integer_evidence(first)],
        beside=[_integer_evidence(integer) for integer in unequal[:_SHOWN]],
        commands=measured.advice.look_at(first.result.site),
        flags=[first.result.key],
    )


def _integer_evidence(gap: Integers) -> Fact:
    result = gap.result
    return fact(
        "ends.num_differ",
        site=result.site,
        pass_=result.pass_,
        sample=result.sample,
        step=result.step,
        tokens=gap.choice,
        num_different=gap.num_different,
        num_compared=gap.num_compared,
        reference=gap.reference,
        candidate=gap.candidate,
    )


def _broken(measured: Measured, broken: Sequence[Seam]) -> Finding:
    first = broken[0]
    by_place: dict[tuple[str, str], Seam] = {}
    for seam in broken:
        by_place.setdefault((seam.before, seam.site), seam)
    places = list(by_place.values())
    entered = {s.site for s in measured.sites if s.role == "block" and s.site.endswith(":in")}
    blocks = [seam for seam in places if seam.site in entered]
    many = len(blocks) >= 3 and 2 * len(blocks) > len(entered)
    sides = {seam.side for seam in broken}
    side = sides.pop() if len(sides) == 1 else None
    notes = measured.candidate.manifest.plan.modules | measured.reference.manifest.plan.modules
    outer = {path for path, note in notes.items() if note.role in ("block", "trunk")}
    all_compared = not any(
        (item.sample, item.step) == (first.result.sample, first.result.step)
        and ":out" in item.site and module_of(item.site) in outer
        for item in measured.alignment.unmatched
    )  # fmt: skip
    times = first.size / first.limit if first.limit else float("inf")
    next_ = measured.advice.look_at(first.site)
    if measured.truth_samples is None and first.way == "changed":
        next_ = [*next_, *(measured.advice.judged() or measured.advice.truth())]
    return Finding(
        claim="error_between",
        kind="systematic" if many else "localized",
        headline=[
            fact(
                "made_between",
                seems=first.way != "changed",
                first=first.before,
                then=first.site,
                num=len(blocks) if many else None,
                total=len(entered),
                by=side,
                outside=all_compared and not many,
            )
        ],
        onset=onset_at(first.result),
        place=order_of(first.result),
        side=side,
        rests_on=[
            check("one_side_alone", first.way == "changed", fact("ends.both_compute")),
            check("clear", times > 2, fact("not_clear", margin=times)),
        ],
        evidence=[_seam_evidence(first)],
        beside=[_seam_evidence(seam) for seam in places[:_SHOWN]],
        commands=next_,
        flags=[seam.result.key for seam in broken],
    )


def _seam_evidence(seam: Seam) -> Fact:
    values: dict[str, Any] = {
        "before": seam.before,
        "site": seam.site,
        "size": seam.size,
        "limit": seam.limit,
        "sample": seam.result.sample,
        "step": seam.result.step,
    }
    if seam.way == "grown":
        return fact("ends.grown", **values)
    other = "reference" if seam.by == "candidate" else "candidate"
    return fact("ends.changed", **values, side=seam.by, other=other)


def _misfit(measured: Measured, misfits: Sequence[Misfit], site: str) -> Finding:
    first = misfits[0]
    sample, step = first.place
    sides = {misfit.side for misfit in misfits}
    return Finding(
        claim="not_the_largest_logit",
        kind="localized",
        headline=[fact("ends.not_largest", sample=sample, step=step, side=first.side)],
        onset=Onset(site=site, block=None, sample=sample, step=step, position=None),
        side=first.side if len(sides) == 1 else "both",
        evidence=[_misfit_evidence(misfits)],
        beside=[_misfit_evidence(misfits)],
        commands=measured.advice.look_at(site),
    )


def _misfit_evidence(misfits: Sequence[Misfit]) -> Fact:
    first = misfits[0]
    sample, step = first.place
    return fact(
        "ends.misfits",
        num_misfits=len(misfits),
        side=first.side,
        sample=sample,
        step=step,
        chosen=first.chosen,
        largest=first.largest,
        behind=first.behind,
    )


def _notes(seams: Sequence[Seam], choices: Sequence[Integers]) -> list[Fact]:
    """What is no fault by itself and worth knowing. ``seams``: within their limits; ``choices``:
    of which nothing more is known than that they differ."""
    small = {(seam.before, seam.site, seam.by): seam for seam in seams}
    notes = [
        fact(
            "ends.changed_within",
            before=before,
            site=site,
            side=by,
            size=seam.size,
            meet=seam.limit == float("inf"),
        )
        for (before, site, by), seam in list(small.items())[:_SHOWN]
    ]
    if choices:
        most = max(choices, key=lambda choice: choice.num_different / max(1, choice.num_compared))
        notes.append(
            fact(
                "ends.choices_differ",
                num_sites=len({c.result.site for c in choices}),
                site=most.result.site,
                num_different=most.num_different,
                num_compared=most.num_compared,
            )
        )
    return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A token that is not the largest of its own logits: ``behind`` the largest by so much."""

    side: Side
    place: PromptStep
    chosen: int
    largest: int
    behind: float


def _find_misfits(reference: Run, candidate: Run) -> list[Misfit]:
    """In the order of samples and steps; nothing of runs that recorded no logits."""
    misfits: list[Misfit] = []
    sides: tuple[tuple[Side, Run], ...] = ("reference", reference), ("candidate", candidate)
    for side, run in sides:
        other = candidate if run is reference else reference
        if run.manifest.plan.replayed_pass is not None or run.manifest.plan.logits_site is None:
            continue
        for sample, tokens in enumerate(run.manifest.tokens.samples):
            for step, chosen in enumerate(tokens.chosen_ids):
                if run.far and _said_by_both(run, other, sample, step):
                    continue
                row = logits_row(run, sample, step)
                found_there = None if row is None else misfit_in(row, chosen)
                if found_there is not None:
                    largest, behind = found_there
                    misfits.append(
                        Misfit(side=side, place=(sample, step), chosen=chosen, largest=largest,
                               behind=behind)
                    )  # fmt: skip
    return sorted(misfits, key=lambda misfit: misfit.place)


def _said_by_both(run: Run, other: Run, sample: int, step: int) -> bool:
    """Do both choose the same token of equal logits? Then those are not fetched for it."""
    samples = other.manifest.tokens.samples
    chosen = run.manifest.tokens.samples[sample].chosen_ids[step]
    if sample >= len(samples) or samples[sample].chosen_ids[step : step + 1] != [chosen]:
        return False
    records = []
    for side in (run, other):
        group = next((g for g in side.manifest.tokens.groups if sample in g), [sample])
        site = side.manifest.plan.logits_site
        records.append(side.find(("free", group[0], step, site)) if site else None)
    first, second = records
    return first is not None and second is not None and first.xxh3 == second.xxh3 is not None


def misfit_in(row: torch.Tensor, chosen: int) -> tuple[int, float] | None:
    """(the largest, by how much) where ``chosen`` is not the largest of a row of logits (V,)."""
    if not row.is_floating_point():
        return None
    largest = int(row.argmax())  # a nan counts as the largest
    if bool(row[largest].isnan()):
        return None
    if chosen >= len(row):
        return largest, float("inf")
    behind = float(row[largest].double() - row[chosen].double())
    return (largest, behind) if behind > 0 else None

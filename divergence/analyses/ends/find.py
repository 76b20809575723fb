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

from typing import TYPE_CHECKING, Any

import numpy as np

from divergence.comparison.align.pairs import (
    Piece,
    PromptStep,
    logits_record,
    logits_row,
    why_no_pair,
)
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check, in_most
from divergence.comparison.limits import CLEAR
from divergence.comparison.results import Finding, Onset, Verdict, order_of
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.formats import format_named, format_of, is_float
from divergence.run.reader import Run
from divergence.run.site import module_of
from divergence.words import SIDES, Side, common_side, other_side

if TYPE_CHECKING:
    from divergence.analyses.ends.integers import Integers
    from divergence.analyses.ends.seams import Seam

_SHOWN = 3

_Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def find(measured: Measured) -> AnalysisResult:
    """Find at most one of each kind: the first in execution order. What is equal bit for bit has no
    seams and no other integers, which are looked for in what differs alone."""
    apart = [site for site in measured.sites if not site.identical]
    seams: list[Seam] = []
    integers: list[Integers] = []
    if any(site.pass_ == "free" for site in apart):
        from divergence.analyses.ends.seams import find_seams

        seams = find_seams(measured)
    dtypes = {(site.reference_dtype, site.candidate_dtype) for site in apart}
    if any({format_named(dtype).kind for dtype in pair} <= {"int", "bool"} for pair in dtypes):
        from divergence.analyses.ends.integers import find_integers

        integers = find_integers(measured)
    broken = sorted((s for s in seams if s.beyond), key=lambda seam: order_of(seam.result))
    unequal = [integer for integer in integers if integer.judged]
    unequal.sort(key=lambda integer: (order_of(integer.result), integer.result.pass_ != "anchored"))
    # tokens that are not the largest of their own logits
    misfits: list[tuple[PromptStep, Side, int, tuple[int, float]]] = []
    pair = measured.reference, measured.candidate
    for side, run, other in zip(SIDES, pair, pair[::-1], strict=True):
        if run.manifest.plan.replayed_pass is not None or run.manifest.plan.logits_site is None:
            continue
        for sample, tokens in enumerate(run.manifest.tokens.samples):
            for step, chosen in enumerate(tokens.chosen_ids):
                if run.far and _said_by_both(run, other, sample, step):
                    continue
                row = logits_row(run, sample, step)
                larger = None if row is None else misfit_in(row, chosen)
                if larger is not None:
                    misfits.append(((sample, step), side, chosen, larger))
    findings = []
    if unequal:
        gap = unequal[0]
        code = "ends.choice_not_of_scores" if gap.choice else "ends.integers_differ"
        findings.append(
            measured.finding_at(
                gap.result,
                claim="integers_differ",
                kind="localized",
                side=gap.side,
                headline=[fact(code, site=gap.result.site), fact("by", by=gap.side, both=False)],
                evidence=[_integer_evidence(gap)],
                beside=[_integer_evidence(integer) for integer in unequal[:_SHOWN]],
            )
        )
    if broken:
        findings.append(_between(measured, broken))
    if misfits:
        site = measured.reference.manifest.plan.logits_site or ".:out"
        (sample, step), side, chosen, (largest, behind) = min(misfits, key=lambda misfit: misfit[0])
        evidence = fact(
            "ends.misfits",
            num_misfits=len(misfits),
            side=side,
            sample=sample,
            step=step,
            chosen=chosen,
            largest=largest,
            behind=behind,
        )
        findings.append(
            Finding(
                claim="not_the_largest_logit",
                kind="localized",
                headline=[fact("ends.not_largest", sample=sample, step=step, side=side)],
                onset=Onset(site=site, block=None, sample=sample, step=step, position=None),
                side=common_side(side for _, side, *_ in misfits),
                evidence=[evidence],
                beside=[evidence],
                commands=measured.advice.look_at(site),
            )
        )
    # what is no fault by itself and worth knowing: seams within their limits, and choices of which
    # nothing more is known than that they differ
    unjudged = [integer for integer in integers if integer.choice and not integer.judged]
    small = {(seam.before, seam.site, seam.by): seam for seam in seams if not seam.beyond}
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
    if unjudged:
        most = max(unjudged, key=lambda choice: choice.num_different / max(1, choice.num_compared))
        num_sites = len({choice.result.site for choice in unjudged})
        notes.append(
            fact(
                "ends.choices_differ",
                num_sites=num_sites,
                site=most.result.site,
                num_different=most.num_different,
                num_compared=most.num_compared,
            )
        )
    return AnalysisResult(findings=findings, notes=notes)


def _between(measured: Measured, broken: list[Seam]) -> Finding:
    """Find the first of what is made between modules and is beyond its limit."""
    first, places = broken[0], {(seam.before, seam.site): seam for seam in reversed(broken)}
    seams = sorted(places.values(), key=broken.index)
    entered = {s.site for s in measured.sites if s.role == "block" and s.site.endswith(":in")}
    num = sum(seam.site in entered for seam in seams)
    many = in_most(num, len(entered))
    wrong = None if len({seam.side for seam in broken}) > 1 else first.side
    modules = measured.candidate.manifest.plan.modules | measured.reference.manifest.plan.modules
    outer = {path for path, note in modules.items() if note.role in ("block", "trunk")}
    all_compared = not any(
        (item.sample, item.step) == (first.result.sample, first.result.step)
        and ":out" in item.site
        and module_of(item.site) in outer
        for item in measured.alignment.unmatched
    )
    times = first.size / first.limit if first.limit else float("inf")
    commands = measured.advice.look_at(first.site)
    judged = measured.truth is not None or measured.floor is not None
    if not judged and first.way == "changed":
        commands = [*commands, *(measured.advice.judged() or measured.advice.truth())]
    made = fact(
        "made_between",
        seems=first.way != "changed",
        first=first.before,
        then=first.site,
        num=num if many else None,
        total=len(entered),
        by=wrong,
        outside=all_compared and not many,
    )
    return measured.finding_at(
        first.result,
        claim="error_between",
        kind="systematic" if many else "localized",
        headline=[made],
        side=wrong,
        rests_on=[
            check("one_side_alone", first.way == "changed", fact("ends.both_compute")),
            check("clear", times > CLEAR, fact("not_clear", margin=times)),
        ],
        evidence=[_seam_evidence(first)],
        beside=[_seam_evidence(s) for s in seams[:_SHOWN]],
        commands=commands,
        flags=[seam.result.key for seam in broken],
    )


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """Name what both sides hand on in shapes that cannot be held together: nothing is known of it,
    and what uses it is not blamed with certainty."""
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
    addition = fact("ends.and_not_compared", first=facts[0], num_more=len(facts) - 1)
    return [
        Finding(
            claim="explanation",
            role="explains",
            addition=[addition],
            rests_on=[unseen] if before else [],
            evidence=facts[:_SHOWN],
        )
    ]


def _not_compared(measured: Measured) -> dict[str, _Shapes]:
    """Both shapes, by site, of what blocks and trunk modules take or give and both sides have,
    where neither shape is that of the other's copies; in execution order."""
    a, b, rename = measured.reference, measured.candidate, measured.rename
    sites: dict[str, _Shapes] = {}
    for item in measured.alignment.skipped:
        from divergence.analyses.ends.seams import is_passage

        ours = a.find(("free", item.sample, item.step, item.site))
        partner = b.find(("free", item.sample, item.step, rename(item.site)))
        if ours is None or partner is None or ours.shape == partner.shape:
            continue
        pieces = Piece(ours, item.sample), Piece(partner, item.sample)
        if is_passage(ours, a.manifest) and why_no_pair(*pieces) is not None:
            sites.setdefault(item.site, (ours.shape, partner.shape))
    return sites


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
    return fact("ends.changed", **values, side=seam.by, other=other_side(seam.by))


def _said_by_both(run: Run, other: Run, sample: int, step: int) -> bool:
    """Do both choose the same token of equal logits? Then those are not fetched for it."""
    samples = other.manifest.tokens.samples
    chosen = run.manifest.tokens.samples[sample].chosen_ids[step]
    if sample >= len(samples) or samples[sample].chosen_ids[step : step + 1] != [chosen]:
        return False
    logits_a, logits_b = (logits_record(side, sample, step)[0] for side in (run, other))
    digests = {record and record.xxh3 for record in (logits_a, logits_b)}
    return len(digests) == 1 and None not in digests


def misfit_in(row: np.ndarray, chosen: int) -> tuple[int, float] | None:
    """(the largest, by how much) where ``chosen`` is not the largest of a row of logits (V,)."""
    if not is_float(format_of(row.dtype)):
        return None
    row = wide(row)
    largest = int(row.argmax())  # a nan counts as the largest
    if np.isnan(row[largest]):
        return None
    if chosen >= len(row):
        return largest, float("inf")
    behind = float(row[largest] - row[chosen])
    return (largest, behind) if behind > 0 else None

"""The ends: what an anchored pass cannot see, since it puts the reference's tensors in place.

What lies between blocks, before the final norm, before and behind the head (seams), what does
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

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from divergence.comparison.align import (
    Pair,
    Piece,
    PromptStep,
    logits_record,
    logits_row,
    why_no_pair,
)
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.constants import CAST_ROUNDINGS, CLEAR_TIMES
from divergence.comparison.decide import check, in_most
from divergence.comparison.result import Finding, Onset, SiteResult, Verdict, order_of
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.floor import Thresholds, floor_weights, spread
from divergence.numerics.formats import Format, format_named, format_of, is_float
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import ROOT, is_operator_site, module_of
from divergence.words import SIDES, Side, common_side, other_side

if TYPE_CHECKING:
    from divergence.analyses.ends.integers import Integers


_SHOWN = 3

_Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def find(measured: Measured) -> AnalysisResult:
    """Find at most one of each kind: the first in execution order. What is equal bit for bit has no
    seams and no other integers, which are looked for in what differs alone."""
    apart = [site for site in measured.sites if not site.identical]
    seams: list[Seam] = []
    integers: list[Integers] = []
    if any(site.pass_ == "free" for site in apart):
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
            check("clear", times > CLEAR_TIMES, fact("not_clear", margin=times)),
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


# Seams: what one block or trunk module hands on to the next, on each side by itself.
#
# In the free pass a module is charged with what it adds, not with what comes in. So the seams are
# looked at themselves. On each side an input is held, by its digest, against the outputs recorded
# before it in the same forward:
#
# - handed on unchanged on both sides: nothing is made there;
# - unchanged on one side, changed on the other: what the other does there is measured on that side
#   alone, x the input and y the output that the first side hands on, ‖x - y‖/‖y‖ of each row. One
#   cast makes at most u in each element (round to nearest), two of them 2u, u the unit roundoff of
#   the coarsest format in play: beyond that it is no rounding, and no other error is in the way.
#   Where the two sides are closer at the input than that change, the output before it was apart
#   already, and other code leads to the same tensor;
# - changed on both sides (an embedding that is scaled, logits that are capped): the two sides'
#   difference at the input is held against what the outputs before it carry, like that of a module
#   in a free pass.
#
# It says nothing of what both sides change alike, nor of an input whose partner was not recorded.

Way = Literal["changed", "grown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """Something happens between ``before`` and ``site``, seen in the forward of ``result``.

    ``way``: ``changed`` on the side ``by`` alone, by ``size`` (the largest row's relative change),
    or ``grown``: the two sides' difference, over what the outputs before it carry. ``limit``: what
    ``size`` is held against. ``side``: which run is wrong, where a truth tells.
    """

    before: str
    site: str
    result: SiteResult
    way: Way
    size: float
    limit: float
    by: Side | None = None
    side: Side | None = None

    @property
    def beyond(self) -> bool:
        return not self.size <= self.limit


def find_seams(measured: Measured) -> list[Seam]:
    """Every seam at which something happens, in execution order, within its limit or beyond."""
    a, truth = measured.reference, measured.truth
    looked = _Looked(
        a=a,
        b=measured.candidate,
        truth=None if truth is None else truth.run,
        results={(s.pass_, s.sample, s.step, s.site): s for s in measured.sites},
        thresholds=measured.thresholds,
    )
    # the free pairs of blocks and trunk, by forward
    forwards: dict[tuple[int, int], list[Pair]] = {}
    passages: dict[tuple[str, str], bool] = {}
    for pair in measured.alignment.pairs:
        record = pair.reference.record
        key = record.site, record.dtype
        if pair.pass_ == "free" and key not in passages:
            passages[key] = is_passage(record, a.manifest)
        if pair.pass_ == "free" and passages[key]:
            forwards.setdefault((pair.reference.sample, record.step), []).append(pair)
    seams: list[Seam | None] = []
    first: dict[int, list[Pair]] = {}  # outputs of the first forward, such as an encoder's
    for (sample, step), pairs in forwards.items():
        given = _Given(first.get(sample, []) if step else [], looked.is_block)
        for pair in sorted(pairs, key=lambda pair: pair.reference.record.order):
            result, takes = looked.result_of(pair), _takes(pair.reference.record.site)
            if takes and result is not None and not result.identical:
                seams.append(looked.seam(pair, given, result))
            if not takes:
                given.add(pair)
                if step == 0:
                    first.setdefault(sample, []).append(pair)
    return [seam for seam in seams if seam is not None]


def is_passage(record: Record, manifest: Manifest) -> bool:
    """A float tensor that a block or trunk module takes or gives."""
    if is_operator_site(record.site) or "mask" in record.site.partition(":")[2]:
        return False
    note = manifest.plan.modules.get(module_of(record.site))
    if note is None or note.role not in ("block", "trunk"):
        return False
    return format_named(record.dtype).kind == "float"


def _takes(site: str) -> bool:
    """Does something come out of the code between modules here? The model's own output does."""
    path, _, port = site.partition(":")
    return port.startswith("in") or path == ROOT


def _of(pair: Pair, side: int) -> Record:
    return (pair.reference, pair.candidate)[side].record


_Key = tuple[str | None, str, tuple[int, ...], tuple[int, ...] | None]
"""(digest, dtype, shape, positions) of what a record holds."""


def _digest(record: Record) -> str | None:
    return record.xxh3 or record.fold


def _key(record: Record) -> _Key:
    return _digest(record), record.dtype, record.shape, record.positions


class _Given:
    """The outputs so far, in order, and by what they hold: for the reference, the candidate."""

    def __init__(self, pairs: Iterable[Pair], is_block: Callable[[Pair], bool]) -> None:
        self.pairs: list[Pair] = []
        self._is_block = is_block
        self._last_block = 0
        self._by_key: tuple[dict[_Key, list[Pair]], ...] = ({}, {})
        for pair in pairs:
            self.add(pair)

    def add(self, pair: Pair) -> None:
        if self._is_block(pair):
            self._last_block = len(self.pairs)
        self.pairs.append(pair)
        for side in (0, 1):
            record = _of(pair, side)
            if _digest(record) is not None:
                self._by_key[side].setdefault(_key(record), []).append(pair)

    def since_last_block(self) -> list[Pair]:
        """The last block's output and what came after it; all where there is no block."""
        return self.pairs[self._last_block :]

    def equal_to(self, record: Record, side: int) -> list[Pair]:
        """Are they equal by their digests?"""
        return [] if _digest(record) is None else self._by_key[side].get(_key(record), [])


@dataclass(frozen=True, slots=True)
class _Looked:
    a: Run
    b: Run
    truth: Run | None
    results: dict[tuple[str, int, int, str], SiteResult]
    thresholds: Thresholds

    def result_of(self, pair: Pair) -> SiteResult | None:
        record = pair.reference.record
        return self.results.get(("free", pair.reference.sample, record.step, record.site))

    def seam(self, pair: Pair, given: _Given, result: SiteResult) -> Seam | None:
        record, partner = pair.reference.record, pair.candidate.record
        ours = self._sources(self.a, record, given, 0)
        others = self._sources(self.b, partner, given, 1)
        if any(source is other for source in ours for other in others):
            return None  # the same output is handed on: no number is made
        if ours:
            return self._changed(self.b, partner, ours[0].candidate.record, ours[0], result)
        if others:
            return self._changed(self.a, record, others[0].reference.record, others[0], result)
        if record.site.partition(":")[2] not in ("in", "out"):
            return None
        here = [p for p in given.since_last_block() if p.reference.record.step == record.step]
        return self._grown(here, result)

    def _sources(self, run: Run, record: Record, given: _Given, side: int) -> list[Pair]:
        """The outputs before it that are this very tensor, the last one first; else one behind the
        last block of which it holds some rows."""
        sources = given.equal_to(record, side)[::-1]
        near = [(pair, _of(pair, side)) for pair in reversed(given.since_last_block())]
        if not sources:  # of a tensor in parts there is no digest: the nearest ones are read
            sources = [
                pair
                for pair, other in near
                if None in (_digest(record), _digest(other)) and _same(run, record, other)
            ]
        for pair, other in near if not sources and record.positions is not None else ():
            if _narrowed(record, other) and _equal(run, record, other):
                return [pair]
        return sources

    def _changed(
        self, run: Run, record: Record, before: Record, source: Pair, result: SiteResult
    ) -> Seam | None:
        """Return what ``run`` does to the tensor that the other side hands on."""
        by = SIDES[run is not self.a]
        name = source.reference.record.site
        if record.shape != before.shape and not _narrowed(record, before):
            size = math.inf
        elif not (run.has_bytes(record) and run.has_bytes(before)):
            return self._grown([source], result)  # by how much is not known of one side alone
        else:
            x, y = _rows(run, record, before)
            with np.errstate(all="ignore"):
                norm, apart = np.linalg.norm(y, axis=-1), np.linalg.norm(x - y, axis=-1)
                rows = np.where(norm > 0, apart / norm, apart)
            rows = rows[np.isfinite(rows)]
            size = float(rows.max()) if len(rows) else 0.0
        unit = max(form.unit_roundoff for form in self._formats(record, before))
        limit = CAST_ROUNDINGS * unit
        if result.token_rel_l2_max is not None and result.token_rel_l2_max < size / 2:
            # the outputs before it were apart, and meet here: other code, the same tensor
            limit = math.inf
        return Seam(
            before=name,
            site=result.site,
            result=result,
            way="changed",
            size=size,
            limit=limit,
            by=by,
            side=self._side(result, source, by),
        )

    def _formats(self, *records: Record) -> list[Format]:
        forms = [format_named(record.dtype) for record in records]
        forms += [format_named(run.manifest.model.dtype) for run in (self.a, self.b)]
        return [form for form in forms if form.kind == "float" and form.itemsize >= 2]

    def _side(self, result: SiteResult, source: Pair, by: Side) -> Side | None:
        """Name, with a truth, the side that does what the truth does not."""
        if self.truth is None:
            return None
        site = result.site, result.candidate_site or result.site
        before = source.reference.record.site, source.candidate.record.site
        for end, start in zip(site, before, strict=True):
            record, other = (
                self.truth.find(("free", result.sample, result.step, name)) for name in (end, start)
            )
            if record is None or other is None:
                continue
            if _same(self.truth, record, other) or (
                _narrowed(record, other) and _equal(self.truth, record, other)
            ):
                return by
            return other_side(by)
        return None

    def _grown(self, given: Sequence[Pair], result: SiteResult) -> Seam | None:
        """Both sides compute something there: the difference over what came in.

        ``given``: the outputs since the last block's, since which of them is used is not known."""
        if result.token_rel_l2_median is None or not given:
            return None
        results = [each for each in map(self.result_of, given) if each is not None]
        carried = [each.token_rel_l2_max or 0.0 for each in results]
        if len(results) < len(given) or any(each.token_rel_l2_max is None for each in results):
            return None
        entering = max(carried)
        forms = self._formats(given[-1].reference.record, given[-1].candidate.record)
        unit = max(forms, key=lambda form: form.unit_roundoff)
        width = result.shape[-1] if result.shape else 1
        store, update = floor_weights(unit, num_features=width, in_block=False)
        made = math.sqrt(max(0.0, result.token_rel_l2_median**2 - entering**2))
        allowed = math.sqrt(store**2 + update**2 + (self.thresholds.free_gain * entering) ** 2)
        size = made / allowed
        count = result.numel if result.estimated is None else result.estimated.num_values
        limit = self.thresholds.typical * spread(count)
        if size <= limit:
            return None
        return Seam(
            before=given[-1].reference.record.site,
            site=result.site,
            result=result,
            way="grown",
            size=size,
            limit=limit,
        )

    def is_block(self, pair: Pair) -> bool:
        note = self.a.manifest.plan.modules.get(module_of(pair.reference.record.site))
        return note is not None and note.role == "block"


def _same(run: Run, record: Record, other: Record) -> bool:
    """Are they one tensor, bit for bit?"""
    if _key(other)[1:] != _key(record)[1:]:
        return False
    if None not in (_digest(record), _digest(other)):
        return _digest(other) == _digest(record)
    return _equal(run, record, other)


def _narrowed(record: Record, other: Record) -> bool:
    """Does it hold some of the other's token positions?"""
    return (
        record.positions is not None
        and other.positions is None
        and len(record.shape) == len(other.shape) >= 2
        and record.shape[0] == other.shape[0]
        and record.shape[2:] == other.shape[2:]
        and max(record.positions, default=0) < other.shape[1]
    )


def _rows(run: Run, record: Record, before: Record) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64, the second narrowed to the rows of the first."""
    x, y = run.array(record), run.array(before)
    if record.shape != before.shape and record.positions is not None:
        y = y[:, list(record.positions)]
    return wide(x), wide(y)


def _equal(run: Run, record: Record, other: Record) -> bool:
    if not (run.has_bytes(record) and run.has_bytes(other)):
        return False
    x, y = _rows(run, record, other)
    run.release(record.num_bytes + other.num_bytes)
    return np.array_equal(x, y, equal_nan=True)

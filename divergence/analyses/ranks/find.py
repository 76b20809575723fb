"""Ranks against one another: replicas must agree bit for bit, and a part may be wrong alone.

In a run of several ranks much is computed by each of them from the same numbers with the same
operators. Where two such replicas differ, a rank is at fault, whatever the other run says: no
rounding explains it, since both round alike (a collective may add in another order on each rank
and still be right: then the difference is of the size of rounding, and is told but decides
nothing). Which rank it is, most of the others say; of two ranks, the other run does. Where a
divided tensor is off, its parts tell which rank made the wrong one; where prompts are, who ran
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from divergence.comparison.align.pairs import Pair
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.preflight.code import without_pads
from divergence.comparison.result import RankShare, ReplicaCheck, ReplicaDiff, ToldBy
from divergence.comparison.results import Finding, Onset, SiteResult, Verdict, order_of
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.ranks import RankDisagreement, UnshardedRun
from divergence.run.reader import Run
from divergence.run.record import Coordinates, Record
from divergence.words import Side

if TYPE_CHECKING:
    import torch

_FAR = 8.0
"""A version this many times farther from the other run than the other version is the wrong one."""
_ROUNDING = 64.0
"""Unit roundoffs by which replicas may differ where no floor is known: a sum over ranks in another
order moves each element by a few."""
_LIMIT = 6.0
"""Floors beyond which a disagreement is a fault: the judge's own limit for a site with siblings."""

Where = dict[tuple[Side, Coordinates], Pair]


def find(measured: Measured) -> AnalysisResult:
    """One finding for each side whose ranks disagree, of the first place where they do."""
    checks = check_replicas(measured.reference, measured.candidate, measured.alignment.pairs)
    telling = [(checked, _telling(checked)) for checked in checks]
    return AnalysisResult(
        findings=[_finding(measured, checked, diff) for checked, diff in telling if diff],
        parts={"replicas": checks},
    )


def check_replicas(a: Run, b: Run, pairs: Sequence[Pair]) -> list[ReplicaCheck]:
    """One check for each side that several ranks made; empty where none was."""
    where: Where = {}
    for pair in pairs:
        where[("reference", pair.reference.record.coordinates)] = pair
        where[("candidate", pair.candidate.record.coordinates)] = pair
    checks: list[ReplicaCheck] = []
    sides: tuple[tuple[Side, Run, Run], ...] = ("reference", a, b), ("candidate", b, a)
    for side, run, other in sides:
        if isinstance(run, UnshardedRun):
            checks.append(_check(side, run, other, where))
    return checks


def _check(side: Side, run: UnshardedRun, other: Run, where: Where) -> ReplicaCheck:
    copied = {
        record.coordinates
        for record in run.run.records
        if record.placement is not None and "replicate" in record.placement
    }
    first: dict[str, RankDisagreement] = {}
    for disagreement in sorted(run.disagreements, key=lambda d: (d.sample, d.step, d.order)):
        first.setdefault(disagreement.pass_, disagreement)
    return ReplicaCheck(
        side=side,
        mesh=run.manifest.processes,
        num_tensors=len(copied),
        num_different=len({disagreement.coordinates for disagreement in run.disagreements}),
        first=[_measured(side, run, other, disagreement, where) for disagreement in first.values()],
    )


def _measured(
    side: Side, run: UnshardedRun, other: Run, disagreement: RankDisagreement, where: Where
) -> ReplicaDiff:
    """How far apart the versions are, and which is wrong."""
    ranks, peers = disagreement.ranks, disagreement.peers
    told_by: ToldBy = "majority"
    size: float | None = None
    records = list(disagreement.records)
    if all(run.has_bytes(record) for record in records):
        if len(ranks) >= len(peers):
            told_by = "nobody"
            nearer = _nearer(side, run, other, disagreement, where)
            if nearer is not None:
                told_by = "other run"
                if nearer == 1:
                    ranks, peers = peers, ranks
                    records.reverse()
        size = max(_apart(run.run, records[0], run.run, odd) for odd in records[1:])
    elif len(ranks) >= len(peers):
        told_by = "nobody"
    return ReplicaDiff(
        side=side, pass_=disagreement.pass_, sample=disagreement.sample, step=disagreement.step,
        site=disagreement.site, ranks=ranks, peers=peers, told_by=told_by, rel_l2=size,
    )  # fmt: skip


def _nearer(
    side: Side, run: UnshardedRun, other: Run, disagreement: RankDisagreement, where: Where
) -> int | None:
    """Which of two versions (0 or 1) is clearly nearer to the other run's tensor, if one is."""
    pair = where.get((side, disagreement.coordinates))
    if pair is None or len(disagreement.records) != 2:
        return None
    theirs = (pair.candidate if side == "reference" else pair.reference).record
    if not other.has_bytes(theirs) or theirs.shape != disagreement.records[0].shape:
        return None
    far = [_apart(other, theirs, run.run, version) for version in disagreement.records]
    if far[0] * _FAR < far[1]:
        return 0
    return 1 if far[1] * _FAR < far[0] else None


def _apart(run_a: Run, a: Record, run_b: Run, b: Record) -> float:
    """‖a - b‖ / ‖a‖; nan and inf count as infinitely far."""
    return _rel_l2(run_a.read(a), run_b.read(b))


def _rel_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    import torch

    x, y = a.to(torch.float64), b.to(torch.float64)
    apart, norm = float(torch.linalg.vector_norm(x - y)), float(torch.linalg.vector_norm(x))
    if apart != apart:
        return float("inf")
    if norm == 0.0:
        return 0.0 if apart == 0.0 else float("inf")
    return apart / norm


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """The one rank whose part of the onset's tensor is off, where that is so."""
    if verdict.onset is None:
        return []
    share = _share(verdict.onset, measured)
    if share is None:
        return _of_prompts(verdict, verdict.onset, measured)
    off = fact(
        "ranks.share_off",
        site=share.site,
        side=share.side,
        rank=share.rank,
        rel_l2=share.rel_l2,
        rest_rel_l2=share.rest_rel_l2,
    )
    return [
        Finding(
            claim="explanation", role="explains", addition=[fact("rank_share", rank=share.rank)],
            evidence=[off],
        )
    ]  # fmt: skip


def _of_prompts(verdict: Verdict, onset: Onset, measured: Measured) -> list[Finding]:
    """The ranks that ran the prompts at fault, where these are most of theirs and no other's."""
    usages: dict[int, float] = {}
    for site in measured.sites:
        if (site.pass_, site.site) != (onset.pass_, onset.site):
            continue
        batch = len(site.prompts or ()) > 1
        rows = [(p.sample, p.usage) for p in site.prompts] if batch else [(site.sample, site.usage)]
        for sample, usage in rows:
            usages[sample] = max(usage or 0.0, usages.get(sample, 0.0))
    wrong = {sample for sample, usage in usages.items() if usage > 1}
    owning: list[Fact] = []
    evidence: list[Fact] = []
    for side, run in (("reference", measured.reference), ("candidate", measured.candidate)):
        if not isinstance(run, UnshardedRun) or verdict.side not in (None, side):
            continue
        owners = _owners(run, onset)
        if not wrong or not wrong <= owners.keys() or len(set(owners.values())) < 2:
            continue
        ranks = owners[min(wrong)]
        theirs = {sample for sample in usages if owners.get(sample) == ranks}
        if not wrong <= theirs or 2 * len(wrong) <= len(theirs):
            continue
        owning.append(fact("ranks.of_side", ranks=sorted(ranks), side=side))
        evidence.append(
            fact(
                "ranks.ran_wrong",
                ranks=owning[-1],
                num_run=len(theirs),
                total=len(usages),
                num_wrong=len(wrong),
                num_others=len(usages) - len(theirs),
            )
        )
    if not owning:
        return []
    # of both sides where they dealt alike and no truth tells which is wrong
    ran = fact("ranks.ran", ranks=owning, localized=verdict.kind == "localized")
    return [Finding(claim="explanation", role="explains", addition=[ran], evidence=evidence)]


def _owners(run: UnshardedRun, onset: Onset) -> dict[int, frozenset[int]]:
    """By prompt, the ranks that ran it."""
    ranks: dict[int, set[int]] = {}
    for record in run.run.records:
        if (record.pass_, record.site) == (onset.pass_, onset.site):
            ranks.setdefault(record.sample, set()).add(record.rank)
    groups = {group[0]: group for group in run.manifest.tokens.groups}
    return {
        sample: frozenset(those) for first, those in ranks.items()
        for sample in groups.get(first, [first])
    }  # fmt: skip


def _telling(check: ReplicaCheck) -> ReplicaDiff | None:
    """The disagreement that a verdict may rest on: where inputs were anchored, if anywhere."""
    by_pass = {diff.pass_: diff for diff in check.first}
    return by_pass.get("anchored") or by_pass.get("free")


def _finding(measured: Measured, checked: ReplicaCheck, diff: ReplicaDiff) -> Finding:
    pairs = measured.alignment.pairs
    pair = next((p for p in pairs if _is_at(p, diff)), None)
    result = None if pair is None else _result_of(pair, measured.sites)
    code = "ranks.disagree_untold" if diff.told_by == "nobody" else "ranks.disagree"
    alone = len(diff.ranks) == 1
    who = fact(code, ranks=diff.ranks, peers=diff.peers, side=diff.side, alone=alone)
    disagreement = fact(
        "ranks.disagreement",
        who=who,
        site=diff.site,
        pass_=diff.pass_,
        sample=diff.sample,
        step=diff.step,
        num_more=checked.num_different - 1,
        num_tensors=checked.num_tensors,
        rel_l2=diff.rel_l2,
        told_by=diff.told_by,
    )
    if not _is_fault(diff, result, pair):
        note = fact("ranks.other_order", disagreement=disagreement)
        return Finding(claim="replicas_disagree", role="hints", evidence=[note])
    return Finding(
        claim="replicas_disagree",
        kind="localized",
        headline=[fact("ranks.disagree_at", who=who, site=diff.site)],
        onset=Onset(
            site=diff.site if result is None else result.site,
            block=None if result is None else result.block,
            sample=diff.sample,
            step=diff.step,
            position=None,
            pass_=diff.pass_ if result is None else result.pass_,
        ),
        place=None if result is None else order_of(result),
        equal_inputs=result is not None and result.pass_ == "anchored",
        side=diff.side,
        rests_on=[check("bytes", diff.rel_l2 is not None, fact("ranks.by_digests"))],
        evidence=[disagreement],
        addition=[who],
        flags=[] if result is None else [result.key],
    )


def _is_fault(diff: ReplicaDiff, result: SiteResult | None, pair: Pair | None) -> bool:
    """More than adding in another order on each rank would do?"""
    if diff.rel_l2 is None:
        return True  # other bytes, and no way to see that it is little
    if result is not None and result.floor:
        return diff.rel_l2 > _LIMIT * result.floor
    if pair is None:
        return True
    piece = pair.reference if diff.side == "reference" else pair.candidate
    form = format_named(piece.record.dtype)
    if form.kind != "float":
        return True
    return diff.rel_l2 > _ROUNDING * form.unit_roundoff


def _is_at(pair: Pair, diff: ReplicaDiff) -> bool:
    piece = pair.reference if diff.side == "reference" else pair.candidate
    return piece.record.coordinates == (diff.pass_, diff.sample, diff.step, diff.site)


def _result_of(pair: Pair, sites: Sequence[SiteResult]) -> SiteResult | None:
    return next((s for s in sites if (s.pass_, s.sample, s.step, s.site) == _key(pair)), None)


def _key(pair: Pair) -> tuple[str, int, int, str]:
    reference = pair.reference
    return (pair.pass_, reference.sample, pair.candidate.record.step, reference.record.site)


def _result_at(onset: Onset, sites: Sequence[SiteResult]) -> SiteResult | None:
    """The one that the onset was taken from: its sample may be any of a batch."""
    at = (onset.pass_, onset.step, onset.site)
    here = (s for s in sites if (s.pass_, s.step, s.site) == at)
    return next((s for s in here if onset.sample in (s.sample, s.worst_sample)), None)


def _share(onset: Onset, measured: Measured) -> RankShare | None:
    at = _result_at(onset, measured.sites)
    a, b = measured.reference, measured.candidate
    for pair in measured.alignment.pairs:
        ours, theirs = pair.reference.record, pair.candidate.record
        if at is None or _key(pair) != (at.pass_, at.sample, at.step, at.site):
            continue
        sides: tuple[tuple[Side, Run, Record], ...] = (
            ("candidate", b, theirs),
            ("reference", a, ours),
        )
        for side, run, own in sides:
            if not isinstance(run, UnshardedRun) or pair.reference.row is not None:
                continue
            if ours.shape != theirs.shape or not (a.has_bytes(ours) and b.has_bytes(theirs)):
                continue
            parts = run.shares(own)
            if len({repr(part.index) for part in parts}) < max(2, len(parts)):
                continue  # whole on each rank, or terms of a sum
            x = without_pads(a.manifest, ours, a.read(ours))
            y = without_pads(b.manifest, theirs, b.read(theirs))
            if x is None or y is None:
                continue
            errors = [_rel_l2(x[part.index], y[part.index]) for part in parts]
            worst = max(range(len(parts)), key=errors.__getitem__)
            rest = max(error for n, error in enumerate(errors) if n != worst)
            if errors[worst] > _FAR * rest:
                return RankShare(
                    side=side, site=onset.site, rank=parts[worst].rank, rel_l2=errors[worst],
                    rest_rel_l2=rest,
                )  # fmt: skip
    return None

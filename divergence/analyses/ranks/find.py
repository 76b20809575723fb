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

from typing import TYPE_CHECKING

from divergence.comparison.align.pairs import Pair
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.preflight.code import without_pads
from divergence.comparison.result import ReplicaCheck, ReplicaDiff, ToldBy
from divergence.comparison.results import Finding, Onset, Verdict, order_of
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.ranks import RankDisagreement, UnshardedRun
from divergence.run.reader import Run
from divergence.run.record import Coordinates
from divergence.words import SIDES, Side

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
    """One check for each side that several ranks made, and one finding for each whose ranks
    disagree, of the first place where they do."""
    a, b = measured.reference, measured.candidate
    where: Where = {}
    for pair in measured.alignment.pairs:
        where["reference", pair.reference.record.coordinates] = pair
        where["candidate", pair.candidate.record.coordinates] = pair
    checks, findings = [], []
    for side, run, other in zip(SIDES, (a, b), (b, a), strict=True):
        if not isinstance(run, UnshardedRun):
            continue
        copied = {r.coordinates for r in run.run.records if "replicate" in (r.placement or ())}
        first: dict[str, ReplicaDiff] = {}
        for each in sorted(run.disagreements, key=lambda d: (d.sample, d.step, d.order)):
            if each.pass_ not in first:
                first[each.pass_] = _measured(side, run, other, each, where)
        checks.append(ReplicaCheck(
            side=side, mesh=run.manifest.processes, num_tensors=len(copied),
            num_different=len({each.coordinates for each in run.disagreements}),
            first=list(first.values()),
        ))  # fmt: skip
        # a verdict may rest on that where inputs were anchored, if there is one
        diff = first.get("anchored") or first.get("free")
        if diff is not None:
            findings.append(_finding(measured, checks[-1], diff))
    return AnalysisResult(findings=findings, parts={"replicas": checks})


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
        first, *others = map(run.run.read, records)
        size = max(_rel_l2(first, odd) for odd in others)
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
    whole = other.read(theirs)
    far = [_rel_l2(whole, run.run.read(version)) for version in disagreement.records]
    if far[0] * _FAR < far[1]:
        return 0
    return 1 if far[1] * _FAR < far[0] else None


def _rel_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖a‖; nan and inf count as infinitely far."""
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
    rank = fact("rank_share", rank=share["rank"])
    return [Finding(claim="explanation", role="explains", addition=[rank], evidence=[share])]


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
        groups = {group[0]: group for group in run.manifest.tokens.groups}
        owners: dict[int, set[int]] = {}  # by prompt, the ranks that ran it
        for record in run.run.records:
            if (record.pass_, record.site) == (onset.pass_, onset.site):
                for sample in groups.get(record.sample, [record.sample]):
                    owners.setdefault(sample, set()).add(record.rank)
        if not wrong or not wrong <= owners.keys() or len(set(map(frozenset, owners.values()))) < 2:
            continue
        ranks = owners[min(wrong)]
        theirs = {sample for sample in usages if owners.get(sample) == ranks}
        if not wrong <= theirs or 2 * len(wrong) <= len(theirs):
            continue
        owning.append(fact("ranks.of_side", ranks=sorted(ranks), side=side))
        ran_wrong = fact("ranks.ran_wrong", ranks=owning[-1], num_run=len(theirs),
                         total=len(usages), num_wrong=len(wrong),
                         num_others=len(usages) - len(theirs))  # fmt: skip
        evidence.append(ran_wrong)
    if not owning:
        return []
    # of both sides where they dealt alike and no truth tells which is wrong
    ran = fact("ranks.ran", ranks=owning, localized=verdict.kind == "localized")
    return [Finding(claim="explanation", role="explains", addition=[ran], evidence=evidence)]


def _finding(measured: Measured, checked: ReplicaCheck, diff: ReplicaDiff) -> Finding:
    place = (diff.pass_, diff.sample, diff.step, diff.site)
    of_side = ((pair, getattr(pair, diff.side).record) for pair in measured.alignment.pairs)
    pair, record = next((at for at in of_side if at[1].coordinates == place), (None, None))
    key = None if pair is None else _key(pair)
    here = (s for s in measured.sites if (s.pass_, s.sample, s.step, s.site) == key)
    result = next(here, None)
    code = "ranks.disagree_untold" if diff.told_by == "nobody" else "ranks.disagree"
    alone = len(diff.ranks) == 1
    who = fact(code, ranks=diff.ranks, peers=diff.peers, side=diff.side, alone=alone)
    disagreement = fact(
        "ranks.disagreement", who=who, site=diff.site, pass_=diff.pass_, sample=diff.sample,
        step=diff.step, num_more=checked.num_different - 1, num_tensors=checked.num_tensors,
        rel_l2=diff.rel_l2, told_by=diff.told_by,
    )  # fmt: skip
    # is it more than adding in another order on each rank would do?
    limit = -1.0
    form = None if record is None else format_named(record.dtype)
    if result is not None and result.floor:
        limit = _LIMIT * result.floor
    elif form is not None and form.kind == "float":
        limit = _ROUNDING * form.unit_roundoff
    if diff.rel_l2 is not None and diff.rel_l2 <= limit:
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


def _key(pair: Pair) -> tuple[str, int, int, str]:
    reference = pair.reference
    return (pair.pass_, reference.sample, pair.candidate.record.step, reference.record.site)


def _share(onset: Onset, measured: Measured) -> Fact | None:
    # the one that the onset was taken from: its sample may be any of a batch
    place = (onset.pass_, onset.step, onset.site)
    here = (s for s in measured.sites if (s.pass_, s.step, s.site) == place)
    at = next((s for s in here if onset.sample in (s.sample, s.worst_sample)), None)
    a, b = measured.reference, measured.candidate
    for pair in measured.alignment.pairs:
        ours, theirs = pair.reference.record, pair.candidate.record
        if at is None or _key(pair) != (at.pass_, at.sample, at.step, at.site):
            continue
        for side, run, own in (("candidate", b, theirs), ("reference", a, ours)):
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
                return fact(
                    "ranks.share_off", site=onset.site, side=side, rank=parts[worst].rank,
                    rel_l2=errors[worst], rest_rel_l2=rest,
                )  # fmt: skip
    return None

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

import math

import numpy as np

from divergence.comparison.align import Pair
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.decide import check
from divergence.comparison.judge import limit_of, observed, outliers
from divergence.comparison.measure.truth import typical_floor, without_pads
from divergence.comparison.result import (
    Finding,
    Onset,
    ReplicaCheck,
    ReplicaDiff,
    SiteResult,
    ToldBy,
    Verdict,
    order_of,
)
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.floor import Thresholds
from divergence.run.ranks import RankDisagreement, UnshardedRun
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.words import SIDES, Side, other_side


def find(measured: Measured) -> AnalysisResult:
    """One check for each side that several ranks made, and one finding for each whose ranks
    disagree, of the first place where they do."""
    a, b = measured.reference, measured.candidate
    checks, findings = [], []
    for side, run, other in zip(SIDES, (a, b), (b, a), strict=True):
        if not isinstance(run, UnshardedRun):
            continue
        pairs = {getattr(p, side).record.coordinates: p for p in measured.alignment.pairs}
        copied = {r.coordinates for r in run.run.records if "replicate" in (r.placement or ())}
        first: dict[str, ReplicaDiff] = {}
        differing = [(each.records[0], each) for each in run.disagreements]
        differing.sort(key=lambda both: (both[0].sample, both[0].step, both[0].order))
        for own, each in differing:
            if own.pass_ not in first:
                pair = pairs.get(own.coordinates)
                first[own.pass_] = _measured(side, run, other, each, pair, measured.thresholds)
        checks.append(
            ReplicaCheck(
                side=side,
                mesh=run.manifest.processes,
                num_tensors=len(copied),
                num_different=len({own.coordinates for own, _ in differing}),
                first=list(first.values()),
            )
        )
        # a verdict may rest on that where inputs were anchored, if there is one
        diff = first.get("anchored") or first.get("free")
        if diff is not None:
            pair = pairs.get((diff.pass_, diff.sample, diff.step, diff.site))
            findings.append(_finding(measured, run, checks[-1], diff, pair))
    return AnalysisResult(findings=findings, parts={"replicas": checks})


def _measured(
    side: Side,
    run: UnshardedRun,
    other: Run,
    disagreement: RankDisagreement,
    pair: Pair | None,
    thresholds: Thresholds,
) -> ReplicaDiff:
    """Return how far apart the versions are, and which is wrong."""
    ranks, peers = disagreement.ranks, disagreement.peers
    told_by: ToldBy = "majority" if len(ranks) < len(peers) else "nobody"
    size: float | None = None
    records = disagreement.records
    if all(run.has_bytes(record) for record in records):
        versions = [run.run.array(record) for record in records]
        peer = getattr(pair, other_side(side)).record if pair is not None else None
        comparable = peer is not None and peer.shape == records[0].shape
        if told_by == "nobody" and peer is not None and comparable and other.has_bytes(peer):
            # the other run agrees with the right one, as far as rounding lets two results agree
            whole, limit = (
                other.array(peer),
                thresholds.typical * typical_floor(run.manifest, peer),
            )
            off = [not _rel_l2(whole, version) <= limit for version in versions]
            if off == [False, True]:
                told_by = "other run"
            elif off == [True, False]:
                told_by, ranks, peers, versions = "other run", peers, ranks, versions[::-1]
        size = max(_rel_l2(versions[0], odd) for odd in versions[1:])
    return ReplicaDiff(
        side=side,
        pass_=records[0].pass_,
        sample=records[0].sample,
        step=records[0].step,
        site=records[0].site,
        ranks=ranks,
        peers=peers,
        told_by=told_by,
        rel_l2=size,
    )


def _rel_l2(a: np.ndarray, b: np.ndarray) -> float:
    """‖a - b‖ / ‖a‖; nan and inf count as infinitely far, and 0 / 0 as none."""
    return math.sqrt(_error(a, b, 1.0)[0])


def _error(a: np.ndarray, b: np.ndarray, floor: float) -> tuple[float, float]:
    """(‖a - b‖² / ‖a‖² in floors², of how many numbers the difference is made)."""
    x, y = wide(a), wide(b)
    with np.errstate(all="ignore"):
        squares = np.square(x - y)
        apart, norm = float(squares.sum()), float(np.square(x).sum())
    if apart == 0.0:
        return 0.0, 1.0
    if not (math.isfinite(apart) and norm):
        return math.inf, 1.0
    return apart / norm / (floor**2 or 1.0), apart**2 / float(np.square(squares).sum() or math.inf)


def explain(measured: Measured, verdict: Verdict, answer: AnalysisResult) -> list[Finding]:
    """The one rank whose part of the onset's tensor is off, where that is so."""
    if verdict.onset is None:
        return []
    share = _share(verdict.onset, measured)
    if share is None:
        return _prompt_findings(verdict, verdict.onset, measured)
    rank = fact("rank_share", rank=share["rank"])
    return [Finding(claim="explanation", role="explains", addition=[rank], evidence=[share])]


def _prompt_findings(verdict: Verdict, onset: Onset, measured: Measured) -> list[Finding]:
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
        prompts_of_ranks = {sample for sample in usages if owners.get(sample) == ranks}
        if not wrong <= prompts_of_ranks or 2 * len(wrong) <= len(prompts_of_ranks):
            continue
        owning.append(fact("ranks.of_side", ranks=sorted(ranks), side=side))
        ran_wrong = fact(
            "ranks.ran_wrong",
            ranks=owning[-1],
            num_run=len(prompts_of_ranks),
            total=len(usages),
            num_wrong=len(wrong),
            num_others=len(usages) - len(prompts_of_ranks),
        )
        evidence.append(ran_wrong)
    if not owning:
        return []
    # of both sides where they dealt alike and no truth tells which is wrong
    ran = fact("ranks.ran", ranks=owning, localized=verdict.kind == "localized")
    return [Finding(claim="explanation", role="explains", addition=[ran], evidence=evidence)]


def _finding(
    measured: Measured,
    run: UnshardedRun,
    checked: ReplicaCheck,
    diff: ReplicaDiff,
    pair: Pair | None,
) -> Finding:
    result = None
    if pair is not None:
        key = _key(pair)
        result = next(
            (s for s in measured.sites if (s.pass_, s.sample, s.step, s.site) == key), None
        )
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
    record = None if pair is None else getattr(pair, diff.side).record
    limit = measured.thresholds.typical * _floor(run, record, result)
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


def _floor(run: Run, record: Record | None, result: SiteResult | None) -> float:
    """Say what adding in another order on each rank makes: the site's floor, if there is one."""
    floor = None if result is None else result.floor
    if floor and math.isfinite(floor):
        return floor
    return -math.inf if record is None else typical_floor(run.manifest, record)


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
        record, other = pair.reference.record, pair.candidate.record
        if at is None or _key(pair) != (at.pass_, at.sample, at.step, at.site):
            continue
        for side, run, own in (("candidate", b, other), ("reference", a, record)):
            if not isinstance(run, UnshardedRun) or pair.reference.row is not None:
                continue
            if record.shape != other.shape or not (a.has_bytes(record) and b.has_bytes(other)):
                continue
            parts = run.shares(own)
            if len({repr(part.index) for part in parts}) < max(2, len(parts)):
                continue  # whole on each rank, or terms of a sum
            x = without_pads(a.manifest, record, wide(a.array(record)))
            y = without_pads(b.manifest, other, wide(b.array(other)))
            if x is None or y is None:
                continue
            # the parts' errors among themselves: does one stand out?
            floor = typical_floor(run.manifest, own)
            errors = [_error(x[part.index], y[part.index], floor) for part in parts]
            energy, numbers = np.minimum(np.array(errors), 1e200).T
            sides = np.stack([np.ones_like(energy), energy])
            logs, variance = observed(sides, np.stack([np.full_like(numbers, 1e12), numbers]), 1.0)
            thresholds, worst = measured.thresholds, int(energy.argmax())
            table = outliers(
                logs[:, None], variance[:, None], thresholds.ratio_spread, limit_of(len(parts))
            )
            alone = not np.delete(energy, worst).any()  # the others are equal bit for bit
            if alone or table.x[worst, 0] - table.control[worst, 0] > table.reach[worst, 0]:
                sizes = [_rel_l2(x[part.index], y[part.index]) for part in parts]
                return fact(
                    "ranks.share_off",
                    site=onset.site,
                    side=side,
                    rank=parts[worst].rank,
                    rel_l2=sizes.pop(worst),
                    rest_rel_l2=max(sizes),
                )
    return None

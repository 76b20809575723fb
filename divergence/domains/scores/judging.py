"""The numbers of one task, and the verdict that they allow.

    equal        two one-sided tests show that the difference is inside the band
    worse/better not equal, and the test of no difference is beyond chance, after Holm
    undecided    neither: with how many documents it would be settled

A difference that is no more than chance is never called none. One that is beyond chance and shown
to be inside the band is ``equal``: real, and too small to matter by the band that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from msgspec.structs import asdict, replace

from divergence.domains.scores.joining import Pairs
from divergence.domains.scores.result import BandResult, Candidate, Pairing, TaskScores
from divergence.domains.scores.rows import Band, ScoresPolicy, Series, SeriesName, Total
from divergence.domains.scores.statistics import (
    LEVEL,
    POWER,
    Mean,
    Padding,
    cluster_sums,
    documents_needed,
    equivalence_p,
    holm,
    interval,
    lopsided,
    mcnemar,
    mean_of,
    padding,
    score_interval,
    sign_test,
    smallest_difference,
)
from divergence.facts import Fact, fact

_WHOLE = 0.5
"""Share of a cluster's documents beyond which it flips as a whole."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Holds, of each cluster, the sums of differences, of the reference's scores, its size."""

    diff: np.ndarray
    reference: np.ndarray
    sizes: np.ndarray
    pad: Padding


def measured(series: Series, pairs: Pairs, bands: Sequence[Band]) -> TaskScores:
    """All numbers of one task; the verdict is made by ``adjusted``, which knows the other tasks."""
    diff = pairs.candidate - pairs.reference
    sums, sizes = cluster_sums(diff, pairs.clusters)
    graded = pairs.clusters is None and not (pairs.binary and pairs.single)
    span = float(np.ptp(np.concatenate([pairs.reference, pairs.candidate]))) or 1.0
    reference, _ = cluster_sums(pairs.reference, pairs.clusters)
    sums_of_task = _Sums(sums, reference, sizes, padding(sums, sizes, span, graded=graded))
    plain, padded = mean_of(sums, sizes), mean_of(sums, sizes, pad=sums_of_task.pad)
    low, high = interval(padded, 1 - LEVEL)
    inner = interval(padded, 1 - 2 * LEVEL)
    lost, gained = int((diff < 0).sum()), int((diff > 0).sum())
    alone = pairs.binary and pairs.single and pairs.clusters is None
    if alone:
        low, high = score_interval(lost, gained, len(diff), 1 - LEVEL)
    if pairs.binary:  # no difference is larger
        low, high, *inner = np.clip([low, high, *inner], -1.0, 1.0)
    if not series.higher_is_better:
        lost, gained = gained, lost
    least = smallest_difference(float(padded.error), float(padded.freedom))
    p_value, test = (mcnemar(lost, gained), "mcnemar") if alone else sign_test(sums, sizes)
    num_changed = None
    if pairs.single and not any(a.answer is None or b.answer is None for a, b in pairs.rows):
        num_changed = sum(row.answer != other.answer for row, other in pairs.rows)
    return TaskScores(
        **series.name._asdict(),
        verdict="undecided",
        higher_is_better=series.higher_is_better,
        pairing=pairs.pairing,
        reference=float(pairs.reference.mean()),
        candidate=float(pairs.candidate.mean()),
        difference=float(plain.mean),
        standard_error=float(plain.error),
        low=float(low),
        high=float(high),
        bands=[_band(band, sums_of_task, plain) for band in bands],
        shown_band=float(max(abs(inner[0]), abs(inner[1]))),
        p_value=p_value,
        test=test,
        smallest_difference=least if least <= span else None,
        num_gained=gained,
        num_lost=lost,
        num_changed=num_changed,
        graded=not (pairs.binary and pairs.single),
    )


_USUAL_FLIPS = 0.05
"""Share of answers that change: what pairing would give is said for it."""


def total_of(series: Series) -> Total:
    """The score as a whole, also of a side that has documents."""
    if series.total is not None:
        return series.total
    by_document: dict[str, list[float]] = {}
    for row in series.rows:
        if row.score is not None:
            by_document.setdefault(row.document, []).append(row.score)
    means = np.array([np.mean(values) for values in by_document.values()])
    num = len(means)
    error = float(means.std(ddof=1) / np.sqrt(num)) if num > 1 else None
    return Total(float(means.mean()) if num else 0.0, error, num or None)


def unpaired(series: Series, other: Series, bands: Sequence[Band], *, documents: str) -> TaskScores:
    """All numbers of one task where a side has no documents: two separate samples. The same
    documents on both sides make that interval too wide, never too narrow. Of a score from 0 to 1
    whose error nobody tells the largest is taken, that of right and wrong. ``documents``: what
    would hold them."""
    a, b = total_of(series), total_of(other)
    difference = b.score - a.score
    errors = []
    for total in (a, b):
        error = total.error
        if error is None and total.num is not None and 0 <= total.score <= 1:
            error = float(np.sqrt(total.score * (1 - total.score) / max(1, total.num - 1)))
        errors.append(error)
    num = min(total.num or 0 for total in (a, b)) or None
    task = TaskScores(
        **series.name._asdict(),
        verdict="undecided",
        higher_is_better=series.higher_is_better,
        pairing=Pairing(
            num_paired=0, num_clusters=0, num_reference=a.num or 0, num_candidate=b.num or 0
        ),
        reference=a.score,
        candidate=b.score,
        difference=difference,
        test="unpaired",
    )
    if errors[0] is None or errors[1] is None:
        spread = sum(max(0.0, total.score * (1 - total.score)) for total in (a, b))
        least = int(np.ceil(_DEVIATIONS**2 * spread / difference**2)) if difference else None
        return replace(
            task, remarks=[fact("evaluations.no_count", num_documents=least, documents=documents)]
        )
    error = float(np.hypot(errors[0], errors[1]))
    z = abs(difference) / error if error else np.inf if difference else 0.0
    made = []
    for band in bands:
        width = band.limit * (abs(a.score) if band.relative else 1.0)
        p_value = _above((width - abs(difference)) / error) if error else 0.5
        needed = None
        if p_value > LEVEL and num is not None:
            spread = error * num**0.5
            needed = _two_digits(
                documents_needed(spread, 0.0, difference=difference, band=width, num=num)
            )
        made.append(
            BandResult(
                limit=band.limit,
                relative=band.relative,
                width=width,
                p_value=p_value,
                equal=p_value <= LEVEL,
                needed=needed,
            )
        )
    one_sided = abs(difference) + _ONE_SIDED * error
    paired = None if num is None else float(np.sqrt(_USUAL_FLIPS / num))
    return replace(
        task,
        standard_error=error,
        low=difference - _DEVIATIONS * error,
        high=difference + _DEVIATIONS * error,
        bands=made,
        shown_band=one_sided,
        p_value=2 * _above(z),
        smallest_difference=(_DEVIATIONS + _POWER) * error,
        remarks=[fact("evaluations.unpaired", error=error, paired=paired, documents=documents)],
    )


def _two_digits(num: int | None) -> int | None:
    """The number of documents upwards to two digits: it is an estimate."""
    step: int = 10 ** max(0, len(str(num)) - 2)
    return None if num is None else -(-num // step) * step


def _above(z: float) -> float:
    """The share of a normal distribution above z."""
    return 1.0 - NormalDist().cdf(z)


_DEVIATIONS, _ONE_SIDED = (NormalDist().inv_cdf(1 - share) for share in (LEVEL / 2, LEVEL))
_POWER = NormalDist().inv_cdf(POWER)


def _band(band: Band, sums: _Sums, plain: Mean) -> BandResult:
    num = float(sums.sizes.sum())
    score = float(sums.reference.sum() / num)
    width = band.limit * (abs(score) if band.relative else 1.0)
    # of a score below 0 its size counts
    rooms = band.limit * (np.sign(score) * sums.reference if band.relative else sums.sizes)
    p_value = 1.0
    if width > 0:
        p_value = float(equivalence_p(sums.diff, sums.sizes, rooms, pad=sums.pad))
    shown, needed = p_value <= LEVEL, None
    # do only few clusters differ, as a whole and nearly all in one direction? Then one more or less
    # would change everything, and the test is wrong more often than it says
    changed = sums.diff != 0
    whole = float(np.mean(np.abs(sums.diff[changed]) / sums.sizes[changed])) if changed.any() else 0
    many = float(np.mean(sums.sizes)) > 1
    few = shown and many and whole > _WHOLE and bool(lopsided(sums.diff))
    if not shown:
        spread = 0.0 if np.isnan(plain.error) else float(plain.error) * num**0.5
        per_document = float(sums.pad.far * np.sqrt(sums.pad.weight) / sums.sizes.mean())
        needed = _two_digits(
            documents_needed(
                spread, per_document, difference=float(plain.mean), band=width, num=int(num)
            )
        )
    return BandResult(
        limit=band.limit,
        relative=band.relative,
        width=width,
        p_value=p_value,
        equal=shown and not few,
        few_clusters=few,
        needed=needed,
    )


def adjusted(tasks: Sequence[TaskScores]) -> list[TaskScores]:
    """Return them with Holm's p values over all of them that were measured, and with verdicts."""
    places = [n for n, task in enumerate(tasks) if task.p_value is not None]
    p_values = holm([task.p_value for n in places if (task := tasks[n]).p_value is not None])
    results = [
        replace(task, headline=_headline(task)) if task.test and task.p_value is None else task
        for task in tasks
    ]
    for place, p_adjusted in zip(places, p_values, strict=True):
        task, verdict = tasks[place], "undecided"
        assert task.difference is not None
        if task.bands[0].equal:
            verdict = "equal"
        elif p_adjusted <= LEVEL:
            verdict = "better" if (task.difference > 0) == task.higher_is_better else "worse"
        task = replace(task, p_adjusted=p_adjusted, verdict=verdict)
        if task.verdict in ("worse", "better"):  # which is settled
            task = replace(task, bands=[replace(band, needed=None) for band in task.bands])
        results[place] = replace(task, headline=_headline(task))
    return results


def band_of(band: BandResult) -> Fact:
    """``3% of A's score (±0.0124)``."""
    percent = 100 * band.limit
    return fact("evaluations.band", relative=band.relative, percent=percent, width=band.width)


def _headline(task: TaskScores) -> list[Fact]:
    """The verdict, then what it does not count."""
    if not task.bands:  # of a score whose number of documents nobody tells
        return [fact("evaluations.undecided_without_count")]
    band = task.bands[0]
    rest = []
    if task.test == "unpaired":
        rest.append(fact("evaluations.of_no_pairs"))
    if task.pairing is not None and (left := task.pairing.num_left_out):
        rest.append(fact("evaluations.in_no_pair", num_documents=left))
    causes = task.causes
    if causes is not None and causes.median_shift > causes.limit:
        rest.append(fact("evaluations.margins_moved", **asdict(causes)))
    return [_verdict_fact(task, band), *rest]


def _verdict_fact(task: TaskScores, band: BandResult) -> Fact:
    width = band_of(band)
    if task.verdict == "equal":
        differs = (task.p_adjusted or 1) <= LEVEL
        return fact("evaluations.equal", band=width, differs=differs)
    if task.verdict in ("worse", "better"):
        assert task.low is not None and task.high is not None
        beyond = min(abs(task.low), abs(task.high)) > band.width
        return fact(
            "evaluations.beyond_chance", verdict=task.verdict, band=width if beyond else None
        )
    if band.few_clusters:
        return fact("evaluations.few_clusters_differ", band=width)
    if band.needed is None and task.test == "unpaired":
        return fact("evaluations.undecided_unpaired", band=width)
    if band.needed is None:
        return fact("evaluations.no_width", score=task.reference)
    return fact("evaluations.undecided", band=width, num_documents=band.needed)


def gated(candidate: Candidate, policy: ScoresPolicy) -> Candidate:
    """Return them with whether the policy is met. What was not compared is not a pass."""
    failures: list[Fact] = []
    for task in candidate.tasks:
        name = str(SeriesName(task.task, task.filter, task.metric))
        if task.verdict not in policy.verdicts:
            failures.append(
                fact("evaluations.task", task=name, verdict=task.verdict, what=task.headline)
            )
        elif task.pairing is not None:
            num_paired = task.pairing.num_paired
            num_documents = num_paired + task.pairing.num_left_out
            if num_paired < policy.min_paired * num_documents:
                failures.append(
                    fact(
                        "evaluations.few_paired",
                        task=name,
                        num_paired=num_paired,
                        num_documents=num_documents,
                        percent=100 * policy.min_paired,
                    )
                )
    failures += [item for item in candidate.remarks if item.code == "evaluations.incomplete"]
    return replace(candidate, passed=not failures, failures=failures)

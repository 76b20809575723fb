"""Generated tokens compared: which differ, and whether rounding explains a choice that flipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from divergence.comparison.align import PromptStep, logits_row
from divergence.comparison.analysis import AnalysisResult, Measured
from divergence.comparison.constants import KL_TOKENS, TIE_DEVIATIONS
from divergence.comparison.decide import check
from divergence.comparison.result import (
    Allowed,
    Finding,
    SiteResult,
    TokenChoice,
    TokenDifference,
    TokensResult,
    allowed_errors,
)
from divergence.facts import Fact, fact
from divergence.numerics.arrays import wide
from divergence.numerics.floor import THRESHOLDS, Thresholds, spread
from divergence.numerics.formats import format_named
from divergence.numerics.logits import kl_divergence, log_softmax, logit_error, top_choices
from divergence.numerics.sums import num_threads
from divergence.run.reader import Run
from divergence.words import SIDES, Side, other_side

# Tokens: where the two sides' greedy choices part, and by how much.
#
# Compared are choices, not what was fed: where the candidate was forced onto the
# reference's tokens, every step is comparable, and a second difference does not
# follow from the first. Log-probabilities come from the recorded logits. Each flip is
# held against what rounding does to these logits (below), and with a truth so are
# the distributions of all decided positions: KL sees more than flips, since a fault may
# flip no token. It goes with the square of the error: see numerics.floor, ``kl``, for its
# limit.
#
# A row is the last position's logits of one sample in one free forward. Two runs have
# comparable rows while both were fed the same tokens.


def measure(measured: Measured) -> TokensResult | None:
    """The tokens of two runs, with what rounding may make of them."""
    return compare_tokens(
        measured.reference,
        measured.candidate,
        truth=None if measured.truth is None else measured.truth.run,
        allowed=allowed_errors(measured.sites),
        thresholds=measured.thresholds,
    )


def compare_tokens(
    reference: Run,
    candidate: Run,
    *,
    truth: Run | None = None,
    allowed: Allowed | None = None,
    thresholds: Thresholds = THRESHOLDS,
) -> TokensResult | None:
    """Agreement of the generated tokens; None where the reference generated none. ``allowed``:
    what rounding may make of each forward's logits, for want of a truth."""
    a, b = reference.manifest.tokens, candidate.manifest.tokens
    places = comparable_places(reference, candidate)
    count = sum(
        min(len(sample_a.chosen_ids), len(sample_b.chosen_ids))
        for sample_a, sample_b in zip(a.samples, b.samples, strict=False)
    )
    num_reference = sum(len(sample.chosen_ids) for sample in a.samples)
    if count == 0 and num_reference == 0:
        return None
    flips = [
        (sample, step)
        for sample, step in places
        if a.samples[sample].chosen_ids[step] != b.samples[sample].chosen_ids[step]
    ]
    routed = any(note.routed for note in reference.manifest.plan.modules.values())
    routed = routed or reference.manifest.quantizes_activations
    kl = _kl_fields(reference, candidate, truth, places, thresholds, routed=routed)
    differences = [
        difference_at(
            reference,
            candidate,
            truth,
            flip,
            thresholds,
            floor_side=kl.get("floor_side"),
            allowed=(allowed or {}).get(flip),
            tops=number == 0,
        )
        for number, flip in enumerate(flips)
    ]
    if routed:  # a tie is a tie; nothing beyond it is a fault for that
        differences = [
            replace(flip, judgement=None) if flip.judgement == "fault" else flip
            for flip in differences
        ]
    forced = a.forced_by is not None or b.forced_by is not None
    # where a sample's text parted, the candidate's may well be shorter
    parted = set() if forced else {sample for sample, _ in flips}
    return TokensResult(
        num_tokens=count,
        num_equal=len(places) - len(flips),
        num_reference=num_reference,
        num_missing=sum(
            max(0, len(sample_a.chosen_ids) - len(sample_b.chosen_ids))
            for number, (sample_a, sample_b) in enumerate(zip(a.samples, b.samples, strict=False))
            if number not in parted
        ),
        num_other_text=count - len(places),
        forced=forced,
        first_difference=differences[0] if differences else None,
        differences=differences,
        **kl,
    )


def comparable_places(reference: Run, candidate: Run) -> list[PromptStep]:
    """(sample, step) of every choice that both sides made after the same tokens, in order."""
    a, b = reference.manifest.tokens, candidate.manifest.tokens
    places: list[PromptStep] = []
    for number, (sample_a, sample_b) in enumerate(zip(a.samples, b.samples, strict=False)):
        fed = list(zip(sample_a.generated_ids, sample_b.generated_ids, strict=False))
        for step in range(min(len(sample_a.chosen_ids), len(sample_b.chosen_ids))):
            places.append((number, step))
            if step < len(fed) and fed[step][0] != fed[step][1]:
                break  # other tokens follow: no agreement to speak of
    return places


def _kl_fields(
    reference: Run,
    candidate: Run,
    truth: Run | None,
    places: Sequence[PromptStep],
    thresholds: Thresholds,
    *,
    routed: bool,
) -> dict[str, Any]:
    """Return what TokensResult says of the distributions at ``places``: KL(reference‖candidate)
    beside KL(truth‖side), the side being the one that is nearer to the truth, by the mean: what a
    correct implementation of this dtype errs by, as this comparison itself shows it. Nothing where
    no row can be compared, and no limit where experts are chosen. A thread holds one record of each
    run."""
    by_place: dict[PromptStep, float] = {}
    errors: list[tuple[float, float]] = []
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="divergence-logits") as pool:
        measured = pool.map(partial(_distances_at, reference, candidate, truth), places)
        for place, distances in zip(places, measured, strict=True):
            if distances is not None:
                by_place[place], a, b = distances
                errors += [(a, b)] if a is not None and b is not None else []
    if not by_place:
        return {}
    mean, p99, median = _spread(list(by_place.values()))
    fields: dict[str, Any] = {"kl_mean": mean, "kl_p99": p99}
    if len(errors) < len(by_place):
        return fields
    # of two dtypes that which rounds more: its rounding is what may move a token
    roundoffs = [
        format_named(run.manifest.model.dtype).unit_roundoff for run in (reference, candidate)
    ]
    means = [float(np.mean(own)) for own in zip(*errors, strict=True)]
    nearer = means[1] < means[0] if roundoffs[0] == roundoffs[1] else roundoffs[1] > roundoffs[0]
    floor = np.array([own[nearer] for own in errors])
    floor_mean, floor_p99, floor_median = _spread(floor)
    # positions that make up the floor's mean, (Σ k)² / Σ k² of their KL k (Kish, Survey Sampling,
    # 1965): few where a few uncertain positions outweigh all others
    squares = float(np.square(floor).sum())
    effective = float(np.sum(floor)) ** 2 / squares if squares > 0 else 1.0
    tail = max(1, len(by_place) // 100)  # as many lie above the 99th percentile
    shares = [
        (_over(mean, floor_mean), _kl_limit(effective, thresholds)),
        (_over(p99, floor_p99), _kl_limit(tail, thresholds)),
    ]
    ratio, limit = max(shares, key=lambda share: share[0] / share[1])
    # what a model enlarges it enlarges on both sides, so that few positions alone can be so
    usual = _over(median, floor_median) <= limit
    far = [place for place, kl in by_place.items() if kl > limit * floor_mean]
    return fields | {
        "floor_side": SIDES[nearer],
        "floor_kl_mean": floor_mean,
        "floor_kl_p99": floor_p99,
        "kl_ratio": ratio,
        "kl_places": far if usual and ratio > limit and not routed else [],
        "kl_limit": None if routed else limit,
    }


def _distances_at(
    reference: Run, candidate: Run, truth: Run | None, place: PromptStep
) -> tuple[float, float | None, float | None] | None:
    """KL of one row: reference‖candidate, truth‖reference, truth‖candidate."""
    a, b = logits_row(reference, *place), logits_row(candidate, *place)
    if a is None or b is None:
        return None
    apart = kl_divergence(a, b)
    if apart is None:
        return None
    true_logits = None if truth is None else logits_row(truth, *place)
    if true_logits is None:
        return apart, None, None
    return apart, kl_divergence(true_logits, a), kl_divergence(true_logits, b)


def _spread(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean, 99th percentile (inverted cdf, so the largest of fewer than 100), and median."""
    p99 = float(np.quantile(values, 0.99, method="inverted_cdf"))
    return float(np.mean(values)), p99, float(np.median(values))


def _over(top: float, bottom: float) -> float:
    """0/0 = 1 (both are right), x/0 = inf."""
    if bottom > 0:
        return top / bottom
    return 1.0 if top == 0 else math.inf


def _kl_limit(num_positions: float, thresholds: Thresholds) -> float:
    """Wider where few positions count. KL goes with the square of the error."""
    return thresholds.kl * spread(round(num_positions * KL_TOKENS)) ** 2


# Flips: whether rounding may turn one greedy choice into another, and what it says if not.
#
# A token flips where the error of a side's logits exceeds the gap between two tokens. In the
# truth's logits R the gap is exact, |R_i - R_j|, i and j being the two sides' choices: the side
# that chose otherwise than R must have erred by as much. The errors of two logits of a row are
# taken as independent, of standard deviation s, so their difference has √2 s:
#
#     z = |R_i - R_j| / (√2 s),   s = rms(e - mean(e)),  e = the floor's logits - R, in this row
#
# The floor is the side that is nearer to the truth over all decided positions (by mean KL), so
# that z does not depend on which run is called the reference, and a fault does not measure
# itself. z <= 3 is a tie: three standard deviations of correct rounding cover it. The other side
# may be a correct implementation with coarser kernels, W times as far from the truth; W up to 2.2
# is taken as healthy, so a flip is a fault only beyond 3 W (the threshold ``flip``), and
# between the two nothing is claimed.
#
# Without a truth s comes from the rounding model: what all blocks together may make
# (measure.rating), times the spread of the row, times 2.2 for the coarsest kernels that are taken
# as healthy, since no side is known to be as good as the model; the gap is the larger of the two
# sides', since the difference has bridged both. A tie is a tie then, and nothing else is claimed.
# Without either nothing is: in units of the two sides' own difference every flip is small.
#
# Specific, not sensitive: a fault may flip no token. KL over all decided positions sees more
# (above). A row is the last position's logits of one sample in one free forward.

_TOP = 5
"""Choices that are named of the first flip."""


def difference_at(
    reference: Run,
    candidate: Run,
    truth: Run | None,
    place: PromptStep,
    thresholds: Thresholds,
    *,
    floor_side: Side | None,
    allowed: float | None,
    tops: bool,
) -> TokenDifference:
    """One flip, judged. ``floor_side``: which side shows the floor, where a truth tells;
    ``allowed``: what rounding may make of this row, for want of a truth; ``tops``: with the most
    likely tokens of both sides."""
    sample, step = place
    runs = [run for run in (truth, candidate, reference) if run is not None]
    texts = {key: text for run in runs for key, text in run.manifest.tokens.texts.items()}
    token_a = reference.manifest.tokens.samples[sample].chosen_ids[step]
    token_b = candidate.manifest.tokens.samples[sample].chosen_ids[step]
    row_a, row_b = logits_row(reference, *place), logits_row(candidate, *place)
    top_a, top_b = _top(row_a, texts), _top(row_b, texts)
    margin = _margin(top_a)
    difference = TokenDifference(
        sample=sample,
        step=step,
        reference=_choice(token_a, row_a, texts),
        candidate=_choice(token_b, row_b, texts),
        margin=margin,
        candidate_margin=_margin(top_b),
        z=_deviations(margin, row_a, row_b),
        reference_top=top_a if tops else [],
        candidate_top=top_b if tops else [],
    )
    true_logits = None if truth is None else logits_row(truth, *place)
    if truth is None or true_logits is None:
        ids = (token_a, token_b)
        unjudged = replace(difference, z_of=None if difference.z is None else "difference")
        if row_a is None or row_b is None or not allowed or max(ids) >= min(len(row_a), len(row_b)):
            return unjudged
        spread_of_row = logit_error(row_a, np.zeros(row_a.shape))
        a, b = wide(row_a), wide(row_b)
        gap = max(float(a[ids[0]] - a[ids[1]]), float(b[ids[1]] - b[ids[0]]))
        if not spread_of_row or not math.isfinite(gap):
            return unjudged
        # the coarsest side that is healthy makes TIE_DEVIATIONS of the limit of a fault
        z = TIE_DEVIATIONS * gap / (math.sqrt(2) * thresholds.flip * allowed * spread_of_row)
        return replace(
            difference, z=z, z_of="model", judgement="tie" if z <= TIE_DEVIATIONS else None
        )
    chosen = truth.manifest.tokens.samples[sample].chosen_ids
    choice = _choice(chosen[step], true_logits, texts) if step < len(chosen) else None
    flip = replace(difference, truth_choice=choice)
    if max(token_a, token_b) >= true_logits.shape[-1]:
        return flip
    true_a, true_b = wide(true_logits[[token_a, token_b]])
    gap = float(true_a - true_b)
    floor, farther = (row_b, row_a) if floor_side == "candidate" else (row_a, row_b)
    own, other = (_deviations(abs(gap), row, true_logits) for row in (floor, farther))
    if own is None:
        z_of = None if flip.z is None else "difference"
        return replace(flip, truth_margin=gap, z_of=z_of)
    judgement = "tie" if own <= TIE_DEVIATIONS else "fault" if own > thresholds.flip else None
    return replace(
        flip, truth_margin=gap, z=own, z_of="floor", z_farther=other, judgement=judgement
    )


def _top(row: np.ndarray | None, texts: dict[str, str]) -> list[TokenChoice]:
    return [
        TokenChoice(id=token, text=texts.get(str(token)), logprob=logprob)
        for token, logprob in (() if row is None else top_choices(row, _TOP))
    ]


def _choice(token: int, row: np.ndarray | None, texts: dict[str, str]) -> TokenChoice:
    in_vocabulary = row is not None and token < row.shape[0]
    logprob = float(log_softmax(row)[token]) if row is not None and in_vocabulary else math.nan
    return TokenChoice(id=token, text=texts.get(str(token)), logprob=logprob)


def _margin(top: list[TokenChoice]) -> float | None:
    """Top-1 minus top-2: the same in logits and in log-probabilities."""
    return top[0].logprob - top[1].logprob if len(top) > 1 else None


def _deviations(
    margin: float | None, row_a: np.ndarray | None, row_b: np.ndarray | None
) -> float | None:
    """The margin over √2 · rms(a - b), the row's mean difference taken off."""
    if margin is None or row_a is None or row_b is None:
        return None
    error = logit_error(row_a, row_b)
    if error is None or not 0 < error < math.inf:
        return None
    return margin / (math.sqrt(2) * error)


def find(measured: Measured) -> AnalysisResult:
    """Find, with a truth, where a token flips over a gap that rounding does not bridge, or the
    distributions are farther apart than it explains."""
    tokens = _widened(measured.tokens, measured.sites)
    return AnalysisResult(findings=findings_of(tokens), parts={"tokens": tokens})


def _widened(tokens: TokensResult | None, sites: Sequence[SiteResult]) -> TokensResult | None:
    """Widen the limit of the KL by what the blocks themselves explain: where one side's kernels are
    W times less exact in the middle block, within its limit, the two errors' squares are to each
    other as 1 and W², and so is what the head makes of them."""
    if tokens is None or tokens.kl_limit is None or tokens.floor_side is None:
        return tokens
    blocks = [
        s.truth.w_median
        for s in sites
        if s.truth and s.role == "block" and s.pass_ == "anchored" and not s.identical
    ]
    blocks = [w if tokens.floor_side == "reference" else 1 / max(w, 1e-300) for w in blocks]
    usual = statistics.median(blocks) if blocks else 1.0
    explained = (1 + min(max(1.0, usual), THRESHOLDS.truth_systematic) ** 2) / 2
    return msgspec.structs.replace(tokens, kl_limit=tokens.kl_limit * explained)


def findings_of(tokens: TokensResult | None) -> list[Finding]:
    if tokens is None:
        return [Finding(claim="context", role="context", evidence=[])]
    first = tokens.first_difference
    evidence = [] if first is None else [_flip_evidence(first)]
    faults = [flip for flip in tokens.differences if flip.judgement == "fault"]
    if faults and faults[0] is not first:
        evidence.append(_flip_evidence(faults[0], later=True))
    ratio, limit = tokens.kl_ratio, tokens.kl_limit
    far = ratio is not None and limit is not None and ratio > limit
    if far:  # farther apart than the floor explains
        evidence.append(kl_fact(tokens))
    findings = [Finding(claim="context", role="context", evidence=evidence)]
    # of two sides the one whose distance is not the floor
    farther = None if tokens.floor_side is None else other_side(tokens.floor_side)

    def drift(
        headline: Fact, evidence: Fact, places: list[tuple[int, int]], step: int | None = None
    ) -> Finding:
        return Finding(
            claim="drift",
            kind="drift",
            headline=[headline],
            step=step,
            accumulated_at=places,
            rests_on=[check("anchored", False, fact("tokens.seen_in_free_run"))],
            side=farther,
            evidence=[evidence],
        )

    if faults:
        fault = faults[0]
        headline = fact("tokens.flips", sample=fault.sample, step=fault.step, z=fault.z)
        spread = all(
            flip.z_farther is not None and flip.z_farther <= TIE_DEVIATIONS for flip in faults
        )
        places = [(flip.sample, flip.step) for flip in faults] if spread else []
        findings.append(drift(headline, _flip_evidence(fault), places, fault.step))
    if far:
        headline = fact("tokens.far_apart", ratio=ratio)
        findings.append(drift(headline, evidence[-1], tokens.kl_places))
    return findings


def kl_fact(tokens: TokensResult) -> Fact:
    """How far the two sides' distributions are apart, beside the floor's own distance."""
    return fact(
        "tokens.kl",
        mean=tokens.kl_mean,
        p99=tokens.kl_p99,
        side=tokens.floor_side,
        floor_mean=tokens.floor_kl_mean,
        floor_p99=tokens.floor_kl_p99,
        ratio=tokens.kl_ratio,
        limit=tokens.kl_limit,
    )


def _flip_evidence(flip: TokenDifference, *, later: bool = False) -> Fact:
    """One flip. ``later``: not the first, but the first that is no tie."""
    sizes: list[Fact] = []
    if flip.margin is not None:
        sizes.append(fact("tokens.margin", margin=flip.margin))
    if flip.z is not None:
        sizes.append(fact("tokens.deviations", z=flip.z, of=flip.z_of or "difference"))
    return fact(
        "tokens.flip",
        later=later,
        sample=flip.sample,
        step=flip.step,
        sizes=sizes,
        unjudged=flip.judgement is None and flip.z_of in ("difference", "model"),
        judgement=flip.judgement,
        truth_margin=flip.truth_margin,
    )

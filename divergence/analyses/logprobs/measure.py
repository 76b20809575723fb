"""The numbers of two sides' log-probabilities. Pairs, scale and pattern stand apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from divergence.analyses.logprobs.doubts import FAULT, TIE
from divergence.analyses.logprobs.pairs import PromptPair
from divergence.analyses.logprobs.pattern import Pattern
from divergence.analyses.logprobs.sampled import are_drawn, texts_of
from divergence.analyses.logprobs.scale import Scale
from divergence.analyses.logprobs.sequences import Sequence as TokenSequence
from divergence.analyses.logprobs.sequences import facts_of
from divergence.comparison.results import (
    LogprobDelta,
    LogprobDivergence,
    LogprobFlip,
    LogprobPerplexity,
    LogprobSequence,
    LogprobShift,
    LogprobsResult,
    RolloutCheck,
    TokenChoice,
)
from divergence.numerics.logits import SAFETY_BOUND, divergence_bounds, rollout_metrics
from divergence.numerics.sums import following_of, quantile
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT
from divergence.words import Side

__all__ = ["measure"]

_TENTHS = 10
_EQUAL = 1e-5
"""Nats: log-probabilities closer than that are a tie, written with other digits."""

LIMITS: dict[str, tuple[str, str, float, float, str]] = {
    "rollout_probs_diff_mean": ("verl", "< 0.005, bad > 0.01", 0.005, 0.01, ""),
    "k1": ("verl", "|k1| < 0.1", 0.1, 0.1, "abs"),
    "importance_ratio_mean": ("verl", "0.5 to 2", 2.0, 2.0, "ratio"),
    "effective_sample_size": ("verl", "> 0.3", 0.3, 0.3, "least"),
    "chi2_token": ("verl", "< 1", 1.0, 1.0, ""),
    "token_mult_prob_error": ("NeMo-RL", "< 1.05", 1.05, 1.05, ""),
    "train_rollout_logprob_abs_diff": ("slime", "< 0.1", 0.1, 0.1, ""),
}
"""name → framework, its words, where it is raised, where bad, and how it is read."""


def measure(
    pairs: Sequence[PromptPair], pattern: Pattern, scale: Scale, a: Run, b: Run
) -> LogprobsResult:
    """Everything but the verdict."""
    drawn = are_drawn(a, b)
    flips = [_flip(pair, scale, a, b) for pair in pairs if pair.parting is not None and not drawn]
    side = _rollout_side(a, b)
    metrics = _rollout(pairs, side) if side is not None else {}
    sure, below = pattern.shift, _below_likeliest(pairs, a, b)
    faults = [flip for flip in flips if flip.judgement == "fault"]
    return LogprobsResult(
        num_sequences=len(pairs),
        num_tokens=sum(pair.num_equal for pair in pairs) + len(flips),
        num_equal=sum(pair.num_equal for pair in pairs),
        num_after=sum(pair.num_after for pair in pairs),
        num_other=sum(pair.num_other for pair in pairs),
        num_ended=sum(pair.ended for pair in pairs),
        pattern=pattern.name,
        explained=scale.value,
        source=scale.source,
        delta=_delta(pairs),
        divergence=_divergence(pairs),
        perplexity=_perplexity(pairs),
        texts=texts_of(pairs) if drawn else None,
        shift=LogprobShift(
            num_prompts=sure.num_prompts, mean=sure.mean, low=sure.low, high=sure.high,
            p_value=sure.p_value, smallest_shift=sure.smallest_shift,
        ) if sure.num_prompts else None,
        first_difference=next(iter([*faults, *flips]), None),
        num_flips=len(flips),
        num_ties=sum(flip.judgement == "tie" for flip in flips),
        num_faults=len(faults),
        sequences=_sequences(pairs),
        rollout=metrics,
        rollout_side=side if metrics else None,
        checks=[_check(name, metrics[name]) for name in LIMITS if name in metrics],
        num_not_likeliest={side: len(gaps) for side, gaps in below.items()},
        max_below_likeliest={side: max(gaps) for side, gaps in below.items()},
    )  # fmt: skip


def _delta(pairs: Sequence[PromptPair]) -> LogprobDelta | None:
    parts = [pair.delta for pair in pairs if len(pair.delta)]
    if not parts:
        return None
    delta = np.concatenate(parts)
    size = np.abs(delta)
    return LogprobDelta(
        num_tokens=len(delta), mean=float(delta.mean()), mean_abs=float(size.mean()),
        rms=math.sqrt(float((delta * delta).mean())), median_abs=quantile(size, 0.5),
        p90_abs=quantile(size, 0.9), p99_abs=quantile(size, 0.99), max_abs=float(size.max()),
        by_position=_by_position(pairs),
    )  # fmt: skip


def _by_position(pairs: Sequence[PromptPair]) -> list[float]:
    """Mean |Δ| of tenths of the longest answer; the last ones are of long answers alone."""
    by_tenth: list[list[np.ndarray]] = [[] for _ in range(_TENTHS)]
    answers = [(p.places - p.answer_begins, np.abs(p.delta)) for p in pairs if len(p.delta)]
    longest = max((int(at.max()) + 1 for at, _ in answers), default=0)
    if longest < _TENTHS:
        return []
    for at, size in answers:
        tenth = at * _TENTHS // longest
        for number in range(_TENTHS):
            by_tenth[number].append(size[(at >= 0) & (tenth == number)])
    joined = [np.concatenate(part) for part in by_tenth]
    return [float(part.mean()) if len(part) else math.nan for part in joined]


def _perplexity(pairs: Sequence[PromptPair]) -> LogprobPerplexity | None:
    rows = [(pair.reference.logprobs[mine], pair.candidate.logprobs[other])
            for pair in pairs for _, mine, other in pair.rows]  # fmt: skip
    following = following_of(*np.array(rows, np.float64).reshape(-1, 2).T)
    if following is None or following.num_tokens < 2:
        return None
    return LogprobPerplexity(
        num_tokens=following.num_tokens, delta_p_mean=following.delta_p_mean,
        delta_p_rms=following.delta_p_rms, delta_p_p1=following.delta_p_p1,
        delta_p_p99=following.delta_p_p99,
        reference=following.base, candidate=following.other, ln_ratio=following.ln_ratio,
        ln_ratio_error=following.ln_ratio_error, ln_correlation=following.ln_correlation,
    )  # fmt: skip


def _divergence(pairs: Sequence[PromptPair]) -> LogprobDivergence | None:
    all_bounds, same = [], []
    for pair in pairs:
        parting = [] if pair.parting is None else [pair.parting]
        for _, mine, other in [*pair.rows, *parting]:
            if mine is None or other is None:
                continue
            p, q = pair.reference.distribution(mine), pair.candidate.distribution(other)
            if min(len(p.ids), len(q.ids)) < 2:
                continue  # the chosen token alone is no distribution
            bounds = divergence_bounds(p.ids, p.log, q.ids, q.log)
            if bounds is not None:
                all_bounds.append(bounds)
                same.append(p.ids[p.log.argmax()] == q.ids[q.log.argmax()])
    if not all_bounds:
        return None
    lower, upper, low, high, tail, _ = np.array(all_bounds).mean(axis=0)
    each = np.array(all_bounds)[:, 0]
    return LogprobDivergence(
        num_tokens=len(all_bounds), kl_lower=float(lower),
        kl_upper=float(upper) if math.isfinite(upper) else None, tv_lower=float(low),
        tv_upper=float(high), tail=float(tail), kl_median=quantile(each, 0.5),
        kl_p99=quantile(each, 0.99), kl_max=float(each.max()),
        same_top=float(np.mean(same)),
    )  # fmt: skip


def _flip(pair: PromptPair, scale: Scale, a: Run, b: Run) -> LogprobFlip:
    assert pair.parting is not None and pair.tokens is not None
    place, mine, other = pair.parting
    token_a, token_b = pair.tokens
    gaps = [
        _gap(side, row, first, second)
        for side, row, first, second in (
            (pair.reference, mine, token_a, token_b), (pair.candidate, other, token_b, token_a),
        )
    ]  # fmt: skip
    chosen = [
        TokenChoice(
            id=token, text=run.manifest.tokens.texts.get(str(token)),
            logprob=math.nan if row is None else float(side.logprobs[row]),
        )
        for run, side, row, token in (
            (a, pair.reference, mine, token_a), (b, pair.candidate, other, token_b)
        )
    ]  # fmt: skip
    return LogprobFlip(
        sample=pair.sample, position=place, reference=chosen[0], candidate=chosen[1],
        margin=gaps[0], candidate_margin=gaps[1], judgement=_judgement(pair, gaps, scale, a, b),
    )  # fmt: skip


def _judgement(
    pair: PromptPair, gaps: Sequence[float | None], scale: Scale, a: Run, b: Run
) -> Literal["tie", "fault"] | None:
    """A token that is on no list is less likely than every one that is, where ids tell them apart;
    a text that is on no list may be written otherwise there."""
    assert pair.parting is not None
    known = [gap for gap in gaps if gap is not None]
    beyond = list(known)
    if not any(facts_of(run).get("token ids") == BY_TEXT for run in (a, b)):
        sides = zip((pair.reference, pair.candidate), pair.parting[1:], gaps, strict=True)
        beyond += [_least_gap(side, row) for side, row, gap in sides if gap is None]
    if any(gap > FAULT * scale.value for gap in beyond):
        return "fault"
    return "tie" if known and max(beyond) <= TIE * scale.value else None


def _least_gap(side: TokenSequence, row: int | None) -> float:
    """log p of the side's own token less that of any that its list does not hold: at least."""
    if row is None:
        return 0.0
    listed = side.distribution(row).log
    return float(side.logprobs[row] - listed[-1]) if len(listed) else 0.0


def _gap(side: TokenSequence, row: int | None, first: int, second: int) -> float | None:
    """log p of the first less that of the second, as far as the side's list tells."""
    if row is None:
        return None
    distribution = side.distribution(row)
    first_log, second_log = distribution.of(first), distribution.of(second)
    return None if first_log is None or second_log is None else first_log - second_log


def _sequences(pairs: Sequence[PromptPair]) -> list[LogprobSequence]:
    sequences = []
    for pair in pairs:
        delta, places = pair.whole
        if not len(delta):
            continue
        size = np.abs(delta)
        rows = {place: (mine, other) for place, mine, other in pair.rows}
        both = np.array([rows[int(place)] for place in places])
        p = np.exp(pair.reference.logprobs[both[:, 0]])
        q = np.exp(pair.candidate.logprobs[both[:, 1]])
        sequences.append(LogprobSequence(
            sample=pair.sample, num_tokens=len(size), mean=float(delta.mean()),
            mean_abs=float(size.mean()), max_abs=float(size.max()),
            worst_position=int(places[size.argmax()]), log_ratio=float(delta.sum()),
            probs_diff_mean=float(np.abs(p - q).mean()),
            mult_prob_error=float(np.exp(np.minimum(size, SAFETY_BOUND)).mean()),
        ))  # fmt: skip
    return sorted(sequences, key=lambda sequence: (-sequence.mean_abs, sequence.sample))


def _rollout_side(a: Run, b: Run) -> Side | None:
    """The side whose tokens were sampled in training; None where none of both is of that kind."""
    roles = [facts_of(run).get("role") for run in (a, b)]
    if "rollout" in roles:
        return "reference" if roles[0] == "rollout" else "candidate"
    if "trainer" in roles:
        return "candidate" if roles[0] == "trainer" else "reference"
    return None


def _rollout(pairs: Sequence[PromptPair], side: Side) -> dict[str, float]:
    """Of the answers' tokens alone."""
    parts = []
    for pair in pairs:
        rows = [row for row in pair.rows if row[0] >= pair.answer_begins]
        x = pair.reference.logprobs[[row for _, row, _ in rows]]
        y = pair.candidate.logprobs[[row for _, _, row in rows]]
        fine = np.isfinite(x) & np.isfinite(y)
        parts.append((x[fine], y[fine]))
    ours, theirs = [x for x, _ in parts], [y for _, y in parts]
    return rollout_metrics(ours, theirs) if side == "reference" else rollout_metrics(theirs, ours)


def _check(name: str, value: float) -> RolloutCheck:
    framework, normal, raised, bad, how = LIMITS[name]
    size = abs(value) if how == "abs" else max(value, 1 / value) if how == "ratio" else value
    if how == "least":
        state: Literal["normal", "raised", "bad"] = "normal" if value > raised else "bad"
    else:
        state = "bad" if size > bad else "raised" if size >= raised else "normal"
    return RolloutCheck(name=name, framework=framework, value=value, normal=normal, state=state)


def _below_likeliest(pairs: Sequence[PromptPair], a: Run, b: Run) -> dict[str, list[float]]:
    """Answers that are said to be greedy, and are not: by how much their own list holds another
    token above. Equal numbers are a tie."""
    by_side: dict[str, list[float]] = {}
    for name, run in (("reference", a), ("candidate", b)):
        if facts_of(run).get("tokens") != "greedy":
            continue
        gaps = []
        for pair in pairs:
            side = pair.reference if name == "reference" else pair.candidate
            for place, row in side.rows.items():
                known = side.distribution(row) if place >= side.num_prompt else None
                if known is not None and len(known.log):
                    gaps.append(float(known.log[0] - side.logprobs[row]))
        if any(gap > _EQUAL for gap in gaps):
            by_side[name] = [gap for gap in gaps if gap > _EQUAL]
    return by_side

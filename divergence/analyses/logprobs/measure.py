"""What two sides' log-probabilities differ by, beside experts, layers and sampled tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np
from msgspec.structs import asdict, replace

from divergence.analyses.logprobs.pairs import PromptPair, facts_of, pair_runs
from divergence.analyses.logprobs.pairs import Sequence as Text
from divergence.analyses.logprobs.pairs import Sequence as TokenSequence
from divergence.analyses.logprobs.pattern import FAULT, TIE, Pattern, Scale
from divergence.comparison.api import compare
from divergence.comparison.decide import check
from divergence.comparison.results import (
    Finding,
    LogprobDelta,
    LogprobDivergence,
    LogprobExpert,
    LogprobFlip,
    LogprobLayers,
    LogprobPerplexity,
    LogprobSequence,
    LogprobShift,
    LogprobsResult,
    LogprobTexts,
    PreflightLine,
    RolloutCheck,
    TokenChoice,
)
from divergence.errors import UsageError
from divergence.facts import fact
from divergence.numerics.formats import format_named
from divergence.numerics.logits import SAFETY_BOUND, divergence_bounds, rollout_metrics
from divergence.numerics.statistics import LEVEL, rank_sum, two_sample
from divergence.numerics.sums import following_of, quantile
from divergence.run.command import command_line
from divergence.run.manifest import UNKNOWN
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.scores import BY_TEXT, DRAWN
from divergence.run.site import LOGPROBS, module_of
from divergence.words import Progress, Side

# Answers that both sides drew at temperature 1: are they of one distribution?
#
# Drawn texts part at once, so that no token is compared; the two sets of answers are, prompt by
# prompt (numerics.two_sample). That nothing is seen is no more than the power that stands beside.


def are_drawn(a: Run, b: Run) -> bool:
    return all(_decoding(run) == DRAWN for run in (a, b))


def _decoding(run: Run) -> str:
    """How its tokens were chosen: greedy, drawn, sampled (in training), given; or unknown."""
    if run.manifest.plan.sites == [LOGPROBS]:
        return facts_of(run).get("tokens", UNKNOWN)
    return "greedy" if run.manifest.tokens.forced_by is None else "given"


def decoding_line(a: Run, b: Run) -> PreflightLine:
    """Drawn answers against greedy ones are another experiment."""
    kinds = _decoding(a), _decoding(b)
    other = set(kinds) == {DRAWN, "greedy"}
    known = UNKNOWN not in kinds
    return PreflightLine(
        check="decoding", reference=kinds[0], candidate=kinds[1],
        status="blocking" if other else "unknown" if not known
        else "same" if kinds[0] == kinds[1] else "differs",
        details=[fact("logprobs.drawn_and_greedy")] if other else [], detail="",
    )  # fmt: skip


def texts_of(pairs: Sequence[PromptPair]) -> LogprobTexts | None:
    """None with fewer than two answers to a prompt."""
    groups: dict[Hashable, list[PromptPair]] = {}
    for pair in pairs:
        groups.setdefault(pair.prompt, []).append(pair)
    if not groups or min(map(len, groups.values())) < 2:
        return None
    result = two_sample([
        (_table([row.reference for row in group], width), _table([row.candidate for row in group],
                                                                 width))
        for group in groups.values()
        if (width := max(len(_answer(side)) for row in group
                         for side in (row.reference, row.candidate)))
    ])  # fmt: skip
    return LogprobTexts(
        num_prompts=result.num_prompts, num_answers=result.num_answers, mmd=result.mmd,
        p_value=result.p_value, smallest_share=result.smallest_share,
    )  # fmt: skip


def _answer(text: Text) -> list[int]:
    return text.ids[text.num_prompt :]


def _table(texts: Sequence[Text], width: int) -> np.ndarray:
    """(n, width); below all ids behind the ends."""
    table = np.full((len(texts), width), -9, np.int64)
    for row, text in zip(table, texts, strict=True):
        row[: len(_answer(text))] = _answer(text)
    return table


def of_drawn(
    finding: Finding, texts: LogprobTexts | None, pairs: Sequence[PromptPair]
) -> Finding:  # fmt: skip
    """``finding``, of tokens behind equal text, where it raises an alarm; else what texts tell."""
    if finding.kind not in ("identical", "within_floor", "undetermined"):
        return finding
    sides: tuple[Side, Side] = ("reference", "candidate")
    repeats = [side for side in sides if _repeats(pairs, side)]
    told = _find(texts)
    if texts is not None and repeats:
        told = _repeated(repeats, told if len(repeats) == 1 else None)
    return replace(told, evidence=[*told.evidence, *finding.evidence])


def _repeats(pairs: Sequence[PromptPair], side: Side) -> bool:
    """Does a side give the same answer to a prompt, whatever the seed, to each of them?"""
    answers: dict[Hashable, set[tuple[int, ...]]] = {}
    for pair in pairs:
        answers.setdefault(pair.prompt, set()).add(tuple(_answer(getattr(pair, side))))
    return len(pairs) > len(answers) == sum(map(len, answers.values()))


def _repeated(sides: Sequence[Side], told: Finding | None) -> Finding:
    """Answers that were not drawn tell of no distribution: a test would count one as many. ``told``
    where the other side's were: that they differ is then true, whatever the cause."""
    repeats = fact("logprobs.repeats", side="both" if len(sides) == 2 else sides[0])
    if told is not None and told.kind == "systematic":
        ignores = fact("logprobs.ignores_temperature", repeats=repeats)
        return replace(told, headline=[*told.headline, ignores])
    return Finding(
        claim="logprobs", kind="undetermined",
        headline=[fact("logprobs.not_drawn", repeats=repeats)],
        rests_on=[check("told", False, repeats)],
    )  # fmt: skip


def _find(texts: LogprobTexts | None) -> Finding:
    """Is it one distribution? Never said of too few answers."""
    if texts is None or texts.p_value is None:
        num = 0 if texts is None else texts.num_answers
        return Finding(
            claim="logprobs", kind="undetermined",
            headline=[fact("logprobs.few_drawn", num_answers=num)],
            rests_on=[check("answers", False, fact("logprobs.more_answers"))],
        )  # fmt: skip
    test = fact("logprobs.test", **asdict(texts))
    if texts.p_value <= LEVEL:
        return Finding(
            claim="logprobs", kind="systematic",
            headline=[fact("logprobs.other_distribution", test=test)],
            rests_on=[check("scale", False, fact("logprobs.texts_blur_cause"))],
        )  # fmt: skip
    share = texts.smallest_share
    return Finding(
        claim="logprobs", kind="within_floor" if share is not None else "undetermined",
        headline=[fact("logprobs.no_difference", test=test, share=share)],
        rests_on=[check("scale", False, fact("logprobs.power_of_test"))],
    )  # fmt: skip


# Experts as a cause: do the tokens that differ share an expert?
#
# Where a side, or a run of ``--layers``, recorded which experts its tokens were sent to, each
# expert of each block splits the tokens in two: those whose prediction went through it, and the
# others. The expert is named whose tokens differ most beyond the others', where chance does not
# explain it (rank sum of Wilcoxon, normal approximation, p times the number of experts, at most 1%)
# and the others differ by less than a third.

_LEVEL, _TIMES, _FEWEST = 0.01, 3.0, 5

_Choices = dict[tuple[int, int], dict[str, frozenset[int]]]
"""(prompt, index of the token in its sequence) → of each block the experts it was sent to."""


def has_experts(runs: Sequence[Run]) -> bool | None:
    """Does the model route tokens to experts? None where no side tells: a server, a rollout."""
    models = [
        run.manifest for run in runs if run.manifest.model.config or run.manifest.plan.modules
    ]
    if not models:
        return None
    return any(
        any(note.routed for note in manifest.plan.modules.values())
        or any(_NUM_EXPERTS.search(key) and value for key, value in manifest.model.config.items())
        for manifest in models
    )


_NUM_EXPERTS = re.compile(r"(^|[._])(num|n)_.*experts$|_num_experts$")
"""As configurations call it: num_experts, num_local_experts, n_routed_experts, moe_num_experts."""


def expert_of(pairs: Sequence[PromptPair], runs: Sequence[Run]) -> LogprobExpert | None:
    """The one whose tokens hold the difference. ``runs``: the first that recorded choices tells."""
    choices = next((told for run in runs if (told := _choices(run))), None)
    if choices is None:
        return None
    held = [
        (choices[key], abs(float(value)), key)
        for pair in pairs
        for place, value in zip(pair.places, pair.delta, strict=True)
        if (key := (pair.sample, int(place) - 1)) in choices
    ]
    size = np.array([value for _, value, _ in held])
    splits = {
        (block, expert): np.array([expert in chosen.get(block, ()) for chosen, *_ in held])
        for block, expert in {(b, e) for chosen, *_ in held for b, of in chosen.items() for e in of}
    }
    scores = [
        (rank_sum(size, there), block, expert, there)
        for (block, expert), there in splits.items()
        if _FEWEST <= int(there.sum()) <= len(size) - _FEWEST
    ]
    if not scores:
        return None
    z, block, expert, there = max(scores, key=lambda score: score[0])
    p_value = min(1.0, len(splits) * (1 - NormalDist().cdf(z)))
    mean, rest = float(size[there].mean()), float(size[~there].mean())
    if p_value > _LEVEL or mean <= _TIMES * rest:
        return None
    worst = held[int(np.where(there, size, -1.0).argmax())][2]
    return LogprobExpert(
        block=block, expert=expert, num_tokens=int(there.sum()), mean_abs=mean, rest_abs=rest,
        p_value=p_value, sample=worst[0], position=worst[1] + 1,
    )  # fmt: skip


def _choices(run: Run) -> _Choices:
    blocks = [path for path, note in run.manifest.plan.modules.items() if note.routed]
    choices: _Choices = {}
    for record in run.records if blocks else ():
        block = _block_of(record, blocks)
        if block is None or not run.has_bytes(record):
            continue
        group = run.manifest.tokens.group_of(record.sample) or [record.sample]
        tensor = run.read(record)
        if tensor.ndim not in (2, 3) or tensor.shape[:-1].numel() % len(group):
            continue
        rows = tensor.reshape(len(group), -1, tensor.shape[-1]).tolist()
        for sample, tokens in zip(group, rows, strict=True):
            for place, experts in _places(run, record, sample, tokens):
                choices.setdefault((sample, place), {})[block] = frozenset(experts)
    return choices


def _block_of(record: Record, blocks: Sequence[str]) -> str | None:
    """The block whose choice the record is."""
    path, _, port = record.site.rpartition(":")
    chosen = record.pass_ == "free" and path.endswith(".experts") and port.startswith("in.")
    if not chosen or format_named(record.dtype).kind == "float":
        return None
    return next((b for b in blocks if module_of(record.site).startswith(b + ".")), None)


def _places(
    run: Run, record: Record, sample: int, tokens: list[list[int]]
) -> list[tuple[int, list[int]]]:
    """Index in the sequence of each token of a forward; padding, on the left, is left out."""
    num_prompt = len(run.manifest.tokens.samples[sample].prompt_ids)
    if record.step:
        return [(num_prompt + record.step - 1, tokens[-1])]
    pads = len(tokens) - num_prompt
    return [(n - pads, token) for n, token in enumerate(tokens) if n >= pads >= 0]


# Log-probabilities beside layers: which block explains Δ log p?
#
# Where a side holds log-probabilities alone, a run that recorded layers of the same set-up on the
# same tokens (``--layers``) stands in for it. Two things are asked: do the two layer-level runs
# show the same Δ log p, token by token, and what does their own comparison say? Of Δ the share that
# they explain is 1 - Σ(Δ - Δ')² / ΣΔ², with Δ' theirs. Where it is small, what differs is not in
# what they ran: another build, other weights or other settings of the server.

_MOST = 0.5
"""Share of Δ log p from which on the layer-level runs show the same difference."""


def with_layers(a: Run, b: Run, given: Sequence[Run]) -> tuple[Run, Run]:
    """The layer-level run of each side: itself, or the next one of ``given``. Raises UsageError."""
    left = list(given)
    sides = []
    for run in (a, b):
        if run.manifest.plan.sites != [LOGPROBS]:
            sides.append(run)
        elif left:
            sides.append(left.pop(0))
        else:
            raise UsageError(
                f"{run.path} holds log-probabilities alone, and no --layers stands in for it",
                hint=f"make one on its tokens: {command_line('capture', like=run.path, o='RUN')}",
            )
    if left:
        raise UsageError(
            f"--layers {left[0].path} stands in for no side: each holds layers, or has one",
            hint="give one for each side that holds log-probabilities alone",
        )
    for run in sides:
        if run.manifest.plan.sites == [LOGPROBS]:
            raise UsageError(f"--layers {run.path} holds log-probabilities alone",
                             hint="a run that recorded blocks")  # fmt: skip
    return sides[0], sides[1]


def layers_of(
    pairs: Sequence[PromptPair], sides: tuple[Run, Run], progress: Progress | None
) -> LogprobLayers:
    """What they show, and how much of Δ log p it is. Raises UsageError for other prompts."""
    report = compare(*sides, progress=progress)
    theirs = {
        (pair.sample, int(place)): float(value)
        for pair in pair_runs(*sides)
        for place, value in zip(pair.places, pair.delta, strict=True)
    }
    ours = {
        (pair.sample, int(place)): float(value)
        for pair in pairs
        for place, value in zip(pair.places, pair.delta, strict=True)
    }
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UsageError(
            "the runs of --layers score none of the compared tokens",
            hint="capture them with --like of the run that holds the log-probabilities",
        )
    mine, other = (np.array([deltas[key] for key in common]) for deltas in (ours, theirs))
    whole = float((mine * mine).sum())
    explained = 1 - float(((mine - other) ** 2).sum()) / whole if whole else None
    onset = report.verdict.onset
    return LogprobLayers(
        num_tokens=len(common), share=None if explained is None else max(0.0, explained),
        kind=report.verdict.kind, headline=report.verdict.headline,
        block=None if onset is None else onset.block, side=report.verdict.side,
        reference=str(sides[0].path), candidate=str(sides[1].path),
    )  # fmt: skip


def joined(finding: Finding, layers: LogprobLayers) -> Finding:
    """``finding`` with what the layers say: the block, where they show the same difference."""
    if layers.share is None:
        return finding
    elsewhere = layers.share < _MOST
    shown = fact(
        "logprobs.layers_show",
        share=layers.share,
        num_tokens=layers.num_tokens,
        what=[fact("logprobs.not_in_layers")] if elsewhere else layers.headline,
    )
    headline = finding.headline
    differs = finding.kind not in ("identical", "within_floor")
    if layers.block is not None and differs and not elsewhere:
        explain = fact("logprobs.layers_explain", module=layers.block, share=layers.share)
        headline = [*headline, explain]
    return replace(finding, headline=headline, evidence=[shown, *finding.evidence])


# The numbers of two sides' log-probabilities. Pairs, scale and pattern stand apart.

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

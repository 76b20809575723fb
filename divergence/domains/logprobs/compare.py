"""Two runs of which one or both hold log-probabilities alone: their numbers, and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict, replace

from divergence.comparison.analysis import report_of
from divergence.comparison.api import compare
from divergence.comparison.decide import check
from divergence.comparison.preflight import preflight
from divergence.comparison.result import (
    Check,
    Coverage,
    Finding,
    Onset,
    PreflightLine,
    PreflightStatus,
    Report,
    TokenChoice,
    VerdictKind,
)
from divergence.domains.logprobs.hypotheses import MOST, Hypothesis, bounded, explained
from divergence.domains.logprobs.pairs import (
    PromptPair,
    facts_of,
    pair_runs,
    prompt_line,
    values_at,
)
from divergence.domains.logprobs.pairs import Sequence as Text
from divergence.domains.logprobs.pattern import (
    FAULT,
    TIE,
    Pattern,
    Scale,
    beyond_of,
    doubts_of,
    pattern_of,
    scale_of,
    typical_of,
)
from divergence.domains.logprobs.result import (
    LogprobDelta,
    LogprobDivergence,
    LogprobExpert,
    LogprobFlip,
    LogprobHypothesis,
    LogprobLayers,
    LogprobPerplexity,
    LogprobSequence,
    LogprobsResult,
    RolloutCheck,
)
from divergence.errors import UsageError
from divergence.facts import Fact, fact, plain
from divergence.numerics.floor import LOGPROB_LIMIT_WIDEST
from divergence.numerics.formats import format_named
from divergence.numerics.logits import SAFETY_BOUND, divergence_bounds, rollout_metrics
from divergence.numerics.statistics import (
    LEAST_PROMPTS,
    LEVEL,
    TwoSample,
    least_share,
    rank_sum,
    two_sample,
)
from divergence.numerics.sums import following_of, quantile
from divergence.run.command import command_line
from divergence.run.manifest import UNKNOWN
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT, DRAWN
from divergence.run.site import LOGPROBS_SITE, module_of, one_or_more
from divergence.words import SIDES, Progress, Side, common_side, grouped, other_side, side_of

# Answers that both sides drew at temperature 1: are they of one distribution?
#
# Drawn texts part at once, so that no token is compared; the two sets of answers are, prompt by
# prompt (``two_sample``). That nothing is seen is no more than the power that stands beside.


def finding_of(
    kind: VerdictKind, headline: Fact | list[Fact], *checks: Check, onset: Onset | None = None
) -> Finding:
    """The one finding on log-probabilities."""
    return Finding(
        claim="logprobs",
        kind=kind,
        rests_on=list(checks),
        onset=onset,
        headline=[headline] if isinstance(headline, Fact) else headline,
    )


def are_drawn(a: Run, b: Run) -> bool:
    return all(_decoding(run) == DRAWN for run in (a, b))


def _decoding(run: Run) -> str:
    """Say how its tokens were chosen: greedy, drawn, sampled (in training), given; or unknown."""
    if run.manifest.scores_alone:
        return facts_of(run).get("tokens", UNKNOWN)
    return "greedy" if run.manifest.tokens.forced_by is None else "given"


def texts_of(pairs: Sequence[PromptPair]) -> TwoSample | None:
    """None with fewer than two answers to a prompt."""
    groups = grouped(pairs, lambda pair: pair.prompt)
    if not groups or min(map(len, groups.values())) < 2:
        return None
    tables = []
    for group in groups.values():
        answers = [[_answer(getattr(pair, side)) for pair in group] for side in SIDES]
        width = max(len(answer) for side in answers for answer in side)
        if width:  # (n, width); below all ids behind the ends
            rows = ([answer + [-9] * (width - len(answer)) for answer in side] for side in answers)
            reference, candidate = (np.array(side, np.int64) for side in rows)
            tables.append((reference, candidate))
    return two_sample(tables)


def _answer(text: Text) -> list[int]:
    return text.ids[text.num_prompt :]


def drawn_finding(
    finding: Finding, texts: TwoSample | None, pairs: Sequence[PromptPair]
) -> Finding:
    """``finding``, of tokens behind equal text, where it raises an alarm; else what texts tell."""
    if finding.kind not in ("identical", "within_floor", "undetermined"):
        return finding
    # answers that were not drawn tell of no distribution: a test would count one as many; where
    # the other side's were, that they differ is true, whatever the cause
    sides = [side for side in SIDES if _repeats(pairs, side)]
    # is it one distribution? Never said of too few answers
    if texts is None or texts.p_value is None:
        few = fact("logprobs.few_drawn", num_answers=0 if texts is None else texts.num_answers)
        more = check("answers", False, fact("logprobs.more_answers"))
        drawn = finding_of("undetermined", few, more)
    else:
        test, share = fact("logprobs.test", **asdict(texts)), texts.smallest_share
        if texts.p_value <= LEVEL:
            other = fact("logprobs.other_distribution", test=test)
            blur = check("scale", False, fact("logprobs.texts_blur_cause"))
            drawn = finding_of("systematic", other, blur)
        else:
            same = fact("logprobs.no_difference", test=test, share=share)
            power = check("scale", False, fact("logprobs.power_of_test"))
            drawn = finding_of("undetermined" if share is None else "within_floor", same, power)
    if texts is not None and sides:
        repeats = fact("logprobs.repeats", side=common_side(sides))
        if len(sides) == 1 and drawn.kind == "systematic":
            ignores = fact("logprobs.ignores_temperature", repeats=repeats)
            drawn = replace(drawn, headline=[*drawn.headline, ignores])
        else:
            not_drawn = fact("logprobs.not_drawn", repeats=repeats)
            drawn = finding_of("undetermined", not_drawn, check("told", False, repeats))
    return replace(drawn, evidence=finding.evidence)


def _repeats(pairs: Sequence[PromptPair], side: Side) -> bool:
    """Does a side give the same answer to a prompt, whatever the seed, to each of them?"""
    answers: dict[Hashable, set[tuple[int, ...]]] = {}
    for pair in pairs:
        answers.setdefault(pair.prompt, set()).add(tuple(_answer(getattr(pair, side))))
    return len(pairs) > len(answers) == sum(map(len, answers.values()))


# Experts as a cause: do the tokens that differ share an expert?
#
# Where a side, or a run of ``--layers``, recorded which experts its tokens were sent to, each
# expert of each block splits the tokens in two: those whose prediction went through it, and the
# others. The expert is named whose tokens differ most beyond the others', where chance does not
# explain it (rank sum of Wilcoxon, normal approximation, p times the number of experts, at most 1%)
# and the others differ by less than a third.

_TIMES, _FEWEST = 3.0, 5

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
    choices = next((choices_told for run in runs if (choices_told := _choices(run))), None)
    if choices is None:
        return None
    rows = [
        (choices[key], abs(float(value)), key)
        for pair in pairs
        for place, value in zip(pair.places, pair.delta, strict=True)
        if (key := (pair.sample, int(place) - 1)) in choices
    ]
    size = np.array([value for _, value, _ in rows])
    splits = {
        (block, expert): np.array([expert in chosen.get(block, ()) for chosen, *_ in rows])
        for block, expert in {(b, e) for chosen, *_ in rows for b, of in chosen.items() for e in of}
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
    if p_value > LEVEL or mean <= _TIMES * rest:
        return None
    worst = rows[int(np.where(there, size, -1.0).argmax())][2]
    return LogprobExpert(
        block=block,
        expert=expert,
        num_tokens=int(there.sum()),
        mean_abs=mean,
        rest_abs=rest,
        p_value=p_value,
        sample=worst[0],
        position=worst[1] + 1,
    )


def _choices(run: Run) -> _Choices:
    blocks = [path for path, note in run.manifest.plan.modules.items() if note.routed]
    choices: _Choices = {}
    for record in run.records if blocks else ():
        path, _, port = record.site.rpartition(":")
        chosen = record.pass_ == "free" and path.endswith(".experts") and port.startswith("in.")
        chosen = chosen and format_named(record.dtype).kind != "float" and run.has_bytes(record)
        block = next((b for b in blocks if module_of(record.site).startswith(b + ".")), None)
        if not chosen or block is None:
            continue
        group = run.manifest.tokens.group_of(record.sample) or [record.sample]
        ids = run.array(record)
        if ids.ndim not in (2, 3) or math.prod(ids.shape[:-1]) % len(group):
            continue
        rows = ids.reshape(len(group), -1, ids.shape[-1]).tolist()
        for sample, tokens in zip(group, rows, strict=True):
            num_prompt = len(run.manifest.tokens.samples[sample].prompt_ids)
            if record.step:
                places = {num_prompt + record.step - 1: tokens[-1]}
            elif len(tokens) >= num_prompt:  # padding, on the left, is left out
                places = dict(enumerate(tokens[len(tokens) - num_prompt :]))
            else:
                continue
            for place, experts in places.items():
                choices.setdefault((sample, place), {})[block] = frozenset(experts)
    return choices


# Log-probabilities beside layers: which block explains Δ log p?
#
# Where a side holds log-probabilities alone, a run that recorded layers of the same set-up on the
# same tokens (``--layers``) stands in for it. Two things are asked: do the two layer-level runs
# show the same Δ log p, token by token, and what does their own comparison say? Of Δ the share that
# they explain is 1 - Σ(Δ - Δ')² / ΣΔ², with Δ' theirs. Where it is small, what differs is not in
# what they ran: another build, other weights or other settings of the server.


def with_layers(a: Run, b: Run, given: Sequence[Run]) -> tuple[Run, Run]:
    """The layer-level run of each side: itself, or the next one of ``given``. Raises UsageError."""
    left, sides = list(given), []
    for run in (a, b):
        if run.manifest.scores_alone:
            if not left:
                raise UsageError(
                    f"{run.path} holds log-probabilities alone, and no --layers stands in for it",
                    hint="make one on its tokens: "
                    + command_line("capture", like=run.path, o="RUN"),
                )
            run = left.pop(0)
            if run.manifest.scores_alone:
                raise UsageError(
                    f"--layers {run.path} holds log-probabilities alone",
                    hint="a run that recorded blocks",
                )
        sides.append(run)
    if left:
        raise UsageError(
            f"--layers {left[0].path} stands in for no side: each holds layers, or has one",
            hint="give one for each side that holds log-probabilities alone",
        )
    return sides[0], sides[1]


def layers_of(
    pairs: Sequence[PromptPair], sides: tuple[Run, Run], progress: Progress | None
) -> LogprobLayers:
    """Return what they show, and how much of Δ log p it is. Raises UsageError for other prompts."""
    report = compare(*sides, progress=progress)
    deltas_a, deltas_b = (
        {
            (pair.sample, int(place)): float(value)
            for pair in each
            for place, value in zip(pair.places, pair.delta, strict=True)
        }
        for each in (pairs, pair_runs(*sides))
    )
    common = sorted(deltas_a.keys() & deltas_b.keys())
    if not common:
        raise UsageError(
            "the runs of --layers score none of the compared tokens",
            hint="capture them with --like of the run that holds the log-probabilities",
        )
    delta_a, other = (np.array([deltas[key] for key in common]) for deltas in (deltas_a, deltas_b))
    whole = float((delta_a * delta_a).sum())
    explained = 1 - float(((delta_a - other) ** 2).sum()) / whole if whole else None
    onset = report.verdict.onset
    return LogprobLayers(
        num_tokens=len(common),
        share=None if explained is None else max(0.0, explained),
        kind=report.verdict.kind,
        headline=report.verdict.headline,
        block=None if onset is None else onset.block,
        side=report.verdict.side,
        reference=str(sides[0].path),
        candidate=str(sides[1].path),
    )


def joined(finding: Finding, layers: LogprobLayers) -> Finding:
    """``finding`` with what the layers say: the block, where they show the same difference."""
    if layers.share is None:
        return finding
    share, elsewhere = layers.share, layers.share < MOST
    what = [fact("logprobs.not_in_layers")] if elsewhere else layers.headline
    shown = fact("logprobs.layers_show", share=share, num_tokens=layers.num_tokens, what=what)
    headline = finding.headline
    differs = finding.kind not in ("identical", "within_floor")
    if layers.block is not None and differs and not elsewhere:
        headline = [*headline, fact("logprobs.layers_explain", module=layers.block, share=share)]
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
    # the side whose tokens were sampled in training; None where none of both is of that kind
    roles = [facts_of(run).get("role") for run in (a, b)]
    side: Side | None = None
    if "rollout" in roles:
        side = SIDES[roles.index("rollout")]
    elif "trainer" in roles:
        side = other_side(SIDES[roles.index("trainer")])
    metrics = _rollout(pairs, side) if side is not None else {}
    # of answers that are said to be greedy: by how much their own list holds another token above;
    # equal numbers are a tie
    by_side: dict[str, list[float]] = {}
    for name, run in zip(SIDES, (a, b), strict=True):
        if facts_of(run).get("tokens") != "greedy":
            continue
        for own in (getattr(pair, name) for pair in pairs):
            for place, row in own.rows.items():
                if place < own.num_prompt or not len(listed := own.distribution(row).log):
                    continue
                if (gap := float(listed[0] - own.logprobs[row])) > _EQUAL:
                    by_side.setdefault(name, []).append(gap)
    faults = [flip for flip in flips if flip.judgement == "fault"]
    sequences = []
    for pair in pairs:
        delta, places = pair.whole
        if not len(delta):
            continue
        size = np.abs(delta)
        p, q = np.exp(values_at(pair, places))
        sequences.append(
            LogprobSequence(
                sample=pair.sample,
                num_tokens=len(size),
                mean=float(delta.mean()),
                mean_abs=float(size.mean()),
                max_abs=float(size.max()),
                worst_position=int(places[size.argmax()]),
                log_ratio=float(delta.sum()),
                probs_diff_mean=float(np.abs(p - q).mean()),
                mult_prob_error=float(np.exp(np.minimum(size, SAFETY_BOUND)).mean()),
            )
        )
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
        shift=pattern.shift if pattern.shift.num_prompts else None,
        first_difference=next(iter([*faults, *flips]), None),
        num_flips=len(flips),
        num_ties=sum(flip.judgement == "tie" for flip in flips),
        num_faults=len(faults),
        sequences=sorted(sequences, key=lambda sequence: (-sequence.mean_abs, sequence.sample)),
        rollout=metrics,
        rollout_side=side if metrics else None,
        checks=[_check(name, metrics[name]) for name in LIMITS if name in metrics],
        num_not_likeliest={side: len(gaps) for side, gaps in by_side.items()},
        max_below_likeliest={side: max(gaps) for side, gaps in by_side.items()},
    )


def _delta(pairs: Sequence[PromptPair]) -> LogprobDelta | None:
    filled = [pair for pair in pairs if len(pair.delta)]
    if not filled:
        return None
    delta = np.concatenate([pair.delta for pair in filled])
    at = np.concatenate([pair.places - pair.answer_begins for pair in filled])
    size = np.abs(delta)
    # of tenths of the longest answer; the last ones are of long answers alone
    longest, means = int(at.max()) + 1, []
    for number in range(_TENTHS if longest >= _TENTHS else 0):
        part = size[(at >= 0) & (at * _TENTHS // longest == number)]
        means.append(float(part.mean()) if len(part) else math.nan)
    return LogprobDelta(
        num_tokens=len(delta),
        mean=float(delta.mean()),
        mean_abs=float(size.mean()),
        rms=math.sqrt(float((delta * delta).mean())),
        median_abs=quantile(size, 0.5),
        p90_abs=quantile(size, 0.9),
        p99_abs=quantile(size, 0.99),
        max_abs=float(size.max()),
        by_position=means,
    )


def _perplexity(pairs: Sequence[PromptPair]) -> LogprobPerplexity | None:
    places = [np.array([place for place, *_ in pair.rows], np.int64) for pair in pairs]
    both = [values_at(*each) for each in zip(pairs, places, strict=True)]
    following = following_of(*np.concatenate([np.empty((2, 0)), *both], axis=1))
    if following is None or following.num_tokens < 2:
        return None
    figures = {**asdict(following), "reference": following.base, "candidate": following.other}
    names = LogprobPerplexity.__struct_fields__
    return LogprobPerplexity(**{name: figures[name] for name in names})


def _divergence(pairs: Sequence[PromptPair]) -> LogprobDivergence | None:
    all_bounds, same = [], []
    for pair in pairs:
        parting = [] if pair.parting is None else [pair.parting]
        for _, row_a, other in [*pair.rows, *parting]:
            if row_a is None or other is None:
                continue
            p, q = pair.reference.distribution(row_a), pair.candidate.distribution(other)
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
        num_tokens=len(all_bounds),
        kl_lower=float(lower),
        kl_upper=float(upper) if math.isfinite(upper) else None,
        tv_lower=float(low),
        tv_upper=float(high),
        tail=float(tail),
        kl_median=quantile(each, 0.5),
        kl_p99=quantile(each, 0.99),
        kl_max=float(each.max()),
        same_top=float(np.mean(same)),
    )


def _flip(pair: PromptPair, scale: Scale, a: Run, b: Run) -> LogprobFlip:
    assert pair.parting is not None and pair.tokens is not None
    place, *rows = pair.parting
    tokens = zip(pair.tokens, reversed(pair.tokens), strict=True)
    sides = zip((a, b), (pair.reference, pair.candidate), rows, tokens, strict=True)
    chosen, gaps = [], []
    for run, side, row, (token, other) in sides:
        logprob = math.nan if row is None else float(side.logprobs[row])
        text = run.manifest.tokens.texts.get(str(token))
        chosen.append(TokenChoice(id=token, text=text, logprob=logprob))
        # log p of its own token less that of the other's, as far as the side's list tells
        listed = None if row is None else side.distribution(row)
        own, others = (None if listed is None else listed.of(id_) for id_ in (token, other))
        gaps.append(None if own is None or others is None else own - others)
    return LogprobFlip(
        sample=pair.sample,
        position=place,
        reference=chosen[0],
        candidate=chosen[1],
        margin=gaps[0],
        candidate_margin=gaps[1],
        judgement=_judgement(pair, gaps, scale, a, b),
    )


def _judgement(
    pair: PromptPair, gaps: Sequence[float | None], scale: Scale, a: Run, b: Run
) -> Literal["tie", "fault"] | None:
    """A token that is on no list is less likely than every one that is, where ids tell them apart;
    a text that is on no list may be written otherwise there."""
    assert pair.parting is not None
    measured = [gap for gap in gaps if gap is not None]
    beyond = list(measured)
    if not any(facts_of(run).get("token ids") == BY_TEXT for run in (a, b)):
        sides = zip((pair.reference, pair.candidate), pair.parting[1:], gaps, strict=True)
        for side, row, gap in sides:
            if gap is None and row is not None and len(listed := side.distribution(row).log):
                beyond.append(float(side.logprobs[row] - listed[-1]))
    if any(gap > FAULT * scale.value for gap in beyond):
        return "fault"
    return "tie" if measured and max(beyond) <= TIE * scale.value else None


def _rollout(pairs: Sequence[PromptPair], side: Side) -> dict[str, float]:
    """Measure the answers' tokens alone."""
    sides: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for pair in pairs:
        answer = [place for place, *_ in pair.rows if place >= pair.answer_begins]
        both = values_at(pair, np.array(answer, np.int64))
        for values, finite in zip(sides, both[:, np.isfinite(both).all(0)], strict=True):
            values.append(finite)
    return rollout_metrics(*(sides if side == "reference" else sides[::-1]))


def _check(name: str, value: float) -> RolloutCheck:
    framework, normal, raised, bad, how = LIMITS[name]
    size = abs(value) if how == "abs" else max(value, 1 / value) if how == "ratio" else value
    if how == "least":
        state: Literal["normal", "raised", "bad"] = "normal" if value > raised else "bad"
    else:
        state = "bad" if size > bad else "raised" if size >= raised else "normal"
    return RolloutCheck(name=name, framework=framework, value=value, normal=normal, state=state)


# What two sides' log-probabilities show, as one finding.


def find(
    result: LogprobsResult,
    pairs: Sequence[PromptPair],
    pattern: Pattern,
    scale: Scale,
    *,
    hypothesis: Hypothesis | None,
    whole: bool,
    experts: bool | None,
) -> Finding:
    """The one finding. ``hypothesis``: what explains it. ``whole``: both runs reached their
    end, and nothing lacked a partner. ``experts``: has the model any? None where nobody tells."""
    # what no count of prompts is needed for: nan, and tokens that were not the likeliest, by more
    # than what it chooses from is perhaps rounded otherwise
    odd = [sum(pair.num_nonfinite[side] for pair in pairs) for side in (0, 1)]
    likelier = [
        name for name, most in result.max_below_likeliest.items() if most > FAULT * scale.value
    ]
    if any(odd):
        nan_side = side_of([num > 0 for num in odd])
        nonfinite = fact("logprobs.nonfinite", num_tokens=sum(odd), side=nan_side)
        finding = Finding(claim="logprobs", kind="nonfinite", side=nan_side, headline=[nonfinite])
    elif (named := result.hypothesis) is not None and hypothesis is not None:
        bound: dict[str, Any] = {"explained": scale.value, "source": scale.source}
        within = named.rest <= scale.value
        rest = fact("logprobs.remain", mean=named.rest, within=within, **bound)
        finding = finding_of("systematic", [hypothesis.what, rest])
    elif likelier:
        side, num = SIDES[likelier[0] == "candidate"], result.num_not_likeliest[likelier[0]]
        headline = fact("logprobs.not_likeliest", side=side, num_times=num)
        moved = [headline, fact("logprobs.choice_moved")]
        finding = Finding(claim="logprobs", kind="systematic", side=side, headline=moved)
    else:
        finding = _pattern_finding(result, pairs, pattern, scale, whole=whole, experts=experts)
    facts = list(finding.evidence)
    delta, kl, shift, flip = result.delta, result.divergence, result.shift, result.first_difference
    if delta is not None:
        facts.append(fact("logprobs.delta", **asdict(delta)))
    if kl is not None:
        facts.append(fact("logprobs.kl", **asdict(kl)))
    if flip is not None:
        gaps = [margin for margin in (flip.margin, flip.candidate_margin) if margin is not None]
        gap = fact("logprobs.margin", nats=max(gaps, default=None))
        if flip.judgement == "fault" and max(gaps, default=0.0) <= FAULT * scale.value:
            gap = fact("logprobs.margin_by_list")
        parting = fact(
            "logprobs.first_parting",
            num_flips=result.num_flips,
            sample=flip.sample,
            token=flip.position,
            margin=gap,
            judgement=flip.judgement,
            first_fault=0 < result.num_faults < result.num_flips,
            num_after=result.num_after,
        )
        facts.append(parting)
    if shift is not None and shift.low is not None and shift.high is not None:
        facts.append(fact("logprobs.shift", **asdict(shift)))
    elif shift is not None:
        facts.append(fact("logprobs.few_prompts", num_prompts=shift.num_prompts))
    if scale.without_dtype:
        facts.append(fact("logprobs.rounding_not_known"))
    bad = [stat for stat in result.checks if stat.state != "normal"]
    if result.checks and not bad:
        facts.append(fact("logprobs.rollout_normal"))
    facts += [fact("logprobs.rollout_off", **asdict(stat)) for stat in bad]
    return replace(finding, evidence=facts)


def _pattern_finding(
    result: LogprobsResult,
    pairs: Sequence[PromptPair],
    pattern: Pattern,
    scale: Scale,
    *,
    whole: bool,
    experts: bool | None,
) -> Finding:
    unknown = fact("logprobs.scale_from", source=scale.source)
    if scale.without_dtype:
        unknown = fact("logprobs.scale_without_dtype")
    scale_known = check("scale", scale.known, unknown)
    beyond = _beyond(result, pairs, scale, experts=experts)
    moved = fact("logprobs.experts_move", known=bool(experts))
    dense = check("experts", experts is False, moved, made=bool(experts))
    prompts = _enough(pattern.shift.num_prompts)
    covered = check("coverage", whole, fact("logprobs.not_covered"))
    delta = result.delta
    mean = delta.mean_abs if delta else None
    explained: dict[str, Any] = {"mean": mean, "explained": scale.value, "source": scale.source}
    causes: dict[str, Any] = {}
    if pattern.name in ("shifted", "everywhere"):
        num_beyond, others, order = beyond_of(pairs, scale)
        num = num_beyond + others
        # which prompts alone lie beyond what rounding explains, where some do
        spread = fact("logprobs.spread", num_beyond=num_beyond, num_prompts=num, order=order)
        some = num_beyond and others
        causes = {"spread": spread if some else None, "setting": bounded(pairs)}
    odd: dict[str, Any] = {"num_odd": len(pattern.odd), "rest": pattern.rest}
    few_tokens = fact("logprobs.odd_tokens", **odd, num_tokens=delta.num_tokens if delta else 0)
    rerouted = fact("logprobs.rerouted", known=bool(experts))
    if (expert := result.expert) is not None and expert.mean_abs > scale.value:
        sizes: dict[str, Any] = {"mean": expert.mean_abs, "rest": expert.rest_abs}
        which: dict[str, Any] = {"num_tokens": expert.num_tokens, "expert": expert.expert}
        guilty = fact("logprobs.expert", module=expert.block, **which, **sizes)
        place = _onset((expert.sample, expert.position), expert.block)
        return finding_of("localized", guilty, prompts, onset=place)
    match pattern.name:
        case "nothing":
            if (parted := _flip_finding(result, pairs, scale_known, experts=experts)) is not None:
                return parted
            # no number of one side can be held against one of the other; of the equal answers,
            # what they say of such prompts; ``--answers`` says more
            num_same = result.num_sequences - result.num_flips - result.num_ended
            texts = fact(
                "logprobs.texts",
                num_ties=result.num_ties,
                num_same=num_same,
                num_answers=result.num_sequences,
                least_share=least_share(num_same, result.num_sequences) or None,
            )
            alone = check("measured", False, fact("logprobs.texts_alone"))
            return finding_of("undetermined", texts, alone)
        case "few":
            num = pattern.shift.num_prompts
            few = fact("logprobs.too_few_prompts", **explained, far=pattern.far, num_prompts=num)
            return finding_of("undetermined", few, prompts)
        case "sequences":
            num_beyond = beyond_of(pairs, scale)[0] - len(pattern.odd)
            odd["samples"] = [sample for sample, _ in pattern.odd]
            odd["num_beyond"] = num_beyond if num_beyond > 0 else None
            stand_out = fact("logprobs.odd_prompts", **odd, num_prompts=result.num_sequences)
            return finding_of("localized", stand_out, prompts, onset=_onset(pattern.odd[0]))
        case "places":
            places, rest = pattern.places, pattern.rest
            at = fact("logprobs.odd_places", places=places, last=places == [-1], rest=rest)
            return finding_of("localized", at, prompts, dense, onset=_onset(pattern.odd[0]))
        case "positions" if experts is False:
            return finding_of("localized", few_tokens, prompts, onset=_onset(pattern.odd[0]))
        case "positions" if not experts or (delta and delta.mean_abs > scale.value):
            perhaps = fact("logprobs.perhaps_rerouted", what=few_tokens, cause=rerouted)
            place = _onset(pattern.odd[0])
            return finding_of("undetermined", perhaps, prompts, dense, onset=place)
        case "growing":
            growing = fact("logprobs.growing", times=pattern.growth or 0.0)
            return finding_of("drift", growing, prompts, dense)
        case "shifted":
            way = fact("logprobs.farther")
            if (shift := result.shift) is not None and not (
                shift.low is not None and shift.low <= 0 <= (shift.high or 0)
            ):
                below = "below" if shift.mean < 0 else "above"
                way = fact("logprobs.one_way", nats=abs(shift.mean), way=below)
            shifted = fact("logprobs.shifted", **explained, **causes, direction=way)
            return finding_of("systematic", shifted, prompts, beyond, dense)
        case "everywhere":
            everywhere = fact("logprobs.everywhere", **explained, **causes)
            return finding_of("drift", everywhere, prompts, beyond, dense)
    if (flipped := _flip_finding(result, pairs, scale_known, experts=experts)) is not None:
        return flipped
    doubts = [doubt for doubt in doubts_of(result, pairs, pattern, scale) if doubt.state != "met"]
    if pattern.name == "equal" and result.num_flips == result.num_ended == 0:
        equal = fact("logprobs.equal", partial=covered.state != "met")
        return finding_of("identical", equal, covered, *doubts)
    if pattern.name == "positions":
        hidden = fact("logprobs.hides_experts", what=few_tokens, cause=rerouted)
        doubts.insert(0, check("experts", False, hidden))
    more = {len(pair.candidate.ids) - len(pair.reference.ids) for pair in pairs if pair.ended}
    if result.rollout_side is not None and more in ({1}, {-1}):
        # one sampled text, told by both: no engine chose to end it earlier
        longer = SIDES[more == {1}]
        sides = [(_answer(pair.reference), _answer(pair.candidate)) for pair in pairs]
        odd_sides = [side for side in sides if len(side[0]) != len(side[1])]
        last = {side[longer == "candidate"][-1] for side in odd_sides}
        longest = max(len(answer) for side in sides for answer in side)
        if len(last) == 1:
            counted = fact(
                "logprobs.counted_once_more",
                side=longer,
                token=last.pop(),
                mean=mean,
                num_answers=len(odd_sides),
                num_total=len(pairs),
                shorter=len(odd_sides) < len(sides)
                and all(len(side[0]) == longest for side in sides if side not in odd_sides),
            )
            return finding_of("systematic", counted, prompts)
    headline = [fact("logprobs.within", **explained)]
    if result.num_ties:
        headline.append(fact("logprobs.parted_at_ties", num_prompts=result.num_ties))
    if num := result.num_flips - result.num_ties:
        headline.append(fact("logprobs.parted_untold", num_prompts=num))
    if result.num_ended:  # on which side, and by how much, where it is one
        ended: dict[str, Any] = {"num_answers": result.num_ended, "side": None}
        if len(more) == 1:
            num = more.pop()
            each = fact("logprobs.tokens", num_tokens=abs(num))
            ended |= {"side": SIDES[num <= 0], "each": each}
        headline.append(fact("logprobs.ended", **ended))
    if doubts and result.num_flips == result.num_ties and not result.num_ended:
        headline.append(fact("logprobs.but", doubt=doubts[0].lacking))
    # no rounding is a function of log p, however small it is
    in_size = any(
        item.code == "logprobs.goes_with_size"
        for doubt in doubts
        if doubt.lacking is not None
        for item in doubt.lacking["doubts"] or ()
    )
    if scale_known.state != "met" or "scale" not in {doubt.name for doubt in doubts}:
        doubts.insert(0, scale_known)
    kind: VerdictKind = "undetermined" if in_size else "within_floor"
    return finding_of(kind, headline, *doubts, prompts, covered)


def _flip_finding(
    result: LogprobsResult, pairs: Sequence[PromptPair], scale_known: Check, *, experts: bool | None
) -> Finding | None:
    """Answers that part where rounding does not; with experts no margin tells."""
    flip, num = result.first_difference, len({pair.prompt for pair in pairs})
    if flip is None or not result.num_faults:
        return None
    parted = fact("logprobs.parted", num_prompts=result.num_faults, experts=bool(experts))
    place = _onset((flip.sample, flip.position))
    kind: VerdictKind = "undetermined" if experts else "drift"
    return finding_of(kind, parted, scale_known, _enough(num), onset=place)


def _enough(num: int) -> Check:
    needed = fact("logprobs.prompts_needed", num_prompts=num, least=LEAST_PROMPTS)
    return check("prompts", num >= LEAST_PROMPTS, needed)


def _beyond(
    result: LogprobsResult, pairs: Sequence[PromptPair], scale: Scale, *, experts: bool | None
) -> Check:
    """Is it known that rounding makes no more? A floor run tells of its own machine; on another one
    correct kernels may differ by what the widest dtype explains."""
    mean = result.delta.mean_abs if result.delta else 0.0
    if experts is not False and result.delta:  # of the tail that other experts make, all but that
        mean = typical_of(np.concatenate([np.abs(pair.delta) for pair in pairs]))
    if mean <= LOGPROB_LIMIT_WIDEST and not scale.by_dtype:
        within = fact("logprobs.within_widest", floor=scale.floor is not None)
        return check("scale", False, within)
    source = fact("logprobs.by", source=scale.source)
    lacking = fact("logprobs.dtype_not_known") if scale.without_dtype else source
    return check("scale", scale.known, lacking, made=scale.known)


def _onset(place: tuple[int, int], block: str | None = None) -> Onset:
    return Onset(site=LOGPROBS_SITE, block=block, sample=place[0], step=0, position=place[1])


_SHOWN = ("tokenizer", "chat template", "complete")
"""Lines of preflight that mean something to a side of which nothing else is known."""


def report_on(
    a: Run,
    b: Run,
    *,
    truth: Run | None,
    floor: str | Path | Run | Sequence[str | Path | Run],
    layers: Sequence[Run],
    progress: Progress | None,
) -> Report:
    """Raises UsageError for a truth, a model's run without logits, or layers of other runs."""
    if truth is not None:
        raise UsageError(
            "--truth means nothing to log-probabilities alone: no block was seen",
            hint="compare the float64 run itself: divergence compare TRUTH RUN",
        )
    floors = [Run.open(source) for source in one_or_more(floor)]
    pairs = pair_runs(a, b)
    lines = [line for line in preflight(a, b) if line.check in _SHOWN]
    dtypes = [run.manifest.model_dtype.removeprefix("torch.") for run in (a, b)]
    names = []
    for run in (a, b):
        engine_note = run.manifest.engine
        name = "transformers" if engine_note is None else engine_note.name
        if engine_note is not None and engine_note.version not in ("", UNKNOWN):
            name += f" {engine_note.version}"
        names.append(name)
    decoding = _line("decoding", [_decoding(run) for run in (a, b)])
    if {decoding.reference, decoding.candidate} == {DRAWN, "greedy"}:  # another experiment
        drawn = [fact("logprobs.drawn_and_greedy")]
        decoding = replace(decoding, status="blocking", details=drawn)
    dtype, engine = _line("dtype", dtypes), _line("engine", names)
    lines = [prompt_line(pairs, a, b), decoding, dtype, engine, *lines]
    blocking = [line for line in lines if line.status == "blocking"]
    if blocking:
        line = blocking[0]
        against = fact("logprobs.against", reference=line.reference, candidate=line.candidate)
        what = [plain(line.detail)] if line.detail else line.details or [against]
        finding = Finding(
            claim="other_experiment",
            kind="incomparable",
            headline=[fact("logprobs.not_asked_the_same", what=what)],
            evidence=[fact("logprobs.check", check=line.check, what=what)],
        )
        return report_of(a, b, finding, Coverage(num_compared=0), lines, notes=_notes(a, b))
    scale = scale_of(a, b, floors)
    experts = has_experts([a, b, *layers])
    pattern = pattern_of(pairs, scale, experts=experts)
    result = measure(pairs, pattern, scale, a, b)
    if (hypothesis := explained(pairs)) is not None:
        before, after = np.abs(hypothesis.before), np.abs(hypothesis.after)
        fitted = LogprobHypothesis(
            what=hypothesis.what,
            left=hypothesis.left,
            mean_abs=float(before.mean()),
            rest=float(np.nanmean(after)),
        )
        result = replace(result, hypothesis=fitted)
    if layers:
        shown = layers_of(pairs, with_layers(a, b, layers), progress)
        result = replace(result, layers=shown)
    result = replace(result, expert=expert_of(pairs, [a, b, *layers]))
    whole = a.manifest.complete and b.manifest.complete and not result.num_other
    finding = find(
        result, pairs, pattern, scale, hypothesis=hypothesis, whole=whole, experts=experts
    )
    if are_drawn(a, b):
        finding = drawn_finding(finding, result.texts, pairs)
    roles = {facts_of(run).get("role") for run in (a, b)}
    quiet = finding.kind in ("identical", "within_floor", "undetermined")
    if roles == {"rollout", "trainer"} and result.num_flips and quiet:
        # one sampled text, told by both: no rounding makes another token of it
        num, total = result.num_flips, result.num_sequences
        others = fact("logprobs.other_answers", num_flips=num, num_answers=total)
        finding = replace(finding_of("systematic", others), evidence=finding.evidence)
    if result.layers is not None:
        finding = joined(finding, result.layers)
    compared = sum(len(pair.rows) for pair in pairs)
    coverage = Coverage(  # tokens that one side alone scored, or scored after other text
        num_compared=compared,
        num_only_reference=sum(len(pair.reference.rows) for pair in pairs) - compared,
        num_only_candidate=sum(len(pair.candidate.rows) for pair in pairs) - compared,
    )
    return report_of(a, b, finding, coverage, lines, notes=_notes(a, b), logprobs=result)


def _line(check: str, sides: Sequence[str]) -> PreflightLine:
    status: PreflightStatus = "same" if sides[0] == sides[1] else "differs"
    return PreflightLine(
        check=check,
        status="unknown" if UNKNOWN in sides else status,
        reference=sides[0],
        candidate=sides[1],
    )


def _notes(a: Run, b: Run) -> list[Fact]:
    notes: list[Fact] = []
    for side, run in zip(SIDES, (a, b), strict=True):
        facts = facts_of(run)
        if other := facts.get("answers as"):
            model = run.manifest.model.source
            notes.append(fact("logprobs.answers_as", side=side, model=model, answers_as=other))
        # what a server lacks stands in the run in words
        lacks = [text for text in facts.get("lacks", "").split("; ") if text]
        notes += [fact("logprobs.side_lacks", side=side, what=plain(text)) for text in lacks]
        if facts.get("token ids") == BY_TEXT:
            notes.append(fact("logprobs.by_text", side=side))
    if all(run.manifest.scores_alone for run in (a, b)):
        notes.append(fact("logprobs.no_layer"))
    return notes

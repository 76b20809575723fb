"""What two sides' log-probabilities show, as one finding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from divergence.analyses.logprobs.doubts import FAULT, doubts_of
from divergence.analyses.logprobs.pairs import PromptPair
from divergence.analyses.logprobs.pattern import Pattern, beyond_of, typical_of
from divergence.analyses.logprobs.processed import processed
from divergence.analyses.logprobs.scale import BY_DTYPE, NO_DTYPE, WIDEST, Scale
from divergence.comparison.decide import check
from divergence.comparison.results.findings import Check, Finding, Onset, VerdictKind
from divergence.comparison.results.tokens import LogprobsResult
from divergence.facts import Fact, plain
from divergence.layout import count, decimal
from divergence.numerics.resampling import LEAST_PROMPTS, least_share
from divergence.run.schema.site import LOGPROBS_SITE
from divergence.words import SideOrBoth, letter, list_names

__all__ = ["find"]


def find(
    result: LogprobsResult,
    pairs: Sequence[PromptPair],
    pattern: Pattern,
    scale: Scale,
    *,
    whole: bool,
    experts: bool | None,
) -> Finding:
    """The one finding. ``whole``: both runs reached their end, and nothing lacked a partner.
    ``experts``: has the model any? None where that is not told."""
    evidence = [*_facts(result, pattern, scale), *_rollout_facts(result)]
    finding = _of_numbers(result, pairs, scale) or _of_pattern(
        result, pairs, pattern, scale, whole=whole, experts=experts
    )
    return Finding(
        claim="logprobs", kind=finding.kind, headline=finding.headline, onset=finding.onset,
        side=finding.side, rests_on=finding.rests_on, evidence=[*finding.evidence, *evidence],
    )  # fmt: skip


def _of_numbers(
    result: LogprobsResult, pairs: Sequence[PromptPair], scale: Scale
) -> Finding | None:  # fmt: skip
    """What no count of prompts is needed for: nan, and tokens that were not the likeliest."""
    odd = [sum(pair.num_nonfinite[side] for pair in pairs) for side in (0, 1)]
    if any(odd):
        side: SideOrBoth = "both" if all(odd) else "reference" if odd[0] else "candidate"
        whose = "both sides" if side == "both" else letter(side)
        return Finding(
            claim="logprobs", kind="nonfinite", side=side,
            headline=[plain(f"nan or inf in {count(sum(odd), 'token')} of {whose} where the other side has "
            "a number")],
        )  # fmt: skip
    for name, num in result.num_not_likeliest.items():
        if result.max_below_likeliest[name] <= FAULT * scale.value:
            continue  # what it chooses from is rounded otherwise, perhaps
        return Finding(
            claim="logprobs",
            kind="systematic",
            side="reference" if name == "reference" else "candidate",
            headline=[
                plain(
                    f"{letter(name)} does not choose the likeliest token of its own list "
                    f"({count(num, 'time')}): it samples, or a penalty or a bias moves its choice"
                )
            ],
        )
    return None


def _of_pattern(
    result: LogprobsResult, pairs: Sequence[PromptPair], pattern: Pattern, scale: Scale, *,
    whole: bool, experts: bool | None,
) -> Finding:  # fmt: skip
    known = check("scale", scale.known, _why_unknown(scale))
    beyond = _beyond(result, pairs, scale, experts=experts)
    dense = _dense(experts)
    prompts = _enough(pattern.shift.num_prompts)
    covered = check("coverage", whole, "not every token was scored by both sides")
    delta, spread = result.delta, _spread(pairs, scale)
    mean = decimal(delta.mean_abs) if delta else "-"
    text = f"mean |Δ log p| {mean} nats"
    explained = f"{decimal(scale.value)} ({scale.of})"
    setting = processed(pairs) if pattern.name in ("shifted", "everywhere") else ""
    few_tokens = (
        f"{count(len(pattern.odd), 'token')} of {delta.num_tokens if delta else 0:,} "
        f"hold most of the difference; the others differ by {decimal(pattern.rest)} nats"
    )
    if (expert := result.expert) is not None and expert.mean_abs > scale.value:
        return _finding(
            "localized",
            f"the {count(expert.num_tokens, 'token')} sent to expert {expert.expert} of "
            f"{expert.block} differ by {decimal(expert.mean_abs)} nats, the others by "
            f"{decimal(expert.rest_abs)}",
            prompts,
            onset=_onset((expert.sample, expert.position), expert.block),
        )
    match pattern.name:
        case "nothing":
            return _of_flips(result, pairs, known, experts=experts) or _of_texts(result)
        case "few":
            far = "far " if pattern.far else ""
            return _finding(
                "undetermined",
                f"{text}, {far}more than the {explained} that rounding explains; "
                f"of what kind, {count(pattern.shift.num_prompts, 'prompt')} do not tell",
                prompts,
            )
        case "sequences":
            names = [str(sample) for sample, _ in pattern.odd]
            more = beyond_of(pairs, scale)[0] - len(names)
            return _finding(
                "localized",
                f"{count(len(names), 'prompt')} of {result.num_sequences} "
                f"{'stands' if len(names) == 1 else 'stand'} out ({list_names(names)}); the others "
                f"differ by {decimal(pattern.rest)} nats"
                + (f", {more} of them beyond rounding by themselves" if more > 0 else ""),
                prompts,
                onset=_onset(pattern.odd[0]),
            )
        case "positions" if experts is False:
            return _finding("localized", few_tokens, prompts, onset=_onset(pattern.odd[0]))
        case "positions" if not experts or (delta and delta.mean_abs > scale.value):
            return _finding(
                "undetermined", f"{few_tokens}; {_rerouted(experts)}", prompts, dense,
                onset=_onset(pattern.odd[0]),
            )  # fmt: skip
        case "growing":
            growth = pattern.growth or 0.0
            return _finding(
                "drift",
                f"the difference grows with the answer, {growth:.1f} times from its first "
                "third to its last, as a wrong state makes it (cache, positions)",
                prompts,
                dense,
            )
        case "shifted":
            return _finding(
                "systematic",
                f"{text}, {_direction(result)}{spread}: "
                + (setting or "another model, temperature or prompt, no precision"),
                prompts,
                beyond,
                dense,
            )
        case "everywhere":
            return _finding(
                "drift",
                f"{text}{spread or ' in all prompts alike'}, both ways, more than the {explained} "
                "that rounding explains: "
                + (setting or "another quantisation or precision, or other weights somewhere"),
                prompts,
                beyond,
                dense,
            )
    if (flipped := _of_flips(result, pairs, known, experts=experts)) is not None:
        return flipped
    doubts = [doubt for doubt in doubts_of(result, pairs, pattern, scale) if doubt.state != "met"]
    if pattern.name == "equal" and result.num_flips == result.num_ended == 0:
        return _finding("identical", "all log-probabilities and tokens are equal", covered, *doubts)
    if pattern.name == "positions":
        doubts.insert(0, check("experts", False, f"{few_tokens}, and {_rerouted(experts)}"))
    ties = f"; {count(result.num_ties, 'prompt')} parted at ties" if result.num_ties else ""
    if num := result.num_flips - result.num_ties:
        ties += f"; {count(num, 'prompt')} parted, and whether at ties is not told"
    if result.num_ended:
        ties += f"; {_of_ends(pairs)}"
    if doubts and result.num_flips == result.num_ties and not result.num_ended:
        ties += f"; but {doubts[0].detail}"
    return _finding(
        "within_floor",
        f"{text}, no more than the {explained} that rounding explains{ties}",
        *([] if known.state == "met" and "scale" in {doubt.name for doubt in doubts} else [known]),
        *doubts,
        prompts,
        covered,
    )


def _of_flips(
    result: LogprobsResult, pairs: Sequence[PromptPair], known: Check, *, experts: bool | None
) -> Finding | None:  # fmt: skip
    """Answers that part where rounding does not; where it may have sent a token to other experts,
    no margin tells."""
    flip, num = result.first_difference, len({pair.prompt for pair in pairs})
    if flip is None or not result.num_faults:
        return None
    parted = f"the answers to {count(result.num_faults, 'prompt')} part at a margin that rounding "
    return _finding(
        "undetermined" if experts else "drift",
        parted
        + ("flips only where it sends a token to other experts" if experts else "does not flip"),
        known,
        _enough(num),
        onset=_onset((flip.sample, flip.position)),
    )


def _of_ends(pairs: Sequence[PromptPair]) -> str:
    """Of the answers that end earlier on one side: on which, and by how much, where it is one."""
    more = [len(p.candidate.ids) - len(p.reference.ids) for p in pairs if p.ended]
    if len(set(more)) > 1:
        return f"{count(len(more), 'answer')} end earlier on one side"
    side = letter("reference" if more[0] > 0 else "candidate")
    each = "one token" if abs(more[0]) == 1 else f"{abs(more[0])} tokens"
    return f"{count(len(more), 'answer')} end earlier on {side}, by {each} each"


def _enough(num: int) -> Check:
    lacking = f"{count(num, 'prompt')}, and {LEAST_PROMPTS} are needed"
    return check("prompts", num >= LEAST_PROMPTS, lacking)


def _of_texts(result: LogprobsResult) -> Finding:
    """No number of one side can be held against one of the other."""
    same = result.num_sequences - result.num_flips - result.num_ended
    parted = f"; {result.num_ties} of them part at ties" if result.num_ties else ""
    why = "no token has a log-probability on both sides behind equal text" if result.num_ties else (
        "no token has a log-probability on both sides"
    )  # fmt: skip
    return _finding(
        "undetermined",
        f"{why}; {same} of {count(result.num_sequences, 'answer')} are the same text{parted}"
        f"{_share_of(same, result.num_sequences)}",
        Check(name="measured", state="failed", detail="texts alone"),
    )


def _spread(pairs: Sequence[PromptPair], scale: Scale) -> str:
    """Where some prompts alone lie beyond what rounding explains: how many, and which; else
    nothing."""
    beyond, others, order = beyond_of(pairs, scale)
    if not (beyond and others):
        return ""
    which = f", all of them {order} than the others" if order else ""
    return f" (beyond rounding in {beyond} of {beyond + others} prompts{which})"


def _share_of(same: int, of: int) -> str:
    """What so many equal answers say of such prompts; ``--answers`` says more."""
    least = least_share(same, of)
    sure = f"; of such prompts at least {least:.0%} are (99%)" if least else ""
    return f"{sure}. Drawn answers (--answers 10, both sides) tell whether they part by chance"


def _dense(experts: bool | None) -> Check:
    """Is the model known to have no experts?"""
    untold = "" if experts else ", and whether the model has any no side tells"
    text = f"rounding moves tokens farther where it sends them to other experts{untold}"
    return check("experts", experts is False, text, made=bool(experts))


def _rerouted(experts: bool | None) -> str:
    untold = "" if experts else "; whether the model has experts no side tells"
    return (
        "where the scores of experts nearly tie, rounding sends a token to another one, and a "
        f"fault of an expert looks the same{untold}. "
        "Runs with layers (--layers RUN) tell them apart"
    )


def _beyond(
    result: LogprobsResult, pairs: Sequence[PromptPair], scale: Scale, *, experts: bool | None
) -> Check:
    """Is it known that rounding makes no more? A floor run tells of its own machine; on another one
    correct kernels may differ by what the widest dtype explains."""
    mean = result.delta.mean_abs if result.delta else 0.0
    if experts is not False and result.delta:  # of the tail that other experts make, all but that
        mean = typical_of(np.concatenate([np.abs(pair.delta) for pair in pairs]))
    if mean <= WIDEST and scale.of not in BY_DTYPE:
        whose = " on another machine than the floor run's" if scale.floor is not None else ""
        return check("scale", False, f"no more than bfloat16 makes{whose}, of most tokens at least")
    text = "a side's dtype is not known" if scale.of.endswith(NO_DTYPE) else f"by {scale.of}"
    return check("scale", scale.known, text, made=scale.known)


def _why_unknown(scale: Scale) -> str:
    if scale.of.endswith(NO_DTYPE):
        return "no dtype is known: no more than bfloat16 explains"
    return f"rounding is taken from {scale.of}"


def _finding(
    kind: VerdictKind, summary: str, *checks: Check, onset: Onset | None = None
) -> Finding:
    return Finding(
        claim="logprobs", kind=kind, headline=[plain(summary)], rests_on=list(checks), onset=onset
    )


def _direction(result: LogprobsResult) -> str:
    shift = result.shift
    if shift is None or (shift.low is not None and shift.low <= 0 <= (shift.high or 0)):
        return "farther than any precision in use"
    word = "below" if shift.mean < 0 else "above"
    return f"B {decimal(abs(shift.mean))} nats {word} A"


def _onset(place: tuple[int, int], block: str | None = None) -> Onset:
    return Onset(site=LOGPROBS_SITE, block=block, sample=place[0], step=0, position=place[1])


def _facts(result: LogprobsResult, pattern: Pattern, scale: Scale) -> list[Fact]:
    facts = []
    delta, kl, shift, flip = (
        result.delta, result.divergence, result.shift, result.first_difference
    )  # fmt: skip
    if delta is not None:
        facts.append(plain(f"Δ log p of {count(delta.num_tokens, 'equal token')}: "
            f"mean {decimal(delta.mean)}, |Δ| mean {decimal(delta.mean_abs)}, "
            f"p99 {decimal(delta.p99_abs)}, max {decimal(delta.max_abs)} nats", mean=delta.mean, mean_abs=delta.mean_abs, max_abs=delta.max_abs))  # fmt: skip
    if kl is not None:
        upper = "no upper bound" if kl.kl_upper is None else f"at most {decimal(kl.kl_upper)}"
        facts.append(plain(f"KL(A‖B) at least {decimal(kl.kl_lower)} nats, {upper}; "
            f"{kl.tail:.1%} of the probability is on neither common list", kl_lower=kl.kl_lower, tail=kl.tail))  # fmt: skip
    if flip is not None:
        gaps = [margin for margin in (flip.margin, flip.candidate_margin) if margin is not None]
        said = "no list holds both" if not gaps else f"{decimal(max(gaps))} nats between them"
        word = {"tie": ": a tie", "fault": ": no tie", None: ""}[flip.judgement]
        if word == ": no tie" and max(gaps, default=0.0) <= FAULT * scale.value:
            said, word = "one side's list goes that far down without the other's token", ": no tie"
        first = "first at no tie" if 0 < result.num_faults < result.num_flips else "first"
        facts.append(plain(f"the answers to {count(result.num_flips, 'prompt')} part, {first} prompt "
            f"{flip.sample} at token {flip.position} ({said}{word}); "
            f"{count(result.num_after, 'token')} behind were not compared"))  # fmt: skip
    if shift is not None and shift.low is not None and shift.high is not None:
        facts.append(plain(f"over {shift.num_prompts} prompts the mean shift is {decimal(shift.mean)} nats, "
            f"99% between {decimal(shift.low)} and {decimal(shift.high)} "
            f"(p = {shift.p_value or 0:.2g}); so many would show one of "
            f"{decimal(shift.smallest_shift)}"))  # fmt: skip
    elif shift is not None:
        facts.append(plain(f"{count(shift.num_prompts, 'prompt')}: too few for an interval or a p value"))  # fmt: skip
    if not scale.known and scale.of.endswith(NO_DTYPE):
        facts.append(plain("what rounding makes here is not known: a side's dtype is not; --floor RUN, of a "
            "trusted machine on the same prompts, tells it"))  # fmt: skip
    return facts


def _rollout_facts(result: LogprobsResult) -> list[Fact]:
    bad = [check for check in result.checks if check.state != "normal"]
    if not result.checks:
        return []
    if not bad:
        return [plain("every number that trainers watch is normal by its own limit")]
    return [
        plain(f"{stat.framework}'s {stat.name} is {stat.value:.4g}, normal {stat.normal}")
        for stat in bad
    ]

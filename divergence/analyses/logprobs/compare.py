"""Two runs of which one or both hold log-probabilities alone: the whole report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

from divergence.analyses.logprobs.measure import (
    are_drawn,
    decoding_line,
    expert_of,
    has_experts,
    joined,
    layers_of,
    measure,
    of_drawn,
    with_layers,
)
from divergence.analyses.logprobs.pairs import (
    PromptPair,
    facts_of,
    pair_runs,
    processed,
    prompt_line,
)
from divergence.analyses.logprobs.pattern import (
    FAULT,
    WIDEST,
    Pattern,
    Scale,
    beyond_of,
    doubts_of,
    pattern_of,
    scale_of,
    typical_of,
)
from divergence.comparison.analysis import report_of
from divergence.comparison.decide import check
from divergence.comparison.preflight.lines import preflight
from divergence.comparison.result import Report, summary_of
from divergence.comparison.results import (
    Check,
    Coverage,
    Finding,
    LogprobsResult,
    Onset,
    PreflightLine,
    PreflightStatus,
    VerdictKind,
)
from divergence.errors import UsageError
from divergence.facts import Fact, fact, plain
from divergence.numerics.statistics import LEAST_PROMPTS, least_share
from divergence.run.manifest import UNKNOWN
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT
from divergence.run.site import LOGPROBS, LOGPROBS_SITE, one_or_more
from divergence.words import Progress, Side, SideOrBoth

# What two sides' log-probabilities show, as one finding.


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
    evidence = [*_facts(result, scale), *_rollout_facts(result)]
    finding = _of_numbers(result, pairs, scale) or _of_pattern(
        result, pairs, pattern, scale, whole=whole, experts=experts
    )
    return Finding(
        claim="logprobs", kind=finding.kind, headline=finding.headline, onset=finding.onset,
        side=finding.side, rests_on=finding.rests_on, evidence=[*finding.evidence, *evidence],
    )  # fmt: skip


def _of_numbers(
    result: LogprobsResult, pairs: Sequence[PromptPair], scale: Scale
) -> Finding | None:
    """What no count of prompts is needed for: nan, and tokens that were not the likeliest."""
    odd = [sum(pair.num_nonfinite[side] for pair in pairs) for side in (0, 1)]
    if any(odd):
        side: SideOrBoth = "both" if all(odd) else "reference" if odd[0] else "candidate"
        nonfinite = fact("logprobs.nonfinite", num_tokens=sum(odd), side=side)
        return Finding(claim="logprobs", kind="nonfinite", side=side, headline=[nonfinite])
    for name, num in result.num_not_likeliest.items():
        if result.max_below_likeliest[name] <= FAULT * scale.value:
            continue  # what it chooses from is rounded otherwise, perhaps
        return Finding(
            claim="logprobs",
            kind="systematic",
            side="reference" if name == "reference" else "candidate",
            headline=[
                fact("logprobs.not_likeliest", side=name, num_times=num),
                fact("logprobs.choice_moved"),
            ],
        )
    return None


def _of_pattern(
    result: LogprobsResult, pairs: Sequence[PromptPair], pattern: Pattern, scale: Scale, *,
    whole: bool, experts: bool | None,
) -> Finding:  # fmt: skip
    known = check("scale", scale.known, _why_unknown(scale))
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
        causes = {"spread": _spread(pairs, scale), "setting": processed(pairs)}
    odd: dict[str, Any] = {"num_odd": len(pattern.odd), "rest": pattern.rest}
    few_tokens = fact("logprobs.odd_tokens", **odd, num_tokens=delta.num_tokens if delta else 0)
    rerouted = fact("logprobs.rerouted", known=bool(experts))
    if (expert := result.expert) is not None and expert.mean_abs > scale.value:
        return _finding(
            "localized",
            fact(
                "logprobs.expert",
                num_tokens=expert.num_tokens,
                expert=expert.expert,
                module=expert.block,
                mean=expert.mean_abs,
                rest=expert.rest_abs,
            ),
            prompts,
            onset=_onset((expert.sample, expert.position), expert.block),
        )
    match pattern.name:
        case "nothing":
            return _of_flips(result, pairs, known, experts=experts) or _of_texts(result)
        case "few":
            num_prompts = pattern.shift.num_prompts
            few = fact(
                "logprobs.too_few_prompts", **explained, far=pattern.far, num_prompts=num_prompts
            )
            return _finding("undetermined", few, prompts)
        case "sequences":
            num_beyond = beyond_of(pairs, scale)[0] - len(pattern.odd)
            stand_out = fact(
                "logprobs.odd_prompts",
                **odd,
                num_prompts=result.num_sequences,
                samples=[sample for sample, _ in pattern.odd],
                num_beyond=num_beyond if num_beyond > 0 else None,
            )
            return _finding("localized", stand_out, prompts, onset=_onset(pattern.odd[0]))
        case "positions" if experts is False:
            return _finding("localized", few_tokens, prompts, onset=_onset(pattern.odd[0]))
        case "positions" if not experts or (delta and delta.mean_abs > scale.value):
            perhaps = fact("logprobs.perhaps_rerouted", what=few_tokens, cause=rerouted)
            place = _onset(pattern.odd[0])
            return _finding("undetermined", perhaps, prompts, dense, onset=place)
        case "growing":
            growing = fact("logprobs.growing", times=pattern.growth or 0.0)
            return _finding("drift", growing, prompts, dense)
        case "shifted":
            shifted = fact("logprobs.shifted", **explained, **causes, direction=_direction(result))
            return _finding("systematic", shifted, prompts, beyond, dense)
        case "everywhere":
            everywhere = fact("logprobs.everywhere", **explained, **causes)
            return _finding("drift", everywhere, prompts, beyond, dense)
    if (flipped := _of_flips(result, pairs, known, experts=experts)) is not None:
        return flipped
    doubts = [doubt for doubt in doubts_of(result, pairs, pattern, scale) if doubt.state != "met"]
    if pattern.name == "equal" and result.num_flips == result.num_ended == 0:
        return _finding("identical", fact("logprobs.equal"), covered, *doubts)
    if pattern.name == "positions":
        hidden = fact("logprobs.hides_experts", what=few_tokens, cause=rerouted)
        doubts.insert(0, check("experts", False, hidden))
    headline = [fact("logprobs.within", **explained)]
    if result.num_ties:
        headline.append(fact("logprobs.parted_at_ties", num_prompts=result.num_ties))
    if num := result.num_flips - result.num_ties:
        headline.append(fact("logprobs.parted_untold", num_prompts=num))
    if result.num_ended:
        headline.append(_ended(pairs))
    if doubts and result.num_flips == result.num_ties and not result.num_ended:
        headline.append(fact("logprobs.but", doubt=doubts[0].lacking))
    return _finding(
        "within_floor",
        headline,
        *([] if known.state == "met" and "scale" in {doubt.name for doubt in doubts} else [known]),
        *doubts,
        prompts,
        covered,
    )


def _of_flips(
    result: LogprobsResult, pairs: Sequence[PromptPair], known: Check, *, experts: bool | None
) -> Finding | None:
    """Answers that part where rounding does not; where it may have sent a token to other experts,
    no margin tells."""
    flip, num = result.first_difference, len({pair.prompt for pair in pairs})
    if flip is None or not result.num_faults:
        return None
    return _finding(
        "undetermined" if experts else "drift",
        fact("logprobs.parted", num_prompts=result.num_faults, experts=bool(experts)),
        known,
        _enough(num),
        onset=_onset((flip.sample, flip.position)),
    )


def _ended(pairs: Sequence[PromptPair]) -> Fact:
    """Of the answers that end earlier on one side: on which, and by how much, where it is one."""
    more = [len(p.candidate.ids) - len(p.reference.ids) for p in pairs if p.ended]
    if len(set(more)) > 1:
        return fact("logprobs.ended", num_answers=len(more), side=None)
    return fact(
        "logprobs.ended",
        num_answers=len(more),
        side="reference" if more[0] > 0 else "candidate",
        each=fact("logprobs.tokens", num_tokens=abs(more[0])),
    )


def _enough(num: int) -> Check:
    needed = fact("logprobs.prompts_needed", num_prompts=num, least=LEAST_PROMPTS)
    return check("prompts", num >= LEAST_PROMPTS, needed)


def _of_texts(result: LogprobsResult) -> Finding:
    """No number of one side can be held against one of the other. Of the equal answers, what they
    say of such prompts; ``--answers`` says more."""
    num_same = result.num_sequences - result.num_flips - result.num_ended
    texts = fact(
        "logprobs.texts", num_ties=result.num_ties, num_same=num_same,
        num_answers=result.num_sequences,
        least_share=least_share(num_same, result.num_sequences) or None,
    )  # fmt: skip
    return _finding("undetermined", texts, check("measured", False, fact("logprobs.texts_alone")))


def _spread(pairs: Sequence[PromptPair], scale: Scale) -> Fact | None:
    """Where some prompts alone lie beyond what rounding explains: how many, and which."""
    beyond, others, order = beyond_of(pairs, scale)
    if not (beyond and others):
        return None
    num_prompts = beyond + others
    return fact("logprobs.spread", num_beyond=beyond, num_prompts=num_prompts, order=order)


def _beyond(
    result: LogprobsResult, pairs: Sequence[PromptPair], scale: Scale, *, experts: bool | None
) -> Check:
    """Is it known that rounding makes no more? A floor run tells of its own machine; on another one
    correct kernels may differ by what the widest dtype explains."""
    mean = result.delta.mean_abs if result.delta else 0.0
    if experts is not False and result.delta:  # of the tail that other experts make, all but that
        mean = typical_of(np.concatenate([np.abs(pair.delta) for pair in pairs]))
    if mean <= WIDEST and not scale.by_dtype:
        within = fact("logprobs.within_widest", floor=scale.floor is not None)
        return check("scale", False, within)
    source = fact("logprobs.by", source=scale.source)
    lacking = fact("logprobs.dtype_not_known") if scale.without_dtype else source
    return check("scale", scale.known, lacking, made=scale.known)


def _why_unknown(scale: Scale) -> Fact:
    if scale.without_dtype:
        return fact("logprobs.scale_without_dtype")
    return fact("logprobs.scale_from", source=scale.source)


def _finding(
    kind: VerdictKind, headline: Fact | list[Fact], *checks: Check, onset: Onset | None = None
) -> Finding:
    return Finding(
        claim="logprobs",
        kind=kind,
        rests_on=list(checks),
        onset=onset,
        headline=[headline] if isinstance(headline, Fact) else headline,
    )


def _direction(result: LogprobsResult) -> Fact:
    shift = result.shift
    if shift is None or (shift.low is not None and shift.low <= 0 <= (shift.high or 0)):
        return fact("logprobs.farther")
    way = "below" if shift.mean < 0 else "above"
    return fact("logprobs.one_way", nats=abs(shift.mean), way=way)


def _onset(place: tuple[int, int], block: str | None = None) -> Onset:
    return Onset(site=LOGPROBS_SITE, block=block, sample=place[0], step=0, position=place[1])


def _facts(result: LogprobsResult, scale: Scale) -> list[Fact]:
    facts = []
    delta, kl, shift, flip = (
        result.delta, result.divergence, result.shift, result.first_difference
    )  # fmt: skip
    if delta is not None:
        facts.append(fact("logprobs.delta", **asdict(delta)))
    if kl is not None:
        facts.append(fact("logprobs.kl", **asdict(kl)))
    if flip is not None:
        gaps = [margin for margin in (flip.margin, flip.candidate_margin) if margin is not None]
        gap = fact("logprobs.margin", nats=max(gaps, default=None))
        if flip.judgement == "fault" and max(gaps, default=0.0) <= FAULT * scale.value:
            gap = fact("logprobs.margin_by_list")
        facts.append(
            fact(
                "logprobs.first_parting",
                num_flips=result.num_flips,
                sample=flip.sample,
                token=flip.position,
                margin=gap,
                judgement=flip.judgement,
                first_fault=0 < result.num_faults < result.num_flips,
                num_after=result.num_after,
            )
        )
    if shift is not None and shift.low is not None and shift.high is not None:
        facts.append(fact("logprobs.shift", **asdict(shift)))
    elif shift is not None:
        facts.append(fact("logprobs.few_prompts", num_prompts=shift.num_prompts))
    if scale.without_dtype:
        facts.append(fact("logprobs.rounding_not_known"))
    return facts


def _rollout_facts(result: LogprobsResult) -> list[Fact]:
    bad = [stat for stat in result.checks if stat.state != "normal"]
    if result.checks and not bad:
        return [fact("logprobs.rollout_normal")]
    return [fact("logprobs.rollout_off", **asdict(stat)) for stat in bad]


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
    lines = _preflight(pairs, a, b)
    blocking = [line for line in lines if line.status == "blocking"]
    if blocking:
        return _stopped(a, b, lines, blocking[0])
    scale = scale_of(a, b, floors)
    experts = has_experts([a, b, *layers])
    pattern = pattern_of(pairs, scale, experts=experts)
    result = measure(pairs, pattern, scale, a, b)
    if layers:
        shown = layers_of(pairs, with_layers(a, b, layers), progress)
        result = replace(result, layers=shown)
    result = replace(result, expert=expert_of(pairs, [a, b, *layers]))
    whole = a.manifest.complete and b.manifest.complete and not result.num_other
    finding = find(result, pairs, pattern, scale, whole=whole, experts=experts)
    if are_drawn(a, b):
        finding = of_drawn(finding, result.texts, pairs)
    if result.layers is not None:
        finding = joined(finding, result.layers)
    compared = sum(len(pair.rows) for pair in pairs)
    coverage = Coverage(
        num_compared=compared, num_only_reference=_alone(pairs, 0),
        num_only_candidate=_alone(pairs, 1),
    )  # fmt: skip
    return report_of(a, b, finding, coverage, lines, notes=_notes(a, b), logprobs=result)


def _alone(pairs: list[PromptPair], side: int) -> int:
    """Tokens that one side alone scored, or scored after other text."""
    sides = (pair.candidate if side else pair.reference for pair in pairs)
    return sum(len(sequence.rows) for sequence in sides) - sum(len(pair.rows) for pair in pairs)


def _preflight(pairs: list[PromptPair], a: Run, b: Run) -> list[PreflightLine]:
    lines = [line for line in preflight(a, b) if line.check in _SHOWN]
    dtypes = [summary_of(run).dtype.removeprefix("torch.") for run in (a, b)]
    known = UNKNOWN not in dtypes
    status: PreflightStatus = (
        "unknown" if not known else "same" if dtypes[0] == dtypes[1] else "differs"
    )
    dtype = PreflightLine(check="dtype", status=status, reference=dtypes[0], candidate=dtypes[1])
    names = [_engine(run) for run in (a, b)]
    same: PreflightStatus = "same" if names[0] == names[1] else "differs"
    engine = PreflightLine(check="engine", status=same, reference=names[0], candidate=names[1])
    return [prompt_line(pairs, a, b), decoding_line(a, b), dtype, engine, *lines]


def _engine(run: Run) -> str:
    """Its name, and its version where that is known."""
    note = run.manifest.engine
    if note is None:
        return "transformers"
    return note.name if note.version in ("", UNKNOWN) else f"{note.name} {note.version}"


def _stopped(a: Run, b: Run, lines: list[PreflightLine], line: PreflightLine) -> Report:
    what = line.details or [
        fact("logprobs.against", reference=line.reference, candidate=line.candidate)
    ]
    if line.detail:
        what = [plain(line.detail)]
    finding = Finding(
        claim="other_experiment", kind="incomparable",
        headline=[fact("logprobs.not_asked_the_same", what=what)],
        evidence=[fact("logprobs.check", check=line.check, what=what)],
    )  # fmt: skip
    return report_of(a, b, finding, Coverage(num_compared=0), lines, notes=_notes(a, b))


def _notes(a: Run, b: Run) -> list[Fact]:
    notes: list[Fact] = []
    sides: tuple[tuple[Side, Run], ...] = (("reference", a), ("candidate", b))
    for side, run in sides:
        facts = facts_of(run)
        if other := facts.get("answers as"):
            model = run.manifest.model.source
            notes.append(fact("logprobs.answers_as", side=side, model=model, answers_as=other))
        # what a server lacks stands in the run in words
        lacks = [text for text in facts.get("lacks", "").split("; ") if text]
        notes += [fact("logprobs.side_lacks", side=side, what=plain(text)) for text in lacks]
        if facts.get("token ids") == BY_TEXT:
            notes.append(fact("logprobs.by_text", side=side))
    if all(run.manifest.plan.sites == [LOGPROBS] for run in (a, b)):
        notes.append(fact("logprobs.no_layer"))
    return notes

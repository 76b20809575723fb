"""Tokens: where the two sides' greedy choices part, and by how much.

Compared are choices, not what was fed: where the candidate was forced onto the
reference's tokens, every step is comparable, and a second difference does not
follow from the first. Log-probabilities come from the recorded logits. With a truth
each flip is held against what rounding does to these logits, and so are the
distributions of all decided positions (tokens.flips).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from divergence.analyses.tokens.flips import (
    Distances,
    deviations,
    distances_of,
    judge_by_model,
    judge_flip,
    kl_fields,
)
from divergence.comparison.align.pieces import PromptStep, logits_row
from divergence.comparison.measure.floors import Allowed, allowed_errors
from divergence.comparison.measured import Measured
from divergence.comparison.results.tokens import TokenChoice, TokenDifference, TokensResult
from divergence.numerics.floor import THRESHOLDS, Thresholds
from divergence.numerics.pairs.logits import top_choices
from divergence.run.reader import Run
from divergence.run.schema.manifest import Tokens

if TYPE_CHECKING:
    import torch

__all__ = ["comparable_places", "compare_tokens", "measure"]

_TOP = 5


def measure(measured: Measured) -> TokensResult | None:
    """The tokens of two runs, with what rounding may make of them."""
    return compare_tokens(
        measured.reference, measured.candidate,
        truth=None if measured.truth is None else measured.truth.run,
        allowed=allowed_errors(measured.sites), thresholds=measured.thresholds,
    )  # fmt: skip


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
        min(len(one.chosen_ids), len(two.chosen_ids))
        for one, two in zip(a.samples, b.samples, strict=False)
    )
    num_reference = sum(len(sample.chosen_ids) for sample in a.samples)
    if count == 0 and num_reference == 0:
        return None
    flips = [
        (sample, step)
        for sample, step in places
        if a.samples[sample].chosen_ids[step] != b.samples[sample].chosen_ids[step]
    ]
    distances = distances_of(reference, candidate, truth, places)
    routed = _routed(reference)
    if routed:  # a tie is a tie; nothing beyond it is a fault for that
        thresholds = msgspec.structs.replace(thresholds, flip=math.inf)
    differences = [
        _difference(
            reference, candidate, truth, flip, distances, thresholds,
            allowed=(allowed or {}).get(flip), tops=number == 0,
        )
        for number, flip in enumerate(flips)
    ]  # fmt: skip
    forced = a.forced_by is not None or b.forced_by is not None
    return TokensResult(
        num_tokens=count,
        num_equal=len(places) - len(flips),
        num_reference=num_reference,
        num_missing=_num_missing(a, b, set() if forced else {sample for sample, _ in flips}),
        num_other_text=count - len(places),
        forced=forced,
        first_difference=differences[0] if differences else None,
        differences=differences,
        **kl_fields(distances, thresholds, routed=routed),
    )


def _num_missing(a: Tokens, b: Tokens, parted: set[int]) -> int:
    """Tokens of the reference that the candidate did not go on to. In a sample whose text
    ``parted``, the candidate's may well be shorter."""
    return sum(
        max(0, len(one.chosen_ids) - len(two.chosen_ids))
        for number, (one, two) in enumerate(zip(a.samples, b.samples, strict=False))
        if number not in parted
    )


def _routed(run: Run) -> bool:
    """Are there blocks that send tokens to experts, or codes of activations? Rounding may send a
    token elsewhere or flip a code, on either side, and then its logits differ by far more than the
    floor's do, without any fault."""
    routed = any(note.routed for note in run.manifest.plan.modules.values())
    return routed or run.manifest.quantizes_activations


def comparable_places(reference: Run, candidate: Run) -> list[PromptStep]:
    """(sample, step) of every choice that both sides made after the same tokens, in order."""
    a, b = reference.manifest.tokens, candidate.manifest.tokens
    places: list[PromptStep] = []
    for number, (one, two) in enumerate(zip(a.samples, b.samples, strict=False)):
        fed = list(zip(one.generated_ids, two.generated_ids, strict=False))
        for step in range(min(len(one.chosen_ids), len(two.chosen_ids))):
            places.append((number, step))
            if step < len(fed) and fed[step][0] != fed[step][1]:
                break  # other tokens follow: no agreement to speak of
    return places


def _difference(
    reference: Run,
    candidate: Run,
    truth: Run | None,
    place: PromptStep,
    distances: Distances | None,
    thresholds: Thresholds,
    *,
    allowed: float | None,
    tops: bool,
) -> TokenDifference:
    sample, step = place
    runs = [run for run in (truth, candidate, reference) if run is not None]
    texts = {key: text for run in runs for key, text in run.manifest.tokens.texts.items()}
    one = reference.manifest.tokens.samples[sample].chosen_ids[step]
    two = candidate.manifest.tokens.samples[sample].chosen_ids[step]
    row_a, row_b = logits_row(reference, *place), logits_row(candidate, *place)
    top_a, top_b = _top(row_a, texts), _top(row_b, texts)
    margin = _margin(top_a)
    difference = TokenDifference(
        sample=sample,
        step=step,
        reference=_choice(one, row_a, texts),
        candidate=_choice(two, row_b, texts),
        margin=margin,
        candidate_margin=_margin(top_b),
        z=deviations(margin, row_a, row_b),
        reference_top=top_a if tops else [],
        candidate_top=top_b if tops else [],
    )
    true_logits = None if truth is None else logits_row(truth, *place)
    if truth is None or true_logits is None:
        return judge_by_model(difference, row_a, row_b, allowed)
    chosen = truth.manifest.tokens.samples[sample].chosen_ids
    choice = _choice(chosen[step], true_logits, texts) if step < len(chosen) else None
    mine = row_b if distances is not None and distances.side == "candidate" else row_a
    return judge_flip(
        msgspec.structs.replace(difference, truth_choice=choice),
        true_logits,
        mine,
        thresholds=thresholds,
    )


def _top(row: torch.Tensor | None, texts: dict[str, str]) -> list[TokenChoice]:
    if row is None:
        return []
    return [
        TokenChoice(id=token, text=texts.get(str(token)), logprob=logprob)
        for token, logprob in top_choices(row, _TOP)
    ]


def _choice(token: int, row: torch.Tensor | None, texts: dict[str, str]) -> TokenChoice:
    logprob = float("nan")
    if row is not None and token < row.shape[0]:
        logprob = float(row.double().log_softmax(0)[token])
    return TokenChoice(id=token, text=texts.get(str(token)), logprob=logprob)


def _margin(top: list[TokenChoice]) -> float | None:
    """Top-1 minus top-2: the same in logits and in log-probabilities."""
    return top[0].logprob - top[1].logprob if len(top) > 1 else None

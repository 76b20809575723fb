"""Tokens: where the two sides' greedy choices part, and by how much.

Compared are choices, not what was fed: where the candidate was forced onto the
reference's tokens, every step is comparable, and a second difference does not
follow from the first. Log-probabilities come from the recorded logits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from divergence.compare.result import Onset, TokenChoice, TokenDifference, TokensResult
from divergence.numerics.logits import top_choices
from divergence.run.reader import Run

if TYPE_CHECKING:
    import torch

__all__ = ["compare_tokens", "relate_to_onset"]

_TOP = 5


def compare_tokens(reference: Run, candidate: Run) -> TokensResult | None:
    """Agreement of the generated tokens; None where neither side generated any."""
    a, b = reference.manifest.tokens, candidate.manifest.tokens
    forced = a.forced_by is not None or b.forced_by is not None
    count = equal = 0
    flips: list[tuple[int, int]] = []
    for number, (one, two) in enumerate(zip(a.samples, b.samples, strict=False)):
        fed_apart = False
        fed = list(zip(one.generated_ids, two.generated_ids, strict=False))
        for step, (x, y) in enumerate(zip(one.chosen_ids, two.chosen_ids, strict=False)):
            count += 1
            if fed_apart:
                continue  # other tokens came before: no agreement to speak of
            if x == y:
                equal += 1
            else:
                flips.append((number, step))
            fed_apart = step < len(fed) and fed[step][0] != fed[step][1]
    if count == 0:
        return None
    found = [
        _difference(reference, candidate, *flip, tops=place == 0)
        for place, flip in enumerate(flips)
    ]
    return TokensResult(
        num_tokens=count,
        num_equal=equal,
        forced=forced,
        first_difference=found[0] if found else None,
        differences=found,
    )


def relate_to_onset(tokens: TokensResult | None, onset: Onset | None) -> TokensResult | None:
    """Note whether the first flip lies before, at or after the numeric onset's forward."""
    if tokens is None or tokens.first_difference is None or onset is None:
        return tokens
    flip = tokens.first_difference
    mine, other = (flip.sample, flip.step), (onset.sample, onset.step)
    order = "same step" if mine == other else "before" if mine < other else "after"
    return msgspec.structs.replace(
        tokens, first_difference=msgspec.structs.replace(flip, order_to_onset=order)
    )


def _difference(
    reference: Run, candidate: Run, sample: int, step: int, *, tops: bool
) -> TokenDifference:
    texts = {**candidate.manifest.tokens.texts, **reference.manifest.tokens.texts}
    one = reference.manifest.tokens.samples[sample].chosen_ids[step]
    two = candidate.manifest.tokens.samples[sample].chosen_ids[step]
    row_a, row_b = _logits(reference, sample, step), _logits(candidate, sample, step)
    top_a, top_b = _top(row_a, texts), _top(row_b, texts)
    margin = _margin(top_a)
    return TokenDifference(
        sample=sample,
        step=step,
        reference=_choice(one, row_a, texts),
        candidate=_choice(two, row_b, texts),
        margin=margin,
        candidate_margin=_margin(top_b),
        z=_deviations(margin, row_a, row_b),
        reference_top=top_a if tops else [],
        candidate_top=top_b if tops else [],
    )


def _deviations(
    margin: float | None, row_a: torch.Tensor | None, row_b: torch.Tensor | None
) -> float | None:
    """The margin over √2 · rms(a - b): how many standard deviations a flip had to be."""
    if margin is None or row_a is None or row_b is None or row_a.shape != row_b.shape:
        return None
    spread = float((row_a.double() - row_b.double()).square().mean().sqrt()) * math.sqrt(2)
    return margin / spread if spread > 0 and math.isfinite(spread) else None


def _logits(run: Run, sample: int, step: int) -> torch.Tensor | None:
    """The logits row (V,) that decided this token, if it was recorded."""
    site = run.manifest.plan.logits_site
    group = next((g for g in run.manifest.tokens.groups if sample in g), [sample])
    record = run.find(("free", group[0], step, site)) if site else None
    if record is None:
        return None
    tensor = run.read(record)
    if tensor.ndim != 3 or tensor.shape[0] <= group.index(sample):
        return None
    return tensor[group.index(sample), -1]


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

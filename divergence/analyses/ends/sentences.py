"""The sentences of the ends: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    # integers
    "integers_differ": "an integer tensor differs, and integers do not round: {site}",
    "choice_not_of_scores": "a choice that does not follow from its own scores: {site}",
    "num_differ": (
        "{site} ({pass_}, prompt {sample}, step {step}): {num_different} of {num_compared} "
        "{tokens:yes=tokens|no=elements} differ, the first is {reference} in A, {candidate} in B"
    ),
    "choices_differ": (
        "choices made of numbers differ at {num_sites} sites, most at {site}: {num_different} of "
        "{num_compared} tokens; they are judged by their scores, since rounding may decide them"
    ),
    # seams
    "both_compute": "both sides compute something there",
    "changed": (
        "{other:letter} hands {before} on to {site} as it is; {side:letter} changes it by "
        "{size:.1e} of its norm (rounding: at most {limit:.1e}), prompt {sample}, step {step}"
    ),
    "grown": (
        "between {before} and {site} the two sides' difference grows by {size:figure} × what came "
        "in and rounding explain (limit {limit:.1f}), prompt {sample}, step {step}"
    ),
    "changed_within": (
        "between {before} and {site} {side:letter} changes what the other side hands on, "
        "{meet:yes=and the two sides meet there: other code, the same tensor|no=by no more than "
        "rounding ({size:.1e})}"
    ),
    # sampling
    "not_largest": (
        "the token at prompt {sample}, step {step} is not the largest of its own logits in "
        "{side:letter}: sampling, not the model"
    ),
    "misfits": (
        "sampling: {num_misfits} tokens are not the largest of their own logits, the first in "
        "{side:letter} at prompt {sample}, step {step}: {chosen} was chosen, {largest} is larger "
        "by {behind:.3g}"
    ),
    # what could not be held together
    "not_compared": "{module} was not compared: {reference:shape} against {candidate:shape}",
    "and_not_compared": "; {first}{num_more:0=|*= and {num_more} more}",
    "fed_by_uncompared": "what comes before it was not all compared",
}

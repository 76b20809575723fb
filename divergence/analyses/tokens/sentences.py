"""The sentences of tokens: one template for each code. See divergence.facts for the form."""

from __future__ import annotations

from collections.abc import Mapping

SENTENCES: Mapping[str, str] = {
    "seen_in_free_run": "seen in the tokens of the free run alone",
    "flips": (
        "no single block is beyond its limit, but the token at prompt {sample}, step {step} flips "
        "over a gap of {z:figure} σ of the logit error that rounding makes"
    ),
    "flip": (
        "first {later:yes=that is no tie|no=different token}: prompt {sample}, step {step}"
        "[[, a {judgement}]]{unjudged:yes=, not judged|no=}[[ ({sizes:list})]]"
    ),
    "margin": "margin {margin:.3g}",
    "deviations": (
        "{z:figure} σ of the {of:floor=logit error that rounding makes|model=logit error that "
        "rounding may make|difference=logits' difference}"
    ),
    "far_apart": (
        "no single block is beyond its limit, but the next-token distributions are "
        "{ratio:figure} × as far apart as rounding makes them"
    ),
    "kl": (
        "KL of the decided tokens: mean {mean:.2e}, p99 {p99:.2e} nats between the sides"
        "{ratio:none=|*=, {ratio:figure} × {side:letter}'s from the truth (mean {floor_mean:.2e}, "
        "p99 {floor_p99:.2e}; {limit:none=no limit where experts or codes are chosen|*=limit "
        "{limit:.1f} ×})}"
    ),
}

"""Fed: the tokens that both sides were given, and for how many steps they are the same.

A forward is comparable with another while both sides had been fed the same tokens. A prompt that
met its end by itself has no further steps; in a batch that goes on it is fed padding.
"""

from __future__ import annotations

from divergence.run.schema.manifest import Manifest

__all__ = ["first_different_token", "last_comparable_steps", "why_no_step"]


def first_different_token(a: Manifest, b: Manifest, sample: int) -> int | None:
    """Index of the first generated token that was fed differently, or None."""
    one, two = a.tokens.samples[sample].generated_ids, b.tokens.samples[sample].generated_ids
    for index, (x, y) in enumerate(zip(one, two, strict=False)):
        if x != y:
            return index
    return None


def last_comparable_steps(a: Manifest, b: Manifest) -> dict[int, int]:
    """Per sample, the last step at which both sides had been fed the same tokens."""
    last: dict[int, int] = {}
    for number in range(min(len(a.tokens.samples), len(b.tokens.samples))):
        different = first_different_token(a, b, number)
        if different is not None:
            last[number] = different
    for manifest in (a, b):  # a batched forward is as comparable as its worst sample
        for group in manifest.tokens.groups:
            found = [last[number] for number in group if number in last]
            if found:
                for number in group:
                    last[number] = min(found)
    return last


def why_no_step(manifest: Manifest, side: str, sample: int, step: int) -> str:
    """Why that side has no such record: a prompt that met its end is fed padding where its batch
    goes on, and by itself it just ends."""
    samples = manifest.tokens.samples
    num = len(samples[sample].generated_ids) if sample < len(samples) else 0
    if 0 < num <= step and num < manifest.settings.max_new_tokens:
        return f"in the {side} prompt {sample} ended after {num} token{'s' * (num != 1)}"
    return "no partner"

"""Names for what often makes two models differ, where the manifests show it.

Each is a guess at the cause with the facts that it rests on, said beside the difference itself and
never in its place: a LoRA that is not merged, weights that are tied on one side, a padded
vocabulary, one layer that was trained further, another chat template or tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from divergence.run.schema.manifest import Manifest, ModelIdentity, SampleTokens
from divergence.run.schema.site import starred

__all__ = ["first_difference", "template_cause", "text_cause", "tokenizer_cause", "weight_causes"]

_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_CONTEXT = 24


def weight_causes(a: ModelIdentity, b: ModelIdentity) -> list[str]:
    """What the names and digests of two models' weights look like."""
    return [
        text
        for text in (_adapters(a, b), _vocabulary(a, b), _tied(a, b), _trained(a, b))
        if text is not None
    ]


def _adapters(a: ModelIdentity, b: ModelIdentity) -> str | None:
    for side, mine, other in (("candidate", b, a), ("reference", a, b)):
        names = [name for name in mine.digests if ".lora_" in name and name not in other.digests]
        if names and not any(".lora_" in name for name in other.digests):
            notes = [text for note in mine.code.values() for text in note.wrapped if "LoRA" in text]
            told = notes[0].partition(" (")[0] if notes else "LoRA"
            merged = told if "merged" in told else f"{told}, not merged"
            return f"the {side} holds {len(names)} adapter weights ({merged})"
    return None


def _vocabulary(a: ModelIdentity, b: ModelIdentity) -> str | None:
    for what, one, two in (
        ("embedding", a.embedding_rows, b.embedding_rows),
        ("output matrix", a.head_rows, b.head_rows),
    ):
        if one is None or two is None or one == two:
            continue
        sizes = {a.tokenizer_size, b.tokenizer_size} - {None}
        size = sizes.pop() if len(sizes) == 1 else None
        if size is not None and min(one, two) >= size:
            why = f"the vocabulary of {size:,} tokens is padded otherwise"
        else:
            why = "another vocabulary, or one padded otherwise"
        return f"{why}: {one:,} rows of the {what} / {two:,}"
    return None


def _tied(a: ModelIdentity, b: ModelIdentity) -> str | None:
    """Weights that are one tensor on one side, and two different ones on the other."""
    for side, other, mine, theirs in (
        ("reference", "candidate", a, b), ("candidate", "reference", b, a)
    ):  # fmt: skip
        for names in mine.tied:
            known = [name for name in names if name in theirs.digests]
            if len({theirs.digests[name] for name in known}) > 1:
                return f"{' and '.join(known)} are tied on the {side}, and differ on the {other}"
    return None


def _trained(a: ModelIdentity, b: ModelIdentity) -> str | None:
    """Differing weights that all lie in one block, or are of few kinds in every block."""
    common = [name for name in a.digests if name in b.digests]
    different = [name for name in common if a.digests[name] != b.digests[name]]
    if not different or len(different) == len(common):
        return None
    blocks = {match[1] if (match := _BLOCK.match(name)) else "" for name in different}
    if len(blocks) == 1 and "" not in blocks:
        return f"all of them in {blocks.pop()}: as after training this layer further"
    kinds = sorted({starred(name) for name in different})
    everywhere = sum(starred(name) in kinds for name in common)
    if "" not in blocks and everywhere == len(different) and len(kinds) <= 4:
        names = ", ".join(kind.rpartition("*.")[2] for kind in kinds)
        return f"only {names}, in every block: as after merging an adapter"
    return None


def template_cause(a: Manifest, b: Manifest) -> str | None:
    """Where two chat templates begin to differ, on a fixed conversation."""
    one, two = a.model.chat_example, b.model.chat_example
    if one is None or two is None:
        return None
    if one == two:
        return "the same text for a short conversation"
    return f"rendered text differs {first_difference(one, two)}"


def tokenizer_cause(a: Manifest, b: Manifest) -> str | None:
    """What is known of two tokenizers that differ."""
    one, two = a.model.tokenizer_size, b.model.tokenizer_size
    if one is None or two is None:
        return None
    if one != two:
        return f"{one:,} tokens / {two:,}"
    return f"{one:,} tokens on both sides: other texts, merges or rules"


def text_cause(a: Sequence[SampleTokens], b: Sequence[SampleTokens], number: int) -> str | None:
    """Why the ids of a prompt differ, as far as its texts tell."""
    one, two = a[number].text, b[number].text
    if one is None or two is None:
        return None
    if one == two:
        return "the text is the same, so the tokenizers differ"
    return f"their texts differ {first_difference(one, two)}"


def first_difference(a: str, b: str) -> str:
    """``from character 12 on: '…user' against '…[INST]'``"""
    place = next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(a), len(b))
    start = max(place - _CONTEXT // 3, 0)
    parts = []
    for text in (a, b):
        part = text[start : place + _CONTEXT]
        dots = "…" if start else ""
        parts.append(repr(dots + part + ("…" if place + _CONTEXT < len(text) else "")))
    return f"from character {place} on: {parts[0]} against {parts[1]}"

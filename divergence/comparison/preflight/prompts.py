"""The prompts' tokens, and the labels of a training step: the same on both sides, and where not,
from where on and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from divergence.comparison.preflight.models import first_difference
from divergence.comparison.results import PreflightLine
from divergence.facts import Fact, fact, sentence
from divergence.run.contents import labels_text
from divergence.run.manifest import NO_LABEL, Manifest, SampleTokens

__all__ = ["label_lines", "prompt_difference", "prompt_headline"]

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class _Parting:
    """The first prompt that differs, and its first token that does."""

    sample: int
    token: int
    ids: tuple[list[int], list[int]]
    """The tokens from there on."""
    texts: tuple[str, str] | None
    """The prompts as text, where both tell it."""
    edit: Fact | None
    """Where one side has all the other's tokens and more: which."""


def prompt_difference(a: Manifest, b: Manifest, *, unseen: bool) -> Fact | None:
    """From which token on the first prompt differs; None where all are equal. ``unseen``: a side
    does not tell the tokens of all prompts; those are left out."""
    samples = a.tokens.samples, b.tokens.samples
    if len(samples[0]) != len(samples[1]):
        reference, candidate = map(len, samples)
        return fact("preflight.number_of_prompts", reference=reference, candidate=candidate)
    parting = _find_parting(*samples, unseen=unseen)
    if parting is None:
        return None
    return fact(
        "preflight.prompt_differs", sample=parting.sample, token=parting.token,
        reference=parting.ids[0], candidate=parting.ids[1], text=_text_cause(parting),
        edit=parting.edit,
    )  # fmt: skip


def prompt_headline(a: Manifest, b: Manifest) -> Fact:
    """``the chat templates differ; prompt 0 parts at token 7: ' AI assistant' / ' assistant'``."""
    samples = a.tokens.samples, b.tokens.samples
    if len(samples[0]) != len(samples[1]):
        reference, candidate = map(len, samples)
        return fact("preflight.prompts_of_numbers", reference=reference, candidate=candidate)
    causes = (
        ("tokenizers", a.model.tokenizer_digest, b.model.tokenizer_digest),
        ("chat templates", a.model.chat_template_digest, b.model.chat_template_digest),
    )
    parting = _find_parting(*samples)
    if parting is None:
        return fact("preflight.prompts_differ")
    same_text = parting.texts is not None and parting.texts[0] == parting.texts[1]
    named = [name for name, ref, cand in causes if None not in (ref, cand) and ref != cand]
    if parting.edit and (same_text or parting.texts is None or parting.token < 2):
        what = named[-1] if named else "prompts"  # a tokenizer may add tokens to one text, or not
        return fact("preflight.edited", what=what, sample=parting.sample, edit=parting.edit)
    what = "tokenizers" if same_text else named[-1] if named else "prompts"
    shown: Sequence[object] = [ids[:3] for ids in parting.ids]
    if parting.texts is not None and not same_text:
        shown = [repr(text) for text in _from_the_difference(*parting.texts)]
    return fact(
        "preflight.parting", what=what, sample=parting.sample, token=parting.token,
        reference=shown[0], candidate=shown[1],
    )  # fmt: skip


def _find_parting(
    a: Sequence[SampleTokens], b: Sequence[SampleTokens], *, unseen: bool = False
) -> _Parting | None:
    for number, (mine, other) in enumerate(zip(a, b, strict=True)):
        ids_a, ids_b = mine.prompt_ids, other.prompt_ids
        if ids_a == ids_b or (unseen and not (ids_a and ids_b)):
            continue
        place = next(
            (n for n, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y),
            min(len(ids_a), len(ids_b)),
        )
        texts = None if mine.text is None or other.text is None else (mine.text, other.text)
        ids = ids_a[place : place + _SHOWN], ids_b[place : place + _SHOWN]
        return _Parting(
            sample=number, token=place, ids=ids, texts=texts, edit=_edit(ids_a, ids_b, place)
        )
    return None


def _edit(a: Sequence[int], b: Sequence[int], place: int) -> Fact | None:
    """What one side has besides all tokens of the other, from ``place`` on, where they part: a
    template and a tokenizer that both write the first token, or a template that lost its end."""
    pair = (("reference", a), ("candidate", b))
    (longer, more), (shorter, fewer) = sorted(pair, key=lambda side: -len(side[1]))
    num = len(more) - len(fewer)
    if not fewer or not num or list(more[place + num :]) != list(fewer[place:]):
        return None
    if num == place == 1 and more[0] == more[1]:
        return fact("preflight.begins_twice", side=longer, other=shorter, token=more[0])
    extra = list(more[place : place + num])
    where = "begin" if place == 0 else "end" if place == len(fewer) else place
    return fact(
        "preflight.has_more", side=longer, other=shorter, place=where,
        tokens=fact("preflight.tokens", num=num, ids=extra[:_SHOWN]),
    )  # fmt: skip


def _text_cause(parting: _Parting) -> Fact | None:
    """Why the ids differ, as far as the texts tell."""
    if parting.texts is None:
        return None
    text_a, text_b = parting.texts
    if text_a == text_b:
        return fact("preflight.text_cause", edit=parting.edit is not None)
    return fact("preflight.texts_differ", place=first_difference(text_a, text_b))


_LONGEST = 24


def _from_the_difference(a: str, b: str) -> tuple[str, str]:
    """Both texts from the word on in which they begin to differ."""
    place = next(
        (n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
        min(len(a), len(b)),
    )
    start = max(a.rfind(" ", 0, place), a.rfind("\n", 0, place), place - _LONGEST, 0)
    parts = [text[start : start + _LONGEST] for text in (a, b)]
    return parts[0] + "…" * (len(a) > start + _LONGEST), parts[1] + "…" * (
        len(b) > start + _LONGEST
    )


def label_lines(a: Manifest, b: Manifest) -> list[PreflightLine]:
    """Other labels are another loss, so another experiment. Empty where each token is its own label
    on both sides, and where the prompts themselves differ."""
    samples = a.tokens.samples, b.tokens.samples
    given = any(sample.labels is not None for side in samples for sample in side)
    ids = [[sample.prompt_ids for sample in side] for side in samples]
    if not given or ids[0] != ids[1]:
        return []
    detail = None
    for number, (sample_a, sample_b) in enumerate(zip(*samples, strict=True)):
        if sample_a.used_labels != sample_b.used_labels:
            pairs = enumerate(zip(sample_a.used_labels, sample_b.used_labels, strict=False), 1)
            place, both = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
            here, there = (None if label == NO_LABEL else label for label in both)
            detail = fact(
                "preflight.labels", sample=number, token=place, reference=here, candidate=there
            )
            break
    own = sentence(fact("preflight.labels_own"))
    return [
        PreflightLine(
            check="labels", status="same" if detail is None else "blocking",
            reference=labels_text(a.tokens) or own, candidate=labels_text(b.tokens) or own,
            details=[] if detail is None else [detail],
        )
    ]  # fmt: skip

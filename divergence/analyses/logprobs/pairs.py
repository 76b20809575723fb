"""Two sides' sequences, token by token: which tokens may be compared, and what they say. Where a
server tells no ids, both sides' tokens are numbered by their text.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from divergence.analyses.logprobs.sequences import Distribution, Sequence, facts_of, sequences_of
from divergence.comparison.results import PreflightLine, PreflightStatus
from divergence.facts import Fact, fact, sentence
from divergence.run.manifest import UNKNOWN
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT

__all__ = ["PromptPair", "pair_runs", "prompt_line", "renumbered", "values_of"]


_PIECE = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """One prompt of both sides. ``rows``: (index in the reference's sequence, row of each side) of
    equal tokens behind equal text. ``parting``: the same of the first tokens that differ."""

    sample: int
    prompt: Hashable
    """The same for answers to one prompt, which depend on each other."""
    reference: Sequence
    candidate: Sequence
    rows: list[tuple[int, int, int]]
    parting: tuple[int, int | None, int | None] | None
    tokens: tuple[int, int] | None
    """The two tokens at the parting."""
    num_equal: int
    """Tokens of the answer that are equal."""
    num_after: int
    """Tokens of the shorter answer behind the parting."""
    num_other: int
    """Comparable tokens that one side alone scored."""
    num_untold: int
    """Of them those of the answer, but for its last one: it may be the end, which not all score.
    And those from one on of which a side tells neither id nor text."""
    answer_begins: int
    ended: bool
    """One side's answer ends by itself where the other's goes on."""
    delta: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Of ``rows``; without those that are not finite, and those that another prompt with the same
    beginning has shown."""
    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Index in the sequence of each of them."""
    whole: tuple[np.ndarray, np.ndarray] = field(
        default_factory=lambda: (np.empty(0), np.empty(0, np.int64))
    )
    """Delta and places with what another prompt has shown."""
    num_nonfinite: tuple[int, int] = (0, 0)
    """By side: nan or inf where the other side has a number."""


def pair_runs(a: Run, b: Run) -> list[PromptPair]:
    """One a prompt, in order."""
    reference, candidate = _with_common_ids(a, b)
    samples = a.manifest.tokens.samples
    pairs = [
        _pair(number, tuple(samples[number].prompt_ids) or samples[number].text or number, x, y)
        for number, (x, y) in enumerate(zip(reference, candidate, strict=False))
    ]
    pairs = _counted_once(pairs)
    engines = [run.manifest.engine and run.manifest.engine.version for run in (a, b)]
    # one engine lists the token that ends an answer, another does not
    room = 0 if engines[0] == engines[1] else 1
    budgets = [_budget(run) for run in (a, b)]
    return [replace(pair, ended=_one_ended(pair, budgets, room)) for pair in pairs]


def _counted_once(pairs: list[PromptPair]) -> list[PromptPair]:
    """Prompts that begin alike hold the same tokens, with the same rounding: where both sides say
    the same numbers of them again, they are no more observations."""
    once = list(pairs)
    order = sorted(range(len(pairs)), key=lambda n: pairs[n].reference.ids)
    for before, number in itertools.pairwise(order):
        held, pair = pairs[before], pairs[number]
        common = _common(held.reference.ids, pair.reference.ids)
        shared = int(np.searchsorted(pair.places, common))
        if not (held.reference.num_prompt and pair.reference.num_prompt and shared):
            continue
        same = np.zeros(len(pair.places), bool)
        if np.array_equal(held.places[:shared], pair.places[:shared]):
            same[:shared] = np.all(
                values_of(held)[:, :shared] == values_of(pair)[:, :shared], axis=0
            )
        once[number] = replace(pair, delta=pair.delta[~same], places=pair.places[~same])
    return once


def values_of(pair: PromptPair) -> np.ndarray:
    """(2, T): both sides' log-probabilities at ``places``."""
    places = {int(place) for place in pair.places}
    rows = [(mine, other) for place, mine, other in pair.rows if place in places]
    mine, other = np.array(rows, np.int64).reshape(-1, 2).T
    return np.stack([pair.reference.logprobs[mine], pair.candidate.logprobs[other]])


def _budget(run: Run) -> int:
    """Tokens at which answers are cut; 0 where they are given, or nobody knows."""
    given = run.manifest.tokens.forced_by is not None or facts_of(run).get("tokens") == "given"
    return 0 if given else run.manifest.settings.max_new_tokens


def _one_ended(pair: PromptPair, budgets: list[int], room: int) -> bool:
    sides = pair.reference, pair.candidate
    lengths = [len(side.ids) - side.num_prompt for side in sides]
    short = lengths.index(min(lengths))
    return (
        pair.tokens is None
        and 0 < pair.num_equal == lengths[short] < budgets[short]  # 0: there is no answer
        and lengths[1 - short] > lengths[short] + room
    )


def _with_common_ids(a: Run, b: Run) -> tuple[list[Sequence], list[Sequence]]:
    """Where a side tells tokens as text alone, both sides' ids are those of texts. A piece of a
    character has no text of its own: it reads as U+FFFD, as do others."""
    sides = sequences_of(a), sequences_of(b)
    if not any(facts_of(run).get("token ids") == BY_TEXT for run in (a, b)):
        return sides
    numbers: dict[str, int] = {}
    tables = [run.manifest.tokens.texts for run in (a, b)]
    if not any(facts_of(run).get("units") == "characters" for run in (a, b)):
        tables = [
            {number: text for number, text in texts.items() if _PIECE not in text}
            for texts in tables
        ]
    return (
        renumbered(sides[0], tables[0], numbers, -1),
        renumbered(sides[1], tables[1], numbers, -2),
    )


def _pair(number: int, prompt: Hashable, a: Sequence, b: Sequence) -> PromptPair:
    whole = a.num_prompt > 0 and b.num_prompt > 0
    shift = 0 if whole else b.num_prompt - a.num_prompt
    start = 0 if whole else a.num_prompt
    mine, other = a.ids[start:], b.ids[start + shift :]
    common = start + _common(mine, other)
    begins = min(a.num_prompt, b.num_prompt) if whole else a.num_prompt
    ends = min(len(a.ids), len(b.ids) - shift)
    rows = [(p, a.rows[p], b.rows[p + shift]) for p in sorted(a.rows)
            if start <= p < common and p + shift in b.rows]  # fmt: skip
    scored = {p for p in a.rows if start <= p < common}
    scored ^= {p - shift for p in b.rows if start <= p - shift < common}
    parting = tokens = None
    # of a token without a text nobody knows whether it is the other side's: nothing parts there
    untold = common < ends and min(a.ids[common], b.ids[common + shift]) < 0
    if begins <= common < ends and not untold:
        parting = common, a.rows.get(common), b.rows.get(common + shift)
        tokens = a.ids[common], b.ids[common + shift]
    return _measured(PromptPair(
        sample=number, prompt=prompt, reference=a, candidate=b, rows=rows, parting=parting,
        tokens=tokens,
        num_equal=max(0, min(common, ends) - begins), num_other=len(scored),
        num_untold=sum(begins <= place < ends - 1 for place in scored)
        + (ends - max(common, begins) if untold else 0),
        num_after=max(0, ends - max(common, begins) - 1) if tokens else 0, answer_begins=begins,
        ended=False,
    ))  # fmt: skip


def _measured(pair: PromptPair) -> PromptPair:
    places = np.array([place for place, _, _ in pair.rows], np.int64)
    x = pair.reference.logprobs[[row for _, row, _ in pair.rows]]
    y = pair.candidate.logprobs[[row for _, _, row in pair.rows]]
    fine = np.isfinite(x), np.isfinite(y)
    both = fine[0] & fine[1]
    odd = int((fine[1] & ~fine[0]).sum()), int((fine[0] & ~fine[1]).sum())
    return replace(
        pair, delta=(y - x)[both], places=places[both], num_nonfinite=odd,
        whole=((y - x)[both], places[both]),
    )  # fmt: skip


def _common(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def prompt_line(pairs: list[PromptPair], a: Run, b: Run) -> PreflightLine:
    """Were both asked the same tokens? By ids where both tell them, else by how many there were."""
    samples = a.manifest.tokens.samples, b.manifest.tokens.samples
    if len(samples[0]) != len(samples[1]):
        shown = [sentence(fact("logprobs.num_prompts", num_prompts=len(side))) for side in samples]
        return _blocking(shown)
    for other in _other_prompts(pairs):
        return _blocking(["-", "-"], other)
    for number, (ours, theirs) in enumerate(zip(*samples, strict=True)):
        untold = not (ours.prompt_ids and theirs.prompt_ids)
        if untold and None not in (ours.text, theirs.text) and ours.text != theirs.text:
            return _blocking(["-", "-"], fact("logprobs.other_text", sample=number))
    counts = [_counts(run) for run in (a, b)]
    for number, lengths in enumerate(zip(*counts, strict=True)):
        if None not in lengths and lengths[0] != lengths[1]:
            shown = [sentence(fact("logprobs.num_tokens", num_tokens=num)) for num in lengths]
            ours, theirs = lengths
            other = fact("logprobs.other_length", sample=number, reference=ours, candidate=theirs)
            return _blocking(shown, other)
    told = [all(sample.prompt_ids for sample in side) for side in samples]
    shown = [
        "ids" if ids else sentence(fact("logprobs.only_number")) if None not in num else UNKNOWN
        for ids, num in zip(told, counts, strict=True)
    ]
    status: PreflightStatus = "same" if all(told) else "unknown"
    return PreflightLine(check="prompt ids", status=status, reference=shown[0], candidate=shown[1])


def _blocking(shown: list[str], *details: Fact) -> PreflightLine:
    return PreflightLine(
        check="prompt ids",
        status="blocking",
        reference=shown[0],
        candidate=shown[1],
        details=list(details),
    )


def _counts(run: Run) -> list[int | None]:
    """The number of each prompt's tokens, as far as known."""
    samples = run.manifest.tokens.samples
    said = facts_of(run).get("prompt tokens", "").split()
    if len(said) == len(samples):
        return [int(word) if word.isdecimal() else None for word in said]
    return [len(sample.prompt_ids) or None for sample in samples]


def _other_prompts(pairs: list[PromptPair]) -> Iterator[Fact]:
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if not (a.num_prompt and b.num_prompt):
            continue
        common = _common(a.ids, b.ids)
        # one side's prompt may hold the other's answer; a prompt that goes on otherwise may not
        ended = common == min(len(a.ids), len(b.ids))
        least, most = sorted((a.num_prompt, b.num_prompt))
        if common < least or (common < most and not ended):
            yield fact(
                "logprobs.other_tokens",
                sample=pair.sample,
                token=common,
                reference=a.ids[common : common + 4],
                candidate=b.ids[common : common + 4],
            )


def renumbered(
    sequences: list[Sequence], texts: Mapping[str, str], numbers: dict[str, int], unknown: int
) -> list[Sequence]:
    """The same sequences by numbers of texts, which ``numbers`` hands out. Ids whose text nobody
    told become ``unknown``, which equals no token of the other side. Prompts are left out."""

    def number(token: int) -> int:
        text = texts.get(str(token))
        return unknown if text is None else numbers.setdefault(text, len(numbers))

    def one(sequence: Sequence) -> Sequence:
        start, inner = sequence.num_prompt, sequence.distribution

        def distribution(row: int) -> Distribution:
            listed = inner(row)
            if listed.whole:  # texts are told of few ids; the rest is a tail
                few = slice(0, 64)
                listed = Distribution(listed.ids[few], listed.log[few])
            ids = np.array([number(int(token)) for token in listed.ids], np.int64)
            _, first = np.unique(ids, return_index=True)
            kept = np.sort(first[ids[first] >= 0])
            return Distribution(ids[kept], listed.log[kept])

        return dataclasses.replace(
            sequence, ids=[number(token) for token in sequence.ids[start:]], num_prompt=0,
            rows={place - start: row for place, row in sequence.rows.items() if place >= start},
            distribution=distribution,
        )  # fmt: skip

    return [one(sequence) for sequence in sequences]

"""Tokens that both sides scored after equal text, and what was done to their distributions."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, abc
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from divergence.comparison.align import Pieces, pieces_in
from divergence.comparison.result import PreflightLine, PreflightStatus
from divergence.errors import RunFormatError, UsageError
from divergence.facts import Fact, fact, sentence
from divergence.numerics.arrays import wide
from divergence.numerics.logits import log_softmax
from divergence.run.command import command_line
from divergence.run.contents import name_of
from divergence.run.manifest import UNKNOWN, SampleTokens
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT
from divergence.run.site import LOGPROB_IDS_SITE, LOGPROBS_SITE
from divergence.words import SIDES, first_apart

# What a run says of the tokens of its prompts: log-probabilities, whatever they come from.
#
# A run of log-probabilities holds them. A run of a model holds logits, and its log-probabilities
# are their log-softmax in float64: the row at a token decides the next one.
#
# A sequence is prompt and answer. Two sides are compared at a token where all tokens before it are
# the same: at equal tokens Δ = log p(candidate) - log p(reference), at the first other one the
# margin. Where a side does not tell its prompt, answers are laid side by side from their first
# token.


@dataclass(frozen=True, slots=True)
class Distribution:
    """Says what is known of one token's distribution: ids and log-probabilities, the likeliest
    first. ``whole``: of all ids."""

    ids: np.ndarray
    log: np.ndarray
    whole: bool = False

    def of(self, token: int) -> float | None:
        """log p of a token, if it is known."""
        indices = np.flatnonzero(self.ids == token)
        return float(self.log[indices[0]]) if len(indices) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One prompt with its answer. ``rows``: of each scored token, by its index in ``ids``."""

    ids: list[int]
    num_prompt: int
    """0 where the prompt is not told."""
    rows: dict[int, int]
    """Index in ``ids`` → row of ``logprobs``."""
    logprobs: np.ndarray
    distribution: Callable[[int], Distribution]
    """Of a row."""


def facts_of(run: Run) -> dict[str, str]:
    """Return what the run's source said of itself."""
    engine = run.manifest.engine
    return {} if engine is None else engine.facts


def sequences_of(run: Run) -> list[Sequence]:
    """One a prompt. Raises UsageError for a model's run that kept no logits."""
    if run.manifest.scores_alone:
        return [_recorded(run, number) for number in range(len(run.manifest.tokens.samples))]
    site = run.manifest.plan.logits_site  # None where a model has none
    records = [record for record in run.records if (record.pass_, record.site) == ("free", site)]
    if not records or not all(map(run.has_bytes, records)):
        raise UsageError(
            f"{run.path} holds no logits, from which its log-probabilities would follow",
            hint=command_line("capture", like=run.path, o="RUN") + " --sites blocks --store full",
        )
    reader = Pieces(run, run)
    places: list[dict[int, tuple[object, int]]] = [{} for _ in run.manifest.tokens.samples]
    for (number, step, _), piece in sorted(
        pieces_in(run, "free", split=True, sites=[str(site)]).items(), key=lambda item: item[0][:2]
    ):
        sample, record = run.manifest.tokens.samples[number], piece.record
        if len(record.shape) != 3:
            continue
        count = (piece.right - piece.left) if piece.row is not None else record.shape[1]
        for row in range(count):
            if record.positions is not None:
                at = record.positions[row + piece.left] - piece.pads
            elif count == 1 and step == 0:
                at = len(sample.prompt_ids) - 1
            else:
                at = row + (len(sample.prompt_ids) + step - 1 if step else 0)
            places[number][at + 1] = piece, row
    return [_sequence_at(run, reader, number, rows) for number, rows in enumerate(places)]


def _recorded(run: Run, number: int) -> Sequence:
    sample = run.manifest.tokens.samples[number]
    ids = [*sample.prompt_ids, *sample.generated_ids]
    record = run.find(("free", number, 0, LOGPROBS_SITE))
    tokens = run.find(("free", number, 0, LOGPROB_IDS_SITE))
    # a nan beside a character was written by an earlier version, and nobody told it
    untold = facts_of(run).get("units") == "characters"
    if record is None or tokens is None or record.positions is None or untold:
        empty, num = Distribution(np.empty(0, np.int64), np.empty(0)), len(sample.prompt_ids)
        return Sequence(
            ids=ids, num_prompt=num, rows={}, logprobs=empty.log, distribution=lambda row: empty
        )
    kinds = record.dtype, tokens.dtype
    fits = len(record.shape) == 3 and record.shape[0] == 1 and record.shape[2] > 0
    if not fits or record.shape != tokens.shape or kinds != ("float32", "int32"):
        raise RunFormatError(
            f"log-probabilities of {record.dtype} {list(record.shape)} with ids of {tokens.dtype} "
            f"{list(tokens.shape)}: float32 and int32 (1, T, K) are expected",
            where=f"{run.path}, {name_of(record)}",
        )
    values = wide(run.array(record)[0])
    table = run.array(tokens)[0].astype(np.int64)

    def distribution(row: int) -> Distribution:
        listed = np.flatnonzero(table[row] >= 0)[::-1]  # a list, not what is told before it
        ids, first = np.unique(table[row][listed], return_index=True)
        order = np.argsort(-values[row][listed][first], kind="stable")
        return Distribution(ids[order], values[row][listed][first][order])

    return Sequence(
        ids=ids,
        num_prompt=len(sample.prompt_ids),
        rows={p: row for row, p in enumerate(record.positions) if p < len(ids)},
        logprobs=values[:, 0],
        distribution=distribution,
    )


def _sequence_at(run: Run, reader: Pieces, number: int, places: dict[int, tuple]) -> Sequence:  # type: ignore[type-arg]  # (Piece, row)
    sample = run.manifest.tokens.samples[number]
    num_prompt = len(sample.prompt_ids)
    ids = [*sample.prompt_ids, *sample.answer_ids]
    order = sorted(place for place in places if 0 < place < len(ids))

    def values_of(place: int) -> np.ndarray:
        piece, row = places[place]
        return log_softmax(reader.array(run, piece)[0, row])

    def distribution(row: int) -> Distribution:
        values = values_of(order[row])
        by_size = np.argsort(-values, kind="stable")
        return Distribution(by_size, values[by_size], whole=True)

    return Sequence(
        ids=ids,
        num_prompt=num_prompt,
        rows={place: row for row, place in enumerate(order)},
        logprobs=np.array([values_of(place)[ids[place]] for place in order]),
        distribution=distribution,
    )


# Two sides' sequences, token by token: which tokens may be compared, and what they say. Where a
# server tells no ids, both sides' tokens are numbered by their text.

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
    delta: np.ndarray
    """Of ``rows``; without those that are not finite, and those that another prompt with the same
    beginning has shown."""
    places: np.ndarray
    """Index in the sequence of each of them."""
    whole: tuple[np.ndarray, np.ndarray]
    """Delta and places with what another prompt has shown."""
    num_nonfinite: tuple[int, int]
    """By side: nan or inf where the other side has a number."""


def pair_runs(a: Run, b: Run) -> list[PromptPair]:
    """One a prompt, in order."""
    reference, candidate = _with_common_ids(a, b)
    samples = a.manifest.tokens.samples
    pairs = [
        _pair(number, tuple(samples[number].prompt_ids) or samples[number].text or number, x, y)
        for number, (x, y) in enumerate(zip(reference, candidate, strict=False))
    ]
    once = list(pairs)
    order = sorted(range(len(pairs)), key=lambda n: pairs[n].reference.ids)
    for before, number in itertools.pairwise(order):
        earlier, pair = pairs[before], pairs[number]
        common = first_apart(earlier.reference.ids, pair.reference.ids)
        shared = int(np.searchsorted(pair.places, common))
        if not (earlier.reference.num_prompt and pair.reference.num_prompt and shared):
            continue
        same = np.zeros(len(pair.places), bool)
        if np.array_equal(earlier.places[:shared], pair.places[:shared]):
            both = (values_at(side, side.places)[:, :shared] for side in (earlier, pair))
            same[:shared] = np.equal(*both).all(axis=0)
        once[number] = replace(pair, delta=pair.delta[~same], places=pair.places[~same])
    engines = [run.manifest.engine and run.manifest.engine.version for run in (a, b)]
    # one engine lists the token that ends an answer, another does not
    room = 0 if engines[0] == engines[1] else 1
    # tokens at which answers are cut; 0 where they are given, or nobody knows
    budgets = [
        0
        if run.manifest.tokens.forced_by is not None or facts_of(run).get("tokens") == "given"
        else run.manifest.settings.max_new_tokens
        for run in (a, b)
    ]

    def is_ended(pair: PromptPair) -> bool:
        lengths = [len(side.ids) - side.num_prompt for side in (pair.reference, pair.candidate)]
        short = lengths.index(min(lengths))
        return (
            pair.tokens is None
            and 0 < pair.num_equal == lengths[short] < budgets[short]  # 0: there is no answer
            and lengths[1 - short] > lengths[short] + room
        )

    return [replace(pair, ended=is_ended(pair)) for pair in once]


def values_at(pair: PromptPair, places: np.ndarray) -> np.ndarray:
    """(2, T): both sides' log-probabilities at ``places`` of its rows, in order."""
    wanted = set(places.tolist())
    rows = [(numbers, other) for place, numbers, other in pair.rows if place in wanted]
    numbers, other = np.array(rows, np.int64).reshape(-1, 2).T
    return np.stack([pair.reference.logprobs[numbers], pair.candidate.logprobs[other]])


def _with_common_ids(a: Run, b: Run) -> tuple[list[Sequence], list[Sequence]]:
    """Take the ids of texts on both sides where one tells tokens as text alone. A piece of a
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
    ids_a, other = a.ids[start:], b.ids[start + shift :]
    common = start + first_apart(ids_a, other)
    begins = min(a.num_prompt, b.num_prompt) if whole else a.num_prompt
    ends = min(len(a.ids), len(b.ids) - shift)
    rows = [
        (p, a.rows[p], b.rows[p + shift])
        for p in sorted(a.rows)
        if start <= p < common and p + shift in b.rows
    ]
    scored = {p for p in a.rows if start <= p < common}
    scored ^= {p - shift for p in b.rows if start <= p - shift < common}
    parting = tokens = None
    # of a token without a text nobody knows whether it is the other side's: nothing parts there
    untold = common < ends and min(a.ids[common], b.ids[common + shift]) < 0
    if begins <= common < ends and not untold:
        parting = common, a.rows.get(common), b.rows.get(common + shift)
        tokens = a.ids[common], b.ids[common + shift]
    places = np.array([place for place, _, _ in rows], np.int64)
    x = a.logprobs[[row for _, row, _ in rows]]
    y = b.logprobs[[row for _, _, row in rows]]
    fine = np.isfinite(x), np.isfinite(y)
    delta, places = (values[fine[0] & fine[1]] for values in (y - x, places))
    return PromptPair(
        sample=number,
        prompt=prompt,
        reference=a,
        candidate=b,
        rows=rows,
        parting=parting,
        tokens=tokens,
        num_equal=max(0, min(common, ends) - begins),
        num_other=len(scored),
        num_untold=sum(begins <= place < ends - 1 for place in scored)
        + (ends - max(common, begins) if untold else 0),
        num_after=max(0, ends - max(common, begins) - 1) if tokens else 0,
        answer_begins=begins,
        ended=False,
        delta=delta,
        places=places,
        whole=(delta, places),
        num_nonfinite=(int((fine[1] & ~fine[0]).sum()), int((fine[0] & ~fine[1]).sum())),
    )


def prompt_line(pairs: list[PromptPair], a: Run, b: Run) -> PreflightLine:
    """Were both asked the same tokens? By ids where both tell them, else by how many there were."""
    samples = a.manifest.tokens.samples, b.manifest.tokens.samples
    counts = []
    for run, side in zip((a, b), samples, strict=True):
        words = facts_of(run).get("prompt tokens", "").split()
        if len(words) == len(side):
            counts.append([int(word) if word.isdecimal() else None for word in words])
        else:
            counts.append([len(sample.prompt_ids) or None for sample in side])
    has_ids = [all(sample.prompt_ids for sample in side) for side in samples]
    shown = [
        "ids" if ids else sentence(fact("logprobs.only_number")) if None not in num else UNKNOWN
        for ids, num in zip(has_ids, counts, strict=True)
    ]
    status: PreflightStatus = "same" if all(has_ids) else "unknown"
    details: list[Fact] = []
    if (other := next(_other_prompts(pairs, samples, counts), None)) is not None:
        status, (shown, *details) = "blocking", other
    return PreflightLine(
        check="prompt ids", status=status, reference=shown[0], candidate=shown[1], details=details
    )


def _other_prompts(
    pairs: list[PromptPair],
    samples: abc.Sequence[list[SampleTokens]],
    counts: list[list[int | None]],
) -> Iterator[tuple[list[str], Fact] | tuple[list[str]]]:
    """Yield what shows that both were not asked the same: of each side, and as a fact."""
    if len(samples[0]) != len(samples[1]):
        yield ([sentence(fact("logprobs.num_prompts", num_prompts=len(side))) for side in samples],)
        return
    texts = [[(tuple(s.prompt_ids) or s.text, *s.generated_ids) for s in side] for side in samples]
    for asked, other in (texts, [[text[:1] for text in side] for side in texts]):
        if asked != other and Counter(asked) == Counter(other):
            moved = next(number for number, text in enumerate(asked) if text != other[number])
            place = other.index(asked[moved])
            yield ["-", "-"], fact("logprobs.other_order", sample=moved, place=place)
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if not (a.num_prompt and b.num_prompt):
            continue
        common = first_apart(a.ids, b.ids)
        # one side's prompt may hold the other's answer; a prompt that goes on otherwise may not
        ended = common == min(len(a.ids), len(b.ids))
        least, most = sorted((a.num_prompt, b.num_prompt))
        if common < least or (common < most and not ended):
            few = slice(common, common + 4)
            ids: dict[str, Any] = {"reference": a.ids[few], "candidate": b.ids[few]}
            yield (
                ["-", "-"],
                fact("logprobs.other_tokens", sample=pair.sample, token=common, **ids),
            )
    for number, (sample_a, sample_b) in enumerate(zip(*samples, strict=True)):
        untold = not (sample_a.prompt_ids and sample_b.prompt_ids)
        if untold and None not in (sample_a.text, sample_b.text) and sample_a.text != sample_b.text:
            yield ["-", "-"], fact("logprobs.other_text", sample=number)
    for number, lengths in enumerate(zip(*counts, strict=True)):
        if None not in lengths and lengths[0] != lengths[1]:
            shown = [sentence(fact("logprobs.num_tokens", num_tokens=num)) for num in lengths]
            both = dict(zip(SIDES, lengths, strict=True))
            yield shown, fact("logprobs.other_length", sample=number, **both)


def renumbered(
    sequences: list[Sequence], texts: Mapping[str, str], numbers: dict[str, int], unknown: int
) -> list[Sequence]:
    """The sequences by numbers of texts, without prompts; what has no text becomes ``unknown``."""

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
            sequence,
            ids=[number(token) for token in sequence.ids[start:]],
            num_prompt=0,
            rows={place - start: row for place, row in sequence.rows.items() if place >= start},
            distribution=distribution,
        )

    return [one(sequence) for sequence in sequences]

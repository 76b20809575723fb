"""Files of log-probabilities, made runs: what is in their fields, and what they have in common.

The map of such a file says which of its fields holds what; several lines of one prompt each:

    [fields]
    prompt = "prompt_ids"             # token ids; or tokens = "token_ids", prompt and answer in one
    answer = "completion_ids"
    logprobs = "extra.logps"          # a dot goes into an object or, with a number, into a list
    mask = "loss_mask"                # 0: not scored (a tool's output, padding)
    answer_length = "response_length" # with tokens: how many at the end are the answer
    length = "input_lengths"          # with tokens: how many there are before padding
    attention = "attention_mask"      # 0: padding
    top = "top_logprobs"              # of each token the likeliest: {id: log p} or [[id, log p]]
    text = "prompt"
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from divergence.config import decode, load_toml
from divergence.errors import ConfigError, DumpError
from divergence.run.reader import Run
from divergence.run.record import expanded
from divergence.run.scores import MAX_TOKEN, Scores, ScoreSource, put_scores, scores_manifest
from divergence.run.storage import Location
from divergence.run.writer import RunWriter

MAX_TOKENS = 1 << 22
"""Of one prompt and answer."""


class FieldMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module docstring."""

    logprobs: str
    prompt: str | None = None
    answer: str | None = None
    tokens: str | None = None
    answer_length: str | None = None
    length: str | None = None
    mask: str | None = None
    attention: str | None = None
    top: str | None = None
    text: str | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fields: FieldMap


def load_fields(path: str | os.PathLike[str]) -> FieldMap:
    """Reads a map. Raises ConfigError."""
    given = expanded(path)
    fields = decode(load_toml(given), _File, where=str(given)).fields
    if fields.tokens is None and fields.answer is None:
        raise ConfigError(
            "the map names no tokens",
            where=str(given),
            hint='answer = "FIELD" with prompt = "FIELD", or tokens = "FIELD" for both in one',
        )
    return fields


@dataclass(frozen=True, slots=True)
class _Line:
    """One object of a file, and where it stands. Methods raise DumpError."""

    item: Any
    where: str

    def value(self, path: str | None) -> Any:
        """Return what lies at a dotted path; None where nothing does."""
        if path is None:
            return None
        item = self.item
        for part in path.split("."):
            if isinstance(item, dict) and part in item:
                item = item[part]
            elif isinstance(item, list) and part.isdecimal() and int(part) < len(item):
                item = item[int(part)]
            else:
                return None
        return item

    def row(self, path: str | None) -> list[Any]:
        """A list; one of one list (a batch of one) is that list."""
        value = self.value(path)
        while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        if value is None:
            return []
        if not isinstance(value, list):
            raise DumpError(f"{path} is no list", where=self.where)
        if len(value) > MAX_TOKENS:
            raise DumpError(f"{path} has {len(value):,} entries", where=self.where)
        return value

    def ids(self, path: str | None) -> list[int]:
        row = self.row(path)
        for token in row:
            whole = isinstance(token, int) or (isinstance(token, float) and token.is_integer())
            if not whole or not 0 <= token <= MAX_TOKEN:
                raise DumpError(f"{path}: {str(token)[:40]!r} is no token id", where=self.where)
        return [int(token) for token in row]

    def numbers(self, path: str) -> list[float]:
        if self.value(path) is None:
            keys = ", ".join(list(self.item)[:12]) if isinstance(self.item, dict) else "no object"
            raise DumpError(
                f"there is no field {path}: {keys}",
                where=self.where,
                hint="a map (--map) names the fields",
            )
        numbers = []
        for value in self.row(path):
            if value is None:
                numbers.append(math.nan)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers.append(float(value))
            elif value in ("nan", "-inf", "NaN", "-Infinity"):
                numbers.append(float(value.replace("Infinity", "inf")))
            else:
                raise DumpError(f"{path}: {str(value)[:40]!r} is no number", where=self.where)
        return numbers

    def count(self, path: str | None) -> int | None:
        value = self.value(path)
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def likeliest(self, path: str | None) -> list[list[tuple[int, float]]]:
        rows = []
        for row in self.row(path):
            entries = list(row.items()) if isinstance(row, dict) else row or []
            try:
                pairs = [(int(token), float(value)) for token, value in entries]
            except (TypeError, ValueError) as error:
                raise DumpError(
                    f"{path}: {str(row)[:60]} are no ids with log-probabilities", where=self.where
                ) from error
            rows.append(sorted(pairs, key=lambda pair: -pair[1]))
        return rows

    def tokens(self, fields: FieldMap, mask: list[int]) -> tuple[list[int], list[int], int]:
        """(prompt, answer, index of the answer in what the file calls its tokens)."""
        attention = self.ids(fields.attention)
        if fields.tokens is None:
            prompt, answer = self.ids(fields.prompt), self.ids(fields.answer)
            if len(attention) == len(prompt) + len(answer):
                prompt = [token for token, seen in zip(prompt, attention, strict=False) if seen]
            return prompt, answer, 0
        tokens = self.ids(fields.tokens)[: self.count(fields.length)]
        count = self.count(fields.answer_length)
        if count is None:
            first = next((n for n, flag in enumerate(mask) if flag), None)
            if first is None:
                raise DumpError(
                    f"nothing says where in {fields.tokens} the answer begins",
                    where=self.where,
                    hint="answer_length or mask in the map (--map)",
                )
            count = len(tokens) - first
        if not 0 <= count <= len(tokens):
            raise DumpError(
                f"{fields.answer_length} is {count} of {len(tokens)} tokens", where=self.where
            )
        start = len(tokens) - count
        return tokens[:start], tokens[start:], start


def scores_of(item: Any, fields: FieldMap, where: str) -> Scores:
    """One object's scores. Raises DumpError."""
    line = _Line(item, where)
    values, mask = line.numbers(fields.logprobs), line.ids(fields.mask)
    prompt, answer, offset = line.tokens(fields, mask)
    if fields.tokens is not None:  # of each token of the sequence, perhaps with padding behind
        end = offset + len(answer)
        if len(values) != len(answer) and len(values) >= end:
            values = values[offset:end]
        if len(mask) != len(answer) and len(mask) >= end:
            mask = mask[offset:end]
    num_answer = len(answer)
    if mask and len(mask) < num_answer:
        raise DumpError(
            f"{fields.mask} has {len(mask)} entries for {num_answer} tokens of the answer",
            where=where,
        )
    scored = [n for n in range(num_answer) if not mask or mask[n]]
    if mask:  # what lies behind the last scored token is padding, or nobody's concern
        answer = answer[: scored[-1] + 1] if scored else []
    entries = f"{fields.logprobs} has {len(values)} entries for {len(answer)} tokens of the answer"
    if len(values) < len(answer):
        raise DumpError(entries, where=where, hint="a map (--map) names other fields")
    if not mask and len(values) != len(answer):
        raise DumpError(f"{entries}, and no mask says which of them count", where=where)
    scored = [n for n in scored if not math.isnan(values[n])]
    top, text = line.likeliest(fields.top), line.value(fields.text)
    return Scores(
        prompt_ids=prompt,
        generated_ids=answer,
        positions=[len(prompt) + n for n in scored],
        logprobs=[values[n] for n in scored],
        top=[top[n] if n < len(top) else () for n in scored] if top else (),
        text=text if isinstance(text, str) else None,
    )


@dataclass(slots=True)
class Scored:
    """Says what a layout found."""

    source: ScoreSource
    prompts: list[tuple[Scores, str]] = field(default_factory=list)
    """Each with the file and line, for errors."""
    texts: dict[str, str] = field(default_factory=dict)
    """Of tokens, by id."""


def import_scores(
    words: str,
    scored: Scored,
    place: Location,
    *,
    like: Run | None,
    label: str | None,
    force: bool,
    command: str | None,
) -> Run:
    """The run; every value is checked before anything is written. ``words``: what the file is.
    ``like``: a run whose prompts these are; others are refused. Raises DumpError."""
    prompts = scored.prompts
    if not any(scores.positions for scores, _ in prompts):
        raise DumpError("no token has a log-probability")
    for scores, where in prompts:
        scores.tensors(where)
    if like is not None:
        samples = like.manifest.tokens.samples
        alone = "leave --like out to import the file as it is"
        if len(samples) != len(prompts):
            raise DumpError(
                f"{len(prompts)} prompts, and {like.path} has {len(samples)}", hint=alone
            )
        for number, ((scores, where), other) in enumerate(zip(prompts, samples, strict=True)):
            own = list(scores.prompt_ids)
            if own and other.prompt_ids and own != other.prompt_ids:
                raise DumpError(
                    f"prompt {number} is not that of {like.path}", where=where, hint=alone
                )
    manifest = scores_manifest(
        scored.source,
        [scores.tokens for scores, _ in prompts],
        tool=f", importing {words}",
        label=label or f"file of {words}",
        command=command,
        texts=scored.texts,
        forced_by=None if like is None else like.manifest.id,
    )
    with RunWriter(place, manifest, force=force) as writer:
        for number, (scores, where) in enumerate(prompts):
            put_scores(writer, number, scores, where=where)
    return Run.open(place)

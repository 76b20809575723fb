"""The map of a file of log-probabilities: which of its fields holds what.

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
from typing import Any

import msgspec

from divergence.config import decode, load_toml
from divergence.errors import ConfigError, DumpError
from divergence.run.schema.layout import expanded
from divergence.run.writing.scores import MAX_TOKEN, Scores

__all__ = ["FieldMap", "load_fields", "scores_of"]

MAX_TOKENS = 1 << 22
"""Of one prompt and answer."""


class FieldMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module docstring; several names are tried in order."""

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
            "the map names no tokens", where=str(given),
            hint='answer = "FIELD" with prompt = "FIELD", or tokens = "FIELD" for both in one',
        )  # fmt: skip
    return fields


def scores_of(item: Any, fields: FieldMap, where: str) -> Scores:
    """One object's scores. Raises DumpError."""
    values = _numbers(item, fields.logprobs, where)
    mask = _ids(item, fields.mask, where)
    prompt, answer, offset = _tokens(item, fields, mask, where)
    if fields.tokens is not None:  # of each token of the sequence, perhaps with padding behind
        values, mask = (_of_answer(row, offset, len(answer)) for row in (values, mask))
    if mask and len(mask) < len(answer):
        raise DumpError(f"{fields.mask} has {len(mask)} entries for {len(answer)} tokens of the "
                        "answer", where=where)  # fmt: skip
    scored = [n for n in range(len(answer)) if not mask or mask[n]]
    if mask:  # what lies behind the last scored token is padding, or nobody's concern
        answer = answer[: scored[-1] + 1] if scored else []
    if len(values) < len(answer):
        raise DumpError(
            f"{fields.logprobs} has {len(values)} entries for {len(answer)} tokens of the answer",
            where=where, hint="a map (--map) names other fields",
        )  # fmt: skip
    if not mask and len(values) != len(answer):
        raise DumpError(
            f"{fields.logprobs} has {len(values)} entries for {len(answer)} tokens of the answer, "
            "and no mask says which of them count", where=where,
        )  # fmt: skip
    scored = [n for n in scored if not math.isnan(values[n])]
    top = _top(item, fields.top, where)
    text = _found(item, fields.text)
    return Scores(
        prompt_ids=prompt, generated_ids=answer, positions=[len(prompt) + n for n in scored],
        logprobs=[values[n] for n in scored],
        top=[top[n] if n < len(top) else () for n in scored] if top else (),
        text=text if isinstance(text, str) else None,
    )  # fmt: skip


def _of_answer(row: list[Any], offset: int, count: int) -> list[Any]:
    """The part of the answer, where a row has an entry for each token of prompt and answer."""
    whole = len(row) != count and len(row) >= offset + count
    return row[offset : offset + count] if whole else row


def _tokens(
    item: Any, fields: FieldMap, mask: list[int], where: str
) -> tuple[list[int], list[int], int]:
    """(prompt, answer, index of the answer in what the file calls its tokens)."""
    attention = _ids(item, fields.attention, where)
    if fields.tokens is None:
        prompt = _ids(item, fields.prompt, where)
        answer = _ids(item, fields.answer, where)
        if len(attention) == len(prompt) + len(answer):
            prompt = [token for token, told in zip(prompt, attention, strict=False) if told]
        return prompt, answer, 0
    tokens = _ids(item, fields.tokens, where)
    length = _one(item, fields.length)
    if length is not None:
        tokens = tokens[:length]
    count = _one(item, fields.answer_length)
    if count is None:
        first = next((n for n, flag in enumerate(mask) if flag), None)
        if first is None:
            raise DumpError(
                f"nothing says where in {fields.tokens} the answer begins", where=where,
                hint="answer_length or mask in the map (--map)",
            )  # fmt: skip
        count = len(tokens) - first
    if not 0 <= count <= len(tokens):
        raise DumpError(f"{fields.answer_length} is {count} of {len(tokens)} tokens", where=where)
    start = len(tokens) - count
    return tokens[:start], tokens[start:], start


def _found(item: Any, path: str | None) -> Any:
    """What lies at a dotted path; None where nothing does."""
    for part in (path or "").split(".") if path else ():
        if isinstance(item, dict) and part in item:
            item = item[part]
        elif isinstance(item, list) and part.isdecimal() and int(part) < len(item):
            item = item[int(part)]
        else:
            return None
    return item if path else None


def _row(item: Any, path: str | None, where: str) -> list[Any]:
    """A list; one of one list (a batch of one) is that list."""
    value = _found(item, path)
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if value is None:
        return []
    if not isinstance(value, list):
        raise DumpError(f"{path} is no list", where=where)
    if len(value) > MAX_TOKENS:
        raise DumpError(f"{path} has {len(value):,} entries", where=where)
    return value


def _ids(item: Any, path: str | None, where: str) -> list[int]:
    value = _row(item, path, where)
    for token in value:
        whole = isinstance(token, bool | int) or (isinstance(token, float) and token.is_integer())
        if not whole or not 0 <= token <= MAX_TOKEN:
            raise DumpError(f"{path}: {str(token)[:40]!r} is no token id", where=where)
    return [int(token) for token in value]


def _numbers(item: Any, path: str, where: str) -> list[float]:
    if _found(item, path) is None:
        keys = ", ".join(list(item)[:12]) if isinstance(item, dict) else "no object"
        raise DumpError(f"there is no field {path}: {keys}", where=where,
                        hint="a map (--map) names the fields")  # fmt: skip
    numbers = []
    for value in _row(item, path, where):
        if value is None:
            numbers.append(math.nan)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append(float(value))
        elif value in ("nan", "-inf", "NaN", "-Infinity"):
            numbers.append(float(value.replace("Infinity", "inf")))
        else:
            raise DumpError(f"{path}: {str(value)[:40]!r} is no number", where=where)
    return numbers


def _one(item: Any, path: str | None) -> int | None:
    value = _found(item, path)
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _top(item: Any, path: str | None, where: str) -> list[list[tuple[int, float]]]:
    rows = []
    for row in _row(item, path, where):
        entries = list(row.items()) if isinstance(row, dict) else row or []
        try:
            pairs = [(int(token), float(value)) for token, value in entries]
        except (TypeError, ValueError) as error:
            raise DumpError(f"{path}: {str(row)[:60]} are no ids with log-probabilities",
                            where=where) from error  # fmt: skip
        rows.append(sorted(pairs, key=lambda pair: -pair[1]))
    return rows

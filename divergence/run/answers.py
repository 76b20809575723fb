"""Answers of servers, as they are sent and as people save them: tokens with log-probabilities.

Of each form there is one function: ``completions_answer`` and ``chat_answer`` (OpenAI's; vLLM adds
prompt_logprobs and token ids), ``sglang_answer`` (input_token_logprobs, output_token_logprobs),
``llama_answer`` (completion_probabilities, of its three ages) and ``tgi_answer``. What an answer
lacks is None, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from divergence.run.scores import Scores

_AS_ID = "token_id:"
_NOT_TOLD = -9999.0
"""Of OpenAI's and of vLLM's for what JSON has no number for."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token. ``id``: None where the server tells text alone. ``logprob``: None where it has
    none. ``top``: the likeliest tokens at its place, without their own lists."""

    id: int | None
    text: str | None
    logprob: float | None
    top: Sequence[Token] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """``prompt_ids``: as the server rendered it; ``num_prompt``: their number, where ids are not
    told. ``prompt``: the prompt's tokens with their scores, the first one without; empty where the
    server scores no prompts."""

    text: str = ""
    tokens: Sequence[Token] = ()
    prompt_ids: Sequence[int] | None = None
    num_prompt: int | None = None
    prompt: Sequence[Token] = ()
    model: str | None = None
    """Who answered, as the answer says."""

    @property
    def has_logprobs(self) -> bool:
        return any(token.logprob is not None for token in self.tokens)

    @property
    def scores_prompt(self) -> bool:
        return any(token.logprob is not None for token in self.prompt)

    @property
    def has_ids(self) -> bool:
        return bool(self.tokens) and all(token.id is not None for token in self.tokens)

    @property
    def num_top(self) -> int:
        """The shortest list of likeliest tokens."""
        return min((len(token.top) for token in self.tokens), default=0)


def _number(value: Any) -> float | None:
    """A log-probability as a server writes it; nan where it says so, None where it says nothing:
    -9999 stands for one that is not told, as of a token that is on no list."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return math.nan
    return None if -math.inf < number <= _NOT_TOLD else number


def _id(value: Any) -> int | None:
    """A token's id, or a number of tokens: what a run holds in 64 bits; also as digits."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def _named(name: Any) -> tuple[int | None, str | None]:
    """vLLM's ``token_id:17``, or a token's text."""
    if not isinstance(name, str):
        return None, None
    if name.startswith(_AS_ID) and (id_ := _id(name.removeprefix(_AS_ID))) is not None:
        return id_, None
    return None, name


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _at(values: list[Any], number: int) -> Any:
    return values[number] if number < len(values) else None


def _ids(value: Any) -> list[int] | None:
    ids = [_id(number) for number in _list(value)]
    return [number for number in ids if number is not None] if ids and None not in ids else None


def _with_top(own: Token, listed: Iterable[Token]) -> Token:
    """The token with those that are ``listed`` at its place, the likeliest first."""
    return replace(
        own,
        top=sorted(
            listed, key=lambda token: -math.inf if token.logprob is None else -token.logprob
        ),
    )


def _token_of(item: Any) -> Token:
    """``{id, token, logprob}``, in which not all servers tell an id, TGI says ``text``, and
    llama.cpp ``prob`` (of what its samplers left; in 2024 with ``tok_str``)."""
    fields = _dict(item)
    texts = (fields[key] for key in ("token", "text", "tok_str", "content") if key in fields)
    named, text = _named(next(texts, None))
    own, logprob = _id(fields.get("id")), _number(fields.get("logprob"))
    prob = fields.get("prob")
    if logprob is None and isinstance(prob, int | float) and not isinstance(prob, bool):
        logprob = math.log(prob) if prob > 0 else -math.inf if prob == 0 else math.nan
    return Token(named if own is None else own, text, logprob)


def _rows(items: Any) -> list[Token]:
    """Tokens of which each has its list beside it, and is perhaps scored there alone."""
    rows = []
    for item in map(_dict, _list(items)):
        names = (name for name in ("top_logprobs", "top_probs", "probs") if name in item)
        listed = list(map(_token_of, _list(item.get(next(names, "")))))
        own = _token_of(item)
        if own.logprob is None:
            same = (token for token in listed if (token.id, token.text) == (own.id, own.text))
            own = next(same, own)
        rows.append(_with_top(own, listed))
    return rows


def completions_answer(response: dict[str, Any]) -> ServerAnswer:
    choice = _dict(next(iter(_list(response.get("choices"))), None))
    logprobs = _dict(choice.get("logprobs"))
    values, tops = _list(logprobs.get("token_logprobs")), _list(logprobs.get("top_logprobs"))
    tokens = []
    for number, name in enumerate(_list(logprobs.get("tokens"))):
        listed = _dict(_at(tops, number)).items()
        top = [Token(*_named(other), _number(value)) for other, value in listed]
        tokens.append(_with_top(Token(*_named(name), _number(_at(values, number))), top))
    return _openai_answer(response, choice, tokens, str(choice.get("text") or ""))


def chat_answer(response: dict[str, Any]) -> ServerAnswer:
    choice = _dict(next(iter(_list(response.get("choices"))), None))
    tokens = _rows(_dict(choice.get("logprobs")).get("content"))
    text = _dict(choice.get("message")).get("content")
    return _openai_answer(response, choice, tokens, str(text or ""))


def _openai_answer(
    response: dict[str, Any], choice: dict[str, Any], tokens: list[Token], text: str
) -> ServerAnswer:
    scored = choice.get("prompt_logprobs") or response.get("prompt_logprobs")
    prompt_ids = _ids(choice.get("prompt_token_ids")) or _ids(response.get("prompt_token_ids"))
    ids = _ids(choice.get("token_ids")) or []
    if not tokens:
        tokens = [Token(number, None, None) for number in ids]
    elif len(ids) == len(tokens):
        tokens = [replace(token, id=number) for token, number in zip(tokens, ids, strict=True)]
    return ServerAnswer(
        text=text,
        tokens=tokens,
        prompt_ids=prompt_ids,
        num_prompt=_id(_dict(response.get("usage")).get("prompt_tokens")),
        prompt=_prompt_of(_list(scored), prompt_ids),
        model=name if isinstance(name := response.get("model"), str) and name else None,
    )


def _prompt_of(scored: list[Any], ids: list[int] | None) -> list[Token]:
    """vLLM's: of each token of the prompt ``{id: {logprob, rank, decoded_token}}``, its own entry
    first; the first token's is null."""
    tokens = []
    for number, row in enumerate(scored):
        entries = [
            Token(id_, entry.get("decoded_token"), _number(entry.get("logprob")))
            for key, entry in _dict(row).items()
            if (id_ := _id(key)) is not None and isinstance(entry, dict)
        ]
        own = _at(ids or [], number)
        first = entries[0] if entries else Token(own, None, None)
        own_entry = next((entry for entry in entries if entry.id == own), first)
        tokens.append(_with_top(own_entry, entries))
    return tokens


def sglang_answer(response: dict[str, Any]) -> ServerAnswer:
    meta = _dict(response.get("meta_info"))

    def rows(name: str) -> list[Token]:
        tops = _list(meta.get(name.replace("token", "top")))
        return [
            _with_top(_entry(entry), map(_entry, _list(_at(tops, number))))
            for number, entry in enumerate(_list(meta.get(name)))
        ]

    prompt = rows("input_token_logprobs")
    return ServerAnswer(
        text=str(response.get("text") or ""),
        tokens=rows("output_token_logprobs"),
        prompt=prompt,
        prompt_ids=_ids([token.id for token in prompt]),
        num_prompt=_id(meta.get("prompt_tokens")),
    )


def _entry(value: Any) -> Token:
    """(log p, id, text)."""
    parts = [*_list(value), None, None, None]
    return Token(_id(parts[1]), parts[2] if isinstance(parts[2], str) else None, _number(parts[0]))


def llama_answer(response: dict[str, Any]) -> ServerAnswer:
    tokens = _rows(response.get("completion_probabilities"))
    return ServerAnswer(
        text=str(response.get("content") or ""),
        tokens=tokens,
        num_prompt=_id(response.get("tokens_evaluated")),
    )


def tgi_answer(response: dict[str, Any]) -> ServerAnswer:
    details = _dict(response.get("details"))
    tops = _list(details.get("top_tokens"))
    tokens = [
        _with_top(_token_of(item), map(_token_of, _list(_at(tops, number))))
        for number, item in enumerate(_list(details.get("tokens")))
    ]
    prompt = [_token_of(item) for item in _list(details.get("prefill"))]
    return ServerAnswer(
        text=str(response.get("generated_text") or ""),
        tokens=tokens,
        prompt=prompt,
        prompt_ids=_ids([token.id for token in prompt]),
        num_prompt=len(prompt) or None,
    )


# An answer as the scores of a run: which token is where, by which number.

_MOST_TEXTS = 1 << 18


class Vocabulary:
    """Texts of tokens by id; with ``by_text`` the ids are numbers that it hands out itself. Else a
    token told by its text alone has the one id that is known to have this text, or none."""

    def __init__(self, texts: dict[str, str], *, by_text: bool) -> None:
        self._texts, self._by_text = texts, by_text
        self._numbers: dict[str, int | None] = {}

    def take(self, texts: Mapping[str, str]) -> None:
        """Those of an earlier capture."""
        for number, text in texts.items():
            self._note(int(number), text)

    def id_of(self, token: Token) -> int | None:
        """None where the run goes by ids, and the server told none of this one."""
        if token.id is not None and not self._by_text:
            if token.text:
                self._note(token.id, token.text)
            return token.id
        if token.text is None:
            return None
        if self._by_text and token.text not in self._numbers:
            self._note(len(self._numbers), token.text)
        return self._numbers.get(token.text)

    def _note(self, number: int, text: str) -> None:
        if len(self._texts) >= _MOST_TEXTS and not self._by_text:
            return
        self._texts.setdefault(str(number), text)
        if self._numbers.setdefault(text, number) != number:
            self._numbers[text] = None  # two ids share it


def scores_from(
    prompt: list[int], answer: list[int], rows: list[tuple[int, Token]], vocabulary: Vocabulary
) -> Scores:
    scored = [(place, token) for place, token in rows if token.logprob is not None]
    for _, token in scored:
        vocabulary.id_of(token)
    top = [
        [
            (number, alternative.logprob)
            for alternative in token.top
            if alternative.logprob is not None
            and (number := vocabulary.id_of(alternative)) is not None
        ]
        for _, token in scored
    ]
    return Scores(
        prompt_ids=prompt,
        generated_ids=answer,
        positions=[place for place, _ in scored],
        logprobs=[float(token.logprob or 0.0) for _, token in scored],
        top=top,
    )

"""How servers are asked for log-probabilities, and where in their answers these stand.

    completions   POST /v1/completions        OpenAI's; vLLM adds prompt_logprobs and token ids
    chat          POST /v1/chat/completions   the same of conversations
    sglang        POST /generate              input_token_logprobs, output_token_logprobs
    llama.cpp     POST /completion            n_probs, completion_probabilities
    tgi           POST /generate              details, decoder_input_details, top_n_tokens

A protocol is two functions: the request of a question, and the answer of a response. A drawn
answer is asked for without top-k and top-p, as far as the protocol has a word for it. What a
response lacks is None, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_AS_ID = "token_id:"
_NOT_TOLD = -9999.0
"""Of OpenAI's and of vLLM's for what JSON has no number for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt: text, token ids or a conversation. ``extras``: names of what is asked beside the
    answer, as far as the server takes it. ``forced``: the prompt ends with an answer to score."""

    model: str
    text: str | None = None
    ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    num_tokens: int
    seed: int
    temperature: float = 0.0
    top: int
    again: bool = False
    """The same prompt as before, and a token more: what the server kept of it may be used."""
    extras: frozenset[str] = frozenset()

    @property
    def prompt(self) -> str | list[int]:
        return list(self.ids) if self.ids is not None else self.text or ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """``levels``: extras to try, the most first. ``takes_ids``: may a prompt be token ids?"""

    path: str
    request: Callable[[Question], dict[str, Any]]
    answer: Callable[[dict[str, Any]], ServerAnswer]
    levels: tuple[frozenset[str], ...] = (frozenset(),)
    takes_ids: bool = True
    forces_by: str | None = None
    """The extra by which a prompt is scored; None where a prompt is always, or never, scored."""


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


def _ids_of(tokens: list[Token]) -> list[int] | None:
    return _ids([token.id for token in tokens])


def _with_top(own: Token, listed: Iterable[Token]) -> Token:
    """The token with those that are ``listed`` at its place, the likeliest first."""
    return replace(own, top=sorted(
        listed, key=lambda token: -math.inf if token.logprob is None else -token.logprob
    ))  # fmt: skip


def _told(item: Any) -> Token:
    """``{id, token, logprob}``, in which not all servers tell an id, and TGI says ``text``."""
    said = _dict(item)
    named, text = _named(said.get("token", said.get("text")))
    own = _id(said.get("id"))
    return Token(named if own is None else own, text, _number(said.get("logprob")))


def _rows(items: Any) -> list[Token]:
    """Tokens of which each has its list beside it."""
    return [
        _with_top(_told(item), map(_told, _list(item.get("top_logprobs"))))
        for item in map(_dict, _list(items))
    ]


# --- OpenAI's routes ----------------------------------------------------------------------------

_OPENAI_LEVELS = tuple(
    map(frozenset, (
        ("logprobs", "prompt_logprobs", "ids"), ("logprobs", "ids"), ("logprobs",),
        ("few_logprobs",), (),
    ))
)  # fmt: skip


def _openai(question: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": question.model, "max_tokens": question.num_tokens, "seed": question.seed,
        "temperature": question.temperature, "stream": False,
    }  # fmt: skip
    if question.temperature:
        body["top_p"] = 1
    if "prompt_logprobs" in question.extras:
        body["prompt_logprobs"] = question.top
    if "ids" in question.extras:
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return body


def _top_of(question: Question) -> int:
    return min(question.top, 5) if "few_logprobs" in question.extras else question.top


def _completions(question: Question) -> dict[str, Any]:
    body = _openai(question) | {"prompt": question.prompt}
    if question.extras & {"logprobs", "few_logprobs", "echo"}:
        body["logprobs"] = _top_of(question)
    if "echo" in question.extras:
        body["echo"] = True
    return body


def _chat(question: Question) -> dict[str, Any]:
    body = _openai(question) | {"messages": [dict(message) for message in question.messages or ()]}
    if question.extras & {"logprobs", "few_logprobs"}:
        body |= {"logprobs": True, "top_logprobs": _top_of(question)}
    return body


def _of_completions(response: dict[str, Any]) -> ServerAnswer:
    choice = _dict(next(iter(_list(response.get("choices"))), None))
    said = _dict(choice.get("logprobs"))
    values, tops = _list(said.get("token_logprobs")), _list(said.get("top_logprobs"))
    tokens = []
    for number, name in enumerate(_list(said.get("tokens"))):
        listed = _dict(_at(tops, number)).items()
        top = [Token(*_named(other), _number(value)) for other, value in listed]
        tokens.append(_with_top(Token(*_named(name), _number(_at(values, number))), top))
    return _openai_answer(response, choice, tokens, str(choice.get("text") or ""))


def _of_chat(response: dict[str, Any]) -> ServerAnswer:
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
        text=text, tokens=tokens, prompt_ids=prompt_ids,
        num_prompt=_id(_dict(response.get("usage")).get("prompt_tokens")),
        prompt=_prompt_of(_list(scored), prompt_ids),
        model=name if isinstance(name := response.get("model"), str) and name else None,
    )  # fmt: skip


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
        mine = next((entry for entry in entries if entry.id == own), first)
        tokens.append(_with_top(mine, entries))
    return tokens


# --- servers' own routes ------------------------------------------------------------------------


def _sglang(question: Question) -> dict[str, Any]:
    prompt = question.prompt
    return {
        "input_ids" if isinstance(prompt, list) else "text": prompt,
        "sampling_params": {
            "temperature": question.temperature, "max_new_tokens": question.num_tokens,
            **({"sampling_seed": question.seed} if question.temperature else {}),
        },
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": question.top,
        "return_text_in_logprobs": True,
    }  # fmt: skip


def _of_sglang(response: dict[str, Any]) -> ServerAnswer:
    said = _dict(response.get("meta_info"))

    def rows(name: str) -> list[Token]:
        tops = _list(said.get(name.replace("token", "top")))
        return [
            _with_top(_entry(entry), map(_entry, _list(_at(tops, number))))
            for number, entry in enumerate(_list(said.get(name)))
        ]

    prompt = rows("input_token_logprobs")
    return ServerAnswer(
        text=str(response.get("text") or ""), tokens=rows("output_token_logprobs"), prompt=prompt,
        prompt_ids=_ids_of(prompt),
        num_prompt=_id(said.get("prompt_tokens")),
    )  # fmt: skip


def _entry(value: Any) -> Token:
    """(log p, id, text)."""
    parts = [*_list(value), None, None, None]
    return Token(_id(parts[1]), parts[2] if isinstance(parts[2], str) else None, _number(parts[0]))


def _llama(question: Question) -> dict[str, Any]:
    return {
        "prompt": question.prompt, "n_predict": question.num_tokens, "seed": question.seed,
        "temperature": question.temperature, "n_probs": question.top, "return_tokens": True,
        "cache_prompt": question.again, "stream": False,
        **({"top_k": 0, "top_p": 1, "min_p": 0} if question.temperature else {}),
    }  # fmt: skip


def _of_llama(response: dict[str, Any]) -> ServerAnswer:
    tokens = _rows(response.get("completion_probabilities"))
    return ServerAnswer(
        text=str(response.get("content") or ""), tokens=tokens,
        num_prompt=_id(response.get("tokens_evaluated")),
    )  # fmt: skip


def _tgi(question: Question) -> dict[str, Any]:
    return {
        "inputs": question.text or "",
        "parameters": {
            "max_new_tokens": question.num_tokens, "do_sample": question.temperature > 0,
            "details": True, "decoder_input_details": True, "top_n_tokens": question.top,
            "seed": question.seed,
        },
    }  # fmt: skip


def _of_tgi(response: dict[str, Any]) -> ServerAnswer:
    details = _dict(response.get("details"))
    tops = _list(details.get("top_tokens"))
    tokens = [
        _with_top(_told(item), map(_told, _list(_at(tops, number))))
        for number, item in enumerate(_list(details.get("tokens")))
    ]
    prompt = [_told(item) for item in _list(details.get("prefill"))]
    return ServerAnswer(
        text=str(response.get("generated_text") or ""), tokens=tokens, prompt=prompt,
        prompt_ids=_ids_of(prompt),
        num_prompt=len(prompt) or None,
    )  # fmt: skip


PROTOCOLS: dict[str, Protocol] = {
    "completions": Protocol(
        path="/v1/completions", request=_completions, answer=_of_completions,
        levels=_OPENAI_LEVELS, forces_by="prompt_logprobs",
    ),
    "chat": Protocol(
        path="/v1/chat/completions", request=_chat, answer=_of_chat, levels=_OPENAI_LEVELS,
        takes_ids=False, forces_by="prompt_logprobs",
    ),
    "sglang": Protocol(path="/generate", request=_sglang, answer=_of_sglang),
    "llama.cpp": Protocol(path="/completion", request=_llama, answer=_of_llama),
    "tgi": Protocol(path="/generate", request=_tgi, answer=_of_tgi, takes_ids=False),
}  # fmt: skip

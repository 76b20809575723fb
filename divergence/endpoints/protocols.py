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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PROTOCOLS", "Answer", "Protocol", "Question", "Token"]

_AS_ID = "token_id:"


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
class Answer:
    """``prompt_ids``: as the server rendered it; ``num_prompt``: their number, where ids are not
    told. ``prompt``: the prompt's tokens with their scores, the first one without; empty where the
    server scores no prompts."""

    text: str = ""
    tokens: Sequence[Token] = ()
    prompt_ids: Sequence[int] | None = None
    num_prompt: int | None = None
    prompt: Sequence[Token] = ()
    finish: str | None = None

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
    answer: Callable[[dict[str, Any]], Answer]
    levels: tuple[frozenset[str], ...] = (frozenset(),)
    takes_ids: bool = True
    forces_by: str | None = None
    """The extra by which a prompt is scored; None where a prompt is always, or never, scored."""


def _number(value: Any) -> float | None:
    """A log-probability as a server writes it; nan where it says so, None where it says nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return math.nan


def _id(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _named(name: Any) -> tuple[int | None, str | None]:
    """vLLM's ``token_id:17``, or a token's text."""
    if not isinstance(name, str):
        return None, None
    if name.startswith(_AS_ID) and name[len(_AS_ID) :].isdecimal():
        return int(name[len(_AS_ID) :]), None
    return None, name


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> list[int] | None:
    found = [_id(one) for one in _list(value)]
    return [one for one in found if one is not None] if found and None not in found else None


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
    body = _openai(question) | {"messages": [dict(one) for one in question.messages or ()]}
    if question.extras & {"logprobs", "few_logprobs"}:
        body |= {"logprobs": True, "top_logprobs": _top_of(question)}
    return body


def _of_completions(response: dict[str, Any]) -> Answer:
    choice = _dict(next(iter(_list(response.get("choices"))), None))
    found = _dict(choice.get("logprobs"))
    names, values = _list(found.get("tokens")), _list(found.get("token_logprobs"))
    tops, ids = _list(found.get("top_logprobs")), _ids(choice.get("token_ids"))
    tokens = []
    for number, name in enumerate(names):
        token, text = _named(name)
        if ids is not None and len(ids) == len(names):
            token = ids[number]
        listed = _dict(tops[number] if number < len(tops) else None)
        top = [Token(*_named(one), _number(value)) for one, value in listed.items()]
        value = _number(values[number]) if number < len(values) else None
        tokens.append(Token(token, text, value, _sorted(top)))
    return _openai_answer(response, choice, tokens, str(choice.get("text") or ""))


def _of_chat(response: dict[str, Any]) -> Answer:
    choice = _dict(next(iter(_list(response.get("choices"))), None))
    content = _list(_dict(choice.get("logprobs")).get("content"))
    ids = _ids(choice.get("token_ids"))
    tokens = []
    for number, item in enumerate(map(_dict, content)):
        own = _chat_token(item)
        token = ids[number] if ids is not None and len(ids) == len(content) else own.id
        top = [_chat_token(_dict(one)) for one in _list(item.get("top_logprobs"))]
        tokens.append(Token(token, own.text, own.logprob, _sorted(top)))
    text = _dict(choice.get("message")).get("content")
    return _openai_answer(response, choice, tokens, str(text or ""))


def _chat_token(item: dict[str, Any]) -> Token:
    """llama.cpp writes the id beside the text."""
    token, text = _named(item.get("token"))
    return Token(_id(item.get("id")) if token is None else token, text,
                 _number(item.get("logprob")))  # fmt: skip


def _openai_answer(
    response: dict[str, Any], choice: dict[str, Any], tokens: list[Token], text: str
) -> Answer:
    scored = choice.get("prompt_logprobs") or response.get("prompt_logprobs")
    prompt_ids = _ids(choice.get("prompt_token_ids")) or _ids(response.get("prompt_token_ids"))
    if not tokens and (ids := _ids(choice.get("token_ids"))):
        tokens = [Token(one, None, None) for one in ids]
    return Answer(
        text=text, tokens=tokens, prompt_ids=prompt_ids,
        num_prompt=_id(_dict(response.get("usage")).get("prompt_tokens")),
        prompt=_prompt_of(_list(scored), prompt_ids), finish=choice.get("finish_reason"),
    )  # fmt: skip


def _prompt_of(scored: list[Any], ids: list[int] | None) -> list[Token]:
    """vLLM's: of each token of the prompt ``{id: {logprob, rank, decoded_token}}``, its own entry
    first; the first token's is null."""
    tokens = []
    for number, row in enumerate(scored):
        entries = [
            Token(int(key), one.get("decoded_token"), _number(one.get("logprob")))
            for key, one in _dict(row).items()
            if key.isdecimal() and isinstance(one, dict)
        ]
        own = ids[number] if ids is not None and number < len(ids) else None
        mine = next((one for one in entries if one.id == own), entries[0] if entries else None)
        if mine is None:
            tokens.append(Token(own, None, None))
        else:
            tokens.append(Token(mine.id, mine.text, mine.logprob, _sorted(entries)))
    return tokens


def _sorted(top: list[Token]) -> list[Token]:
    return sorted(top, key=lambda one: -math.inf if one.logprob is None else -one.logprob)


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


def _of_sglang(response: dict[str, Any]) -> Answer:
    said = _dict(response.get("meta_info"))

    def rows(name: str) -> list[Token]:
        tops = _list(said.get(name.replace("token", "top")))
        found = []
        for number, entry in enumerate(_list(said.get(f"{name}"))):
            top = [_entry(one) for one in _list(tops[number] if number < len(tops) else None)]
            own = _entry(entry)
            found.append(Token(own.id, own.text, own.logprob, _sorted(top)))
        return found

    prompt = rows("input_token_logprobs")
    ids = [token.id for token in prompt if token.id is not None]
    finish = _dict(said.get("finish_reason")).get("type")
    return Answer(
        text=str(response.get("text") or ""), tokens=rows("output_token_logprobs"), prompt=prompt,
        prompt_ids=ids if ids and len(ids) == len(prompt) else None,
        num_prompt=_id(said.get("prompt_tokens")), finish=finish,
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


def _of_llama(response: dict[str, Any]) -> Answer:
    def token(item: dict[str, Any], top: Sequence[Token] = ()) -> Token:
        text = item.get("token")
        return Token(_id(item.get("id")), text if isinstance(text, str) else None,
                     _number(item.get("logprob")), top)  # fmt: skip

    rows = map(_dict, _list(response.get("completion_probabilities")))
    tokens = [
        token(row, _sorted([token(_dict(one)) for one in _list(row.get("top_logprobs"))]))
        for row in rows
    ]
    return Answer(
        text=str(response.get("content") or ""), tokens=tokens,
        num_prompt=_id(response.get("tokens_evaluated")), finish=response.get("stop_type"),
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


def _of_tgi(response: dict[str, Any]) -> Answer:
    details = _dict(response.get("details"))

    def token(item: Any, top: Sequence[Token] = ()) -> Token:
        one = _dict(item)
        return Token(_id(one.get("id")), one.get("text"), _number(one.get("logprob")), top)

    tops = _list(details.get("top_tokens"))
    tokens = [
        token(one, _sorted([token(other) for other in _list(tops[n] if n < len(tops) else None)]))
        for n, one in enumerate(_list(details.get("tokens")))
    ]
    prompt = [token(one) for one in _list(details.get("prefill"))]
    ids = [one.id for one in prompt if one.id is not None]
    return Answer(
        text=str(response.get("generated_text") or ""), tokens=tokens, prompt=prompt,
        prompt_ids=ids if ids and len(ids) == len(prompt) else None,
        num_prompt=len(prompt) or None, finish=details.get("finish_reason"),
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

"""The protocols by which servers are asked for log-probabilities, and where these stand in answers.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from divergence.run.answers import (
    ServerAnswer,
    chat_answer,
    completions_answer,
    llama_answer,
    sglang_answer,
    tgi_answer,
)


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


# --- OpenAI's routes ----------------------------------------------------------------------------

_OPENAI_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"logprobs", "prompt_logprobs", "ids"}),
    frozenset({"logprobs", "ids"}),
    frozenset({"logprobs"}),
    frozenset({"few_logprobs"}),
    frozenset(),
)


def _openai(question: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": question.model,
        "max_tokens": question.num_tokens,
        "seed": question.seed,
        "temperature": question.temperature,
        "stream": False,
    }
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


# --- servers' own routes ------------------------------------------------------------------------


def _sglang(question: Question) -> dict[str, Any]:
    prompt = question.prompt
    return {
        "input_ids" if isinstance(prompt, list) else "text": prompt,
        "sampling_params": {
            "temperature": question.temperature,
            "max_new_tokens": question.num_tokens,
            **({"sampling_seed": question.seed} if question.temperature else {}),
        },
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": question.top,
        "return_text_in_logprobs": True,
    }


def _llama(question: Question) -> dict[str, Any]:
    return {
        "prompt": question.prompt,
        "n_predict": question.num_tokens,
        "seed": question.seed,
        "temperature": question.temperature,
        "n_probs": question.top,
        "return_tokens": True,
        "cache_prompt": question.again,
        "stream": False,
        **({"top_k": 0, "top_p": 1, "min_p": 0} if question.temperature else {}),
    }


def _tgi(question: Question) -> dict[str, Any]:
    return {
        "inputs": question.text or "",
        "parameters": {
            "max_new_tokens": question.num_tokens,
            "do_sample": question.temperature > 0,
            "details": True,
            "decoder_input_details": True,
            "top_n_tokens": question.top,
            "seed": question.seed,
        },
    }


PROTOCOLS: dict[str, Protocol] = {
    "completions": Protocol(
        path="/v1/completions",
        request=_completions,
        answer=completions_answer,
        levels=_OPENAI_LEVELS,
        forces_by="prompt_logprobs",
    ),
    "chat": Protocol(
        path="/v1/chat/completions",
        request=_chat,
        answer=chat_answer,
        levels=_OPENAI_LEVELS,
        takes_ids=False,
        forces_by="prompt_logprobs",
    ),
    "sglang": Protocol(path="/generate", request=_sglang, answer=sglang_answer),
    "llama.cpp": Protocol(path="/completion", request=_llama, answer=llama_answer),
    "tgi": Protocol(path="/generate", request=_tgi, answer=tgi_answer, takes_ids=False),
}

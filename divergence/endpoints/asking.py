"""One prompt asked: its answer, or the scores of an answer that it is given.

A recorded answer is scored as a prompt where the server scores prompts. Where it does not, but
takes token ids, each of its tokens is asked for alone, behind the prompt and the tokens before it:
its log-probability is then the one on the list of that place, and unknown where the list lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from divergence.endpoints.capabilities import STEPS, Capabilities, tokens_of
from divergence.endpoints.client import Client
from divergence.endpoints.protocols import PROTOCOLS, Question, ServerAnswer, Token
from divergence.endpoints.questions import Asked
from divergence.errors import EndpointError

__all__ = ["ask"]

_MORE, _LONGEST = 64, 1_000
"""Tokens beyond those that were asked for, and characters of a token, that no answer has."""


def ask(client: Client, caps: Capabilities, asked: Asked) -> ServerAnswer:
    """What the server says to one prompt. Raises EndpointError."""
    if asked.forced and caps.forces == STEPS:
        return _by_steps(client, caps, asked)
    extras = caps.extras
    if asked.forced and caps.forces == "echo":
        extras = frozenset(("echo", "few_logprobs"))
    num_tokens = 1 if asked.forced else asked.question.num_tokens
    question = replace(asked.question, extras=extras, num_tokens=num_tokens)
    answer = _post(client, caps, question)
    if caps.tokenizes and answer.prompt_ids is None and question.ids is None:
        ids = tokens_of(client, caps.tokenizes, replace(question, model=caps.model))
        if ids and answer.num_prompt in (None, len(ids)):  # else the route renders otherwise
            return replace(answer, prompt_ids=ids)
    return answer


def _post(client: Client, caps: Capabilities, question: Question) -> ServerAnswer:
    protocol = PROTOCOLS[caps.protocol]
    body = protocol.request(replace(question, model=caps.model))
    answer = protocol.answer(client.post(protocol.path, body))
    asked = question.num_tokens + (len(question.prompt) if "echo" in question.extras else 0)
    if len(answer.tokens) > asked + _MORE or len(answer.text) > _LONGEST * (asked + _MORE):
        raise EndpointError(
            f"the answer has {len(answer.tokens):,} tokens and {len(answer.text):,} characters, "
            f"and {asked:,} tokens were asked for"
        )
    if None not in (answer.model, caps.answers_as) and answer.model != caps.answers_as:
        raise EndpointError(f"{answer.model} answered, others were answered by {caps.answers_as}")
    return answer


def _by_steps(client: Client, caps: Capabilities, asked: Asked) -> ServerAnswer:
    """As if the prompt had been scored: nothing of the prompt itself, then each given token."""
    prompt, scored = list(asked.ids or ()), []
    for place, token in enumerate(asked.forced):
        whole = [*prompt, *asked.forced[:place]]
        question = replace(asked.free, ids=whole, num_tokens=1, again=place > 0,
                           extras=caps.extras)  # fmt: skip
        answer = _post(client, caps, question)
        if answer.num_prompt not in (None, len(whole)):
            raise EndpointError(
                f"the server read {answer.num_prompt} tokens, and {len(whole)} were given"
            )
        scored.append(_on_list(token, answer.tokens))
    whole = [*prompt, *asked.forced]
    return ServerAnswer(
        prompt=[*(Token(id_, None, None) for id_ in prompt), *scored], prompt_ids=whole
    )


def _on_list(token: int, told: Sequence[Token]) -> Token:
    """The token as the list at its place has it; one without an answer there was its end."""
    first = told[0] if told else Token(None, None, None)
    known = next((entry for entry in (first, *first.top) if entry.id == token), None)
    if known is None:
        return Token(token, None, None)
    return Token(token, known.text, known.logprob, first.top)

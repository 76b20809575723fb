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
from divergence.endpoints.protocols import PROTOCOLS, Answer, Question, Token
from divergence.endpoints.questions import Asked
from divergence.errors import EndpointError

__all__ = ["ask"]


def ask(client: Client, found: Capabilities, asked: Asked) -> Answer:
    """What the server says to one prompt. Raises EndpointError."""
    if asked.forced and found.forces == STEPS:
        return _by_steps(client, found, asked)
    extras = found.extras
    if asked.forced and found.forces == "echo":
        extras = frozenset(("echo", "few_logprobs"))
    num_tokens = 1 if asked.forced else asked.question.num_tokens
    question = replace(asked.question, extras=extras, num_tokens=num_tokens)
    answer = _post(client, found, question)
    if found.tokenizes and answer.prompt_ids is None and question.ids is None:
        ids = tokens_of(client, found.tokenizes, replace(question, model=found.model))
        if ids and answer.num_prompt in (None, len(ids)):  # else the route renders otherwise
            return replace(answer, prompt_ids=ids)
    return answer


def _post(client: Client, found: Capabilities, question: Question) -> Answer:
    protocol = PROTOCOLS[found.protocol]
    body = protocol.request(replace(question, model=found.model))
    return protocol.answer(client.post(protocol.path, body))


def _by_steps(client: Client, found: Capabilities, asked: Asked) -> Answer:
    """As if the prompt had been scored: nothing of the prompt itself, then each given token."""
    prompt, scored = list(asked.ids or ()), []
    for place, token in enumerate(asked.forced):
        whole = [*prompt, *asked.forced[:place]]
        question = replace(asked.free, ids=whole, num_tokens=1, again=place > 0,
                           extras=found.extras)  # fmt: skip
        answer = _post(client, found, question)
        if answer.num_prompt not in (None, len(whole)):
            raise EndpointError(
                f"the server read {answer.num_prompt} tokens, and {len(whole)} were given"
            )
        scored.append(_on_list(token, answer.tokens))
    whole = [*prompt, *asked.forced]
    return Answer(prompt=[*(Token(one, None, None) for one in prompt), *scored], prompt_ids=whole)


def _on_list(token: int, told: Sequence[Token]) -> Token:
    """The token as the list at its place has it; one without an answer there was its end."""
    first = told[0] if told else Token(None, None, None)
    known = next((one for one in (first, *first.top) if one.id == token), None)
    if known is None:
        return Token(token, None, None)
    return Token(token, known.text, known.logprob, first.top)

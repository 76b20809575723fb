"""A server is asked for scores of texts: what, how, and what it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from divergence.domains.logprobs.endpoints.capabilities import STEPS, Capabilities, tokens_of
from divergence.domains.logprobs.endpoints.client import Client
from divergence.domains.logprobs.endpoints.protocols import PROTOCOLS, Question
from divergence.domains.logprobs.options import ServerOptions
from divergence.errors import EndpointError, UsageError
from divergence.options.commands import CaptureOptions
from divergence.options.option import given_fields, group_of
from divergence.recording.prompts import collect_prompts
from divergence.run.answers import ServerAnswer, Token, Vocabulary, scores_from
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT, DRAWN, Scores
from divergence.words import first_apart

# What is asked of a server: the user's prompts, or those of a run with its answers.

_TAKEN = (
    "endpoint top_logprobs answers concurrency resume prompts prompts_file chat max_new_tokens "
    "seed label probe"
).split()
_DEFAULT_NEW_TOKENS = 16
_MOST_TOP = 10_000
_MOST_ANSWERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt. ``ids``: its token ids, where it was given as such. ``forced``: the answer that
    is scored, at the end of the question's prompt; ``free``: the question without it."""

    question: Question
    free: Question
    text: str | None = None
    ids: Sequence[int] | None = None
    forced: Sequence[int] = ()


def check_options(options: CaptureOptions) -> None:
    """Raises UsageError for what means nothing to a server."""
    of_server = group_of(ServerOptions, options)
    for field in given_fields(options):
        if field.name not in _TAKEN:
            raise UsageError(
                f"{field.option.names[0]} means nothing to a server: it runs the model by itself",
                hint="--prompt, --prompts, --chat, --max-new-tokens, --seed, --top-logprobs, "
                "--answers, --concurrency, --resume and --label do",
            )
    if not -1 <= of_server.top_logprobs <= _MOST_TOP:
        raise UsageError(f"--top-logprobs {of_server.top_logprobs}", hint="20, or -1 for all")
    if not 0 <= of_server.answers <= _MOST_ANSWERS:
        raise UsageError(f"--answers {of_server.answers}", hint=f"0 to {_MOST_ANSWERS:,}")
    if (options.max_new_tokens or 1) < 1:
        raise UsageError("--max-new-tokens 0: a server answers at least one token")


def asked_of(options: CaptureOptions, like: Run | None) -> list[Asked]:
    """List what is asked, in order. Raises UsageError or PromptError."""
    of_server = group_of(ServerOptions, options)
    seed, top, num_answers = options.seed or 0, of_server.top_logprobs, of_server.answers
    if like is not None:
        if options.prompts or options.prompts_file or options.chat or num_answers:
            raise UsageError(
                "--like asks the recorded prompts again, and scores their answers",
                hint="leave out --prompt(s), --chat and --answers",
            )
        return _recorded(like, options, seed, top)
    count = options.max_new_tokens or _DEFAULT_NEW_TOKENS
    asked = []
    for prompt in collect_prompts(options.prompts, options.prompts_file):
        text, messages = prompt.text, None
        if prompt.messages is not None:
            turns = [(message.role, message.content) for message in prompt.messages]
            messages = [{"role": role, "content": content} for role, content in turns]
            text = "\n".join(f"{role}: {content}" for role, content in turns)
        elif options.chat:
            if text is None:
                raise UsageError("--chat needs texts, and a prompt is token ids")
            messages = [{"role": "user", "content": text}]
        question = Question(
            model="",
            text=prompt.text,
            ids=prompt.input_ids,
            messages=messages,
            num_tokens=count,
            seed=seed,
            top=top,
        )
        answers = [question]
        if num_answers:  # each with a seed of its own; else the greedy one
            seeds = range(seed, seed + num_answers)
            answers = [replace(question, temperature=1.0, seed=number) for number in seeds]
        for answer in answers:
            asked.append(Asked(question=answer, free=answer, text=text, ids=prompt.input_ids))
    kinds = {request.question.messages is not None for request in asked}
    if len(kinds) > 1:
        raise UsageError("some prompts are conversations and some are not", hint="--chat")
    return asked


def _recorded(like: Run, options: CaptureOptions, seed: int, top: int) -> list[Asked]:
    """The prompts of a run, each with its answer behind."""
    engine = like.manifest.engine
    if engine is not None and engine.facts.get("token ids") == BY_TEXT:
        raise UsageError(
            f"{like.path} tells tokens by text alone: they cannot be given to a server",
            hint="capture without --like, from the same prompts",
        )
    count = options.max_new_tokens or max(like.manifest.settings.max_new_tokens, 1)
    drawn = engine is not None and engine.facts.get("tokens") == DRAWN
    again: Counter[tuple[int, ...]] = Counter()
    asked = []
    for number, sample in enumerate(like.manifest.tokens.samples):
        if not sample.prompt_ids:
            raise UsageError(
                f"{like.path} does not tell the tokens of prompt {number}",
                hint="capture without --like, from the same prompts",
            )
        answer = sample.answer_ids[:count]
        given = tuple(sample.prompt_ids)
        free = Question(
            model="",
            ids=given,
            num_tokens=count,
            seed=seed + again[given] * drawn,
            top=top,
            temperature=float(drawn),
        )
        again[given] += 1
        ids = [*sample.prompt_ids, *answer]
        whole = replace(free, ids=ids, num_tokens=1, seed=seed, temperature=0.0)
        question, ids = whole if answer else free, sample.prompt_ids
        asked.append(Asked(question=question, free=free, text=sample.text, ids=ids, forced=answer))
    if not asked:
        raise UsageError(f"{like.path} has no prompts")
    return asked


# One prompt asked: its answer, or the scores of an answer that it is given.
#
# A recorded answer is scored as a prompt where the server scores prompts. Where it does not, but
# takes token ids, each of its tokens is asked for alone, behind the prompt and the tokens before
# it: its log-probability is then the one on the list of that place, and unknown where the list
# lacks it.

_MORE, _LONGEST = 64, 1_000
"""Tokens beyond those that were asked for, and characters of a token, that no answer has."""


def ask(client: Client, caps: Capabilities, asked: Asked) -> ServerAnswer:
    """Return what the server says to one prompt. Raises EndpointError."""
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
    """Score as if the prompt had been scored: nothing of itself, then each given token."""
    prompt, scored = list(asked.ids or ()), []
    for place, token in enumerate(asked.forced):
        whole = [*prompt, *asked.forced[:place]]
        question = replace(asked.free, ids=whole, num_tokens=1, again=place > 0, extras=caps.extras)
        answer = _post(client, caps, question)
        if answer.num_prompt not in (None, len(whole)):
            raise EndpointError(
                f"the server read {answer.num_prompt} tokens, and {len(whole)} were given"
            )
        # the token as the list at its place has it; one without an answer there was its end
        first = answer.tokens[0] if answer.tokens else Token(None, None, None)
        entry_of = next((entry for entry in (first, *first.top) if entry.id == token), None)
        if entry_of is None:
            scored.append(Token(token, None, None))
        else:
            scored.append(Token(token, entry_of.text, entry_of.logprob, first.top))
    whole = [*prompt, *asked.forced]
    return ServerAnswer(
        prompt=[*(Token(id_, None, None) for id_ in prompt), *scored], prompt_ids=whole
    )


def scores_of(
    answer: ServerAnswer, asked: Asked, caps: Capabilities, vocabulary: Vocabulary
) -> Scores:
    """Raises EndpointError where the answer is not what was asked."""
    if asked.forced:  # the scores of a prompt at whose end the answer stands
        whole = [*(asked.ids or ()), *asked.forced]
        scored = answer.tokens[: len(whole)] if caps.forces == "echo" else answer.prompt
        if len(scored) != len(whole):
            raise EndpointError(f"{len(scored)} tokens were scored, and {len(whole)} were given")
        scored_ids = [token.id for token in scored if token.id is not None]
        complete = scored_ids if len(scored_ids) == len(scored) else None
        _check_prompt(answer.prompt_ids or complete, whole)
        named = [Token(id_, t.text, t.logprob, t.top) for id_, t in zip(whole, scored, strict=True)]
        return scores_from(
            list(asked.ids or ()), list(asked.forced), list(enumerate(named)), vocabulary
        )
    if caps.logprobs and not answer.has_logprobs and answer.tokens:
        raise EndpointError("the answer has no log-probabilities, as others have")
    if not answer.tokens and caps.logprobs:
        raise EndpointError("the answer has no tokens")
    tokens = answer.tokens or [Token(None, char, None) for char in answer.text]
    ids = [vocabulary.id_of(token) for token in tokens]
    if None in ids:
        raise EndpointError("the answer has a token without an id, as others have")
    prompt = [] if not caps.token_ids else list(answer.prompt_ids or asked.ids or ())
    _check_prompt(answer.prompt_ids, asked.ids)
    rows = list(enumerate(answer.prompt)) if prompt and len(answer.prompt) == len(prompt) else []
    rows += [(len(prompt) + n, token) for n, token in enumerate(tokens)]
    return scores_from(prompt, [id_ for id_ in ids if id_ is not None], rows, vocabulary)


def _check_prompt(ids: Sequence[int] | None, given: Sequence[int] | None) -> None:
    if ids is not None and given is not None and list(ids) != list(given):
        at = first_apart(ids, given)
        raise EndpointError(
            f"the server read other tokens than were given: from token {at} on "
            f"{list(ids[at : at + 4])} instead of {list(given[at : at + 4])}"
        )

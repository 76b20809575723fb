"""What is asked of a server: the user's prompts, or those of a run with its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from divergence.endpoints.protocols import Question
from divergence.errors import UsageError
from divergence.options.commands import CaptureOptions, given_fields
from divergence.recording.prompts import Prompt, collect_prompts
from divergence.run.reader import Run
from divergence.run.scores import BY_TEXT, DRAWN

__all__ = ["Asked", "asked_of", "check_options"]

_TAKEN = {
    "endpoint", "top_logprobs", "answers", "concurrency", "resume", "prompts", "prompts_file",
    "chat", "max_new_tokens", "seed", "label", "probe",
}  # fmt: skip
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
    for field in given_fields(options):
        if field.name not in _TAKEN:
            raise UsageError(
                f"{field.option.names[0]} means nothing to a server: it runs the model by itself",
                hint="--prompt, --prompts, --chat, --max-new-tokens, --seed, --top-logprobs, "
                "--answers, --concurrency, --resume and --label do",
            )
    if not -1 <= options.top_logprobs <= _MOST_TOP:
        raise UsageError(f"--top-logprobs {options.top_logprobs}", hint="20, or -1 for all")
    if not 0 <= options.answers <= _MOST_ANSWERS:
        raise UsageError(f"--answers {options.answers}", hint=f"0 to {_MOST_ANSWERS:,}")
    if (options.max_new_tokens or 1) < 1:
        raise UsageError("--max-new-tokens 0: a server answers at least one token")


def asked_of(options: CaptureOptions, like: Run | None) -> list[Asked]:
    """In order. Raises UsageError or PromptError."""
    seed, top = options.seed or 0, options.top_logprobs
    if like is not None:
        if options.prompts or options.prompts_file or options.chat or options.answers:
            raise UsageError("--like asks the recorded prompts again, and scores their answers",
                             hint="leave out --prompt(s), --chat and --answers")  # fmt: skip
        return _recorded(like, options, seed, top)
    count = options.max_new_tokens or _DEFAULT_NEW_TOKENS
    asked = []
    for prompt in collect_prompts(options.prompts, options.prompts_file):
        question = Question(
            model="", text=prompt.text, ids=prompt.input_ids, messages=_messages(prompt, options),
            num_tokens=count, seed=seed, top=top,
        )  # fmt: skip
        text = prompt.text
        if prompt.messages is not None:
            text = "\n".join(f"{message.role}: {message.content}" for message in prompt.messages)
        for answer in _drawn(question, options.answers):
            asked.append(Asked(question=answer, free=answer, text=text, ids=prompt.input_ids))
    kinds = {request.question.messages is not None for request in asked}
    if len(kinds) > 1:
        raise UsageError("some prompts are conversations and some are not", hint="--chat")
    return asked


def _drawn(question: Question, answers: int) -> list[Question]:
    """Each with a seed of its own; the greedy one where none is drawn."""
    if not answers:
        return [question]
    return [replace(question, temperature=1.0, seed=question.seed + n) for n in range(answers)]


def _messages(prompt: Prompt, options: CaptureOptions) -> list[dict[str, str]] | None:
    if prompt.messages is not None:
        return [{"role": message.role, "content": message.content} for message in prompt.messages]
    if not options.chat:
        return None
    if prompt.text is None:
        raise UsageError("--chat needs texts, and a prompt is token ids")
    return [{"role": "user", "content": prompt.text}]


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
            raise UsageError(f"{like.path} does not tell the tokens of prompt {number}",
                             hint="capture without --like, from the same prompts")  # fmt: skip
        fed, chosen = sample.generated_ids, sample.chosen_ids
        answer = [*fed, *(chosen[len(fed) :] if chosen[: len(fed)] == fed else ())][:count]
        given = tuple(sample.prompt_ids)
        free = Question(
            model="", ids=given, num_tokens=count, seed=seed + again[given] * drawn, top=top,
            temperature=float(drawn),
        )  # fmt: skip
        again[given] += 1
        ids = [*sample.prompt_ids, *answer]
        whole = replace(free, ids=ids, num_tokens=1, seed=seed, temperature=0.0)
        asked.append(Asked(
            question=whole if answer else free, free=free, text=sample.text,
            ids=sample.prompt_ids, forced=answer,
        ))  # fmt: skip
    if not asked:
        raise UsageError(f"{like.path} has no prompts")
    return asked

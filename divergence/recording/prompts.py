"""Prompts as a user gives them (text, chat messages or token ids), and their token ids.

Three file kinds: ``.txt`` (one prompt a line; blank lines skipped), ``.jsonl``
(one object a line with ``text``, ``messages`` or ``input_ids``), and ``.json``
(a list of such objects). Prompts are tokenized once; afterwards only the ids travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec.structs import replace

from divergence.errors import PromptError, UsageError
from divergence.outside import MAX_LINE_BYTES, json_value, opened, read_bytes
from divergence.recording.training.labels import Label, check_labels, labels_of, text_lines
from divergence.run.schema.layout import expanded
from divergence.run.schema.manifest import SampleTokens

if TYPE_CHECKING:
    from divergence.options.capture import CaptureOptions
    from divergence.run.reader import Run

__all__ = ["Message", "Prompt", "collect_prompts", "group_samples", "padded_right_alone",
           "token_texts", "tokenize"]  # fmt: skip

_DEFAULT_PROMPTS = (
    "The quick brown fox jumps over the lazy dog. In numerical analysis, rounding error is",
)
"""Used when none is given: enough tokens that every position of a block is exercised."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt. Exactly one of the first three fields is set."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    input_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None
    labels: tuple[Label, ...] | None = None
    """Of a training step, beside the prompt's tokens: -100 for one without."""
    completion_from: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """In place of ``labels``: tokens before this one have none, the others are their own."""

    def __post_init__(self) -> None:
        given = [self.text, self.messages, self.input_ids]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of text, messages, input_ids")
        if any(value is not None and len(value) == 0 for value in given):
            raise ValueError("the prompt is empty")
        if self.labels is not None and self.completion_from is not None:
            raise ValueError("give labels or completion_from, not both")

    @property
    def labelled(self) -> bool:
        return self.labels is not None or self.completion_from is not None


def collect_prompts(
    prompts: Sequence[str | Prompt], prompts_file: str | Path | None, *, train: bool = False
) -> list[Prompt]:
    """Prompts from the command line and a file, in that order; the default if there are none.
    Raises PromptError; also for prompts with labels where nothing is to ``train``."""
    collected = []
    for number, text in enumerate(prompts, 1):
        if isinstance(text, Prompt):
            collected.append(text)
            continue
        if not text:
            raise PromptError(
                f"--prompt number {number} is empty", hint="leave it out for the default prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # an argument in another encoding
            raise PromptError(
                f"--prompt number {number} is not UTF-8 text",
                hint="put it into a file in UTF-8: --prompts FILE",
            ) from error
        collected.append(Prompt(text=text))
    if prompts_file is not None:
        collected += _read_prompts(prompts_file)
    for number, prompt in enumerate(collected):
        if prompt.labelled and not train:
            raise PromptError(f"prompt {number} has labels", hint="labels are for --train")
    return collected or [Prompt(text=text) for text in _DEFAULT_PROMPTS]


def _read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file. Raises PromptError naming file and line."""
    path = expanded(path)
    hint = "a prompts file is .txt (a prompt a line) or .jsonl with text, messages or input_ids"
    suffix = path.suffix.lower()
    if suffix == ".txt":
        prompts = [Prompt(text=line) for _, line in text_lines(path, hint)]
    elif suffix == ".jsonl":
        prompts = [_parse(line, where) for where, line in text_lines(path, hint)]
    elif suffix == ".json":
        data = read_bytes(path, most=MAX_LINE_BYTES, error=PromptError, hint=hint)
        content = json_value(data, where=str(path), error=PromptError, hint=hint)
        try:
            prompts = msgspec.convert(content, list[Prompt])
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"not a list of prompts: {error}", where=str(path), hint=hint
            ) from error
    else:
        opened(path, error=PromptError, hint=hint).close()  # what is no file is no kind of one
        raise PromptError(f"{path} has an unknown kind {suffix or '(no suffix)'}", hint=hint)
    if not prompts:
        raise PromptError(f"{path} holds no prompts", hint=hint)
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        return msgspec.json.decode(line, type=Prompt)
    except (ValueError, RecursionError) as error:
        raise PromptError(
            f"not a prompt: {error}",
            where=where,
            hint='for example {"text": "..."}, {"messages": [{"role": "user", "content": "..."}]} '
            'or {"input_ids": [1, 2, 3]}',
        ) from error


def tokenize(prompts: Sequence[Prompt], tokenizer: Any, *, chat: bool) -> list[SampleTokens]:
    """Render and encode each prompt. Raises PromptError (no tokenizer, no template, no tokens)."""
    samples = [_tokenize(prompt, tokenizer, chat, number) for number, prompt in enumerate(prompts)]
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        sample.labels = labels_of(prompt.labels, prompt.completion_from, sample.prompt_ids, number)
    check_labels(samples)
    return samples


def group_samples(
    samples: list[SampleTokens],
    *,
    batch: bool,
    pad_left: bool,
    batches: str | None = None,
    more_left: int = 0,
    more_right: int = 0,
) -> list[list[int]]:
    """One group a sample, or one for all, or those of ``batches``. The padding is noted in the
    samples: what a batch needs, on the left if ``pad_left``, and ``more_left`` and ``more_right``.

    Raises UsageError for ``batches`` that do not hold each sample once.
    """
    if batches is not None:
        groups = _groups(batches, len(samples))
    elif batch:
        groups = [list(range(len(samples)))]
    else:
        groups = [[number] for number in range(len(samples))]
    for group in groups:
        members = [samples[number] for number in group]
        longest = max(len(sample.prompt_ids) for sample in members)
        for sample in members:
            pads = longest - len(sample.prompt_ids)
            sample.num_left_pad, sample.num_right_pad = (pads, 0) if pad_left else (0, pads)
            sample.num_left_pad += more_left
            sample.num_right_pad += more_right
    return groups


def padded_right_alone(options: CaptureOptions, like: Run | None) -> CaptureOptions:
    """Behind pads nothing goes on: of a causal language model the prefill is made alone."""
    if not options.pad_right:
        return options
    if like is None or options.pad_left:
        raise UsageError(
            "--pad-right needs --like" if like is None
            else "--pad-left and --pad-right both place the pads",
            hint="divergence capture --like RUN -o OTHER --pad-right 8",
        )  # fmt: skip
    plan, settings = like.manifest.plan, like.manifest.settings
    if options.positions or plan.positions:
        raise UsageError("--pad-right: --positions count from the pads' end", hint="leave it out")
    if like.manifest.model.task != "causal-lm":
        return options
    if options.prefill_chunk or settings.prefill_chunk:
        raise UsageError("--pad-right: a prompt in chunks (--prefill-chunk) has no pads behind it")
    if (options.max_new_tokens or 0) > 1:
        raise UsageError(
            f"--max-new-tokens {options.max_new_tokens}: no token follows the pads of --pad-right",
            hint="leave it out, or --pad-left",
        )
    num = settings.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    return replace(options, max_new_tokens=min(num, 1))


def _groups(batches: str, num_samples: int) -> list[list[int]]:
    """``0,1 2,3`` as lists."""
    parts = [part.split(",") for part in batches.split()]
    if all(number.isdecimal() for part in parts for number in part):
        groups = [[int(number) for number in part] for part in parts]
        if sorted(number for group in groups for number in group) == list(range(num_samples)):
            return groups
    raise UsageError(
        f"--batches {batches!r} does not hold each of the prompts 0 to {num_samples - 1} once",
        hint="batches are divided by blanks and prompts by commas, for example '0,1 2,3'",
    )


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[str, str]:
    """Text of single tokens; the raw vocabulary entry where a token alone is no valid text."""
    if tokenizer is None:
        return {}
    texts = {}
    for token in sorted(set(ids)):
        try:
            text = tokenizer.decode([token])
            if not text or "\ufffd" in text:
                text = tokenizer.convert_ids_to_tokens(token)
        except Exception:  # an id beyond the tokenizer's own vocabulary, library by library
            continue
        if text is not None:  # the same
            texts[str(token)] = str(text)
    return texts


def _tokenize(prompt: Prompt, tokenizer: Any, chat: bool, number: int) -> SampleTokens:
    if prompt.input_ids is not None:
        return SampleTokens(prompt_ids=list(prompt.input_ids))
    if tokenizer is None:
        raise PromptError(
            f"prompt {number} is text, but the model has no usable tokenizer",
            hint='give token ids: --prompts FILE.jsonl with {"input_ids": [...]}',
        )
    text, messages = prompt.text, prompt.messages
    if chat and messages is None:
        messages = (Message(role="user", content=text or ""),)
    if messages is not None:
        text = _render(tokenizer, [msgspec.structs.asdict(message) for message in messages], number)
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt {number} holds half of a character, which no tokenizer takes",
            hint="write the whole character, or its two halves behind each other",
        ) from error
    ids = list(tokenizer(text, add_special_tokens=messages is None)["input_ids"])
    if not ids:
        raise PromptError(f"prompt {number} has no tokens: {text!r}")
    return SampleTokens(text=text, prompt_ids=ids)


def _render(tokenizer: Any, conversation: list[dict[str, str]], number: int) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError(
            f"prompt {number} is a chat, but the tokenizer has no chat template",
            hint="give plain text, or a model with a chat template",
        )
    try:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        return text
    except ImportError as error:
        raise PromptError(
            "chat templates need the jinja2 package", hint="pip install jinja2"
        ) from error
    except Exception as error:  # templates raise errors of their own
        raise PromptError(f"prompt {number}: the chat template failed: {error}") from error

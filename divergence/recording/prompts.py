"""Prompts as a user gives them, and their tokens."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from divergence.errors import PromptError, UsageError
from divergence.outside import MAX_LINE_BYTES, json_value, opened, read_bytes
from divergence.run.manifest import NO_LABEL, SampleTokens
from divergence.run.record import expanded

MAX_PROMPTS = 1_000_000
Label = Annotated[int, msgspec.Meta(ge=NO_LABEL, le=2**63 - 1)]


def text_lines(path: Path, hint: str) -> Iterator[tuple[str, str]]:
    """(where it stands, text without its end) of each line of a file of prompts or labels that is
    not blank. Raises PromptError."""
    data = io.BytesIO(read_bytes(path, most=MAX_LINE_BYTES, error=PromptError, hint=hint))
    num = 0
    # of bytes, since text would also be split at U+2028 and its like, which JSON has in strings
    for number, line in enumerate(data, 1):
        try:
            text = line.decode("utf-8" if number > 1 else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise PromptError(f"{path} is not UTF-8 text: {error.reason}", hint=hint) from error
        if text.strip():
            num += 1
            if num > MAX_PROMPTS:
                raise PromptError(f"the file holds more than {MAX_PROMPTS:,}", where=str(path))
            yield f"{path}, line {number}", text.removesuffix("\n").removesuffix("\r")


def decoded(line: str | bytes, type_: Any, what: str, where: str, hint: str) -> Any:
    """A line of a file of prompts or labels, as ``type_``. Raises PromptError."""
    try:
        return msgspec.json.decode(line, type=type_)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not {what}: {error}", where=where, hint=hint) from error


def check_labels(samples: Sequence[SampleTokens], vocab: int | None = None) -> None:
    """Raise PromptError for labels that are not as many as tokens, that are no token ids (below
    ``vocab``, where it is known), and for a prompt that has none."""
    for number, sample in enumerate(samples):
        labels, count = sample.labels, len(sample.prompt_ids)
        if labels is None:
            continue
        if len(labels) != count:
            raise PromptError(
                f"prompt {number} has {count} tokens and {len(labels)} labels",
                hint=f"a label for each token, {NO_LABEL} where it has none",
            )
        used = [label for label in labels[1:] if label != NO_LABEL]
        if not used:
            raise PromptError(
                f"prompt {number}: no token has a label (the first token's is never used)",
                hint="leave the prompt out",
            )
        bad = [label for label in used if label < 0 or (vocab is not None and label >= vocab)]
        if bad:
            of = "" if vocab is None else f" of the model's vocabulary of {vocab}"
            raise PromptError(
                f"prompt {number}: label {bad[0]} is no token id{of}",
                hint=f"{NO_LABEL} says that a token has no label",
            )


# Prompts as a user gives them (text, chat messages or token ids), and their token ids.
#
# Three file kinds: ``.txt`` (one prompt a line; blank lines skipped), ``.jsonl``
# (one object a line with ``text``, ``messages`` or ``input_ids``, or that value alone), and
# ``.json`` (a list of such). Prompts are tokenized once; afterwards only the ids travel.

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
    images: tuple[str, ...] = ()
    """Files of pictures, from the prompts file's folder on."""
    audio: tuple[str, ...] = ()
    """Files of sound."""

    def __post_init__(self) -> None:
        given = [self.text, self.messages, self.input_ids]
        if sum(value is not None for value in given) != 1 and not (self.media and not any(given)):
            raise ValueError("give exactly one of text, messages, input_ids")
        if self.media and self.input_ids is not None:
            raise ValueError("images and audio stand beside text or messages")
        if any(value is not None and len(value) == 0 for value in given):
            raise ValueError("the prompt is empty")
        if self.labels is not None and self.completion_from is not None:
            raise ValueError("give labels or completion_from, not both")

    @property
    def labelled(self) -> bool:
        return self.labels is not None or self.completion_from is not None

    @property
    def media(self) -> bool:
        """Does it name pictures or sound?"""
        return bool(self.images or self.audio)

    @property
    def conversation(self) -> tuple[Message, ...]:
        return self.messages or (Message(role="user", content=self.text or ""),)


def collect_prompts(
    prompts: Sequence[str | Prompt],
    prompts_file: str | Path | None,
    *,
    labelled: bool = False,
    media: bool = False,
) -> list[Prompt]:
    """Prompts from the command line and a file, in that order; the default if there are none.
    Raises PromptError; also for prompts with labels, where none may be ``labelled``, and with
    pictures or sound where nothing reads ``media``."""
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
        if prompt.labelled and not labelled:
            raise PromptError(f"prompt {number} has labels", hint="labels are for --train")
        if prompt.media and not media:
            raise PromptError(
                f"prompt {number} has pictures or sound, which are not read here",
                hint="divergence capture MODEL --prompts FILE reads them",
            )
    return collected or [Prompt(text=text) for text in _DEFAULT_PROMPTS]


_PROMPT_HINT = (
    'for example {"text": "..."}, {"messages": [{"role": "user", "content": "..."}]} or '
    '{"input_ids": [1, 2, 3]}'
)


def _read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file. Raises PromptError naming file and line."""
    path = expanded(path)
    hint = (
        "a prompts file is .txt (a prompt a line), .jsonl with text, messages or input_ids, or "
        ".json with a list of them"
    )
    suffix = path.suffix.lower()
    values: list[tuple[str, Any]]
    if suffix == ".txt":
        values = list(text_lines(path, hint))
    elif suffix == ".jsonl":
        values = [
            (where, decoded(line, Any, "a prompt", where, _PROMPT_HINT))
            for where, line in text_lines(path, hint)
        ]
    elif suffix == ".json":
        data = read_bytes(path, most=MAX_LINE_BYTES, error=PromptError, hint=hint)
        content = json_value(data, where=str(path), error=PromptError, hint=hint)
        if not isinstance(content, list):
            raise PromptError("not a list of prompts", where=str(path), hint=hint)
        values = [(f"{path}, prompt {number}", value) for number, value in enumerate(content)]
    else:
        opened(path, error=PromptError, hint=hint).close()  # what is no file is no kind of one
        raise PromptError(f"{path} has an unknown kind {suffix or '(no suffix)'}", hint=hint)
    prompts = []
    for where, value in values:
        if isinstance(value, str):
            value = {"text": value}
        elif isinstance(value, list):
            value = {"messages" if value and isinstance(value[0], dict) else "input_ids": value}
        try:
            prompts.append(msgspec.convert(value, Prompt))
        except (ValueError, RecursionError) as error:
            raise PromptError(f"not a prompt: {error}", where=where, hint=_PROMPT_HINT) from error
    if not prompts:
        raise PromptError(f"{path} holds no prompts", hint=hint)
    return [
        msgspec.structs.replace(
            prompt,
            images=tuple(str(path.parent / expanded(name)) for name in prompt.images),
            audio=tuple(str(path.parent / expanded(name)) for name in prompt.audio),
        )
        for prompt in prompts
    ]


def tokenize(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    chat: bool,
    process: Callable[..., SampleTokens] | None = None,
) -> list[SampleTokens]:
    """Render and encode each prompt. Raises PromptError (no tokenizer, no template, no tokens).
    ``process``: does it for prompts with pictures or sound."""
    samples = [
        process(prompt, number, chat=chat)
        if process is not None and prompt.media
        else _tokenize(prompt, tokenizer, chat, number)
        for number, prompt in enumerate(prompts)
    ]
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        ids, first = sample.prompt_ids, prompt.completion_from
        sample.labels = None if prompt.labels is None else list(prompt.labels)
        if first is not None:
            if first >= len(ids):
                raise PromptError(
                    f"prompt {number} has {len(ids)} tokens, and its completion is to begin at "
                    f"token {first}",
                    hint=f"the first is 0, so at most {len(ids) - 1}",
                )
            sample.labels = [NO_LABEL] * first + list(ids[first:])
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
    Raises UsageError for ``batches`` that do not hold each sample once."""
    if batches is not None:
        parts = [part.split(",") for part in batches.split()]
        groups = []
        if all(number.isdecimal() for part in parts for number in part):
            groups = [[int(number) for number in part] for part in parts]
        if sorted(number for group in groups for number in group) != list(range(len(samples))):
            raise UsageError(
                f"--batches {batches!r} does not hold each of the prompts 0 to "
                f"{len(samples) - 1} once",
                hint="batches are divided by blanks and prompts by commas, for example '0,1 2,3'",
            )
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
    text, messages = prompt.text, prompt.conversation if chat else prompt.messages
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

"""Prompts as a user gives them: text, chat messages, or token ids.

Three file kinds: ``.txt`` (one prompt a line; blank lines skipped), ``.jsonl``
(one object a line with ``text``, ``messages`` or ``input_ids``), and ``.json``
(a list of such objects).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from divergence.errors import PromptError
from divergence.run.schema.layout import expanded

__all__ = ["DEFAULT_PROMPTS", "Message", "Prompt", "collect_prompts", "read_prompts"]

DEFAULT_PROMPTS = (
    "The quick brown fox jumps over the lazy dog. In numerical analysis, rounding error is",
)
"""Used when none is given: enough tokens that every position of a block is exercised."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt. Exactly one of the three fields is set."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    input_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None

    def __post_init__(self) -> None:
        given = [self.text, self.messages, self.input_ids]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of text, messages, input_ids")
        if any(value is not None and len(value) == 0 for value in given):
            raise ValueError("the prompt is empty")


def collect_prompts(
    prompts: Sequence[str | Prompt], prompts_file: str | Path | None
) -> list[Prompt]:
    """Prompts from the command line and a file, in that order; the default if there are none."""
    found = []
    for number, text in enumerate(prompts, 1):
        if isinstance(text, Prompt):
            found.append(text)
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
        found.append(Prompt(text=text))
    if prompts_file is not None:
        found += read_prompts(prompts_file)
    return found or [Prompt(text=text) for text in DEFAULT_PROMPTS]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts file. Raises PromptError naming file and line."""
    path = expanded(path)
    hint = "a prompts file is .txt (a prompt a line) or .jsonl with text, messages or input_ids"
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: {error.reason}", hint=hint) from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    # Not splitlines(): that also splits at U+2028 and its like, which JSON has inside strings.
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    suffix = path.suffix.lower()
    if suffix == ".txt":
        prompts = [Prompt(text=line) for line in lines if line.strip()]
    elif suffix == ".jsonl":
        prompts = [
            _parse(line, f"{path}, line {number}")
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    elif suffix == ".json":
        try:
            prompts = msgspec.json.decode(content, type=list[Prompt])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"not a list of prompts: {error}", where=str(path), hint=hint
            ) from error
    else:
        raise PromptError(f"{path} has an unknown kind {suffix or '(no suffix)'}", hint=hint)
    if not prompts:
        raise PromptError(f"{path} holds no prompts", hint=hint)
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        return msgspec.json.decode(line, type=Prompt)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"not a prompt: {error}",
            where=where,
            hint='for example {"text": "..."}, {"messages": [{"role": "user", "content": "..."}]} '
            'or {"input_ids": [1, 2, 3]}',
        ) from error

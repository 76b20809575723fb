"""Commands as the tool prints them, to be copied into a shell.

Paths, sites, labels and names come from runs, and a run may come from anyone. So every printed
command is built here: a shell reads each word as one word on one line, whatever it holds, and
`divergence` reads it as a value and not as an option.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

import msgspec

from divergence.facts import Fact, plain, sentence
from divergence.run.storage import Url

Value = str | int | os.PathLike[str] | Url | bool | None | Iterable[object]


JsonValue = Annotated[object, msgspec.Meta(extra_json_schema={"description": "any JSON value"})]
"""What JSON can hold."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command of this tool, as a value: what it is called with, and why."""

    name: str
    operands: list[str] = []
    options: dict[str, JsonValue] = {}
    """As in ``command_words``."""
    ranks: int | None = None
    """As so many processes."""
    pair: list[str] = []
    """An option that takes two values: its flag, and both."""
    note: Fact | None = None
    """Why, or where: a comment of ours, never words of a run."""
    by_hand: bool = False
    """Do commands follow that come to the same by hand?"""

    @property
    def alone(self) -> str:
        """``text`` where no other command follows."""
        return msgspec.structs.replace(self, by_hand=False).text

    @property
    def text(self) -> str:
        """``divergence NAME OPERANDS OPTIONS   # note``, ready for a shell."""
        start = [] if self.ranks is None else ["torchrun", "--nproc-per-node", self.ranks, "-m"]
        options = cast(dict[str, Value], self.options)
        text = quoted_words([*start, *command_words(self.name, *self.operands, **options)])
        if self.pair:
            text += f" {self.pair[0]} {quoted_words(map(_operand, self.pair[1:]))}"
        note = "" if self.note is None else sentence(self.note)
        note = "; ".join(filter(None, (note, "or by hand:" if self.by_hand else "")))
        return f"{text}   # {note}" if note else text

    def with_options(self, **options: Value) -> Command:
        """The command with these options behind its own."""
        return msgspec.structs.replace(self, options=self.options | _plain_options(options))


def command(
    name: str,
    *operands: object,
    ranks: int | None = None,
    note: Fact | str = "",
    by_hand: bool = False,
    pair: tuple[str, object, object] | None = None,
    **options: Value,
) -> Command:
    """The command of this name; options as in ``command_words``."""
    return Command(
        name=name,
        operands=[str(operand) for operand in operands],
        options=_plain_options(options),
        ranks=ranks,
        pair=[str(word) for word in pair or ()],
        by_hand=by_hand,
        note=note if isinstance(note, Fact) else plain(note) if note else None,
    )


def command_line(name: str, *operands: object, **options: Any) -> str:
    """``command`` of the same arguments, ready for a shell."""
    return command(name, *operands, **options).text


def command_words(name: str, *operands: object, **options: Value) -> list[str]:
    """The words of ``divergence NAME OPERANDS OPTIONS``, as a process takes them.

    Options stand in the order given: ``max_new_tokens=3`` is ``--max-new-tokens 3``, ``o="x"`` is
    ``-o x``, ``pass_`` is ``--pass``, True the flag alone, a list the option once for each; None
    and False leave it out.
    """
    words = ["divergence", name, *(_operand(str(word)) for word in operands)]
    for key, value in options.items():
        words += _option(key, value)
    return words


def split_words(line: str) -> list[str]:
    """The words of a command as a shell reads it."""
    return shlex.split(line)


def quoted_words(words: Iterable[object]) -> str:
    """Words that are a command already, as one line."""
    return " ".join(quoted(word) for word in words)


def requoted(text: str) -> str:
    """A command that a run says it was made with, so that it is one command and no other."""
    try:
        return quoted_words(shlex.split(text))
    except ValueError:
        return quoted(text)


def quoted(word: object) -> str:
    """One word of a shell: as it is where that is plain, else in quotes.

    What cannot be printed (newlines, escape codes, marks that turn the direction of writing) goes
    into ``$'...'``, so that a command is one line; no quote stands in it, so that a shell that
    does not know this form reads one word as well.
    """
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _plain_options(options: Mapping[str, Value]) -> dict[str, Any]:
    """The options that say anything, as values that JSON can hold."""
    plain: dict[str, Any] = {}
    for key, value in options.items():
        if value is None or value is False:
            continue
        if isinstance(value, str | int | float):
            plain[key] = value
        elif isinstance(value, os.PathLike | Url):
            plain[key] = str(value)
        else:
            plain[key] = [str(item) for item in value]
    return plain


def _operand(text: str) -> str:
    """A path that begins like an option, as a path."""
    return f"./{text}" if text.startswith("-") else text


def _option(key: str, value: Value) -> list[str]:
    if value is None or value is False:
        return []
    flag = f"-{key}" if len(key) == 1 else f"--{key.rstrip('_').replace('_', '-')}"
    if value is True:
        return [flag]
    if isinstance(value, str | float | int | os.PathLike | Url):
        text = str(value)
        if not text.startswith("-"):
            return [flag, text]
        return [flag, _operand(text)] if len(key) == 1 else [f"{flag}={text}"]
    return [word for item in value for word in _option(key, str(item))]


def _escaped(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file's name that is no UTF-8
        return f"\\x{number - 0xDC00:02x}"
    if character in "'\\!" or number < 0x20 or 0x7F <= number < 0x100:
        return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"
    if character.isprintable():
        return character
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"

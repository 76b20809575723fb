"""Printing lines: coloured in a terminal, plain everywhere else.

Rich only colours. Nothing is read as markup, highlighted or guessed at; what is
piped is neither folded nor cut, and the same report gives the same bytes.
``NO_COLOR`` and ``FORCE_COLOR`` are Rich's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from divergence.layout.lines import MAX_WIDTH, Line, Span, fold
from divergence.words import printable

__all__ = ["print_lines", "write_text"]

_ASCII = str.maketrans(
    {"…": "~", "█": "#", "×": "x", "Δ": "d", "→": "->", "‖": "|", "–": "-", "—": "-"}
)


def print_lines(lines: Iterable[Line], *, file: TextIO | None = None) -> None:
    """Print composed lines to ``file`` (stdout)."""
    file = sys.stdout if file is None else file
    lines = [item._replace(spans=tuple(map(_printable, item.spans))) for item in lines]
    terminal = file.isatty()
    if not terminal and not _forced():
        write_text("".join(f"{item.text}\n" for item in lines), file=file)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = min(console.width, MAX_WIDTH) if terminal else None
    with console.capture() as capture:
        for item in lines:
            for piece in fold(item, width) if width else [item]:
                text = Text()
                for span in piece.spans:
                    text.append(span.text, style=span.style)
                text.rstrip()
                console.print(text, soft_wrap=True)
    write_text(capture.get(), file=file)


def _printable(span: Span) -> Span:
    return span._replace(text=printable(span.text))


def _forced() -> bool:
    return bool(os.environ.get("FORCE_COLOR"))


def write_text(text: str, *, file: TextIO | None = None) -> None:
    """Write ``text``; a reader that has gone (``| head``) is no reason to fail.

    Where the encoding lacks a character, an ASCII one stands in.
    """
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    try:
        file.write(text)
        file.flush()
    except BrokenPipeError:
        # so that the interpreter's own flush at exit has somewhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())

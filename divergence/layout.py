"""Lines of text with styles, and the printing of them.

A report is composed as plain data and printed at the end, so that the text is the same coloured or
not, in a terminal or in a file. Styles are Rich style names, and Rich only colours: nothing is read
as markup, highlighted or guessed at. Prose is folded for the terminal, in a pipe at MAX_WIDTH;
commands and
numbers stay on one line, nothing is cut, and the same report gives the same bytes. ``NO_COLOR`` and
``FORCE_COLOR`` are Rich's own.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Iterable
from typing import NamedTuple, TextIO

from divergence.words import printable, shortened

MAX_WIDTH = 100


class Span(NamedTuple):
    """A piece of text in one style."""

    text: str
    style: str = ""


class Line(NamedTuple):
    """Spans side by side. ``hang``: prose that may be folded, indented by so many columns
    from the second line on; None for a table row, which is never folded."""

    spans: tuple[Span, ...] = ()
    hang: int | None = None

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans).rstrip()


BLANK = Line()


def line(*parts: str | tuple[str, str]) -> Line:
    """A table row or a heading, of texts and (text, style) pairs."""
    return Line(tuple(Span(part) if isinstance(part, str) else Span(*part) for part in parts))


def prose(label: str, text: str, *, style: str = "", width: int = 12) -> Line:
    """``label`` in a column of its own, then a sentence that may be folded."""
    # here, not only when it is printed: the columns must know how wide a text is
    label, text = printable(label), printable(text)
    label = label.ljust(width)
    if len(label) > width and not label.endswith(" "):
        label += " "  # longer than its column
    return Line((Span(label, "dim"), Span(text, style)), hang=width)


def heading(text: str, detail: str = "") -> Line:
    """The first line of a section."""
    return line((text, "bold"), (f"  {detail}" if detail else "", "dim"))._replace(hang=2)


def next_lines(commands: Iterable[str]) -> list[Line]:
    """Show what to run, where there is anything: commands stand alone, so that they can be
    copied."""
    lines = [line(f"  {command}") for command in commands]
    return [heading("next"), *lines] if lines else []


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns; the end of a path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def fold(item: Line, width: int) -> list[Line]:
    """Prose folded at words into ``width`` columns; anything else as it is."""
    if item.hang is None or len(item.text) <= width or width <= item.hang + 20:
        return [item]
    *lead, last = item.spans
    used = sum(len(span.text) for span in lead)
    alone = width - used < 20  # what goes before leaves no room for a word
    pieces = textwrap.wrap(
        last.text,
        width,
        initial_indent=" " * (item.hang if alone else used),
        subsequent_indent=" " * item.hang,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
    begin, rest = ([], pieces) if alone else ([Span(pieces[0][used:], last.style)], pieces[1:])
    return [Line((*lead, *begin)), *(Line((Span(piece, last.style),)) for piece in rest)]


BAR_WIDTH = 10
RATIO_DECADES = (-1, 3)
"""A ratio's bar spans 0.1 to 1000 floors."""
REL_L2_DECADES = (-8, 0)
"""Without a floor the bar spans a relative difference of 1e-8 to 1."""


def bar(value: float | None, decades: tuple[int, int]) -> str:
    """Filled cells on a logarithmic scale; full for nan and inf, empty for 0 and None."""
    if value is None or value == 0:
        return ""
    low, high = decades
    if not math.isfinite(value):
        share = 1.0
    else:
        share = (math.log10(abs(value)) - low) / (high - low)
    return "█" * round(BAR_WIDTH * min(max(share, 0.0), 1.0))


_ASCII = str.maketrans(
    {"…": "~", "█": "#", "×": "x", "Δ": "d", "→": "->", "‖": "|", "–": "-", "—": "-"}
)


def print_lines(lines: Iterable[Line], *, file: TextIO | None = None, whole: bool = False) -> None:
    """Print composed lines to ``file`` (stdout). ``whole``: a short answer, for a program too: in a
    pipe each stays one line."""
    file = sys.stdout if file is None else file
    lines = [
        item._replace(
            spans=tuple(
                span._replace(text=shortened(printable(span.text), _LONGEST)) for span in item.spans
            )
        )
        for item in lines
    ]
    terminal = file.isatty()
    width = MAX_WIDTH
    if not terminal and not os.environ.get("FORCE_COLOR"):
        folded = (
            piece.text for item in lines for piece in ([item] if whole else fold(item, width))
        )
        write_text("".join(f"{text}\n" for text in folded), file=file)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = min(console.width, MAX_WIDTH) if terminal else MAX_WIDTH
    with console.capture() as capture:
        for item in lines:
            for piece in fold(item, width):
                text = Text()
                for span in piece.spans:
                    text.append(span.text, style=span.style)
                text.rstrip()
                console.print(text, soft_wrap=True)
    write_text(capture.get(), file=file)


_LONGEST = 10_000
"""Characters of a piece of a line: a run may say of itself more than anybody reads."""


def write_text(text: str, *, file: TextIO | None = None) -> None:
    """Write ``text``; a reader that has gone (``| head``) is no reason to fail.

    Where the encoding lacks a character, an ASCII one stands in.
    """
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        if not text.isascii():
            text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    try:
        file.write(text)
        file.flush()
    except BrokenPipeError:
        # so that the interpreter's own flush at exit has somewhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())

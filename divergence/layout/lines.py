"""Lines of text with styles, before anything decides how to print them.

A report is composed as plain data and printed by layout.terminal, so that the
text is the same coloured or not, in a terminal or in a file. Styles are Rich
style names; text is never read as markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from divergence.words import printable

__all__ = [
    "BLANK",
    "MAX_WIDTH",
    "Line",
    "Span",
    "columns",
    "cut",
    "fold",
    "heading",
    "line",
    "prose",
]

MAX_WIDTH = 100


class Span(NamedTuple):
    """A piece of text in one style."""

    text: str
    style: str = ""


class Line(NamedTuple):
    """Spans side by side. ``hang``: prose that a terminal may fold, indented by so many columns
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
    return Line((Span(label.ljust(width), "dim"), Span(text, style)), hang=width)


def heading(text: str, detail: str = "") -> Line:
    """The first line of a section."""
    return line((text, "bold"), (f"  {detail}" if detail else "", "dim"))


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns; the end of a path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def columns(rows: Iterable[tuple[str, ...]], *, indent: int = 2, widest: int = 60) -> list[Line]:
    """Left-aligned columns, each as wide as its widest cell; only the last may be longer."""
    rows = [tuple(map(printable, row)) for row in rows]
    if not rows:
        return []
    widths = [min(max(len(row[i]) for row in rows), widest) for i in range(len(rows[0]) - 1)]
    return [
        line(
            " " * indent
            + "".join(
                cut(cell, size).ljust(size + 2) for cell, size in zip(row[:-1], widths, strict=True)
            )
            + row[-1]
        )
        for row in rows
    ]


def fold(item: Line, width: int) -> list[Line]:
    """Prose folded at words for a terminal of ``width`` columns; anything else as it is."""
    if item.hang is None or len(item.text) <= width or width <= item.hang + 20:
        return [item]
    *lead, last = item.spans
    used = sum(len(span.text) for span in lead)
    pieces = textwrap.wrap(
        last.text, width - used, break_long_words=False, break_on_hyphens=False
    ) or [""]
    first = Line((*lead, Span(pieces[0], last.style)))
    return [first, *(Line((Span(" " * item.hang), Span(p, last.style))) for p in pieces[1:])]

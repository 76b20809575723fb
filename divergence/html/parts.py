"""What pages are made of: sections, tables, facts, commands, names.

An analysis returns Sections (its page.py). A Table is data, since the same one may stand in the
page or be shown by the script when a block is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from divergence.html.element import Element, Node, el, shortened

__all__ = [
    "BlockPart", "Section", "Table", "command", "details", "facts", "name",
    "prose_block", "table",
]  # fmt: skip

_LONGEST = 240
"""Characters of a text that are shown at once; the rest can be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text below titles. ``marks``: of each row ``onset``, ``flagged`` or nothing."""

    caption: str
    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    marks: list[str] = field(default_factory=list)
    num_left: int = 1
    """The first so many columns are words; the others are figures, and stand to the right."""
    note: str = ""
    names: bool = False
    """The first column holds names of the model's parts."""

    def mark(self, number: int) -> str:
        return self.marks[number] if number < len(self.marks) else ""

    def data(self) -> dict[str, Any]:
        """The table for the script (page.js, makeTable)."""
        return {
            "caption": self.caption, "titles": self.titles, "left": self.num_left,
            "rows": [[shortened(cell, _LONGEST) for cell in row] for row in self.rows],
            "marks": self.marks, "note": self.note, "names": self.names,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """What an analysis knows of one block: shown where the block is chosen."""

    block: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a page. ``figures``: what the script needs for each figure of it, by id."""

    id: str
    title: str
    lead: str = ""
    body: tuple[Node, ...] = ()
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    blocks: list[BlockPart] = field(default_factory=list)
    chosen: str | None = None
    """The block to show first."""

    def element(self) -> Element:
        return el(
            "section",
            el("h2", self.title, id=f"{self.id}-title"),
            el("p", self.lead, class_="lead") if self.lead else None,
            *self.body,
            id=self.id, aria_labelledby=f"{self.id}-title",
        )  # fmt: skip


_MARKS = {"onset": "begins here", "flagged": "beyond its limit"}


def table(content: Table) -> Element:
    """A table that scrolls by itself where it is too wide."""
    head = [
        el("th", title, scope="col", class_=None if n < content.num_left else "figure")
        for n, title in enumerate(content.titles)
    ]
    body = []
    for number, row in enumerate(content.rows):
        mark = content.mark(number)
        word = el("span", _MARKS[mark], class_="mark") if mark in _MARKS else None
        cells = [
            el("th", name(row[0]), word, scope="row"),
            *(
                el("td", name(cell), class_=None if n < content.num_left else "figure")
                for n, cell in enumerate(row[1:], 1)
            ),
        ]
        body.append(el("tr", *cells, class_=mark or None))
    grid = el(
        "table", el("caption", content.caption), el("thead", el("tr", *head)), el("tbody", *body),
        class_="names" if content.names else None,
    )  # fmt: skip
    # what scrolls must be reached by keyboard, and so needs a name
    wide = el("div", grid, class_="scroll", tabindex=0, role="group", aria_label=content.caption)
    return el("div", wide, el("p", content.note, class_="note") if content.note else None)


def name(text: str) -> Node:
    """A name of a run: a long one is shortened, and opens."""
    if len(text) <= _LONGEST:
        return text
    return el(
        "details",
        el("summary", shortened(text, _LONGEST // 3)),
        _whole(text),
        class_="long",
    )


def _whole(text: str) -> Element:
    """It scrolls, and so must be reached by keyboard."""
    return el("span", text, class_="whole", tabindex=0, role="group", aria_label="in full")


def prose_block(text: str, *, class_: str | None = None) -> Element:
    """A sentence; one that a long name makes long is shortened, and opens."""
    if len(text) <= 4 * _LONGEST:
        return el("p", text, class_=class_)
    opened = el("details", el("summary", "in full"), _whole(text))
    return el("div", el("p", shortened(text, 2 * _LONGEST)), opened, class_=class_)


def facts(rows: Iterable[tuple[str, Node]], *, class_: str = "facts") -> Element:
    """Names and what they are."""
    pairs = [
        el("div", el("dt", term), el("dd", name(what) if isinstance(what, str) else what))
        for term, what in rows
    ]
    return el("dl", *pairs, class_=class_)


def command(text: str) -> Element:
    """A command, whole, with a button that copies it (shown where the script runs)."""
    words, note, comment = text.partition("   # ")
    code = el("code", words, el("span", note + comment, class_="comment") if note else None)
    button = el("button", "Copy", type="button", class_="copy", hidden=True)
    return el("div", el("pre", code, tabindex=0), button, class_="command")


def details(summary: str, *children: Node, open_: bool = False) -> Element:
    return el("details", el("summary", summary), *children, open=open_, class_="more")

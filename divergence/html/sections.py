"""Sections of a document as elements of a page, and what its script needs of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from divergence.document import (
    Block,
    Figures,
    Section,
    Sentence,
    Strip,
    Strips,
    Table,
    capital,
)
from divergence.html.figures import figure, script
from divergence.html.parts import (
    LONGEST,
    Element,
    Node,
    details,
    el,
    facts,
    name,
    prose_block,
)
from divergence.words import both_ends, fixed

_MARKS = {"onset": "begins here", "odd": "odd", "flagged": "beyond its limit"}
_LONG = 80
"""Letters of a text that takes a line of its own."""
_CLASSES = {"wrong": "flagged", "below": "", "good": ""}
"""Marks of a row that have the look of another."""


def element(section: Section, *more: Node) -> Element:
    """The whole section, under its title. ``more``: behind its blocks."""
    return el(
        "section",
        el("h2", section_title(section), id=f"{section.id}-title"),
        el("p", f"{capital(section.detail)}.", class_="lead") if section.detail else None,
        *_all_nodes(section.body),
        *more,
        id=section.id,
        aria_labelledby=f"{section.id}-title",
    )


def section_title(section: Section) -> str:
    return section.heading or capital(section.title)


def _all_nodes(blocks: Iterable[Block | None]) -> Iterator[Node]:
    """Sentences with a name that follow one another are one list."""
    for is_fact, group in itertools.groupby(blocks, _is_fact):
        rows = list(group)
        if is_fact:
            pairs = [(row.label.strip(" :"), row.text) for row in rows if isinstance(row, Sentence)]
            long = any(len(text) > _LONG for _, text in pairs)
            yield facts(pairs, class_="facts verdict-facts" if long else "facts")
        else:
            yield from (node for block in rows for node in _nodes(block))


def _is_fact(block: Block | None) -> bool:
    return isinstance(block, Sentence) and block.label.strip(" :") not in ("", "-", "note")


def _nodes(block: Block | None) -> Iterator[Node]:
    if isinstance(block, Table):
        content = table(block)
        yield details(block.folded, content) if block.folded else content
    elif isinstance(block, Sentence):
        yield prose_block(block.text, class_="note")
    elif isinstance(block, Figures):
        yield el("div", *map(figure, block.drawings), class_="figures")
        yield el("div", class_="chosen", id="chosen", hidden=True) if block.choose else None
    elif isinstance(block, Strips):
        yield from (el("h3", block.title), _STRIPS) if block.title else ()
        yield from map(_strip, block.strips)
    elif block is not None:
        yield details(block.summary, *_all_nodes(block.body))


_STRIPS = el(
    "p",
    el("span", "A", class_="a"),
    " above, ",
    el("span", "B", class_="b"),
    " below where they differ. Below a difference: by how many logits A's choice was ahead.",
    class_="note",
)


def _strip(strip: Strip) -> Element:
    sides = zip("AB", "ab", strip.apart, strict=True)
    texts = [
        el("div", el("p", f"{letter} went on", class_=kind), el("p", text, class_="prompt"))
        for letter, kind, text in sides
    ]
    return el(
        "div",
        el("p", strip.title, class_="of-prompt"),
        el("p", strip.lead, class_="prompt") if strip.lead else None,
        el("p", *(_cell(*cell) for cell in strip.cells), class_="strip"),
        el("div", *texts, class_="texts") if any(strip.apart) else None,
        el("p", strip.note, class_="note") if strip.note else None,
        class_="sample",
    )


def _cell(a: str | None, b: str | None, margin: float | None) -> Element:
    if a == b and a is not None:
        return el("span", _visible(a), class_="tok")
    return el(
        "span",
        el("span", "differs: A ", class_="aside"),
        el("span", _visible(a), class_="a"),
        el("span", ", B ", class_="aside"),
        el("span", _visible(b), class_="b"),
        None if margin is None else el("small", fixed(margin, 2)),
        class_="tok flip",
    )


def _visible(text: str | None) -> str:
    """A token in a strip: line feeds as a sign, an absent one as a dash."""
    if text is None:
        return "–"
    return both_ends(text.replace("\n", "⏎"), 40) or "∅"


def table(content: Table) -> Element:
    """A table that scrolls by itself where it is too wide; below it what is said of its rows."""
    content = content.on("page")
    columns, is_word = [column for _, column in content.shown], content.is_word
    head = [
        el(
            "th",
            column.title,
            scope="col",
            class_=None if word else "figure",
            title=column.meaning or None,
        )
        for column, word in zip(columns, is_word, strict=True)
    ]
    body = []
    for number, row in enumerate(content.cells()):
        mark = _mark(content, number)
        word = el("span", _MARKS[mark], class_="mark") if mark in _MARKS else None
        cells = [
            el("th", name(row[0]), word, scope="row"),
            *(
                el("td", name(cell), class_=None if is_word[n] else "figure")
                for n, cell in enumerate(row[1:], 1)
            ),
        ]
        body.append(el("tr", *cells, class_=mark or None))
        if below := content.below.get(number):
            notes = (el("p", item.text) for item in below)
            body.append(el("tr", el("td", *notes, colspan=len(columns)), class_="below"))
    grid = el(
        "table",
        el("caption", content.caption) if content.caption else None,
        el("thead", el("tr", *head)) if any(content.titles) else None,
        el("tbody", *body),
        class_="names" if content.names else None,
    )
    # what scrolls must be reached by keyboard, and so needs a name
    wide = el(
        "div",
        grid,
        class_="scroll",
        tabindex=0,
        role="group",
        aria_label=content.caption or "Table",
    )
    note = _note(content)
    return el("div", wide, el("p", note, class_="note") if note else None)


def _mark(content: Table, number: int) -> str:
    word = content.mark(number)
    return _CLASSES.get(word, word)


def _note(content: Table) -> str:
    return content.note or (f"{content.num_more:,} more are in the JSON." * bool(content.num_more))


def script_data(sections: Sequence[Section]) -> dict[str, Any]:
    """Return what the script needs: the figures' numbers, and all that is known of each block."""
    blocks: dict[str, dict[str, Any]] = {}
    for part in (part for section in sections for part in section.parts):
        content = blocks.setdefault(part.block, {"facts": [], "tables": []})
        for table in [] if part.facts is None else [part.facts]:
            content["facts"] += zip(table.titles, *table.cells(), strict=True)
        content["tables"] += [
            {
                "caption": its.caption,
                "titles": its.titles,
                "words": its.is_word,
                "meanings": [column.meaning for _, column in its.shown],
                "rows": [[both_ends(cell, LONGEST) for cell in row] for row in its.cells()],
                "marks": [_mark(its, number) for number in range(len(its.marks))],
                "note": _note(its),
                "names": its.names,
            }
            for its in (table.on("page") for table in part.tables)  # for page.js, makeTable
        ]
    bodies = (block for section in sections for block in section.body)
    figures = {
        item.id: script(item)
        for block in bodies
        if isinstance(block, Figures)
        for item in block.drawings
    }
    chosen = next((entry.chosen for entry in sections if entry.chosen is not None), None)
    return {"figures": figures, "blocks": blocks, "chosen": chosen}

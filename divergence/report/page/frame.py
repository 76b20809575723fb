"""What every page has: a bar on top, an opening with the answer, sections, data to download."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from divergence.comparison.result import strict_json
from divergence.html.parts import (
    BlockPart,
    Element,
    Node,
    Section,
    command,
    document,
    el,
    facts,
    name,
)
from divergence.layout import Line

__all__ = ["frame", "next_commands", "opening", "printed"]

_SIGNS = {"good": "✓", "bad": "✕", "unsure": "?"}
"""By how an answer stands: a sign that needs no colour."""
_STANDINGS = {"green": "good", "red": "bad"}


def frame(
    command_name: str, title: str, openings: Sequence[Element], sections: Iterable[Section], *,
    attachment: bytes, made_by: str, columns: Sequence[str] = (), noun: str = "Block",
    data_lead: str = "This page holds the answer it was made of.",
) -> str:  # fmt: skip
    """The whole file. ``title``: the answer, as a browser's tab shows it. ``attachment``: the JSON
    to download, of which the script makes the CSV of ``columns``, where there are some. ``noun``:
    what can be chosen in a figure."""
    shown = [*sections, _download(data_lead, csv=bool(columns))]
    body = el(
        "body",
        el("a", "Skip to the verdict", href=f"#{openings[0].attributes['id']}", class_="skip"),
        _top(command_name),
        el("main", *openings, _contents(shown), *(section.element() for section in shown)),
        _bottom(made_by),
    )
    data = {**_data(shown), "columns": columns, "noun": noun}
    return document(
        f"{title} · divergence", body, data=strict_json(data, indent=None), attachment=attachment
    )


def _standing(line: Line) -> str:
    """How an answer stands, by the colour of its first word in the terminal."""
    style = next((span.style for span in line.spans if span.text.strip()), "")
    return _STANDINGS.get(style.rpartition(" ")[2], "unsure")


def opening(
    lines: Sequence[Line], *more: Node, standing: str = "", sign: str = "", id: str = "verdict",
    label: str = "Verdict", beside: Node = None, below: Sequence[Node] = (),
) -> Element:  # fmt: skip
    """The terminal's answer as the top of a page: its first line is ``WORD: sentence``, the others
    a name and what it is. ``more``: under these. ``beside``: at the right. ``below``: under all."""
    first, *rest = lines
    standing = standing or _standing(first)
    word, title = _word_and_sentence(first)
    rows = [
        (line.spans[0].text.strip(), "".join(span.text for span in line.spans[1:]))
        for line in rest if len(line.spans) > 1
    ]  # fmt: skip
    mark = el("span", sign or _SIGNS[standing], class_="sign", aria_hidden="true")
    said = el(
        "div",
        el("p", mark, word, class_="badge") if word else None,
        el("h1", name(_capital(title)), class_="long" if len(title) > 110 else None),
        facts(rows, class_="facts verdict-facts") if rows else None, *more,
    )  # fmt: skip
    content = said if beside is None else el("div", said, beside, class_="opening")
    return el("section", content, *below, class_=f"verdict {standing}", id=id, aria_label=label)


def _capital(sentence: str) -> str:
    """A sentence's first word begins with a capital letter, unless it is a name: of a module, a
    task or a file."""
    word = sentence.partition(" ")[0].rstrip(",:;")
    return sentence[:1].upper() + sentence[1:] if word.isalpha() else sentence


def _word_and_sentence(line: Line) -> tuple[str, str]:
    word, *rest = (span.text for span in line.spans)
    if not rest:
        return "", word.strip()
    return word.strip().rstrip(":"), "".join(rest).removeprefix(": ")


def printed(lines: Sequence[Line]) -> Element:
    """What the terminal prints, as it is."""
    text = "\n".join(line.text for line in lines).strip("\n")
    return el("pre", text, class_="printed", tabindex=0)


def next_commands(commands: Sequence[str]) -> list[Node]:
    """What to run next, each with a button that copies it."""
    return [el("h2", "Do this next"), *map(command, commands)] if commands else []


def _data(sections: Sequence[Section]) -> dict[str, Any]:
    """What the script needs: the figures' numbers, and each block's tables."""
    blocks: dict[str, dict[str, Any]] = {}
    for part in (part for section in sections for part in section.blocks):
        _add(blocks, part)
    figures = {id: data for section in sections for id, data in section.figures.items()}
    chosen = next((entry.chosen for entry in sections if entry.chosen is not None), None)
    return {"figures": figures, "blocks": blocks, "chosen": chosen}


def _add(blocks: dict[str, dict[str, Any]], part: BlockPart) -> None:
    """All that the analyses know of one block, in their order."""
    known = blocks.setdefault(part.block, {"facts": [], "tables": []})
    known["facts"] += part.facts
    known["tables"] += [table.data() for table in part.tables]


def _top(command_name: str) -> Element:
    toggle = el("button", "Theme", type="button", id="theme", hidden=True,
                aria_label="Switch between light and dark")  # fmt: skip
    brand = el("span", el("b", "divergence"), f" {command_name}", class_="brand")
    return el("header", brand, toggle, class_="top")


def _contents(sections: Sequence[Section]) -> Element:
    links = [el("li", el("a", section.title, href=f"#{section.id}")) for section in sections]
    return el("nav", el("ul", *links), class_="contents", aria_label="On this page")


def _download(lead: str, *, csv: bool) -> Section:
    buttons = [
        el("button", "Download JSON", type="button", id="download-json"),
        el("button", "Download CSV", type="button", id="download-csv") if csv else None,
    ]
    return Section(
        id="download", title="Data", lead=lead,
        body=(
            el("p", *buttons, class_="buttons", hidden=True, id="downloads"),
            el("noscript", el("p", "Downloads need scripts, which this viewer does not run.")),
        ),
    )  # fmt: skip


def _bottom(version: str) -> Element:
    made = f"Made by divergence {version}. This file loads nothing and sends nothing."
    return el("footer", el("p", made))

"""A page: a bar on top, each answer with its facts, its reasons and what to do next, the sections,
and data to download."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from divergence.document import Document, Section, Side, capital
from divergence.html import parts
from divergence.html.parts import Element, Node, command, el, facts, name, prose_block
from divergence.html.sections import element, script_data, section_title
from divergence.words import HEADLINES, count, printable_json

_STANDINGS = {"green": ("good", "✓"), "red": ("bad", "✕"), "magenta": ("unsure", "≠")}
"""By an answer's colour in a terminal: how it stands, and a sign that needs no colour."""


def frame(
    command_name: str,
    title: str,
    documents: Sequence[Document],
    *,
    attachment: bytes,
    made_by: str,
    columns: Sequence[str] = (),
    noun: str = "Block",
    data_lead: str = "This page holds the answer it was made of",
) -> str:
    """The whole file. ``title``: the answer, as a browser's tab shows it. ``attachment``: the JSON
    to download, of which the script makes the CSV of ``columns``, where there are some. ``noun``:
    what can be chosen in a figure."""
    sections = [
        section
        for whole in documents
        for section in whole.sections
        if section.body or section.detail
    ]
    data = Section(id="download", title="Data", detail=data_lead)
    toggle = el(
        "button",
        "Theme",
        type="button",
        id="theme",
        hidden=True,
        aria_label="Switch between light and dark",
    )
    brand = el("span", el("b", "divergence"), f" {command_name}", class_="brand")
    links = [
        el("li", el("a", section_title(section), href=f"#{section.id}"))
        for section in (*sections, data)
    ]
    contents = el("nav", el("ul", *links), class_="contents", aria_label="On this page")
    made = f"Made by divergence {made_by}. This file loads nothing and sends nothing."
    body = el(
        "body",
        el("a", "Skip to the verdict", href="#verdict", class_="skip"),
        el("header", brand, toggle, class_="top"),
        el(
            "main",
            *itertools.starmap(_opening, enumerate(documents)),
            contents,
            *map(element, sections),
            element(data, *_buttons(csv=bool(columns))),
        ),
        el("footer", el("p", made)),
    )
    script = {**script_data(sections), "columns": columns, "noun": noun}
    text = json.dumps(script, ensure_ascii=False, allow_nan=False)
    text = printable_json(text.encode("utf-8", "backslashreplace").decode())
    return parts.document(f"{title} · divergence", body, data=text, attachment=attachment)


def _opening(number: int, whole: Document) -> Element:
    """The answer as the top of a page: what is known at once, why, the runs at the right, and what
    to run next, each command with a button that copies it."""
    headline = whole.headline
    standing, sign = _STANDINGS.get(headline.style.rpartition(" ")[2], ("unsure", "?"))
    sign = "!" if headline.word == HEADLINES["drift"] else sign
    lines = [*headline.facts, *whole.known]
    lone = list(itertools.takewhile(lambda fact: not fact.label, lines))  # sentences of their own
    rows = [(fact.label.removesuffix(":"), fact.text) for fact in lines[len(lone) :]]
    mark = el("span", sign, class_="sign", aria_hidden="true")
    long = "long" if len(headline.text) > 110 else None
    content = el(
        "div",
        el("p", mark, headline.word, class_="badge") if headline.word else None,
        el("h1", name(capital(headline.text)), class_=long),
        *(el("p", fact.text) for fact in lone),
        facts(rows, class_="facts verdict-facts") if rows else None,
        *_why(whole.why),
    )
    if whole.sides:
        cards = el(
            "div", *map(_card, whole.sides), class_="pair", role="group", aria_label="The two runs"
        )
        content = el("div", content, cards, class_="opening")
    below = [el("h2", "Do this next"), *map(command, whole.next)] if whole.next else []
    return el(
        "section",
        content,
        *below,
        class_=f"verdict {standing}",
        id=f"verdict-{number}" if number else "verdict",
        aria_label=headline.word or "Answer",
    )


def _why(texts: Sequence[str]) -> list[Node]:
    if not texts:
        return []
    items = [el("li", prose_block(text)) for text in texts]
    shown, hidden = items[:4], items[4:]
    more = el(
        "details", el("summary", count(len(hidden), "more fact")), el("ul", *hidden), class_="more"
    )
    return [el("h2", "Why"), el("ul", *shown, class_="why"), more if hidden else None]


def _card(side: Side) -> Element:
    colour = "reference" if side.letter == "A" else "candidate"
    head = el("h2", el("span", side.letter, class_=f"letter {colour}"), name(side.name))
    notes = el("ul", *(el("li", name(text)) for text in side.warnings), class_="warnings")
    return el("article", head, facts(side.facts), notes if side.warnings else None, class_="run")


def _buttons(*, csv: bool) -> list[Element]:
    buttons = [
        el("button", "Download JSON", type="button", id="download-json"),
        el("button", "Download CSV", type="button", id="download-csv") if csv else None,
    ]
    return [
        el("p", *buttons, class_="buttons", hidden=True, id="downloads"),
        el("noscript", el("p", "Downloads need scripts, which this viewer does not run.")),
    ]

"""Elements of pages, put together without a template; what comes from a run is text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from divergence.words import both_ends, printable_lines

# Elements of an HTML page, and the one place where text becomes HTML.
#
# A page is a tree of elements, and whatever it says is a string in that tree. ``render`` escapes
# each string and each attribute's value; nothing else in divergence writes markup from data, and
# no node holds markup. Characters that do not print (escape codes, marks that turn text around,
# line separators) are written out as the terminal writes them (words.printable), so a page never
# shows a name in another order than it is written.

Value = str | int | float | bool | None
"""An attribute's value: True stands alone, None and False are left out."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element. Tag and attribute names come from code alone."""

    tag: str
    attributes: dict[str, Value] = field(default_factory=dict)
    children: tuple[Node, ...] = ()


Node = Element | str | None

_VOID = frozenset({"br", "col", "input", "meta", "wbr"})


def el(tag: str, *children: Node, **attributes: Value) -> Element:
    """``el("p", "text", class_="lead")``; an underscore in an attribute's name is a hyphen."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    return Element(tag, named, children)


def render(node: Node) -> str:
    """The HTML of a tree."""
    return "".join(_pieces(node))


def plain(node: Node) -> str:
    """The text of a tree alone."""
    if node is None or isinstance(node, str):
        return node or ""
    return "".join(map(plain, node.children))


def _pieces(node: Node) -> Iterator[str]:
    if node is None:
        return
    if isinstance(node, str):
        yield _escaped(node)
        return
    yield f"<{node.tag}"
    for name, value in node.attributes.items():
        if value is True:
            yield f" {name}"
        elif value is not None and value is not False:
            yield f' {name}="{_escaped(str(value))}"'
    yield ">"
    if node.tag in _VOID:
        return
    for child in node.children:
        yield from _pieces(child)
    yield f"</{node.tag}>"


def _escaped(text: str) -> str:
    return html.escape(printable_lines(text), quote=True)


# What pages are made of: facts, commands, names.

LONGEST = 240
"""Characters of a text that are shown at once; the rest can be opened."""


def name(text: str) -> Node:
    """A name of a run: a long one is shortened, and opens."""
    if len(text) <= LONGEST:
        return text
    return el("details", el("summary", both_ends(text, LONGEST // 3)), _whole(text), class_="long")


def _whole(text: str) -> Element:
    """It scrolls, and so must be reached by keyboard."""
    return el("span", text, class_="whole", tabindex=0, role="group", aria_label="in full")


def prose_block(text: str, *, class_: str | None = None) -> Element:
    """A sentence; one that a long name makes long is shortened, and opens."""
    if len(text) <= 4 * LONGEST:
        return el("p", text, class_=class_)
    opened = el("details", el("summary", "in full"), _whole(text))
    return el("div", el("p", both_ends(text, 2 * LONGEST)), opened, class_=class_)


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


# The page around its sections: one file that needs nothing else and asks nobody for anything.
#
# The policy in its head allows this file's own style and script, by their digests, and pictures
# that are part of it: nothing is loaded, no other script runs, nothing is sent. What the script
# needs stands in the page as JSON, in which ``<`` is written ``\u003c``, so that no name ends the
# element. The script sets text and attributes and never markup (page.js).


def document(title: str, body: Element, *, data: str, attachment: bytes = b"") -> str:
    """The whole page. ``data``: JSON for the script. ``attachment``: what is offered for download,
    packed by gzip."""
    style, script = _asset("style.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = Element("title", {}, (title,))
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    packed = base64.b64encode(gzip.compress(attachment, mtime=0)).decode() if attachment else ""
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"{render(head)}\n<style>{style}</style>\n</head>\n"
        f"{render(body)[: -len('</body>')]}\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f'<script type="text/plain" id="attachment">{packed}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# What a notebook shows of a result: a small table, and perhaps a picture below it.
#
# A notebook has colours of its own, light or dark, and removes style sheets from what it does not
# trust: so there are few styles, at the elements, and none of them is a colour.

_LONGEST_NOTEBOOK = 300
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"


def small_table(
    title: str, rows: Iterable[tuple[str, str | None]], picture: Element | None = None
) -> str:
    """A title, and below it names and what they are; without a value a row is left out."""
    lines = [
        el(
            "tr",
            el("th", term, scope="row", style=_CELL),
            el("td", both_ends(value, _LONGEST_NOTEBOOK), style=_CELL),
        )
        for term, value in rows
        if value
    ]
    caption = el("caption", el("b", both_ends(title, _LONGEST_NOTEBOOK)), style="text-align:left")
    return render(el("div", el("table", caption, el("tbody", *lines)), picture))

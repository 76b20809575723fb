"""Elements of an HTML page, and the one place where text becomes HTML.

A page is a tree of elements, and whatever it says is a string in that tree. ``render`` escapes each
string and each attribute's value; nothing else in divergence writes markup from data, and no node
holds markup. Characters that do not print (escape codes, marks that turn text around, line
separators) are written out as the terminal writes them (words.printable), so a page never shows a
name in another order than it is written.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field

from divergence.words import printable_lines

__all__ = ["Element", "Node", "el", "plain", "render", "shortened"]

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


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters: both ends of a name tell more than its middle."""
    text = printable_lines(text)
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


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

"""The page's style written into a picture's own attributes.

A picture leaves the page: it is opened by itself, stands in a notebook or a slide, is made a PNG. A
style sheet inside it would hold for the whole notebook, and not every program reads one. So what
style.css says of a class stands at each element: one source of colours, those of the light page.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from divergence.html.element import Element, Node

__all__ = ["colour", "inked"]

_INKS = frozenset({
    "fill", "fill-opacity", "stroke", "stroke-dasharray", "stroke-linejoin", "stroke-width",
})  # fmt: skip
_VARIABLE = re.compile(r"--([\w-]+): (?:light-dark\(([^,]+),[^)]*\)|([^;]+));")
_RULE = re.compile(r"^(\.[\w.-]+(?:, \.[\w.-]+)*) \{ ([^}]*) \}", re.M)


def colour(name: str) -> str:
    """A variable of style.css, as a light page has it."""
    return _variables()[name]


def inked(node: Node) -> Node:
    """The same tree with colours and strokes for classes."""
    if not isinstance(node, Element):
        return node
    attributes = dict(node.attributes)
    classes = set(str(attributes.pop("class", "")).split())
    for wanted, inks in _rules() if classes else ():
        if wanted <= classes:
            attributes |= inks
    return Element(node.tag, attributes, tuple(map(inked, node.children)))


@cache
def _css() -> str:
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


@cache
def _variables() -> dict[str, str]:
    """Those of the page's first rule."""
    root = _css().partition("}")[0]
    return {name: light or alone for name, light, alone in _VARIABLE.findall(root)}


@cache
def _rules() -> list[tuple[set[str], dict[str, str]]]:
    """(classes, what they draw with): the rules of classes alone, those of more classes later."""
    rules = []
    for selectors, body in _RULE.findall(_css()):
        pairs = (line.partition(": ") for line in body.strip(" ;").split("; "))
        inks = {
            name: re.sub(r"var\(--([\w-]+)\)", lambda match: colour(match[1]), value)
            for name, _, value in pairs
            if name in _INKS
        }
        rules += [
            (set(selector[1:].split(".")), inks) for selector in selectors.split(", ") if inks
        ]
    return sorted(rules, key=lambda rule: len(rule[0]))

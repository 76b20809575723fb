"""What a notebook shows of a result: a small table, and perhaps a picture below it.

A notebook has colours of its own, light or dark, and removes style sheets from what it does not
trust: so there are few styles, at the elements, and none of them is a colour.
"""

from __future__ import annotations

from collections.abc import Iterable

from divergence.html.element import Element, el, render, shortened

__all__ = ["small_table"]

_LONGEST = 300
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"


def small_table(
    title: str, rows: Iterable[tuple[str, str | None]], picture: Element | None = None
) -> str:
    """A title, and below it names and what they are; without a value a row is left out."""
    lines = [
        el("tr", el("th", term, scope="row", style=_CELL),
           el("td", shortened(value, _LONGEST), style=_CELL))
        for term, value in rows
        if value
    ]  # fmt: skip
    caption = el("caption", el("b", shortened(title, _LONGEST)), style="text-align:left")
    return render(el("div", el("table", caption, el("tbody", *lines)), picture))

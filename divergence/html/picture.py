"""A picture by itself: the page's curves with what they are of, as SVG and as PNG.

The SVG is the page's (figures.py) at a width of its own. It leaves the page: it is opened by
itself, stands in a notebook or a slide, is made a PNG. A style sheet inside it would hold for the
whole notebook, and not every program reads one. So what style.css says of a class stands at each
element (``inked``): one source of colours, those of the light page. A PNG is that SVG, drawn by
resvg, a small library without dependencies (the extra ``plot``). resvg draws letters with the fonts
of this machine; where there are none it would leave them out, and is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from divergence.document import Plot
from divergence.errors import UsageError
from divergence.html.figures import HEIGHT, axis_ticks, drawn
from divergence.html.parts import Element, Node, el
from divergence.numerics.trees import Tree
from divergence.output import write_output
from divergence.words import both_ends

WIDTH = 760.0
_MARGIN, _AXIS, _ROW = 20.0, 56.0, 17.0
_LETTER = 6.4
"""Width of a letter of a legend, about."""
_SCALE = 2.0
"""Dots of a PNG for each of the picture's."""


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """A picture that a notebook shows. ``save`` writes it."""

    svg: str
    """A whole file that needs nothing else."""

    def __repr__(self) -> str:
        return f"<Picture, {len(self.svg):,} characters of SVG>"

    def _repr_svg_(self) -> str:
        return self.svg

    def png(self) -> bytes:
        """The picture as PNG. Raises UsageError without the extra ``plot``, or without fonts."""
        library = png_library()
        made: bytes = library.svg_to_bytes(svg_string=self.svg, zoom=_SCALE)
        # without letters; text in it is escaped, so that no ``<`` is a name's
        bare = re.sub(r"<text[ >][^<]*</text>", "", self.svg)
        if bare != self.svg and made == library.svg_to_bytes(svg_string=bare, zoom=_SCALE):
            raise UsageError(
                "a PNG needs a font, and this machine has none that fits",
                hint=("install one, such as fonts-dejavu-core", "or take the SVG: --svg FILE"),
            )
        return made

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``NAME.svg`` or ``NAME.png``, as a whole or not at all; its path."""
        kind = Path(path).suffix.lower()
        if kind not in (".svg", ".png"):
            raise UsageError(
                "a picture is saved as .svg or .png", where=str(path), hint='save("error.svg")'
            )
        return self.write(path, kind[1:])

    def write(self, path: str | os.PathLike[str], kind: str) -> Path:
        """The same in the format that is named, ``svg`` or ``png``, whatever the file's name."""
        content = self.png() if kind == "png" else (self.svg + "\n").encode()
        return write_output(content, path, what="picture")


def png_library() -> ModuleType:
    """Return what draws a PNG. Raises UsageError where it is not installed."""
    try:
        return import_module("resvg_py")
    except ImportError as error:
        raise UsageError(
            "a PNG is drawn by resvg-py, which is not installed",
            hint=('pip install "divergence-debug[plot]"', "or take the SVG: --svg FILE"),
        ) from error


def compose(title: str, lines: Sequence[str], plots: Sequence[Plot]) -> Element:
    """The plots below one another. ``lines``: what they are of, below the title if there is one."""
    y, nodes = 0.0, list[Node]()
    if title:
        y = _MARGIN + 14
        nodes.append(_text(title, _MARGIN, y, size=16, letters=88, font_weight="bold"))
    for line in lines:
        y += _ROW
        nodes.append(_text(line, _MARGIN, y, size=12, letters=112, fill=colour("muted")))
    for plot in plots:
        panel, height = _panel(plot, y + 30)
        nodes += panel
        y += 30 + height
    height = y + _MARGIN
    labels = " ".join(plot.label for plot in plots)
    canvas = el("rect", width=WIDTH, height=height, fill="#ffffff")
    return el(
        "svg",
        el("title", title) if title else None,
        el("desc", labels),
        canvas,
        *nodes,
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH,
        height=height,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=f"{title}. {labels}" if title else labels,
        font_family=colour("sans"),
        font_size=11,
        fill=colour("text"),
        style="max-width:100%;height:auto",
    )


_TREE_WIDTH, _TREE_HEIGHT, _TREE_MARGIN = 1200, 500, 30
_MOST_DOTS = 128
"""Leaves of a tree whose nodes are marked: of more the dots would run together."""


def compose_tree(tree: Tree, title: str, described: str) -> Element:
    """An order of additions: its terms in a row below, each sum above what it adds. Wide ones are
    drawn small rather than cut: a sequential sum is a slope, a pairwise one a fan."""
    leaves, margin = tree.num_leaves, _TREE_MARGIN
    x = [margin + (_TREE_WIDTH - 2 * margin) * (k + 0.5) / leaves for k in range(leaves)]
    height = [0] * leaves
    for node in tree.nodes:
        x.append(sum(x[child] for child in node) / len(node))
        height.append(1 + max(height[child] for child in node))
    step = (_TREE_HEIGHT - 3 * margin) / max(height[-1], 1)
    y = [_TREE_HEIGHT - margin - step * level for level in height]
    edges = [
        f"M{x[kid]:.1f} {y[kid]:.1f}L{x[leaves + k]:.1f} {y[leaves + k]:.1f}"
        for k, node in enumerate(tree.nodes)
        for kid in node
    ]
    dots = [
        el("circle", cx=f"{x[k]:.1f}", cy=f"{y[k]:.1f}", r=2 if k < leaves else 3)
        for k in range(len(x) if leaves <= _MOST_DOTS else 0)
    ]
    return el(
        "svg",
        el("title", title),
        el("rect", width=_TREE_WIDTH, height=_TREE_HEIGHT, fill="white"),
        el("text", title, x=margin, y=20),
        el("text", described, x=margin, y=40, fill="#555"),
        el("path", d="".join(edges), fill="none", stroke="#357", stroke_width=0.6),
        el("g", *dots, fill="#357"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_TREE_WIDTH} {_TREE_HEIGHT}",
        font_family="sans-serif",
        font_size=14,
    )


def _panel(plot: Plot, top: float) -> tuple[list[Node], float]:
    """One plot with its title, sentence and legend; how high it is."""
    nodes: list[Node] = [
        _text(plot.title, _MARGIN, top, size=13, letters=96, font_weight="bold"),
        _text(plot.described, _MARGIN, top + _ROW, size=11.5, letters=116, fill=colour("muted")),
    ]
    x, y = _MARGIN, top + 2 * _ROW + 2
    for kind, text in plot.legend:
        needed = 30 + _LETTER * len(text)
        if x + needed > WIDTH:
            x, y = _MARGIN, y + _ROW
        nodes += [*_key(kind, x, y - 4), _text(text, x + 20, y, size=11, letters=60)]
        x += needed
    y += 12
    wide = WIDTH - 2 * _MARGIN - _AXIS
    area = [inked(node) for node in drawn(plot, wide)]
    grey = colour("muted")
    nodes.append(
        el(
            "g",
            *axis_ticks(plot, "0"),
            el("text", "block", x=0, dx=-6, y=HEIGHT + 16, text_anchor="end"),
            *area,
            transform=f"translate({_MARGIN + _AXIS:g} {y:g})",
            fill=grey,
        )
    )
    return nodes, y + HEIGHT + 22 - top


def _key(kind: str, x: float, y: float) -> list[Node]:
    """Return what a legend's text is about, as it is drawn."""
    shape, _, name = kind.partition(" ")
    if shape == "line":
        drawing = el("path", d=f"M{x:g} {y:g}h14", class_=kind)
    elif shape == "band" or name == "candidate":
        size = 12 if shape == "band" else 8
        drawing = el(
            "rect", x=x + 7 - size / 2, y=y - size / 2, width=size, height=size, class_=kind
        )
    else:
        drawing = el("circle", cx=x + 7, cy=y, r=4.5, class_=kind)
    return [inked(drawing)]


def _text(
    text: str, x: float, y: float, *, size: float, letters: int, **attributes: str
) -> Element:
    cut = both_ends(" ".join(text.split()), letters)
    return el("text", cut, x=x, y=y, font_size=size, **attributes)


_INKS = frozenset(
    {
        "fill",
        "fill-opacity",
        "stroke",
        "stroke-dasharray",
        "stroke-linejoin",
        "stroke-width",
    }
)
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

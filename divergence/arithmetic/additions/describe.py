"""A tree in words, where runs of equal parts are written once, and as an SVG drawing.

    sequential 512                               ((x0 + x1) + x2) + …
    pairwise 8, by 1                             x0+x1, x2+x3, … then those in pairs
    pairwise 16, by 8 of (sequential 64, by 16)  16 lanes, lane k adds x[k], x[k+16], …
    (fused 16) + 48 more in 3 fused              as matrix units do: 16 at once, then 16 and the sum

``by d``: the first two things that are added stand d terms apart; left out where neighbours are
next to each other. Parts of several kinds stand in the order in which they are added,
``(sequential 131) + (sequential 127, by 4)``. What is longer than a line is ``irregular n``, with
its depth. The digest, not the text, says whether two trees are equal.

A drawing has the terms in a row at the bottom, every addition a point above what it adds. Wide
trees are drawn small rather than cut: a sequential sum is a slope, a pairwise one a fan, lanes are
combs side by side.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from divergence.arithmetic.additions.order import OperatorOrders
from divergence.arithmetic.additions.trees import Tree
from divergence.output import write_output

__all__ = ["MAX_TEXT", "describe", "svg", "write_drawings"]

MAX_TEXT = 160
"""Characters; a longer description is cut to the tree's depth."""


def describe(tree: Tree) -> str:
    """One line."""
    if not tree.nodes:
        return "one term"
    text = _Describer(tree).text(tree.num_leaves + len(tree.nodes) - 1)
    if len(text) > MAX_TEXT:
        return f"irregular {tree.num_leaves}, depth {tree.depth}"
    return text


class _Describer:
    """Shapes of all subtrees, made once; texts are made from the root down."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.leaves = tree, tree.num_leaves
        self.first = list(range(self.leaves))
        self.size = tree.sizes()
        known: dict[tuple[int, ...], int] = {}
        self.shape = [0] * self.leaves
        for node in tree.nodes:
            self.first.append(min(self.first[child] for child in node))
            key = tuple(sorted(self.shape[child] for child in node))
            self.shape.append(known.setdefault(key, len(known) + 1))

    def kids(self, at: int) -> tuple[int, ...]:
        return self.tree.nodes[at - self.leaves]

    def text(self, at: int, depth: int = 0) -> str:
        """The subtree ``at``; without its brackets."""
        if at < self.leaves:
            return "1"
        if depth > 6:
            return f"irregular {self.size[at]}"
        for form in (self._pairwise, self._sequential):
            pattern = form(at)
            if pattern is not None:
                name, parts = pattern
                inner = self.text(parts[0], depth + 1)
                by = self.first[parts[1]] - self.first[parts[0]]
                fused = len(self.kids(at)) > 2
                step = f", by {by}" if by != self.size[parts[0]] and not fused else ""
                of = "" if inner == "1" else f" of ({inner})"
                return f"{name}{step}{of}"
        return self._uneven(at, depth)

    def _pairwise(self, at: int) -> tuple[str, list[int]] | None:
        """As many levels of pairs of equal shapes as there are, 2 at least: ``pairwise 2^d``."""
        row, levels = [at], 0
        while True:
            if any(part < self.leaves for part in row):
                break
            below = [child for part in row for child in self.kids(part)]
            if len(below) != 2 * len(row) or len({self.shape[part] for part in below}) > 1:
                break
            row, levels = below, levels + 1
        if levels == 0 or (levels == 1 and self._chain_length(at) > 2):
            return None
        return f"pairwise {len(row)}", row

    def _chain(self, at: int) -> tuple[int, list[int]]:
        """(start, parts): ((start + part) + part) + …, parts of one shape, top-down reversed."""
        parts: list[int] = []
        kind = None
        while at >= self.leaves:
            kids = sorted(self.kids(at), key=lambda kid: (self.size[kid], -self.first[kid]))
            *items, spine = kids
            kinds = {(self.shape[item], len(items)) for item in items}
            if len(kinds) > 1 or (kind is not None and kinds != {kind}):
                break
            kind = kinds.pop()
            parts += reversed(items)
            at = spine
        return at, parts[::-1]

    def _chain_length(self, at: int) -> int:
        start, parts = self._chain(at)
        return len(parts) + (bool(parts) and self.shape[start] == self.shape[parts[0]])

    def _sequential(self, at: int) -> tuple[str, list[int]] | None:
        """A chain all of whose parts have one shape; fused steps are named."""
        start, parts = self._chain(at)
        if not parts or self.shape[start] != self.shape[parts[0]]:
            return None
        wide = len(self.kids(at)) - 1
        whole = [start, *parts]
        if wide == 1:
            return f"sequential {len(whole)}", whole
        if len(whole) == wide + 1:
            return f"fused {len(whole)}", whole
        return f"sequential {len(whole)} by fused {wide + 1}", whole

    def _uneven(self, at: int, depth: int) -> str:
        """Parts of several kinds, in the order in which they are added; runs counted."""
        runs: list[tuple[int, int, int, int]] = []  # part, how many, joined so many at once
        whole = at
        while at >= self.leaves and (at == whole or not self._regular(at)):
            *items, spine = sorted(
                self.kids(at), key=lambda kid: (self.size[kid], -self.first[kid])
            )
            for item in items:
                key = (self.shape[item], len(items))
                if runs and key == (self.shape[runs[-1][0]], runs[-1][2]):
                    runs[-1] = (item, runs[-1][1] + 1, len(items), runs[-1][3] + (item == items[0]))
                else:
                    runs.append((item, 1, len(items), 1))
            at = spine
        texts = [self._bracketed(at, depth)]
        for item, count, wide, nodes in reversed(runs):
            text = self._bracketed(item, depth)
            if count > 1:
                text = f"{count} more" if text == "1" else f"{count} × {text}"
            if wide > 1:
                text += f" in {nodes} fused" if nodes > 1 else " fused"
            texts.append(text)
        return " + ".join(texts)

    def _regular(self, at: int) -> bool:
        return self._pairwise(at) is not None or self._sequential(at) is not None

    def _bracketed(self, at: int, depth: int) -> str:
        text = self.text(at, depth + 1)
        return text if text == "1" else f"({text})"


WIDTH, HEIGHT, MARGIN = 1200, 500, 30


def svg(tree: Tree, title: str) -> str:
    """One tree as an SVG document."""
    leaves = tree.num_leaves
    x = [MARGIN + (WIDTH - 2 * MARGIN) * (k + 0.5) / leaves for k in range(leaves)]
    height = [0] * leaves
    for node in tree.nodes:
        x.append(sum(x[child] for child in node) / len(node))
        height.append(1 + max(height[child] for child in node))
    top = max(height[-1], 1)
    y = [HEIGHT - MARGIN - (HEIGHT - 3 * MARGIN) * level / top for level in height]
    edges = []
    for k, node in enumerate(tree.nodes):
        at = leaves + k
        edges += [f"M{x[kid]:.1f} {y[kid]:.1f}L{x[at]:.1f} {y[at]:.1f}" for kid in node]
    dots = "".join(
        f'<circle cx="{x[k]:.1f}" cy="{y[k]:.1f}" r="{2 if k < leaves else 3}"/>'
        for k in range(len(x))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="14">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        f'<text x="{MARGIN}" y="20">{escape(title)}</text>\n'
        f'<text x="{MARGIN}" y="40" fill="#555">{escape(describe(tree))}</text>\n'
        f'<path d="{"".join(edges)}" fill="none" stroke="#357" stroke-width="0.6"/>\n'
        + (f'<g fill="#357">{dots}</g>\n' if leaves <= 128 else "")
        + "</svg>\n"
    )


def write_drawings(folder: Path, findings: list[OperatorOrders]) -> list[Path]:
    """One file a tree, named after its operator; unverified ones say so."""
    written = []
    for finding in findings:
        name = re.sub(r"[^\w.=-]+", "-", finding.operator.title)
        for number, order in enumerate(finding.orders):
            title = finding.operator.title + ("" if order.verified else " (unverified)")
            if len(finding.orders) > 1:
                title += f", {int(order.cells.sum())} outputs"
            path = folder / (f"{name}.svg" if number == 0 else f"{name}-{number}.svg")
            text = svg(order.tree, title)
            written.append(write_output(text, path, what="drawing", make_folder=True))
    return written

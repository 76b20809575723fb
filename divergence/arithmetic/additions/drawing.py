"""Trees as SVG: terms in a row at the bottom, every addition a point above what it adds.

Plain text files that any browser shows. Wide trees are drawn small rather than cut: a sequential
sum is a slope, a pairwise one a fan, lanes are combs side by side.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from divergence.arithmetic.additions.describe import describe
from divergence.arithmetic.additions.order import Finding
from divergence.arithmetic.additions.trees import Tree

__all__ = ["svg", "write_drawings"]

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


def write_drawings(folder: Path, findings: list[Finding]) -> list[Path]:
    """One file a tree, named after its operator; unverified ones say so."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for finding in findings:
        name = re.sub(r"[^\w.=-]+", "-", finding.operator.title)
        for number, order in enumerate(finding.orders):
            title = finding.operator.title + ("" if order.verified else " (unverified)")
            if len(finding.orders) > 1:
                title += f", {int(order.cells.sum())} outputs"
            path = folder / (f"{name}.svg" if number == 0 else f"{name}-{number}.svg")
            path.write_text(svg(order.tree, title), encoding="utf-8")
            written.append(path)
    return written

"""A tree in words: runs of equal parts are written once.

    sequential 512                               ((x0 + x1) + x2) + …
    pairwise 8, by 1                             x0+x1, x2+x3, … then those in pairs
    pairwise 16, by 8 of (sequential 64, by 16)  16 lanes, lane k adds x[k], x[k+16], …
    (fused 16) + 48 more in 3 fused              as matrix units do: 16 at once, then 16 and the sum

``by d``: the first two things that are added stand d terms apart; left out where neighbours are
next to each other. Parts of several kinds stand in the order in which they are added,
``(sequential 131) + (sequential 127, by 4)``. What is longer than a line is ``irregular n``, with
its depth. The digest, not the text, says whether two trees are equal.
"""

from __future__ import annotations

from divergence.arithmetic.additions.trees import Tree

__all__ = ["MAX_TEXT", "describe"]

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
            found = form(at)
            if found is not None:
                name, parts = found
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

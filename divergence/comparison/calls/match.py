"""Matching two sequences of operators: the same model code need not call the same kernels.

Two calls are a pair only if they do the same job: the same operator in the same module, operands
and result of equal shapes, and an equal place in the data flow (calls.graph). From the block's
inputs on, calls whose operands are the same things are paired; calls that differ in a scalar
alone are a pair too, and are reported for it. Where nothing more can be paired so, the first call
that can only be one other call is (other wiring, or behind a stretch that the sides compute
differently), and it goes on from there.

What is left between two pairs are stretches where one side took other operators (a fused kernel, a
vendor's, another release's): there the last results of equally many numbers that are the same
value, up to an error far beyond any rounding, are laid side by side. Where a fault is so large that
no value is the same, dataflow decides: what a matched call was given as the same argument on
both sides is the same thing, whatever its value. A pair whose result the other side only holds
after more calls (a product in two parts, the first of which alone is near) is moved to where both
hold it. What has no partner is said to have none: nothing is paired by guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from divergence.comparison.calls.graph import COMMUTE, CallNode, Places, is_copy, maker_of
from divergence.run.record import Operand, other_scalars

__all__ = ["Apart", "Match", "match_calls", "match_paths"]

Method = Literal["exact", "sequence", "value", "dataflow"]

Apart = Callable[[CallNode, CallNode], float]
"""How far two calls' first results are apart, relatively; infinity where nothing can be said."""

_Job = tuple[object, ...]
"""What two calls that do the same job have in common: module, operator, shapes."""

_SAME = 0.2
"""Two results are the same value where they differ by less, relatively: far beyond any rounding
and any fault worth the name, and far below what two different values of a block differ by."""
_NEARER = 0.25
"""A pair moves behind calls of one side alone where what those make is four times as near."""
_JOINS = ("aten.cat", "aten.stack")
_MOST = 32
"""Of one module, operator and shape: how many, in order, one call is held against."""


@dataclass(frozen=True, slots=True)
class Match:
    """A reference's call and the candidate's of the same meaning."""

    reference: CallNode
    candidate: CallNode
    method: Method


def match_paths(
    reference: Sequence[CallNode], candidate: Sequence[CallNode]
) -> tuple[list[Match], list[CallNode], list[CallNode]]:
    """The same for two recordings of the very same calls, as a replay is one: by their names."""
    theirs = {node.path: node for node in candidate}
    matches = [Match(ours, theirs[ours.path], "exact") for ours in reference if ours.path in theirs]
    matched = {match.reference.path for match in matches}
    return (
        matches,
        [node for node in reference if node.path not in matched],
        [node for node in candidate if node.path not in matched],
    )


def match_calls(
    reference: Sequence[CallNode],
    candidate: Sequence[CallNode],
    *,
    apart: Apart | None = None,
    rename: Callable[[str], str] = lambda site: site,
) -> tuple[list[Match], list[CallNode], list[CallNode]]:
    """(matches in order, reference's alone, candidate's alone).

    ``rename``: the reference's module names in the candidate's words. ``apart``: the distance of
    two calls' results; without it, stretches stay unmatched.
    """
    matcher = _Matcher(reference, candidate, apart, rename)
    matcher.match()
    return matcher.found, *matcher.lone


class _Matcher:
    def __init__(
        self,
        reference: Sequence[CallNode],
        candidate: Sequence[CallNode],
        apart: Apart | None,
        rename: Callable[[str], str],
    ) -> None:
        self.found: list[Match] = []
        self.lone = list(reference), list(candidate)
        self._apart, self._rename = apart, rename
        self._places = Places(reference, candidate, rename)
        self._index = {node.path: place for place, node in enumerate(candidate)}
        self._known: dict[tuple[str, str], float] = {}

    def match(self) -> None:
        self._forward()
        while self._next():
            self._forward()
        while self._apart is not None and self._by_value():
            self._forward()
            while self._next():
                self._forward()
        while self._by_dataflow():
            self._forward()
        if self._apart is not None:
            self._move_behind_casts()
            self._move_behind()
        self.found.sort(key=lambda match: match.reference.order)

    def _add(self, a: CallNode, b: CallNode, method: Method | None = None) -> None:
        if method is None:
            exact = self._rename(f"{a.path}:out").rpartition(":")[0] == b.path
            method = "exact" if exact else "sequence"
        self.found.append(Match(a, b, method))
        self._places.pair(a, b)
        self.lone[0].remove(a)
        self.lone[1].remove(b)

    def _key(self, side: int, node: CallNode) -> _Job:
        module = node.module
        if side == 0:
            module = self._rename(f"{module}:out").rpartition(":")[0]
        operands = node.call.operands
        if node.name in _JOINS:  # of rows sorted by expert: as many as were sent to each
            return module, node.name, len(operands), node.results[0].shape
        shapes = [operand.shape for operand in operands]
        if node.name in COMMUTE:  # w * x and x * w are one job
            shapes.sort()
        return module, node.name, tuple(shapes), node.results[0].shape

    def _by_key(self, side: int) -> dict[_Job, list[CallNode]]:
        groups: dict[_Job, list[CallNode]] = defaultdict(list)
        for node in self.lone[side]:
            groups[self._key(side, node)].append(node)
        return groups

    def _forward(self) -> None:
        """Pairs of calls with the same operands, in the reference's order, until no more."""
        while True:
            theirs = self._by_key(1)
            added = 0
            for a in list(self.lone[0]):
                group = theirs.get(self._key(0, a), [])
                same = [b for b in group if set(self._places.compare(a, b)) <= {"same"}]
                alike = [b for b in same if not other_scalars(a.call, b.call)]
                if alike:
                    group.remove(alike[0])
                    self._add(a, alike[0])
                    added += 1
            if not added:
                return

    def _next(self) -> bool:
        """One pair more: the first of the reference's calls that can only be one other call."""
        mine, theirs = self._by_key(0), self._by_key(1)
        for a in self.lone[0]:
            key = self._key(0, a)
            group = theirs.get(key, [])
            fits = [(b, self._places.compare(a, b)) for b in group[:_MOST]]
            never = {"other", "rewired"} if is_copy(a) else {"other"}
            fits = [(b, places) for b, places in fits if not never & set(places)]
            if not fits:
                continue
            named = self._rename(f"{a.path}:out").rpartition(":")[0]
            fits.sort(
                key=lambda fit: (
                    -fit[1].count("same"), fit[0].path != named,
                    bool(other_scalars(a.call, fit[0].call)),
                )
            )  # fmt: skip
            best, places = fits[0]
            equal_counts = len(mine[key]) == len(group)
            if set(places) == {"rewired"} and best.path != named:
                continue  # nothing that it is given is the same
            unknown = set(places) == {"open"} and self._apart is not None and not is_copy(a)
            if unknown and self._distance(a, best) > _SAME:
                continue  # nor known to be, nor what it makes of it
            if set(places) <= {"same"} or len(fits) == 1 or equal_counts:
                if len(fits) > 1 and not equal_counts and self._is_taken(a, best, mine[key]):
                    continue
                self._add(a, best)
                return True
            near = [b for b, _ in fits if self._distance(a, b) <= _SAME]
            if near:
                self._add(a, min(near, key=lambda b: self._distance(a, b)))
                return True
        return False

    def _is_taken(self, a: CallNode, b: CallNode, group: list[CallNode]) -> bool:
        """Does another of the reference's calls fit it better, with equal scalars?"""
        return bool(other_scalars(a.call, b.call)) and any(
            not other_scalars(other.call, b.call)
            and set(self._places.compare(other, b)) <= {"same"}
            for other in group
            if other is not a
        )

    def _distance(self, a: CallNode, b: CallNode) -> float:
        if self._apart is None or a.results[0].numel != b.results[0].numel:
            return float("inf")
        key = (a.path, b.path)
        if key not in self._known:
            self._known[key] = self._apart(a, b)
        return self._known[key]

    def _by_value(self) -> bool:
        """Between two pairs, from the end: where a stretch ends both sides hold the same again."""
        stretches: dict[tuple[int, int], list[CallNode]] = defaultdict(list)
        for a in self.lone[0]:
            stretches[self._bounds(a)].append(a)
        added = False
        for (low, high), ours in stretches.items():
            theirs = [n for n in self.lone[1] if low < self._index[n.path] < high]
            end = len(theirs)
            for a in reversed(ours):
                for index in reversed(range(end)):
                    b = theirs[index]
                    if self._common_input(a, b) and self._distance(a, b) <= _SAME:
                        self._add(a, b, "value")
                        added, end = True, index
                        break
        return added

    def _bounds(self, node: CallNode) -> tuple[int, int]:
        """Between which of the candidate's calls its partner stands, if it has one."""
        first, last = -1, len(self._index)
        before = [m for m in self.found if m.reference.order < node.order]
        after = [m for m in self.found if m.reference.order > node.order]
        low, high = first, last
        if before:
            low = self._index[max(before, key=lambda m: m.reference.order).candidate.path]
        if after:
            high = self._index[min(after, key=lambda m: m.reference.order).candidate.path]
        return (low, high) if low <= high else (first, last)  # called in another order: anywhere

    def _common_input(self, a: CallNode, b: CallNode) -> bool:
        """Does something that both sides have lead to both?"""
        places = self._places
        mine = places.leaves(0, ("made", a.path)) if a.call.operands else set()
        theirs = places.leaves(1, ("made", b.path))
        return bool({places.in_candidates_words(leaf) for leaf in mine} & theirs)

    def _by_dataflow(self) -> bool:
        """Calls without a partner whose results go into the same argument of paired ones."""
        lone = [{node.path: node for node in nodes} for nodes in self.lone]
        for match in list(self.found):
            if match.reference.name != match.candidate.name:
                continue  # their arguments need not mean the same
            pairs = zip(match.reference.call.operands, match.candidate.call.operands, strict=False)
            for operand_a, operand_b in pairs:
                chains = _makers(operand_a, lone[0]), _makers(operand_b, lone[1])
                pair = next(((x, y) for x in chains[0] for y in chains[1] if _alike(x, y)), None)
                if pair is not None:
                    self._add(*pair, "dataflow")
                    return True
        return False

    def _move_behind_casts(self) -> None:
        """Pairs of two dtypes, where a cast of one side alone makes them one: laid behind it."""
        for match in list(self.found):
            ends = match.reference, match.candidate
            dtypes = [end.results[0].dtype for end in ends]
            if dtypes[0] == dtypes[1]:
                continue
            for side in (0, 1):
                casts = [
                    node
                    for node in self.lone[side]
                    if is_copy(node)
                    and ends[side].path in node.feeds
                    and node.results[0].dtype == dtypes[1 - side]
                    and node.results[0].numel == ends[side].results[0].numel
                ]
                if casts:
                    pair = (casts[0], ends[1]) if side == 0 else (ends[0], casts[0])
                    self._replace(match, pair)
                    break

    def _replace(self, match: Match, pair: tuple[CallNode, CallNode]) -> None:
        """Another pair in a pair's place."""
        self.found.remove(match)
        self._places.part(match.reference, match.candidate)
        self.lone[0].append(match.reference)
        self.lone[1].append(match.candidate)
        self._add(*pair, "value")
        for nodes in self.lone:
            nodes.sort(key=lambda node: node.order)

    def _move_behind(self) -> None:
        """Pairs whose result the other side holds only after calls of its own: laid where it is."""
        for match in list(self.found):
            for side, own, other in (
                (1, match.candidate, match.reference), (0, match.reference, match.candidate)
            ):  # fmt: skip
                ends = self._behind(side, own)
                if not ends:
                    continue
                pairs = [(other, end) if side == 1 else (end, other) for end in ends]
                here = self._distance(match.reference, match.candidate)
                best = min(pairs, key=lambda pair: self._distance(*pair))
                if self._distance(*best) < _NEARER * here and self._distance(*best) <= _SAME:
                    self._replace(match, best)
                    break

    def _behind(self, side: int, node: CallNode) -> list[CallNode]:
        """Calls without a partner that work on its result, and on theirs."""
        reached = {node.path}
        behind = []
        for other in sorted(self.lone[side], key=lambda n: n.order):
            sources = self._places.sources(side, other)
            if any(source[0] == "made" and source[1] in reached for source in sources):
                reached.add(other.path)
                if not is_copy(other):
                    behind.append(other)
        return behind


def _makers(operand: Operand, by_path: dict[str, CallNode]) -> list[CallNode]:
    """The call without a partner that made it, and, while that only copied, the one before."""
    makers: list[CallNode] = []
    made = maker_of(operand)
    while made in by_path:
        node = by_path[made]
        if node in makers:
            break
        makers.append(node)
        if not is_copy(node):
            break
        made = maker_of(node.call.operands[0])
    return makers


def _alike(a: CallNode, b: CallNode) -> bool:
    """The same shape but for axes of length 1: the numbers are in the same order."""
    shapes = [[size for size in node.results[0].shape if size != 1] for node in (a, b)]
    return shapes[0] == shapes[1]

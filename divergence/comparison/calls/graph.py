"""One forward's operators as a graph: the order of the calls, and whose results feed whom.

``Places`` tells the place of a call in the data flow: what its operands are, once copies are looked
through. An operand is the result of another call, a weight, or something from outside the recorded
modules. Copies and casts compute nothing, so the call before them is what counts (numbers that a
cast loses are found where they are compared). Two calls stand at the same place where each operand
of the one is the same thing as the other's: results of calls that are a pair, weights of one name
or of the same bytes, or both from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from divergence.run.contents import call_passes
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, Record
from divergence.run.site import is_operator_site

__all__ = [
    "COMMUTE",
    "COPIES",
    "CallNode",
    "Forward",
    "Places",
    "Source",
    "forwards_of",
    "is_copy",
    "maker_of",
    "operator_passes",
]  # fmt: skip

Forward = tuple[int, int]
"""(sample, step)"""


@dataclass(slots=True, eq=False)
class CallNode:
    """One call. ``path``: its site without the port; ``module``: what called it; ``name``: the
    operator without overload and in-place mark. ``feeds``: paths of the calls whose results
    it was given."""

    path: str
    module: str
    name: str
    call: Call
    results: list[Record] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)

    @property
    def order(self) -> int:
        return self.results[0].order

    @property
    def is_cast(self) -> bool:
        """Exact but for the rounding to another dtype."""
        return self.name in ("aten._to_copy", "aten.to")

    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """What the same call on another machine has in common with this one."""
        return self.module, self.name, self.results[0].shape


def operator_passes(run: Run) -> set[str]:
    """The passes in which a run recorded operators."""
    return set[str](call_passes(run.records))


def forwards_of(run: Run, pass_: str) -> dict[Forward, list[CallNode]]:
    """The calls of a pass in execution order, by forward."""
    by_forward: dict[Forward, dict[str, CallNode]] = {}
    records = (r for r in run.records if r.pass_ == pass_ and is_operator_site(r.site))
    for record in sorted(records, key=lambda r: (r.sample, r.step, r.order)):
        path, _, port = record.site.rpartition(":")
        if not port.startswith("out"):
            continue
        nodes = by_forward.setdefault((record.sample, record.step), {})
        if record.call is not None:
            module, _, operator = path.rpartition("/")
            name = operator.partition("#")[0]
            name = name.rstrip("_") if not name.endswith("__") else name
            nodes[path] = CallNode(path, module, name, record.call)
        if path in nodes:
            nodes[path].results.append(record)
    forwards = {forward: list(nodes.values()) for forward, nodes in by_forward.items()}
    for calls in forwards.values():
        known = {node.path for node in calls}
        for node in calls:
            makers = dict.fromkeys(maker_of(operand) for operand in node.call.operands)
            node.feeds += [maker for maker in makers if maker in known]
    return forwards


def maker_of(operand: Operand) -> str | None:
    """Path of the call whose result an operand is, or is a view of; None where none is known."""
    for site in (operand.site or "", operand.origin or ""):
        maker, _, port = site.rpartition(":")
        if port.startswith("out") and is_operator_site(site):
            return maker
    return None


COPIES = ("aten.clone", "aten.copy", "aten._to_copy", "aten.contiguous", "aten.to")

Source = tuple[Literal["made", "weight", "outside"], str]
"""What an operand is: the path of the call that made it, a weight's name, or where it comes from
outside, as far as known."""

Linkage = Literal["same", "linked", "rewired", "open", "other"]
"""Of two calls' operands. ``rewired``: both known and not the same thing; ``linked``: the one leads
to the other through calls without a partner; ``open``: both made by calls without a partner;
``other``: the one is known and the other does not come from it."""

COMMUTE = ("aten.add", "aten.mul", "aten.maximum", "aten.minimum")
"""Their operands may come in either order."""


def is_copy(node: CallNode) -> bool:
    """Does it hand on what it was given, in another layout or dtype at most?"""
    return node.name in COPIES and bool(node.call.operands)


class Places:
    """One forward of both sides, and the pairs found so far. ``rename``: the reference's sites in
    the candidate's words."""

    def __init__(
        self,
        reference: Iterable[CallNode],
        candidate: Iterable[CallNode],
        rename: Callable[[str], str],
    ) -> None:
        self.nodes = ({n.path: n for n in reference}, {n.path: n for n in candidate})
        self.partner: tuple[dict[str, str], dict[str, str]] = {}, {}
        """The reference's path to the candidate's, and back."""
        self._rename = rename
        self._sources: dict[tuple[int, str], list[Source]] = {}

    def pair(self, a: CallNode, b: CallNode) -> None:
        self.partner[0][a.path], self.partner[1][b.path] = b.path, a.path

    def part(self, a: CallNode, b: CallNode) -> None:
        """They are no pair after all."""
        del self.partner[0][a.path], self.partner[1][b.path]

    def lone(self, side: int, source: Source) -> bool:
        """Is it the result of a call without a partner?"""
        return source[0] == "made" and source[1] not in self.partner[side]

    def sources(self, side: int, node: CallNode) -> list[Source]:
        """One for each operand, copies looked through."""
        key = (side, node.path)
        if key not in self._sources:
            self._sources[key] = [self.source(side, operand) for operand in node.call.operands]
        return self._sources[key]

    def source(self, side: int, operand: Operand) -> Source:
        nodes = self.nodes[side]
        for _ in range(len(nodes) + 1):
            made = maker_of(operand)
            if operand.weight is not None:
                return "weight", operand.weight
            if made is None or made not in nodes:
                return "outside", operand.origin or ""
            if not is_copy(nodes[made]):
                return "made", made
            last = nodes[made].name == "aten.copy" and len(nodes[made].call.operands) > 1
            operand = nodes[made].call.operands[1 if last else 0]
        return "outside", ""  # a stranger's run may go in circles

    def leaves(self, side: int, source: Source) -> set[Source]:
        """What it comes from, through calls without a partner; itself where it is none."""
        sources: set[Source] = set()
        waiting, seen = [source], {source}
        while waiting:
            current = waiting.pop()
            if not self.lone(side, current):
                sources.add(current)
                continue
            before = set(self.sources(side, self.nodes[side][current[1]])) - seen
            waiting += before
            seen |= before
        return sources

    def in_candidates_words(self, source: Source) -> Source:
        """A reference's source that has a partner, or stands outside, as the candidate has it."""
        kind, name = source
        if kind == "made":
            return kind, self.partner[0].get(name, "")
        if kind == "weight":
            module, _, last = name.rpartition(".")
            renamed = self._rename(f"{module}:out").rpartition(":")[0]
            return kind, f"{renamed}.{last}" if module else name
        return kind, self._rename(name) if name else name

    def compare(self, a: CallNode, b: CallNode) -> list[Linkage]:
        """Operand by operand; of a sum or a product in whichever order fits better."""
        mine, theirs = self.sources(0, a), self.sources(1, b)
        linkages = [
            self._operand(a, b, number, number, x, y)
            for number, (x, y) in enumerate(zip(mine, theirs, strict=False))
        ]
        swaps = a.name in COMMUTE and len(mine) == len(theirs) == 2
        if swaps and set(linkages) != {"same"}:
            turned = [self._operand(a, b, n, 1 - n, mine[n], theirs[1 - n]) for n in (0, 1)]
            if turned.count("same") > linkages.count("same"):
                return turned
        return linkages

    def _operand(self, a: CallNode, b: CallNode, m: int, n: int, x: Source, y: Source) -> Linkage:
        lone = self.lone(0, x), self.lone(1, y)
        if all(lone):
            return "open"
        if not any(lone):
            if x[0] == y[0] == "outside" and "" in (x[1], y[1]):
                return "same"  # their values tell (operators.operands)
            if self.in_candidates_words(x) == y:
                return "same"
            mine, other = a.call.operands[m], b.call.operands[n]
            if mine.weight and other.weight and (mine.xxh3, mine.offset) == (
                other.xxh3, other.offset
            ):  # fmt: skip
                return "same"
            return "rewired"
        if ("outside", "") in (x, y):  # memory that several calls wrote to: unknown
            return "open"
        if lone[1]:
            return "linked" if self.in_candidates_words(x) in self.leaves(1, y) else "other"
        inside = {self.in_candidates_words(leaf) for leaf in self.leaves(0, x)}
        return "linked" if y in inside else "other"

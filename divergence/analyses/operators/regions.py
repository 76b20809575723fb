"""Regions: where the sides compute one thing by other operators, as one step.

A region reaches from the last inputs that both sides have to the first result that both have: a
fused attention against its products and its softmax, one matrix product against eight of its
parts, three projections against one. Its members are the calls without a partner that lead to the
common result, and those that give it. The common result is a pair that was matched by its value or
by dataflow, or what a paired call was given as the same argument (a part of a fused projection's
result, say, which is no call's result by itself).

A call of one side alone that both sides' values lead through (a cast, a copy, a plant) makes no
region: what it feeds tells of it (``fed_by``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from divergence.analyses.operators.products import CONSTANTS
from divergence.comparison.calls.graph import CallNode, Places, Source, is_copy
from divergence.comparison.calls.match import Match
from divergence.facts import Fact, fact
from divergence.run.record import Operand

__all__ = ["Region", "Regions", "computing", "counted", "regions_in"]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """``reference``, ``candidate``: the members in execution order; the last gives the common
    result. ``operands``: where that is an argument of a paired call, its operand on each side and
    the two calls (``consumer``). ``inputs``: the sources that both sides begin from."""

    reference: list[CallNode]
    candidate: list[CallNode]
    inputs: list[Source]
    match: Match | None = None
    consumer: Match | None = None
    number: int = 0
    """Of the operand among the consumer's."""

    def operands(self) -> tuple[Operand, Operand] | None:
        if self.consumer is None:
            return None
        calls = self.consumer.reference.call, self.consumer.candidate.call
        return calls[0].operands[self.number], calls[1].operands[self.number]

    @property
    def is_copied(self) -> bool:
        """Do both sides but copy there, in one dtype? That makes no error: what is copied does."""
        results = [result for node in (*self.reference, *self.candidate) for result in node.results]
        return all(map(is_copy, (*self.reference, *self.candidate))) and (
            len({result.dtype for result in results}) == 1
        )

    @property
    def replaced(self) -> Fact:
        """``8 products and 7 additions in place of one product``."""
        candidate, reference = counted(self.candidate), counted(self.reference)
        shapes = [side[-1].results[0].shape for side in (self.candidate, self.reference)]
        alike = candidate == reference  # then their shapes tell
        if alike and shapes[0] == shapes[1]:
            return fact("operators.other_layouts", calls=candidate)
        return fact(
            "operators.in_place_of", candidate=candidate, reference=reference,
            candidate_shape=shapes[0] if alike else None,
            reference_shape=shapes[1] if alike else None,
        )  # fmt: skip


@dataclass(slots=True)
class Regions:
    """Of one forward. ``by_pair``: of a pair's reference path; ``of_operands``: those whose common
    result is an argument; ``unreached``: calls without a partner that lead to nothing that both
    sides have, on each side: what could not be compared."""

    by_pair: dict[str, Region] = field(default_factory=dict)
    of_operands: list[Region] = field(default_factory=list)
    unreached: tuple[list[CallNode], list[CallNode]] = field(default_factory=lambda: ([], []))
    members: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))


def regions_in(
    reference: Sequence[CallNode],
    candidate: Sequence[CallNode],
    matches: Sequence[Match],
    rename: Callable[[str], str] = lambda site: site,
) -> Regions:
    """The regions of one forward, given its pairs."""
    places = Places(reference, candidate, rename)
    for match in matches:
        places.pair(match.reference, match.candidate)
    regions = Regions()
    reached: tuple[set[str], set[str]] = (set(), set())
    for match in matches:
        nodes = match.reference, match.candidate
        before = [_before(places, side, nodes[side]) for side in (0, 1)]
        for side in (0, 1):
            reached[side].update(node.path for node in before[side])
        if match.method in ("value", "dataflow") or nodes[0].name != nodes[1].name:
            region = _region(places, [*before[0], nodes[0]], [*before[1], nodes[1]], match=match)
            regions.by_pair[match.reference.path] = region
            _hold(regions, region, places)
            continue
        for number, makers in enumerate(_open_operands(places, match)):
            if makers is None:
                continue
            chains = [[*_before(places, side, makers[side]), makers[side]] for side in (0, 1)]
            region = _region(places, *chains, consumer=match, number=number)
            _keep_largest(regions.of_operands, region)
            _hold(regions, region, places)
    for side, calls in enumerate((reference, candidate)):
        regions.unreached[side].extend(
            node
            for node in calls
            if places.lone(side, ("made", node.path))
            and node.path not in reached[side]
            and not is_copy(node)
        )
    return regions


def _hold(regions: Regions, region: Region, places: Places) -> None:
    """Its members, and the copies of one side alone among them, are in a region."""
    for side, members in enumerate((region.reference, region.candidate)):
        own = regions.members[side]
        own.update(node.path for node in members)
        waiting = list(members)
        while waiting:
            for feed in waiting.pop().feeds:
                node = places.nodes[side].get(feed)
                if node is None or feed in own or not places.lone(side, ("made", feed)):
                    continue
                if is_copy(node):
                    own.add(feed)
                    waiting.append(node)


def _keep_largest(known: list[Region], region: Region) -> None:
    """Of one common result that several calls are given, the call that is given most of it."""
    for index, other in enumerate(known):
        if (other.reference[-1], other.candidate[-1]) == (
            region.reference[-1], region.candidate[-1]
        ):  # fmt: skip
            mine, held = region.operands(), other.operands()
            assert mine is not None and held is not None  # the result is an argument
            if math.prod(mine[0].shape) > math.prod(held[0].shape):
                known[index] = region
            return
    known.append(region)


def _open_operands(places: Places, match: Match) -> list[tuple[CallNode, CallNode] | None]:
    """Of each operand the calls without a partner that made it on both sides."""
    mine, theirs = places.sources(0, match.reference), places.sources(1, match.candidate)
    operands: list[tuple[CallNode, CallNode] | None] = []
    for x, y in zip(mine, theirs, strict=False):
        both = places.lone(0, x) and places.lone(1, y)
        operands.append((places.nodes[0][x[1]], places.nodes[1][y[1]]) if both else None)
    return operands


def _before(places: Places, side: int, node: CallNode) -> list[CallNode]:
    """Calls without a partner that lead to it, in order; copies are looked through."""
    reached: dict[str, CallNode] = {}
    waiting = [node]
    while waiting:
        for source in places.sources(side, waiting.pop()):
            if places.lone(side, source) and source[1] not in reached and source[1] != node.path:
                reached[source[1]] = places.nodes[side][source[1]]
                waiting.append(reached[source[1]])
    return sorted(reached.values(), key=lambda call: call.order)


def _region(
    places: Places,
    mine: list[CallNode],
    theirs: list[CallNode],
    *,
    match: Match | None = None,
    consumer: Match | None = None,
    number: int = 0,
) -> Region:
    own = {node.path for node in mine}
    sources = (source for node in mine for source in places.sources(0, node))
    begins = dict.fromkeys(source for source in sources if source[1] not in own)
    return Region(mine, theirs, list(begins), match, consumer, number)


_WORDS = {
    "product": ("mm", "bmm", "matmul", "linear", "mv", "dot", "_scaled_mm", "_grouped_mm", "einsum",
                "convolution"),
    "product_with_bias": ("addmm", "baddbmm", "addmv", "addbmm"),
    "addition": ("add", "sub", "rsub", "__iadd__"),
    "multiplication": ("mul", "__imul__"),
    "division": ("div",),
    "softmax": ("_softmax", "_safe_softmax", "_log_softmax"),
    "sum": ("sum", "cumsum"),
    "mean": ("mean",),
    "power": ("pow", "square"),
    "root": ("rsqrt", "sqrt"),
    "concatenation": ("cat", "stack"),
    "cast": ("_to_copy", "to"),
    "copy": ("clone", "copy", "contiguous"),
}  # fmt: skip
_NAMES = {name: word for word, names in _WORDS.items() for name in names}


def computing(nodes: Sequence[CallNode]) -> list[CallNode]:
    """Those that are no copies, casts or constants."""
    return [node for node in nodes if not is_copy(node) and node.name not in CONSTANTS]


def counted(nodes: Sequence[CallNode]) -> list[Fact]:
    """How many of what: ``8 products and 7 additions``. Copies and casts only where nothing else
    is there."""
    counts = Counter(_kind(node) for node in computing(nodes) or nodes)
    calls = [fact("operators.calls", num=num, kind=kind) for kind, num in counts.items()]
    if len(calls) > 4:
        rest = sum(list(counts.values())[3:])
        calls = [*calls[:3], fact("operators.more_calls", num=rest)]
    return calls or [fact("operators.no_calls")]


def _kind(node: CallNode) -> str:
    name = node.name.partition(".")[2]
    if "attention" in name:
        return "fused_attention"
    if "norm" in name and name != "linalg_vector_norm":
        return "fused_norm"
    return _NAMES.get(name, name or node.name)

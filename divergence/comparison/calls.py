"""Calls of two runs' operators matched: graphs, choices that depend on values, and pairs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from divergence.comparison.constants import SAME_VALUE_DISTANCE
from divergence.run.contents import call_passes
from divergence.run.reader import Run
from divergence.run.record import Call, Operand, Record, other_scalars
from divergence.run.site import BACKWARD, is_operator_site

if TYPE_CHECKING:
    import torch

# One forward's operators as a graph: the order of the calls, and whose results feed whom.
#
# ``Places`` tells the place of a call in the data flow: what its operands are, once copies are
# looked through. An operand is the result of another call, a weight, or something from outside the
# recorded modules. Copies and casts compute nothing, so the call before them is what counts
# (numbers that a cast loses are found where they are compared). Two calls stand at the same place
# where each operand of the one is the same thing as the other's: results of calls that are a pair,
# weights of one name or of the same bytes, or both from outside.

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
        """Return what the same call on another machine has in common with this one."""
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
        paths = {node.path for node in calls}
        for node in calls:
            makers = dict.fromkeys(maker_of(operand) for operand in node.call.operands)
            node.feeds += [maker for maker in makers if maker in paths]
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
        """Return what it comes from, through calls without a partner; itself where it is none."""
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
        sources_a, sources_b = self.sources(0, a), self.sources(1, b)
        linkages = [
            self._operand(a, b, number, number, x, y)
            for number, (x, y) in enumerate(zip(sources_a, sources_b, strict=False))
        ]
        swaps = a.name in COMMUTE and len(sources_a) == len(sources_b) == 2
        if swaps and set(linkages) != {"same"}:
            turned = [self._operand(a, b, n, 1 - n, sources_a[n], sources_b[1 - n]) for n in (0, 1)]
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
            operand, other = a.call.operands[m], b.call.operands[n]
            if (
                operand.weight
                and other.weight
                and (operand.xxh3, operand.offset) == (other.xxh3, other.offset)
            ):
                return "same"
            return "rewired"
        if ("outside", "") in (x, y):  # memory that several calls wrote to: unknown
            return "open"
        if lone[1]:
            return "linked" if self.in_candidates_words(x) in self.leaves(1, y) else "other"
        inside = {self.in_candidates_words(leaf) for leaf in self.leaves(0, x)}
        return "linked" if y in inside else "other"


# Matching two sequences of operators: the same model code need not call the same kernels.
#
# Two calls are a pair only if they do the same job: the same operator in the same module, operands
# and result of equal shapes, and an equal place in the data flow (calls.graph). From the block's
# inputs on, calls whose operands are the same things are paired; calls that differ in a scalar
# alone are a pair too, and are reported for it. Where nothing more can be paired so, the first call
# that can only be one other call is (other wiring, or behind a stretch that the sides compute
# differently), and it goes on from there.
#
# What is left between two pairs are stretches where one side took other operators (a fused kernel,
# a vendor's, another release's): there the last results of equally many numbers that are the same
# value, up to an error far beyond any rounding, are laid side by side. Where a fault is so large
# that no value is the same, dataflow decides: what a matched call was given as the same argument on
# both sides is the same thing, whatever its value. A pair whose result the other side only holds
# after more calls (a product in two parts, the first of which alone is near) is moved to where both
# hold it. What has no partner is said to have none: nothing is paired by guess.

Method = Literal["exact", "sequence", "value", "dataflow"]

Apart = Callable[[CallNode, CallNode], float]
"""How far two calls' first results are apart, relatively; infinity where nothing can be said."""

_Job = tuple[object, ...]
"""What two calls that do the same job have in common: module, operator, shapes."""

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
    """Matches two recordings of the very same calls, as a replay is one, by their names."""
    nodes_b = {node.path: node for node in candidate}
    matches = [
        Match(entry, nodes_b[entry.path], "exact") for entry in reference if entry.path in nodes_b
    ]
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
    """Matches calls: (matches in order, the reference's alone, the candidate's alone).

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
            keyed_b = self._by_key(1)
            added = 0
            for a in list(self.lone[0]):
                group = keyed_b.get(self._key(0, a), [])
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
        keyed_a, keyed_b = self._by_key(0), self._by_key(1)
        for a in self.lone[0]:
            key = self._key(0, a)
            group = keyed_b.get(key, [])
            fits = [(b, self._places.compare(a, b)) for b in group[:_MOST]]
            never = {"other", "rewired"} if is_copy(a) else {"other"}
            fits = [(b, places) for b, places in fits if not never & set(places)]
            if not fits:
                continue
            named = self._rename(f"{a.path}:out").rpartition(":")[0]
            fits.sort(
                key=lambda fit: (
                    -fit[1].count("same"),
                    fit[0].path != named,
                    bool(other_scalars(a.call, fit[0].call)),
                )
            )
            best, places = fits[0]
            equal_counts = len(keyed_a[key]) == len(group)
            if set(places) == {"rewired"} and best.path != named:
                continue  # nothing that it is given is the same
            unknown = set(places) == {"open"} and self._apart is not None and not is_copy(a)
            if unknown and self._distance(a, best) > SAME_VALUE_DISTANCE:
                continue  # nor known to be, nor what it makes of it
            if set(places) <= {"same"} or len(fits) == 1 or equal_counts:
                fits_another = (
                    len(fits) > 1
                    and not equal_counts
                    and other_scalars(a.call, best.call)
                    and any(  # of the reference's calls, with equal scalars
                        other is not a
                        and not other_scalars(other.call, best.call)
                        and set(self._places.compare(other, best)) <= {"same"}
                        for other in keyed_a[key]
                    )
                )
                if fits_another:
                    continue
                self._add(a, best)
                return True
            near = [b for b, _ in fits if self._distance(a, b) <= SAME_VALUE_DISTANCE]
            if near:
                self._add(a, min(near, key=lambda b: self._distance(a, b)))
                return True
        return False

    def _distance(self, a: CallNode, b: CallNode) -> float:
        if self._apart is None or a.results[0].numel != b.results[0].numel:
            return float("inf")
        key = (a.path, b.path)
        if key not in self._known:
            self._known[key] = self._apart(a, b)
        return self._known[key]

    def _by_value(self) -> bool:
        """Matches by values between two pairs, from the end: where a stretch ends both hold the
        same."""
        stretches: dict[tuple[int, int], list[CallNode]] = defaultdict(list)
        for a in self.lone[0]:
            stretches[self._bounds(a)].append(a)
        added = False
        places = self._places
        for (low, high), ours in stretches.items():
            candidates = [n for n in self.lone[1] if low < self._index[n.path] < high]
            end = len(candidates)
            for a in reversed(ours):
                # what leads to both must be something that both sides have
                leaves = places.leaves(0, ("made", a.path)) if a.call.operands else ()
                values = {places.in_candidates_words(leaf) for leaf in leaves}
                for index in reversed(range(end)):
                    b = candidates[index]
                    common = values & places.leaves(1, ("made", b.path))
                    if common and self._distance(a, b) <= SAME_VALUE_DISTANCE:
                        self._add(a, b, "value")
                        added, end = True, index
                        break
        return added

    def _bounds(self, node: CallNode) -> tuple[int, int]:
        """Finds between which of the candidate's calls its partner stands, if it has one."""
        low, high = -1, len(self._index)
        before = [m for m in self.found if m.reference.order < node.order]
        after = [m for m in self.found if m.reference.order > node.order]
        if before:
            low = self._index[max(before, key=lambda m: m.reference.order).candidate.path]
        if after:
            high = self._index[min(after, key=lambda m: m.reference.order).candidate.path]
        # called in another order: anywhere
        return (low, high) if low <= high else (-1, len(self._index))

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
                (1, match.candidate, match.reference),
                (0, match.reference, match.candidate),
            ):
                ends = self._behind(side, own)
                if not ends:
                    continue
                pairs = [(other, end) if side == 1 else (end, other) for end in ends]
                here = self._distance(match.reference, match.candidate)
                best = min(pairs, key=lambda pair: self._distance(*pair))
                if self._distance(*best) < here and self._distance(*best) <= SAME_VALUE_DISTANCE:
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
    """Are the shapes the same but for axes of length 1, so that numbers are in the same order?"""
    shapes = [[size for size in node.results[0].shape if size != 1] for node in (a, b)]
    return shapes[0] == shapes[1]


# Integer results of operators, and the tokens that the sides send to other experts.
#
# Indices that an operator chose may differ where the values chosen between are as near as the two
# sides' inputs are; other integers may not differ where the same numbers went in (``count_codes``).
#
# Two experts whose scores are nearer than rounding are chosen differently by correct machines. From
# there on the rows of that token are other rows, on one side or in the truth, and the experts'
# inputs, sorted by expert, hold all rows in another order. So behind a choice that differs (an
# integer result of ``topk`` or the like, one row a token), in one forward (``rerouted_in``):
#
# - the rows of tokens that are chosen for alike on both sides and in the truth are compared,
# - rows that were sorted by expert are put back into the tokens' order first: the permutation is
#   itself an integer result (of ``sort``), on each side its own,
# - what is neither by token nor by choice (counts an expert, say) is not compared, nor is what a
#   backward makes of it: the gradient of a weight is a sum over all tokens.

CHOOSING = ("topk", "argmax", "argmin", "max", "min", "sort", "argsort")

Read = Callable[[Match, int], "tuple[torch.Tensor | None, ...]"]
"""A result of a match on the reference, the candidate, and what is right (None without)."""


class Rerouted:
    """One choice that differs. ``kept``: (T,) tokens chosen for alike; ``num_chosen``: a token."""

    def __init__(self, kept: torch.Tensor, num_chosen: int) -> None:
        self.kept, self.num_chosen = kept, num_chosen
        self.behind: set[str] = set()
        """Paths of the reference's calls that work on what was chosen."""
        self.orders: dict[str, tuple[torch.Tensor, ...]] = {}
        """By path of a call behind a permutation: how each side's rows were ordered."""

    def align(
        self, path: str, tensors: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Return what may be compared of a result, rows first; None where nothing may.

        ``tensors``: the reference's, the candidate's and the right one, if there is one."""
        if path not in self.behind:
            return tuple(tensors)
        if BACKWARD in path:  # sums over tokens, and rows in whichever order
            return None
        num_tokens, num_rows = len(self.kept), len(self.kept) * self.num_chosen
        first = tensors[0]
        assert first is not None  # both sides made the result
        rows = first.shape[0] if first.ndim else 1
        by_choice = self.kept.repeat_interleave(self.num_chosen)
        if rows == num_rows and rows != num_tokens:
            orders = self.orders.get(path)
            if orders is None:
                return tuple(None if t is None else t[by_choice] for t in tensors)
            if any(t is not None and n >= len(orders) for n, t in enumerate(tensors)):
                return None
            return tuple(
                None if t is None else t[orders[n].argsort()][by_choice]
                for n, t in enumerate(tensors)
            )
        leading = math.prod(first.shape[:-1])
        if leading == num_tokens and first.ndim > 1:
            return tuple(None if t is None else t.reshape(leading, -1)[self.kept] for t in tensors)
        return None


def rerouted_in(
    matches: Sequence[Match], read: Read, *, left_out: torch.Tensor | None = None
) -> list[Rerouted]:
    """The choices of one forward that differ, with what is behind each. ``left_out``: (T,) tokens
    that are none, a batch's pads: wherever they are sent to, they are not compared."""
    import torch

    nodes = {match.reference.path: match for match in matches}
    rerouted: list[Rerouted] = []
    for match in matches:
        chosen = _chosen(match)
        if chosen is None:
            continue
        indices = [t for t in read(match, chosen) if t is not None]
        if any(t.shape != indices[0].shape for t in indices):
            continue
        alike = torch.stack([(t == indices[0]).all(-1) for t in indices]).all(0)
        if left_out is not None and left_out.shape == alike.shape:
            alike &= ~left_out
        if bool(alike.all()):
            continue
        routing = Rerouted(alike, indices[0].shape[-1])
        _follow(routing, match.reference.path, nodes, read)
        rerouted.append(routing)
    return rerouted


def _chosen(match: Match) -> int | None:
    """Say which result of a choice are the indices: one row a token, several or one chosen."""
    if any(n.name.partition(".")[2] not in CHOOSING for n in (match.reference, match.candidate)):
        return None
    for index, record in enumerate(match.reference.results):
        if record.dtype.startswith("int") and len(record.shape) == 2 and record.shape[-1] <= 64:
            return index if len(match.candidate.results) > index else None
    return None


def _follow(routing: Rerouted, start: str, nodes: dict[str, Match], read: Read) -> None:
    """Everything fed by ``start``, and which of it lies behind a permutation of the rows."""
    import torch

    num_rows = len(routing.kept) * routing.num_chosen
    sorted_by: dict[str, tuple[torch.Tensor, ...]] = {}
    undone: set[str] = set()
    for path, match in nodes.items():  # in order: what feeds a call comes before it
        feeds = [feed for feed in match.reference.feeds if feed in routing.behind or feed == start]
        if not feeds:
            continue
        routing.behind.add(path)
        order = next((sorted_by[feed] for feed in feeds if feed in sorted_by), None)
        if order is not None and any(feed in undone for feed in feeds):
            order = None  # a permuted tensor through the inverse permutation
        permutation = _permutation(match, num_rows, read) if order is None else None
        if permutation is not None:
            order = permutation
        elif order is not None:  # is the result the inverse permutation?
            record = match.reference.results[0]
            if record.shape == tuple(order[0].shape) and record.dtype.startswith("int"):
                inverse = read(match, 0)[0]
                assert inverse is not None  # the reference made it
                inside = bool(((inverse >= 0) & (inverse < len(order[0]))).all())
                if inside and torch.equal(inverse[order[0]], torch.arange(len(order[0]))):
                    undone.add(path)
        if order is not None:
            sorted_by[path] = order
            routing.orders[path] = order


def _permutation(match: Match, num_rows: int, read: Read) -> tuple[torch.Tensor, ...] | None:
    """Reads how a sort ordered the rows, on each side."""
    import torch

    if match.reference.name.partition(".")[2] not in ("sort", "argsort"):
        return None
    for index, record in enumerate(match.reference.results):
        if record.shape != (num_rows,) or not record.dtype.startswith("int"):
            continue
        orders = tuple(t for t in read(match, index) if t is not None)
        whole = torch.arange(num_rows)
        if all(t.shape == whole.shape and torch.equal(t.sort().values, whole) for t in orders):
            return orders
    return None


@dataclass(slots=True)
class IntegerCodes:
    """Integer results. ``differing``: elements that the sides do not share; ``unexplained``: of
    these, what rounding of the inputs does not explain; ``wrong``: of the unexplained ones,
    what differs from the truth, on each side."""

    differing: int = 0
    unexplained: int = 0
    wrong: list[int] = field(default_factory=lambda: [0, 0])


def count_codes(
    codes: IntegerCodes,
    match: Match,
    x: torch.Tensor,
    y: torch.Tensor,
    r: torch.Tensor | None,
    a: Run,
    b: Run,
) -> None:
    import torch

    y = y.reshape(x.shape)
    other = x != y
    codes.differing += int(other.sum())
    p, q = _entering(match.reference, a), _entering(match.candidate, b)
    both = None if p is None or q is None else (p, q)
    chooses = match.reference.name.partition(".")[2] in CHOOSING
    if chooses and both and all(t.is_floating_point() for t in both):
        # per chosen index: are the two choices nearer to each other than the inputs are? Exact ties
        # are not explained: there the order of ties is the operator's own
        odd, dim = other, match.reference.call.arguments.get("dim", -1)
        u, v = (side.double() for side in both)
        if isinstance(dim, int) and u.shape == v.shape and u.ndim == x.ndim:
            gaps = [(side.gather(dim, x) - side.gather(dim, y)).abs() for side in (u, v)]
            apart = (u - v).abs().amax(dim, keepdim=True)
            near = (gaps[0] <= 4 * apart) & (gaps[1] <= 4 * apart)
            odd = other & ~(near & ~((gaps[0] == 0) & (gaps[1] == 0)))
    else:  # the same numbers went in: the codes must be the same; else they may not be
        equal = both is not None and torch.equal(*both)
        odd = other if equal else torch.zeros_like(other)
    codes.unexplained += int(odd.sum())
    if r is not None and not r.is_floating_point() and r.numel() == x.numel():
        for side, chosen in enumerate((x, y)):
            codes.wrong[side] += int((odd & (chosen != r.reshape(x.shape))).sum())


def _entering(node: CallNode, run: Run) -> torch.Tensor | None:
    """The first operand's value, as the operator saw it."""
    if not node.call.operands:
        return None
    own, operand = node.results[0], node.call.operands[0]
    if operand.site is None:
        return None
    record = run.find((own.pass_, own.sample, own.step, operand.site))
    return None if record is None else run.read(record).reshape(operand.shape)


def reached(
    start: Iterable[CallNode], onward: Callable[[CallNode], Iterable[CallNode]]
) -> list[CallNode]:
    """All calls to which ``onward`` leads from these, step by step, each once."""
    waiting, nodes = list(start), dict[str, CallNode]()
    while waiting:
        for node in onward(waiting.pop()):
            if node.path not in nodes:
                nodes[node.path] = node
                waiting.append(node)
    return list(nodes.values())

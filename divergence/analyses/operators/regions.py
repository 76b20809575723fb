"""Operators that do one job together: regions, products, and the pads that they pass over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from divergence.comparison.calls import CallNode, Forward, Match, Places, Source, is_copy, maker_of
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named
from divergence.run.manifest import Manifest
from divergence.run.reader import Run
from divergence.run.record import Operand, Record

# A region of products and additions against an ideal product: how often is its result rounded?
#
# An ideal product adds up in float32 and rounds once, when its result is stored: 0.41 u relative,
# measured here as ‖round(R) - R‖. The same product in k equal parts that are stored in 16 bits and
# added up one after the other rounds each part (together once the result) and each running sum
# (j / k of the result's square): √(1 + (k + 1) / 2 - 1 / k) roundings of the result, 1.4 for two
# parts and for a product whose bias is added afterwards, 1.8 for four, 2.3 for eight, 3.1 for
# sixteen. Both sides' errors against the truth hide that, since they hold what came in too; so each
# side's region is computed again in float64 from its own recorded inputs, and only what the region
# itself adds is judged (Higham 2002, chapter 4; numerics.floor for one rounding).
#
# Only for regions of products, additions and copies with the weights' values recorded, and for
# results in 16 bits: a fused attention or norm rounds its intermediates by its own right, and in
# float32 the accumulator makes the error. Everything else abstains.

_PRODUCTS = ("aten.mm", "aten.bmm", "aten.mv", "aten.matmul", "aten.addmm", "aten.baddbmm",
             "aten.linear")  # fmt: skip
_ONE_ROUNDING = 0.41  # u, rms (numerics.floor)
_SUMS = ("aten.add", "aten.sub", "aten.cat", "aten.stack", "aten.sum")
CONSTANTS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.full", "aten.full_like")
"""What sums begin with."""


@dataclass(slots=True)
class RegionError:
    """What a side's region itself adds, squared and summed over rows: ‖y - R‖² / ‖R‖² and, of an
    ideal product, ‖round(R) - R‖² / ‖R‖² (0.41 u where everything happens to be stored exactly)."""

    own: float = 0.0
    ideal: float = 0.0
    num_rows: int = 0
    num_values: int = 0

    def add(self, other: RegionError) -> None:
        self.own += other.own
        self.ideal += other.ideal
        self.num_rows += other.num_rows
        self.num_values += other.num_values

    @property
    def times(self) -> float:
        """The own error over an ideal product's; 1 where both are exact."""
        if self.ideal > 0:
            return math.sqrt(self.own / self.ideal)
        return 1.0 if self.own == 0 else math.inf


def is_product_region(nodes: Sequence[CallNode]) -> bool:
    """Products, additions and copies alone, a product among them, stored in 16 bits."""
    if not any(node.name in _PRODUCTS for node in nodes):
        return False
    if not all(node.name in _PRODUCTS + _SUMS + CONSTANTS or is_copy(node) for node in nodes):
        return False
    form = format_named(nodes[-1].results[0].dtype)
    return form.kind == "float" and form.itemsize == 2


def own_error(run: Run, nodes: Sequence[CallNode]) -> RegionError | None:
    """Of the region ``nodes`` (in order, the last gives the result) in one forward; None where an
    input was not recorded or an operator cannot be computed here."""
    made: dict[str, torch.Tensor] = {}
    paths = {node.path for node in nodes}
    for node in nodes:
        if node.name in CONSTANTS:
            made[node.path] = run.read(node.results[0]).to(torch.float64)
            continue
        known = [_value(run, node, operand, made, paths) for operand in node.call.operands]
        values = [value for value in known if value is not None]
        if len(values) < len(known):
            return None
        result = _computed(node, values)
        if result is None or result.numel() != node.results[0].numel:
            return None
        made[node.path] = result.reshape(node.results[0].shape)
    last = nodes[-1].results[0]
    columns = last.shape[-1] if last.shape else 1
    truth = made[nodes[-1].path].reshape(-1, columns)
    value = run.read(last)
    stored = truth.to(value.dtype).to(torch.float64)
    value = value.reshape(-1, columns).to(torch.float64)
    norm = truth.norm(dim=1)
    kept = (norm > 0) & value.isfinite().all(1) & stored.isfinite().all(1)
    if not bool(kept.any()):
        return None
    parts = [((out - truth)[kept].norm(dim=1) / norm[kept]).square() for out in (value, stored)]
    num_rows, u = int(kept.sum()), format_named(last.dtype).unit_roundoff
    ideal = float(parts[1].sum()) or num_rows * (_ONE_ROUNDING * u) ** 2
    return RegionError(float(parts[0].sum()), ideal, num_rows, num_rows * columns)


def _value(
    run: Run, node: CallNode, operand: Operand, made: dict[str, torch.Tensor], paths: set[str]
) -> torch.Tensor | None:
    maker = maker_of(operand)
    if operand.weight is None and maker in paths:
        if maker not in made or operand.via or operand.stride is not None:
            return None
        value = made[maker]
        return value.reshape(operand.shape) if value.numel() == math.prod(operand.shape) else None
    own = node.results[0]
    record = operand.site and run.find((own.pass_, own.sample, own.step, operand.site))
    if not record or not run.has_bytes(record):
        return None
    if operand.weight is not None:
        return _part(run, record, operand)
    if record.numel != math.prod(operand.shape):
        return None
    return run.read(record).reshape(operand.shape).to(torch.float64)


def _part(run: Run, record: Record, operand: Operand) -> torch.Tensor | None:
    """A weight as the operator saw it."""
    if record.xxh3 != operand.xxh3:
        return None
    flat = run.read(record).contiguous().reshape(-1)
    stride = operand.stride
    if stride is None:
        return flat[operand.offset :][: math.prod(operand.shape)].reshape(operand.shape).double()
    last = sum(max(size - 1, 0) * step for size, step in zip(operand.shape, stride, strict=False))
    if len(stride) != len(operand.shape) or operand.offset + last >= flat.numel():
        return None
    return flat.as_strided(operand.shape, stride, operand.offset).double()


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _are_dims(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(dim) is int for dim in value)


def _computed(node: CallNode, values: list[torch.Tensor]) -> torch.Tensor | None:
    """In float64; None for what is no plain product or addition."""
    arguments, name = node.call.arguments, node.name
    alpha, beta = arguments.get("alpha", 1), arguments.get("beta", 1)
    if not (_is_number(alpha) and _is_number(beta)):
        return None
    try:
        if is_copy(node):
            return values[-1] if name == "aten.copy" else values[0]
        if name in ("aten.mm", "aten.bmm", "aten.mv", "aten.matmul") and len(values) == 2:
            return values[0] @ values[1]
        if name == "aten.linear":
            product = values[0] @ values[1].T
            return product + values[2] if len(values) == 3 else product
        if name in ("aten.addmm", "aten.baddbmm") and len(values) == 3:
            return beta * values[0] + alpha * (values[1] @ values[2])
        if name in ("aten.add", "aten.sub"):
            other = values[1] if len(values) == 2 else arguments.get("other")
            if not values or not isinstance(other, torch.Tensor | int | float):
                return None
            return values[0] + (alpha if name == "aten.add" else -alpha) * other
        if name in ("aten.cat", "aten.stack"):
            dim = arguments.get("dim", 0)
            join = torch.cat if name == "aten.cat" else torch.stack
            return join(values, dim) if type(dim) is int else None
        if name == "aten.sum" and len(values) == 1:
            dims = arguments.get("dim")
            if dims is None:
                return values[0].sum()
            if not _are_dims(dims):
                return None
            return values[0].sum(dims, keepdim=arguments.get("keepdim") is True)
    except (RuntimeError, IndexError):  # shapes that a stranger's run claims
        return None
    return None


# Rows of pads in a batch's results: what stands there is no result.
#
# A pad's query sees no key, and what attention makes of none is any kernel's own choice: a fused
# one gives zeros, products and a softmax the mean of all values. Behind it the pads' rows are as
# far apart as two numbers can be, on two correct machines. So they are cleared before anything is
# measured, where the axes tell which rows they are: (B, T, ...), (B, ..., T, ...), (B N, ..., T,
# ...) and (B T, ...), with T the padded length. Of scores both axes are cleared.
#
# Where the axes do not tell, a result is not judged once pads are apart (further than rounding
# takes numbers), and no operator is blamed to which such a result leads. Decode steps have no pads:
# what their keys and values hold of them comes from before attention.

_APART = 16  # ulp of the coarser dtype, relative L2: rounding alone leaves pads nearer


class Pads:
    """Of one forward. ``rows``: (B T,) where the pads are, None where it has none; ``apart``: were
    pads seen that the sides do not share?"""

    def __init__(self, manifest: Manifest, forward: Forward) -> None:
        first, step = forward
        self.apart = False
        self._grid = None if step else manifest.tokens.pads(first)  # (B, T)

    @property
    def rows(self) -> torch.Tensor | None:
        return None if self._grid is None else self._grid.reshape(-1)

    def mask(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Where a result of this shape holds pads, to be broadcast over it; None where its axes do
        not tell."""
        assert self._grid is not None
        batch, length = self._grid.shape
        leading = shape[0] if shape else 0
        axes = [axis for axis in range(1, len(shape)) if shape[axis] == length]
        if leading == batch * length and not axes:
            return self._grid.reshape(-1, *[1] * (len(shape) - 1))
        if not leading or leading % batch or not axes or leading == batch * length:
            return None
        where = torch.zeros([1] * len(shape), dtype=torch.bool)
        rows = self._grid.repeat_interleave(leading // batch, 0)
        for axis in axes:
            where = where | rows.reshape(
                [leading, *(length if axis == other else 1 for other in range(1, len(shape)))]
            )
        return where

    def blank(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result with its pads set to 0, where its axes tell which they are."""
        where = None if self._grid is None else self.mask(tuple(tensor.shape))
        return tensor if where is None else tensor.masked_fill(where, 0)

    def cleared(
        self, shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """The reference's, the candidate's and the right result of the ``shape`` with pads set to
        0; None where they cannot be judged, as pads may be among them."""
        if self._grid is None:
            return a, b, truth
        where = self.mask(shape)
        if where is None:
            return None if self.apart else (a, b, truth)
        where = where.expand(shape)
        self.apart = self.apart or _are_apart(where, a, b)
        return (
            _without(where, a), _without(where, b),
            None if truth is None else _without(where, truth),
        )  # fmt: skip


def _without(where: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(where.shape).masked_fill(where, 0).reshape(tensor.shape)


def _are_apart(where: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do the pads' values differ by more than rounding? Codes do not tell."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return False
    x, y = (t.reshape(where.shape)[where].double() for t in (a, b))
    both = x.isfinite() & y.isfinite()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return True
    x, y = x[both], y[both]
    norm, gap = max(float(x.norm()), float(y.norm())), float((x - y).norm())
    return gap > _APART * max(torch.finfo(t.dtype).eps for t in (a, b)) * norm


# Regions: where the sides compute one thing by other operators, as one step.
#
# A region reaches from the last inputs that both sides have to the first result that both have: a
# fused attention against its products and its softmax, one matrix product against eight of its
# parts, three projections against one. Its members are the calls without a partner that lead to the
# common result, and those that give it. The common result is a pair that was matched by its value
# or by dataflow, or what a paired call was given as the same argument (a part of a fused
# projection's result, say, which is no call's result by itself).
#
# A call of one side alone that both sides' values lead through (a cast, a copy, a plant) makes no
# region: what it feeds tells of it (``fed_by``).


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

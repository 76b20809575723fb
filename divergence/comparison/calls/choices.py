"""Integer results of operators, and the tokens that the sides send to other experts.

Indices that an operator chose may differ where the values chosen between are as near as the two
sides' inputs are; other integers may not differ where the same numbers went in (``count_codes``).

Two experts whose scores are nearer than rounding are chosen differently by correct machines. From
there on the rows of that token are other rows, on one side or in the truth, and the experts'
inputs, sorted by expert, hold all rows in another order. So behind a choice that differs (an
integer result of ``topk`` or the like, one row a token), in one forward (``rerouted_in``):

- the rows of tokens that are chosen for alike on both sides and in the truth are compared,
- rows that were sorted by expert are put back into the tokens' order first: the permutation is
  itself an integer result (of ``sort``), on each side its own,
- what is neither by token nor by choice (counts an expert, say) is not compared, nor is what a
  backward makes of it: the gradient of a weight is a sum over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from divergence.comparison.calls.graph import CallNode
from divergence.comparison.calls.match import Match
from divergence.run.reader import Run
from divergence.run.record import Record
from divergence.run.site import BACKWARD

__all__ = ["IntegerCodes", "Rerouted", "count_codes", "rerouted_in"]

CHOOSING = ("topk", "argmax", "argmin", "max", "min", "sort", "argsort")

Read = Callable[[Match, int], tuple[torch.Tensor | None, ...]]
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
        """What may be compared of a result, rows first; None where nothing may.

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
    """Which result of a choice are the indices: one row a token, several or one chosen."""
    for node in (match.reference, match.candidate):
        if node.name.partition(".")[2] not in CHOOSING:
            return None
    results: list[Record] = match.reference.results
    for index, record in enumerate(results):
        if record.dtype.startswith("int") and len(record.shape) == 2 and record.shape[-1] <= 64:
            return index if len(match.candidate.results) > index else None
    return None


def _follow(routing: Rerouted, start: str, nodes: dict[str, Match], read: Read) -> None:
    """Everything fed by ``start``, and which of it lies behind a permutation of the rows."""
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
        permutation = _permutation(match, num_rows, read)
        if permutation is not None and order is None:
            order = permutation
        elif order is not None and _undoes(match, order, read):
            undone.add(path)
        if order is not None:
            sorted_by[path] = order
            routing.orders[path] = order


def _permutation(match: Match, num_rows: int, read: Read) -> tuple[torch.Tensor, ...] | None:
    """Of a sort: how it ordered the rows, on each side."""
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


def _undoes(match: Match, order: tuple[torch.Tensor, ...], read: Read) -> bool:
    """Is its result the inverse permutation?"""
    record = match.reference.results[0]
    if record.shape != tuple(order[0].shape) or not record.dtype.startswith("int"):
        return False
    inverse = read(match, 0)[0]
    assert inverse is not None  # the reference made it
    whole = torch.arange(len(order[0]))
    return bool(((inverse >= 0) & (inverse < len(whole))).all()) and torch.equal(
        inverse[order[0]], whole
    )


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
    other = x != y.reshape(x.shape)
    codes.differing += int(other.sum())
    p, q = _entering(match.reference, a), _entering(match.candidate, b)
    name = match.reference.name.partition(".")[2]
    known = None if p is None or q is None else (p, q)
    if name in CHOOSING and known and all(t.is_floating_point() for t in known):
        odd = other & ~_rounding_explains(*known, x, y.reshape(x.shape), match.reference)
    else:  # the same numbers went in: the codes must be the same; else they may not be
        equal = known is not None and torch.equal(*known)
        odd = other if equal else torch.zeros_like(other)
    codes.unexplained += int(odd.sum())
    if r is not None and not r.is_floating_point() and r.numel() == x.numel():
        r = r.reshape(x.shape)
        for side, chosen in enumerate((x, y.reshape(x.shape))):
            codes.wrong[side] += int((odd & (chosen != r)).sum())


def _entering(node: CallNode, run: Run) -> torch.Tensor | None:
    """The first operand's value, as the operator saw it."""
    if not node.call.operands:
        return None
    own, operand = node.results[0], node.call.operands[0]
    if operand.site is None:
        return None
    record = run.find((own.pass_, own.sample, own.step, operand.site))
    return None if record is None else run.read(record).reshape(operand.shape)


def _rounding_explains(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, y: torch.Tensor, node: CallNode
) -> torch.Tensor:
    """Per chosen index: are the two choices nearer to each other than the inputs p, q are? Exact
    ties are not explained: there the order of ties is the operator's own."""
    dim = node.call.arguments.get("dim", -1)
    if not isinstance(dim, int) or p.shape != q.shape or p.ndim != x.ndim:
        return torch.zeros(x.shape, dtype=torch.bool)
    p, q = p.double(), q.double()
    gaps = [(side.gather(dim, x) - side.gather(dim, y)).abs() for side in (p, q)]
    apart = (p - q).abs().amax(dim, keepdim=True)
    near = (gaps[0] <= 4 * apart) & (gaps[1] <= 4 * apart)
    return near & ~((gaps[0] == 0) & (gaps[1] == 0))

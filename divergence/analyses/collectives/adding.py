"""The order in which ranks were added, replayed bit by bit, and what copies of a result tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch

from divergence.analyses.collectives.recorded import Recorded, RecordedCase, bits_differ, exact_sum
from divergence.arithmetic.additions import Tree
from divergence.collectives.cases import CollectiveCase
from divergence.collectives.orders import Stretch, chain_of, name_order, stretches_text
from divergence.comparison.results import IdentityRow, OrderRow
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_named, format_of

# Orders of addition: in words, replayed on what the ranks put in; and what two collectives promise
# of each other by them.
#
# An order that was found from outside is proven, and the dtype of the partial sums with it, where
# replaying it gives every recorded bit. Where it does not, one rank may add in another dtype than
# the rest: its additions alone are rounded otherwise, and the replay that gives every bit names it.

Key = tuple[str, str, str]
"""Collective, dtype, size."""

Trial = tuple[list[torch.Tensor], torch.Tensor]
"""What the ranks put in, and the whole result."""

_ROUNDING_RMS = 0.4247
"""rms of a rounding in units of u x, where the significand of x is distributed as 1/m: the error is
uniform over ± u, and E[1/m²] = 3 / (8 ln 2), so √(3 / (8 ln 2) / 3)."""


def order_row(
    recorded: Recorded, case: CollectiveCase, elements: int, stretches: list[Stretch]
) -> OrderRow:
    """One order in words, replayed on what the run recorded at that dtype and size."""
    n = recorded.num_ranks
    trials, measured = trials_of(recorded, case), None
    if "random" in trials:
        inputs, out = trials["random"]
        error, terms = exact_sum(inputs).error(out), torch.stack(inputs).double()
        measured = float(error.square().mean().sqrt() / terms.square().mean().sqrt())
    replayed = replay(stretches, list(trials.values()))
    named = name_order(stretches, n)
    return OrderRow(
        collective=case.collective, dtype=case.dtype, size=case.size, elements=elements,
        order=named, first=stretches_text(stretches, n), num_chunks=len(stretches),
        accumulates=replayed.accumulates, num_replayed=replayed.num,
        expected=_expected(stretches, case.dtype, replayed.accumulates, n), measured=measured,
    )  # fmt: skip


def trials_of(recorded: Recorded, case: CollectiveCase) -> dict[str, Trial]:
    """What was recorded at that dtype and size of values whose sums round, by kind of values."""
    trials = {}
    for values in ("random", "cancelling", "outlier"):
        alike = recorded.find(CollectiveCase(case.collective, case.dtype, case.size, values))
        out = None if alike is None or not alike.has_inputs else alike.whole
        if alike is not None and out is not None:
            trials[values] = (alike.inputs, out)
    return trials


def _expected(
    stretches: list[Stretch], dtype: str, accumulates: str | None, num_ranks: int
) -> float | None:
    """rms error of a sum of n terms of variance 1 (trees: E[error²] = c² u² Σ size(node)); a wider
    accumulator leaves the last rounding, of a sum of variance n."""
    known = [stretch for stretch in stretches if stretch.tree is not None]
    if not known or accumulates is None:
        return None
    form, inner = format_named(dtype), format_named(accumulates)
    if inner.unit_roundoff < form.unit_roundoff:
        return _ROUNDING_RMS * form.unit_roundoff * math.sqrt(num_ranks)
    total = sum((part.stop - part.start) * part.tree.partials for part in known if part.tree)
    mean = total / sum(part.stop - part.start for part in known)
    return float(_ROUNDING_RMS * inner.unit_roundoff * mean**0.5)


@dataclass(frozen=True, slots=True)
class Identity:
    """One composed case. ``differ``: elements that are added alike and yet differ."""

    composed: RecordedCase
    row: IdentityRow
    differ: torch.Tensor


def identities(
    recorded: Recorded, orders: Mapping[Key, list[Stretch]], sums_in: Mapping[Key, str | None]
) -> list[Identity]:
    """AR = RS + AG, case by case: bit for bit where both add every element in the same order and
    dtype. ``sums_in``: the dtype of the partial sums."""
    rows = []
    for composed in recorded.cases():
        if composed.case.collective != "rs_ag" or not composed.has_inputs:
            continue
        dtype, size, values = composed.case.dtype, composed.case.size, composed.case.values
        direct = recorded.find(CollectiveCase("all_reduce", dtype, size, values))
        if direct is not None and not direct.has_inputs:
            continue
        first, second = None if direct is None else direct.whole, composed.whole
        if direct is None or first is None or second is None:
            continue
        keys: list[Key] = [(name, dtype, size) for name in ("all_reduce", "reduce_scatter")]
        ways, kept = [orders.get(key) for key in keys], {sums_in.get(key) for key in keys}
        alike = _added_alike(ways[0], ways[1], len(first))
        if len(kept) > 1 or None in kept:
            alike = None
        differ = bits_differ(first, second)
        if alike is not None:  # at the edge between two chunks it is not known
            differ &= alike
        bound = exact_sum(direct.inputs).bound
        usage = ((first.double() - second.double()).abs() / (2 * bound).clamp_min(5e-324)).max()
        row = IdentityRow(
            dtype=dtype, size=size, values=values, promised=alike is not None,
            num_different=int(differ.sum()), elements=len(differ), limit_usage=float(usage),
        )  # fmt: skip
        rows.append(Identity(composed, row, differ))
    return rows


def _added_alike(
    direct: list[Stretch] | None, composed: list[Stretch] | None, size: int
) -> torch.Tensor | None:
    """(size,) of bool: the elements that are known to be added in the same order; None where some
    are known to be added in another."""
    if not direct or not composed:
        return None
    number: dict[object, int] = {}
    known = []
    for stretches in (direct, composed):
        trees = torch.full((size,), -1)
        for part in stretches:
            if part.tree is None:
                return None
            trees[part.start : part.stop] = number.setdefault(part.tree, len(number))
        known.append(trees)
    both = (known[0] >= 0) & (known[1] >= 0)
    same = known[0] == known[1]
    return both if bool(same[both].all()) and 2 * int(both.sum()) > size else None


WIDER = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"),
         "float32": ("float64", "bfloat16", "float16"), "float64": ("float32",)}  # fmt: skip
"""Dtypes in which partial sums may be kept beside the buffer's own; the likelier first."""
_NARROWER = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Replay:
    """``accumulates``: the dtype in which every bit is reproduced, or None. ``num``: elements that
    were replayed."""

    accumulates: str | None
    num: int


def replay(stretches: Sequence[Stretch], trials: Sequence[Trial]) -> Replay:
    """No stretch may be without a tree."""
    known = [stretch for stretch in stretches if stretch.tree is not None]
    num = sum(stretch.stop - stretch.start for stretch in known) * len(trials)
    if not known or not trials or len(known) < len(stretches):
        return Replay(None, 0)
    own = str(trials[0][1].dtype).removeprefix("torch.")
    for name in (own, *WIDER.get(own, ())):
        kind = getattr(torch, name)
        if all(
            torch.equal(
                sum_of(stretch.tree, [x[stretch.start : stretch.stop] for x in inputs], kind),
                out[stretch.start : stretch.stop],
            )
            for inputs, out in trials
            for stretch in known
            if stretch.tree is not None
        ):
            return Replay(name, num)
    return Replay(None, num)


def sum_of(
    tree: Tree | None, leaves: list[torch.Tensor], kind: torch.dtype,
    narrow: tuple[frozenset[int], torch.dtype] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum of one stretch, each node rounded to ``kind``, those of ``narrow`` to its dtype. A
    fused node is added in float64."""
    assert tree is not None
    values = [leaf.to(kind) for leaf in leaves]
    for number, node in enumerate(tree.nodes):
        wide = len(node) > 2
        parts = [values[child] for child in node]
        if narrow is not None and number in narrow[0]:
            parts = [part.to(narrow[1]) for part in parts]
        if wide:
            parts = [part.double() for part in parts]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        values.append(total.to(kind))
    return values[-1].to(leaves[0].dtype)


def narrow_ranks(
    stretches: Sequence[Stretch], inputs: list[torch.Tensor], out: torch.Tensor
) -> tuple[tuple[int, ...], str] | None:
    """(ranks, dtype): each rank whose additions alone, if made in that dtype, give every bit; None
    where there is none, or where several dtypes do.

    Who makes an addition is known where a partial sum walks from rank to rank: the rank whose term
    is added. Of the first two terms of a chain either may, so two ranks are not told apart.
    """
    stretches = divided(stretches, len(inputs), len(out))
    known = [(stretch, chain_of(stretch.tree)) for stretch in stretches if stretch.tree is not None]
    if not known or any(chain is None for _, chain in known) or len(known) < len(stretches):
        return None
    own = out.dtype
    roundoff = format_of(own).unit_roundoff
    narrowed = []
    for name, rank in product(_NARROWER, range(len(inputs))):
        kind = getattr(torch, name)
        if format_of(kind).unit_roundoff <= roundoff:
            continue
        if all(_fits(stretch, chain or [], rank, kind, inputs, out) for stretch, chain in known):
            narrowed.append((rank, name))
    dtypes = {name for _, name in narrowed}
    return (tuple(rank for rank, _ in narrowed), dtypes.pop()) if len(dtypes) == 1 else None


def divided(stretches: Sequence[Stretch], num_ranks: int, size: int) -> list[Stretch]:
    """Cut at the edges of the ranks' parts too: of two ranks every part has the same order."""
    each = -(-size // num_ranks)
    return [
        Stretch(max(stretch.start, edge), min(stretch.stop, edge + each), stretch.tree)
        for stretch in stretches
        for edge in range(0, size, each)
        if max(stretch.start, edge) < min(stretch.stop, edge + each)
    ]


def _fits(
    part: Stretch, chain: list[int], rank: int, kind: torch.dtype, inputs: list[torch.Tensor],
    out: torch.Tensor,
) -> bool:  # fmt: skip
    place = chain.index(rank)
    ways = [frozenset({place - 1})] if place > 1 else [frozenset({0}), frozenset[int]()]
    leaves = [x[part.start : part.stop] for x in inputs]
    held = out[part.start : part.stop]
    return any(torch.equal(sum_of(part.tree, leaves, out.dtype, (way, kind)), held) for way in ways)


# Ranks that must hold the same bits, and do not: which of them is the odd one?
#
# Most of them are believed; of two ranks the one whose bits come out again when the order of
# addition is replayed. Nobody is named where ranks only add in different orders, or where the
# replay explains others than the most: the order was measured on rank 0 alone.

_FEW = 5
"""Ranks whose every order is tried: 60 chains of five."""

Odd = tuple[tuple[int, ...], torch.Tensor, Fact]
"""The ranks at fault, the elements that differ, what is wrong."""


def odd_ranks(case: RecordedCase, stretches: Sequence[Stretch]) -> Odd | None:
    """None where all are alike. ``stretches``: the order, if it is known."""
    digests: dict[str | None, list[int]] = {}
    for rank in case.results:
        digests.setdefault(case.digests(rank)[0], []).append(rank)
    groups = sorted(digests.values(), key=len, reverse=True)
    if len(groups) < 2:
        return None
    believed, told = _believed(case, stretches, groups)
    others = sorted(rank for group in groups if group is not believed for rank in group)
    differ = bits_differ(case.results[believed[0]], case.results[others[0]])
    if case.case.adds and all(_some_order(case, stretches, group[0]) for group in groups):
        orders = [ranks_named(group) for group in groups[:4]]
        return (), differ, fact("collectives.own_orders", groups=orders)
    if not told:
        return (), differ, fact("collectives.bits_differ")
    return tuple(others), differ, fact("collectives.other_bits", ranks=ranks_named(believed))


def _believed(
    case: RecordedCase, stretches: Sequence[Stretch], groups: list[list[int]]
) -> tuple[list[int], bool]:
    """The ranks that others are held against, and whether those are wrong for it."""
    most, is_most = groups[0], len(groups[1]) < len(groups[0])
    if not case.case.adds:
        return most, is_most
    explained = [
        group
        for group in groups
        if replay(stretches, [(case.inputs, case.results[group[0]])]).accumulates
    ]
    if len(explained) != 1:
        return most, is_most
    if case.num_ranks == 2:
        return explained[0], True
    return most, is_most and explained[0] is most


def _some_order(case: RecordedCase, stretches: Sequence[Stretch], rank: int) -> bool:
    """Is a rank's result the sum of all ranks' terms, one after another in some order?"""
    n, out = case.num_ranks, case.results[rank]
    whole = [Stretch(0, len(out), None)]
    for part in divided(stretches or whole, n, len(out)):
        leaves = [x[part.start : part.stop] for x in case.inputs]
        held = out[part.start : part.stop]
        chains = (_chain(order) for order in _orders(n, rank))
        if not any(torch.equal(sum_of(chain, leaves, out.dtype), held) for chain in chains):
            return False
    return True


def _orders(num_ranks: int, rank: int) -> Iterator[Sequence[int]]:
    """All of few ranks; of many those that go round a circle, and a rank's own term first."""
    if num_ranks <= _FEW:
        yield from permutations(range(num_ranks))
        return
    for first in range(num_ranks):
        yield [(first + step) % num_ranks for step in range(num_ranks)]
        yield [(first - step) % num_ranks for step in range(num_ranks)]
    yield [rank, *(other for other in range(num_ranks) if other != rank)]


def _chain(order: Sequence[int]) -> Tree:
    num = len(order)
    nodes = [(order[0], order[1])]
    nodes += [(num + k, term) for k, term in enumerate(order[2:])]
    return Tree.of(num, nodes)


def ranks_named(ranks: Sequence[int]) -> Fact:
    """``ranks 0, 1``."""
    return fact("collectives.ranks", num=len(ranks), ranks=list(ranks))

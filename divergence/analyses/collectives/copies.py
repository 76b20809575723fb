"""Ranks that must hold the same bits, and do not: which of them is the odd one?

Most of them are believed; of two ranks the one whose bits come out again when the order of addition
is replayed. Nobody is named where ranks only add in different orders, or where the replay explains
others than the most: the order was measured on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import torch

from divergence.analyses.collectives.adding import divided, replay, sum_of
from divergence.analyses.collectives.definitions import bits_differ
from divergence.analyses.collectives.recorded import RecordedCase
from divergence.arithmetic.additions import Tree
from divergence.collectives.orders import Stretch
from divergence.facts import Fact, fact

__all__ = ["odd_ranks", "ranks_named"]

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

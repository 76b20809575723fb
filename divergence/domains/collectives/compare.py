"""Runs of collectives compared: what each does wrong by itself, and where two differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, permutations, product
from typing import Any

import torch
from msgspec.structs import replace

from divergence.comparison.analysis import report_of
from divergence.comparison.arithmetic import facts_of_operators
from divergence.comparison.decide import check
from divergence.comparison.result import (
    Coverage,
    Finding,
    Onset,
    Report,
    Skipped,
    VerdictKind,
)
from divergence.domains.collectives.cases import (
    ADDING,
    COLLECTIVES,
    FLOATS,
    NOT_SUPPORTED,
    ROOT_RANK,
    CollectiveCase,
)
from divergence.domains.collectives.orders import (
    Stretch,
    chain_of,
    decode,
    name_order,
    stretches_text,
)
from divergence.domains.collectives.recorded import (
    Bits,
    Recorded,
    RecordedCase,
    Sum,
    bits_differ,
    exact_sum,
    expected_of,
)
from divergence.domains.collectives.result import (
    CollectiveCheck,
    CollectiveDiff,
    CollectiveFault,
    CollectiveRow,
    CollectivesResult,
    CollectivesSide,
    IdentityRow,
    OrderRow,
)
from divergence.errors import UsageError
from divergence.facts import Fact, fact, plain
from divergence.numerics.formats import format_named, format_of
from divergence.numerics.sums import ratio
from divergence.numerics.trees import Tree
from divergence.run.command import command, command_line
from divergence.run.reader import Run
from divergence.words import Progress, Side, SideOrBoth, common_side, grouped, silent

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
    accumulates = replay(stretches, list(trials.values()))
    whole = all(stretch.tree is not None for stretch in stretches)
    num = sum(stretch.stop - stretch.start for stretch in stretches) * len(trials) if whole else 0
    return OrderRow(
        collective=case.collective,
        dtype=case.dtype,
        size=case.size,
        elements=elements,
        order=name_order(stretches, n),
        first=stretches_text(stretches, n),
        num_chunks=len(stretches),
        accumulates=accumulates,
        num_replayed=num,
        expected=_expected(stretches, case.dtype, accumulates, n),
        measured=measured,
    )


def trials_of(recorded: Recorded, case: CollectiveCase) -> dict[str, Trial]:
    """Return the trials at that dtype and size of values whose sums round, by kind of values."""
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
    if accumulates is None:  # where it is known, every stretch has a tree
        return None
    form, inner = format_named(dtype), format_named(accumulates)
    if inner.unit_roundoff < form.unit_roundoff:
        return _ROUNDING_RMS * form.unit_roundoff * math.sqrt(num_ranks)
    total = sum((part.stop - part.start) * part.tree.partials for part in stretches if part.tree)
    mean = total / sum(part.stop - part.start for part in stretches)
    return float(_ROUNDING_RMS * inner.unit_roundoff * mean**0.5)


Identity = tuple[RecordedCase, IdentityRow, torch.Tensor]
"""One composed case, its row, and the elements that are added alike and yet differ."""


def identities(
    recorded: Recorded, orders: Mapping[Key, list[Stretch]], sums_in: Mapping[Key, str | None]
) -> list[Identity]:
    """AR = RS + AG, case by case: bit for bit where both add every element in the same order and
    dtype. ``sums_in``: the dtype of the partial sums."""
    rows: list[Identity] = []
    for composed in recorded.cases():
        if composed.case.collective != "rs_ag" or not composed.has_inputs:
            continue
        dtype, size, values = composed.case.dtype, composed.case.size, composed.case.values
        direct = recorded.find(CollectiveCase("all_reduce", dtype, size, values))
        if direct is None or not direct.has_inputs:
            continue
        first, second = direct.whole, composed.whole
        if first is None or second is None:
            continue
        keys: list[Key] = [(name, dtype, size) for name in ("all_reduce", "reduce_scatter")]
        kept, alike = {sums_in.get(key) for key in keys}, None
        if len(kept) == 1 and None not in kept:  # then both orders are known
            alike = _added_alike([orders[key] for key in keys], len(first))
        differ = bits_differ(first, second)
        if alike is not None:  # at the edge between two chunks it is not known
            differ &= alike
        bound = exact_sum(direct.inputs).bound
        usage = ((first.double() - second.double()).abs() / (2 * bound).clamp_min(5e-324)).max()
        row = IdentityRow(
            dtype=dtype,
            size=size,
            values=values,
            promised=alike is not None,
            num_different=int(differ.sum()),
            elements=len(differ),
            limit_usage=float(usage),
        )
        rows.append((composed, row, differ))
    return rows


def _added_alike(orders: list[list[Stretch]], size: int) -> torch.Tensor | None:
    """(size,): elements known to be added in the same order; None where some are in another."""
    number: dict[object, int] = {}
    groups = []
    for stretches in orders:
        trees = torch.full((size,), -1)
        for part in stretches:
            trees[part.start : part.stop] = number.setdefault(part.tree, len(number))
        groups.append(trees)
    both = (groups[0] >= 0) & (groups[1] >= 0)
    same = groups[0] == groups[1]
    return both if bool(same[both].all()) and 2 * int(both.sum()) > size else None


WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64", "bfloat16", "float16"),
    "float64": ("float32",),
}
"""Dtypes in which partial sums may be kept beside the buffer's own; the likelier first."""
_NARROWER = ("bfloat16", "float16", "float32")


def replay(stretches: Sequence[Stretch], trials: Sequence[Trial]) -> str | None:
    """The dtype in which every bit is reproduced; None where a stretch is without a tree."""
    if not stretches or not trials or any(stretch.tree is None for stretch in stretches):
        return None
    own = str(trials[0][1].dtype).removeprefix("torch.")
    for name in (own, *WIDER.get(own, ())):
        kind = getattr(torch, name)
        if all(
            torch.equal(
                sum_of(part.tree, [x[part.start : part.stop] for x in inputs], kind),
                out[part.start : part.stop],
            )
            for inputs, out in trials
            for part in stretches
        ):
            return name
    return None


def sum_of(
    tree: Tree | None,
    leaves: list[torch.Tensor],
    kind: torch.dtype,
    narrow: tuple[frozenset[int], torch.dtype] | None = None,
) -> torch.Tensor:
    """The sum of one stretch, each node rounded to ``kind``; a fused node is added in float64."""
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


def adds_narrow(
    recorded: Recorded, stretches: list[Stretch], case: RecordedCase
) -> tuple[tuple[int, ...], str] | None:
    """(ranks, dtype): each rank whose additions alone, if made in that narrower dtype, give every
    bit; None where there is none, or where several dtypes do.

    Told only where every recorded case of that dtype and size whose sums round is explained so: a
    single one may come out by chance, as where few digits are in use. Who makes an addition is
    known where a partial sum walks from rank to rank: the rank whose term is added. Of the first
    two terms of a chain either may, so two ranks are not told apart.
    """
    out = case.whole
    if not stretches or out is None or format_named(case.case.dtype).kind != "float":
        return None
    trials = [(case.inputs, out), *trials_of(recorded, case.case).values()]
    candidates: list[tuple[Stretch, list[int]]] = []
    for part in divided(stretches, case.num_ranks, len(out)):
        chain = None if part.tree is None else chain_of(part.tree)
        if chain is None:
            return None
        candidates.append((part, chain))

    def fits(part: Stretch, chain: list[int], rank: int, dtype: torch.dtype, trial: Trial) -> bool:
        inputs, whole = trial
        place = chain.index(rank)
        ways = [frozenset({place - 1})] if place > 1 else [frozenset({0}), frozenset[int]()]
        leaves = [x[part.start : part.stop] for x in inputs]
        stretch = whole[part.start : part.stop]
        return any(
            torch.equal(sum_of(part.tree, leaves, out.dtype, (w, dtype)), stretch) for w in ways
        )

    narrowed = []
    for name, rank in product(_NARROWER, range(case.num_ranks)):
        dtype = getattr(torch, name)
        narrower = format_of(dtype).unit_roundoff > format_of(out.dtype).unit_roundoff
        if narrower and all(
            fits(part, chain, rank, dtype, trial) for trial in trials for part, chain in candidates
        ):
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
    digests = grouped(case.results, lambda rank: case.digests(rank)[0])
    groups = sorted(digests.values(), key=len, reverse=True)
    if len(groups) < 2:
        return None
    # whom others are held against, and whether those are wrong for it
    believed, explained_ranks, adds = groups[0], len(groups[1]) < len(groups[0]), case.case.adds
    explained = [
        group
        for group in (groups if adds else ())
        if replay(stretches, [(case.inputs, case.results[group[0]])])
    ]
    if len(explained) == 1 and case.num_ranks == 2:
        believed, explained_ranks = explained[0], True
    elif len(explained) == 1:
        explained_ranks = explained_ranks and explained[0] is believed
    others = sorted(rank for group in groups if group is not believed for rank in group)
    differ = bits_differ(case.results[believed[0]], case.results[others[0]])
    if adds and all(_some_order(case, stretches, group[0]) for group in groups):
        orders = [ranks_named(group) for group in groups[:4]]
        return (), differ, fact("collectives.own_orders", groups=orders)
    if not explained_ranks:
        return (), differ, fact("collectives.bits_differ")
    return tuple(others), differ, fact("collectives.other_bits", ranks=ranks_named(believed))


def _some_order(case: RecordedCase, stretches: Sequence[Stretch], rank: int) -> bool:
    """Is a rank's result the sum of all ranks' terms, one after another in some order?"""
    n, out = case.num_ranks, case.results[rank]
    whole = [Stretch(0, len(out), None)]
    for part in divided(stretches or whole, n, len(out)):
        leaves = [x[part.start : part.stop] for x in case.inputs]
        stretch = out[part.start : part.stop]
        for order in _chains(n, rank):
            nodes = [(order[0], order[1]), *((n + k, term) for k, term in enumerate(order[2:]))]
            if torch.equal(sum_of(Tree.of(n, nodes), leaves, out.dtype), stretch):
                break
        else:
            return False
    return True


def _chains(num_ranks: int, rank: int) -> Iterator[Sequence[int]]:
    """All of few ranks; of many those that go round a circle, and a rank's own term first."""
    if num_ranks <= _FEW:
        yield from permutations(range(num_ranks))
        return
    for first in range(num_ranks):
        yield [(first + step) % num_ranks for step in range(num_ranks)]
        yield [(first - step) % num_ranks for step in range(num_ranks)]
    yield [rank, *(other for other in range(num_ranks) if other != rank)]


def ranks_named(ranks: Sequence[int]) -> Fact:
    """``ranks 0, 1``."""
    return fact("collectives.ranks", num=len(ranks), ranks=list(ranks))


# What ranks hold where they are wrong, as facts that are true of each of them.

Right = Sum | Bits
"""What a rank should hold."""

_AVERAGES = 1e-3
"""How near 1 / factor must be to a whole number to be called one: factors are told to 4 digits."""


def instead(
    case: RecordedCase,
    results: Mapping[int, torch.Tensor],
    wrong: Mapping[int, torch.Tensor],
    rights: Mapping[int, Right],
) -> Fact:
    """``wrong``: by rank, of each rank that is wrong the elements, results of one size."""
    ranks = list(wrong)
    swaps = {_swapped(results[rank], rights[rank], case.num_ranks) for rank in ranks}
    if len(swaps) == 1 and (swapped := swaps.pop()) is not None:
        return swapped
    clauses = [list(_clauses(results[r], wrong[r], case, r, rights[r])) for r in ranks]
    common = [item for item in clauses[0] if all(item in others for others in clauses[1:])]
    union = torch.stack(list(wrong.values())).any(dim=0)
    places, size = union.nonzero().flatten(), len(union)
    num, first = len(places), int(places[0])
    if num == size:
        where = fact("collectives.all_elements", size=size)
    elif num == size - first:
        where = fact("collectives.last_elements", num=num, size=size)
    else:
        last = int(places[-1])
        where = fact("collectives.some_elements", num=num, size=size, first=first, last=last)
    sums = [(right, rank) for rank, right in rights.items() if isinstance(right, Sum)]
    worst = [float(s.usage(results[r])[wrong[r]].max()) for s, r in sums if r in wrong]
    if common:
        what = common[0]
    elif not worst:
        what = fact("collectives.are_other")
    elif 1.0 < max(worst) <= 1e12:
        what = fact("collectives.are_far", ratio=max(worst), large=max(worst) >= 10)
    else:
        what = fact("collectives.are_not_exact")
    return fact("collectives.instead", where=where, what=what)


def _clauses(
    out: torch.Tensor, wrong: torch.Tensor, case: RecordedCase, rank: int, right: Right
) -> Iterator[Fact]:
    """Yield what can be said of one rank, the plainest first."""
    values = out[wrong]
    if out.dtype.is_floating_point and not values.double().isfinite().all():
        yield fact("collectives.are_nonfinite")
        return
    if bool((values == 0).all()):
        yield fact("collectives.are_zero")
    copied = [
        giver
        for giver, x in enumerate(case.inputs)
        if x.shape == out.shape and not bits_differ(out, x)[wrong].any()
    ]
    if rank in copied:
        yield fact("collectives.are_own")
    for giver in copied:
        yield fact("collectives.are_of_rank", rank=giver)
    if not isinstance(right, Sum):
        return
    # a rank's terms that are missing or added twice; where several would do (ranks that cancel
    # each other) it is not told which
    error, bound, sums = right.error(out)[wrong], right.bound[wrong], right.high[wrong]
    fits = []
    for giver, x in enumerate(case.inputs):
        term = (x if x.shape == out.shape else x.chunk(case.num_ranks)[rank]).double()[wrong]
        if (term != 0).any():
            ways = (("collectives.lack", error + term), ("collectives.hold_twice", error - term))
            fits += [
                fact(code, rank=giver) for code, rest in ways if (rest.abs() <= 4 * bound).all()
            ]
    if len(fits) == 1:
        yield fits[0]
    # one multiple of the sum, as an average is; of sums that are not all one number
    square = float(sums.square().sum())
    if len(sums) < 3 or square == 0.0 or bool((sums == sums[0]).all()):
        return
    factor = float((values.double() * sums).sum()) / square
    form = format_of(out.dtype)
    rounding = 2 * form.unit_roundoff if form.kind == "float" else 0.0
    limit = max(1.0, abs(factor)) * (2 * bound + rounding * sums.abs())
    if factor == 0.0 or bool(((values.double() - factor * sums).abs() > limit).any()):
        return
    parts = 1.0 / factor
    if round(parts) > 1 and abs(parts - round(parts)) < _AVERAGES:
        yield fact("collectives.are_divided", parts=round(parts))
    else:
        yield fact("collectives.are_multiple", factor=factor)


def _swapped(out: torch.Tensor, exact: Right, num_ranks: int) -> Fact | None:
    if len(out) < 2 * num_ranks:
        return None
    edges = [0, *accumulate(map(len, out.tensor_split(num_ranks)))]

    def fits(i: int, j: int) -> bool:
        """Does chunk i hold what belongs in chunk j?"""
        size = min(edges[i + 1] - edges[i], edges[j + 1] - edges[j])
        there = exact[edges[j] : edges[j] + size]
        return not bool(there.differs(out[edges[i] : edges[i] + size]).any())

    wrong = [i for i in range(num_ranks) if not fits(i, i)]
    matches = {i: [j for j in range(num_ranks) if j != i and fits(i, j)] for i in wrong}
    if len(wrong) < 2 or not all(len(others) == 1 for others in matches.values()):
        return None
    swapped = [
        fact("collectives.chunk_swapped", chunk=i, other=others[0]) for i, others in matches.items()
    ]
    return fact("collectives.swapped", chunks=swapped[:4])


# Which elements of which ranks are not what the definition says, of one call.


@dataclass(slots=True)
class WrongCall:
    """``elements``: by rank, of those that are wrong. ``misfits``: of results of another size, how
    many elements they should have. ``usage``: the most of its limit that a rounded sum uses."""

    rights: dict[int, Right] = field(default_factory=dict)
    elements: dict[int, torch.Tensor] = field(default_factory=dict)
    misfits: dict[int, int] = field(default_factory=dict)
    flushed: bool = False
    usage: float | None = None

    @property
    def found(self) -> bool:
        return bool(self.elements or self.misfits)


def wrong_of(case: RecordedCase, results: Mapping[int, torch.Tensor]) -> WrongCall:
    """``results``: the results of one call, by rank."""
    wrong = WrongCall(rights=expected_of(case))
    for rank, out in results.items():
        right = wrong.rights[rank]
        if len(out) != len(right):
            wrong.misfits[rank] = len(right)
            continue
        beyond = right.differs(out)
        if isinstance(right, Sum):
            if case.case.values in ("integers", "rank_coded"):
                beyond = right.error(out) != 0
            elif case.case.values == "subnormal" and beyond.any() and _all_flushed(out, beyond):
                wrong.flushed = True
                continue
            else:
                wrong.usage = max(wrong.usage or 0.0, float(right.usage(out).max()))
        if beyond.any():
            wrong.elements[rank] = beyond
    return wrong


def _all_flushed(out: torch.Tensor, beyond: torch.Tensor) -> bool:
    """Zeros where subnormal sums should be, and no subnormal number left: a setting."""
    left = (out != 0) & (out.abs() < torch.finfo(out.dtype).smallest_normal)
    return bool((out[beyond] == 0).all()) and not bool(left.any())


# Who made what is wrong: told by which ranks hold it, and in which part of the buffer.
#
# Who holds a wrong number need not have made it. Where every rank is wrong alike it came from one
# of them, or from all; only where others are right is it told by who holds it.

Wrong = Mapping[int, torch.Tensor]
"""By rank, the elements that are wrong."""


@dataclass(frozen=True, slots=True)
class Made:
    """Says who made it, nobody where that is not told. ``assumed``: by the part of the buffer
    alone. ``how``: by what it is known, for the end of the clause."""

    ranks: tuple[int, ...]
    assumed: bool = False
    how: tuple[Fact, ...] = ()


def groups_of(case: RecordedCase, wrong: Wrong) -> list[dict[int, torch.Tensor]]:
    """Ranks that are wrong together: all, where no rank is right, or where what one rank sent is
    wrong on every other; else those that are wrong at the same elements."""
    if len(wrong) == len(case.ranks) or len(_senders(case, wrong)) == 1:
        return [dict(wrong)]
    groups: list[dict[int, torch.Tensor]] = []
    for rank, differ in wrong.items():
        for group in groups:
            if torch.equal(next(iter(group.values())), differ):
                group[rank] = differ
                break
        else:
            groups.append({rank: differ})
    return groups


def made_by(case: RecordedCase, wrong: Wrong) -> Made:
    """Say who made a group of ranks wrong that are wrong together.

    Sums: of ``reduce`` the root alone holds anything, which does not tell who made it; where all
    ranks are wrong alike, the one whose part of the buffer it is. Where nothing is added: who holds
    the wrong bits, or who sent them where every other rank has them wrong. What one rank sent and
    one other alone has wrong may be the fault of either: that it is the one that holds it is an
    assumption.
    """
    ranks, name = tuple(sorted(wrong)), case.case.collective
    everywhere = len(ranks) == case.num_ranks
    if name == "reduce":
        return Made(())
    if case.case.adds:
        if not everywhere or name == "reduce_scatter":
            return Made(ranks)
        part = part_of(torch.stack(list(wrong.values())).any(dim=0), case.num_ranks)
        if part is None:
            return Made(())
        return Made((part,), assumed=True, how=(fact("collectives.own_part"),))
    if name == "broadcast":
        if everywhere:
            return Made((ROOT_RANK,), assumed=True)
        if len(ranks) == case.num_ranks - 1 and ROOT_RANK not in ranks:
            return Made(ranks, assumed=True) if len(ranks) == 1 else Made(())
        return Made(ranks)
    senders = _senders(case, wrong)
    if senders:
        return Made(tuple(senders), assumed=not everywhere, how=(fact("collectives.sent"),))
    givers = {giver for rank, where in wrong.items() for giver in _givers(case, rank, where)}
    if everywhere or len(givers) != 1:
        return Made(() if everywhere else ranks)
    (giver,) = givers
    if giver in ranks or (name == "all_gather" and case.num_ranks > 2):
        return Made(ranks)  # the others got the same, and have it right
    return Made(ranks, assumed=True, how=(fact("collectives.sent_by", rank=giver),))


def _senders(case: RecordedCase, wrong: Wrong) -> set[int]:
    """The one rank whose numbers are wrong on every other, of two others at least; or none."""
    if case.case.collective not in ("all_gather", "all_to_all"):
        return set()
    givers = {giver for rank, where in wrong.items() for giver in _givers(case, rank, where)}
    others = set(range(case.num_ranks)) - givers
    return givers if len(givers) == 1 and len(wrong) > 1 and others <= set(wrong) else set()


def _givers(case: RecordedCase, rank: int, where: torch.Tensor) -> set[int]:
    """Return whose numbers should stand at the elements that are wrong."""
    name = case.case.collective
    if name == "broadcast":
        return {ROOT_RANK}
    if name == "send_recv":
        return {(rank - 1) % case.num_ranks}
    each = max(1, len(where) // case.num_ranks)
    return {int(place) // each for place in where.nonzero().flatten()}


def part_of(wrong: torch.Tensor, num_ranks: int) -> int | None:
    """The rank to whose part of the buffer, as reduce-scatter deals it, all wrong elements belong;
    None where they lie in several, or are few of it."""
    each = -(-len(wrong) // num_ranks)
    places = wrong.nonzero().flatten()
    if len(places) == 0 or each < 8:
        return None
    first, last = int(places[0]) // each, int(places[-1]) // each
    return first if first == last and len(places) > 2 else None


# One run of collectives, judged by itself.
#
# Every result is held to the definition, with what the ranks put in as the run recorded it; nothing
# of the run's own machine is trusted. Where nothing is rounded the bits must be right. A rounded
# sum may be off by what rounding in any order may make, an upper bound and no estimate, so that a
# fault that is claimed is one. What hides below the bound is seen by replaying the order bit by
# bit.

_REPLICATED = ("all_reduce", "rs_ag", "all_gather", "broadcast")


@dataclass(slots=True)
class _SideCheck:
    recorded: Recorded
    orders: dict[Key, list[Stretch]] = field(default_factory=dict)
    faults: list[CollectiveFault] = field(default_factory=list)
    rows: dict[str, CollectiveRow] = field(default_factory=dict)
    num_missing: int = 0

    def add(
        self,
        case: RecordedCase,
        check: CollectiveCheck,
        wrong: torch.Tensor,
        ranks: tuple[int, ...],
        *what: Fact,
        assumed: bool = False,
        wrong_ranks: Iterable[int] = (),
    ) -> None:
        """``wrong``: which elements are."""
        spec = case.case
        self.faults.append(
            CollectiveFault(
                check=check,
                collective=spec.collective,
                dtype=spec.dtype,
                size=spec.size,
                values=spec.values,
                site=case.site,
                elements=len(wrong),
                num_wrong=int(wrong.sum()),
                ranks=ranks,
                what=list(what),
                assumed=assumed,
                wrong_ranks=tuple(r for r in sorted(wrong_ranks) if r not in ranks),
            )
        )

    def add_wrong(
        self,
        case: RecordedCase,
        check: CollectiveCheck,
        results: Mapping[int, torch.Tensor],
        wrong: WrongCall,
        *,
        call: int | None = None,
    ) -> None:
        """One fault for each group of ranks that are wrong together. ``call``: of a repetition."""
        for group in groups_of(case, wrong.elements):
            made, what = made_by(case, group), instead(case, results, group, wrong.rights)
            if call is not None:
                what = fact("collectives.in_call", call=call, what=what)
            union = torch.stack(list(group.values())).any(dim=0)
            self.add(
                case,
                check,
                union,
                made.ranks,
                what,
                *made.how,
                assumed=made.assumed,
                wrong_ranks=group,
            )


def check_side(run: Run, side: Side, progress: Progress | None = None) -> CollectivesSide:
    """Everything that can be said of one run. Raises RunFormatError for a damaged one."""
    recorded = Recorded(run)
    n = recorded.num_ranks
    all_of = _SideCheck(recorded)
    measured = list(recorded.orders())
    for order in measured:
        all_of.orders[order.case.key] = decode(order.sizes, n)
    cases = list(recorded.cases())
    for number, case in enumerate(cases):
        (progress or silent)("compare", number, len(cases), case.case.path)
        _check_case(all_of, case)
    order_rows = [
        order_row(recorded, order.case, order.elements, all_of.orders[order.case.key])
        for order in measured
    ]
    sums_in: dict[Key, str | None] = {
        (row.collective, row.dtype, row.size): row.accumulates for row in order_rows
    }
    pairs = identities(recorded, all_of.orders, sums_in)
    for composed, row, differ in pairs:
        # where the orders promise equal bits, and nothing else is wrong with either collective
        spec = composed.case
        has_fault = any(
            fault.collective in ("all_reduce", "reduce_scatter", "rs_ag")
            and (fault.dtype, fault.size) == (spec.dtype, spec.size)
            for fault in all_of.faults
        )
        if row.promised and row.num_different and not has_fault:
            all_of.add(composed, "identity", differ, (), fact("collectives.promise_broken"))
    # ``float8_e4m3fn in all_reduce, broadcast: Invalid scalar type``; other reasons stay
    collectives: dict[tuple[str, str], list[str]] = {}
    others = []
    for reason in run.manifest.plan.skipped_operators:
        what, separator, why = reason.partition(NOT_SUPPORTED)
        name, of, dtype = what.partition(" of ")
        if separator and of:
            collectives.setdefault((dtype, why), []).append(name)
        else:
            others.append(plain(reason))
    # who differs from the most is no longer blamed where others are wrong by themselves
    wrong: dict[str, set[int]] = {}
    for fault in all_of.faults:
        if fault.check in ("sum", "definition"):
            wrong.setdefault(fault.collective, set()).update(fault.ranks)
    faults = [
        replace(fault, ranks=(), what=[fact("collectives.bits_differ")])
        if fault.check == "same_bits" and wrong.get(fault.collective, set()) - set(fault.ranks)
        else fault
        for fault in all_of.faults
    ]
    lacking = [
        fact("collectives.unsupported", dtype=dtype, collectives=names, why=why)
        for (dtype, why), names in collectives.items()
    ]
    return CollectivesSide(
        side=side,
        num_ranks=n,
        backend=run.manifest.model.model_class,
        rows=list(all_of.rows.values()),
        faults=sorted(faults, key=_gravity),
        orders=order_rows,
        identities=[row for _, row, _ in pairs],
        bandwidth=list(recorded.bandwidth()),
        num_missing=all_of.num_missing,
        lacking=lacking + others,
    )


def _check_case(all_of: _SideCheck, case: RecordedCase) -> None:
    name = case.case.collective
    if not case.has_inputs:
        all_of.num_missing += 1
        return
    num_faults = len(all_of.faults)
    all_of.num_missing += len(case.ranks) - len(case.results)
    wrong = wrong_of(case, case.results)
    check: CollectiveCheck = "sum" if case.case.adds else "definition"
    misfits = grouped(wrong.misfits, lambda rank: (len(case.results[rank]), wrong.misfits[rank]))
    for (num, size), ranks in misfits.items():
        misfit = fact("collectives.misfit", num=num, size=size)
        all_of.add(case, check, torch.ones(num, dtype=torch.bool), tuple(ranks), misfit)
    if not wrong.elements:
        if case.case.adds and not wrong.found:
            _look_below(all_of, case)
    elif not _named_by_replay(all_of, case, wrong):
        all_of.add_wrong(case, check, case.results, wrong)
    if name in _REPLICATED and not wrong.found:
        odd = odd_ranks(case, all_of.orders.get(case.case.key, []))
        if odd is not None:
            others, differ, what = odd
            all_of.add(case, "same_bits", differ, others, what)
    repeated = _check_repeats(all_of, case, wrong)
    row = all_of.rows.get(name) or CollectiveRow(
        collective=name, implementation="-", num_cases=0, num_right=0, num_repeated=0
    )
    usages = [usage for usage in (row.limit_usage, wrong.usage) if usage is not None]
    all_of.rows[name] = replace(
        row,
        implementation=all_of.recorded.implementation(case.case.path),
        num_cases=row.num_cases + 1,
        num_right=row.num_right + (len(all_of.faults) == num_faults),
        num_repeated=row.num_repeated + repeated,
        num_flushed=row.num_flushed + wrong.flushed,
        limit_usage=max(usages, default=None),
    )


def _named_by_replay(all_of: _SideCheck, case: RecordedCase, wrong: WrongCall) -> bool:
    """Do additions in a narrower dtype, of one rank or of all, explain every bit?"""
    if not case.case.adds or wrong.misfits:
        return False
    stretches, elements = all_of.orders.get(case.case.key, []), wrong.elements
    beyond = elements[min(elements)]
    narrow = adds_narrow(all_of.recorded, stretches, case)
    if narrow is not None:
        ranks, dtype = narrow
        scattered = case.case.collective == "reduce_scatter"
        named = ranks
        if len(ranks) > 1:  # the one that alone is wrong, or whose part of the buffer is
            part = part_of(beyond, case.num_ranks)
            alone = tuple(elements) if len(elements) == 1 else ()
            named = alone if scattered else () if part is None else (part,)
            named = tuple(rank for rank in named if rank in ranks)
        what = fact("collectives.adds_in", dtype=dtype)
        all_of.add(case, "sum", beyond, named, what, assumed=len(ranks) > 1 and not scattered)
        return True
    out = case.whole
    trials = [] if out is None else [(case.inputs, out)]
    kept = replay(stretches, [*trials, *trials_of(all_of.recorded, case.case).values()])
    if out is None or kept is None:
        return False
    if format_named(kept).unit_roundoff <= format_named(case.case.dtype).unit_roundoff:
        return False
    what = fact("collectives.all_add_in", dtype=kept)
    all_of.add(case, "sum", beyond, tuple(range(case.num_ranks)), what)
    return True


def _look_below(all_of: _SideCheck, case: RecordedCase) -> None:
    """A rank that adds in another dtype than the others, below what the bound shows."""
    stretches, out = all_of.orders.get(case.case.key), case.whole
    if stretches is None or out is None or case.case.values != "random":
        return
    if replay(stretches, [(case.inputs, out)]) is not None:
        return
    narrow = adds_narrow(all_of.recorded, stretches, case)
    if narrow is not None:
        ranks, dtype = narrow
        what = fact("collectives.adds_unlike_others", dtype=dtype)
        named = ranks if len(ranks) == 1 else ()
        all_of.add(case, "sum", torch.ones(len(out), dtype=torch.bool), named, what)


def _check_repeats(all_of: _SideCheck, case: RecordedCase, first: WrongCall) -> bool:
    """Did every repetition give the same bits on every rank?"""
    differing: dict[int, torch.Tensor] = {}
    calls: dict[int, dict[int, torch.Tensor]] = {}
    for rank, out in case.results.items():
        digest, *again = case.digests(rank)
        for number, other_digest in enumerate(again, 2):
            other = case.repetition(rank, number) if other_digest != digest else None
            if other is not None and other.shape == out.shape:
                differ = bits_differ(out, other)
                differing[rank] = differing.get(rank, torch.zeros_like(differ)) | differ
                calls.setdefault(number, dict(case.results))[rank] = other
    if not differing:
        return True
    if not first.found:  # which is right: what the first wrong call of the others holds
        for number, results in sorted(calls.items()):
            wrong = wrong_of(case, results)
            if wrong.elements:
                all_of.add_wrong(case, "repeatable", results, wrong, call=number)
                return False
    made = made_by(case, differing)
    what = fact("collectives.other_bits_each_time")
    if case.case.adds and not first.found:
        what = fact("collectives.other_order_each_time", part=made.assumed)
    differ = differing[min(differing)]
    all_of.add(case, "repeatable", differ, made.ranks, what, assumed=made.assumed)
    return False


_CHECKS = ("definition", "sum", "repeatable", "same_bits", "identity")
_VALUES = ("random", "rank_coded", "integers", "cancelling", "outlier", "subnormal")
_SIZES = ("odd", "even", "large", "tiny")


def _gravity(fault: CollectiveFault) -> tuple[int, ...]:
    """Sort key: the gravest first, of each collective the plainest case; those that name a rank
    before others."""

    def place(value: str, order: Iterable[str]) -> int:
        return [*order, value].index(value)

    return (
        place(fault.check, _CHECKS),
        not fault.ranks,
        place(fault.collective, COLLECTIVES),
        place(fault.dtype, FLOATS),
        place(fault.size, _SIZES),
        place(fault.values, _VALUES),
    )


# What one or two runs of collectives show.

_MOST = 6


def find(result: CollectivesResult, runs: Sequence[Run], coverage: Coverage) -> Finding:
    """What one run shows by itself, or two held against each other."""
    sides, is_pair = result.sides, len(result.sides) == 2
    if any(judged.faults for judged in sides):
        return _fault_finding(sides, runs, named=is_pair)
    complete = all(run.manifest.complete for run in runs)
    nums = [sum(row.num_cases for row in judged.rows) for judged in sides]
    checks = [check("measured", num > 0, fact("collectives.no_case")) for num in nums]
    orders = [_orders(judged.orders) for judged in sides]
    kind: VerdictKind = "within_floor"
    if not is_pair:
        done = complete and not sides[0].num_missing
        checks = [check("coverage", done, fact("collectives.ranks_missing")), *checks]
        headline = fact(
            "collectives.holds",
            num=nums[0],
            num_ranks=sides[0].num_ranks,
            backend=sides[0].backend,
            done=done,
            orders=orders[0],
        )
        if not nums[0]:
            kind, headline = "undetermined", fact("collectives.nothing_checked", orders=orders[0])
    elif not result.num_common:
        unlike = sides[0].num_ranks != sides[1].num_ranks
        num_ranks = [judged.num_ranks if unlike else None for judged in sides]
        kind = "undetermined"
        checks = [check("measured", False, fact("collectives.nothing_compared"))]
        headline = fact(
            "collectives.none_common",
            num_in_reference=num_ranks[0],
            num_in_candidate=num_ranks[1],
            checked=all(nums),
        )
    else:
        done = complete and not coverage.unmatched
        checks = [check("coverage", done, fact("collectives.not_every_case")), *checks]
        reference, candidate = (way or fact("collectives.order_not_known") for way in orders)
        kind, headline = "identical", fact("collectives.all_same", num=result.num_common)
        if result.differing:
            kind = "within_floor"
            headline = fact(
                "collectives.differ",
                num=len(result.differing),
                total=result.num_common,
                rel_l2=result.differing[0].rel_l2,
                same_orders=reference == candidate,
                reference=reference,
                candidate=candidate,
            )
    return Finding(
        claim="collectives",
        kind=kind,
        headline=[headline],
        rests_on=checks,
        evidence=[
            item for judged in sides for item in _facts(judged, judged.side if is_pair else None)
        ],
    )


def _fault_finding(
    every: Sequence[CollectivesSide], every_run: Sequence[Run], *, named: bool
) -> Finding:
    """``named``: there are two, and whose fault it is is told."""
    sides = [judged for judged in every if judged.faults]
    runs = [run for judged, run in zip(every, every_run, strict=True) if judged.faults]
    first = sides[0].faults[0]
    collectives = sorted({fault.collective for judged in sides for fault in judged.faults})
    collectives_run = {row.collective for judged in sides for row in judged.rows}
    many = len(collectives_run) > 3 and 2 * len(collectives) > len(collectives_run)
    num_cases = len({fault.site for judged in sides for fault in judged.faults})
    headline = fact(
        "collectives.fault",
        who=_who(first, sides[0].side if named else None),
        **_case(first),
        num_cases=num_cases if num_cases > 1 else None,
        collectives=collectives,
    )
    missing = any(judged.num_missing for judged in sides)
    missing = missing or not all(run.manifest.complete for run in runs)
    # another fault may name the same ranks by what they hold
    confirmed = any(not other.assumed and other.ranks == first.ranks for other in sides[0].faults)
    adds = first.collective in ADDING
    assumed = fact("collectives.part_assumed" if adds else "collectives.look_alike")
    return Finding(
        claim="collectives",
        kind="systematic" if many else "localized",
        headline=[headline],
        onset=Onset(site=first.site, block=None, sample=0, step=0, position=None),
        side=common_side(judged.side for judged in sides),
        rests_on=[
            check("coverage", not missing, fact("collectives.ranks_missing")),
            check("rank", not first.assumed or confirmed, assumed, made=False),
        ],
        evidence=[
            item for judged in sides for item in _lines(judged, judged.side if named else None)
        ],
        commands=[command("inspect", runs[0].path, site=first.site)],
    )


def _lines(judged: CollectivesSide, side: Side | None) -> list[Fact]:
    """The first fault of each kind, and how many there are like it."""
    groups = grouped(judged.faults, lambda fault: (fault.check, fault.collective, fault.ranks))
    return [
        fact(
            "collectives.fault_line",
            side=side,
            who=_who(group[0]),
            **_case(group[0]),
            num_wrong=group[0].num_wrong,
            num_alike=len(group) - 1 or None,
        )
        for group in list(groups.values())[:_MOST]
    ]


def _case(fault: CollectiveFault) -> dict[str, Any]:
    names = ("collective", "dtype", "size", "elements", "values", "what")
    return {name: getattr(fault, name) for name in names}


def _who(fault: CollectiveFault, side: Side | None = None) -> Fact:
    if fault.ranks:
        return fact("collectives.named", ranks=ranks_named(fault.ranks), side=side)
    if not fault.wrong_ranks:
        return fact("collectives.nobody", side=side)
    code = "collectives.all_wrong" if len(fault.wrong_ranks) > 1 else "collectives.one_holds"
    return fact(code, ranks=ranks_named(fault.wrong_ranks), side=side)


def _orders(orders: Sequence[OrderRow]) -> Fact | None:
    """``all_reduce adds by ring``; several where sizes or dtypes differ."""
    first: dict[str, OrderRow] = {}
    for row in orders:
        if row.collective == "all_reduce":
            first.setdefault(row.order, row)
    several = len(first) > 1
    ways = [
        fact(
            "collectives.way",
            order=row.order,
            dtype=row.dtype if several else None,
            size=row.size if several else None,
        )
        for row in first.values()
    ]
    return fact("collectives.adds", ways=ways) if ways else None


def _facts(judged: CollectivesSide, side: Side | None) -> list[Fact]:
    """Return what else is worth a line. ``side``: whose, where there are two."""
    facts = []
    sums = {row.collective: row.limit_usage for row in judged.rows if row.limit_usage is not None}
    if sums:
        worst = max(sums, key=lambda collective: sums[collective])
        usage = fact(
            "collectives.usage",
            side=side,
            limit_usage=sums[worst],
            num_ranks=judged.num_ranks,
            collective=worst,
        )
        facts.append(usage)
    proven = [row for row in judged.orders if row.accumulates is not None]
    if proven:
        pairs = sorted({(row.dtype, row.accumulates or "") for row in proven})
        kept = [fact("collectives.kept", dtype=own, accumulates=wide) for own, wide in pairs]
        num = sum(row.num_replayed for row in proven)
        facts.append(fact("collectives.replayed", side=side, num=num, kept=kept))
    rows = judged.identities
    if rows:
        same = fact(
            "collectives.identities",
            side=side,
            total=len(rows),
            num_same=sum(row.num_different == 0 for row in rows),
            num_promised=sum(row.promised for row in rows),
        )
        facts.append(same)
    flushed = sum(row.num_flushed for row in judged.rows)
    if flushed:
        facts.append(fact("collectives.flushed", side=side, num=flushed))
    return facts


# Runs of collectives: one judged by itself, or two held against each other.
#
# Each side is judged by the definitions alone, so a side that is wrong is named without trusting
# the other. Where both are right, results may still differ: two libraries add in two orders. Cases
# are paired by name; only those with the same inputs on every rank are compared.


def report_alone(run: Run, *, progress: Progress | None = None) -> Report:
    """The report on one run. Raises RunFormatError for a damaged one."""
    judged = check_side(run, "reference", progress)
    num = sum(row.num_cases for row in judged.rows)
    coverage = Coverage(num_compared=num, num_only_reference=judged.num_missing)
    result = CollectivesResult(sides=[judged])
    finding = find(result, [run], coverage)
    return report_of(run, run, finding, coverage, [], collectives=result)


def report_on(
    a: Run,
    b: Run,
    *,
    truth: Run | None,
    floor: Sequence[object],
    layers: Sequence[Run],
    progress: Progress | None,
) -> Report:
    """The report on two runs. Raises UsageError for a truth, a floor or layers, and RunFormatError
    for a damaged run."""
    for option, given in (("--truth", truth), ("--floor", floor), ("--layers", layers)):
        if given:
            raise UsageError(
                f"{option} means nothing to collectives: each is held to its definition",
                hint=command_line("compare", a.path, b.path),
            )
    sides: list[tuple[Side, Run]] = [("reference", a), ("candidate", b)]
    judged = [check_side(run, side, progress) for side, run in sides]
    reference, candidate = Recorded(a), Recorded(b)
    ours = {case.site: case for case in reference.cases()}
    cases_b = {case.site: case for case in candidate.cases()}
    skipped: list[Skipped] = []
    differing: list[CollectiveDiff] = []
    num_common = 0
    nums = reference.num_ranks, candidate.num_ranks
    other_ranks = fact("collectives.other_num_ranks", reference=nums[0], candidate=nums[1])
    for site in dict.fromkeys((*ours, *cases_b)):
        case, other = ours.get(site), cases_b.get(site)
        if case is None or other is None:
            side: Side = "candidate" if case is None else "reference"
            skipped.append(_skip(site, fact("collectives.no_partner"), side))
        elif nums[0] != nums[1]:
            skipped.append(_skip(site, other_ranks, "both"))
        elif case.input_digests != other.input_digests:
            skipped.append(_skip(site, fact("collectives.other_inputs"), "both"))
        else:
            num_common += 1
            ranks = [
                rank for rank in case.ranks if case.digests(rank)[:1] != other.digests(rank)[:1]
            ]
            far = [
                _apart(case.results[rank], other.results[rank])
                for rank in ranks
                if rank in case.results and rank in other.results
            ]
            if ranks:
                size = max(far, default=float("nan"))
                differing.append(CollectiveDiff(site=site, ranks=tuple(ranks), rel_l2=size))
    result = CollectivesResult(
        sides=judged,
        num_common=num_common,
        num_same=num_common - len(differing),
        differing=sorted(differing, key=lambda diff: -diff.rel_l2),
    )
    coverage = Coverage.of(num_common, skipped)
    lines = [line for line in facts_of_operators(a, b)[0] if line.check != "engine"]
    finding = find(result, [a, b], coverage)
    return report_of(a, b, finding, coverage, lines, collectives=result)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return ratio(float((b.double() - a.double()).norm()), float(a.double().norm()))


def _skip(site: str, reason: Fact, side: SideOrBoth) -> Skipped:
    return Skipped("free", 0, 0, site, side, reason)

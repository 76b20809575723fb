"""Each case judged: which elements are wrong, which rank made them, and what it did instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from divergence.analyses.collectives.adding import (
    Identity,
    Key,
    identities,
    narrow_ranks,
    odd_ranks,
    order_row,
    replay,
    trials_of,
)
from divergence.analyses.collectives.recorded import (
    Recorded,
    RecordedCase,
    Sum,
    bits_differ,
    exact_sum,
    expected_of,
)
from divergence.collectives.cases import COLLECTIVES, NOT_SUPPORTED, ROOT_RANK, CollectiveCase
from divergence.collectives.orders import Stretch, decode
from divergence.comparison.results import (
    CollectiveCheck,
    CollectiveFault,
    CollectiveRow,
    CollectivesSide,
)
from divergence.facts import Fact, fact, plain
from divergence.numerics.formats import format_named, format_of
from divergence.run.reader import Run
from divergence.words import Progress, Side, silent

# What ranks hold where they are wrong, as facts that are true of each of them.

Right = Sum | torch.Tensor
"""What a rank should hold: a sum, or bits."""

_AVERAGES = 1e-3
"""How near 1 / factor must be to a whole number to be called one: factors are told to 4 digits."""


def instead(
    case: RecordedCase, held: Mapping[int, torch.Tensor], wrong: Mapping[int, torch.Tensor],
    rights: Mapping[int, Right],
) -> Fact:  # fmt: skip
    """``wrong``: by rank, of each rank that is wrong the elements, results of one size."""
    ranks = list(wrong)
    swaps = {_swapped(held[rank], rights[rank], case.num_ranks) for rank in ranks}
    swapped = swaps.pop() if len(swaps) == 1 else None
    if swapped is not None:
        return swapped
    clauses = [list(_clauses(held[r], wrong[r], case, r, rights[r])) for r in ranks]
    common = [item for item in clauses[0] if all(item in others for others in clauses[1:])]
    where = _where(torch.stack([wrong[rank] for rank in ranks]).any(dim=0))
    what = common[0] if common else _far(held, wrong, rights)
    return fact("collectives.instead", where=where, what=what)


def _where(wrong: torch.Tensor) -> Fact:
    places = wrong.nonzero().flatten()
    size, count, first, last = len(wrong), len(places), int(places[0]), int(places[-1])
    if count == size:
        return fact("collectives.all_elements", size=size)
    if last == size - 1 and count == size - first:
        return fact("collectives.last_elements", num=count, size=size)
    return fact("collectives.some_elements", num=count, size=size, first=first, last=last)


def _clauses(
    out: torch.Tensor, wrong: torch.Tensor, case: RecordedCase, rank: int, exact: Right
) -> Iterator[Fact]:
    """What can be said of one rank, the plainest first."""
    held = out[wrong]
    if out.dtype.is_floating_point and not held.double().isfinite().all():
        yield fact("collectives.are_nonfinite")
        return
    if bool((held == 0).all()):
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
    if isinstance(exact, Sum):
        yield from _terms(out, wrong, case, rank, exact)
        yield from _factor(held, wrong, exact)


def _terms(
    out: torch.Tensor, wrong: torch.Tensor, case: RecordedCase, rank: int, exact: Sum
) -> Iterator[Fact]:
    """A rank's terms that are missing or added twice. Where several would do (ranks that cancel
    each other), it is not told which."""
    error, bound = exact.error(out)[wrong], 4 * exact.bound[wrong]
    fits: list[tuple[Fact, bool]] = []
    for giver, x in enumerate(case.inputs):
        theirs = x.chunk(case.num_ranks)[rank] if x.shape != out.shape else x
        term = theirs.double()[wrong]
        if not (term != 0).any():
            continue
        ways = (("collectives.lack", error + term), ("collectives.hold_twice", error - term))
        for code, rest in ways:
            if bool((rest.abs() <= bound + 0.01 * term.abs()).all()):
                fits.append((fact(code, rank=giver), bool((rest.abs() <= bound).all())))
    sure = [item for item, exactly in fits if exactly] or [item for item, _ in fits]
    if len(sure) == 1:
        yield sure[0]


def _factor(held: torch.Tensor, wrong: torch.Tensor, exact: Sum) -> Iterator[Fact]:
    """One multiple of the sum, as an average is; of sums that are not all one number."""
    sums, bound = exact.high[wrong], exact.bound[wrong]
    square = float(sums.square().sum())
    if len(sums) < 3 or square == 0.0 or bool((sums == sums[0]).all()):
        return
    factor = float((held.double() * sums).sum()) / square
    form = format_of(held.dtype)
    rounding = 2 * form.unit_roundoff if form.kind == "float" else 0.0
    limit = max(1.0, abs(factor)) * (2 * bound + rounding * sums.abs())
    if factor == 0.0 or bool(((held.double() - factor * sums).abs() > limit).any()):
        return
    parts = 1.0 / factor
    if round(parts) > 1 and abs(parts - round(parts)) < _AVERAGES:
        yield fact("collectives.are_divided", parts=round(parts))
    else:
        yield fact("collectives.are_multiple", factor=factor)


def _far(
    held: Mapping[int, torch.Tensor], wrong: Mapping[int, torch.Tensor], rights: Mapping[int, Right]
) -> Fact:
    """How far from the sum, at most."""
    worst = 0.0
    for rank, where in wrong.items():
        exact = rights[rank]
        if not isinstance(exact, Sum):
            return fact("collectives.are_other")
        error, bound = exact.error(held[rank])[where].abs(), exact.bound[where]
        if bool((bound == 0).any()):
            return fact("collectives.are_not_exact")
        worst = max(worst, float((error / bound.clamp_min(1e-300)).max()))
    if not 1.0 < worst <= 1e12:
        return fact("collectives.are_not_exact")
    return fact("collectives.are_far", ratio=worst, large=worst >= 10)


def _swapped(out: torch.Tensor, exact: Right, num_ranks: int) -> Fact | None:
    """Two chunks that stand in each other's place."""
    if len(out) < 2 * num_ranks:
        return None
    chunks = out.tensor_split(num_ranks)

    def fits(i: int, j: int) -> bool:
        """Does chunk i hold what belongs in chunk j?"""
        size = min(len(chunks[i]), len(chunks[j]))
        if isinstance(exact, Sum):
            parts = [tensor.tensor_split(num_ranks)[j][:size] for tensor in
                     (exact.high, exact.low, exact.bound)]  # fmt: skip
            other = Sum(*parts)
            return bool((other.error(chunks[i][:size]).abs() <= other.bound).all())
        there = exact.tensor_split(num_ranks)[j][:size]
        return not bool(bits_differ(chunks[i][:size], there).any())

    wrong = [i for i in range(num_ranks) if not fits(i, i)]
    matches = {i: [j for j in range(num_ranks) if j != i and fits(i, j)] for i in wrong}
    if len(wrong) < 2 or not all(len(others) == 1 for others in matches.values()):
        return None
    swapped = [fact("collectives.chunk_swapped", chunk=i, other=others[0])
              for i, others in matches.items()]  # fmt: skip
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


def wrong_of(case: RecordedCase, held: Mapping[int, torch.Tensor]) -> WrongCall:
    """``held``: the results of one call, by rank."""
    wrong, sums = WrongCall(), case.case.adds
    if sums:
        whole, parts = exact_sum(case.inputs), case.case.collective == "reduce_scatter"
        wrong.rights = {rank: whole.part(rank, case.num_ranks) if parts else whole for rank in held}
    else:
        expected = expected_of(case)
        wrong.rights = {rank: expected[rank] for rank in held}
    for rank, out in held.items():
        exact = wrong.rights[rank]
        size = len(exact.high if isinstance(exact, Sum) else exact)
        if len(out) != size:
            wrong.misfits[rank] = size
            continue
        if isinstance(exact, Sum):
            beyond = _beyond(case, out, exact, wrong)
        else:
            beyond = bits_differ(out, exact)
        if beyond.any():
            wrong.elements[rank] = beyond
    return wrong


def _beyond(case: RecordedCase, out: torch.Tensor, exact: Sum, wrong: WrongCall) -> torch.Tensor:
    """Where a sum is farther off than rounding explains."""
    error = exact.error(out).abs()
    if case.case.values in ("integers", "rank_coded"):
        return error > 0
    beyond = error > exact.bound
    if case.case.values == "subnormal" and beyond.any() and _all_flushed(out, beyond):
        wrong.flushed = True
        return torch.zeros_like(beyond)
    usage = float((error / exact.bound.clamp_min(5e-324)).max())
    wrong.usage = max(wrong.usage or 0.0, usage)
    return beyond


def _all_flushed(out: torch.Tensor, beyond: torch.Tensor) -> bool:
    """Zeros where subnormal sums should be, and no subnormal number left: a setting, and not what
    got lost."""
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
    """Who made it, nobody where that is not told. ``assumed``: by the part of the buffer alone.
    ``how``: by what it is known, for the end of the clause."""

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
    """Of one group of ranks with wrong sums. Of ``reduce`` the root alone holds anything, which
    does not tell who made it; where all ranks are wrong alike, the one whose part it is."""
    ranks, name = tuple(sorted(wrong)), case.case.collective
    if name == "reduce":
        return Made(())
    if len(ranks) < case.num_ranks or name == "reduce_scatter":
        return Made(ranks)
    part = part_of(_union(wrong), case.num_ranks)
    if part is None:
        return Made(())
    return Made((part,), assumed=True, how=(fact("collectives.own_part"),))


def sent_by(case: RecordedCase, wrong: Wrong) -> Made:
    """Of one group of ranks with wrong bits, where nothing is added: who holds them, or who sent
    them where every other rank has them wrong. What one rank sent and one other alone has wrong may
    be the fault of either: that it is the one that holds it is an assumption."""
    ranks = tuple(sorted(wrong))
    everywhere = len(ranks) == case.num_ranks
    if case.case.collective == "broadcast":
        return _broadcast(case, ranks, everywhere)
    senders = _senders(case, wrong)
    if senders:
        return Made(tuple(senders), assumed=not everywhere, how=(fact("collectives.sent"),))
    givers = {giver for rank, where in wrong.items() for giver in _givers(case, rank, where)}
    if everywhere or len(givers) != 1:
        return Made(() if everywhere else ranks)
    (giver,) = givers
    if giver in ranks or (case.case.collective == "all_gather" and case.num_ranks > 2):
        return Made(ranks)  # the others got the same, and have it right
    return Made(ranks, assumed=True, how=(fact("collectives.sent_by", rank=giver),))


def _senders(case: RecordedCase, wrong: Wrong) -> set[int]:
    """The one rank whose numbers are wrong on every other, of two others at least; or none."""
    if case.case.collective not in ("all_gather", "all_to_all"):
        return set()
    givers = {giver for rank, where in wrong.items() for giver in _givers(case, rank, where)}
    others = set(range(case.num_ranks)) - givers
    return givers if len(givers) == 1 and len(wrong) > 1 and others <= set(wrong) else set()


def _broadcast(case: RecordedCase, ranks: tuple[int, ...], everywhere: bool) -> Made:
    """All but the root wrong: sent wrong, or not at all, by nobody that is told."""
    if everywhere:
        return Made((ROOT_RANK,), assumed=True)
    if len(ranks) == case.num_ranks - 1 and ROOT_RANK not in ranks:
        return Made(ranks, assumed=True) if len(ranks) == 1 else Made(())
    return Made(ranks)


def _givers(case: RecordedCase, rank: int, where: torch.Tensor) -> set[int]:
    """Whose numbers should stand at the elements that are wrong."""
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


def _union(wrong: Wrong) -> torch.Tensor:
    return torch.stack(list(wrong.values())).any(dim=0)


# Sums that are kept in another dtype than the buffer's: by all ranks, or by one.
#
# Told only where every recorded case of that dtype and size whose sums round is explained so: a
# single one may come out by chance, as where few digits are in use.


def adds_narrow(
    recorded: Recorded, stretches: list[Stretch], case: RecordedCase
) -> tuple[tuple[int, ...], str] | None:
    """The ranks of which one alone adds in a narrower dtype, and the dtype."""
    out = case.whole
    if not stretches or out is None or format_named(case.case.dtype).kind != "float":
        return None
    told = narrow_ranks(stretches, case.inputs, out)
    for inputs, whole in trials_of(recorded, case.case).values():
        other = None if told is None else narrow_ranks(stretches, inputs, whole)
        if told is None or other is None or other[1] != told[1]:
            return None
        told = tuple(rank for rank in told[0] if rank in other[0]), told[1]
    return told if told is not None and told[0] else None


def adds_alike(recorded: Recorded, stretches: list[Stretch], case: RecordedCase) -> str | None:
    """The dtype in which all ranks keep their sums, if it is narrower than the buffer's."""
    out = case.whole
    if out is None or not stretches:
        return None
    trials = [(case.inputs, out), *trials_of(recorded, case.case).values()]
    dtype = replay(stretches, trials).accumulates
    wider = format_named(case.case.dtype).unit_roundoff
    return dtype if dtype and format_named(dtype).unit_roundoff > wider else None


def only_one(
    case: RecordedCase, wrong: Mapping[int, torch.Tensor], ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """The one of ``ranks`` that alone is wrong, or whose part of the buffer is."""
    if case.case.collective == "reduce_scatter":
        told = tuple(wrong) if len(wrong) == 1 else ()
    else:
        part = part_of(wrong[min(wrong)], case.num_ranks)
        told = () if part is None else (part,)
    return tuple(rank for rank in told if rank in ranks)


# One run of collectives, judged by itself.
#
# Every result is held to the definition, with what the ranks put in as the run recorded it; nothing
# of the run's own machine is trusted. Where nothing is rounded the bits must be right. A rounded
# sum may be off by what rounding in any order may make, an upper bound and no estimate, so that a
# fault that is claimed is one. What hides below the bound is seen by replaying the order bit by
# bit.

_REPLICATED = ("all_reduce", "rs_ag", "all_gather", "broadcast")


@dataclass(slots=True)
class _Tally:
    num_cases: int = 0
    num_right: int = 0
    num_repeated: int = 0
    num_flushed: int = 0
    usage: float | None = None
    implementation: str = "-"


@dataclass(slots=True)
class _Judge:
    recorded: Recorded
    orders: dict[Key, list[Stretch]] = field(default_factory=dict)
    faults: list[CollectiveFault] = field(default_factory=list)
    tallies: dict[str, _Tally] = field(default_factory=dict)
    num_missing: int = 0

    def add(
        self, case: RecordedCase, check: CollectiveCheck, wrong: torch.Tensor | int,
        ranks: tuple[int, ...], *what: Fact, elements: int = 0, assumed: bool = False,
        wrong_ranks: Iterable[int] = (),
    ) -> None:  # fmt: skip
        count = wrong if isinstance(wrong, int) else int(wrong.sum())
        size = elements if isinstance(wrong, int) else len(wrong)
        spec = case.case
        self.faults.append(
            CollectiveFault(
                check=check, collective=spec.collective, dtype=spec.dtype, size=spec.size,
                values=spec.values, site=case.site, elements=size, num_wrong=count, ranks=ranks,
                what=list(what), assumed=assumed,
                wrong_ranks=tuple(r for r in sorted(wrong_ranks) if r not in ranks),
            )
        )  # fmt: skip


def judge(run: Run, side: Side, progress: Progress | None = None) -> CollectivesSide:
    """Everything that can be said of one run. Raises RunFormatError for a damaged one."""
    recorded = Recorded(run)
    n = recorded.num_ranks
    all_of = _Judge(recorded)
    measured = list(recorded.orders())
    for order in measured:
        all_of.orders[_key(order.case)] = decode(order.sizes, n)
    cases = list(recorded.cases())
    for number, case in enumerate(cases):
        (progress or silent)("compare", number, len(cases), case.case.path)
        _judge_case(all_of, case)
    rows = [
        CollectiveRow(
            collective=name, implementation=tally.implementation, num_cases=tally.num_cases,
            num_right=tally.num_right, num_repeated=tally.num_repeated, limit_usage=tally.usage,
            num_flushed=tally.num_flushed,
        )
        for name, tally in all_of.tallies.items()
    ]  # fmt: skip
    order_rows = [
        order_row(recorded, order.case, order.elements, all_of.orders[_key(order.case)])
        for order in measured
    ]
    sums_in: dict[Key, str | None] = {
        (row.collective, row.dtype, row.size): row.accumulates for row in order_rows
    }
    pairs = identities(recorded, all_of.orders, sums_in)
    for pair in pairs:
        _judge_identity(all_of, pair)
    return CollectivesSide(
        side=side, num_ranks=n, backend=run.manifest.model.model_class, rows=rows,
        faults=_sorted(_without_contradictions(all_of.faults)), orders=order_rows,
        identities=[pair.row for pair in pairs],
        bandwidth=list(recorded.bandwidth()), num_missing=all_of.num_missing,
        lacking=_unsupported(run),
    )  # fmt: skip


def _unsupported(run: Run) -> list[Fact]:
    """``float8_e4m3fn in all_reduce, broadcast: Invalid scalar type``; other reasons stay."""
    collectives: dict[tuple[str, str], list[str]] = {}
    others = []
    for reason in run.manifest.plan.skipped_operators:
        what, separator, why = reason.partition(NOT_SUPPORTED)
        name, of, dtype = what.partition(" of ")
        if separator and of:
            collectives.setdefault((dtype, why), []).append(name)
        else:
            others.append(plain(reason))
    return [
        fact("collectives.unsupported", dtype=dtype, collectives=names, why=why)
        for (dtype, why), names in collectives.items()
    ] + others


def _judge_case(all_of: _Judge, case: RecordedCase) -> None:
    name = case.case.collective
    if not case.has_inputs:
        all_of.num_missing += 1
        return
    tally = all_of.tallies.setdefault(name, _Tally())
    tally.num_cases += 1
    tally.implementation = all_of.recorded.implementation(case.case.path)
    num_faults = len(all_of.faults)
    held = [rank for rank in case.ranks if rank in case.results]
    all_of.num_missing += len(case.ranks) - len(held)
    wrong = wrong_of(case, case.results)
    tally.num_flushed += wrong.flushed
    if wrong.usage is not None:
        tally.usage = max(tally.usage or 0.0, wrong.usage)
    _judge_call(all_of, case, wrong)
    if name in _REPLICATED and not wrong.found:
        odd = odd_ranks(case, all_of.orders.get(_key(case.case), []))
        if odd is not None:
            ranks, differ, what = odd
            all_of.add(case, "same_bits", differ, ranks, what)
    tally.num_repeated += _judge_repeats(all_of, case, wrong)
    tally.num_right += len(all_of.faults) == num_faults


def _judge_call(all_of: _Judge, case: RecordedCase, wrong: WrongCall) -> None:
    """What is wrong with the first call."""
    check: CollectiveCheck = "sum" if case.case.adds else "definition"
    sizes: dict[tuple[int, int], list[int]] = {}
    for rank, size in wrong.misfits.items():
        sizes.setdefault((len(case.results[rank]), size), []).append(rank)
    for (num, size), ranks in sizes.items():
        misfit = fact("collectives.misfit", num=num, size=size)
        all_of.add(case, check, num, tuple(ranks), misfit, elements=num)
    if not wrong.elements:
        if case.case.adds and not wrong.found:
            _look_below(all_of, case)
    elif not _named_by_replay(all_of, case, wrong):
        for group in groups_of(case, wrong.elements):
            made = _made(case, group)
            what = instead(case, case.results, group, wrong.rights)
            union = torch.stack(list(group.values())).any(dim=0)
            all_of.add(
                case, check, union, made.ranks, what, *made.how, assumed=made.assumed,
                wrong_ranks=group,
            )  # fmt: skip


def _made(case: RecordedCase, group: dict[int, torch.Tensor]) -> Made:
    return made_by(case, group) if case.case.adds else sent_by(case, group)


def _named_by_replay(all_of: _Judge, case: RecordedCase, wrong: WrongCall) -> bool:
    """Do additions in a narrower dtype, of one rank or of all, explain every bit?"""
    if not case.case.adds or wrong.misfits:
        return False
    stretches, elements = all_of.orders.get(_key(case.case), []), wrong.elements
    beyond = elements[min(elements)]
    narrow = adds_narrow(all_of.recorded, stretches, case)
    if narrow is not None:
        ranks, dtype = narrow
        told = ranks if len(ranks) == 1 else only_one(case, elements, ranks)
        what = fact("collectives.adds_in", dtype=dtype)
        assumed = len(ranks) > 1 and case.case.collective != "reduce_scatter"
        all_of.add(case, "sum", beyond, told, what, assumed=assumed)
        return True
    dtype_of_all = adds_alike(all_of.recorded, stretches, case)
    if dtype_of_all is not None:
        what = fact("collectives.all_add_in", dtype=dtype_of_all)
        all_of.add(case, "sum", beyond, tuple(range(case.num_ranks)), what)
    return dtype_of_all is not None


def _look_below(all_of: _Judge, case: RecordedCase) -> None:
    """A rank that adds in another dtype than the others, below what the bound shows."""
    spec = case.case
    stretches = all_of.orders.get(_key(spec))
    out = case.whole
    if stretches is None or out is None or spec.values != "random":
        return
    if replay(stretches, [(case.inputs, out)]).accumulates is not None:
        return
    narrow = adds_narrow(all_of.recorded, stretches, case)
    if narrow is not None:
        ranks, dtype = narrow
        what = fact("collectives.adds_unlike_others", dtype=dtype)
        told = ranks if len(ranks) == 1 else ()
        all_of.add(case, "sum", len(out), told, what, elements=len(out))


def _judge_repeats(all_of: _Judge, case: RecordedCase, first: WrongCall) -> bool:
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
    if first.found or not _a_call_is_wrong(all_of, case, calls):
        made, orders = _made(case, differing), case.case.adds and not first.found
        what = fact("collectives.other_bits_each_time")
        if orders:
            what = fact("collectives.other_order_each_time", part=made.assumed)
        wrong = differing[min(differing)]
        all_of.add(case, "repeatable", wrong, made.ranks, what, assumed=made.assumed)
    return False


def _a_call_is_wrong(
    all_of: _Judge, case: RecordedCase, calls: dict[int, dict[int, torch.Tensor]]
) -> bool:
    """Of calls that differ from the first, which is right: says what the first wrong one holds."""
    for number, held in sorted(calls.items()):
        wrong = wrong_of(case, held)
        if not wrong.elements:
            continue
        for group in groups_of(case, wrong.elements):
            made = _made(case, group)
            what = instead(case, held, group, wrong.rights)
            union = torch.stack(list(group.values())).any(dim=0)
            all_of.add(
                case, "repeatable", union, made.ranks,
                fact("collectives.in_call", call=number, what=what), *made.how,
                assumed=made.assumed, wrong_ranks=group,
            )  # fmt: skip
        return True
    return False


def _judge_identity(all_of: _Judge, pair: Identity) -> None:
    """Where the orders promise equal bits, and nothing else is wrong with either collective."""
    names, case = ("all_reduce", "reduce_scatter", "rs_ag"), pair.composed.case
    known = any(
        fault.collective in names and (fault.dtype, fault.size) == (case.dtype, case.size)
        for fault in all_of.faults
    )
    if pair.row.promised and pair.row.num_different and not known:
        what = fact("collectives.promise_broken")
        all_of.add(pair.composed, "identity", pair.differ, (), what)


def _key(case: CollectiveCase) -> Key:
    return (case.collective, case.dtype, case.size)


def _without_contradictions(faults: list[CollectiveFault]) -> list[CollectiveFault]:
    """Who differs from the most is no longer blamed where other ranks are wrong by themselves."""
    wrong: dict[str, set[int]] = {}
    for fault in faults:
        if fault.check in ("sum", "definition"):
            wrong.setdefault(fault.collective, set()).update(fault.ranks)
    return [
        replace(fault, ranks=(), what=[fact("collectives.bits_differ")])
        if fault.check == "same_bits" and wrong.get(fault.collective, set()) - set(fault.ranks)
        else fault
        for fault in faults
    ]


_CHECKS: tuple[CollectiveCheck, ...] = ("definition", "sum", "repeatable", "same_bits", "identity")
_VALUES = ("random", "rank_coded", "integers", "cancelling", "outlier", "subnormal")
_SIZES = ("odd", "even", "large", "tiny")


def _sorted(faults: list[CollectiveFault]) -> list[CollectiveFault]:
    """The gravest first, of each collective the plainest case; those that name a rank before
    others."""
    names = list(COLLECTIVES)

    def key(bug: CollectiveFault) -> tuple[int, ...]:
        dtypes = ("float32", "bfloat16", "float16", "float64")
        dtype = dtypes.index(bug.dtype) if bug.dtype in dtypes else len(dtypes)
        name = next((n for n, known in enumerate(names) if known == bug.collective), len(names))
        return (_CHECKS.index(bug.check), not bug.ranks, name, dtype, _SIZES.index(bug.size),
                next((n for n, known in enumerate(_VALUES) if known == bug.values), 9))  # fmt: skip

    return sorted(faults, key=key)

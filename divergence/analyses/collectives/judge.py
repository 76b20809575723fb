"""One run of collectives, judged by itself.

Every result is held to the definition, with what the ranks put in as the run recorded it; nothing
of the run's own machine is trusted. Where nothing is rounded the bits must be right. A rounded sum
may be off by what rounding in any order may make, an upper bound and no estimate, so that a fault
that is claimed is one. What hides below the bound is seen by replaying the order bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from divergence.analyses.collectives.adding import Identity, Key, identities, order_row, replay
from divergence.analyses.collectives.copies import odd_ranks
from divergence.analyses.collectives.definitions import bits_differ
from divergence.analyses.collectives.instead import instead
from divergence.analyses.collectives.makers import Made, groups_of, made_by, sent_by
from divergence.analyses.collectives.narrow import adds_alike, adds_narrow, only_one
from divergence.analyses.collectives.recorded import Recorded, RecordedCase
from divergence.analyses.collectives.wrong import WrongCall, wrong_of
from divergence.collectives.cases import COLLECTIVES, NOT_SUPPORTED, CollectiveCase
from divergence.collectives.orders import Stretch, decode
from divergence.comparison.results import (
    CollectiveCheck,
    CollectiveFault,
    CollectiveRow,
    CollectivesSide,
)
from divergence.facts import Fact, fact, plain
from divergence.run.reader import Run
from divergence.words import Progress, Side, silent

__all__ = ["judge"]

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

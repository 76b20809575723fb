"""One run of collectives, judged by itself.

Every result is held to the definition, with what the ranks put in as the run recorded it; nothing
of the run's own machine is trusted. Where nothing is rounded the bits must be right. A rounded sum
may be off by what rounding in any order may make, an upper bound and no estimate, so that a fault
that is claimed is one. What hides below the bound is seen by replaying the order bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from divergence.analyses.collectives.adding import (
    Identity,
    Key,
    identities,
    narrow_ranks,
    order_row,
    replay,
)
from divergence.analyses.collectives.definitions import (
    Sum,
    alike,
    bits_differ,
    by_part,
    exact_sum,
    expected_of,
    instead,
    part_of,
)
from divergence.analyses.collectives.recorded import Recorded, RecordedCase
from divergence.collectives.cases import COLLECTIVES, CollectiveCase
from divergence.collectives.orders import Stretch, decode
from divergence.comparison.results.suites import (
    CollectiveCheck,
    CollectiveFault,
    CollectiveRow,
    CollectivesSide,
)
from divergence.numerics.formats import format_named
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
        ranks: tuple[int, ...], text: str, *, elements: int = 0, assumed: bool = False,
    ) -> None:  # fmt: skip
        count = wrong if isinstance(wrong, int) else int(wrong.sum())
        size = elements if isinstance(wrong, int) else len(wrong)
        spec = case.case
        self.faults.append(
            CollectiveFault(
                check=check, collective=spec.collective, dtype=spec.dtype, size=spec.size,
                values=spec.values, site=case.site, elements=size, num_wrong=count, ranks=ranks,
                text=text, assumed=assumed,
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
    pairs = identities(recorded, all_of.orders)
    for pair in pairs:
        _judge_identity(all_of, pair)
    return CollectivesSide(
        side=side, num_ranks=n, backend=run.manifest.model.model_class, rows=rows,
        faults=_sorted(all_of.faults), orders=order_rows,
        identities=[pair.row for pair in pairs],
        bandwidth=list(recorded.bandwidth()), num_missing=all_of.num_missing,
        unsupported=_unsupported(run),
    )  # fmt: skip


def _unsupported(run: Run) -> list[str]:
    """``float8_e4m3fn in all_reduce, broadcast: Invalid scalar type``; other reasons stay."""
    told: dict[tuple[str, str], list[str]] = {}
    others = []
    for reason in run.manifest.plan.skipped_operators:
        what, separator, why = reason.partition(" is not supported: ")
        name, of, dtype = what.partition(" of ")
        if separator and of:
            told.setdefault((dtype, why), []).append(name)
        else:
            others.append(reason)
    return [
        f"{dtype} in {', '.join(names)}: {why}" for (dtype, why), names in told.items()
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
    if case.case.adds:
        wrong = _judge_sum(all_of, case, tally)
    else:
        wrong = _judge_bits(all_of, case)
    if name in _REPLICATED and not wrong:
        _judge_copies(all_of, case)
    tally.num_repeated += _judge_repeats(all_of, case)
    tally.num_right += len(all_of.faults) == num_faults


def _judge_bits(all_of: _Judge, case: RecordedCase) -> set[int]:
    """Ranks whose bits are not those of the definition."""
    wrong: dict[int, torch.Tensor] = {}
    expected = expected_of(case)
    for rank, out in case.results.items():
        exact = expected[rank]
        if _misfits(all_of, case, "definition", rank, out, exact):
            wrong[rank] = torch.ones(1, dtype=torch.bool)
            continue
        differ = bits_differ(out, exact)
        if differ.any():
            wrong[rank] = differ
    groups = alike(wrong)
    for ranks, differ in groups:
        rank = ranks[0]
        exact = expected[rank]
        if len(differ) == len(exact):
            text = instead(case.results[rank], differ, case, rank, exact)
            everywhere = len(ranks) == case.num_ranks > 1
            named = _sender(case, differ) if everywhere else ranks
            all_of.add(case, "definition", differ, named, text)
    return set(wrong)


def _misfits(
    all_of: _Judge, case: RecordedCase, check: CollectiveCheck, rank: int, out: torch.Tensor,
    expected: torch.Tensor,
) -> bool:  # fmt: skip
    """A result of another size is a fault by itself."""
    if out.shape != expected.shape:
        text = f"has {len(out):,} elements in place of {len(expected):,}"
        all_of.add(case, check, len(out), (rank,), text, elements=len(out))
    return out.shape != expected.shape


def _sender(case: RecordedCase, differ: torch.Tensor) -> tuple[int, ...]:
    """Where all ranks are wrong alike, who sent it: of an all-gather the one whose part it is."""
    if case.case.collective == "broadcast":
        return (0,)
    if case.case.collective != "all_gather":
        return ()
    each = len(differ) // case.num_ranks
    ranks = {int(place) // each for place in differ.nonzero().flatten()}
    return tuple(ranks) if len(ranks) == 1 else ()


def _judge_sum(all_of: _Judge, case: RecordedCase, tally: _Tally) -> set[int]:
    """Ranks whose sums are beyond what rounding explains."""
    n, spec = case.num_ranks, case.case
    whole = exact_sum(case.inputs)
    exact = spec.values in ("integers", "rank_coded")
    parts = spec.collective == "reduce_scatter"
    wrong: dict[int, torch.Tensor] = {}
    rights: dict[int, Sum] = {}
    for rank, out in case.results.items():
        expected = rights[rank] = whole.part(rank, n) if parts else whole
        if _misfits(all_of, case, "sum", rank, out, expected.high):
            wrong[rank] = torch.ones(1, dtype=torch.bool)
            continue
        error = expected.error(out).abs()
        beyond = error > (torch.zeros_like(error) if exact else expected.bound)
        if spec.values == "subnormal" and beyond.any() and bool((out[beyond] == 0).all()):
            tally.num_flushed += 1
            continue
        if beyond.any():
            wrong[rank] = beyond
        if not exact:
            usage = float((error / expected.bound.clamp_min(5e-324)).max())
            tally.usage = max(tally.usage or 0.0, usage)
    if wrong:
        _name_wrong_sums(all_of, case, wrong, rights)
    elif not exact:
        _look_below(all_of, case)
    return set(wrong)


def _name_wrong_sums(
    all_of: _Judge, case: RecordedCase, wrong: dict[int, torch.Tensor], rights: dict[int, Sum]
) -> None:
    """Who made wrong sums: the rank whose additions explain every bit, or the one that is wrong
    alone, or the one whose part of the buffer is."""
    narrow = _adds_narrow(all_of, case)
    if narrow is not None:
        ranks, dtype = narrow
        beyond = wrong[min(wrong)]
        told = ranks if len(ranks) == 1 else _only(case, wrong, ranks)
        text = f"adds in {dtype}: with its additions rounded so, every bit is explained"
        assumed = len(ranks) > 1 and case.case.collective != "reduce_scatter"
        all_of.add(case, "sum", beyond, told, text, assumed=assumed)
        return
    dtype_of_all = _adds_alike(all_of, case)
    if dtype_of_all is not None:
        text = f"add in {dtype_of_all}: with every addition rounded so, every bit is explained"
        all_of.add(case, "sum", wrong[min(wrong)], tuple(range(case.num_ranks)), text)
        return
    for ranks, beyond in alike(wrong):
        rank = ranks[0]
        text = instead(case.results[rank], beyond, case, rank, rights[rank])
        named, told_by_part = by_part(case, ranks, beyond)
        text += ", in its part of the buffer" if told_by_part else ""
        all_of.add(case, "sum", beyond, named, text, assumed=told_by_part)


def _look_below(all_of: _Judge, case: RecordedCase) -> None:
    """A rank that adds in another dtype than the others, below what the bound shows."""
    spec = case.case
    stretches = all_of.orders.get(_key(spec))
    out = case.whole
    if stretches is None or out is None or spec.values != "random":
        return
    if replay(stretches, [(case.inputs, out)]).accumulates is not None:
        return
    narrow = _adds_narrow(all_of, case)
    if narrow is not None:
        ranks, dtype = narrow
        text = f"adds in {dtype}, unlike the others: every bit is explained so, and not otherwise"
        told = ranks if len(ranks) == 1 else ()
        all_of.add(case, "sum", len(out), told, text, elements=len(out))


def _adds_alike(all_of: _Judge, case: RecordedCase) -> str | None:
    """The dtype in which all ranks keep their sums, if it is narrower than the buffer's."""
    out, stretches = case.whole, all_of.orders.get(_key(case.case))
    if out is None or not stretches:
        return None
    dtype = replay(stretches, [(case.inputs, out)]).accumulates
    wider = format_named(case.case.dtype).unit_roundoff
    return dtype if dtype and format_named(dtype).unit_roundoff > wider else None


def _only(
    case: RecordedCase, wrong: dict[int, torch.Tensor], ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """The one of ``ranks`` that alone is wrong, or whose part of the buffer is."""
    if case.case.collective == "reduce_scatter":
        told = tuple(wrong) if len(wrong) == 1 else ()
    else:
        part = part_of(wrong[min(wrong)], case.num_ranks)
        told = () if part is None else (part,)
    return tuple(rank for rank in told if rank in ranks)


def _adds_narrow(all_of: _Judge, case: RecordedCase) -> tuple[tuple[int, ...], str] | None:
    spec = case.case
    stretches = all_of.orders.get(_key(spec))
    out = case.whole
    if not stretches or out is None or format_named(spec.dtype).kind != "float":
        return None
    return narrow_ranks(stretches, case.inputs, out)


def _judge_copies(all_of: _Judge, case: RecordedCase) -> None:
    """Ranks that must hold the same bits; most of them are believed."""
    digests: dict[str | None, list[int]] = {}
    for rank in case.results:
        digests.setdefault(case.digests(rank)[0], []).append(rank)
    if len(digests) < 2:
        return
    groups = sorted(digests.values(), key=len, reverse=True)
    most, others = groups[0], [rank for group in groups[1:] for rank in group]
    told = len(groups[1]) < len(most)
    if not told and case.case.adds:
        stretches = all_of.orders.get(_key(case.case), [])
        replayed = [
            group
            for group in groups
            if replay(stretches, [(case.inputs, case.results[group[0]])]).accumulates
        ]
        if len(replayed) == 1:
            most, told = replayed[0], True
            others = [rank for group in groups if group is not most for rank in group]
    differ = bits_differ(case.results[most[0]], case.results[others[0]])
    against = ", ".join(map(str, most[:6]))
    text = f"holds other bits than rank{'s' * (len(most) > 1)} {against}"
    named = tuple(sorted(others)) if told else ()
    all_of.add(case, "same_bits", differ, named, text if told else "ranks hold different bits")


def _judge_repeats(all_of: _Judge, case: RecordedCase) -> bool:
    """Did every repetition give the same bits on every rank?"""
    differing: dict[int, torch.Tensor] = {}
    for rank, out in case.results.items():
        first, *again = case.digests(rank)
        for number, digest in enumerate(again, 2):
            if digest != first:
                other = case.repetition(rank, number)
                if other is not None and other.shape == out.shape:
                    differ = bits_differ(out, other)
                    differing[rank] = differing.get(rank, torch.zeros_like(differ)) | differ
    if not differing:
        return True
    ranks = tuple(sorted(differing))
    wrong = differing[ranks[0]]
    named, told_by_part = by_part(case, ranks, wrong)
    text = "adds in another order each time" if case.case.adds else "gives other bits each time"
    text += ": only its part of the buffer changes" if told_by_part else ""
    all_of.add(case, "repeatable", wrong, named, text, assumed=told_by_part)
    return False


def _judge_identity(all_of: _Judge, pair: Identity) -> None:
    """Where the orders promise equal bits, and nothing else is wrong with either collective."""
    names, case = ("all_reduce", "reduce_scatter", "rs_ag"), pair.composed.case
    known = any(
        fault.collective in names and (fault.dtype, fault.size) == (case.dtype, case.size)
        for fault in all_of.faults
    )
    if pair.row.promised and pair.row.num_different and not known:
        text = "other bits than all_reduce makes, though both add every element in one order"
        all_of.add(pair.composed, "identity", pair.differ, (), text)


def _key(case: CollectiveCase) -> Key:
    return (case.collective, case.dtype, case.size)


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

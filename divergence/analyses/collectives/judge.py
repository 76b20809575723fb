"""One run of collectives, judged by itself.

Every result is held to the definition, with what the ranks put in as the run recorded it; nothing
of the run's own machine is trusted. Where nothing is rounded the bits must be right. A rounded sum
may be off by what rounding in any order may make, an upper bound and no estimate, so that a fault
that is claimed is one. What hides below the bound is seen by replaying the order bit by bit.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch

from divergence.analyses.collectives.definitions import (
    Sum,
    bits_differ,
    exact_sum,
    expected_of,
    instead,
    part_of,
)
from divergence.analyses.collectives.recorded import Recorded, RecordedCase
from divergence.analyses.collectives.replaying import narrow_rank, replay
from divergence.collectives.bandwidth import bus_factor
from divergence.collectives.cases import COLLECTIVES, Case
from divergence.collectives.orders import Stretch, decode, name_order, stretches_text
from divergence.comparison.results.collectives import (
    BandwidthRow,
    CollectiveCheck,
    CollectiveFault,
    CollectiveRow,
    CollectivesSide,
    IdentityRow,
    OrderRow,
)
from divergence.numerics.formats import format_named
from divergence.run.reader import Run
from divergence.words import Progress, Side, silent

__all__ = ["judge"]

_REPLICATED = ("all_reduce", "rs_ag", "all_gather", "broadcast")
_ROUNDING_RMS = 0.4247
"""rms of a rounding in units of u x, where the significand of x is distributed as 1/m: the error is
uniform over ± u, and E[1/m²] = 3 / (8 ln 2), so √(3 / (8 ln 2) / 3)."""
Key = tuple[str, str, str]


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
        ranks: tuple[int, ...], text: str, *, elements: int = 0,
    ) -> None:  # fmt: skip
        count = wrong if isinstance(wrong, int) else int(wrong.sum())
        size = elements if isinstance(wrong, int) else len(wrong)
        one = case.case
        self.faults.append(
            CollectiveFault(
                check=check, collective=one.collective, dtype=one.dtype, size=one.size,
                values=one.values, site=case.site, elements=size, num_wrong=count, ranks=ranks,
                text=text,
            )
        )  # fmt: skip


def judge(run: Run, side: Side, progress: Progress | None = None) -> CollectivesSide:
    """Everything that can be said of one run. Raises RunFormatError for a damaged one."""
    recorded = Recorded(run)
    n = recorded.num_ranks
    all_of = _Judge(recorded)
    measured = list(recorded.orders())
    for one in measured:
        key = (one.case.collective, one.case.dtype, one.case.size)
        all_of.orders[key] = decode(one.sizes, n)
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
    order_rows = [_order_row(all_of, one.case, one.elements) for one in measured]
    identities = _identities(all_of)
    return CollectivesSide(
        side=side, num_ranks=n, backend=run.manifest.model.model_class, rows=rows,
        faults=_sorted(all_of.faults), orders=order_rows, identities=identities,
        bandwidth=_bandwidth(recorded), num_missing=all_of.num_missing,
        unsupported=_unsupported(run),
    )  # fmt: skip


def _unsupported(run: Run) -> list[str]:
    """``float8_e4m3fn in all_reduce, broadcast: Invalid scalar type``; other reasons as they are."""
    told: dict[tuple[str, str], list[str]] = {}
    others = []
    for reason in run.manifest.plan.skipped_operators:
        what, found, why = reason.partition(" is not supported: ")
        name, of, dtype = what.partition(" of ")
        if found and of:
            told.setdefault((dtype, why), []).append(name)
        else:
            others.append(reason)
    return [f"{dtype} in {', '.join(names)}: {why}" for (dtype, why), names in told.items()] + others


def _judge_case(all_of: _Judge, case: RecordedCase) -> None:
    name = case.case.collective
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
        right = expected[rank]
        if out.shape != right.shape:
            all_of.add(case, "definition", len(out), (rank,),
                       f"has {len(out):,} elements in place of {len(right):,}", elements=len(out))  # fmt: skip
            wrong[rank] = torch.ones(1, dtype=torch.bool)
            continue
        differ = bits_differ(out, right)
        if differ.any():
            wrong[rank] = differ
    groups = _alike(wrong)
    for ranks, differ in groups:
        rank = ranks[0]
        right = expected[rank]
        if len(differ) == len(right):
            text = instead(case.results[rank], differ, case, rank, right)
            everywhere = len(ranks) == case.num_ranks > 1
            named = _sender(case, differ) if everywhere else ranks
            all_of.add(case, "definition", differ, named, text)
    return set(wrong)


def _alike(wrong: dict[int, torch.Tensor]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Ranks that are wrong at the same elements, together."""
    groups: list[tuple[list[int], torch.Tensor]] = []
    for rank, differ in wrong.items():
        for ranks, known in groups:
            if torch.equal(known, differ):
                ranks.append(rank)
                break
        else:
            groups.append(([rank], differ))
    return [(tuple(ranks), differ) for ranks, differ in groups]


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
    n, one = case.num_ranks, case.case
    whole = exact_sum(case.inputs)
    exact = one.values in ("integers", "rank_coded")
    parts = one.collective == "reduce_scatter"
    wrong: dict[int, torch.Tensor] = {}
    rights: dict[int, Sum] = {}
    for rank, out in case.results.items():
        right = rights[rank] = whole.part(rank, n) if parts else whole
        if out.shape != right.high.shape:
            all_of.add(case, "sum", len(out), (rank,),
                       f"has {len(out):,} elements in place of {len(right.high):,}",
                       elements=len(out))  # fmt: skip
            wrong[rank] = torch.ones(1, dtype=torch.bool)
            continue
        error = right.error(out).abs()
        beyond = error > (torch.zeros_like(error) if exact else right.bound)
        if one.values == "subnormal" and beyond.any() and bool((out[beyond] == 0).all()):
            tally.num_flushed += 1
            continue
        if beyond.any():
            wrong[rank] = beyond
        if not exact:
            usage = float((error / right.bound.clamp_min(5e-324)).max())
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
    found = _adds_narrow(all_of, case)
    if found is not None:
        rank, dtype = found
        first = min(wrong)
        clause = f"adds in {dtype}: with its additions rounded so, every bit is explained"
        all_of.add(case, "sum", wrong[first], (rank,), clause)
        return
    for ranks, beyond in _alike(wrong):
        rank = ranks[0]
        text = instead(case.results[rank], beyond, case, rank, rights[rank])
        named = ranks
        if len(ranks) == case.num_ranks and case.case.collective != "reduce_scatter":
            part = part_of(beyond, case.num_ranks)
            named = () if part is None else (part,)
            text += "" if part is None else ", in the part of the buffer that it reduces"
        all_of.add(case, "sum", beyond, named, text)


def _look_below(all_of: _Judge, case: RecordedCase) -> None:
    """A rank that adds in another dtype than the others, below what the bound shows."""
    one = case.case
    stretches = all_of.orders.get((one.collective, one.dtype, one.size))
    out = _whole_result(case)
    if stretches is None or out is None or one.values != "random":
        return
    if replay(stretches, [(case.inputs, out)]).accumulates is not None:
        return
    found = _adds_narrow(all_of, case)
    if found is not None:
        rank, dtype = found
        text = f"adds in {dtype}, unlike the others: every bit is explained so, and not otherwise"
        all_of.add(case, "sum", len(out), (rank,), text, elements=len(out))


def _adds_narrow(all_of: _Judge, case: RecordedCase) -> tuple[int, str] | None:
    one = case.case
    stretches = all_of.orders.get((one.collective, one.dtype, one.size))
    out = _whole_result(case)
    if not stretches or out is None or format_named(one.dtype).kind != "float":
        return None
    return narrow_rank(stretches, case.inputs, out)


def _whole_result(case: RecordedCase) -> torch.Tensor | None:
    """Σ as the first rank has it, or the ranks' parts behind one another; None where ranks differ
    or one is missing."""
    results = case.results
    if len(results) < len(case.ranks):
        return None
    if case.case.collective == "reduce_scatter":
        return torch.cat([results[rank] for rank in case.ranks])
    first = results[0]
    return first if all(torch.equal(first, one) for one in results.values()) else None


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
    differ = bits_differ(case.results[most[0]], case.results[others[0]])
    against = ", ".join(map(str, most[:6]))
    text = f"holds other bits than rank{'s' * (len(most) > 1)} {against}, within rounding"
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
    named = ranks
    text = "adds in another order each time" if case.case.adds else "gives other bits each time"
    if len(ranks) == case.num_ranks and case.case.collective != "reduce_scatter":
        part = part_of(wrong, case.num_ranks)
        named = () if part is None else (part,)
        text += "" if part is None else ": only the part of the buffer that it reduces changes"
    all_of.add(case, "repeatable", wrong, named, text)
    return False


def _order_row(all_of: _Judge, case: Case, elements: int) -> OrderRow:
    n, key = all_of.recorded.num_ranks, (case.collective, case.dtype, case.size)
    stretches = all_of.orders[key]
    trials, measured = [], None
    for values in ("random", "cancelling", "outlier"):
        found = all_of.recorded.find(Case(case.collective, case.dtype, case.size, values))
        out = None if found is None else _whole_result(found)
        if found is None or out is None:
            continue
        trials.append((found.inputs, out))
        if values == "random":
            error = exact_sum(found.inputs).error(out)
            terms = torch.stack(found.inputs).double()
            measured = float(error.square().mean().sqrt() / terms.square().mean().sqrt())
    replayed = replay(stretches, trials)
    named = name_order(stretches, n)
    return OrderRow(
        collective=case.collective, dtype=case.dtype, size=case.size, elements=elements,
        order=named, first=stretches_text(stretches, n), num_chunks=len(stretches),
        accumulates=replayed.accumulates, num_replayed=replayed.num,
        expected=_expected(stretches, case.dtype, replayed.accumulates, n), measured=measured,
    )  # fmt: skip


def _expected(
    stretches: list[Stretch], dtype: str, accumulates: str | None, num_ranks: int
) -> float | None:
    """rms error of a sum of n terms of variance 1 (trees: E[error²] = c² u² Σ size(node)); a wider
    accumulator leaves the last rounding, of a sum of variance n."""
    known = [one for one in stretches if one.tree is not None]
    if not known or accumulates is None:
        return None
    form, inner = format_named(dtype), format_named(accumulates)
    if inner.unit_roundoff < form.unit_roundoff:
        return _ROUNDING_RMS * form.unit_roundoff * num_ranks**0.5
    total = sum((one.stop - one.start) * one.tree.partials for one in known if one.tree)
    mean = total / sum(one.stop - one.start for one in known)
    return float(_ROUNDING_RMS * inner.unit_roundoff * mean**0.5)


def _identities(all_of: _Judge) -> list[IdentityRow]:
    """AR = RS + AG, case by case."""
    rows = []
    for composed in all_of.recorded.cases():
        if composed.case.collective != "rs_ag":
            continue
        dtype, size, values = composed.case.dtype, composed.case.size, composed.case.values
        whole = all_of.recorded.find(Case("all_reduce", dtype, size, values))
        if whole is None:
            continue
        one, two = _whole_result(whole), _whole_result(composed)
        if one is None or two is None:
            continue
        orders = [all_of.orders.get((name, dtype, size)) for name in ("all_reduce", "reduce_scatter")]
        alike = _added_alike(orders[0], orders[1], len(one))
        promised = alike is not None
        differ = bits_differ(one, two)
        if alike is not None:  # at the edge between two chunks it is not known
            differ &= alike
        bound = exact_sum(whole.inputs).bound
        usage = ((one.double() - two.double()).abs() / (2 * bound).clamp_min(5e-324)).max()
        rows.append(
            IdentityRow(
                dtype=dtype, size=size, values=values, promised=promised,
                num_different=int(differ.sum()), elements=len(differ), limit_usage=float(usage),
            )
        )  # fmt: skip
        known = any(
            (f.dtype, f.size) == (dtype, size) and f.collective in ("all_reduce", "reduce_scatter", "rs_ag")
            for f in all_of.faults
        )
        if promised and differ.any() and not known:
            text = "reduce-scatter and all-gather give other bits than all-reduce, though both add "
            all_of.add(composed, "identity", differ, (), f"{text}in one order")
    return rows


def _added_alike(
    one: list[Stretch] | None, two: list[Stretch] | None, size: int
) -> torch.Tensor | None:
    """(size,) of bool: the elements that are known to be added in the same order; None where some
    are known to be added in another."""
    if not one or not two:
        return None
    number: dict[object, int] = {}
    known = []
    for stretches in (one, two):
        trees = torch.full((size,), -1)
        for part in stretches:
            if part.tree is None:
                return None
            trees[part.start : part.stop] = number.setdefault(part.tree, len(number))
        known.append(trees)
    both = (known[0] >= 0) & (known[1] >= 0)
    same = known[0] == known[1]
    return both if bool(same[both].all()) and 2 * int(both.sum()) > size else None


def _bandwidth(recorded: Recorded) -> list[BandwidthRow]:
    rows = []
    for one in recorded.timed():
        seconds = statistics.median(one.seconds)
        algbw = one.num_bytes / max(seconds, 1e-12)
        rows.append(
            BandwidthRow(
                collective=one.collective, bytes=one.num_bytes, seconds=seconds, algbw=algbw,
                busbw=algbw * bus_factor(one.collective, recorded.num_ranks),
                link_rate=one.link_rate,
            )
        )  # fmt: skip
    return rows


_CHECKS: tuple[CollectiveCheck, ...] = ("definition", "sum", "repeatable", "same_bits", "identity")
_VALUES = ("random", "rank_coded", "integers", "cancelling", "outlier", "subnormal")
_SIZES = ("odd", "even", "large", "tiny")


def _sorted(faults: list[CollectiveFault]) -> list[CollectiveFault]:
    """The gravest first, of each collective the plainest case; those that name a rank before
    others."""
    names = list(COLLECTIVES)

    def key(one: CollectiveFault) -> tuple[int, ...]:
        dtypes = ("float32", "bfloat16", "float16", "float64")
        dtype = dtypes.index(one.dtype) if one.dtype in dtypes else len(dtypes)
        name = next((n for n, known in enumerate(names) if known == one.collective), len(names))
        return (_CHECKS.index(one.check), not one.ranks, name, dtype, _SIZES.index(one.size),
                next((n for n, known in enumerate(_VALUES) if known == one.values), 9))  # fmt: skip

    return sorted(faults, key=key)



"""What ranks hold where they are wrong, as facts that are true of each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from divergence.analyses.collectives.definitions import Sum, bits_differ
from divergence.analyses.collectives.recorded import RecordedCase
from divergence.facts import Fact, fact
from divergence.numerics.formats import format_of

__all__ = ["Right", "instead"]

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

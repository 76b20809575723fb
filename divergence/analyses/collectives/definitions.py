"""What each rank should hold, and what it holds instead where that is not so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from divergence.analyses.collectives.recorded import RecordedCase
from divergence.collectives.cases import ROOT_RANK
from divergence.numerics.formats import format_of

__all__ = [
    "Sum", "alike", "bits_differ", "by_part", "exact_sum", "expected_of", "instead", "part_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ over ranks, in two float64 of which the second is what the first lacks. ``bound``: how far
    a sum of n terms may be from it in any order, where every addition is rounded to the dtype:
    γ Σ|x_r|, γ = (n - 1) u / (1 - (n - 1) u) (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., (4.4)), and what the float64 arithmetic here may be off by."""

    high: torch.Tensor
    low: torch.Tensor
    bound: torch.Tensor

    def error(self, x: torch.Tensor) -> torch.Tensor:
        """x - Σ; nan and inf count as infinitely far."""
        error = (x.double() - self.high) - self.low
        return torch.where(error.isfinite(), error, torch.inf)

    def part(self, rank: int, num_ranks: int) -> Sum:
        """The part of the buffer that reduce-scatter gives to ``rank``."""
        return Sum(*(tensor.chunk(num_ranks)[rank] for tensor in (self.high, self.low, self.bound)))


def exact_sum(inputs: list[torch.Tensor]) -> Sum:
    """Compensated (Neumaier's summation): the error is below 2^-100 Σ|x_r|."""
    high = torch.zeros(inputs[0].shape, dtype=torch.float64)
    low, size = torch.zeros_like(high), torch.zeros_like(high)
    for term in inputs:
        x = term.double()
        total = high + x
        low += torch.where(high.abs() >= x.abs(), (high - total) + x, (x - total) + high)
        high, size = total, size + x.abs()
    form = format_of(inputs[0].dtype)
    steps = (len(inputs) - 1) * form.unit_roundoff
    bound = steps / (1 - steps) * size if form.kind == "float" else torch.zeros_like(size)
    return Sum(high, low, bound * (1 + 2.0**-40))


def expected_of(case: RecordedCase) -> dict[int, torch.Tensor]:
    """Of each rank, the bits it should hold; of collectives that add nothing."""
    inputs, n = case.inputs, case.num_ranks
    name = case.case.collective
    if name == "broadcast":
        return dict.fromkeys(range(n), inputs[ROOT_RANK])
    if name == "all_gather":
        return dict.fromkeys(range(n), torch.cat(inputs))
    if name == "all_to_all":
        return {rank: torch.cat([sent.chunk(n)[rank] for sent in inputs]) for rank in range(n)}
    return {rank: inputs[(rank - 1) % n] for rank in range(n)}


def bits_differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Element by element; -0 is not 0, and a nan is itself."""
    if x.dtype.is_floating_point:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        x, y = x.contiguous().view(whole), y.contiguous().view(whole)
    return x != y


def instead(
    out: torch.Tensor, wrong: torch.Tensor, case: RecordedCase, rank: int, exact: Sum | torch.Tensor
) -> str:
    """What a rank holds where it is wrong, as a clause."""
    size, count = len(out), int(wrong.sum())
    places = wrong.nonzero().flatten()
    first, last = int(places[0]), int(places[-1])
    swapped = _swapped(out, exact, case.num_ranks)
    if swapped:
        return swapped
    if last == size - 1 and count == size - first and first > 0:
        where = f"the last {count:,} of {size:,} elements"
    elif count == size:
        where = f"all {size:,} elements"
    else:
        where = f"{count:,} of {size:,} elements, from {first:,} to {last:,},"
    return f"{where} {_held(out, wrong, case, rank, exact)}"


def _held(
    out: torch.Tensor, wrong: torch.Tensor, case: RecordedCase, rank: int, exact: Sum | torch.Tensor
) -> str:
    held = out[wrong]
    if not held.double().isfinite().all() and out.dtype.is_floating_point:
        return "are nan or inf"
    if bool((held == 0).all()):
        return "are 0"
    own = case.inputs[rank] if rank < len(case.inputs) else None
    if own is not None and own.shape == out.shape and not bits_differ(out, own)[wrong].any():
        return "are what the rank itself put in"
    if not isinstance(exact, Sum):
        return "are not what was sent"
    error = exact.error(out)[wrong]
    for other, x in enumerate(case.inputs):
        theirs = x.chunk(case.num_ranks)[rank] if x.shape != out.shape else x
        term = theirs.double()[wrong]
        limit = 4 * exact.bound[wrong] + 0.01 * term.abs()
        if (term != 0).any() and bool(((error + term).abs() <= limit).all()):
            return f"lack what rank {other} put in"
        if (term != 0).any() and bool(((error - term).abs() <= limit).all()):
            return f"hold twice what rank {other} put in"
    worst = (error.abs() / exact.bound[wrong].clamp_min(1e-300)).max()
    if bool((exact.bound[wrong] == 0).any()) or float(worst) > 1e12:
        return "are not the exact sum"
    return f"are up to {float(worst):,.0f} times as far from the sum as rounding explains"


def _swapped(out: torch.Tensor, exact: Sum | torch.Tensor, num_ranks: int) -> str | None:
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
    told = [f"chunk {i} holds what belongs in chunk {others[0]}" for i, others in matches.items()]
    return ", ".join(told[:4])


def part_of(wrong: torch.Tensor, num_ranks: int) -> int | None:
    """The rank to whose part of the buffer, as reduce-scatter deals it, all wrong elements belong;
    None where they lie in several, or are few of it."""
    each = -(-len(wrong) // num_ranks)
    places = wrong.nonzero().flatten()
    if len(places) == 0 or each < 8:
        return None
    first, last = int(places[0]) // each, int(places[-1]) // each
    return first if first == last and len(places) > 2 else None


def by_part(
    case: RecordedCase, ranks: tuple[int, ...], wrong: torch.Tensor
) -> tuple[tuple[int, ...], bool]:
    """Who made it, and whether that is told by the part of the buffer alone: where all ranks are
    wrong alike, the one whose part it is; nobody where that is not told either."""
    if len(ranks) < case.num_ranks or case.case.collective == "reduce_scatter":
        return ranks, False
    part = part_of(wrong, case.num_ranks)
    return ((), False) if part is None else ((part,), True)


def alike(wrong: dict[int, torch.Tensor]) -> list[tuple[tuple[int, ...], torch.Tensor]]:
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

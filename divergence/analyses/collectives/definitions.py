"""What each rank should hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from divergence.analyses.collectives.recorded import RecordedCase
from divergence.collectives.cases import ROOT_RANK
from divergence.numerics.formats import format_of

__all__ = ["Sum", "bits_differ", "exact_sum", "expected_of"]


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

"""Which elements of which ranks are not what the definition says, of one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from divergence.analyses.collectives.definitions import Sum, bits_differ, exact_sum, expected_of
from divergence.analyses.collectives.instead import Right
from divergence.analyses.collectives.recorded import RecordedCase

__all__ = ["WrongCall", "wrong_of"]


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

"""Sums that are kept in another dtype than the buffer's: by all ranks, or by one.

Told only where every recorded case of that dtype and size whose sums round is explained so: a
single one may come out by chance, as where few digits are in use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from divergence.analyses.collectives.adding import narrow_ranks, replay, trials_of
from divergence.analyses.collectives.makers import part_of
from divergence.analyses.collectives.recorded import Recorded, RecordedCase
from divergence.collectives.orders import Stretch
from divergence.numerics.formats import format_named

__all__ = ["adds_alike", "adds_narrow", "only_one"]


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

"""Faults to plant in a collective, to see that they are found and the rank is named.

``COLLECTIVE=FAULT@RANK``: ``all_reduce=bfloat16@1``. The rank's part alone is changed:

``bfloat16``    it adds in bfloat16 (``float16``: in float16), in a ring
``unordered``   it adds what it got in another order each time, as one that takes what comes first
``swap``        it takes the first two chunks of its result for one another
``tail:17``     the last 17 elements of its result never arrive
``bit``         the lowest bit of the element in the middle of its result is another
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from divergence.collectives.cases import COLLECTIVES, Collective
from divergence.collectives.group import Call
from divergence.collectives.own import all_reduce_by, reduce_scatter_by
from divergence.errors import PlantError

__all__ = ["BY", "FAULTS", "PlantedCollectiveFault", "parse_fault", "planted"]

FAULTS = {
    "bfloat16": "bfloat16@1     rank 1 adds in bfloat16; float16@1 in float16",
    "float16": "float16@1      rank 1 adds in float16",
    "unordered": "unordered@1    rank 1 adds in another order each time",
    "swap": "swap@1         rank 1 takes its first two chunks for one another",
    "tail": "tail:17@1      the last 17 elements of rank 1's result never arrive",
    "bit": "bit@1          the lowest bit of one element of rank 1's result is another",
}
BY = {"bfloat16": "ring", "float16": "ring", "unordered": "flat"}
"""Faults in an addition: the algorithm of collectives.own that has them."""


@dataclass(frozen=True, slots=True)
class PlantedCollectiveFault:
    """One planted fault. ``count``: elements, of ``tail``."""

    collective: Collective
    name: str
    rank: int
    count: int = 0


def parse_fault(text: str) -> PlantedCollectiveFault:
    """``"all_reduce=bfloat16@1"``. Raises PlantError with the list of faults."""
    where, equals, rest = text.partition("=")
    what, at, rank = rest.partition("@")
    name, _, count = what.partition(":")
    hint = ("COLLECTIVE=FAULT@RANK, where FAULT is one of", *FAULTS.values())
    if not equals or not at or not rank.isdecimal():
        raise PlantError(f"{text!r} is not COLLECTIVE=FAULT@RANK", hint=hint)
    if where not in COLLECTIVES:
        raise PlantError(
            f"no collective is called {where!r}", where=f"--plant {text}",
            hint=f"one of {', '.join(COLLECTIVES)}",
        )  # fmt: skip
    summing = where in ("all_reduce", "reduce_scatter")
    if name not in FAULTS or (count and not count.isdecimal()) or (name == "tail") != bool(count):
        raise PlantError(f"unknown fault {what!r}", where=f"--plant {text}", hint=hint)
    if name in BY and not summing:
        raise PlantError(
            f"{name} is planted in all_reduce or reduce_scatter", where=f"--plant {text}", hint=hint
        )
    return PlantedCollectiveFault(
        COLLECTIVES[COLLECTIVES.index(where)], name, int(rank), int(count or 0)
    )


def planted(
    faults: Iterable[PlantedCollectiveFault], collective: Collective, call: Call, *, rank: int
) -> Call:
    """``call`` with the faults of its collective. ``rank``: this one. All ranks call this alike,
    since a fault in an addition needs all to run the algorithm it is planted in."""
    for fault in faults:
        if fault.collective == collective:
            call = _with(fault, call, mine=fault.rank == rank)
    return call


def _with(fault: PlantedCollectiveFault, call: Call, *, mine: bool) -> Call:
    by = all_reduce_by if fault.collective == "all_reduce" else reduce_scatter_by
    if fault.name == "unordered":
        return by(BY[fault.name], order=_shuffled if mine else range)
    if fault.name in BY:
        narrow = getattr(torch, fault.name)

        def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x.to(narrow) + y.to(narrow)).to(x.dtype)

        return by(BY[fault.name], add=add) if mine else by(BY[fault.name])
    if not mine:
        return call

    def changed(x: torch.Tensor) -> torch.Tensor:
        out = call(x)
        if fault.name == "tail":
            out[max(0, len(out) - fault.count) :] = 0
            return out
        if fault.name == "bit":
            out.view(torch.uint8)[len(out) // 2 * out.element_size()] ^= 1  # little-endian
            return out
        chunks = list(out.tensor_split(torch.distributed.get_world_size()))
        size = min(len(chunks[0]), len(chunks[1]))
        first = chunks[0][:size].clone()
        chunks[0][:size] = chunks[1][:size]
        chunks[1][:size] = first
        return out

    return changed


def _shuffled(size: int) -> list[int]:
    return random.SystemRandom().sample(range(size), size)

"""Which implementation of each collective is run: ``--impl``; and with which faults: ``--plant``.

``gloo``, ``nccl``, ``hccl``, ``ccl``, ``xccl``, ``mpi``   the backend of the process group
``ring``, ``flat``, ``halving``, ``tree``                  this package's own all_reduce and
                                                           reduce_scatter (collectives.own)
``all_reduce=MODULE:FUNCTION``                             a function of one rank's tensor

A fault is planted to see that it is found and the rank is named: ``all_reduce=bfloat16@1``. The
rank's part alone is changed:

``bfloat16``    it adds in bfloat16 (``float16``: in float16), in a ring
``unordered``   it adds what it got in another order each time, as one that takes what comes first
``swap``        it takes the first two chunks of its result for one another
``tail:17``     the last 17 elements of its result never arrive
``bit``         the lowest bit of the element in the middle of its result is another
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from divergence.collectives.cases import COLLECTIVES, Collective
from divergence.collectives.group import BACKENDS, Call, all_gather, native
from divergence.collectives.own import ALGORITHMS, all_reduce_by, reduce_scatter_by
from divergence.errors import PlantError, UsageError
from divergence.facts import fact, sentence
from divergence.ops.implementations import Wishes, function_named, label_of, pairs_of

__all__ = [
    "BY",
    "FAULTS",
    "ChosenCollectives",
    "PlantedFault",
    "choose",
    "parse_fault",
    "planted",
]

_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(slots=True)
class ChosenCollectives:
    """``backend``: of the process group, if one was named. ``names``: what is not the group's own,
    by collective."""

    backend: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Call] = field(default_factory=dict)
    faults: Sequence[PlantedFault] = ()
    rank: int = 0

    def call(self, collective: Collective) -> Call:
        """What is run. rs_ag is made of what reduce_scatter is."""
        if collective == "rs_ag":
            scattered = self.call("reduce_scatter")
            call: Call = lambda x: all_gather(scattered(x))  # noqa: E731 - a composition
        else:
            call = self.functions.get(collective) or native(collective)
        return planted(self.faults, collective, call, rank=self.rank)

    def name_of(self, collective: Collective, backend: str) -> str:
        """As it is recorded. A fault in an addition is planted in this package's own."""
        for fault in self.faults:
            if fault.collective == collective and fault.name in BY:
                return BY[fault.name]
        return self.names.get("reduce_scatter" if collective == "rs_ag" else collective, backend)


def choose(wishes: Wishes, faults: Sequence[PlantedFault] = ()) -> ChosenCollectives:
    """What ``--impl`` says. Raises UsageError, which names what there is."""
    chosen = ChosenCollectives(faults=faults)
    for where, value in pairs_of(wishes):
        if where and where not in COLLECTIVES:
            raise UsageError(
                f"no collective is called {where!r}", hint=f"one of {', '.join(COLLECTIVES)}"
            )
        if not where and value in BACKENDS:
            chosen.backend = value
        elif isinstance(value, str) and value in ALGORITHMS and (not where or where in _SUMS):
            makers = {"all_reduce": all_reduce_by, "reduce_scatter": reduce_scatter_by}
            for name in [where] if where else _SUMS:
                chosen.names[name], chosen.functions[name] = value, makers[name](value)
        elif where and callable(value):
            name = chosen.names[where] = label_of(value)
            chosen.functions[where] = _checked(name, value)
        elif where and ":" in str(value):
            chosen.names[where] = value
            chosen.functions[where] = _checked(value, function_named(value, where))
        else:
            known = ", ".join((*BACKENDS, *ALGORITHMS))
            raise UsageError(
                f"no implementation is called {value!r}" + (f" of {where}" if where else ""),
                hint=f"{known} (the last {len(ALGORITHMS)} of all_reduce and reduce_scatter), or "
                "all_reduce=MODULE:FUNCTION",
            )
    return chosen


def _checked(name: str, function: Callable[..., Any]) -> Call:
    """A function of the user's. What it gives must be one row of the same dtype, or nothing can be
    said of its numbers."""

    def call(x: torch.Tensor) -> torch.Tensor:
        out = function(x)
        if not isinstance(out, torch.Tensor) or out.ndim != 1 or out.dtype != x.dtype:
            kind = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else repr(out)
            raise UsageError(
                f"--impl {name} gave {kind[:80]} of a row of {x.numel()} {x.dtype}",
                hint="one rank's tensor goes in, its result comes out: a row of the same dtype",
            )
        return out

    return call


FAULTS = ("bfloat16", "float16", "unordered", "swap", "tail", "bit")
BY = {"bfloat16": "ring", "float16": "ring", "unordered": "flat"}
"""Faults in an addition: the algorithm of collectives.own that has them."""


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """One planted fault. ``count``: elements, of ``tail``."""

    collective: Collective
    name: str
    rank: int
    count: int = 0


def parse_fault(text: str) -> PlantedFault:
    """``"all_reduce=bfloat16@1"``. Raises PlantError with the list of faults."""
    where, equals, rest = text.partition("=")
    what, at, rank = rest.partition("@")
    name, _, count = what.partition(":")
    forms = ("fault_form", *(f"fault_{fault}" for fault in FAULTS))
    hint = tuple(sentence(fact(f"collectives.{form}")) for form in forms)
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
    return PlantedFault(COLLECTIVES[COLLECTIVES.index(where)], name, int(rank), int(count or 0))


def planted(
    faults: Iterable[PlantedFault], collective: Collective, call: Call, *, rank: int
) -> Call:
    """``call`` with the faults of its collective. ``rank``: this one. All ranks call this alike,
    since a fault in an addition needs all to run the algorithm it is planted in."""
    for fault in faults:
        if fault.collective == collective:
            call = _with(fault, call, mine=fault.rank == rank)
    return call


def _with(fault: PlantedFault, call: Call, *, mine: bool) -> Call:
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

"""Which implementation of each collective is run: ``--impl`` and ``--plant``.

``gloo``, ``nccl``, ``hccl``, ``ccl``, ``xccl``, ``mpi``   the backend of the process group
``ring``, ``flat``, ``halving``, ``tree``                  this package's own all_reduce and
                                                           reduce_scatter (collectives.own)
``all_reduce=MODULE:FUNCTION``                             a function of one rank's tensor
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divergence.collectives.cases import COLLECTIVES, Collective
from divergence.collectives.faults import BY, PlantedCollectiveFault, planted
from divergence.collectives.group import BACKENDS, Call, all_gather, native
from divergence.collectives.own import ALGORITHMS, all_reduce_by, reduce_scatter_by
from divergence.errors import UsageError

__all__ = ["ChosenCollectives", "choose"]

_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(slots=True)
class ChosenCollectives:
    """``backend``: of the process group, if one was named. ``names``: what is not the group's own,
    by collective."""

    backend: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Call] = field(default_factory=dict)
    faults: Sequence[PlantedCollectiveFault] = ()
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


def choose(
    wishes: Sequence[str] | Mapping[str, Any], faults: Sequence[PlantedCollectiveFault] = ()
) -> ChosenCollectives:
    """What ``--impl`` says. Raises UsageError, which names what there is."""
    chosen = ChosenCollectives(faults=faults)
    pairs: list[tuple[str, Any]] = (
        list(wishes.items())
        if isinstance(wishes, Mapping)
        else [(name, value) for name, _, value in
              (wish.rpartition("=") for wish in ([wishes] if isinstance(wishes, str) else wishes))]
    )  # fmt: skip
    for where, value in pairs:
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
            chosen.names[where] = getattr(value, "__qualname__", type(value).__name__)
            chosen.functions[where] = value
        elif where and ":" in str(value):
            chosen.names[where], chosen.functions[where] = value, _imported(value)
        else:
            known = ", ".join((*BACKENDS, *ALGORITHMS))
            raise UsageError(
                f"no implementation is called {value!r}" + (f" of {where}" if where else ""),
                hint=f"{known} (the last {len(ALGORITHMS)} of all_reduce and reduce_scatter), or "
                "all_reduce=MODULE:FUNCTION",
            )
    return chosen


def _imported(text: str) -> Callable[..., Any]:
    """``my_kernels:all_reduce``; modules of the working directory count."""
    name, _, function = text.partition(":")
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        implementation = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--impl {text}: {error}", hint="MODULE:FUNCTION") from error
    finally:
        sys.path[:] = before
    if not callable(implementation):
        raise UsageError(f"--impl {text} is no function")
    return implementation  # type: ignore[no-any-return]

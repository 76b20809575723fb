"""This runs as a collective: the library's, the user's, one of this tool's own, or a faulty one."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from divergence.domains.collectives.cases import COLLECTIVES, ROOT_RANK, Collective
from divergence.errors import PlantError, UsageError
from divergence.facts import fact, sentence
from divergence.recording.cases import Implementations, function_named, label_of, pairs_of
from divergence.recording.processes import Ranks
from divergence.run.manifest import Mesh, MeshAxis

# Collectives of the process group that is there, each as a function of one rank's tensor.
#
# The group is torch's: gloo on the CPU, nccl, xccl, hccl on accelerators, or the backend that
# ``--impl`` names (``gloo``, ``nccl``, ``hccl``, ``ccl``, ``xccl``, ``mpi``). Nothing here
# computes.

AXIS = "group"
"""The one axis of the mesh."""

BACKENDS = ("gloo", "nccl", "hccl", "ccl", "xccl", "mpi")
_PACKAGES = {"hccl": ("torch_npu",), "ccl": ("oneccl_bindings_for_pytorch",)}
"""What registers a backend that torch itself has not."""

Call = Callable[[torch.Tensor], torch.Tensor]
"""One rank's input → its result, a tensor of its own."""


def join(num_ranks: int, device: str, backend: str | None) -> Ranks:
    """Join the other processes. Raises UsageError for a backend that is not here."""
    mesh = Mesh(axes=[MeshAxis(name=AXIS, size=num_ranks)])
    for package in _PACKAGES.get(backend or "", ()):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UsageError(f"--impl {backend} needs {package}, which is not here") from error
    if backend is not None and not dist.is_backend_available(backend):
        backends = ", ".join(name for name in BACKENDS if dist.is_backend_available(name))
        raise UsageError(f"this torch has no backend {backend}", hint=f"it has {backends}")
    return Ranks(mesh, device, backend=backend)


def backend_name(device: str) -> str:
    """``gloo``: what runs collectives on tensors of ``device``."""
    config = str(dist.get_backend_config())
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    return backends.get(device.partition(":")[0], dist.get_backend())


def native(collective: Collective) -> Call:
    """The group's own. Raises what torch raises for a dtype that the backend lacks."""

    def on_copy(call: Callable[..., Any], *more: int) -> Call:
        def in_place(x: torch.Tensor) -> torch.Tensor:
            out = x.clone()
            call(out, *more)
            return out

        return in_place

    calls: dict[Collective, Call] = {
        "all_reduce": on_copy(dist.all_reduce),
        "reduce": on_copy(dist.reduce, ROOT_RANK),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "broadcast": _broadcast,
        "all_to_all": _all_to_all,
        "send_recv": lambda x: shift(x, 1),
    }
    return calls[collective]


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    out = x.clone() if dist.get_rank() == ROOT_RANK else torch.zeros_like(x)
    dist.broadcast(out, ROOT_RANK)
    return out


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """(N,) → this rank's (N / n,)."""
    out = torch.zeros(x.numel() // dist.get_world_size(), dtype=x.dtype, device=x.device)
    _newer("reduce_scatter_single", "reduce_scatter_tensor")(out, x)
    return out


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """(c,) → (n · c,)."""
    out = torch.zeros(x.numel() * dist.get_world_size(), dtype=x.dtype, device=x.device)
    _newer("all_gather_single", "all_gather_into_tensor")(out, x)
    return out


def _all_to_all(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    return out


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return what rank r - ``by`` has, of x's shape; x goes to rank r + ``by``."""
    return exchange([(x, by)], [(torch.zeros_like(x), -by)])[0]


def exchange(
    sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]
) -> list[torch.Tensor]:
    """Send tensors to the ranks so far away, and fill others from those so far away."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works = [dist.P2POp(dist.irecv, chunk, (rank + by) % size) for chunk, by in received]
    works += [dist.P2POp(dist.isend, chunk.contiguous(), (rank + by) % size) for chunk, by in sent]
    if works:
        for work in dist.batch_isend_irecv(works):
            work.wait()
    return [chunk for chunk, _ in received]


def _newer(new: str, old: str) -> Any:
    """torch 2.13 renamed two of its functions."""
    return getattr(dist, new, None) or getattr(dist, old)


# All-reduce and reduce-scatter written over send and receive, in the orders that libraries use.
#
# They show what the order that was found from outside means, and faults are planted in them
# (``faults``): in a library's own collective a rank cannot be told to add otherwise. n ranks, c
# elements to each chunk; ``add`` is what a rank does with two partial sums.
#
# ``ring``      chunk k starts at rank k - 1 and goes down: ((x[k-1] + x[k-2]) + …) + x[k], as gloo
#               does (gloo/allreduce.cc)
# ``flat``      rank k gets every rank's chunk k and adds them in order of ranks
# ``halving``   recursive halving: with the rank n/2 away first, then n/4, …; n a power of two
#               (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations
#               in MPICH", 2005)
# ``tree``      binomial tree: rank 2k adds rank 2k + 1, then 4k adds 4k + 2, …; rank 0 has the sum

Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Order = Callable[[int], Sequence[int]]
"""Number of ranks → the order in which a rank adds what it got."""


def _ring(chunks: list[torch.Tensor], add: Add, order: Order) -> torch.Tensor:
    rank, size = dist.get_rank(), len(chunks)
    for step in range(size - 1):
        got = shift(chunks[(rank + 1 + step) % size], -1)
        place = (rank + 2 + step) % size
        chunks[place] = add(chunks[place], got)
    return chunks[rank]


def _flat(chunks: list[torch.Tensor], add: Add, order: Order) -> torch.Tensor:
    rank, size = dist.get_rank(), len(chunks)
    steps = range(1, size)
    sent = [(chunks[(rank + by) % size], by) for by in steps]
    got = exchange(sent, [(torch.zeros_like(chunks[rank]), by) for by in steps])
    terms = {(rank + by) % size: term for by, term in zip(steps, got, strict=True)}
    terms[rank] = chunks[rank]
    first, *rest = order(size)
    total = terms[first]
    for peer in rest:
        total = add(total, terms[peer])
    return total


def _halving(chunks: list[torch.Tensor], add: Add, order: Order) -> torch.Tensor:
    rank, size = dist.get_rank(), len(chunks)
    piece, distance = list(range(size)), size // 2
    while distance:
        other = rank ^ distance
        kept = [k for k in piece if (k & distance) == (rank & distance)]
        gone = [k for k in piece if k not in kept]
        got = exchange(
            [(torch.cat([chunks[k] for k in gone]), other - rank)],
            [(torch.zeros_like(torch.cat([chunks[k] for k in kept])), other - rank)],
        )[0]
        for k, part in zip(kept, got.chunk(len(kept)), strict=True):
            chunks[k] = add(chunks[k], part)
        piece, distance = kept, distance // 2
    return chunks[rank]


def _tree(chunks: list[torch.Tensor], add: Add, order: Order) -> torch.Tensor:
    rank, size = dist.get_rank(), len(chunks)
    whole, distance = torch.cat(chunks), 1
    while distance < size:
        if rank % (2 * distance) == distance:
            exchange([(whole, -distance)], [])
            break
        if rank % (2 * distance) == 0 and rank + distance < size:
            got = exchange([], [(torch.zeros_like(whole), distance)])[0]
            whole = add(whole, got)
        distance *= 2
    dist.broadcast(whole, 0)
    return whole.chunk(size)[rank]


ALGORITHMS: dict[str, Callable[[list[torch.Tensor], Add, Order], torch.Tensor]] = {
    "ring": _ring,
    "flat": _flat,
    "halving": _halving,
    "tree": _tree,
}


def reduce_scatter_by(name: str, *, add: Add = torch.add, order: Order = range) -> Call:
    """The reduce-scatter of that algorithm. Raises UsageError where it needs another number of
    ranks."""
    algorithm = ALGORITHMS[name]

    def call(x: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size()
        if name == "halving" and size & (size - 1):
            raise UsageError(f"recursive halving needs 2, 4, 8 … ranks, and there are {size}")
        x[:1] + x[:1]  # refused by all ranks alike, where torch adds no such dtype
        return algorithm([part.clone() for part in x.chunk(size)], add, order).clone()

    return call


def all_reduce_by(name: str, *, add: Add = torch.add, order: Order = range) -> Call:
    """The all-reduce: its reduce-scatter, then an all-gather. Where N does not divide by n, the
    last chunk is filled up with zeros."""
    scattered = reduce_scatter_by(name, add=add, order=order)

    def call(x: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size()
        each = -(-x.numel() // size)
        filled = torch.zeros(each * size, dtype=x.dtype, device=x.device)
        filled[: x.numel()] = x
        return all_gather(scattered(filled))[: x.numel()].clone()

    return call


# Which implementation of each collective is run: ``--impl``; and with which faults: ``--plant``.
#
# ``gloo``, ``nccl``, ``hccl``, ``ccl``, ``xccl``, ``mpi``   the backend of the process group
# ``ring``, ``flat``, ``halving``, ``tree``                  this package's own all_reduce and
#                                                            reduce_scatter (``reduce_scatter_by``)
# ``all_reduce=MODULE:FUNCTION``                             a function of one rank's tensor
#
# A fault is planted to see that it is found and the rank is named: ``all_reduce=bfloat16@1``. The
# rank's part alone is changed:
#
# ``bfloat16``    it adds in bfloat16 (``float16``: in float16), in a ring
# ``unordered``   it adds what it got in another order each time, as one that takes what comes first
# ``swap``        it takes the first two chunks of its result for one another
# ``tail:17``     the last 17 elements of its result never arrive
# ``bit``         the lowest bit of the element in the middle of its result is another

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
        """Return the function that is run, with the faults of its collective. rs_ag is made of what
        reduce_scatter is. All ranks call this alike, since a fault in an addition needs all to run
        the algorithm it is planted in."""
        if collective == "rs_ag":
            scattered = self.call("reduce_scatter")
            call: Call = lambda x: all_gather(scattered(x))  # noqa: E731 - a composition
        else:
            call = self.functions.get(collective) or native(collective)
        for fault in self.faults:
            if fault.collective == collective:
                call = _with(fault, call, own=fault.rank == self.rank)
        return call

    def name_of(self, collective: Collective, backend: str) -> str:
        """Return the recorded name. A fault in an addition is planted in this package's own."""
        for fault in self.faults:
            if fault.collective == collective and fault.name in BY:
                return BY[fault.name]
        return self.names.get("reduce_scatter" if collective == "rs_ag" else collective, backend)


def choose(wishes: Implementations, faults: Sequence[PlantedFault] = ()) -> ChosenCollectives:
    """Return what ``--impl`` says. Raises UsageError, which names what there is."""
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
            names = ", ".join((*BACKENDS, *ALGORITHMS))
            raise UsageError(
                f"no implementation is called {value!r}" + (f" of {where}" if where else ""),
                hint=f"{names} (the last {len(ALGORITHMS)} of all_reduce and reduce_scatter), or "
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
"""Faults in an addition: the algorithm of ours that has them."""


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
            f"no collective is called {where!r}",
            where=f"--plant {text}",
            hint=f"one of {', '.join(COLLECTIVES)}",
        )
    if name not in FAULTS or (count and not count.isdecimal()) or (name == "tail") != bool(count):
        raise PlantError(f"unknown fault {what!r}", where=f"--plant {text}", hint=hint)
    if name in BY and where not in _SUMS:
        raise PlantError(
            f"{name} is planted in all_reduce or reduce_scatter", where=f"--plant {text}", hint=hint
        )
    return PlantedFault(COLLECTIVES[COLLECTIVES.index(where)], name, int(rank), int(count or 0))


def _with(fault: PlantedFault, call: Call, *, own: bool) -> Call:
    by = all_reduce_by if fault.collective == "all_reduce" else reduce_scatter_by
    if fault.name == "unordered":
        return by(BY[fault.name], order=_shuffled if own else range)
    if fault.name in BY:
        narrow = getattr(torch, fault.name)

        def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x.to(narrow) + y.to(narrow)).to(x.dtype)

        return by(BY[fault.name], add=add) if own else by(BY[fault.name])
    if not own:
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

"""All-reduce and reduce-scatter written over send and receive, in the orders that libraries use.

They show what the order that was found from outside means, and faults are planted in them
(``faults``): in a library's own collective a rank cannot be told to add otherwise. n ranks, c
elements to each chunk; ``add`` is what a rank does with two partial sums.

``ring``      chunk k starts at rank k - 1 and goes down: ((x[k-1] + x[k-2]) + …) + x[k], as gloo
              does (gloo/allreduce.cc)
``flat``      rank k gets every rank's chunk k and adds them in order of ranks
``halving``   recursive halving: with the rank n/2 away first, then n/4, …; n a power of two
              (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
              MPICH", 2005)
``tree``      binomial tree: rank 2k adds rank 2k + 1, then 4k adds 4k + 2, …; rank 0 has the sum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from divergence.collectives.group import Call, all_gather, exchange, shift
from divergence.errors import UsageError

__all__ = ["ALGORITHMS", "Add", "all_reduce_by", "reduce_scatter_by"]

Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Order = Callable[[int], Sequence[int]]
"""Number of ranks → the order in which a rank adds what it got."""


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


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
    mine, distance = list(range(size)), size // 2
    while distance:
        other = rank ^ distance
        kept = [k for k in mine if (k & distance) == (rank & distance)]
        gone = [k for k in mine if k not in kept]
        got = exchange(
            [(torch.cat([chunks[k] for k in gone]), other - rank)],
            [(torch.zeros_like(torch.cat([chunks[k] for k in kept])), other - rank)],
        )[0]
        for k, part in zip(kept, got.chunk(len(kept)), strict=True):
            chunks[k] = add(chunks[k], part)
        mine, distance = kept, distance // 2
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
    "ring": _ring, "flat": _flat, "halving": _halving, "tree": _tree,
}  # fmt: skip


def reduce_scatter_by(name: str, *, add: Add = plain, order: Order = range) -> Call:
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


def all_reduce_by(name: str, *, add: Add = plain, order: Order = range) -> Call:
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

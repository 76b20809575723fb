"""Blocks shared out between threads.

numpy's loops release the interpreter lock, so threads scale; torch's own threads are
left alone (a parallel region per 31k elements costs more than the work).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, Self, TypeVar

__all__ = ["run_split"]


class Divisible(Protocol):
    """What is shared out: a list, range or array; a part of it is one too, items in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


Items = TypeVar("Items", bound=Divisible)
Result = TypeVar("Result")


def run_split(work: Callable[[Items], Result], items: Items, *, threads: int) -> list[Result]:
    """``work`` on ``threads`` contiguous parts of ``items``; results in the items' order."""
    threads = max(1, min(threads, len(items)))
    edges = [len(items) * number // threads for number in range(threads + 1)]
    parts = [items[edges[number] : edges[number + 1]] for number in range(threads)]
    if threads == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))

"""How fast a collective is: algbw and busbw, as nccl-tests defines them.

algbw = S / t, where S is the size of the whole buffer in bytes and t the time of one call. busbw is
what of it goes over each link, so that it can be held against a link's rate whatever the number of
ranks n (NVIDIA/nccl-tests, doc/PERFORMANCE.md):

    all_reduce                                    busbw = algbw · 2 (n - 1) / n
    reduce_scatter, all_gather, all_to_all        busbw = algbw · (n - 1) / n
    broadcast, reduce, send_recv                  busbw = algbw

S is the size of what a rank puts in, or of what it gets where that is more (all_gather).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from divergence.collectives.cases import COLLECTIVES, Collective
from divergence.collectives.group import Call
from divergence.recording.processes import Ranks

__all__ = [
    "TIMED", "bus_factor", "seconds_of_one", "timed_bytes", "timed_elements",
]  # fmt: skip

TIMED: tuple[Collective, ...] = tuple(name for name in COLLECTIVES if name != "rs_ag")
_CPU_BYTES = (4 << 10, 256 << 10, 4 << 20)
_DEVICE_BYTES = (4 << 10, 1 << 20, 256 << 20)
_MOST_CALLS, _LEAST_CALLS, _SECONDS = 20, 3, 0.3


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw."""
    share = (num_ranks - 1) / num_ranks
    if collective in ("all_reduce", "rs_ag"):
        return 2 * share
    return share if collective in ("reduce_scatter", "all_gather", "all_to_all") else 1.0


def timed_bytes(device: str) -> Sequence[int]:
    """S, from small to large."""
    return _CPU_BYTES if device.partition(":")[0] == "cpu" else _DEVICE_BYTES


def timed_elements(collective: Collective, num_bytes: int, num_ranks: int) -> int:
    """float32 elements of a rank's input, so that S is about ``num_bytes``."""
    each = max(1, num_bytes // 4 // num_ranks)
    return each if collective == "all_gather" else each * num_ranks


def seconds_of_one(call: Call, x: torch.Tensor, ranks: Ranks) -> list[float]:
    """Seconds of single calls, of the slowest rank each; the first, which sets up connections, is
    left out. All ranks make equally many."""
    call(x)
    first = max(ranks.gather(_timed(call, x)))
    count = int(min(_MOST_CALLS, max(_LEAST_CALLS, _SECONDS / max(first, 1e-6))))
    mine = []
    for _ in range(count):
        ranks.gather(None)  # start together
        mine.append(_timed(call, x))
    return [max(times) for times in zip(*ranks.gather(mine), strict=True)]


def _timed(call: Call, x: torch.Tensor) -> float:
    _wait(x)
    begun = time.perf_counter()
    call(x)
    _wait(x)
    return time.perf_counter() - begun


def _wait(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        getattr(torch, x.device.type).synchronize(x.device)

"""Bytes that the collectives of one training step move, and how long a link takes for them.

Of n ranks each sends, and receives, (n-1)/n of a tensor in a reduce-scatter or an all-gather, and
twice that in an all-reduce, which is one after the other (ring: Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009; in NCCL's words the bus
bandwidth's factor). For G bytes of gradients and P of parameters on a rank:

========  ==========================================================================
ZeRO 0    all-reduce of G
ZeRO 1-2  reduce-scatter of G, all-gather of P
ZeRO 3    all-gather of P in the forward, again in the backward of what was let go in
          between, reduce-scatter of G (arXiv 1910.02054, section 7: 1.5 times ZeRO 0)
tp        all-reduce of each row-divided matrix's output in the forward, and of each
          column-divided matrix's input gradient in the backward: 2 and 2 a block
          (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3)
========  ==========================================================================

Times are bytes over the rate, as if nothing else used the link and nothing overlapped; latency is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from divergence.facts import fact
from divergence.training.plan.result import Collective
from divergence.training.plan.states import RankParameter

__all__ = ["gradient_traffic", "tensor_traffic"]

_FACTOR = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}


def gradient_traffic(
    pieces: Sequence[RankParameter], rest: Sequence[RankParameter], *, zero: int,
    axes: dict[str, int], rate: float | None,
) -> list[Collective]:  # fmt: skip
    """Of the axes dp and fsdp. ``rest``: those of ``pieces`` that stay whole between forward and
    backward (ZeRO 3)."""
    trained = [piece for piece in pieces if piece.trained]
    dp, fsdp = axes.get("dp", 1), axes.get("fsdp", 1)
    if zero == 0:
        name = "dp × fsdp" if min(dp, fsdp) > 1 else "fsdp" if fsdp > 1 else "dp"
        return _some("all-reduce", "gradients", name, dp * fsdp, _bytes(trained, 1), rate)
    name, count = ("fsdp", fsdp) if fsdp > 1 else ("dp", dp)
    rows = count if zero == 3 else 1
    gradients = _bytes(trained, rows)
    calls = []
    if zero == 3:
        own = {piece.name for piece in rest}
        again = [piece for piece in pieces if piece.name not in own]
        calls += _some("all-gather", "parameters_forward", name, count, _bytes(pieces, rows), rate)
        calls += _some("all-gather", "parameters_backward", name, count, _bytes(again, rows), rate)
    calls += _some("reduce-scatter", "gradients", name, count, gradients, rate)
    if zero < 3:
        calls += _some("all-gather", "parameters_updated", name, count, _bytes(trained, 1), rate)
    if name == "fsdp":
        calls += _some("all-reduce", "gradients", "dp", dp, -(-gradients // count), rate)
    return calls


def tensor_traffic(
    forward_bytes: int, backward_bytes: int, gathered_bytes: int, *, num_ranks: int,
    rate: float | None,
) -> list[Collective]:  # fmt: skip
    """Of the axis tp: sums of outputs, sums of input gradients, outputs put together."""
    return [
        *_some("all-reduce", "activations_forward", "tp", num_ranks, forward_bytes, rate),
        *_some("all-reduce", "activations_backward", "tp", num_ranks, backward_bytes, rate),
        *_some("all-gather", "activations_forward", "tp", num_ranks, gathered_bytes, rate),
    ]


def _some(
    operation: Literal["all-reduce", "reduce-scatter", "all-gather"], sent: str, axis: str,
    num_ranks: int, tensor_bytes: int, rate: float | None,
) -> list[Collective]:  # fmt: skip
    """``sent``: the code of what is sent, and when."""
    if num_ranks < 2 or tensor_bytes == 0:
        return []
    moved = _FACTOR[operation] * tensor_bytes * (num_ranks - 1) // num_ranks
    return [
        Collective(
            operation=operation, sent=fact(f"training.{sent}"), axis=axis, num_ranks=num_ranks,
            tensor_bytes=tensor_bytes, bytes_per_rank=moved,
            seconds=None if rate is None else moved / rate,
        )
    ]  # fmt: skip


def _bytes(pieces: Sequence[RankParameter], rows: int) -> int:
    """Rows are padded, so that all ranks have equally many."""
    return sum(piece.rows_numel(rows) * rows * piece.itemsize for piece in pieces)

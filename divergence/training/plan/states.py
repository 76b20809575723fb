"""Bytes of parameters, gradients and optimizer state on one rank, from shapes and dtypes.

Per parameter, in bytes (Ψ parameters on a rank; ZeRO divides over N ranks):

=====================  =======  =========  ============  =======  =====================
training               weights  gradients  main weights  moments  in all
=====================  =======  =========  ============  =======  =====================
16 bits, main weights  2        2          4             8        16  (ZeRO's "mixed precision")
float32 (autocast too) 4        4          -             8        16
16 bits alone          2        2          -             4         8
=====================  =======  =========  ============  =======  =====================

for Adam; SGD without momentum has no moments. With main weights ZeRO's stages are 16Ψ;
4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", arXiv 1910.02054, section 5).

Stages 1 and 2 divide all elements evenly, as DeepSpeed and Megatron do. Stage 3 divides each
parameter along its first dimension, as torch's ``fully_shard`` does: the first ranks hold
ceil(rows/N) of its rows. ``whole_parameters_bytes`` is what torch's ``ZeroRedundancyOptimizer``
does at stage 1. Moments lie in the dtype of what they update. Not counted: a step counter of 4
bytes for each tensor, and what an allocator adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from divergence.errors import UsageError
from divergence.training.plan.result import Kept

__all__ = ["MOMENTS", "RankParameter", "kept_parts", "pieces_of", "whole_parameters_bytes"]

MOMENTS = {"adamw": 2, "sgd": 0}
"""Tensors of a parameter's shape that each optimizer keeps."""


class RankParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter on a rank, tensor parallelism done and ZeRO not yet."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    trained: bool = True
    """Has it a gradient?"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    def rows_numel(self, num_ranks: int) -> int:
        """Elements on the first rank where ``num_ranks`` divide the first dimension."""
        if num_ranks == 1 or not self.shape:
            return self.numel
        return -(-self.shape[0] // num_ranks) * math.prod(self.shape[1:])


def pieces_of(module: object) -> list[RankParameter]:
    """The parameters of a torch module, each once, whatever device they lie on."""
    named = module.named_parameters()  # type: ignore[attr-defined]
    return [
        RankParameter(
            name=name, shape=tuple(parameter.shape), itemsize=parameter.element_size(),
            trained=parameter.requires_grad,
        )
        for name, parameter in named
    ]  # fmt: skip


def kept_parts(
    pieces: Sequence[RankParameter],
    *,
    optimizer: str,
    main_weights: bool,
    zero: int,
    num_ranks: int,
) -> list[Kept]:
    """What stays in memory from step to step, on the rank that holds most. ``num_ranks``: N.

    Raises UsageError for an optimizer or a stage that is not known.
    """
    if optimizer not in MOMENTS:
        raise UsageError(
            f"--optimizer-step {optimizer}: its state is not known", hint=f"{' or '.join(MOMENTS)}"
        )
    if zero not in range(4):
        raise UsageError(f"--zero {zero} is no stage of ZeRO", hint="0, 1, 2 or 3")
    trained = [piece for piece in pieces if piece.trained]
    sizes = {piece.itemsize for piece in trained}

    def part(
        name: str, of: Sequence[RankParameter], factor: int, size: int | None, stage: int
    ) -> Kept:
        """``factor`` tensors of each shape; ``size``: bytes of an element, None for its own."""
        divided = zero >= stage and num_ranks > 1
        if not divided:
            total = sum(factor * p.numel * (size or p.itemsize) for p in of)
        elif zero == 3:
            total = sum(factor * p.rows_numel(num_ranks) * (size or p.itemsize) for p in of)
        else:  # one flat tensor in equal parts
            total = sum(factor * -(-p.numel // num_ranks) * (size or p.itemsize) for p in of)
        own = {p.itemsize for p in of}
        each = str(factor * (size or own.pop())) if size or len(own) == 1 else "(2..4)"
        return Kept(name=name, formula=f"{each}Ψ{'/N' if divided else ''}", bytes=total)  # type: ignore[arg-type]

    parts = [part("parameters", pieces, 1, None, 3), part("gradients", trained, 1, None, 2)]
    with_main = main_weights and any(size < 4 for size in sizes)
    if with_main:
        parts.append(part("main weights", trained, 1, 4, 1))
    if MOMENTS[optimizer]:
        parts.append(part("moments", trained, MOMENTS[optimizer], 4 if with_main else None, 1))
    return parts


def whole_parameters_bytes(
    pieces: Sequence[RankParameter], *, optimizer: str, num_ranks: int
) -> int:
    """Moments on the fullest rank where each parameter's lie whole on one: greedily, the largest
    first, each to the rank that has least (``torch.distributed.optim.ZeroRedundancyOptimizer``)."""
    ranks, held = [0] * num_ranks, [0] * num_ranks
    for piece in sorted((p for p in pieces if p.trained), key=lambda p: p.numel, reverse=True):
        rank = ranks.index(min(ranks))
        ranks[rank] += piece.numel
        held[rank] += MOMENTS[optimizer] * piece.bytes
    return max(held)

"""Orders of addition replayed on what the ranks put in: in which dtype, and by whom?

An order that was found from outside is proven, and the dtype of the partial sums with it, where
replaying it gives every recorded bit. Where it does not, one rank may add in another dtype than the
rest: its additions alone are rounded otherwise, and the replay that gives every bit names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from divergence.arithmetic.additions.trees import Tree
from divergence.collectives.orders import Stretch, chain_of
from divergence.numerics.formats import format_of

__all__ = ["Replay", "narrow_ranks", "replay"]

WIDER = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64"),
         "float32": ("float64", "bfloat16", "float16"), "float64": ("float32",)}  # fmt: skip
"""Dtypes in which partial sums may be kept beside the buffer's own; the likelier first."""
_NARROWER = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Replay:
    """``accumulates``: the dtype in which every bit is reproduced, or None. ``num``: elements that
    were replayed."""

    accumulates: str | None
    num: int


def replay(
    stretches: Sequence[Stretch], trials: Sequence[tuple[list[torch.Tensor], torch.Tensor]]
) -> Replay:
    """``trials``: what the ranks put in, and the whole result. No stretch without a tree."""
    known = [stretch for stretch in stretches if stretch.tree is not None]
    num = sum(stretch.stop - stretch.start for stretch in known) * len(trials)
    if not known or not trials or len(known) < len(stretches):
        return Replay(None, 0)
    own = str(trials[0][1].dtype).removeprefix("torch.")
    for name in (own, *WIDER.get(own, ())):
        kind = getattr(torch, name)
        if all(
            torch.equal(
                _sum(stretch.tree, [x[stretch.start : stretch.stop] for x in inputs], kind),
                out[stretch.start : stretch.stop],
            )
            for inputs, out in trials
            for stretch in known
            if stretch.tree is not None
        ):
            return Replay(name, num)
    return Replay(None, num)


def _sum(
    tree: Tree | None, leaves: list[torch.Tensor], kind: torch.dtype,
    narrow: tuple[frozenset[int], torch.dtype] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum of one stretch, each node rounded to ``kind``, those of ``narrow`` to its dtype. A
    fused node is added in float64."""
    assert tree is not None
    values = [leaf.to(kind) for leaf in leaves]
    for number, node in enumerate(tree.nodes):
        wide = len(node) > 2
        parts = [values[child] for child in node]
        if narrow is not None and number in narrow[0]:
            parts = [part.to(narrow[1]) for part in parts]
        if wide:
            parts = [part.double() for part in parts]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        values.append(total.to(kind))
    return values[-1].to(leaves[0].dtype)


def narrow_ranks(
    stretches: Sequence[Stretch], inputs: list[torch.Tensor], out: torch.Tensor
) -> tuple[tuple[int, ...], str] | None:
    """(ranks, dtype): each rank whose additions alone, if made in that dtype, give every bit; None
    where there is none, or where several dtypes do.

    Who makes an addition is known where a partial sum walks from rank to rank: the rank whose term
    is added. Of the first two terms of a chain either may, so two ranks are not told apart.
    """
    stretches = _divided(stretches, len(inputs), len(out))
    known = [(stretch, chain_of(stretch.tree)) for stretch in stretches if stretch.tree is not None]
    if not known or any(chain is None for _, chain in known) or len(known) < len(stretches):
        return None
    own = out.dtype
    roundoff = format_of(own).unit_roundoff
    matches = []
    for name, rank in product(_NARROWER, range(len(inputs))):
        kind = getattr(torch, name)
        if format_of(kind).unit_roundoff <= roundoff:
            continue
        if all(_fits(stretch, chain or [], rank, kind, inputs, out) for stretch, chain in known):
            matches.append((rank, name))
    dtypes = {name for _, name in matches}
    return (tuple(rank for rank, _ in matches), dtypes.pop()) if len(dtypes) == 1 else None


def _divided(stretches: Sequence[Stretch], num_ranks: int, size: int) -> list[Stretch]:
    """Cut at the edges of the ranks' parts too: of two ranks every part has the same order."""
    each = -(-size // num_ranks)
    return [
        Stretch(max(stretch.start, edge), min(stretch.stop, edge + each), stretch.tree)
        for stretch in stretches
        for edge in range(0, size, each)
        if max(stretch.start, edge) < min(stretch.stop, edge + each)
    ]


def _fits(
    part: Stretch, chain: list[int], rank: int, kind: torch.dtype, inputs: list[torch.Tensor],
    out: torch.Tensor,
) -> bool:  # fmt: skip
    place = chain.index(rank)
    ways = [frozenset({place - 1})] if place > 1 else [frozenset({0}), frozenset[int]()]
    leaves = [x[part.start : part.stop] for x in inputs]
    held = out[part.start : part.stop]
    return any(torch.equal(_sum(part.tree, leaves, out.dtype, (way, kind)), held) for way in ways)

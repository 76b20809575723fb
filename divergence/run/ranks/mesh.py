"""Where the ranks of a run stand, and what each of them holds of a tensor.

Rank r stands at the row-major place r of the mesh's axes: of ``dp 2 × tp 4`` rank 5 has the
coordinates dp 1, tp 1. A record's ``placement`` has one word for each axis, in the sense of
torch.distributed.tensor (``Shard``, ``Replicate``, ``Partial``), and ``single`` where only one
place of the axis holds the tensor at all: a prompt that one data-parallel rank ran, a block of one
pipeline stage. Two axes that divide the same dimension divide it one within the other, the first
axis outermost, as DTensor does.
"""

from __future__ import annotations

import math

from divergence.run.schema.manifest import Mesh

__all__ = ["describe_mesh", "num_ranks", "places_of"]


def num_ranks(mesh: Mesh | None) -> int:
    """How many processes made the run; 1 without a mesh."""
    return 1 if mesh is None else math.prod(axis.size for axis in mesh.axes)


def places_of(rank: int, mesh: Mesh) -> tuple[int, ...]:
    """The rank's index on each axis, in the mesh's order."""
    places = []
    for axis in reversed(mesh.axes):
        rank, place = divmod(rank, axis.size)
        places.append(place)
    return tuple(reversed(places))


def describe_mesh(mesh: Mesh | None) -> str:
    """``"4 ranks (dp 2 × tp 2)"``, or ``"1 process"``."""
    return "1 process" if mesh is None else str(mesh)

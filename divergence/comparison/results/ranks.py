"""What comparing the ranks of a run with one another found."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import Side

__all__ = ["RankShare", "ReplicaCheck", "ReplicaDiff", "ToldBy"]

ToldBy = Literal["majority", "other run", "nobody"]
"""What tells which of the ranks are wrong."""


class ReplicaDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that should hold the same tensor and do not."""

    side: Side
    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    ranks: tuple[int, ...]
    """The ranks that differ from ``peers``."""
    peers: tuple[int, ...]
    """The ranks they are held against: most of them. Where two versions are equally frequent and
    ``told_by`` is ``other run``: those with the version nearer to the other run."""
    told_by: ToldBy = "majority"
    """What tells which ranks are wrong; ``nobody`` where it cannot be told."""
    rel_l2: float | None = None
    """‖odd - peers'‖ / ‖peers'‖ of the version farthest off. None where it was not measured."""


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a divided tensor, compared with the same part of the other run's
    tensor."""

    side: Side
    site: str
    rank: int
    rel_l2: float
    """‖d‖/‖a‖ of this rank's part."""
    rest_rel_l2: float
    """The largest ``rel_l2`` among the other ranks' parts."""


class ReplicaCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one run, compared with one another."""

    side: Side
    mesh: str
    """The ranks in words, for example ``4 ranks (dp 2 × tp 2)``."""
    num_tensors: int
    """Tensors of which several ranks hold an equal copy."""
    num_different: int
    """How many of them differ between ranks."""
    first: list[ReplicaDiff] = []
    """The first difference of each pass that has any, in execution order, measured."""

"""What comparing the ranks of a run with one another found."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import Side

__all__ = ["RankShare", "ReplicaCheck", "ReplicaDiff", "ToldBy"]

ToldBy = Literal["majority", "other run", "nobody"]
"""What tells which of the ranks are wrong."""


class ReplicaDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that should hold the same tensor and do not.

    ``ranks`` differ from ``peers``: from most of them, or, where two versions are equally many and
    the other run tells, from the version that is nearer to it (``told_by`` is then ``other run``;
    ``nobody`` where it cannot be told which are wrong). ``rel_l2``: ‖odd - peers'‖ / ‖peers'‖ of
    the version farthest off; None where it was not measured.
    """

    side: Side
    pass_: str = msgspec.field(name="pass")
    sample: int
    step: int
    site: str
    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    told_by: ToldBy = "majority"
    rel_l2: float | None = None


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a divided tensor against the same part of the other run's."""

    side: Side
    site: str
    rank: int
    rel_l2: float
    rest_rel_l2: float


class ReplicaCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One run's ranks against one another. ``num_tensors``: held by several ranks alike;
    ``num_different``: of those, where ranks disagree; ``first``: measured, in order of execution,
    one for each pass in which there are any."""

    side: Side
    mesh: str
    num_tensors: int
    num_different: int
    first: list[ReplicaDiff] = []

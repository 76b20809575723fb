"""The results of collectives, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import ReportPart
from divergence.facts import Fact, Worded
from divergence.words import Side

CollectiveCheck = Literal["definition", "sum", "same_bits", "repeatable", "identity"]
"""``definition``: a rank holds other bits than it should, where nothing is rounded. ``sum``: a sum
is farther from the exact one than rounding in any order explains, or a rank adds in another dtype
than the others. ``same_bits``: ranks that must hold the same do not. ``repeatable``: the same call
gave other bits. ``identity``: reduce-scatter and all-gather do not make the all-reduce that their
orders of addition promise."""


class CollectiveFault(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One thing that is wrong with one case."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "what"}

    check: CollectiveCheck
    collective: str
    dtype: str
    size: str
    values: str
    site: str
    elements: int
    """Of the result."""
    num_wrong: int
    """Elements that are wrong."""
    ranks: tuple[int, ...]
    """Who made it; empty where it cannot be told."""
    what: list[Fact]
    """What is wrong."""
    text: str = ""
    assumed: bool = False
    """The rank is told by the part of the buffer that is wrong, as reduce-scatter deals parts."""
    wrong_ranks: tuple[int, ...] = ()
    """Ranks whose result is wrong, where these did not make it or that is not known."""


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one collective."""

    collective: str
    implementation: str
    num_cases: int
    num_right: int
    """Cases without any fault."""
    num_repeated: int
    """Cases whose repetitions had the same bits on every rank."""
    limit_usage: float | None = None
    """The largest error of a rounded sum in units of what rounding in any order may make at most:
    (n - 1) u Σ|x_r|. None where nothing is added."""
    num_flushed: int = 0
    """Cases in which subnormal sums became 0."""


class OrderRow(msgspec.Struct, frozen=True, kw_only=True):
    """Says in which order a collective adds the ranks, at one dtype and size."""

    collective: str
    dtype: str
    size: str
    elements: int
    order: str
    """``ring``, ``tree``, ``recursive halving``, ``flat``, ``one addition`` (of two ranks),
    ``fused``, ``mixed``, or ``not revealed``."""
    first: str
    """The first chunk's order, as the ranks in the order in which they are added."""
    num_chunks: int
    accumulates: str | None = None
    """The dtype of the partial sums, if replaying the order in it gives every recorded bit."""
    num_replayed: int = 0
    """Elements that were replayed bit by bit."""
    expected: float | None = None
    """The rms error that the order makes of random terms of variance 1."""
    measured: float | None = None
    """The rms error of the recorded random case, in units of its terms' rms."""


class IdentityRow(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduce held against reduce-scatter and then all-gather, on the same inputs."""

    dtype: str
    size: str
    values: str
    promised: bool
    """Both add every element in the same order, so the bits must be the same."""
    num_different: int
    """Elements that differ."""
    elements: int
    limit_usage: float
    """The largest difference in units of what rounding may make of two orders."""


class BandwidthRow(msgspec.Struct, frozen=True, kw_only=True):
    """Says how fast a collective was, by the median of its calls."""

    collective: str
    bytes: int
    """Size of the whole buffer."""
    seconds: float
    algbw: float
    """Bytes a second: bytes / seconds."""
    busbw: float
    """Bytes a second over each link: algbw times the collective's factor."""
    link_rate: float | None = None
    """Bytes a second that a link has by its maker's word, where it was stated."""


class CollectivesSide(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One run, judged by itself."""

    TEXTS: ClassVar[Mapping[str, str]] = {"unsupported": "lacking"}

    side: Side
    num_ranks: int
    backend: str
    rows: list[CollectiveRow]
    faults: list[CollectiveFault] = []
    orders: list[OrderRow] = []
    identities: list[IdentityRow] = []
    bandwidth: list[BandwidthRow] = []
    lacking: list[Fact] = []
    """What this group cannot do."""
    unsupported: list[str] = []
    num_missing: int = 0
    """Results that are not in the run."""


class CollectiveDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A case whose results differ between the two runs."""

    site: str
    ranks: tuple[int, ...]
    """Whose results differ."""
    rel_l2: float
    """‖b - a‖ / ‖a‖ of the farthest rank."""


class CollectivesResult(ReportPart, msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one run, or of two."""

    sides: list[CollectivesSide]
    num_common: int = 0
    """Cases that both runs hold, on the same inputs."""
    num_same: int = 0
    """Of these, the ones with the same bits on every rank."""
    differing: list[CollectiveDiff] = []

    @property
    def num_runs(self) -> int:
        return len(self.sides)

"""What was found of operators by themselves, and of collectives, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.facts import Fact, Worded
from divergence.words import Side, SideOrBoth

__all__ = [
    "BandwidthRow", "CollectiveCheck", "CollectiveDiff", "CollectiveFault", "CollectiveRow",
    "CollectivesResult", "CollectivesSide", "IdentityRow", "OrderRow", "SuiteCase", "SuiteOperator",
    "SuiteResult", "SuiteSide", "SuiteStatus",
]  # fmt: skip

SuiteStatus = Literal["identical", "healthy", "flushed", "ties", "differs", "wrong"]
"""``identical``: the same bits. ``healthy``: both sides as right as rounding allows. ``flushed``:
a side turns subnormals into 0 and is right otherwise. ``ties``: a side takes another of exactly
equal scores than the first. ``differs``: not the same bits, and no truth to judge by. ``wrong``:
a side is farther from the truth than rounding explains."""


class SuiteSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of one output x against the truth R (float64).

    Which fields are set depends on the kind of the output: values, codes or indices.
    """

    error: float | None = None
    """Values: ‖x-R‖/‖R‖."""
    ulp_p99: float | None = None
    """Values: 99th percentile of the distance, in ulp, from R rounded to the dtype, where |R| >=
    u·rms(R)."""
    ulp_max: float | None = None
    """Values: the largest such distance."""
    score: float | None = None
    """Values: rms over elements of (x-R) / σ, σ the standard deviation that rounding explains. 1 in
    a correct implementation."""
    gain: float | None = None
    """Values: the same for the scale of rows."""
    num_flushed: int = 0
    """Values: zeros where R is a subnormal or is computed from subnormals."""
    num_nonfinite: int = 0
    """Values: nan or inf where R is finite."""
    off_by_one: float | None = None
    """Codes: share that is one from the truth's code."""
    off_by_more: float | None = None
    """Codes: share that is more than one from the truth's code."""
    rows_tied: float | None = None
    """Indices: share of rows that differ among exactly equal scores only."""
    rows_near: float | None = None
    """Indices: share of rows that differ among scores that rounding may swap."""
    rows_wrong: float | None = None
    """Indices: share of rows that differ otherwise."""


class SuiteCase(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One output of one case: a = reference, b = candidate, R = truth."""

    TEXTS: ClassVar[Mapping[str, str]] = {"why": "reason"}

    site: str
    operator: str
    dtype: str
    kind: Literal["values", "codes", "indices"]
    status: SuiteStatus
    side: SideOrBoth | None = None
    reason: Fact | None = None
    """What the limit was exceeded by, or what is not the same."""
    why: str | None = None
    """The same in words."""
    same: bool
    """The bits of both sides are the same."""
    rel_l2: float
    """‖a-b‖/‖a‖; for codes and indices the share that differs."""
    ulp_p99: float | None = None
    """99th percentile of the distance between a and b, in ulp."""
    ulp_max: float | None = None
    """The largest distance between a and b, in ulp."""
    ideal_error: float | None = None
    """‖round(R)-R‖/‖R‖. None without a truth."""
    floor: float | None = None
    """The relative error that the roundings before the last one explain. None without a truth."""
    expected_off: float | None = None
    """Share of codes that rounding explains to be off by one. None without a truth."""
    w: float | None = None
    """err(b)/err(a); 0/0 is 1. None without a truth."""
    reference: SuiteSide | None = None
    candidate: SuiteSide | None = None


class SuiteOperator(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one operator."""

    operator: str
    reference_implementation: str
    candidate_implementation: str
    status: SuiteStatus
    side: SideOrBoth | None
    num_cases: int
    num_same: int
    """Cases with the same bits on both sides, right or wrong."""
    num_by_status: dict[str, int]
    worst: SuiteCase
    """The case that decides: first by status, then by how far the farther side is beyond its limit
    (without a truth: by ``rel_l2``)."""


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two suite runs, operator by operator."""

    judged: bool
    """The sides were judged against a truth."""
    score_limit: float
    """Largest ``score`` that passes."""
    gain_limit: float
    """Largest ``gain`` that passes."""
    operators: list[SuiteOperator]
    """The wrong ones first, then by how far apart the sides are."""
    cases: list[SuiteCase]


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
    """The same as a clause."""
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
    """In which order a collective adds the ranks, at one dtype and size."""

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
    """How fast a collective was, by the median of its calls."""

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
    """The same in words."""
    num_missing: int = 0
    """Results that are not in the run."""


class CollectiveDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A case whose results differ between the two runs."""

    site: str
    ranks: tuple[int, ...]
    """Whose results differ."""
    rel_l2: float
    """‖b - a‖ / ‖a‖ of the farthest rank."""


class CollectivesResult(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one run, or of two."""

    sides: list[CollectivesSide]
    num_common: int = 0
    """Cases that both runs hold, on the same inputs."""
    num_same: int = 0
    """Of these, the ones with the same bits on every rank."""
    differing: list[CollectiveDiff] = []

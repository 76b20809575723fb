"""The results of operators by themselves, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import ReportPart
from divergence.facts import Fact, Worded
from divergence.words import SideOrBoth

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


class SuiteResult(ReportPart, msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def by_truth(self) -> bool:
        return self.judged

"""What a comparison of two runs of an operator suite found, as typed data."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import SideOrBoth

__all__ = ["SuiteCase", "SuiteOperator", "SuiteResult", "SuiteSide", "SuiteStatus"]

SuiteStatus = Literal["identical", "healthy", "flushed", "ties", "differs", "wrong"]
"""``identical``: the same bits. ``healthy``: both sides as right as rounding allows. ``flushed``:
a side turns subnormals into 0 and is right otherwise. ``ties``: a side takes another of exactly
equal scores than the first. ``differs``: not the same bits, and no truth to judge by. ``wrong``:
a side is farther from the truth than rounding explains."""


class SuiteSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of one output against the truth R (float64).

    Of values: ``error`` ‖x-R‖/‖R‖; ``ulp_p99``, ``ulp_max``: distance from R rounded to the dtype,
    where |R| >= u·rms(R); ``score``: rms over elements of (x-R) over the standard deviation that
    rounding explains, 1 in a correct implementation; ``gain``: the same of the scale of rows.
    ``num_flushed``: zeros where R is a subnormal or comes of some. ``num_nonfinite``: nan or inf
    where R is finite. Of codes: shares of codes that are one, or more than one, from the truth's.
    Of indices: shares of rows that differ, among exact ties only, among scores that rounding may
    swap, and otherwise.
    """

    error: float | None = None
    ulp_p99: float | None = None
    ulp_max: float | None = None
    score: float | None = None
    gain: float | None = None
    num_flushed: int = 0
    num_nonfinite: int = 0
    off_by_one: float | None = None
    off_by_more: float | None = None
    rows_tied: float | None = None
    rows_near: float | None = None
    rows_wrong: float | None = None


class SuiteCase(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one case, a = reference, b = candidate.

    ``same``: the same bits. ``rel_l2`` ‖a-b‖/‖a‖, of codes and indices the share that differs;
    ``ulp_p99``, ``ulp_max`` between a and b. With a truth: ``ideal_error`` ‖round(R)-R‖/‖R‖;
    ``floor`` the relative error that rounding before the last one explains; ``w`` =
    err(b)/err(a), 1 for 0/0;
    ``expected_off``: the share of codes that rounding explains to be off by one.
    """

    site: str
    operator: str
    dtype: str
    kind: Literal["values", "codes", "indices"]
    status: SuiteStatus
    side: SideOrBoth | None = None
    why: str | None = None
    same: bool
    rel_l2: float
    ulp_p99: float | None = None
    ulp_max: float | None = None
    ideal_error: float | None = None
    floor: float | None = None
    expected_off: float | None = None
    w: float | None = None
    reference: SuiteSide | None = None
    candidate: SuiteSide | None = None


class SuiteOperator(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one operator. ``num_same``: with the same bits on both sides, right or not.
    ``worst``: the case that decides, first by status, then by how
    far beyond its limit the farther side is (without a truth: by ``rel_l2``)."""

    operator: str
    reference_implementation: str
    candidate_implementation: str
    status: SuiteStatus
    side: SideOrBoth | None
    num_cases: int
    num_same: int
    num_by_status: dict[str, int]
    worst: SuiteCase


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """``judged``: against a truth. Operators: the wrong ones first, then by how far apart."""

    judged: bool
    score_limit: float
    gain_limit: float
    operators: list[SuiteOperator]
    cases: list[SuiteCase]

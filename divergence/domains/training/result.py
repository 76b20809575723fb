"""The results of comparing two curves of losses. Types alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import JsonAnswer
from divergence.facts import Fact, Worded

Kind = Literal["identical", "aligned", "misaligned", "drift", "nonfinite", "undetermined"]


class Trend(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Does the difference of two curves leave its own noise, and where?"""

    TEXTS: ClassVar[Mapping[str, str]] = {"reason": "lacking"}

    state: Literal["within_noise", "parts", "not_told"]
    statistic: float | None
    """max |S| of the running sum, in standard errors; the smaller one of two lengths of blocks."""
    limit: float | None
    """What it must exceed."""
    parts_at: int | None
    """The step from which on the difference is best described as one: an estimate."""
    lacking: Fact | None = None
    """Why it was not told."""
    reason: str | None = None
    """The same in words."""


class CurveDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of both files. Relative differences are (B - A) / abs(A), of one step."""

    metric: str
    num_steps: int
    """Compared: in both files, behind the warm-up, finite, and A not 0."""
    first_step: int | None
    last_step: int | None
    num_equal: int
    mean_error: float | None
    """Mean of the absolute relative differences."""
    mean_diff: float | None
    """Mean of the relative differences, with their sign."""
    mean_diff_se: float | None
    """Its standard error, from means over blocks of steps."""
    end_diff: float | None
    """Mean relative difference over the last sixteenth of the steps."""
    max_error: float | None
    max_step: int | None
    noise: float | None
    """Standard deviation of one step's relative difference, from successive steps alone."""
    nonfinite_a: int | None
    """The first step with nan or inf in A."""
    nonfinite_b: int | None
    trend: Trend
    jump_at: int | None = None
    """The first step, of the warm-up's too, that is off by far more than any before it; those
    behind it stay so."""
    jump_from: float | None = None
    """The largest relative difference of a step before it."""
    jump_to: float | None = None
    """Its own relative difference."""
    jump_before: int = 0
    """How many steps are before it."""


class LossVerdict(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Says what the difference of two losses is."""

    TEXTS: ClassVar[Mapping[str, str]] = {"summary": "headline"}

    kind: Kind
    headline: list[Fact] = []
    """What the summary tells, in order."""
    summary: str = ""
    """One sentence with its numbers."""


class LossReport(msgspec.Struct, JsonAnswer, Worded, frozen=True, kw_only=True):
    """Two files of losses, A the reference."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    schema_version: Literal[1] = 1
    reference: str
    candidate: str
    verdict: LossVerdict
    """Of the metric ``loss``."""
    metrics: list[CurveDiff]
    warmup_steps: int
    """How many of the common steps were left out at the start."""
    bands: tuple[float, float]
    """The rule of thumb: a mean error up to the first is called aligned, above the second
    misaligned, and between them neither."""
    remarks: list[Fact] = []
    """What to know of both files."""
    notes: list[str] = []
    """The same in words."""

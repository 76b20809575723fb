"""Every format is read into series of scored answers, and what is known of how they came; and the
band in which two scores are the same."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from divergence.errors import ConfigError, UsageError
from divergence.facts import Fact
from divergence.gate.policy import PolicyTable, Share
from divergence.numerics.floor import check_range


class SeriesName(NamedTuple):
    """Says what two sides must both have: a task, under one filter, by one metric."""

    task: str
    filter: str
    metric: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


@dataclass(slots=True)
class ScoreRow:
    """One answer, scored."""

    document: str
    """Its identity within the task: a hash of its content where the format has one."""
    score: float | None
    """None where the answer was not scored; ``why`` says why."""
    repeat: int = 0
    """The number of the answer to this document, from 0."""
    why: Fact | None = None
    prompt: str | None = None
    """A hash of what the model was given."""
    target: str | None = None
    """A hash of what was right."""
    cluster: str | None = None
    answer: str | None = None
    """What was answered, as far as it tells answers apart."""
    choices: tuple[float, ...] | None = None
    """The log-likelihood that each choice was judged by, in nats."""
    place: int = 0
    """The line of the file, from 1, or the document's number in an archive."""


class Total(NamedTuple):
    """The score of a task as a whole. ``error``: its standard error, where it is told; ``num``: of
    how many documents."""

    score: float
    error: float | None = None
    num: int | None = None


@dataclass(slots=True)
class Series:
    """``settings``: what must be equal on both sides, by name. ``file``: where its rows stand."""

    name: SeriesName
    file: str
    settings: dict[str, str] = field(default_factory=dict)
    higher_is_better: bool = True
    rows: list[ScoreRow] = field(default_factory=list)
    total: Total | None = None
    """Where no documents are there."""


@dataclass(slots=True)
class Evaluation:
    """One side: all that a folder or file holds."""

    path: str
    format: str
    column: str | None = None
    """Which of several models of one file, as it was named behind it."""
    model: str | None = None
    dtype: str | None = None
    tool: str | None = None
    """What evaluated, with its version."""
    incomplete: Fact | None = None
    """Why it is not the whole evaluation, where its own log says so."""
    series: list[Series] = field(default_factory=list)
    remarks: list[Fact] = field(default_factory=list)
    """What was left out, counted."""

    def named(self) -> dict[SeriesName, Series]:
        return {series.name: series for series in self.series}


# The band: how far a score may be off and still count as the same.
#
#     3%       relative, to the reference's score: 41% may be 39.8 to 42.2%
#     1.5pp    percentage points of a score from 0 to 1: absolute
#     0.015    the same, in the score's own unit
#
# The default is the 3% that users of other hardware go by, as a share of the score; 5%, their wider
# one, is told beside it.


class Band(NamedTuple):
    """``limit``: 0.03 for 3%. ``relative``: of the reference's score."""

    limit: float
    relative: bool

    def __str__(self) -> str:
        return f"{100 * self.limit:g}%" if self.relative else f"{self.limit:g}"


DEFAULT_BANDS = (Band(0.03, True), Band(0.05, True))
_WRITTEN = re.compile(r"\s*±?\s*([0-9.]+(?:e-?\d+)?)\s*(%|pp)?\s*", re.IGNORECASE)


def parse_band(text: str | float) -> Band:
    """Raises UsageError for what is no band."""
    match = _WRITTEN.fullmatch(str(text))
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    unit = (match[2] or "").lower() if match else ""
    limit = value / 100 if unit else value
    # as far off as the score itself (or as a scale from 0 to 1) excludes nothing
    if not 0 < limit < (1 if unit else math.inf):
        raise UsageError(
            f"{text!r} is no band",
            where="--band",
            hint="3% of A's score, 1.5pp for percentage points, or 0.015 in the score's own unit",
        )
    return Band(limit, unit == "%")


class ScoresPolicy(PolicyTable, frozen=True, kw_only=True):
    """Says what a policy accepts of each task: its table ``scores``."""

    verdicts: tuple[Literal["equal", "better", "worse", "undecided"], ...] = ("equal", "better")
    """Any other verdict fails."""
    band: str = "3%"
    """How far a score may be off and still count as equal; ``--band`` is stronger."""
    min_paired: Share = 1.0
    """The least share of both sides' documents that must be in pairs."""

    def check(self, where: str) -> None:
        check_range(self.min_paired, (0.0, 1.0), where=f"{where}.min_paired")
        try:
            parse_band(self.band)
        except UsageError as error:
            raise ConfigError(error.message, where=f"{where}.band", hint=error.hint) from error

"""What every format is read into: series of scored answers, and what is known of how they came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from divergence.facts import Fact


class SeriesName(NamedTuple):
    """What two sides must both have: a task, under one filter, by one metric."""

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


@dataclass(slots=True)
class Series:
    """``settings``: what must be equal on both sides, by name. ``file``: where its rows stand."""

    name: SeriesName
    file: str
    settings: dict[str, str] = field(default_factory=dict)
    higher_is_better: bool = True
    rows: list[ScoreRow] = field(default_factory=list)


@dataclass(slots=True)
class Evaluation:
    """One side: all that a folder or file holds."""

    path: str
    format: str
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

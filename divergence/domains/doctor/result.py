"""The Checkup: what `doctor` says of two runs, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import Answer, RunSummary, Verdict
from divergence.facts import Fact, Worded

PointName = Literal[
    "weights", "greedy", "seed", "engine", "deterministic", "tokens", "logprobs", "logprob_diff"
]
PointState = Literal["pass", "fail", "unknown"]

RungName = Literal["tokens", "weights", "code", "prefill", "decode", "sampling", "ranks"]
RungState = Literal["pass", "fail", "unknown", "not_reached"]


class Point(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One condition of a fair comparison."""

    TEXTS: ClassVar[Mapping[str, str]] = {"evidence": "facts"}

    number: int
    name: PointName
    title: str
    """The condition in a few words."""
    state: PointState
    """``pass``: met on both sides. ``fail``: not. ``unknown``: a run does not tell, or `compare`
    abstains."""
    facts: list[Fact]
    """What both runs say, A the first and B the second."""
    evidence: str = ""


class Rung(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One possible cause, in the order in which causes explain one another."""

    TEXTS: ClassVar[Mapping[str, str]] = {"evidence": "facts"}

    name: RungName
    title: str
    """What is to be the same, in a few words."""
    state: RungState
    """``pass``: the same, or what differs makes no more than rounding. ``fail``: the runs differ
    here. ``unknown``: a run does not tell, or `compare` abstains. ``not_reached``: a rung above
    explains what is found here."""
    explains: bool = False
    """It may have made all that is found below, so the ladder stops here."""
    facts: list[Fact]
    """What both runs say, A the first and B the second."""
    evidence: str = ""
    next: str | None = None
    """The command to run where the rung fails, or where it is unknown and more can be known."""


class Checkup(msgspec.Struct, Answer, Worded, frozen=True, kw_only=True):
    """The answer of `doctor`."""

    COMMAND: ClassVar[str] = "doctor"
    DOCUMENTS: ClassVar[str] = "divergence.domains.doctor.show:page_document"
    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "facts"}

    schema_version: int = 1
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    verdict: Verdict | None
    """The verdict of `compare`. None where the runs have nothing in common to compare."""
    reason: str | None = None
    """Why there is no verdict."""
    points: list[Point]
    ladder: list[Rung]
    explained_by: RungName | None = None
    """The rung at which the ladder stops."""
    facts: list[Fact] = []
    """What else to know: settings that differ, planted faults, incomplete runs."""
    notes: list[str] = []

    def __repr__(self) -> str:
        """``<Checkup a b: localized, explained by prefill>``"""
        kind = "not compared" if self.verdict is None else self.verdict.kind
        by = f", explained by {self.explained_by}" if self.explained_by else ""
        return f"<Checkup {self.reference.path} {self.candidate.path}: {kind}{by}>"

    @property
    def failed(self) -> list[Rung]:
        """The rungs that fail, the first cause to look at first."""
        return [rung for rung in self.ladder if rung.state == "fail"]

"""What a selfcheck found, as typed data. Rendering lives in divergence.report.selfcheck."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.comparison.result import Answer
from divergence.comparison.results.findings import VerdictKind
from divergence.words import SideBothOrNeither

__all__ = ["SELFCHECK_SCHEMA_VERSION", "SelfcheckLine", "SelfcheckResult", "SelfcheckStatus"]

SELFCHECK_SCHEMA_VERSION = 1

SelfcheckStatus = Literal[
    "identical",
    "within_floor",
    "suspected",
    "diverged",
    "undetermined",
    "not_applicable",
    "not_run",
]
"""``suspected``: compare finds an error beyond a limit, at less than high confidence.
``undetermined``: compared, and compare cannot tell. ``not_applicable``: this model or these prompts
have no such way to run. ``not_run``: it was tried and failed."""


class SelfcheckLine(msgspec.Struct, frozen=True, kw_only=True):
    """One way of running that was tried, and what compare says of it."""

    name: str
    """The word that ``only`` takes."""
    changed: str
    """What is other than in the run that it is compared with."""
    against: str
    """The run that it is compared with: ``base``, or another line's."""
    same_bits: bool
    """Nothing is computed in another way, so that the bits must be equal."""
    status: SelfcheckStatus
    verdict: VerdictKind | None = None
    """The verdict of `compare`. None where nothing was compared."""
    confidence: Literal["high", "medium", "low"] | None = None
    """How sure that verdict is."""
    summary: str = ""
    """The verdict's sentence."""
    reason: str | None = None
    """Why it was not compared."""
    block: str | None = None
    """Where it diverged: the block that makes the error, or the site outside all blocks."""
    side: SideBothOrNeither | None = None
    """Which side is wrong, where a truth tells it: ``reference`` is the run compared with."""
    num_blocks: int = 0
    """Blocks whose outputs were compared with equal inputs."""
    num_blocks_different: int = 0
    """How many of them give other bits."""
    first_different: str | None = None
    """The first of these."""
    num_compared: int = 0
    """Number of compared tensors."""
    num_different: int = 0
    """How many of them have other bits."""
    num_missing: int = 0
    """Tensors of the run compared with that nothing was held against, in forwards that are made."""
    limit_usage: float | None = None
    """The largest share of a limit that any tensor uses; at ``block``, where it diverged."""
    num_tokens: int = 0
    """Greedy choices that were compared, each after the same tokens."""
    num_tokens_different: int = 0
    """How many of them are other tokens."""
    seconds: float = 0.0
    next: list[str] = []
    """Commands that look closer."""


class SelfcheckResult(msgspec.Struct, Answer, frozen=True, kw_only=True):
    """The answer of `selfcheck`."""

    schema_version: int = SELFCHECK_SCHEMA_VERSION
    tool_version: str
    model: str
    dtype: str
    device: str
    attention: str | None
    num_threads: int
    num_prompts: int
    num_prompt_tokens: int
    max_new_tokens: int
    """Of each prompt: the prefill and one forward fewer than this."""
    truth: bool
    """A float64 truth was made, which tells the side."""
    lines: list[SelfcheckLine]
    kept: str | None = None
    """The directory with the runs; None where they were removed."""
    seconds: float = 0.0

    def with_status(self, *statuses: SelfcheckStatus) -> list[SelfcheckLine]:
        """The lines of these statuses."""
        return [line for line in self.lines if line.status in statuses]

    @property
    def compared(self) -> list[SelfcheckLine]:
        """The lines of which compare said anything."""
        return [line for line in self.lines if line.verdict is not None]

    @property
    def diverged(self) -> list[SelfcheckLine]:
        return self.with_status("diverged")

    @property
    def not_repeated(self) -> list[SelfcheckLine]:
        """Lines whose bits must be equal and are not."""
        return [
            line
            for line in self.lines
            if line.same_bits and line.verdict not in (None, "identical")
        ]

"""The Matrix: what `compare` says of many runs, each held against the first.

One row a candidate with the figures by which an odd machine stands out, and which of all the runs
belong together. Each pair's whole report stands in its row, or in a file that the row names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import Answer, Onset, Report, RunSummary, VerdictKind
from divergence.facts import Fact, Worded
from divergence.words import SideBothOrNeither


class MatrixRow(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate compared with the first run."""

    path: str
    run: RunSummary | None = None
    verdict: VerdictKind | None = None
    """None where the two could not be compared."""
    summary: str | None = None
    confidence: Literal["high", "medium", "low"] | None = None
    onset: Onset | None = None
    side: SideBothOrNeither | None = None
    limit_usage: float | None = None
    """The largest share of any limit that is used; over 1 where a limit is exceeded."""
    logits_rel_l2: float | None = None
    """‖a-b‖/‖a‖ of the logits in the worst forward, each run on its own values."""
    top1_agreement: float | None = None
    """Share of positions with the same first choice, over all forwards."""
    num_equal: int | None = None
    """How many of ``num_tokens`` generated tokens agree."""
    num_tokens: int | None = None
    problem: str | None = None
    """Why the two could not be compared. Also set where the verdict is ``incomparable``."""
    report: Report | None = None
    """The pair's whole report. None where it was written to ``report_path``."""
    report_path: str | None = None
    """The file that holds the report in place of ``report``."""


class AgreementGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that agree with ``runs[0]``: they differ by rounding, or not at all."""

    runs: list[str]
    identical: bool = False
    """The recorded digests of the runs are all the same."""


class CrossCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Two candidates compared with one another, to find out which one is odd."""

    reference: str
    candidate: str
    verdict: VerdictKind | None
    problem: str | None = None
    """Why the two could not be compared; ``verdict`` is then None."""


class Matrix(msgspec.Struct, Answer, Worded, frozen=True, kw_only=True):
    """The answer of `compare` for three runs and more. Runs are named by path."""

    TEXTS: ClassVar[Mapping[str, str]] = {"agreement": "consensus", "only_odd": "odd_traits"}

    schema_version: int = 1
    tool_version: str
    reference: RunSummary
    rows: list[MatrixRow]
    identical: list[list[str]] = []
    """Groups of runs whose free passes are equal bit for bit, by recorded digests."""
    groups: list[AgreementGroup] = []
    """Which runs agree, as far as that had to be found out."""
    cross_checks: list[CrossCheck] = []
    """The comparisons of candidates that were needed for ``groups``."""
    odd: list[str] = []
    """The runs outside the group that holds more than half of the runs that can tell. Empty where
    all agree, or where no group is that large."""
    consensus: Fact | None = None
    """Which runs agree."""
    agreement: str = ""
    odd_traits: list[Fact] = []
    """What the manifests of the odd runs say of their machines and those of the group do not."""
    only_odd: list[str] = []
    next: list[str] = []
    """Commands that go deeper."""

    def __repr__(self) -> str:
        """``<Matrix a b c: 2 of 3 runs agree bit for bit; c differs from them>``: with every
        pair's report all fields are megabytes."""
        paths = " ".join([self.reference.path, *(row.path for row in self.rows)])
        return f"<Matrix {paths}: {self.agreement}>"

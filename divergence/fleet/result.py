"""The Matrix: what `compare` says of many runs, each held against the first.

One row a candidate with the figures by which an odd machine stands out, and which of all the runs
belong together. Each pair's whole report stands in its row, or in a file that the row names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.comparison.result import Onset, Report, RunSummary, VerdictKind, strict_json
from divergence.words import SideBothOrNeither

__all__ = ["MATRIX_SCHEMA_VERSION", "AgreementGroup", "CrossCheck", "Matrix", "MatrixRow"]

MATRIX_SCHEMA_VERSION = 1


class MatrixRow(msgspec.Struct, kw_only=True):
    """One candidate against the first run.

    ``verdict`` is None where the two could not be compared, and ``problem`` says why (it is also
    set where the verdict is ``incomparable``). ``limit_usage``: the largest share of any
    limit that is used, over 1 where one is exceeded. ``logits_rel_l2``: the worst forward's, each
    run on its own values; ``top1_agreement``: the share of its positions with the same first
    choice. ``num_equal`` of ``num_tokens`` generated tokens agree. ``report_path``: the file that
    the report was written to, in place of ``report``.
    """

    path: str
    run: RunSummary | None = None
    verdict: VerdictKind | None = None
    summary: str | None = None
    confidence: Literal["high", "medium", "low"] | None = None
    onset: Onset | None = None
    side: SideBothOrNeither | None = None
    limit_usage: float | None = None
    logits_rel_l2: float | None = None
    top1_agreement: float | None = None
    num_equal: int | None = None
    num_tokens: int | None = None
    problem: str | None = None
    report: Report | None = None
    report_path: str | None = None


class AgreementGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that agree with ``runs[0]``: what differs is rounding, or nothing (``identical``: their
    recorded digests are all the same)."""

    runs: list[str]
    identical: bool = False


class CrossCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Two candidates compared with one another, to find out who is odd."""

    reference: str
    candidate: str
    verdict: VerdictKind | None
    problem: str | None = None


class Matrix(msgspec.Struct, kw_only=True):
    """The answer of `compare` for three runs and more; runs are named by path.

    ``identical``: groups of runs whose free passes are equal bit for bit, by recorded digests.
    ``groups``: which runs agree, as far as that had to be found out; ``cross_checks``: the
    comparisons of candidates that it took. ``odd``: the runs outside the group that holds more than
    half of those that can tell; empty where all agree or no group does. ``agreement``: that in one
    sentence. ``only_odd``: what the odd runs' manifests say of their machines that those of the
    group do not. ``next``: commands that go deeper.
    """

    schema_version: int = MATRIX_SCHEMA_VERSION
    tool_version: str
    reference: RunSummary
    rows: list[MatrixRow]
    identical: list[list[str]] = []
    groups: list[AgreementGroup] = []
    cross_checks: list[CrossCheck] = []
    odd: list[str] = []
    agreement: str
    only_odd: list[str] = []
    next: list[str] = []

    def __repr__(self) -> str:
        """``<Matrix a b c: 2 of 3 runs agree bit for bit; c differs from them>``: with every
        pair's report all fields are megabytes."""
        paths = " ".join([self.reference.path, *(row.path for row in self.rows)])
        return f"<Matrix {paths}: {self.agreement}>"

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole matrix as strict JSON; nan and inf become strings."""
        return strict_json(self, indent=indent)

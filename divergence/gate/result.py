"""The answers of `check` and `check --bless`: typed data, and nothing that opens a run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from divergence.comparison.result import Report
from divergence.facts import Fact, Worded
from divergence.gate.policy import Policy


class KnownUse(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Says what became of one known difference of the policy."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "fact"}

    number: int
    """Its place in the policy, from 0."""
    sites: str | tuple[str, ...]
    status: str
    """One of:

    * ``used``: it excused ``num_records`` flagged records;
    * ``matched``: it would have, but the verdict rests on more than what is known;
    * ``exceeded``: some of them are beyond its ``max``;
    * ``expired``: its last day is over;
    * ``unused``: it matches nothing that is flagged.
    """
    num_records: int = 0
    """Flagged records that it matches."""
    allowed: dict[str, float] = {}
    """Its ``max``, by the name of the number."""
    found: dict[str, float | None] = {}
    """The largest value of each number that ``max`` bounds, over the flagged records that it
    matches."""
    reason: str
    until: datetime.date | None = None
    fact: Fact
    """What became of it, with its numbers."""
    text: str = ""
    """The same as a sentence."""

    def __str__(self) -> str:
        sites = self.sites if isinstance(self.sites, str) else ", ".join(self.sites)
        return f"{sites}: {self.status}: {self.text} ({self.reason})"


class Failure(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One rule of the policy that is not met."""

    TEXTS: ClassVar[Mapping[str, str]] = {"text": "fact"}

    rule: str
    site: str | None = None
    allowed: str
    """What the rule allows, as text for people."""
    found: str
    """What was found, as text for people."""
    fact: Fact | None = None
    """What is not met, with its numbers."""
    text: str = ""
    """The same as a sentence."""
    tolerance: int | None = None
    """The tolerance of the policy that is not met, from 0."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `check`."""

    passed: bool
    failures: list[Failure]
    num_ties: int = 0
    """Flipped tokens that count as equal."""
    excused: bool = False
    """The policy's known differences explain the verdict."""
    known: list[KnownUse] = []
    """What became of each known difference of the policy."""
    remarks: list[Fact] = []
    """What the policy names and this comparison lacks, and what was not recorded."""
    notes: list[str] = []
    """The same in words."""
    report: Report
    policy: Policy


class Blessing(msgspec.Struct, frozen=True, kw_only=True):
    """Says what `bless` did."""

    golden: str
    previous: str | None = None
    """Where the old golden was kept; None if there was none, or if it was not to be kept."""
    num_bytes: int | None = None
    """Of the new golden, as it is stored."""
    forced_by: str | None = None
    """The run whose tokens the new golden was fed where its model would choose others."""
    replaced_bytes: int | None = None
    """Of the old one; None if there was none."""
    replaced_created: str | None = None
    """When the run that was the golden was captured, where it can be read."""
    verdict: str | None = None
    """Of the old golden against the new one."""
    summary: str | None = None
    reason: str | None = None
    """Why the two could not be compared, where they could not."""
    added_sites: list[str] = []
    """Sites that the new golden alone has."""
    removed_sites: list[str] = []
    """Sites that the old golden alone has."""
    report: Report | None = None
    """The comparison of the two, where they could be compared."""

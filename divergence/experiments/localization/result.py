"""What localize() found: one level after another, and whether the answer was proven."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.comparison.result import (
    CausalCheck,
    OperatorResult,
    OtherInput,
    Report,
    SiteResult,
    strict_json,
)
from divergence.words import Side, SideBothOrNeither

__all__ = ["Level", "Localization", "OwnError", "Repetition"]

LOCALIZATION_SCHEMA_VERSION = 1


class Level(msgspec.Struct, kw_only=True, frozen=True):
    """One step of the descent. ``site``: where it begins at this level, None where nothing stands
    out; ``why``: the first piece of evidence."""

    level: Literal["block", "module", "operator"]
    verdict: str
    site: str | None
    side: SideBothOrNeither | None = None
    why: str = ""

    @classmethod
    def of_report(cls, level: Literal["block", "operator"], report: Report) -> Level:
        """From a whole report."""
        verdict = report.verdict
        return cls(
            level=level,
            verdict=verdict.kind,
            site=None if verdict.onset is None else verdict.onset.site,
            side=verdict.side,
            why=verdict.evidence[0].text if verdict.evidence else verdict.summary,
        )

    @classmethod
    def of_modules(cls, report: Report, block: str) -> Level | None:
        """The first module inside ``block`` whose output differs and is flagged (an equal one is
        where both sides are off: the runs do not part there); None where none was recorded."""
        inside = [
            site
            for site in report.sites
            if site.site.startswith(block + ".") and ":out" in site.site
            and site.pass_ in ("anchored", "escalated")
        ]  # fmt: skip
        if not inside:
            return None
        flagged = [site for site in inside if site.flagged and not site.identical]
        if not flagged:
            return cls(level="module", verdict="within_floor", site=None)
        first = min(flagged, key=lambda s: (s.step, s.sample, s.order))
        return cls(level="module", verdict="localized", site=first.site, why=_module_text(first))

    @classmethod
    def of_operators(cls, report: Report) -> Level | None:
        """From the operators of a report; None where none were compared."""
        found = report.operators
        if found is None:
            return None
        if found.onset is None:
            return cls(level="operator", verdict="within_floor", site=None)
        return cls.of_report("operator", report)


def _module_text(site: SiteResult) -> str:
    if site.rel_l2 is None:
        return "by how much is not known"
    if site.truth is None:
        return f"rel L2 {site.rel_l2:.2e}"
    return (
        f"err reference {site.truth.reference_error:.2e}, err candidate "
        f"{site.truth.candidate_error:.2e}"
    )


class OwnError(msgspec.Struct, kw_only=True, frozen=True):
    """A side's operator on its own recorded inputs against float64: relative error, median row;
    ``ideal``: what a correct one makes; ``times``: the one over the other, in quadrature."""

    side: Side
    error: float
    ideal: float
    times: float


class Repetition(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one check.

    ``run``: which was made again; ``repeats``: the run it stands for. ``how``: ``bits`` (all shared
    tensors are equal), ``error`` (as far from the truth, of a machine that does not repeat bits),
    ``differs``, or ``unknown``: they share no tensor. ``num_compared``, ``num_different``: shared
    tensors. ``site``, ``pass_``, ``sample``, ``step``: of the first that differs, ``rel_l2`` by how
    much (None where a side keeps no bytes). ``reason``: why bits were not asked for.
    """

    run: str
    repeats: str
    how: Literal["bits", "error", "differs", "unknown"]
    num_compared: int = 0
    num_different: int = 0
    site: str | None = None
    pass_: str | None = msgspec.field(name="pass", default=None)
    sample: int = 0
    step: int = 0
    rel_l2: float | None = None
    reason: str | None = None

    @property
    def met(self) -> bool:
        """Is the run a repetition of the other?"""
        return self.how in ("bits", "error")

    def __str__(self) -> str:
        if self.how == "unknown":
            return f"{self.run} shares no tensor with {self.repeats}"
        if self.how == "bits":
            return f"{self.run} repeats {self.repeats}: all {self.num_compared} shared tensors"
        by = "" if self.rel_l2 is None else f", rel L2 {self.rel_l2:.2e}"
        where = f"{self.site} differs{by}"
        if self.how == "differs":
            return f"{self.run} does not repeat {self.repeats}: {where}"
        return f"{self.run} is as far from the truth as {self.repeats}, though {where}"


class Localization(msgspec.Struct, kw_only=True):
    """The answer of `localize`. ``stopped``: why it went no deeper; ``commands``: what another
    machine must make first, ``again``: what then goes on. ``truth``: None where none was needed.
    ``alone``: empty where the operator could not be run by itself; ``given``: tensor operands that
    differ, the largest difference first.
    ``repro``: directory of the reproducer; ``repro_other``: of the other side's call, where the
    sides call the operator with other scalars or constants. ``repetitions``: of each run that was
    captured again, whether it repeats the one it stands for. ``refused``: something that was made
    or given does not belong to these runs, so nothing was concluded. ``contradiction``: levels that
    blame different sides; ``doubt``: why no side is named though an operator is; ``code``: the
    first module that float64 tells apart, where the two sides' code is not the same."""

    schema_version: int = LOCALIZATION_SCHEMA_VERSION
    reference: str
    candidate: str
    truth: str | None = None
    out: str
    levels: list[Level] = []
    operator: OperatorResult | None = None
    side: Side | None = None
    contradiction: str | None = None
    doubt: str | None = None
    code: str | None = None
    causal: CausalCheck | None = None
    repetitions: list[Repetition] = []
    refused: bool = False
    alone: list[OwnError] = []
    given: list[OtherInput] = []
    repro: str | None = None
    repro_other: str | None = None
    stopped: str | None = None
    commands: list[str] = []
    again: str = ""
    report: Report | None = None

    def to_json(self, *, indent: int | None = None) -> str:
        """Strict JSON; nan and inf become strings. ``report`` holds the last comparison."""
        return strict_json(self, indent=indent)

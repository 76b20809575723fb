"""What an analysis claims, and what becomes of all claims: Finding and Verdict, as typed data.

An analysis returns findings and knows neither the others nor the verdict. ``decide.decide`` makes
one verdict of them. Everything here is frozen.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.words import SideBothOrNeither

__all__ = ["Check", "Claim", "Evidence", "Finding", "Onset", "Role", "SiteKey", "Verdict",
           "VerdictKind"]  # fmt: skip

VerdictKind = Literal[
    "identical",
    "within_floor",
    "systematic",
    "localized",
    "drift",
    "nonfinite",
    "incomparable",
    "undetermined",
]

Claim = Literal[
    "other_experiment",  # other weights, other blocks, other prompt tokens
    "same_run",  # both are one run, or copies of it
    "arithmetic",  # what two probed machines' arithmetic is
    "nonfinite",  # nan or inf where the other side, or any result, has none
    "integers_differ",  # masks, positions, choices: they do not round
    "error_made_here",  # beyond its limit at one site
    "error_everywhere_of_kind",  # beyond it at most sites of one kind
    "error_between",  # made by the code between modules
    "error_below_floor",  # seen in the escalated pass alone
    "not_the_largest_logit",  # sampling
    "equal",  # every bit
    "drift",  # the free run ends farther off than its parts explain
    "within_rounding",  # no more than rounding explains
    "not_known",  # the two differ, and nobody knows by how much
    "replicas_disagree",  # ranks that must hold the same do not
    "operator_off",  # an operator makes the error
    "operators_fine",  # none of them does
    "suite",  # operators by themselves
    "context",  # what to know beside the numbers
    "explanation",  # why it is so
    "side_not_told",  # the truth cannot tell the side
    "stands_out",  # a place to look, within rounding
]
"""What a finding says. One sentence each stands in docs/verdicts.md."""

Role = Literal["convicts", "refines", "context", "explains", "hints", "abstains"]
"""What a finding may do: be the verdict; make another's place more precise; be told beside any
verdict; say why; name a place to look at; take certainty away."""

SiteKey = tuple[str, str | None, int, int, str]
"""(pass, whose escalated pass, sample, step, site)."""


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """The first site, in execution order, where the error is made rather than inherited.

    ``block``: module path of the repeated block the site is or lies in, or None.
    ``position``: token index of the worst row there, where rows are tokens. ``pass``:
    where it was found; ``anchored`` is exact.
    """

    site: str
    block: str | None
    sample: int
    step: int
    position: int | None
    pass_: str = msgspec.field(name="pass", default="free")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One fact the verdict rests on: a sentence, and its numbers by name. ``block``: one that it
    points at, to look into, though nothing is beyond a limit there."""

    text: str
    values: dict[str, float] = {}
    block: str | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a verdict's confidence rests on. ``detail``: what is lacking, where it is."""

    name: str
    state: Literal["met", "failed", "not_made"]
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement. ``side``: which run is wrong, where that can be told.

    ``summary``: one line for people. ``checks``: what the confidence is computed from. ``next``:
    commands that go deeper.
    """

    kind: VerdictKind
    summary: str
    onset: Onset | None = None
    confidence: Literal["high", "medium", "low"]
    side: SideBothOrNeither | None = None
    evidence: list[Evidence] = []
    next: list[str] = []
    checks: list[Check] = []


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one analysis claims."""

    claim: Claim
    role: Role = "convicts"
    kind: VerdictKind | None = None
    """The verdict's kind, where this is the verdict."""
    summary: str = ""
    """One line for people: the verdict's, where this is it."""
    onset: Onset | None = None
    place: tuple[int, int, int] | None = None
    """(sample, step, order): when it happens, for what may happen before something else."""
    equal_inputs: bool = False
    """Was it seen where both sides got the same inputs (an anchored or escalated pass)?"""
    side: SideBothOrNeither | None = None
    rests_on: list[Check] = []
    """The checks that it needs. The confidence is computed from them."""
    evidence: list[Evidence] = []
    """What it rests on, the most telling fact first."""
    beside: list[Evidence] = []
    """What is said of it where another finding is the verdict."""
    clause: str = ""
    """How it continues the summary of a verdict about the same place."""
    leads: bool = False
    """Explanations: said before the verdict's own evidence, rather than behind all of it."""
    about_onset: bool = False
    """Explanations: said behind the first fact of the verdict's evidence."""
    next: list[str] = []
    flags: list[SiteKey] = []
    """Sites that it rests on; they are flagged where it is the verdict."""

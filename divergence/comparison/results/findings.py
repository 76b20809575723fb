"""What is claimed and decided: PreflightLine, Finding and Verdict, as typed data.

An analysis returns findings and knows neither the others nor the verdict. ``decide`` makes one
verdict of them. Everything here is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.facts import Fact, Worded
from divergence.run.command import Command
from divergence.run.site import phase_of
from divergence.words import SideBothOrNeither

__all__ = [
    "Check", "Claim", "Finding", "Onset", "PreflightLine", "PreflightStatus", "Role", "SiteKey",
    "Verdict", "VerdictKind", "schemes_apart",
]  # fmt: skip

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
    "codes_wrong",  # codes of a quantiser that no rounding makes
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
    "collectives",  # collectives by themselves
    "logprobs",  # log-probabilities alone
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
    """The first site, in execution order, where the error is made rather than inherited."""

    site: str
    block: str | None
    """Module path of the repeated block that the site is or lies in; None outside all blocks."""
    sample: int
    step: int
    position: int | None
    """Token index of the worst row, where rows are tokens."""
    pass_: str = msgspec.field(name="pass", default="free")
    """The pass in which it was found. ``anchored`` is exact."""

    @property
    def phase(self) -> str:
        """One of run.schema.site.PHASES."""
        return phase_of(self.site, self.step)


class Check(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One condition that a verdict's confidence rests on."""

    TEXTS: ClassVar[Mapping[str, str]] = {"detail": "lacking"}

    name: str
    state: Literal["met", "failed", "not_made"]
    lacking: Fact | None = None
    """What is lacking, where the condition is not met."""
    detail: str = ""
    """The same as a sentence."""


class Verdict(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The judgement: what differs, where it begins, and how certain that is."""

    TEXTS: ClassVar[Mapping[str, str]] = {"summary": "headline", "next": "commands"}

    kind: VerdictKind
    headline: list[Fact] = []
    """What the summary tells, in order."""
    summary: str = ""
    """One line for people, made of ``headline`` at the very end."""
    onset: Onset | None = None
    confidence: Literal["high", "medium", "low"]
    """Computed from ``checks``."""
    side: SideBothOrNeither | None = None
    """The run that is wrong, where that can be told."""
    evidence: list[Fact] = []
    """The facts that the verdict rests on."""
    commands: list[Command] = []
    """What goes deeper."""
    next: list[str] = []
    """The same, ready for a shell."""
    checks: list[Check] = []
    """The conditions that the confidence is computed from."""


class Finding(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """What one analysis claims."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "summary": "headline", "clause": "addition", "next": "commands",
    }  # fmt: skip

    claim: Claim
    role: Role = "convicts"
    kind: VerdictKind | None = None
    """The kind of the verdict, if this finding becomes the verdict."""
    headline: list[Fact] = []
    """What the verdict's summary tells, if this finding becomes the verdict."""
    summary: str = ""
    """The same as one line for people."""
    onset: Onset | None = None
    place: tuple[int, int, int] | None = None
    """(sample, step, order) of the claim. Orders findings in time."""
    step: int | None = None
    """The forward in which a claim without an onset was seen."""
    equal_inputs: bool = False
    """Was it seen in a pass in which both sides got the same inputs (anchored or escalated)?"""
    side: SideBothOrNeither | None = None
    rests_on: list[Check] = []
    """The checks that the claim needs. The confidence is computed from them."""
    evidence: list[Fact] = []
    """The facts behind the claim, the most telling one first."""
    beside: list[Fact] = []
    """The facts to report where another finding is the verdict."""
    addition: list[Fact] = []
    """What continues the summary of a verdict about the same place."""
    clause: str = ""
    """The same in words."""
    leads: bool = False
    """For explanations: show it before the verdict's own evidence, not after all of it."""
    about_onset: bool = False
    """For explanations: show it after the first fact of the verdict's evidence."""
    commands: list[Command] = []
    """What goes deeper."""
    next: list[str] = []
    """The same, ready for a shell."""
    flags: list[SiteKey] = []
    """Sites that the claim rests on. They are flagged if this finding becomes the verdict."""

    @property
    def says_something(self) -> bool:
        """Is it a claim, or is there evidence in it? An analysis may have looked and found none."""
        return bool(self.evidence or self.addition) or self.role in ("convicts", "refines")


PreflightStatus = Literal["same", "differs", "blocking", "unknown"]
"""``unknown``: a side does not say it."""


class PreflightLine(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One setting or fact of the two runs that is checked before any number."""

    TEXTS: ClassVar[Mapping[str, str]] = {"detail": "details"}

    check: str
    status: PreflightStatus
    reference: str
    candidate: str
    details: list[Fact] = []
    """What differs, for example the first parameters."""
    detail: str | None = None
    """The same in words."""


def schemes_apart(reference: str, candidate: str) -> tuple[str, str]:
    """How each side is quantised (a ``QuantizationNote`` in words, or ``none``), in a word: two of
    one name with what each alone has."""
    names = [
        f"quantised ({text.rpartition(' (')[2]}" if text.startswith("scheme not known")
        else text.partition(": ")[0]
        for text in (reference, candidate)
    ]  # fmt: skip
    if names[0] != names[1]:
        first, second = ("not quantised" if name == "none" else name for name in names)
        return first, second
    parts = [_parts(text) for text in (reference, candidate)]
    own = ["; ".join(part for part in parts[n] if part not in parts[1 - n]) for n in range(2)]
    first, second = (f"{names[n]} ({own[n]})" if own[n] else names[n] for n in range(2))
    return first, second


def _parts(text: str) -> list[str]:
    """``W8A8: int8 weights per channel, int8 activations per token; not quantised: lm_head (by)``
    → what stands between its commas, with the list of modules in one piece."""
    scheme, *rest = text.partition(": ")[2].rpartition(" (")[0].split("; ")
    return [*scheme.split(", "), *rest]

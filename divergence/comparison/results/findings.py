"""What is claimed and decided: PreflightLine, Finding and Verdict, as typed data.

An analysis returns findings and knows neither the others nor the verdict. ``decide`` makes one
verdict of them. Everything here is frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from divergence.run.schema.site import phase_of
from divergence.words import SideBothOrNeither

__all__ = [
    "Check", "Claim", "Evidence", "Finding", "Onset", "PreflightLine", "PreflightStatus", "Role",
    "SiteKey", "Verdict", "VerdictKind", "behind_rank", "figure", "list_names", "schemes_apart",
    "some_of",
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


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that the verdict rests on."""

    text: str
    """The fact, as a sentence."""
    values: dict[str, float] = {}
    """The numbers in it, by name."""
    block: str | None = None
    """A block worth a look, although nothing is beyond a limit there."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One condition that a verdict's confidence rests on."""

    name: str
    state: Literal["met", "failed", "not_made"]
    detail: str = ""
    """What is lacking, where the condition is not met."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement: what differs, where it begins, and how certain that is."""

    kind: VerdictKind
    summary: str
    """One line for people."""
    onset: Onset | None = None
    confidence: Literal["high", "medium", "low"]
    """Computed from ``checks``."""
    side: SideBothOrNeither | None = None
    """The run that is wrong, where that can be told."""
    evidence: list[Evidence] = []
    """The facts that the verdict rests on."""
    next: list[str] = []
    """Commands that go deeper."""
    checks: list[Check] = []
    """The conditions that the confidence is computed from."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one analysis claims."""

    claim: Claim
    role: Role = "convicts"
    kind: VerdictKind | None = None
    """The kind of the verdict, if this finding becomes the verdict."""
    summary: str = ""
    """One line for people: the verdict's summary, if this finding becomes the verdict."""
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
    evidence: list[Evidence] = []
    """The facts behind the claim, the most telling one first."""
    beside: list[Evidence] = []
    """The facts to report where another finding is the verdict."""
    clause: str = ""
    """Text that continues the summary of a verdict about the same place."""
    leads: bool = False
    """For explanations: show it before the verdict's own evidence, not after all of it."""
    about_onset: bool = False
    """For explanations: show it after the first fact of the verdict's evidence."""
    next: list[str] = []
    flags: list[SiteKey] = []
    """Sites that the claim rests on. They are flagged if this finding becomes the verdict."""

    @property
    def says_something(self) -> bool:
        """Is it a claim, or is there evidence in it? An analysis may have looked and found none."""
        return bool(self.evidence or self.clause) or self.role in ("convicts", "refines")


PreflightStatus = Literal["same", "differs", "blocking", "unknown"]
"""``unknown``: a side does not say it."""


class PreflightLine(msgspec.Struct, frozen=True, kw_only=True):
    """One setting or fact of the two runs that is checked before any number."""

    check: str
    status: PreflightStatus
    reference: str
    candidate: str
    detail: str | None = None
    """What differs, for example the first parameters."""


_LONG = 9999.5


def some_of(what: str, numbers: Collection[int], total: int, *, alone: bool = False) -> str:
    """``prompts 1, 2 (of 3)``; ``alone``: a single number is so in words, too."""
    shown = [str(number) for number in sorted(numbers)]
    if len(shown) == 1:
        return f"{what} {shown[0]}{' alone' if alone else ''} (of {total})"
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return f"{what}s {', '.join(shown[:4])}{more} (of {total})"


def figure(value: float, digits: int = 1) -> str:
    """``6.8``, ``1204.6``; ``4.0e+08`` where more digits would say nothing."""
    return f"{value:.{digits}f}" if abs(value) < _LONG or value != value else f"{value:.1e}"


def list_names(names: Sequence[str], most: int = 5, by: str = ", ") -> str:
    """The first few, and how many more."""
    rest = len(names) - most
    last = "; and" if by == "; " else " and"
    return by.join(names[:most]) + (f"{last} {rest} more" if rest > 0 else "")


def behind_rank(verdict: Verdict, rank: Onset | None) -> str:
    """What is off behind a rank that disagrees, in brackets. In the same block it need not be made
    where it is seen."""
    onset = verdict.onset
    if verdict.kind in ("identical", "within_floor"):
        return ""
    if onset is None or rank is None or onset.block is None:
        return f" ({verdict.summary})"
    follows = onset.block == rank.block and onset.site != rank.site and verdict.kind == "localized"
    return f" (behind it {onset.site} is off)" if follows else f" ({verdict.summary})"


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

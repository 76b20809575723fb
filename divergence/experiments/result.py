"""The results of experiments, as typed data: Localization, Sensitivity, Selftest, SelfcheckResult.

Rendering lives in divergence.report. The JSON forms are stable and versioned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import (
    Answer,
    CausalCheck,
    Finding,
    JsonAnswer,
    OperatorResult,
    OtherInput,
    Report,
    RunSummary,
    Verdict,
    VerdictKind,
)
from divergence.facts import Fact, Worded, fact, sentence
from divergence.run.command import Command
from divergence.run.manifest import Environment, Switch
from divergence.run.site import BACKWARD
from divergence.words import Side, SideBothOrNeither

NEAR = 3.0
"""Times an ideal operator's error: nearer than that, an operator is right by itself."""
_IDEAL = 1.5
"""Of two that are near, the farther may be so many times as far."""


class Level(msgspec.Struct, Worded, kw_only=True, frozen=True):
    """One step of the descent from blocks to operators."""

    TEXTS: ClassVar[Mapping[str, str]] = {"why": "because"}

    level: Literal["block", "module", "operator"]
    verdict: str
    site: str | None
    """Where the difference begins at this level; None where nothing stands out."""
    side: SideBothOrNeither | None = None
    because: list[Fact] = []
    """The first piece of evidence."""
    why: str = ""

    @classmethod
    def of(cls, level: Literal["block", "operator"], verdict: Verdict | Finding) -> Level:
        """Make a level from a verdict, or from what operators show."""
        return cls(
            level=level,
            verdict=verdict.kind or "undetermined",
            site=None if verdict.onset is None else verdict.onset.site,
            side=verdict.side,
            because=verdict.evidence[:1] or verdict.headline,
        )

    @classmethod
    def of_modules(cls, report: Report, block: str) -> Level | None:
        """The first module inside ``block`` whose output differs and is flagged (an equal one is
        where both sides are off: the runs do not part there); None where none was recorded."""
        inside = [
            site
            for site in report.sites
            if site.site.startswith(block + ".")
            and (":out" in site.site or site.site.endswith(f"{BACKWARD}:in"))
            and site.pass_ in ("anchored", "escalated")
        ]
        if not inside:
            return None
        flagged = [site for site in inside if site.flagged and not site.identical]
        if not flagged:
            return cls(level="module", verdict="within_floor", site=None)
        first = min(flagged, key=lambda s: (s.step, s.sample, s.order))
        because = fact("experiments.unmeasured")
        if first.truth is not None and first.rel_l2 is not None:
            errors = first.truth.reference_error, first.truth.candidate_error
            because = fact("experiments.errors", reference=errors[0], candidate=errors[1])
        elif first.rel_l2 is not None:
            because = fact("experiments.rel_l2", rel_l2=first.rel_l2)
        return cls(level="module", verdict="localized", site=first.site, because=[because])


class OwnError(msgspec.Struct, kw_only=True, frozen=True):
    """A side's operator on its own recorded inputs, held against float64."""

    side: Side
    error: float
    """Relative L2 error of the median row."""
    ideal: float
    """The error that a correct operator makes."""
    times: float
    """``error`` over ``ideal``, each with the operator's floor added in quadrature."""


def is_right_alone(errors: Sequence[OwnError]) -> bool:
    """Is an operator on its own inputs about as near to float64 on both sides as an ideal one?"""
    times = sorted(own.times for own in errors)
    return len(times) == 2 and times[1] <= _IDEAL * max(1.0, times[0]) and times[1] < NEAR


class Repetition(msgspec.Struct, Worded, kw_only=True, frozen=True):
    """Says whether a run that was captured again repeats the run it stands for."""

    TEXTS: ClassVar[Mapping[str, str]] = {"repeats": "original", "reason": "because"}

    run: str
    """The run that was made again."""
    original: Fact
    """The run it stands for."""
    repeats: str = ""
    how: Literal["bits", "error", "differs", "unknown"]
    """``bits``: all shared tensors are equal. ``error``: as far from the truth, on a machine that
    does not repeat bits. ``differs``: neither. ``unknown``: the runs share no tensor."""
    num_compared: int = 0
    """Number of shared tensors."""
    num_different: int = 0
    """How many of them differ."""
    site: str | None = None
    """The first tensor that differs, with ``pass``, ``sample`` and ``step``."""
    pass_: str | None = msgspec.field(name="pass", default=None)
    sample: int = 0
    step: int = 0
    rel_l2: float | None = None
    """Relative L2 difference of that tensor. None where a side keeps no bytes."""
    because: Fact | None = None
    """Why equal bits were not asked for."""
    reason: str | None = None

    @property
    def met(self) -> bool:
        """Is the run a repetition of the other?"""
        return self.how in ("bits", "error")

    @property
    def first_apart(self) -> Fact:
        """The first tensor that differs, and by how much."""
        return fact("experiments.site_differs", site=self.site, rel_l2=self.rel_l2)

    def __str__(self) -> str:
        codes = {"unknown": "shares_nothing", "bits": "repeats", "differs": "repeats_not"}
        phrase = fact(
            f"experiments.{codes.get(self.how, 'as_far')}",
            run=self.run,
            original=self.original,
            num=self.num_compared,
            where=self.first_apart,
        )
        return sentence(phrase)


class Localization(msgspec.Struct, Answer, Worded, kw_only=True, frozen=True):
    """The answer of `localize`."""

    COMMAND: ClassVar[str] = "localize"
    DOCUMENTS: ClassVar[str] = "divergence.report.localization:page_document"
    TEXTS: ClassVar[Mapping[str, str]] = {
        "contradiction": "levels_apart",
        "doubt": "side_doubt",
        "stopped": "obstacles",
        "commands": "elsewhere",
        "again": "continuation",
    }

    schema_version: int = 1
    reference: str
    candidate: str
    truth: str | None = None
    """None where none was needed."""
    out: str
    levels: list[Level] = []
    operator: OperatorResult | None = None
    side: Side | None = None
    levels_apart: Fact | None = None
    """The levels that blame different sides."""
    contradiction: str | None = None
    side_doubt: Fact | None = None
    """Why no side is named although an operator is."""
    doubt: str | None = None
    code: str | None = None
    """The first site at which float64 runs by the two sides' own code differ."""
    causal: CausalCheck | None = None
    repetitions: list[Repetition] = []
    """For each run that was captured again: does it repeat the one it stands for?"""
    refused: bool = False
    """Something that was made or given does not belong to these runs, so nothing was concluded."""
    alone: list[OwnError] = []
    """Each side's operator by itself. Empty where the operator could not be run by itself."""
    given: list[OtherInput] = []
    """Tensor operands that differ, the largest difference first."""
    repro: str | None = None
    """Directory of the reproducer."""
    repro_other: str | None = None
    """Directory of the reproducer of the other side's call, where the sides call the operator with
    other scalars or constants."""
    obstacles: list[Fact] = []
    """Why the descent went no deeper."""
    stopped: str | None = None
    elsewhere: list[Command] = []
    """Commands that another machine must run first."""
    commands: list[str] = []
    continuation: Command | None = None
    """The command that continues after that."""
    again: str = ""
    report: Report | None = None
    """The last comparison. Where an operator was reached its verdict is that of the descent."""

    @property
    def is_right_alone(self) -> bool:
        """Is the operator right by itself on both sides, so that what it is given tells?"""
        return is_right_alone(self.alone)


class FaultSize(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """The smallest size of one fault that is seen at one block."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "by": "evidence",
        "escalated_by": "escalated_evidence",
        "reason": "why",
    }

    block: str
    fault: str
    size: float | None
    """A share of what ``Sensitivity.units`` names, found to within 9 %. None: the fault was not
    seen up to ``tried``, or was not tried and ``reason`` says why."""
    tried: float
    """The largest size that was tried; 0 where none was."""
    evidence: list[Fact] = []
    """The evidence of the verdict at ``size``. Where ``size`` is None: the verdict at ``tried``."""
    by: str | None = None
    escalated_size: float | None = None
    """The smallest size that is seen with the escalated pass, in which the same fault is planted
    too. None without such a pass."""
    escalated_evidence: list[Fact] = []
    """The evidence of the verdict at ``escalated_size``."""
    escalated_by: str | None = None
    why: Fact | None = None
    """Why the fault was not tried here."""
    reason: str | None = None


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that was really planted, in a capture of its own."""

    block: str
    fault: str
    plant: str
    """The fault as `capture --plant` takes it."""
    size: float
    expected: bool
    """It should be seen."""
    seen: bool
    """It was seen, and in that block."""
    verdict: str
    """The verdict that `compare` gave."""
    summary: str


class Sensitivity(msgspec.Struct, Answer, Worded, kw_only=True, frozen=True):
    """The answer of `sensitivity`."""

    COMMAND: ClassVar[str] = "sensitivity"
    DOCUMENTS: ClassVar[str] = "divergence.report.experiments:sensitivity_document"
    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks", "next": "commands"}

    schema_version: int = 1
    tool_version: str
    reference: RunSummary
    candidate: RunSummary
    made_here: bool
    """The candidate was captured for this and has been deleted."""
    truth: str | None
    num_floor_runs: int
    dtype: str
    escalated: bool
    """The candidate has an escalated pass that is judged."""
    verdict: Verdict
    """The verdict of the pair before anything was planted."""
    num_blocks: int
    """Number of blocks in the runs."""
    num_prompt_tokens: int
    num_trials: int
    blocks: list[str]
    """The blocks that faults were planted in."""
    units: dict[str, str]
    """By fault: what its size is a share of."""
    phrases: dict[str, str]
    """By fault: the fault in words, with ``{size}`` in place of the number."""
    sizes: list[FaultSize]
    confirmations: list[Confirmation] = []
    remarks: list[Fact] = []
    """What else to know."""
    notes: list[str] = []
    commands: list[Command] = []
    """What would show smaller faults."""
    next: list[str] = []

    def of(self, fault: str) -> list[FaultSize]:
        """The sizes of one fault, block by block."""
        return [size for size in self.sizes if size.fault == fault]


StepStatus = Literal["ok", "failed", "skipped"]


class Step(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One device path of the tool that was tried."""

    TEXTS: ClassVar[Mapping[str, str]] = {"detail": "seen"}

    name: str
    status: StepStatus
    seconds: float
    seen: Fact | None = None
    """What was seen."""
    detail: str = ""
    """The same in words, or why the path failed or was left out."""


class Selftest(msgspec.Struct, JsonAnswer, kw_only=True, frozen=True):
    """The answer of `selftest`."""

    schema_version: int = 1
    tool_version: str
    device: str
    environment: Environment
    switches: list[Switch] = []
    fallbacks: list[str] = []
    """Operators that the CPU ran in place of the device."""
    steps: list[Step] = []
    complete: bool = False
    """False where the selftest was interrupted."""

    @property
    def failed(self) -> list[Step]:
        return [step for step in self.steps if step.status == "failed"]


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


class SelfcheckLine(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One way of running that was tried, and what compare says of it."""

    TEXTS: ClassVar[Mapping[str, str]] = {"changed": "change", "reason": "because"}

    name: str
    """The word that ``only`` takes."""
    change: Fact | None = None
    """What is other than in the run that it is compared with."""
    changed: str = ""
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
    because: Fact | None = None
    """Why it cannot be run so."""
    reason: str | None = None
    """Why it was not compared, in words."""
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

    COMMAND: ClassVar[str] = "selfcheck"
    DOCUMENTS: ClassVar[str] = "divergence.report.experiments:selfcheck_document"

    schema_version: int = 1
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

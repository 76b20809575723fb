"""The ScoresReport: what `scores` found, as typed data. Scores are in their own unit (0 to 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import Answer, PreflightLine
from divergence.facts import Fact, Worded
from divergence.run.command import Command

ScoresVerdict = Literal["equal", "better", "worse", "undecided", "incomparable"]
"""``equal``: two one-sided tests show that the difference is inside the band. ``worse``,
``better``: the candidate's score differs, and was not shown to be inside the band. ``undecided``:
so many documents tell neither. ``incomparable``: nothing was paired."""

_ORDER: tuple[ScoresVerdict, ...] = ("incomparable", "worse", "undecided", "better", "equal")


def worst_of(verdicts: list[ScoresVerdict]) -> ScoresVerdict:
    """Return the verdict of several tasks that needs a look first."""
    return min(verdicts, key=_ORDER.index, default="incomparable")


class EvaluationSummary(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One side."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "remarks"}

    path: str
    format: str
    model: str | None = None
    dtype: str | None = None
    tool: str | None = None
    """What evaluated, with its version."""
    remarks: list[Fact] = []
    """What was left out when it was read."""
    notes: list[str] = []
    """The same in words."""


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """Says which documents both sides have. All but ``num_paired`` are in no number."""

    num_paired: int
    num_clusters: int
    """As many as documents where no cluster is known."""
    num_reference: int
    """Documents of the reference."""
    num_candidate: int
    num_reference_only: int = 0
    """Documents that the candidate lacks."""
    num_candidate_only: int = 0
    num_other_prompt: int = 0
    """Documents that were asked in other words."""
    num_other_target: int = 0
    """Documents whose right answer is another one."""
    num_unscored: int = 0
    """Documents that a side has without any usable score, but for those that contradict."""
    num_duplicates: int = 0
    """Rows that repeat a document, with the same score; one of them is used."""
    num_conflicting: int = 0
    """Documents whose rows contradict one another; none is used."""
    repeats: tuple[float, float] = (1.0, 1.0)
    """Mean number of answers to a document, in the reference and in the candidate. A document's
    score is their mean."""
    whys: dict[str, int] = {}
    """Why answers had no usable score, counted over both sides."""

    @property
    def num_left_out(self) -> int:
        """Documents of either side that are in no pair, each counted once."""
        return (
            self.num_reference_only
            + self.num_candidate_only
            + self.num_other_prompt
            + self.num_other_target
            + self.num_unscored
            + self.num_conflicting
        )


class BandResult(msgspec.Struct, frozen=True, kw_only=True):
    """One test of equivalence."""

    limit: float
    """0.03 for 3%."""
    relative: bool
    """To the reference's score; else in the score's own unit."""
    width: float
    """How far the candidate's score may be from the reference's, in the score's unit."""
    p_value: float
    """The larger of two one-sided tests."""
    equal: bool
    """The difference is shown to be inside, at the 5% level."""
    few_clusters: bool = False
    """The test would show it, but only few clusters differ, as a whole and nearly all in one
    direction: of such data it is wrong more often than it says."""
    needed: int | None = None
    """Documents that would settle it, in four of five such evaluations, to two digits. None where
    it is settled, or no number would."""


class CauseCounts(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Flips by what moved their margins, and the limit between the two."""

    TEXTS: ClassVar[Mapping[str, str]] = {"limit_of": "source"}

    limit: float
    """Rounding explains a shift of the margin up to this, in nats."""
    source: Fact
    """What the limit rests on."""
    limit_of: str = ""
    """The same in words."""
    num_ties: int
    """Flips whose margin moved by no more than the limit."""
    num_shifts: int
    """Flips whose margin moved by more."""
    difference_of_ties: float
    """The share of the score difference that flips at near ties make: they add up to the mean
    difference of the flipped documents over all pairs."""
    difference_of_shifts: float


class FlipCauses(CauseCounts, frozen=True, kw_only=True):
    """Flips of multiple choice, by what moved the choice."""

    median_shift: float
    """Of the margin between the reference's two likeliest choices, over all documents, in nats."""
    num_judged: int
    """Documents with the likelihoods of their choices on both sides."""


class RunFlip(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """A flipped document in two runs of its prompt."""

    TEXTS: ClassVar[Mapping[str, str]] = {"why": "reason"}

    document: str
    sample: int
    """The prompt's number in the reference's run."""
    step: int
    """0 is the first token of the answer."""
    judgement: Literal["tie", "shift", "not_reproduced", "not_told"]
    """``tie``: both margins are within what rounding explains of 0. ``shift``: the margin falls by
    more, towards B's answer. ``not_reproduced``: neither, so the runs do not answer as the
    evaluations did."""
    reference: str | None = None
    """The token that A answers with."""
    candidate: str | None = None
    """The token that B answers with."""
    reference_margin: float | None = None
    """Of A's token over B's in A's run, in nats."""
    candidate_margin: float | None = None
    """Of A's token over B's in B's run."""
    reason: Fact | None = None
    """Why it is not told, or no margin is."""
    why: str | None = None
    """The same in words."""


class RunCauses(CauseCounts, frozen=True, kw_only=True):
    """Flips joined to two runs of their prompts."""

    TEXTS: ClassVar[Mapping[str, str]] = {"limit_of": "source", "notes": "remarks"}

    reference: str
    """The reference's run."""
    candidate: str
    num_flips: int
    """All that flipped; those without a prompt in both runs are in no other number."""
    num_not_reproduced: int
    num_not_told: int
    flips: list[RunFlip]
    """Of the prompts that are in both runs."""
    remarks: list[Fact] = []
    """What to know beside them."""
    notes: list[str] = []
    """The same in words."""


class TaskScores(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One task, by one metric, under one filter."""

    TEXTS: ClassVar[Mapping[str, str]] = {"summary": "headline", "notes": "remarks"}

    task: str
    filter: str
    metric: str
    verdict: ScoresVerdict
    headline: list[Fact] = []
    """What the summary tells, in order."""
    summary: str = ""
    """One sentence."""
    higher_is_better: bool = True
    preflight: list[PreflightLine] = []
    pairing: Pairing | None = None
    """None where a side lacks the task."""
    reference: float | None = None
    """The mean score over the paired documents."""
    candidate: float | None = None
    difference: float | None = None
    """Candidate less reference, of paired documents."""
    standard_error: float | None = None
    """Of the difference: paired, clustered."""
    low: float | None = None
    """Lower end of the 95% interval of the difference."""
    high: float | None = None
    bands: list[BandResult] = []
    """The first is the one that the verdict rests on."""
    shown_band: float | None = None
    """The narrowest band, in the score's unit, within which these documents show equality."""
    p_value: float | None = None
    """Of no difference."""
    p_adjusted: float | None = None
    """Holm's, over all tasks and candidates of this report."""
    test: str | None = None
    """mcnemar, permutation or t."""
    smallest_difference: float | None = None
    """The true difference that this test would find in four of five such evaluations; null where
    that is larger than scores such as these can differ."""
    num_gained: int = 0
    """Documents that the candidate scores higher."""
    num_lost: int = 0
    """Documents that the candidate scores lower."""
    graded: bool = False
    """Scores are more than right and wrong of one answer: a document that scores otherwise did not
    flip, it changed."""
    num_changed: int | None = None
    """Documents that were answered differently, right or wrong. None where answers are not known,
    or a document has several."""
    causes: FlipCauses | None = None
    """None without likelihoods of choices, or without flips where margins moved by no more than
    rounding explains."""
    run_causes: RunCauses | None = None
    """None unless runs were named that hold prompts of this task's flips."""
    remarks: list[Fact] = []
    """What to know beside the numbers."""
    notes: list[str] = []
    """The same in words."""


class Candidate(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """One side against the reference."""

    TEXTS: ClassVar[Mapping[str, str]] = {
        "summary": "headline",
        "notes": "remarks",
        "reasons": "failures",
    }

    side: EvaluationSummary
    verdict: ScoresVerdict
    headline: list[Fact] = []
    """What the summary tells, in order."""
    summary: str = ""
    """One task in words, several as counts."""
    tasks: list[TaskScores]
    remarks: list[Fact] = []
    """What to know of both sides."""
    notes: list[str] = []
    """The same in words."""
    passed: bool | None = None
    """Whether the policy is met. None where none was asked."""
    failures: list[Fact] = []
    """Why it is not."""
    reasons: list[str] = []
    """The same in words."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """The run of the flipped prompts."""

    path: str
    num_prompts: int
    documents: list[str]


class ScoresReport(msgspec.Struct, Answer, Worded, frozen=True, kw_only=True):
    """The answer of `scores`."""

    COMMAND: ClassVar[str] = "scores"
    DOCUMENTS: ClassVar[str] = "divergence.domains.scores.show:page_documents"
    TEXTS: ClassVar[Mapping[str, str]] = {"next": "commands"}

    schema_version: int = 1
    tool_version: str
    reference: EvaluationSummary
    candidates: list[Candidate]
    captured: Captured | None = None
    commands: list[Command] = []
    """What goes deeper."""
    next: list[str] = []
    """The same, ready for a shell."""

    def __repr__(self) -> str:
        """``<ScoresReport a: worse, undecided>``"""
        verdicts = ", ".join(candidate.verdict for candidate in self.candidates)
        return f"<ScoresReport {self.reference.path}: {verdicts}>"

    @property
    def verdict(self) -> ScoresVerdict:
        """The verdict of all candidates together: the one that needs a look first."""
        return worst_of([candidate.verdict for candidate in self.candidates])

    @property
    def passed(self) -> bool | None:
        """Say whether every candidate meets the policy. None where none was asked."""
        outcomes = [candidate.passed for candidate in self.candidates]
        return None if None in outcomes else all(outcomes)

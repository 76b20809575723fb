"""The comparison of log-probabilities, as typed data: what the report has under ``logprobs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.result import ReportPart, TokenChoice, VerdictKind
from divergence.facts import Fact, Worded
from divergence.numerics.statistics import Certainty, TwoSample
from divergence.words import Side, SideBothOrNeither

PatternName = Literal[
    "equal",
    "within",
    "everywhere",
    "sequences",
    "places",
    "positions",
    "growing",
    "shifted",
    "few",
    "nothing",
]


class LogprobFlip(msgspec.Struct, frozen=True, kw_only=True):
    """The first token at which two answers to one prompt part, of log-probabilities alone."""

    sample: int
    position: int
    """Index in the sequence, prompt and answer."""
    reference: TokenChoice
    candidate: TokenChoice
    margin: float | None
    """log p of the reference's token minus that of the candidate's, in the reference."""
    candidate_margin: float | None
    """log p of the candidate's token minus that of the reference's, in the candidate."""
    judgement: Literal["tie", "fault"] | None = None
    """``tie``: rounding may flip it; ``fault``: it does not. None where nothing tells, or
    the margin lies between both limits."""


class LogprobSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's Δ = log p(candidate) - log p(reference) of equal tokens, in nats."""

    sample: int
    num_tokens: int
    mean: float
    mean_abs: float
    max_abs: float
    worst_position: int
    log_ratio: float
    """Σ Δ: the logarithm of the answer's importance ratio."""
    probs_diff_mean: float
    """Mean of |p - q|."""
    mult_prob_error: float
    """Mean of exp|Δ|."""


class LogprobDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Δ over all tokens that both sides scored after equal text, in nats."""

    num_tokens: int
    mean: float
    mean_abs: float
    rms: float
    median_abs: float
    p90_abs: float
    p99_abs: float
    max_abs: float
    by_position: list[float] = []
    """Mean |Δ| of tenths of the answers, from their beginning to their end."""


class LogprobDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """KL(reference‖candidate) and total variation over what both sides' top lists hold, means over
    tokens, with bounds for what they do not hold."""

    num_tokens: int
    kl_lower: float
    kl_upper: float | None
    """None where it has no bound: the candidate's probability of some id may be anything."""
    tv_lower: float
    tv_upper: float
    tail: float
    """Mean probability, in the reference, of what is not on both lists."""
    kl_median: float = 0.0
    """Of the lower bounds, token by token; with the next two."""
    kl_p99: float = 0.0
    kl_max: float = 0.0
    same_top: float = 1.0
    """Share of tokens whose likeliest id is the same on both lists."""


class LogprobPerplexity(msgspec.Struct, frozen=True, kw_only=True):
    """The scored tokens as llama.cpp's ``--kl-divergence`` tells them: Δp is the candidate's
    probability of a token less the reference's, as a share of 1; ``ln`` are natural logarithms."""

    num_tokens: int
    delta_p_mean: float
    delta_p_rms: float
    delta_p_p1: float
    delta_p_p99: float
    reference: float
    """exp of the mean of -log p."""
    candidate: float
    ln_ratio: float
    """ln of the candidate's perplexity less that of the reference's."""
    ln_ratio_error: float
    """Its standard error, tokens taken as independent."""
    ln_correlation: float | None
    """Of log p on both sides, token by token; None where one side's is constant."""


class RolloutCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One number by the name and the limit that a framework gives it."""

    name: str
    framework: str
    value: float
    normal: str
    """The framework's own words: ``< 0.005``."""
    state: Literal["normal", "raised", "bad"]


class LogprobLayers(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """Says what two layer-level runs on the same tokens show of Δ log p (``--layers``)."""

    TEXTS: ClassVar[Mapping[str, str]] = {"summary": "headline"}

    num_tokens: int
    """Tokens that both pairs of runs scored."""
    share: float | None
    """1 - Σ(Δ - Δ')² / ΣΔ², Δ' being theirs; 0 at least. None where Δ is 0 everywhere."""
    kind: VerdictKind
    """Of their own comparison."""
    headline: list[Fact] = []
    """What it tells, in order."""
    summary: str = ""
    block: str | None
    side: SideBothOrNeither | None
    reference: str
    candidate: str


class LogprobExpert(msgspec.Struct, frozen=True, kw_only=True):
    """An expert whose tokens differ more than the others."""

    block: str
    expert: int
    num_tokens: int
    """Tokens whose prediction went through it."""
    mean_abs: float
    """Their mean |Δ|."""
    rest_abs: float
    """That of all other tokens."""
    p_value: float
    """That chance gives one such expert, of all."""
    sample: int
    position: int
    """Index in the sequence of the one that differs most."""


class LogprobHypothesis(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """A setting, or a mistake in one number, that makes one side's numbers the other's."""

    TEXTS: ClassVar[Mapping[str, str]] = {"summary": "what"}

    what: Fact
    """With the fitted value."""
    summary: str = ""
    left: float
    """The share of the squared differences that it leaves."""
    mean_abs: float
    """Mean size of the differences that it was fitted to, in nats."""
    rest: float
    """Mean size of what it leaves of them."""


class LogprobsResult(ReportPart, Worded, msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs of which one or both hold log-probabilities alone."""

    TEXTS: ClassVar[Mapping[str, str]] = {"explained_by": "source"}

    num_sequences: int
    num_tokens: int
    """Tokens of both sides' answers that were chosen after equal text."""
    num_equal: int
    num_after: int
    """Tokens behind the first difference of their prompt: another text, not compared."""
    num_other: int
    """Tokens that one side alone scored."""
    num_ended: int = 0
    """Answers that end by themselves on one side, and go on on the other."""
    pattern: PatternName
    """What the differences look like: ``everywhere``: in many prompts or all, in both directions,
    and more than rounding explains; ``sequences``, ``positions``: in some; ``places``: in the same
    tokens of all answers; ``growing``: more the longer the answer; ``shifted``: most in one
    direction; ``few``: too few prompts to tell."""
    explained: float
    """What rounding explains, as a mean of |Δ| in nats."""
    source: Fact | None = None
    """Where that is from: a floor run, or a dtype."""
    explained_by: str = ""
    delta: LogprobDelta | None = None
    divergence: LogprobDivergence | None = None
    perplexity: LogprobPerplexity | None = None
    texts: TwoSample | None = None
    """Of answers that both sides drew. None where they are greedy or given."""
    layers: LogprobLayers | None = None
    expert: LogprobExpert | None = None
    """Where a run tells which experts its tokens were sent to, and one stands out."""
    hypothesis: LogprobHypothesis | None = None
    """Where exactly one explains nearly all of Δ."""
    shift: Certainty | None = None
    first_difference: LogprobFlip | None = None
    """The first at a margin that rounding does not flip; where there is none, the first."""
    num_flips: int = 0
    """Prompts whose answers part."""
    num_ties: int = 0
    """How many of them at a margin that rounding may flip."""
    num_faults: int = 0
    """How many of them at a margin that rounding does not flip. Of the rest nothing tells it."""
    sequences: list[LogprobSequence] = []
    """The ones that differ most first."""
    rollout: dict[str, float] = {}
    """What trainers call this gap, by their names (numerics.logits.rollout_metrics)."""
    rollout_side: Side | None = None
    """The side that sampled the tokens; where neither says so, the reference."""
    checks: list[RolloutCheck] = []
    num_not_likeliest: dict[str, int] = {}
    """By side that claims to choose the likeliest token: how often it did not, by its own list."""
    max_below_likeliest: dict[str, float] = {}
    """By how many nats at most."""

    @property
    def is_told(self) -> bool:
        """Is it told? What nobody tells of a server, or of a file, is no setting that differs."""
        return False

    @property
    def agreement(self) -> tuple[int, int, int] | None:
        """Each answer counts up to its first difference."""
        return self.num_equal, self.num_ties, self.num_tokens

    @property
    def numbers(self) -> Mapping[str, float]:
        """Δ log p, the divergences, and what trainers watch."""
        numbers = dict(self.rollout)
        for part in (self.delta, self.divergence):
            values = {} if part is None else msgspec.structs.asdict(part)
            numbers |= {name: value for name, value in values.items() if isinstance(value, float)}
        return numbers

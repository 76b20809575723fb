"""What a Report says of tokens, as typed data; divergence.comparison.result holds the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from divergence.comparison.results.findings import Onset, VerdictKind
from divergence.facts import Fact, Worded
from divergence.words import Side, SideBothOrNeither

__all__ = [
    "Explanation", "LogprobDelta", "LogprobDivergence", "LogprobExpert", "LogprobFlip",
    "LogprobLayers", "LogprobPerplexity", "LogprobSequence", "LogprobShift", "LogprobTexts",
    "LogprobsResult",
    "RolloutCheck", "TokenChoice", "TokenDifference", "TokensResult",
]  # fmt: skip


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a top-k list."""

    id: int
    text: str | None
    logprob: float
    """In nats."""


class TokenDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token on which the two sides disagree (a flip)."""

    sample: int
    step: int
    reference: TokenChoice
    candidate: TokenChoice
    margin: float | None
    """Logit of the reference's choice minus its runner-up, on the reference."""
    candidate_margin: float | None
    """Logit of the candidate's choice minus its runner-up, on the candidate."""
    truth_choice: TokenChoice | None = None
    """The token that the truth itself chose."""
    truth_margin: float | None = None
    """The truth's logit of the reference's choice minus that of the candidate's choice."""
    z: float | None = None
    """The gap that the flip had to overcome, in standard deviations of the difference of two
    logits. A row's mean error moves nothing and is taken off."""
    z_of: Literal["floor", "model", "difference"] | None = None
    """What the standard deviation is that of:

    * ``floor``: z = |truth_margin| / (√2 · rms of the logit error in this row), of the side nearer
      to the truth (``TokensResult.floor_side``): what rounding moves.
    * ``model``, without a truth: z = the larger of the two sides' gaps between the two tokens, over
      √2 · 2.2 · what all blocks together may add to this row by rounding.
    * ``difference``, without that: z = margin / (√2 · rms of the two sides' own difference in this
      row). A faulty difference makes every flip look small, so this is never judged.
    """
    judgement: Literal["tie", "fault"] | None = None
    """``tie``: rounding may flip it. ``fault``: rounding does not; judged over ``floor`` alone.
    None between the two, or where it was not judged (tokens.flips)."""
    reference_top: list[TokenChoice] = []
    """The reference's top list; of the first flip alone."""
    candidate_top: list[TokenChoice] = []
    """The candidate's top list; of the first flip alone."""
    order_to_onset: Literal["before", "same step", "after"] | None = None
    """Where the first flip lies from the forward of the numeric onset."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How far the error of ``sites`` alone moves the logits that decide one token.

    An experiment on the machine ``device`` (divergence.experiments.explain): one side's run is
    repeated with the other's error added at these sites. Margins are the logit of ``reference``
    minus that of ``candidate``.
    """

    sample: int
    step: int
    differs: bool
    """The two sides chose different tokens here. Otherwise it is the closest decision."""
    sites: list[str]
    flagged: bool
    """The verdict points at the sites. Otherwise they have the largest error."""
    disturbed: Side
    """The side whose run was repeated with the other's error."""
    reference: TokenChoice
    candidate: TokenChoice
    reference_margin: float
    """In the reference."""
    candidate_margin: float
    """In the candidate."""
    baseline_margin: float
    """In the repeated run as it is."""
    injected_margin: float
    """In the repeated run with the error."""
    share: float | None
    """(injected - baseline) / (the other side - the disturbed side). None for 0/0 and x/0."""
    baseline_choice: TokenChoice
    injected_choice: TokenChoice
    flips: bool
    """The error changes the repeated run's choice."""
    num_forwards: int
    """Number of forwards in which the error was added."""
    dtype: str
    device: str


class TokensResult(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of greedy choices, and of the distributions behind them."""

    num_tokens: int
    """Tokens that both sides generated."""
    num_equal: int
    num_reference: int = 0
    """All tokens that the reference generated."""
    num_missing: int = 0
    """How many of ``num_reference`` the candidate did not go on to, although the two texts had not
    parted."""
    num_other_text: int = 0
    """How many of ``num_tokens`` come after a difference."""
    forced: bool
    """The candidate was fed the reference's tokens, so every step is comparable. Otherwise steps
    after the first difference are not."""
    first_difference: TokenDifference | None = None
    differences: list[TokenDifference] = []
    """Every comparable flip, the first included."""
    kl_mean: float | None = None
    """KL(reference‖candidate) of the distributions that decided the comparable tokens, in nats.
    None where no logits were recorded."""
    kl_p99: float | None = None
    """The same, 99th percentile."""
    floor_side: Side | None = None
    """The side that is nearer to the truth. None without a truth."""
    floor_kl_mean: float | None = None
    """KL(truth‖``floor_side``) in nats. None without a truth."""
    floor_kl_p99: float | None = None
    """The same, 99th percentile."""
    kl_ratio: float | None = None
    """The larger of kl_mean / floor_kl_mean and kl_p99 / floor_kl_p99."""
    kl_limit: float | None = None
    """The limit of ``kl_ratio`` (numerics.floor, threshold ``kl``). None where blocks choose
    experts, which rounding may flip."""
    explanation: Explanation | None = None
    """The answer of `compare --explain-token`."""

    def related_to(self, onset: Onset | None) -> TokensResult:
        """With a note whether the first flip lies before, at or after the onset's forward."""
        if self.first_difference is None or onset is None:
            return self
        flip = self.first_difference
        mine, other = (flip.sample, flip.step), (onset.sample, onset.step)
        order = "same step" if mine == other else "before" if mine < other else "after"
        return msgspec.structs.replace(
            self, first_difference=msgspec.structs.replace(flip, order_to_onset=order)
        )


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


class LogprobShift(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the mean of Δ is, over prompts (numerics.resampling)."""

    num_prompts: int
    mean: float
    """Of the prompts' means."""
    low: float | None
    """Lower end of the 99% interval of a paired bootstrap. None where the prompts are too few, as
    the other numbers."""
    high: float | None
    p_value: float | None
    """Of a mean of 0: by changes of sign."""
    smallest_shift: float | None
    """The least shift that so many prompts of such a spread would show."""


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


class LogprobTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Drawn answers of two sides, held together as texts (numerics.two_sample)."""

    num_prompts: int
    num_answers: int
    """Of one side, to all prompts."""
    mmd: float
    """Squared maximum mean discrepancy under the Hamming kernel, unbiased."""
    p_value: float | None
    """Of one distribution, by permutations. None where the answers are too few."""
    smallest_share: float | None
    """The least share of another model's answers that the test would see in four of five draws."""


class LogprobLayers(msgspec.Struct, Worded, frozen=True, kw_only=True):
    """What two layer-level runs on the same tokens show of Δ log p (``--layers``)."""

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
    """The same as one line for people."""
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


class LogprobsResult(msgspec.Struct, Worded, frozen=True, kw_only=True):
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
    pattern: Literal[
        "equal", "within", "everywhere", "sequences", "positions", "growing", "shifted", "few",
        "nothing",
    ]  # fmt: skip
    """What the differences look like: ``everywhere``: in many prompts or all, in both directions,
    and more than rounding explains; ``sequences``, ``positions``: in some; ``growing``: more the
    longer the answer; ``shifted``: most in one direction; ``few``: too few prompts to tell."""
    explained: float
    """What rounding explains, as a mean of |Δ| in nats."""
    source: Fact | None = None
    """Where that is from: a floor run, or a dtype."""
    explained_by: str = ""
    """The same in words."""
    delta: LogprobDelta | None = None
    divergence: LogprobDivergence | None = None
    perplexity: LogprobPerplexity | None = None
    texts: LogprobTexts | None = None
    """Of answers that both sides drew. None where they are greedy or given."""
    layers: LogprobLayers | None = None
    expert: LogprobExpert | None = None
    """Where a run tells which experts its tokens were sent to, and one stands out."""
    shift: LogprobShift | None = None
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
    """What trainers call this gap, by their names (numerics.pairs.rollouts)."""
    rollout_side: Side | None = None
    """The side that sampled the tokens; where neither says so, the reference."""
    checks: list[RolloutCheck] = []
    num_not_likeliest: dict[str, int] = {}
    """By side that claims to choose the likeliest token: how often it did not, by its own list."""
    max_below_likeliest: dict[str, float] = {}
    """By how many nats at most."""

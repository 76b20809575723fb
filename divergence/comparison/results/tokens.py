"""What a Report says of tokens, as typed data; divergence.comparison.result holds the rest."""

from __future__ import annotations

from typing import Literal

import msgspec

from divergence.comparison.results.findings import Onset
from divergence.words import Side

__all__ = ["Explanation", "TokenChoice", "TokenDifference", "TokensResult"]


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a top-k list: log-probability in nats."""

    id: int
    text: str | None
    logprob: float


class TokenDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token on which the two sides disagree.

    ``margin``: logit of the reference's choice minus its runner-up, on the
    reference; ``candidate_margin``: the same on the candidate. ``truth_margin``: the truth's
    logit of the reference's choice minus that of the candidate's; ``truth_choice``: the token
    that the truth itself chose.

    ``z``, ``z_of``: how many standard deviations of the difference of two logits a flip had to
    overcome. ``floor``: |truth_margin| over √2 · rms of the logit error, in this row, of the side
    that is nearer to the truth (``floor_side`` of TokensResult): what rounding moves. Without a
    truth ``model``: the larger of the two sides' gaps between the two tokens over √2 · 2.2 · what
    all blocks together may make of this row by rounding. Without that ``difference``: margin over
    √2 · rms of the two sides' own difference in this row, in units of which a faulty difference
    makes every flip small; never judged. A row's mean error moves nothing and is taken off.
    ``judgement``: ``tie``, which rounding may flip, or, over a floor alone, ``fault``, which it
    does not; None between the two, or not judged (tokens.flips).

    The top lists are given for the first flip alone.
    ``order_to_onset``: where the first flip lies from the forward of the numeric onset.
    """

    sample: int
    step: int
    reference: TokenChoice
    candidate: TokenChoice
    margin: float | None
    candidate_margin: float | None
    truth_choice: TokenChoice | None = None
    truth_margin: float | None = None
    z: float | None = None
    z_of: Literal["floor", "model", "difference"] | None = None
    judgement: Literal["tie", "fault"] | None = None
    reference_top: list[TokenChoice] = []
    candidate_top: list[TokenChoice] = []
    order_to_onset: Literal["before", "same step", "after"] | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How far the error of ``sites`` alone moves the logits that decide one token: an experiment
    on the machine ``device`` (divergence.experiments.explain).

    ``differs``: the two sides chose different tokens there; else it is the closest decision.
    ``flagged``: the verdict points at the sites; else theirs is the largest error.
    ``disturbed``: the side whose run was repeated, with the other's error added in
    ``num_forwards`` forwards. ``*_margin``: logit of ``reference`` minus that of ``candidate``, in
    the two runs, in the repeated run as it is (baseline) and with the error (injected).
    ``share`` = (injected - baseline) / (the other side - the disturbed one); None for 0/0 and
    x/0. ``flips``: the error changes the repeated run's choice.
    """

    sample: int
    step: int
    differs: bool
    sites: list[str]
    flagged: bool
    disturbed: Side
    reference: TokenChoice
    candidate: TokenChoice
    reference_margin: float
    candidate_margin: float
    baseline_margin: float
    injected_margin: float
    share: float | None
    baseline_choice: TokenChoice
    injected_choice: TokenChoice
    flips: bool
    num_forwards: int
    dtype: str
    device: str


class TokensResult(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of greedy choices. ``forced``: the candidate was fed the reference's tokens,
    so that every step is comparable; otherwise steps after the first difference are not.
    ``num_tokens``: that both sides generated, ``num_other_text`` of them after a difference;
    ``num_reference``: all that the reference did; ``num_missing``: of those, how many the candidate
    did not go on to, although nothing had parted the two texts.
    ``differences``: every comparable flip, the first included.

    ``kl_mean``, ``kl_p99``: KL(reference‖candidate) of the distributions that decided the
    comparable tokens, in nats; None where no logits were recorded. With a truth
    ``floor_kl_*``: KL(truth‖``floor_side``), that side being the nearer to the truth;
    ``kl_ratio``: kl_mean over floor_kl_mean, or kl_p99 over floor_kl_p99 where that is the
    larger; ``kl_limit`` what it was held against (numerics.floor, threshold ``kl``;
    None where blocks choose experts, which rounding may flip).
    ``explanation``: of `compare --explain-token`.
    """

    num_tokens: int
    num_equal: int
    num_reference: int = 0
    num_missing: int = 0
    num_other_text: int = 0
    forced: bool
    first_difference: TokenDifference | None = None
    differences: list[TokenDifference] = []
    kl_mean: float | None = None
    kl_p99: float | None = None
    floor_side: Side | None = None
    floor_kl_mean: float | None = None
    floor_kl_p99: float | None = None
    kl_ratio: float | None = None
    kl_limit: float | None = None
    explanation: Explanation | None = None

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

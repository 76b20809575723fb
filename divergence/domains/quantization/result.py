"""The results of quantize(), as typed data. Rendering lives in domains.quantization.show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from divergence.comparison.result import JsonAnswer
from divergence.domains.quantization.scheme import Scheme
from divergence.facts import Fact, Worded


class Cost(msgspec.Struct, kw_only=True, frozen=True):
    """Says what a quantised model's next-token distributions cost, over the tokens of the prompts.

    The names and definitions are those of llama.cpp's ``llama-perplexity --kl-divergence``: p is
    the floating-point model's, q the quantised one's; Δp = q - p of the token that follows. Errors
    (``_error``) are standard errors of means, tokens taken as independent; quantiles are values
    that were seen (numerics.logits.row_costs).
    """

    num_tokens: int
    """Positions with a distribution on both sides."""
    num_following: int
    """Of these, how many have a known next token."""
    kl_mean: float
    """KL(p‖q), nats."""
    kl_error: float
    kl_median: float
    kl_p90: float
    kl_p99: float
    kl_max: float
    same_top: float
    """Share of positions whose likeliest token is the same."""
    same_top_error: float
    delta_p_mean: float | None = None
    """Mean Δp, as a share of 1."""
    delta_p_error: float | None = None
    delta_p_rms: float | None = None
    delta_p_p1: float | None = None
    delta_p_p99: float | None = None
    delta_logprob_mean: float | None = None
    """Mean of |log q - log p| of the token that follows, nats."""
    perplexity_base: float | None = None
    perplexity: float | None = None
    ln_ratio: float | None = None
    """Mean ln(PPL(q) / PPL(p))."""
    ln_ratio_error: float | None = None
    ln_correlation: float | None = None
    """Correlation of ln PPL of the two models, token by token."""


class Outliers(msgspec.Struct, kw_only=True, frozen=True):
    """Says what enters a matrix."""

    max: float
    """The largest |x|."""
    kurtosis: float
    """E[(x - mean)^4] / var^2; 3 for normal numbers."""
    quantile_score: float
    """2 · max|x| / 254 / (Q3 - Q1): the step of a symmetric int8 code, in units of the middle half
    of the numbers (msmodelslim)."""
    range_ratio: float
    """The largest channel's max|x| over the median channel's."""


class MatrixCost(msgspec.Struct, kw_only=True, frozen=True):
    """One matrix quantised alone, everything else in floating point."""

    name: str
    part: str
    """``linear``, ``experts``, ``router``, ``head``, ``embedding``, ``norm``."""
    block: str | None
    by_default: bool
    """Does the scheme quantise it?"""
    num_weights: int
    block_error: float | None
    """Relative L2 error that it adds at its block's output, on the recorded input."""
    floor: float | None
    """That of the model's own dtype there, against float64."""
    cost: Cost
    outliers: Outliers | None = None

    @property
    def times_floor(self) -> float | None:
        """The block's error in units of its rounding."""
        if self.block_error is None or not self.floor:
            return None
        return self.block_error / self.floor


class QuantizationPolicy(msgspec.Struct, kw_only=True, frozen=True):
    """Says what stays in floating point so that a target holds, as measured with it."""

    measure: str
    """``kl``: mean KL, nats; ``logprob``: mean |Δ log p| of the token that follows, nats."""
    target: float
    keep: list[str]
    """Matrices, in order of what each costs alone; those that engines fuse stay together."""
    num_groups: int
    """How many there are where those that engines fuse count as one."""
    num_kept_weights: int
    predicted: float
    """Sum of what the quantised matrices cost alone."""
    measured: float
    """With just these kept."""
    one_fewer: float | None
    """The least measured with one group fewer, which misses the target; None where none is
    kept, or not each was tried."""
    num_runs: int
    """Whole models that were run to find it."""
    cost: Cost


class Quantization(msgspec.Struct, JsonAnswer, Worded, kw_only=True, frozen=True):
    """Result of ``quantize``."""

    TEXTS: ClassVar[Mapping[str, str]] = {"notes": "facts"}

    schema_version: int = 1
    tool_version: str
    run: str
    """The floating-point run."""
    model: str
    dtype: str
    scheme: str
    """Its name."""
    says: str
    """What it does, in words."""
    scheme_as_run: Scheme
    """The same, number by number."""
    num_prompts: int
    num_quantized: int
    kept: list[str]
    """Matrices that stay in floating point."""
    out: str | None
    """The quantised run, where one was written."""
    cost: Cost | None
    """Of the whole model; None where it gives no next-token distributions."""
    unsmoothed: Cost | None = None
    """Of the same scheme without migration."""
    matrices: list[MatrixCost] = []
    """Each alone, in order of execution; empty unless asked for."""
    predicted: float | None = None
    """Sum of what the quantised matrices cost alone, mean KL in nats."""
    policy: QuantizationPolicy | None = None
    facts: list[Fact] = []
    """What else to know."""
    notes: list[str] = []
    next: list[str] = []

    def worst(self) -> list[MatrixCost]:
        """The matrices, costliest first."""
        return sorted(self.matrices, key=lambda matrix: -matrix.cost.kl_mean)

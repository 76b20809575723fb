"""The tokens that follow, by two sides' log-probabilities: Δp and perplexity, in one definition.

As llama.cpp's ``--kl-divergence`` tells them: Δp is the other side's probability of a token less
the first one's, as a share of 1. A quantile is a value that was seen.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

__all__ = ["Following", "following_of", "quantile", "standard_error"]


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """``base`` and ``other``: exp of the mean of -log p. Errors are nan of a single token, and take
    tokens as independent."""

    num_tokens: int
    delta_p_mean: float
    delta_p_error: float
    delta_p_rms: float
    delta_p_p1: float
    delta_p_p99: float
    delta_logprob_mean: float
    """Of |Δ log p|."""
    base: float
    other: float
    ln_ratio: float
    """ln of the other's perplexity less that of the base's."""
    ln_ratio_error: float
    ln_correlation: float | None
    """None where one side's log-probabilities are all the same."""


def following_of(mine: np.ndarray, other: np.ndarray) -> Following | None:
    """Of log-probabilities, one a token; tokens that are not finite on both sides are left out.
    None where there are none."""
    known = np.isfinite(mine) & np.isfinite(other)
    mine, other = mine[known], other[known]
    if not len(mine):
        return None
    delta, ratio = np.exp(other) - np.exp(mine), mine - other
    varies = len(mine) > 1 and mine.std() > 0 and other.std() > 0
    return Following(
        num_tokens=len(mine), delta_p_mean=float(delta.mean()), delta_p_error=standard_error(delta),
        delta_p_rms=math.sqrt(float((delta * delta).mean())),
        delta_p_p1=quantile(delta, 0.01), delta_p_p99=quantile(delta, 0.99),
        delta_logprob_mean=float(np.abs(ratio).mean()),
        base=_exp(-float(mine.mean())), other=_exp(-float(other.mean())),
        ln_ratio=float(ratio.mean()), ln_ratio_error=standard_error(ratio),
        ln_correlation=float(np.corrcoef(mine, other)[0, 1]) if varies else None,
    )  # fmt: skip


def quantile(values: np.ndarray, share: float) -> float:
    """The least value that was seen which so large a share does not pass."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def standard_error(values: np.ndarray) -> float:
    """Of the mean; nan of fewer than two values, or where one is not finite."""
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf

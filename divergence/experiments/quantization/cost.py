"""Rows of two models' logits, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from divergence.experiments.quantization.result import Cost
from divergence.numerics.pairs.logits import RowCosts

__all__ = ["cost_of"]


def cost_of(parts: Sequence[RowCosts]) -> Cost:
    """Over all rows of all prompts. Rows that are not finite on one side make the mean infinite."""
    kl = np.concatenate([part.kl for part in parts])
    kl = np.where(np.isnan(kl), math.inf, kl)
    same = np.concatenate([part.same_top for part in parts])
    mine = np.concatenate([part.logprob_a for part in parts])
    other = np.concatenate([part.logprob_b for part in parts])
    known = np.isfinite(mine) & np.isfinite(other)
    return Cost(
        num_tokens=len(kl), num_following=int(known.sum()),
        kl_mean=float(kl.mean()), kl_error=_error(kl),
        kl_median=_quantile(kl, 0.5), kl_p90=_quantile(kl, 0.9), kl_p99=_quantile(kl, 0.99),
        kl_max=float(kl.max()),
        same_top=float(same.mean()), same_top_error=_error(same.astype(float)),
        **_of_following(mine[known], other[known]),
    )  # fmt: skip


def _of_following(mine: np.ndarray, other: np.ndarray) -> dict[str, float]:
    if not len(mine):
        return {}
    delta = np.exp(other) - np.exp(mine)
    ratio = mine - other  # ln PPL of b less that of a, token by token
    figures = {
        "delta_p_mean": float(delta.mean()), "delta_p_error": _error(delta),
        "delta_p_rms": math.sqrt(float((delta * delta).mean())),
        "delta_p_p1": _quantile(delta, 0.01), "delta_p_p99": _quantile(delta, 0.99),
        "delta_logprob_mean": float(np.abs(ratio).mean()),
        "perplexity_base": math.exp(-float(mine.mean())),
        "perplexity": _exp(-float(other.mean())),
        "ln_ratio": float(ratio.mean()), "ln_ratio_error": _error(ratio),
    }  # fmt: skip
    if len(mine) > 1 and mine.std() > 0 and other.std() > 0:
        figures["ln_correlation"] = float(np.corrcoef(mine, other)[0, 1])
    return figures


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _error(values: np.ndarray) -> float:
    """Standard error of the mean."""
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share, method="inverted_cdf"))

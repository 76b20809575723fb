"""What trainers of reinforcement learning call the gap between rollout and trainer, by its names.

Both gave log-probabilities to the same sampled tokens: l_r the engine that sampled them (rollout),
l_t the trainer. r = exp(l_t - l_r) is the importance ratio of a token, i runs over sequences.

    rollout_probs_diff_mean, _max, _std    |exp l_r - exp l_t|; std with n - 1            verl
    rollout_actor_probs_pearson_corr       of exp l_r and exp l_t                         verl
    k1                                     mean(l_r - l_t), verl's rollout_corr/kl
    k3                                     mean(r - 1 - log r), verl's rollout_corr/k3_kl
    importance_ratio_mean                  mean r, verl's rollout_is_mean
    effective_sample_size                  1 / mean((r / mean r)²), rollout_is_eff_sample_size
    chi2_token                             mean(r²) - 1                                   verl
    chi2_sequence                          mean_i((Π r)²) - 1, verl's chi2_seq
    token_mult_prob_error                  mean exp|l_r - l_t|                            NeMo-RL
    train_rollout_logprob_abs_diff         mean_i of each sequence's mean |l_r - l_t|     slime

Means are over tokens where no index says otherwise. A log ratio is cut at ±20 before exp, as verl
does (SAFETY_BOUND). verl adds 1e-8 to the mean in the effective sample size, and takes its weights
cut at a threshold; here they are not. Sources: verl, trainer/ppo/rollout_corr_helper.py and
utils/debug/metrics.py; NeMo-RL, algorithms/loss_functions.py; slime, backends/*/loss.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["SAFETY_BOUND", "rollout_metrics"]

SAFETY_BOUND = 20.0
PEARSON = "rollout_actor_probs_pearson_corr"


def rollout_metrics(
    rollout: Sequence[np.ndarray], trainer: Sequence[np.ndarray]
) -> dict[str, float]:
    """By name, of finite log-probabilities, one array a sequence. Empty where there is no token;
    the correlation is left out where one side is constant."""
    pairs = [(r_log, t_log) for r_log, t_log in zip(rollout, trainer, strict=True) if len(r_log)]
    if not pairs:
        return {}
    behind, now = (np.concatenate(part).astype(np.float64) for part in zip(*pairs, strict=True))
    log_ratio = now - behind
    cut = np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)
    ratio = np.exp(cut)
    diff = np.abs(np.exp(behind) - np.exp(now))
    sums = np.clip([float((t - r).sum()) for r, t in pairs], -SAFETY_BOUND, SAFETY_BOUND)
    metrics = dict(
        rollout_probs_diff_mean=float(diff.mean()),
        rollout_probs_diff_max=float(diff.max()),
        rollout_probs_diff_std=float(diff.std(ddof=1)) if len(diff) > 1 else 0.0,
        k1=float(-log_ratio.mean()),
        k3=float((np.expm1(cut) - cut).mean()),
        importance_ratio_mean=float(ratio.mean()),
        importance_ratio_max=float(ratio.max()),
        effective_sample_size=float(1 / np.square(ratio / ratio.mean()).mean()),
        chi2_token=float(np.square(ratio).mean() - 1),
        chi2_sequence=float(np.exp(2 * sums).mean() - 1),
        token_mult_prob_error=float(np.exp(np.abs(cut)).mean()),
        train_rollout_logprob_abs_diff=float(np.mean([np.abs(t - r).mean() for r, t in pairs])),
    )
    correlation = _pearson(np.exp(behind), np.exp(now))
    return metrics if correlation is None else metrics | {PEARSON: correlation}


def _pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    x, y = x - x.mean(), y - y.mean()
    whole = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / whole if whole > 0 else None

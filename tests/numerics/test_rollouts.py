"""The gap between rollout and trainer, held to values worked by hand."""

import math

import numpy as np
import pytest

from divergence.numerics.logits import rollout_metrics

HALF, QUARTER, FIFTH, TENTH = (math.log(p) for p in (0.5, 0.25, 0.2, 0.1))


def test_two_sequences_by_hand():
    """p of the rollout: ½, ¼ and ⅕; of the trainer: ¼, ½ and ⅕. r = ½, 2 and 1."""
    found = rollout_metrics(
        [np.array([HALF, QUARTER]), np.array([FIFTH])],
        [np.array([QUARTER, HALF]), np.array([FIFTH])],
    )
    log2 = math.log(2)
    expected = {
        "rollout_probs_diff_mean": 0.5 / 3,
        "rollout_probs_diff_max": 0.25,
        "rollout_probs_diff_std": math.sqrt((2 * (0.25 - 0.5 / 3) ** 2 + (0.5 / 3) ** 2) / 2),
        "k1": 0.0,
        "k3": ((0.5 - 1 + log2) + (2 - 1 - log2) + 0) / 3,
        "importance_ratio_mean": 3.5 / 3,
        "importance_ratio_max": 2.0,
        "effective_sample_size": (3.5 / 3) ** 2 / ((0.25 + 4 + 1) / 3),
        "chi2_token": (0.25 + 4 + 1) / 3 - 1,
        "chi2_sequence": 0.0,  # both sequences' ratios are 1
        "token_mult_prob_error": 5 / 3,
        "train_rollout_logprob_abs_diff": log2 / 2,  # the mean of ln 2 and 0
        "rollout_actor_probs_pearson_corr": _pearson([0.5, 0.25, 0.2], [0.25, 0.5, 0.2]),
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name


def _pearson(x, y):
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def test_one_way():
    """The trainer gives every token a tenth where the rollout gave a fifth: r = ½."""
    found = rollout_metrics([np.full(4, FIFTH)], [np.full(4, TENTH)])
    assert found["k1"] == pytest.approx(math.log(2), abs=1e-9)
    assert found["k3"] == pytest.approx(math.log(2) - 0.5, abs=1e-9)
    assert found["chi2_token"] == pytest.approx(0.25 - 1, abs=1e-9)
    assert found["chi2_sequence"] == pytest.approx(2.0**-8 - 1, abs=1e-9)
    assert found["effective_sample_size"] == pytest.approx(1, abs=1e-9)
    assert found["token_mult_prob_error"] == pytest.approx(2, abs=1e-9)
    assert "rollout_actor_probs_pearson_corr" not in found


def test_ratios_are_cut_as_verl_cuts_them():
    """exp(20) at most, whatever the difference."""
    found = rollout_metrics([np.array([-100.0])], [np.array([-1.0])])
    assert found["importance_ratio_max"] == pytest.approx(math.exp(20))
    assert found["k1"] == pytest.approx(-99)
    assert rollout_metrics([np.empty(0)], [np.empty(0)]) == {}

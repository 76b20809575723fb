"""Δp and perplexity have one definition, whichever command tells them."""

import math

import numpy as np
import pytest

from divergence.domains.quantization.quantize import cost_of
from divergence.numerics.logits import RowCosts
from divergence.numerics.sums import following_of, quantile


def test_a_quantile_is_a_value_that_was_seen():
    """No quantile lies between two values."""
    values = np.array([3.0, 1.0, 2.0, 10.0])
    assert [quantile(values, share) for share in (0.01, 0.5, 0.75, 0.99)] == [1, 2, 3, 10]


def test_what_quantisation_costs_has_the_figures_of_the_tokens_that_follow():
    """Cost and the comparison of tokens compute each figure alike."""
    generator = np.random.default_rng(0)
    mine = -generator.exponential(size=37)
    other = mine + generator.normal(0, 0.3, 37)
    found = following_of(mine, other)
    costs = cost_of(
        [RowCosts(kl=np.zeros(37), same_top=np.ones(37, bool), logprob_a=mine, logprob_b=other)]
    )
    for name in """
        delta_p_mean delta_p_error delta_p_rms delta_p_p1 delta_p_p99 delta_logprob_mean
        ln_ratio ln_ratio_error ln_correlation
    """.split():
        assert getattr(costs, name) == getattr(found, name)
    assert (costs.perplexity_base, costs.perplexity) == (found.base, found.other)
    delta = np.sort(np.exp(other) - np.exp(mine))
    assert (found.delta_p_p1, found.delta_p_p99) == (delta[0], delta[-1])


def test_tokens_that_are_not_finite_are_left_out():
    """Of none that is finite there are no figures."""
    mine, other = np.array([-1.0, math.nan, -2.0]), np.array([-1.0, -1.0, -math.inf])
    found = following_of(mine, other)
    assert found.num_tokens == 1 and math.isnan(found.ln_ratio_error)
    assert found.ln_correlation is None and found.base == pytest.approx(math.e)
    assert following_of(mine[1:], other[1:]) is None

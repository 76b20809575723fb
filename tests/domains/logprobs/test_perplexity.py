"""Δp and perplexity by their definitions."""

import math

import numpy as np
import pytest


def test_delta_p_and_perplexity_are_those_of_the_tokens(pair):
    """Each figure is that of numpy over the same tokens."""
    seen = []

    def change(sequence, place, value, noise):
        seen.append((value, min(0.0, value + noise.gauss(0, 0.2))))
        return seen[-1][1]

    found = pair(change, num=6, length=40).logprobs.perplexity
    one, two = np.array(seen, np.float32).astype(float).T
    delta = np.exp(two) - np.exp(one)
    assert found.num_tokens == len(seen)
    near = {"rel": 1e-5, "abs": 1e-7}
    assert found.delta_p_mean == pytest.approx(delta.mean(), **near)
    assert found.delta_p_rms == pytest.approx(math.sqrt((delta**2).mean()), **near)
    assert found.reference == pytest.approx(math.exp(-one.mean()), **near)
    assert found.candidate == pytest.approx(math.exp(-two.mean()), **near)
    assert found.ln_ratio == pytest.approx((one - two).mean(), **near)
    assert found.ln_correlation == pytest.approx(np.corrcoef(one, two)[0, 1], **near)
    error = (one - two).std(ddof=1) / math.sqrt(len(one))
    assert found.ln_ratio_error == pytest.approx(error, **near)

"""Bounds of KL and total variation over truncated lists."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence.numerics.logits import divergence_bounds


def listed(p, count):
    order = np.argsort(-p, kind="stable")[:count]
    return order, np.log(p[order])


def test_by_hand():
    """Both know ids 0 and 1: p = ½, ¼ and a tail of ¼; q = ¼, ½ and the same tail."""
    ids = np.array([0, 1])
    found = divergence_bounds(ids, np.log([0.5, 0.25]), ids, np.log([0.25, 0.5]))
    assert found.kl_lower == pytest.approx(0.25 * math.log(2), abs=1e-12)
    assert math.isinf(found.kl_upper)
    assert (found.tv_lower, found.tv_upper) == pytest.approx((0.25, 0.5))


def test_nothing_in_common():
    """Two lists without a common token bound nothing; nor does nan."""
    assert (
        divergence_bounds(np.array([0]), np.array([-1.0]), np.array([1]), np.array([-1.0])) is None
    )
    ids = np.array([0])
    assert divergence_bounds(ids, np.array([math.nan]), ids, np.array([-1.0])) is None


@given(st.integers(0, 10_000), st.integers(3, 40), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=200)
def test_the_true_value_lies_between(seed, size, one, two):
    """Whatever is cut off; with q known whole there is an upper bound that holds."""
    generator = np.random.default_rng(seed)
    p, q = (np.exp(generator.normal(0, 2, size)) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    kl, tv = float((p * np.log(p / q)).sum()), 0.5 * float(np.abs(p - q).sum())
    for count in (min(two, size), size):
        found = divergence_bounds(*listed(p, min(one, size)), *listed(q, count))
        if found is None:
            continue
        assert found.kl_lower <= kl + 1e-9 <= found.kl_upper + 1e-6
        assert found.tv_lower - 1e-9 <= tv <= found.tv_upper + 1e-9
        if count == size:
            assert math.isfinite(found.kl_upper)

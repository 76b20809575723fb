"""How sure a mean over prompts is."""

import numpy as np
import pytest

from divergence.numerics.statistics import certainty_of, least_share, rank_sum


def test_too_few_prompts_give_no_number():
    """Never a p value that so few could not carry."""
    found = certainty_of(np.ones(7))
    assert found.mean == 1 and found.p_value is None and found.low is None
    assert not found.excludes_zero


def test_few_prompts_by_all_changes_of_sign():
    """Eight equal ones: two of 256 changes of sign give as large a mean."""
    found = certainty_of(np.ones(8))
    assert found.p_value == 2 / 256 and found.excludes_zero
    assert (found.low, found.high, found.smallest_shift) == (1, 1, 0)


def test_healthy_pairs_are_seldom_taken_for_a_shift():
    """Of 120 sets of 16 prompts without a shift some 1% claim one."""
    generator = np.random.default_rng(1)
    claims = sum(certainty_of(generator.normal(size=16)).excludes_zero for _ in range(120))
    assert claims <= 5


@pytest.mark.slow
def test_the_smallest_shift_is_seen_four_times_in_five():
    """At the size that is said to be seen, it is."""
    generator = np.random.default_rng(2)
    size = certainty_of(generator.normal(size=64)).smallest_shift
    seen = sum(certainty_of(generator.normal(size, 1, 64)).excludes_zero for _ in range(60))
    assert 38 <= seen <= 58
    assert size == pytest.approx(3.4 / 8, rel=0.3)


@pytest.mark.parametrize(
    ("num", "of", "expected"),
    [(12, 12, 0.01 ** (1 / 12)), (5, 10, 0.1504428), (900, 1000, 0.8758142), (0, 9, 0.0)],
)
def test_the_least_share_is_clopper_and_pearsons(num, of, expected):
    """The quantile of 1% of the beta distribution with num and of - num + 1 (by scipy)."""
    assert least_share(num, of) == pytest.approx(expected, abs=1e-6)


def test_ranks_share_ties():
    """Mann and Whitney's normal approximation, corrected for ties (by scipy)."""
    values = np.array([1, 2, 2, 3, 5, 8, 13, 2.0])
    there = np.array([0, 0, 1, 0, 1, 1, 1, 0], bool)
    assert rank_sum(values, there) == pytest.approx(1.7748239, abs=1e-6)
    assert rank_sum(values, np.zeros(8, bool)) == 0

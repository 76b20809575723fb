"""McNemar, changes of sign and Holm, against scipy, statsmodels and worked examples."""

import itertools

import numpy as np
import pytest
from scipy import optimize, stats

from divergence.domains.scores.statistics import (
    MOST_SIGNS,
    documents_needed,
    holm,
    mcnemar,
    score_interval,
    sign_test,
    smallest_difference,
)


@pytest.mark.parametrize(("lost", "gained"), [(7, 1), (0, 6), (30, 12), (5, 5), (0, 0), (150, 90)])
def test_mcnemar(lost, gained):
    """The exact test of statsmodels; 1 where nothing flipped."""
    from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

    table = [[100, lost], [gained, 50]]
    expected = statsmodels_mcnemar(table, exact=True).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(min(1.0, expected))


def test_mcnemar_by_hand():
    """2 (C(8,0) + C(8,1)) / 2^8 = 18 / 256."""
    assert mcnemar(7, 1) == pytest.approx(18 / 256)


def test_the_score_interval_of_a_worked_example():
    """7 lost, 1 gained of 21: -0.517 to -0.026 (Fagerland, Lydersen and Laake 2014)."""
    low, high = score_interval(7, 1, 21, 0.95)
    assert (float(low), float(high)) == (
        pytest.approx(-0.517, abs=5e-4),
        pytest.approx(-0.026, abs=5e-4),
    )


def test_the_score_interval_where_nothing_flipped():
    """z² / (n + z²) to either side."""
    z2 = stats.norm.ppf(0.975) ** 2
    low, high = score_interval(0, 0, 50, 0.95)
    assert (float(low), float(high)) == pytest.approx((-z2 / (50 + z2), z2 / (50 + z2)), abs=1e-6)


@pytest.mark.parametrize(("lost", "gained", "num"), [(3, 9, 40), (20, 2, 200), (1, 0, 50)])
def test_the_ends_of_the_score_interval_are_where_its_test_rejects(lost, gained, num):
    """With the difference given, the likelihood is largest at some q; z there is ±1.96."""
    for end, sign in zip(score_interval(lost, gained, num, 0.95), (1, -1), strict=True):
        difference = float(end)

        def loss(q, difference=difference):
            same = 1 - 2 * q - difference
            chances = np.maximum([q, q + difference, same], 1e-300)
            return -np.dot([lost, gained, num - lost - gained], np.log(chances))

        bounds = (max(0.0, -difference), (1 - difference) / 2)
        q = optimize.minimize_scalar(
            loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}
        ).x
        error = np.sqrt(num * (2 * q + difference - difference**2))
        z = (gained - lost - num * difference) / error
        assert z == pytest.approx(sign * stats.norm.ppf(0.975), abs=1e-3)


def test_the_score_interval_mirrors():
    """Reference and candidate exchanged."""
    low, high = score_interval(np.array([7, 4]), np.array([1, 4]), 30, 0.9)
    other_low, other_high = score_interval(np.array([1, 4]), np.array([7, 4]), 30, 0.9)
    assert low == pytest.approx(-other_high)
    assert high == pytest.approx(-other_low)


def test_all_changes_of_sign():
    """Few clusters that differ: every change of sign, those that do not differ left out."""
    sums = np.array([0.5, -0.25, 1.0, 0.75, 0.0, 0.0])
    changed = sums[sums != 0]
    signs = np.array(list(itertools.product((-1, 1), repeat=4)))
    every = np.abs((signs * changed).sum(axis=1))
    p, name = sign_test(sums, np.ones(6))
    assert (p, name) == (pytest.approx((every >= changed.sum() - 1e-12).mean()), "permutation")


def test_signs_of_binary_scores_are_mcnemar():
    """One document a cluster, differences of 1: the same test."""
    sums = np.array([-1.0] * 7 + [1.0] + [0.0] * 13)
    assert sign_test(sums, np.ones(21))[0] == pytest.approx(mcnemar(7, 1))


@pytest.mark.slow
def test_many_signs_are_drawn_and_then_t():
    """Draws agree with t where both hold; above MOST_SIGNS t is taken."""
    values = np.random.default_rng(0).normal(0.06, 1, MOST_SIGNS)
    drawn, name = sign_test(values, np.ones(len(values)))
    assert name == "permutation"
    assert drawn == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    more = np.append(values, 0.5)
    p, name = sign_test(more, np.ones(len(more)))
    assert (p, name) == (pytest.approx(stats.ttest_1samp(more, 0).pvalue), "t")
    assert sign_test(np.zeros(5), np.ones(5)) == (1.0, "permutation")


@pytest.mark.parametrize("values", [[0.01, 0.04, 0.03, 0.005], [0.5], [], [1.0, 1.0, 0.02]])
def test_holm(values):
    """statsmodels' adjusted values."""
    from statsmodels.stats.multitest import multipletests

    expected = list(multipletests(values, method="holm")[1]) if values else []
    assert holm(values) == pytest.approx(expected)


def test_the_smallest_difference_is_that_of_a_t_test():
    """Its power, by the noncentral t distribution, is 80%."""
    freedom, error = 400.0, 0.01
    effect = smallest_difference(error, freedom) / error
    critical = stats.t.ppf(0.975, freedom)
    assert stats.nct.sf(critical, freedom, effect) == pytest.approx(0.8, abs=0.002)


def test_documents_needed():
    """Without a difference TOST has its power there: (z.95 + z.90)² (spread / band)²."""
    expected = (stats.norm.ppf(0.95) + stats.norm.ppf(0.9)) ** 2 * (0.2 / 0.01) ** 2
    found = documents_needed(0.2, 0.0, difference=0.0, band=0.01, num=100)
    assert found == pytest.approx(expected, abs=1)
    # enough of them, and the difference is near the edge: more are needed, never fewer
    edge = documents_needed(0.2, 0.0, difference=0.009, band=0.01, num=10_000)
    room = (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) ** 2 * (0.2 / 0.001) ** 2
    assert edge == pytest.approx(room, abs=1)
    assert documents_needed(0.2, 0.0, difference=0.02, band=0.01, num=10_000) == 10_001
    assert documents_needed(0.2, 1.0, difference=0.0, band=0.0, num=10) is None
    # made-up documents weigh less among more: no flip of 50 needs some hundred
    assert 90 < documents_needed(0.0, 1.0, difference=0.0, band=0.03, num=50) < 200

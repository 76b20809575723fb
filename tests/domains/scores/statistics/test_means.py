"""Clustered means, intervals and equivalence, against scipy, statsmodels and worked examples."""

import numpy as np
import pytest
from scipy import stats

from divergence.domains.scores.statistics import (
    Padding,
    cluster_sums,
    equivalence_p,
    interval,
    lopsided,
    mean_of,
    padding,
)


def test_without_clusters_it_is_the_paired_t_test():
    """The same error, degrees of freedom and interval as scipy's."""
    values = np.random.default_rng(0).normal(0.1, 1, 60)
    found = mean_of(*cluster_sums(values, None))
    expected = stats.ttest_1samp(values, 0)
    assert found.error == pytest.approx(stats.sem(values))
    assert found.freedom == pytest.approx(59)
    assert interval(found, 0.95) == pytest.approx(tuple(expected.confidence_interval(0.95)))


@pytest.mark.slow
def test_equal_clusters_are_statsmodels_cluster_robust_error():
    """With its correction G / (G - 1), which is what CR2 is for clusters of one size."""
    import statsmodels.api as sm  # with pandas, which every collection would wait for

    generator = np.random.default_rng(1)
    clusters = np.repeat(np.arange(30), 6)
    values = generator.normal(size=180) + generator.normal(size=30)[clusters]
    found = mean_of(*cluster_sums(values, clusters))
    fitted = sm.OLS(values, np.ones(180)).fit(
        cov_type="cluster", cov_kwds={"groups": clusters, "use_correction": True}
    )
    assert found.error == pytest.approx(fitted.bse[0])
    assert found.freedom == pytest.approx(29)


def test_unequal_clusters_by_hand():
    """CR2 and its degrees of freedom from the matrices that define them."""
    generator = np.random.default_rng(2)
    clusters = np.repeat(np.arange(5), [1, 2, 3, 5, 9])
    values = generator.normal(size=20)
    found = mean_of(*cluster_sums(values, clusters))
    n, ones = 20, np.ones((20, 1))
    residual_maker = np.eye(n) - ones @ ones.T / n
    residuals = residual_maker @ values
    total, parts = 0.0, []
    for number in range(5):
        here = np.flatnonzero(clusters == number)
        block = residual_maker[np.ix_(here, here)]
        lengths, vectors = np.linalg.eigh(block)
        root = vectors @ np.diag(lengths**-0.5) @ vectors.T
        total += (np.ones(len(here)) @ root @ residuals[here]) ** 2 / n**2
        parts.append(residual_maker[here].T @ root @ np.ones(len(here)) / n)
    gram = np.array(parts) @ np.array(parts).T
    assert found.error == pytest.approx(total**0.5)
    assert found.freedom == pytest.approx(np.trace(gram) ** 2 / (gram**2).sum())


def test_the_padded_interval_is_bonett_and_prices():
    """Airway hyper-responsiveness (Fagerland 2014, table 2): 1 and 7 of 21 discordant."""
    values = np.array([1.0] + [-1.0] * 7 + [0.0] * 13)
    sums, sizes = cluster_sums(values, None)
    found = mean_of(sums, sizes, pad=padding(sums, sizes, 1.0))
    # the variance by n instead of n - 1, and z in place of t, as they define it
    error = float(found.error) * (22 / 23) ** 0.5
    z = stats.norm.ppf(0.975)
    assert float(found.mean) - z * error == pytest.approx(-0.508, abs=5e-4)
    assert float(found.mean) + z * error == pytest.approx(-0.013, abs=5e-4)


def test_no_flip_at_all_is_no_certainty():
    """The interval has a width, which falls with n."""
    widths = []
    for num in (50, 500, 5000):
        sums, sizes = cluster_sums(np.zeros(num), None)
        low, high = interval(mean_of(sums, sizes, pad=padding(sums, sizes, 1.0)), 0.95)
        assert low == -high
        widths.append(high)
    assert widths[0] > 0.05 and widths[2] < 0.001 < widths[0] / 50


def test_equivalence_is_scipys_one_sided_tests():
    """An absolute band without padding: the larger p of two t tests."""
    values = np.random.default_rng(3).normal(0.002, 0.1, 300)
    sums, sizes = cluster_sums(values, None)
    p = equivalence_p(sums, sizes, 0.02 * sizes, pad=None)
    above = stats.ttest_1samp(values, -0.02, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.02, alternative="less").pvalue
    assert p == pytest.approx(max(above, below))


def test_a_relative_band_knows_the_references_error():
    """The same as testing candidate - 0.97 reference and 1.03 reference - candidate."""
    generator = np.random.default_rng(4)
    a = generator.integers(0, 2, 2000).astype(float)
    b = np.where(generator.random(2000) < 0.01, 1 - a, a)
    sums, sizes = cluster_sums(b - a, None)
    p = equivalence_p(sums, sizes, 0.03 * a, pad=None)
    above = stats.ttest_1samp(b - 0.97 * a, 0, alternative="greater").pvalue
    below = stats.ttest_1samp(1.03 * a - b, 0, alternative="greater").pvalue
    assert p == pytest.approx(max(above, below))


def test_few_identical_documents_show_no_equality():
    """Ten documents without a flip do not fit into 3%; ten thousand do."""
    for num, equal in ((10, False), (10_000, True)):
        sums, sizes = cluster_sums(np.zeros(num), None)
        p = equivalence_p(sums, sizes, 0.03 * sizes, pad=padding(sums, sizes, 1.0))
        assert (p <= 0.05) is np.bool_(equal)


def test_one_cluster_tells_nothing():
    """Its own error is not known, and with the padding the interval is wide."""
    sums, sizes = cluster_sums(np.array([0.0, 1.0, 0.0]), np.zeros(3, dtype=int))
    assert np.isnan(mean_of(sums, sizes).error)
    low, high = interval(mean_of(sums, sizes, pad=padding(sums, sizes, 1.0)), 0.95)
    assert low < -0.5 and high > 0.5


def test_many_data_sets_at_once():
    """Leading axes are separate data sets."""
    sums = np.random.default_rng(5).normal(size=(3, 40))
    sizes = np.ones(40)
    pad = padding(sums, sizes, 1.0)
    together = mean_of(sums, sizes, pad=pad)
    alone = [
        mean_of(row, sizes, pad=Padding(far, weight)).error
        for row, far, weight in zip(sums, *pad, strict=True)
    ]
    assert together.error == pytest.approx(np.array(alone))


def test_the_interval_by_halls_transformation():
    """Worked by hand for two of ten clusters that lost one; documents alone have none of it."""
    sums, sizes = np.array([-1.0, -1.0] + [0.0] * 8), np.full(10, 2.0)
    pad = padding(sums, sizes, 1.0)
    found = mean_of(sums, sizes, pad=pad)
    left = np.array([-1.0, -1.0] + [0.0] * 8 + [-1.0, 1.0]) + 1 / 6  # the pads lie around 0
    alone = mean_of(sums, np.ones(10), pad=pad)
    assert alone.skew == 0 and np.ptp(np.abs(interval(alone, 0.95) - alone.mean)) < 1e-12
    skew = (left**3).mean() / (left**2).mean() ** 1.5
    a = skew / (3 * 12**0.5)
    assert pad == (1.0, 1.0) and found.mean == pytest.approx(-1 / 12)
    assert found.skew == pytest.approx(a) and a < 0
    for end, t in zip(interval(found, 0.95), (1, -1), strict=True):
        value = (found.mean - end) / found.error
        transformed = value + a * value**2 + a**2 * value**3 / 3 + a / 2
        assert transformed == pytest.approx(t * stats.t.ppf(0.975, found.freedom))


def test_equivalence_and_the_interval_agree():
    """Equal within a band exactly where the 90% interval lies in it."""
    sums, sizes = np.array([-3.0, -1.0, -1.0, 1.0, 2.0] + [0.0] * 95), np.full(100, 5.0)
    pad = padding(sums, sizes, 1.0)
    low, high = interval(mean_of(sums, sizes, pad=pad), 0.9)
    edge = max(-low, high)
    for band, equal in ((1.001 * edge, True), (0.999 * edge, False)):
        assert (equivalence_p(sums, sizes, band * sizes, pad=pad) <= 0.05) == equal


def test_the_made_up_clusters_weigh_what_makes_the_variance():
    """Sums of 3 and 1: ⁴√((81 + 1) / 2); binary documents keep 1, and none is the worst."""
    assert padding(np.array([3.0, 1.0, 0.0]), np.ones(3), 1.0).far == pytest.approx(41**0.25)
    assert padding(np.array([-1.0, 1.0, 0.0, 0.0]), np.ones(4), 1.0).far == 1.0
    assert padding(np.zeros(4), np.full(4, 5.0), 1.0).far == 5.0


@pytest.mark.parametrize(
    ("sums", "few"),
    [
        ([-1, -2, 0, 0], True),
        ([-1] * 8 + [1] * 2, True),
        ([-1] * 7 + [1] * 3, False),
        ([0, 0], False),
        ([-1] * 30, False),
        ([5] + [0] * 99, True),
    ],
)
def test_few_clusters_in_one_direction(sums, few):
    """Named, since their interval may be too narrow."""
    assert lopsided(np.array(sums, dtype=float)) == few


def test_made_up_clusters_fade_where_most_clusters_differ():
    """3/2 (1 - k / (G - 1)), at least 1/G; of documents alone they stay."""
    sizes = np.full(10, 5.0)
    for changed, weight in ((0, 1.0), (3, 1.0), (6, 0.5), (8, 1 / 6), (9, 0.1), (10, 0.1)):
        sums = np.array([2.0] * changed + [0.0] * (10 - changed))
        assert padding(sums, sizes, 1.0).weight == pytest.approx(weight)
    assert padding(np.ones(10), np.ones(10), 1.0).weight == 1.0


def test_a_faded_cluster_counts_by_its_weight():
    """Nine of ten clusters differ: what the made-up ones add, by hand."""
    sums, sizes = np.array([1.0, -1.0] * 4 + [1.0, 0.0]), np.full(10, 5.0)
    found = mean_of(sums, sizes, pad=padding(sums, sizes, 1.0))
    total = 50 + 2 * 5 * 0.1**0.5
    mean = 1 / total
    small = 5 * 0.1**0.5
    squares = ((sums - 5 * mean) ** 2).sum() / (1 - 5 / total)
    made_up = sum((side * 0.1**0.5 - small * mean) ** 2 for side in (1, -1)) / (1 - small / total)
    assert found.mean == pytest.approx(mean)
    assert found.error == pytest.approx((squares + made_up) ** 0.5 / total)


def test_all_clusters_alike_is_no_certainty():
    """Ten clusters that each lost one: the interval still has a width."""
    sums, sizes = np.full(10, -1.0), np.full(10, 5.0)
    low, high = interval(mean_of(sums, sizes, pad=padding(sums, sizes, 1.0)), 0.95)
    assert low < -0.2 < high and high - low > 0.05

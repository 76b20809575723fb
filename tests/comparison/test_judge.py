"""The judge's outlier question, on tables of its own null and with faults planted in them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from divergence.comparison.judge import farthest, in_step, limit_of, observed, outliers, reach
from divergence.numerics.floor import THRESHOLDS


def drawn(seed: int, members: int, rows: int, numbers: int) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors of rounding alone, (2, M, R), each made of ``numbers`` normal ones."""
    random = np.random.default_rng(seed)
    squares = np.square(random.standard_normal((2, members, rows, numbers)))
    energy = squares.sum(axis=-1)
    return energy, np.square(energy) / np.square(squares).sum(axis=-1)


@pytest.mark.parametrize("numbers", [1, 2, 3, 8, 64, 1000])
def test_rounding_is_beyond_the_reach_as_rarely_as_a_normal_number(numbers):
    """log of the ratio of two sums of n squares: as often beyond the reach of 1, 2 and 3 as a
    normal number is beyond these, or less often."""
    random = np.random.default_rng(numbers)
    top, bottom = random.chisquare(numbers, (2, 400_000))
    size = np.abs(0.5 * np.log(top / bottom))
    for limit in (1.0, 2.0, 3.0):
        chance = math.erfc(limit / math.sqrt(2))
        far = reach(limit, np.array([1 / numbers + 1 / numbers**2]))
        assert 0.25 * chance < (size > far).mean() < 1.25 * chance


def beyond(table) -> np.ndarray:
    return np.abs(table.x - table.control) > table.reach


@pytest.mark.parametrize("numbers", [1, 4, 64])
def test_rounding_alone_is_no_outlier(numbers):
    """A hundred tables of eight blocks and forty rows: no cell and no column."""
    for seed in range(100):
        energy, count = drawn(seed, 8, 40, numbers)
        table = outliers(*observed(energy, count, 0.0), 0.2, limit_of(8 * 40))
        assert not beyond(table).any()
        assert not (np.abs(table.column) > table.column_reach).any()


def test_a_cell_a_member_and_a_column_are_told_apart():
    """One row of one block; one block; one row of all blocks: each is found where it is."""
    groups = np.zeros(40, np.intp)
    energy, count = drawn(1, 8, 40, 128)
    cell, member, column = (energy.copy() for _ in range(3))
    cell[1, 3, 7] *= 100
    member[1, 3] *= 4
    column[0, :, 7] *= 100

    table = outliers(*observed(cell, count, 0.0), 0.2, limit_of(320))
    assert np.argwhere(beyond(table)).tolist() == [[3, 7]]
    table = outliers(*observed(member, count, 0.0, groups), 0.08, limit_of(8))
    assert np.argwhere(beyond(table)).tolist() == [[3, 0]]
    table = outliers(*observed(column, count, 0.0), 0.2, limit_of(320))
    assert np.flatnonzero(np.abs(table.column) > table.column_reach).tolist() == [7]
    assert table.column[7] < 0
    assert not beyond(table).any()


def test_one_number_convicts_nobody():
    """An error that one channel holds is one number: a hundred times the other side's is chance."""
    energy, count = drawn(2, 8, 40, 128)
    energy[1, 3, 7], count[1, 3, 7] = 1e4 * energy[0, 3, 7], 1.0
    count[0, 3, 7] = 1.0
    assert not beyond(outliers(*observed(energy, count, 0.0), 0.2, limit_of(320))).any()


def test_the_typical_row_is_not_moved_by_a_few():
    """Rows that rightly went another way move the mean energy, and no median."""
    groups = np.zeros(40, np.intp)
    energy, count = drawn(3, 8, 40, 128)
    energy[1, 3, :5] *= 1e4
    pooled, typical = (
        outliers(*observed(energy, count, 0.0, groups, typical=way), 0.08, limit_of(8))
        for way in (False, True)
    )
    assert beyond(pooled).any()
    assert not beyond(typical).any()


def test_two_tiny_errors_make_no_large_ratio():
    """Both sides at a thousandth of the floor, one of them at a millionth."""
    energy, count = drawn(4, 8, 40, 128)
    energy *= 1e-8
    energy[0, 3] *= 1e-6
    table = outliers(*observed(energy, count, 0.05), 0.2, limit_of(320))
    assert not beyond(table).any()


def test_what_is_missing_and_what_is_infinite():
    """A cell without an observation is none; an infinite error is beyond every reach."""
    energy, count = drawn(5, 8, 40, 128)
    energy[:, 2, 5] = math.nan
    energy[1, 4, 9] = math.inf
    table = outliers(*observed(energy, count, 0.05), 0.2, limit_of(320))
    assert np.argwhere(beyond(table)).tolist() == [[4, 9]]


def test_the_figures_of_the_documents():
    """What docs/verdicts.md says of the limits: of 12 sites, of 10,000 rows, of one number."""
    few, many = limit_of(12), limit_of(10_000)
    assert (round(few, 1), round(many, 1)) == (4.7, 6.0)
    assert np.exp(reach(few, np.array([0.08**2])))[0] == pytest.approx(1.5, abs=0.05)
    row = 1 / 64 + 1 / 64**2 + 0.2**2
    assert np.exp(reach(many, np.array([row])))[0] == pytest.approx(5.1, abs=0.05)
    assert reach(5.0, np.array([2.0]))[0] > np.log(1e4)


def test_the_limits_that_the_documents_state():
    """docs/operator-numerics.md: of one row among 20,000."""
    page = Path(__file__).parents[2] / "docs" / "operator-numerics.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    far = [float(farthest(20_000, number, THRESHOLDS.lone_spread)) for number in (64, 1000)]
    assert f"beyond its limit at {far[0]:.1f} times" in text
    assert f"one of 1,000 at {far[1]:.1f}." in text


def test_errors_of_one_direction_are_one_number():
    """And errors that share no direction keep theirs, however large one of them is."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 40, 64))
    b[0] = -0.1 * a[0]  # chance made it small on one side
    b[1] *= 20  # a fault
    energy = np.square(np.stack([a, b])).sum(2)
    between = np.square(a - b).sum(1)
    share = in_step(energy, between, np.full((2, 40), 64.0))
    assert share[:, 0].min() > 0.99 and share[:, 1].max() < 0.1
    assert np.median(share) == 0


def test_faults_of_both_sides_do_not_excuse_each_other():
    """Half are apart; those that are equal bit for bit show that the same kernels ran."""
    x = np.log([[1 / 7], [1 / 7], [1], [1], [1], [7]])
    table = outliers(x, np.where(x == 0, 0.0, 0.001), 0.08, limit_of(12))
    apart = np.abs(table.x - table.control) > table.reach
    assert apart[:, 0].tolist() == [True, True, False, False, False, True]


def test_where_nothing_differs_elsewhere_a_difference_has_a_limit():
    """Without a truth: effects of rows and columns may add up to less than no difference makes."""
    ratios = np.array([[7.0, 5.9, 0.0, 6.5], [4.4, 0.0, 0.0, 7.4], [0.0, 0.0, 0.0, 0.0]])
    energy = np.stack([np.ones_like(ratios), np.square(ratios)])
    numbers = np.full_like(energy, 1e12)
    table = outliers(*observed(energy, numbers, 0.5), 0.2, limit_of(12))
    far, _ = replace(table, one_sided=True).standing_out(2, np.ones(4), 0.5)
    assert (far > 0.5**2).all()

"""Whose error it is: the farther side's, being larger than in its other blocks, or the nearer
side's, being smaller."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from divergence.analyses.blocks.sides import _odds_of_own
from divergence.comparison.judge import limit_of, outliers
from divergence.comparison.limits import SURE
from divergence.numerics.floor import THRESHOLDS


def odds(a, b):
    """Of members whose two errors are so many floors."""
    errors = [
        SimpleNamespace(energy=np.square([[x] * 8, [y] * 8])) for x, y in zip(a, b, strict=True)
    ]
    x = np.log(np.array(b) / np.array(a))[:, None]
    table = outliers(x, np.where(x == 0, 0.0, 0.001), 0.01, limit_of(12))
    return _odds_of_own(table, errors, 0.0, False, THRESHOLDS)


@pytest.mark.parametrize("size", [1.4, 2.0, 10.0])
def test_an_error_of_its_own_is_likelier(size):
    assert odds([1, 1, 1, 1, 1, 1], [1, 1, size, 1, 1, 1])[2] > 1


def test_a_side_that_is_better_in_one_block_accuses_nobody():
    assert odds([1, 1, 1, 1, 1, 1], [1, 1, 0.4, 1, 1, 1])[2] < -SURE


def test_an_easy_block_excuses_no_error():
    """Both are smaller than in other blocks, and one is three times the other."""
    assert odds([1, 1, 0.15, 1, 1, 1], [1, 1, 0.5, 1, 1, 1])[2] == 0


def test_faults_of_both_sides_do_not_excuse_each_other():
    """Half are apart; those that are equal bit for bit show that the same kernels ran."""
    x = np.log([[1 / 7], [1 / 7], [1], [1], [1], [7]])
    table = outliers(x, np.where(x == 0, 0.0, 0.001), 0.08, limit_of(12))
    apart = np.abs(table.x - table.control) > table.reach

    assert apart[:, 0].tolist() == [True, True, False, False, False, True]

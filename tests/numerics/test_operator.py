"""One operator against what is right: errors, floors, masks and slices, worked by hand."""

import math

import pytest
import torch

from divergence.numerics.floor import rare_ratio
from divergence.numerics.operator import measure_operator, slices_of, sum_rounding


def rows(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def test_hand_worked():
    """One row (3, 4) of norm 5: the reference is off by (0, 1), the candidate by (3, 4)."""
    truth = rows([3.0, 4.0], dtype=torch.float64)
    found = measure_operator(rows([3.0, 5.0]), rows([6.0, 8.0]), truth)
    assert found.reference.tolist() == [0.2]
    assert found.candidate.tolist() == [1.0]
    assert found.between.tolist() == pytest.approx([math.sqrt(18) / 5])
    assert found.column_reference.tolist() == pytest.approx([0.0, 1 / 25])
    assert found.column_candidate.tolist() == pytest.approx([9 / 25, 16 / 25])
    assert found.floor.tolist() == pytest.approx([2 * 2.0**-24])  # 3 and 4 are exact
    assert found.over_1_ulp == (0.5, 1.0)


def test_the_floor_is_what_storing_loses():
    """1 + 2^-9 lies midway between two bfloat16 numbers: storing it loses 2^-9."""
    truth = rows([1 + 2.0**-9], dtype=torch.float64)
    stored = truth.to(torch.bfloat16)
    found = measure_operator(stored, stored, truth)
    assert found.floor.tolist() == pytest.approx([2.0**-9 / (1 + 2.0**-9)], rel=1e-6)
    assert found.reference.tolist() == found.candidate.tolist()


def test_a_sum_has_the_rounding_of_its_additions():
    """0.41 u √(K / 2): 128 terms make 3.28 u32; one elementary function 2 u32."""
    assert sum_rounding(128) == pytest.approx(3.28 * 2.0**-24)
    assert sum_rounding(1) == 2.0**-23


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_scores_are_no_numbers(dtype):
    """finfo.min on both sides, perhaps plus a score, and -inf on both sides are masks."""
    least = torch.finfo(dtype).min
    a = rows([1.0, least], [2.0, -math.inf], dtype=dtype)
    b = rows([1.0, 0.75 * least], [2.0, -math.inf], dtype=dtype)
    truth = rows([1.0, -1e300], [2.0, -math.inf], dtype=torch.float64)
    found = measure_operator(a, b, truth)
    assert found.reference.tolist() == found.candidate.tolist() == [0.0, 0.0]
    assert found.num_nonfinite == (0, 0)


def test_a_mask_on_one_side_alone_is_a_difference():
    """The candidate hides what the reference sees: that is counted, and no error of the others."""
    a, b = rows([1.0, 2.0]), rows([1.0, torch.finfo(torch.float32).min])
    found = measure_operator(a, b, a.double())
    assert (found.masked.by, found.masked.wrong, found.masked.first) == ((0, 1), (0, 1), (0, 1))
    assert found.candidate.item() == 0


def test_nan_on_one_side_is_counted_there():
    """And a nan of both sides is nobody's."""
    a = rows([1.0, 2.0, math.nan], [1.0, 1.0, 1.0])
    b = rows([math.nan, 2.0, math.nan], [1.0, math.inf, 1.0])
    found = measure_operator(a, b, torch.ones(2, 3, dtype=torch.float64))
    assert found.num_nonfinite == (0, 2)
    assert measure_operator(b, b, torch.ones(2, 3, dtype=torch.float64)).num_nonfinite == (0, 0)


def test_nothing_finite_is_a_count_alone():
    """A side of nan throughout: no row is measured, and the nan are told."""
    found = measure_operator(rows([1.0, 2.0]), rows([math.nan, math.nan]), None)
    assert found.num_nonfinite == (0, 2)
    assert len(found.rows) == len(found.candidate) == len(found.counts) == 0


def test_nothing_to_measure():
    """No elements, or a result of zeros alone."""
    nothing = torch.zeros(0, 4)
    assert measure_operator(nothing, nothing, None) is None
    zeros = torch.zeros(2, 4)
    assert measure_operator(zeros, zeros, zeros.double()) is None


def test_without_a_truth_the_reference_is_right():
    """Its error is 0, and the floor is that of storing, unmeasured."""
    a = torch.ones(3, 8, dtype=torch.bfloat16)
    found = measure_operator(a, 2 * a, None)
    assert found.reference.tolist() == [0.0] * 3
    assert found.candidate.tolist() == found.between.tolist() == pytest.approx([1.0] * 3)
    assert found.floor.tolist() == pytest.approx([0.41 * 2.0**-8] * 3, rel=1e-3)


def test_slices_are_the_heads():
    """(1, 4, 20, 8): four slices of twenty rows; a token's four rows are too few for one."""
    x = torch.ones(1, 4, 20, 8)
    measured = measure_operator(x, x, x.double())
    heads = slices_of([measured], least=16)
    assert [rows.tolist() for rows in heads] == [list(range(n, n + 20)) for n in (0, 20, 40, 60)]


def test_slices_over_forwards_of_different_length():
    """Heads are the same axis of both; the tokens are not. Rows that are left out do not count."""
    x, y = torch.ones(4, 20, 8), torch.ones(4, 10, 8)
    x[2] = 0
    both = [measure_operator(t, t, t.double()) for t in (x, y)]
    assert [len(rows) for rows in slices_of(both, least=16)] == [30, 30, 30]
    assert slices_of([measure_operator(t, t, t.double()) for t in (x[0], y)], least=1) == []


def test_the_ratio_of_few_numbers_may_be_wide():
    """Of 64 numbers nothing more; of two numbers each, F(2, 2) has P(F > f) = 1 / f."""
    assert rare_ratio(64) == rare_ratio(10_000) == 1.0
    alone = rare_ratio(2) / rare_ratio(63)
    assert 300 < alone < 1000
    assert [rare_ratio(n) > rare_ratio(n + 1) for n in range(1, 63)] == [True] * 62


def test_random_errors_stay_below_the_limit_of_few_numbers():
    """Ratios of n random numbers each pass 3 × as seldom as they should."""
    make = torch.Generator().manual_seed(0)
    for n in (1, 2, 4, 8, 32):
        x, y = (torch.randn(100_000, n, generator=make).square().mean(1).sqrt() for _ in "ab")
        beyond = torch.maximum(x / y, y / x) > 3 * rare_ratio(n)
        assert int(beyond.sum()) <= 2, n


def test_a_small_row_of_a_gradient_is_held_against_the_median_row():
    """What its terms' rounding makes of it says nothing; nor does a row that is 0."""
    truth = rows([3.0, 4.0], [6.0, 8.0], [3.0, 4.0], [3e-6, 4e-6], [0.0, 0.0]).double()
    noise = rows([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [5e-6, 0.0], [0.0, 5e-6]).double()
    found = measure_operator(truth, truth + noise, truth, of_gradient=True)
    assert found.candidate.max().item() == pytest.approx(1e-6)
    assert len(found.candidate) == 5
    plain = measure_operator(truth, truth + noise, truth)
    assert plain.candidate.max().item() == pytest.approx(1.0)
    assert len(plain.candidate) == 4


def test_an_error_in_a_few_of_many_like_numbers_is_as_many():
    """Rounding is in proportion to the numbers: what it leaves alone in most is no chance."""
    torch.manual_seed(0)
    truth = torch.randn(8, 64, dtype=torch.float64).sign()
    off = truth.clone()
    off[:, :3] *= 1.01
    assert (measure_operator(truth, off, truth).numbers[1] >= 64).all()
    large = truth.clone()
    large[:, 7] *= 1e4
    off = large.clone()
    off[:, 7] *= 1.01
    assert (measure_operator(large, off, large).numbers[1] < 2).all()
    small = large[:1].clone()  # of one row, in which the large number is small
    small[:, 7] /= 1e4
    off = small.clone()
    off[:, 7] += 1
    known = measure_operator(large, large, large)
    assert measure_operator(small, off, small, before=known.columns).numbers[1] < 2
    assert measure_operator(small, off, small).numbers[1] >= 64

"""Rows whose own norm is no measure of their error."""

import math

import numpy as np
import pytest

from divergence.comparison.measure.rating import ratios_of, small_rows
from divergence.numerics.formats import format_named
from divergence.numerics.pairs import RowMetrics

BF16 = format_named("bfloat16")
WIDTH = 16


def rows_of(norm, diff) -> RowMetrics:
    norm, diff = np.array(norm, float), np.array(diff, float)
    with np.errstate(all="ignore"):
        rel_l2 = np.where(diff == 0, 0.0, diff / norm)
    return RowMetrics(rel_l2=rel_l2, diff=diff, norm=norm, update_norm=None)


def rated(norm, diff, **more):
    rows = rows_of([norm], [diff])
    how = {
        "form": BF16,
        "work": BF16,
        "num_features": WIDTH,
        "in_block": False,
        "inherited": None,
        "beside": np.zeros(1),
    }
    return ratios_of(rows, **how | more)[0]


def test_one_row_that_is_zero_in_the_reference_alone_is_an_error_of_the_usual_size():
    """It is as far off as all of a usual row, and the typical row is not moved."""
    found = rated([4.0, 0.0, 4.0, 4.0], [0.01, 4.0, 0.01, 0.01])
    assert found is not None and found.worst == pytest.approx(1 / found.floor)
    assert found.typical < 1


@pytest.mark.parametrize("diff", [0.0, 1e-4, 1e-45])
def test_a_zero_that_the_other_side_nearly_has_is_none(diff):
    """Equal, of the size of rounding beside the other rows, or flushed to zero."""
    found = rated([4.0, 0.0, 4.0, 4.0], [0.01, diff, 0.01, 0.01])
    assert found is not None and found.worst < 1


def test_a_reference_of_zeros_alone_is_beyond_every_limit():
    """Also where most rows are zero on both sides, as an embedding's gradient is."""
    for diff in ([4.0, 4.0], [4.0, 0.0, 0.0, 0.0]):
        found = rated([0.0] * len(diff), diff)
        assert found is not None and math.isinf(found.typical)
    assert rated([0.0, 0.0], [0.0, 0.0]) is None


def test_small_rows_are_held_against_the_usual_one():
    """A row far below the usual norm has the relative error that it would have of that."""
    rows = small_rows(rows_of([4.0, 1e-3, 0.0, 0.0, 4.0], [0.04, 0.04, 0.04, 0.0, math.nan]), 4.0)
    assert rows.rel_l2[:4] == pytest.approx([0.01, 0.01, 0.01, 0.0])
    assert math.isnan(rows.rel_l2[4])


def test_a_tensor_whose_terms_all_cancel_is_held_against_their_size():
    """Where a sum is rounding alone, its error is relative to the terms."""
    rows = small_rows(rows_of([1e-9], [2e-9]), 0.5)
    assert rows.rel_l2 == pytest.approx([4e-9])


def test_a_reference_of_zeros_stays_an_infinite_error():
    """Beside nothing but zeros no row makes an error small."""
    assert np.isinf(small_rows(rows_of([0.0, 0.0], [1.0, 0.0]), 0.0).rel_l2).tolist() == [
        True,
        False,
    ]


def test_what_all_rows_share_is_in_their_floor():
    """An error that all rows share widens the floor of each."""
    plain, wider = (rated([4.0], [1e-3], shared=shared) for shared in (0.0, 0.01))
    assert plain.floor < 0.01 < wider.floor and wider.typical < plain.typical

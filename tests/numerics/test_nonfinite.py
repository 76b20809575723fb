"""Elements that are no numbers: place, kind and sign count, in each kernel alike."""

import math

import pytest
import torch

from divergence.numerics.pairs import measure_pair
from divergence.numerics.sums import has_compiled

WAYS = [
    pytest.param({"kernel": "numpy"}, id="numpy"),
    pytest.param(
        {"kernel": "compiled"},
        id="compiled",
        marks=pytest.mark.skipif(not has_compiled(), reason="numba is not installed"),
    ),
    pytest.param({"device": torch.device("cpu")}, id="on-device"),
]
FIELDS = ("nonfinite_differ", "reference_alone", "candidate_alone", "mask_alike")


def counted(a, b, **way):
    metrics, _ = measure_pair(a, b, **way)
    return tuple(getattr(metrics, name) for name in FIELDS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (math.nan, math.nan, (0, 0, 0, 0)),
        (math.inf, math.inf, (0, 0, 0, 0)),
        (-math.inf, -math.inf, (0, 0, 0, 0)),
        (math.inf, -math.inf, (1, 0, 0, 0)),
        (math.nan, math.inf, (1, 0, 0, 0)),
        (math.nan, 1.0, (1, 1, 0, 0)),
        (1.0, -math.inf, (1, 0, 1, 0)),
        (-math.inf, -3e38, (1, 1, 0, 1)),
        (-10_240.0, -math.inf, (1, 0, 1, 1)),
        (math.inf, 3e38, (1, 1, 0, 0)),
        (-math.inf, 0.0, (1, 1, 0, 0)),
    ],
)
def test_one_element(way, dtype, x, y, expected):
    """Two elements agree where both are finite, both nan, or both the same infinity."""
    a = torch.linspace(-2, 2, 120).reshape(4, 30).to(dtype)
    b = a.clone()
    a[2, 5], b[2, 5] = x, y
    assert counted(a, b, **way) == expected


@pytest.mark.parametrize("way", WAYS)
def test_other_places_of_equal_counts(way):
    """One nan on each side, but not at one place: two elements that do not agree."""
    a = torch.ones(4, 3000)
    b = a.clone()
    a[1, 2900], b[3, 7] = math.nan, math.nan
    assert counted(a, b, **way) == (2, 1, 1, 0)


def test_the_lowest_float64_in_a_mask():
    """Values that are scaled to be squared are still held against the same number."""
    a = torch.zeros(2, 8, dtype=torch.float64)
    b = a.clone()
    a[0, 0], b[0, 0] = torch.finfo(torch.float64).min, -math.inf
    assert counted(a, b) == (1, 0, 1, 1)


def test_rows_of_padding_do_not_count():
    """What is masked is nobody's result."""
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    b[1] = math.nan
    metrics, _ = measure_pair(a, b, row_mask=torch.tensor([True, False, True]))
    assert metrics.nonfinite_differ == 0
